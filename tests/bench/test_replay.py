"""The client of peers.py gets what a gRPC library gets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from bench import replay
from fake_native_server import WAIT_S, Faked
from tritonclient.grpc import service_pb2

INFER = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture
def faked() -> Iterator[Faked]:
    server = Faked()
    yield server
    server.stop()


def port(server: Faked) -> int:
    return int(server.address.rpartition(":")[2])


def request(x: np.ndarray) -> bytes:
    message = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[x.tobytes()])
    message.inputs.add(name="x", datatype="FP32", shape=x.shape)
    return message.SerializeToString()


def calls(server: Faked, x: np.ndarray, count: int) -> list[Any]:
    """Answers, or what was raised instead, of calls at the same time on one connection."""

    async def make() -> list[Any]:
        (connection,) = await replay.connect(partial(replay.Grpc, INFER, request(x)), port(server), 1)
        try:
            async with asyncio.timeout(WAIT_S * 3):
                return await asyncio.gather(*(connection.call() for _ in range(count)), return_exceptions=True)
        finally:
            connection.close()

    return asyncio.run(make())


@pytest.mark.parametrize("width", [16, 16 * 1024, 250_000], ids=["one frame", "a window", "many windows"])
def test_answers_are_whole_however_large(faked: Faked, width: int) -> None:
    x = np.random.default_rng(0).standard_normal((1, width)).astype(np.float32)
    for answer in calls(faked, x, 3):
        message = service_pb2.ModelInferResponse.FromString(answer)
        assert message.raw_output_contents[0] == x.tobytes()


def test_a_refusal_is_told_with_its_code_and_words(faked: Faked) -> None:
    faked.infer = lambda request, context: context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    (refusal,) = calls(faked, np.zeros((1, 16), np.float32), 1)
    assert isinstance(refusal, replay.Refused)
    assert str(refusal) == "grpc-status 8: full"


def test_a_server_that_goes_ends_the_call(faked: Faked) -> None:
    faked.infer = lambda request, context: faked.stop()
    (refusal,) = calls(faked, np.zeros((1, 16), np.float32), 1)
    assert isinstance(refusal, replay.Refused)


@pytest.mark.parametrize("pieces", [1, 7])
def test_http_answers_are_read_in_whatever_pieces_they_come(pieces: int) -> None:
    async def talk() -> list[Any]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for status in (b"200 OK", b"200 OK", b"503 Busy"):
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
                whole = b"HTTP/1.1 " + status + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body
                for start in range(0, len(whole), len(whole) // pieces):
                    writer.write(whole[start : start + len(whole) // pieces])
                    await writer.drain()
                    await asyncio.sleep(0)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        (connection,) = await replay.connect(
            partial(replay.Http1, "/m", b"x" * 50), server.sockets[0].getsockname()[1], 1
        )
        got = [await connection.call() for _ in range(2)]
        with pytest.raises(replay.Refused, match="503 Busy"):
            await connection.call()
        connection.close()
        server.close()
        return got

    assert asyncio.run(talk()) == [b"x" * 50] * 2
