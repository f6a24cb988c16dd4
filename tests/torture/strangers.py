"""Clients that mean harm, or know no better, beside those of the load."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import socket
import struct
import time
from collections.abc import Callable
from functools import partial

from endings import infer_request
from ground import Ground, Impossible, Missed, Terms
from hostile_client import (
    CHECKPOINT,
    CONTINUATION,
    DATA,
    END_STREAM,
    FRAME_BYTES,
    HEADERS,
    INFER,
    PREFACE,
    RST,
    SETTINGS,
    STREAM,
    WINDOW_UPDATE,
    Connection,
    connections,
    frame,
    half_send,
    message,
)
from load import LARGE_FLOATS
from scenarios import scenario
from tritonclient.grpc import service_pb2

from native_service.proto import inference_pb2 as pb

MANY, IDLE_S = 10_000, 5.0
TORN_S = 12.0
_TCP_REPAIR = 19


def large_request() -> bytes:
    request = service_pb2.ModelInferRequest(model_name="large")
    request.inputs.add(name="input", datatype="FP32", shape=[1, LARGE_FLOATS])
    request.raw_input_contents.append(bytes(4 * LARGE_FLOATS))
    data: bytes = request.SerializeToString()
    return data


@scenario()
async def clients_never_read(ground: Ground) -> None:
    """Answers of megabytes that nobody takes hold a bounded memory, no permit, and nobody else's calls."""
    address = ground.served.state["address"]

    def ask() -> None:
        with connections(address, 24, settings={4: 0}, reads=False) as made:
            for number, one in enumerate(made):
                path, data = ((INFER, large_request()), (STREAM, infer_request("slow")))[number % 2]
                one.call(1, path)
                one.upload(1, message(data), END_STREAM)
            time.sleep(IDLE_S)

    for _ in range(2):
        await asyncio.to_thread(ask)
    await ground.recovers()


@scenario()
async def uploads_stop_half_way(ground: Ground) -> None:
    """Messages that are announced and never complete hold a bounded memory and no permit; nobody else waits."""
    address = ground.served.state["address"]
    for path in (INFER, CHECKPOINT, STREAM):
        hang_up = await asyncio.to_thread(half_send, address, 40, 12 * 2**20, path)
        await ground.wait_a_while()
        hang_up()
    await ground.recovers()


@scenario()
async def clients_vanish_without_a_word(ground: Ground) -> None:
    """Machines that lose their power in the middle of a call: the server never hears of it; permits come back."""
    address = ground.served.state["address"]

    def vanish() -> None:
        for number in range(60):
            one = Connection(address, reads=False)
            one.call(1, (INFER, CHECKPOINT, STREAM)[number % 3])
            data = message(infer_request("slow"))
            one.upload(1, data if number % 2 else data[:20], END_STREAM if number % 4 == 1 else 0)
            # Closed in this state a connection is forgotten: neither FIN nor RST is sent.
            try:
                one.socket.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
            except PermissionError:
                raise Impossible("no network of its own, in which a connection can be forgotten") from None
            finally:
                one.socket.close()

    await asyncio.to_thread(vanish)
    await ground.recovers()


@scenario(Terms(most_mib=2000))
async def ten_thousand_connections_idle(ground: Ground) -> None:
    """As many as the limits allow: those from before them go on as if there were none, later ones once they leave."""
    address = ground.served.state["address"]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = min(MANY, hard - 512)
    answered = ground.load.ends("unary").get("right", 0)

    def crowd() -> int:
        host, _, port = address.rpartition(":")
        made = []
        try:
            for _ in range(count):
                with contextlib.suppress(OSError):
                    made.append(socket.create_connection((host, int(port)), timeout=5))
            time.sleep(IDLE_S)
            return len(made)
        finally:
            for one in made:
                one.close()

    if await asyncio.to_thread(crowd) < count // 2:
        raise Missed("most connections were not even accepted by the kernel")
    if ground.load.ends("unary").get("right", 0) <= answered:
        raise Missed("nobody else was answered meanwhile")
    await ground.recovers()


