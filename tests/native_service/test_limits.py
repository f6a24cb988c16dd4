"""What strangers may take of the front: a real Envoy before a fake Triton, and clients that mean harm."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import grpc
import numpy as np
import pytest
from hostile_client import (
    CHECKPOINT,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES,
    HEADERS,
    INFER,
    PING,
    PREFACE,
    RST,
    SETTINGS,
    STREAM,
    Connection,
    connections,
    frame,
    half_send,
    message,
)
from tritonclient.grpc import service_pb2

from native_service.edge import half_sent
from native_service.envoy import limits as envoy_limits
from native_service.settings import Limits
from nereid_backend.spec import ModelSpec

Fronting = Callable[..., Any]
Spec = Callable[..., ModelSpec]
MIB = 1024 * 1024
LIMITS = Limits(max_request_bytes=16 * MIB, max_buffered_bytes=256 * MIB)


def infer_bytes(rows: int = 1) -> bytes:
    request = service_pb2.ModelInferRequest(model_name="adder")
    request.inputs.add(name="input", datatype="FP32", shape=[rows, 16])
    request.raw_input_contents.append(np.arange(16 * rows, dtype="<f4").tobytes())
    data: bytes = request.SerializeToString()
    return data


def memory_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


class Bystander:
    """A client with one connection that asks again and again, and what it met."""

    def __init__(self, address: str, pid: int) -> None:
        self.answers = 0
        self.failures: list[str] = []
        self.peak_mib = 0.0
        self._address, self._pid, self._over = address, pid, Event()
        self._thread = Thread(target=self._ask)

    def _ask(self) -> None:
        with grpc.insecure_channel(self._address) as channel:
            call = channel.unary_unary(INFER, response_deserializer=service_pb2.ModelInferResponse.FromString)
            while not self._over.is_set():
                try:
                    answer = call(infer_bytes(), timeout=30)
                    right = (np.arange(16, dtype="<f4") + 1).tobytes()
                    self.answers += answer.raw_output_contents[0] == right
                except grpc.RpcError as error:
                    self.failures.append(f"{error.code().name} {error.details()}")
                self.peak_mib = max(self.peak_mib, memory_mib(self._pid))
                time.sleep(0.005)

    def __enter__(self) -> "Bystander":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def wait_for(self, more: int) -> None:
        """Until so many further right answers have come."""
        goal, deadline = self.answers + more, time.monotonic() + 60
        while self.answers < goal:
            assert time.monotonic() < deadline, self.failures[-3:]
            time.sleep(0.01)


def attacked(fronting: Fronting, spec: Spec, attack: Callable[[str], None], **options: Any) -> Bystander:
    """What a bystander met while ``attack`` ran against the address, and for a while after it."""
    met: list[Bystander] = []

    async def scenario() -> None:
        async with fronting(spec(), capacity=8, **options) as service:
            pid = service.front.envoy_pid

            def run() -> None:
                with Bystander(service.address, pid) as bystander:
                    bystander.wait_for(20)
                    attack(service.address)
                    bystander.wait_for(50)
                met.append(bystander)

            await asyncio.to_thread(run)
            assert service.front.envoy_pid == pid, "Envoy has died"
            assert (await service.front.admin.permits_in_use())["adder"] == 0

    asyncio.run(scenario())
    return met[0]


HEALTH = "/grpc.health.v1.Health/Check"  # open to everybody, also where there are keys


@pytest.mark.parametrize("path", [INFER, STREAM, CHECKPOINT, HEALTH], ids=["native", "stream", "checkpoint", "health"])
def test_half_sent_messages_take_a_bounded_memory(
    fronting: Fronting, spec: Spec, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """200 uploads of 15 MiB, 3 GB together, where 256 MiB may be held, and twice that before no more is taken."""

    def attack(address: str) -> None:
        hang_up = half_send(address, 200, 15 * MIB, path)
        time.sleep(1)
        hang_up()

    met = attacked(fronting, spec, attack, limits=LIMITS)
    assert met.peak_mib < 800
    refused = {failure for failure in met.failures if envoy_limits.OVERLOADED not in failure}
    assert refused == set()
    # Once in a while, not for every call.
    assert len([record for record in caplog.records if "hold too much memory" in record.getMessage()]) < 10


def test_streams_that_wait_longest_make_room_when_the_service_runs_out_of_memory(
    serving: Callable[..., Any], spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = 0
    monkeypatch.setattr(half_sent, "_anonymous_bytes", lambda: held)
    monkeypatch.setattr(half_sent, "_PATIENCE_S", 0.0)

    async def scenario() -> None:
        nonlocal held
        async with serving(spec()) as service:
            watching = asyncio.create_task(service.half_sent.watch(100))
            streams = []
            for path in (CHECKPOINT, STREAM, CHECKPOINT, STREAM):
                streams.append(service.channel.stream_stream(path)())
                async with asyncio.timeout(20):
                    while service.half_sent.waiting < len(streams):
                        await asyncio.sleep(0.01)
            held = 101
            async with asyncio.timeout(20):
                assert {await call.code() for call in streams[:2]} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            held = 0
            answered = streams[3]
            await answered.write(infer_bytes())
            assert await answered.read()
            assert not watching.done()
            watching.cancel()
            for call in streams:
                call.cancel()

    asyncio.run(scenario())


def test_answers_that_nobody_reads_take_a_bounded_memory(fronting: Fronting, spec: Spec) -> None:
    request = message(infer_bytes(rows=200_000))

    def attack(address: str) -> None:
        # A window of its own kept shut: what it asked for stays in Envoy.
        with connections(address, 40, settings={4: 0}, reads=False) as made:
            for connection in made:
                connection.call(1, INFER)
                connection.upload(1, request, END_STREAM)
            time.sleep(2)

    met = attacked(fronting, spec, attack, limits=LIMITS)
    assert met.peak_mib < 600
    assert {failure.split()[0] for failure in met.failures} <= {"RESOURCE_EXHAUSTED"}


def flood(connection: Connection, data: bytes, bytes_at_most: int = 8 * MIB) -> None:
    """Send ``data`` over and over until the other side has had enough."""
    for _ in range(bytes_at_most // len(data)):
        if connection.closed.is_set() or not connection.send(data):
            break


def pings(connection: Connection) -> None:
    flood(connection, frame(PING, 0, 0, bytes(8)) * 1000)


def settings(connection: Connection) -> None:
    flood(connection, frame(SETTINGS, 0, 0, bytes((0, 4, 0, 1, 0, 0))) * 1000)


def empty_data(connection: Connection) -> None:
    connection.call(1, INFER)
    flood(connection, frame(DATA, 0, 1) * 1000)


def resets(connection: Connection) -> None:
    for stream in range(1, 40_001, 2):
        opened = frame(HEADERS, END_HEADERS, stream, connection.headers(INFER))
        if connection.closed.is_set() or not connection.send(opened + frame(RST, 0, stream, bytes(4))):
            break


def continuations(connection: Connection) -> None:
    connection.send(frame(HEADERS, 0, 1, connection.headers(INFER)))
    flood(connection, frame(CONTINUATION, 0, 1, connection.encoder.encode([("x", "y" * 5000)]) * 3))


def large_headers(connection: Connection) -> None:
    block = connection.headers(INFER, *((f"h{number}", "v" * 2000) for number in range(50)))
    parts = [block[at : at + FRAME_BYTES] for at in range(0, len(block), FRAME_BYTES)]
    connection.send(frame(HEADERS, 0, 1, parts[0]))
    for part in parts[1:]:
        connection.send(frame(CONTINUATION, END_HEADERS if part is parts[-1] else 0, 1, part))


def many_headers(connection: Connection) -> None:
    connection.call(1, INFER, *((f"h{number}", "v") for number in range(5000)))


FLOODS = [pings, settings, empty_data, resets, continuations, large_headers, many_headers]


@pytest.mark.parametrize("kind", FLOODS, ids=lambda kind: kind.__name__)
def test_a_flood_ends_with_its_own_connection(
    fronting: Fronting, spec: Spec, kind: Callable[[Connection], None]
) -> None:
    def attack(address: str) -> None:
        for reads in (True, False):
            with connections(address, 8, reads=reads) as made:
                threads = [Thread(target=kind, args=(connection,)) for connection in made]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(30)

    met = attacked(fronting, spec, attack)
    assert met.failures == []
    assert met.peak_mib < 500


@contextmanager
def raw(address: str, count: int) -> Iterator[list[socket.socket]]:
    host, _, port = address.rpartition(":")
    made = []
    try:
        for _ in range(count):
            with suppress(OSError):
                made.append(socket.create_connection((host, int(port)), timeout=20))
        yield made
    finally:
        for one in made:
            one.close()


def test_headers_that_do_not_end_are_given_up(fronting: Fronting, spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(envoy_limits.PUBLIC, "request_headers_timeout", "1s")

    def attack(address: str) -> None:
        with connections(address, 20) as made:
            for connection in made:
                connection.send(frame(HEADERS, 0, 1, connection.headers(INFER)))
            time.sleep(2)
            for connection in made:  # too late
                connection.send(frame(CONTINUATION, END_HEADERS, 1))
        with raw(address, 20) as made:
            for one in made:
                one.sendall(PREFACE[:10])

    assert attacked(fronting, spec, attack).failures == []


def test_health_answers_while_callers_have_taken_all_connections(
    fronting: Fronting, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envoy_limits, "_MOST_CONNECTIONS", 300)

    async def scenario() -> None:
        async with fronting(spec(), http="127.0.0.1:0") as service:
            with raw(service.address, 600) as made:

                def is_closed(one: socket.socket) -> bool:
                    one.settimeout(0.01)
                    with suppress(OSError):
                        return one.recv(1) == b""
                    return False

                def closed() -> int:
                    time.sleep(0.5)
                    return sum(map(is_closed, made))

                assert await asyncio.to_thread(closed) > 200
                # Our own way through Envoy is not counted.
                reader, writer = await asyncio.open_connection(*service.front.http)
                writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                assert b" 503 " in await reader.readline()  # nothing listens behind it in this test
                writer.close()
                assert (await service.front.admin.permits_in_use()) == {"adder": 0}
            async with asyncio.timeout(20):
                while True:
                    with suppress(grpc.aio.AioRpcError):
                        await service.channel.unary_unary(INFER)(infer_bytes())
                        break
                    await asyncio.sleep(0.05)

    asyncio.run(scenario())


def test_callers_of_health_are_limited_in_number_and_in_time(
    fronting: Fronting, spec: Spec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(envoy_limits, "HEADERS_S", 1)
    caplog.set_level(logging.WARNING)

    async def scenario() -> None:
        async with fronting(spec(), http="127.0.0.1:0") as service:
            with raw(str(service.front.http), 400) as made:
                for one in made:
                    with suppress(OSError):
                        one.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\nX-Slow: ")

                def ends() -> set[bytes]:
                    found = set()
                    for one in made:
                        with suppress(OSError):
                            found.add(one.recv(12))
                    return found

                # Those above the number are closed at once, the others when their time is over.
                assert await asyncio.to_thread(ends) <= {b"", b"HTTP/1.1 408"}
            reader, writer = await asyncio.open_connection(*service.front.http)
            writer.write(b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n")
            with suppress(ConnectionResetError):  # or an end without an answer, when it comes before all is sent
                answer = await reader.readline()
                assert not answer or answer.split()[1] in {b"431", b"400"}
            writer.close()

    asyncio.run(scenario())
