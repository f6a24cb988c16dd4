"""Which requests Envoy sends straight to Triton: it reads them as protobuf does, or leaves them to our service."""

import asyncio
import contextlib
import math
import random
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from tritonclient.grpc import service_pb2

from nereid_backend.spec import ModelSpec

Fronting = Callable[..., Any]
Spec = Callable[..., ModelSpec]
INFER = "/inference.GRPCInferenceService/ModelInfer"
RANKS = {"adder": 2, "pair": 4, "loose": None}
"""Dimensions of all inputs of each model together, None where it does not batch."""
SIZES = (0, 1, 2, 16, 127, 128, 2**31 - 1, 2**31, 2**32 + 1, 2**62, -1)
# Both sides of the limit, which is 16 KiB counted a little differently on each way.
SHORT_TEXT, LONG_TEXT = 12_000, 20_000


class Way:
    """Sends bytes to the public address and tells which way they went."""

    def __init__(self, service: Any) -> None:
        self.service = service
        self.call = service.channel.unary_unary(INFER)
        self.served = 0

        async def answer(_request: Any, _context: Any) -> Any:
            return service_pb2.ModelInferResponse()

        service.triton.behave = answer

    async def is_native(self, data: bytes) -> bool:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self.call(data)
        name = "cluster.service.upstream_rq_total"
        before, self.served = self.served, (await self.service.front.admin.counters(f"^{name}$"))[name]
        return self.served == before


def is_for_triton(request: Any) -> bool:
    """Whether Triton 2.51 answers ``request`` as clients expect and comes to no harm."""
    if request.model_name not in RANKS or request.model_version not in ("", "1"):
        return False
    rank, sizes = RANKS[request.model_name], [size for tensor in request.inputs for size in tensor.shape]
    if any(not 0 <= size < 2**31 for size in sizes) or math.prod(filter(None, sizes)) > 2**53:
        return False
    return rank is None or (len(sizes) == rank and 0 not in sizes)


def text_bytes(request: Any) -> int:
    tensors = sum(map(len, request.raw_input_contents)) + sum(t.contents.ByteSize() for t in request.inputs)
    return int(request.ByteSize()) - tensors


def some_request(chance: random.Random) -> Any:
    """A request that is mostly in order."""
    name = chance.choice([*RANKS, *RANKS, "nobody", ""])
    request = service_pb2.ModelInferRequest(model_name=name, model_version=chance.choice(["", "", "1", "2"]))
    dimensions = RANKS.get(name) or chance.randrange(4)
    while dimensions > 0 or chance.random() < 0.1:
        count = min(dimensions, 2) if chance.random() < 0.9 else chance.randrange(3)
        shape = [chance.choice(SIZES[1:6] if chance.random() < 0.95 else SIZES) for _ in range(count)]
        tensor = request.inputs.add(name="input", datatype="FP32", shape=shape)
        dimensions -= max(count, 1)
        if chance.random() < 0.2:
            tensor.parameters["classification"].int64_param = chance.randrange(-5, 5)
        if chance.random() < 0.2:
            tensor.contents.fp32_contents.extend([1.5] * chance.choice([1, 5000]))
        else:
            request.raw_input_contents.append(chance.randbytes(chance.choice([0, 4, 64, 5000, 50_000])))
    if chance.random() < 0.3:
        request.id = "x" * chance.choice([1, 127, 128, SHORT_TEXT, LONG_TEXT])
    if chance.random() < 0.2:
        request.outputs.add(name="output")
    if chance.random() < 0.2:
        request.parameters["priority"].uint64_param = 2**64 - 1
    return request


def damaged(data: bytes, chance: random.Random) -> bytes:
    """``data`` with bytes changed, lost, put in, or with more fields behind it, some of them for the second time."""
    at = chance.randrange(len(data) + 1) if chance.random() < 0.5 else chance.randrange(min(len(data), 60) + 1)
    return chance.choice(
        [
            data[:at],
            data[:at] + chance.randbytes(1) + data[at + 1 :],
            data[:at] + chance.randbytes(chance.randrange(1, 4)) + data[at:],
            data[:at] + b"\xff" * 10 + data[at:],
            data + some_request(chance).SerializeToString(),
            data + b"\x0a\x06nobody",
            data + b"\x12\x012",
            data + chance.randbytes(12),
        ]
    )