def _random_frame(draw: random.Random) -> bytes:
    return frame(
        draw.randrange(12), draw.randrange(256), draw.choice((0, 1, 3, 2**31 - 1)), draw.randbytes(draw.randrange(200))
    )


def _liar(draw: random.Random) -> bytes:
    """A frame that announces another length than it has."""
    claimed = draw.choice((0, 1, 5, FRAME_BYTES + 1, 2**24 - 1))
    return (
        struct.pack(">I", claimed)[1:]
        + struct.pack(">BBI", draw.randrange(10), draw.randrange(256), 1)
        + draw.randbytes(30)
    )


def _torn(connection: Connection, draw: random.Random) -> None:
    path = draw.choice((INFER, STREAM, CHECKPOINT))
    good = infer_request(draw.choice(("slow", "adder", "nobody")))
    if path == CHECKPOINT:
        good = pb.CheckpointRequest(meta=pb.CheckpointMeta(model_name="adder")).SerializeToString()
    cut = bytearray(good)
    for _ in range(draw.randrange(4)):
        cut[draw.randrange(len(cut))] = draw.randrange(256)
    connection.call(1, path)
    connection.upload(1, message(bytes(cut), draw.choice((None, None, 0, 1, 2**31, 2**32 - 1))), END_STREAM)


def _window(connection: Connection, draw: random.Random) -> None:
    connection.call(1, INFER)
    for _ in range(3):
        connection.send(frame(WINDOW_UPDATE, 0, draw.choice((0, 1)), struct.pack(">I", draw.choice((0, 1, 2**31 - 1)))))


def _many_streams(connection: Connection, draw: random.Random) -> None:
    for stream in range(1, 600, 2):
        connection.call(stream, draw.choice((INFER, CHECKPOINT)))
        if draw.random() < 0.5:
            connection.send(frame(RST, 0, stream, bytes(4)))


def _endless_headers(connection: Connection, draw: random.Random) -> None:
    connection.send(frame(HEADERS, 0, 1, connection.headers(INFER)))
    for _ in range(50):
        connection.send(frame(CONTINUATION, 0, 1, draw.randbytes(2000)))


def _huge(connection: Connection, draw: random.Random) -> None:
    connection.call(1, INFER)
    connection.send(frame(DATA, 0, 1, bytes(2**20)))


def _bytes(connection: Connection, draw: random.Random) -> None:
    connection.send(b"".join(draw.choice((_random_frame, _liar))(draw) for _ in range(20)))


def _settings(connection: Connection, draw: random.Random) -> None:
    pairs = b"".join(struct.pack(">HI", draw.randrange(12), draw.getrandbits(32)) for _ in range(10))
    connection.send(frame(SETTINGS, 0, 0, pairs))
    connection.call(1, INFER)


def _no_preface(address: str, draw: random.Random) -> None:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as one:
        one.sendall(
            draw.choice(
                (draw.randbytes(500), PREFACE[:-3], b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + draw.randbytes(90))
            )
        )


KINDS: list[Callable[[Connection, random.Random], None]] = [
    *(_torn, _torn, _window, _many_streams, _endless_headers, _huge, _bytes, _settings)
]


@scenario()
async def frames_are_malformed(ground: Ground) -> None:
    """Whatever comes over a connection ends that connection at most: no process dies, no other caller notices."""
    address, before = ground.served.state["address"], ground.served.descendants()
    end = time.monotonic() + TORN_S

    def attack(draw: random.Random) -> None:
        while time.monotonic() < end:
            _no_preface(address, draw)
            with contextlib.suppress(OSError):
                one = Connection(address)
                try:
                    draw.choice(KINDS)(one, draw)
                    time.sleep(draw.uniform(0, 0.05))
                finally:
                    one.close()

    draws = [random.Random(ground.random.random()) for _ in range(3)]
    await asyncio.gather(*(asyncio.to_thread(partial(attack, draw)) for draw in draws))
    for role in ("envoy", "tritonserver", "adder", "slow", "large"):
        if ground.pid_of(role) not in before:
            raise Missed(f"{role} has died")
    await ground.recovers()