def by_hand(*fields: tuple[int, bytes]) -> bytes:
    """A message of fields of bytes, each with its number."""
    return b"".join(bytes([number << 3 | 2]) + _varint(len(value)) + value for number, value in fields)


def _varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


def models(spec: Spec) -> list[ModelSpec]:
    return [spec(), spec("pair", inputs=2), spec("loose", max_batch_size=0)]


def test_a_request_takes_the_way_that_protobuf_s_reading_of_it_calls_for(fronting: Fronting, spec: Spec) -> None:
    chance = random.Random(7)

    async def scenario() -> None:
        async with fronting(*models(spec)) as service:
            way, native = Way(service), 0
            for _ in range(400):
                request = some_request(chance)
                expected = is_for_triton(request) and text_bytes(request) < LONG_TEXT
                assert await way.is_native(request.SerializeToString()) == expected, request
                native += expected
            assert 100 < native < 300

    asyncio.run(scenario())


def test_nothing_that_harms_triton_reaches_it_however_it_is_written(fronting: Fronting, spec: Spec) -> None:
    chance = random.Random(11)

    async def scenario() -> None:
        async with fronting(*models(spec)) as service:
            way, native = Way(service), 0
            for _ in range(800):
                data = damaged(some_request(chance).SerializeToString(), chance)
                if not await way.is_native(data):
                    continue
                try:
                    request = service_pb2.ModelInferRequest.FromString(data)
                except DecodeError:  # texts that are no UTF-8
                    continue
                native += 1
                assert is_for_triton(request), data
                assert text_bytes(request) < LONG_TEXT, data
                assert not len(UnknownFieldSet(request)), data
            assert native > 15

    asyncio.run(scenario())


SIZES_ONE_BY_ONE = by_hand((1, b"input"), (2, b"FP32")) + b"\x18\x01\x18\x10"


BY_HAND = {
    "another order": (by_hand((5, SIZES_ONE_BY_ONE), (7, bytes(64)), (1, b"adder")), True),
    "a dimension more": (by_hand((1, b"adder"), (5, SIZES_ONE_BY_ONE + b"\x18\x01"), (7, bytes(64))), False),
    "a name twice": (by_hand((1, b"adder"), (5, SIZES_ONE_BY_ONE), (7, bytes(64)), (1, b"adder")), False),
    "a field of a later KServe": (by_hand((1, b"adder"), (5, SIZES_ONE_BY_ONE), (9, b"new")), False),
    "such a field of an input": (by_hand((1, b"adder"), (5, SIZES_ONE_BY_ONE + by_hand((9, b"new")))), False),
    "a number for bytes": (by_hand((1, b"adder"), (5, SIZES_ONE_BY_ONE + b"\x38\x01")), False),
    "half a size": (by_hand((1, b"adder"), (5, by_hand((3, b"\x01\x10\xff")))), False),
    "a long name": (by_hand((1, b"adder" + bytes(5000)), (5, SIZES_ONE_BY_ONE)), False),
    "many sizes": (by_hand((1, b"loose"), (5, by_hand((3, b"\x01" * 15_000)))), True),
    "too many sizes": (by_hand((1, b"loose"), *[(5, by_hand((3, b"\x01" * 9_000)))] * 2), False),
    "many parts": (by_hand((1, b"loose"), *[(7, b"")] * 9_000), True),
    "too many parts": (by_hand((1, b"loose"), *[(7, b"")] * 11_000), False),
    "nothing": (b"", False),
}


def test_the_way_of_requests_written_by_hand(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(*models(spec)) as service:
            way = Way(service)
            taken = {what: await way.is_native(data) for what, (data, _) in BY_HAND.items()}
            assert taken == {what: expected for what, (_, expected) in BY_HAND.items()}

    asyncio.run(scenario())


def test_two_messages_in_one_call_are_not_for_triton(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(*models(spec)) as service:
            way, message = Way(service), by_hand((1, b"loose"))
            assert await way.is_native(message)
            way.call = lambda data: service.channel.stream_unary(INFER)(iter([data, data]))
            assert not await way.is_native(message)

    asyncio.run(scenario())
