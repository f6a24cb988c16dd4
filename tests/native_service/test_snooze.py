"""SnoozeML's calls before a fake Triton: which way they go, in which words they end, what they are counted as."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from snoozeml.exceptions import SnoozeConnectionError, map_grpc_error
from tritonclient.grpc import service_pb2

from native_service.proto import snoozeml_pb2 as pb
from native_service.settings import Limits
from native_service.snooze.casts import from_fp32, to_fp32
from native_service.snooze.messages import read_request
from nereid_backend import dtypes
from nereid_backend.errors import InvalidArgument
from nereid_backend.spec import ModelSpec

Fronting = Callable[..., Any]
Spec = Callable[..., ModelSpec]
INFER, STREAM = "/snoozeml.v1.InferenceService/Infer", "/snoozeml.v1.InferenceService/StreamInfer"
VALUES = np.arange(16, dtype="<f4")


def infer_request(model: str = "adder", shape: tuple[int, ...] = (1, 16), name: str = "input", **fields: Any) -> Any:
    request = pb.ModelInferRequest(model_id=model, **fields)
    values = np.resize(VALUES, shape)
    request.inputs.add(name=name, shape=shape, data_type=pb.DATA_TYPE_FP32, raw_data=values.tobytes())
    return request


def shaped(shape: tuple[int, ...]) -> Any:
    """A request whose input has any shape for its one value."""
    request = pb.ModelInferRequest(model_id="adder")
    request.inputs.add(name="input", shape=shape, raw_data=bytes(4))
    return request


class Way:
    """Sends messages to the public address and tells which way they went."""

    def __init__(self, service: Any) -> None:
        self.service = service
        self.call = service.channel.unary_unary(INFER)

    async def served(self) -> int:
        name = "cluster.service.upstream_rq_total"
        return int((await self.service.front.admin.counters(f"^{name}$"))[name])

    async def ask(self, data: bytes, **call: Any) -> tuple[bool, Any]:
        """Whether Envoy did it alone, and the answer or the error."""
        answer: Any
        before = await self.served()
        try:
            answer = pb.ModelInferResponse.FromString(await self.call(data, **call))
        except grpc.aio.AioRpcError as error:
            answer = error
        return await self.served() == before, answer


def with_both_ways(work: Callable[[Any, Callable[..., Any]], Any], fronting: Fronting, spec: Spec, **more: Any) -> None:
    """``work(service, ask)`` twice: with calls that Envoy turns, and with the same ones for our service."""

    async def scenario(fields: dict[str, Any]) -> None:
        async with fronting(spec(), **more) as service:
            way = Way(service)

            async def ask(**call: Any) -> Any:
                alone, answer = await way.ask(infer_request(**fields).SerializeToString(), **call)
                assert alone is not bool(fields)
                return answer

            await work(service, ask)

    for fields in ({}, {"parameters": {"hint": "any"}}):
        asyncio.run(scenario(fields))


def test_a_plain_call_is_answered_alike_on_both_ways(fronting: Fronting, spec: Spec) -> None:
    async def work(service: Any, ask: Any) -> None:
        answer = await ask()
        assert 0 < answer.duration_ms < 60_000
        (output,) = answer.outputs
        assert (answer.model_id, output.name, list(output.shape)) == ("adder", "output", [1, 16])
        assert output.data_type == pb.DATA_TYPE_FP32
        np.testing.assert_array_equal(np.frombuffer(output.raw_data, "<f4"), VALUES + 1)
        request = service.triton.requests[-1]
        assert (request.model_name, request.inputs[0].datatype, list(request.inputs[0].shape)) == (
            ("adder", "FP32", [1, 16])
        )
        counts = service.front.snooze.counts
        await service.front.counted()
        assert service.front.snooze.counts.succeeded == 1, counts
        service.triton.behave = service.triton.fail(grpc.StatusCode.INTERNAL, "no")
        await ask()
        await service.front.counted()
        assert (service.front.snooze.counts.succeeded, service.front.snooze.counts.failed) == (1, 1)

    with_both_ways(work, fronting, spec)


WORDS = [
    ("UNAVAILABLE", "Exceeds maximum queue size", "RESOURCE_EXHAUSTED", "full", "5"),
    ("UNAVAILABLE", "Request timeout expired", "DEADLINE_EXCEEDED", "in time", None),
    ("INTERNAL", "CUDA failure 2: no more", "RESOURCE_EXHAUSTED", "out of memory", "5"),
    ("UNKNOWN", "std::bad_alloc", "RESOURCE_EXHAUSTED", "out of memory: std::bad_alloc", "5"),
    ("UNAVAILABLE", "CPU memory allocation failed", "RESOURCE_EXHAUSTED", "out of memory", "5"),
    ("UNAVAILABLE", "Request for unknown model: 'adder' is not found", "UNAVAILABLE", "currently loading", None),
    ("INTERNAL", "Stub process 'adder_0' is not healthy.", "UNAVAILABLE", "process has died", None),
    ("UNKNOWN", "a bug", "INTERNAL", "a bug", None),
    ("ALREADY_EXISTS", "again", "INTERNAL", "again", None),
    ("FAILED_PRECONDITION", "nothing there", "INTERNAL", "nothing there", None),
    ("INTERNAL", "a bug", "INTERNAL", "a bug", None),
    ("INVALID_ARGUMENT", "no such word", "INVALID_ARGUMENT", "no such word", None),
    ("NOT_FOUND", "no such key", "NOT_FOUND", "no such key", None),
]
"""What Triton answers, and the code, the words and the retry-after that a client gets."""


def test_what_triton_says_is_told_in_the_words_that_clients_tell_apart(fronting: Fronting, spec: Spec) -> None:
    async def work(service: Any, ask: Any) -> None:
        for code, text, expected, words, hint in WORDS:
            service.triton.behave = service.triton.fail(grpc.StatusCode[code], text)
            error = await ask()
            assert error.code().name == expected, text
            assert words in error.details()
            assert dict(error.trailing_metadata() or ()).get("retry-after") == hint, text

    with_both_ways(work, fronting, spec)


def test_a_full_model_and_a_deadline_end_a_call_alike(fronting: Fronting, spec: Spec) -> None:
    async def work(service: Any, ask: Any) -> None:
        service.triton.behave = service.triton.never
        request = infer_request(client_timeout_ms=60_000).SerializeToString()
        waiting = asyncio.ensure_future(service.channel.unary_unary(INFER)(request))
        await service.triton.entered.wait()
        error = await ask()
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(error.trailing_metadata())["retry-after"] == "5"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        while await service.permits_in_use():
            await asyncio.sleep(0.01)
        error = await ask(timeout=0.5)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    with_both_ways(work, fronting, spec, capacity=1)


def test_a_stream_is_read_no_further_than_its_client_may_be_ahead(fronting: Fronting, spec: Spec) -> None:
    most, count = 16, 40

    async def scenario() -> None:
        async with fronting(spec(), capacity=64) as service:
            go_on = asyncio.Event()

            async def answer(request: Any, _context: Any) -> Any:
                await go_on.wait()
                response = service_pb2.ModelInferResponse(model_name="adder")
                response.outputs.add(name="output", datatype="FP32", shape=request.inputs[0].shape)
                response.raw_output_contents.append(request.raw_input_contents[0])
                return response

            service.triton.behave = answer
            stream = service.channel.stream_stream(STREAM)
            answers = stream(iter([infer_request().SerializeToString()] * count))
            while len(service.triton.requests) < most:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            assert len(service.triton.requests) == most
            go_on.set()
            assert len([each async for each in answers]) == count
            assert service.front.snooze.counts.succeeded == count
            # A stream that is given up leaves nothing behind.
            go_on.clear()
            answers = stream(iter([infer_request().SerializeToString()] * count))
            while len(service.triton.requests) < most + count:
                await asyncio.sleep(0.01)
            answers.cancel()
            while await service.permits_in_use() or (await service.front.counted()).buffered_bytes:
                await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_calls_hold_no_more_together_than_the_server_lets_them(fronting: Fronting, spec: Spec) -> None:
    limits = Limits(max_buffered_bytes=100)

    async def scenario() -> None:
        async with fronting(spec(), limits=limits) as service:
            data = infer_request(shape=(10, 16), parameters={"hint": "any"}).SerializeToString()
            _, error = await Way(service).ask(data)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert dict(error.trailing_metadata())["retry-after"] == "5"
            with pytest.raises(grpc.aio.AioRpcError, match="max_buffered_bytes"):
                _ = [each async for each in service.channel.stream_stream(STREAM)(iter([data]))]

    asyncio.run(scenario())


def test_a_client_whose_server_goes_in_the_middle_of_a_call_is_told_that_it_has_gone(
    fronting: Fronting, spec: Spec
) -> None:
    async def scenario() -> None:
        async with fronting(spec()) as service:
            service.triton.behave = service.triton.never
            call = service.channel.unary_unary(INFER)(infer_request().SerializeToString())
            await service.triton.entered.wait()
            os.kill(service.front.envoy_pid, signal.SIGKILL)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert type(map_grpc_error(caught.value)) is SnoozeConnectionError

    asyncio.run(scenario())


BYTES = (0, 1, 2, 10, 16, 18, 24, 34, 127, 128, 255)


def mutated(message: bytes, chance: random.Random) -> bytes:
    """``message`` with some of its bytes others, gone or more."""
    data = bytearray(message)
    for _ in range(chance.randint(1, 2)):
        at, gone = chance.randrange(len(data)), chance.randint(0, 2)
        more = chance.choice((gone, gone, chance.randint(0, 2)))
        data[at : at + gone] = bytes(chance.choices(BYTES, k=more))
    return bytes(data)


def strangers() -> list[Any]:
    """Requests that are for our service, good ones and bad ones."""
    twice, half = infer_request(), infer_request()
    twice.inputs.append(twice.inputs[0])
    half.inputs[0].data_type = pb.DATA_TYPE_FP16
    shapes = ((16,), (1, 4, 4), (1, 15), (11, 16))
    return [
        *(infer_request(shape=shape) for shape in shapes),
        *(infer_request("nobody"), infer_request(name="else"), twice, half, pb.ModelInferRequest(model_id="adder")),
        *(infer_request(client_timeout_ms=5000), infer_request(parameters={"typed": "true"})),
        infer_request(parameters={"hint": "x" * 70_000}),
    ]


def test_envoy_turns_only_what_our_service_would_read_the_same_way(fronting: Fronting, spec: Spec) -> None:
    chance = random.Random(7)

    async def scenario() -> None:
        async with fronting(spec()) as service:
            way, seen = Way(service), list[Any]()

            async def echo(request: Any, _context: Any) -> Any:
                seen.append(request)
                response = service_pb2.ModelInferResponse(model_name="adder")
                response.outputs.add(name="output", datatype="FP32", shape=request.inputs[0].shape)
                response.raw_output_contents.append(request.raw_input_contents[0])
                return response

            service.triton.behave = echo
            for rows in (1, 10):
                alone, answer = await way.ask(infer_request(shape=(rows, 16)).SerializeToString())
                assert alone
                assert answer.outputs[0].raw_data == np.resize(VALUES, (rows, 16)).tobytes()
            for stranger in strangers():
                assert not (await way.ask(stranger.SerializeToString()))[0], stranger
            turned = 0
            for _ in range(300):
                seen.clear()
                data = mutated(infer_request().SerializeToString(), chance)
                if (await way.ask(data))[0]:
                    turned += 1
                    read, (request,) = read_request(data), seen
                    ((name, array),) = read.inputs().items()
                    assert (read.timeout_s, read.parameters) == (None, {})
                    assert (request.model_name, request.inputs[0].name) == (read.model, name)
                    assert tuple(request.inputs[0].shape) == array.shape
                    assert request.raw_input_contents[0] == array.tobytes()
            assert turned > 20  # where only values are others

    asyncio.run(scenario())


@given(st.randoms(use_true_random=False))
def test_a_made_up_message_is_read_as_protobuf_reads_it(chance: random.Random) -> None:
    data = mutated(infer_request(client_timeout_ms=250, parameters={"typed": "true"}).SerializeToString(), chance)
    try:
        read = read_request(data)
        inputs, typed = read.inputs(), read.typed
    except InvalidArgument:
        return
    message = pb.ModelInferRequest.FromString(data)
    assert read.model == message.model_id
    assert (typed, read.timeout_ms or 0) == (message.parameters.get("typed") == "true", message.client_timeout_ms)
    assert list(inputs) == [tensor.name for tensor in message.inputs]
    for array, tensor in zip(inputs.values(), message.inputs, strict=True):
        assert (list(array.shape), array.tobytes()) == (list(tensor.shape), tensor.raw_data)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (infer_request(parameters={str(n): "" for n in range(4000)}), "more than 10000 fields"),
        (infer_request(parameters={"hint": "x" * 20_000}), "more than 16384 bytes of names"),
        (infer_request("x" * 20_000), "more than 16384 bytes of names"),
        (shaped((1,) * 11_000), "more than 10000 fields"),
        (shaped((1,) * 33), "at most 32 dimensions"),
    ],
    ids=["parameters", "a text", "a name", "sizes", "dimensions"],
)
def test_a_request_of_many_small_parts_is_refused_before_it_costs_anything(request_: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        read_request(request_.SerializeToString()).inputs()


INTEGERS = ["u8", "u16", "u32", "u64", "i8", "i16", "i32", "i64"]


@given(st.sampled_from(INTEGERS), st.lists(st.floats(width=32), min_size=1, max_size=4))
def test_only_whole_numbers_in_range_become_integers(token: str, values: list[float]) -> None:
    element, array = dtypes.by_token(token), np.array(values, np.float32)
    bounds = np.iinfo(element.numpy)
    whole = all(value.is_integer() and bounds.min <= int(value) <= bounds.max for value in map(float, array))
    if whole:
        cast = from_fp32(array, element, "here")
        assert [int(value) for value in cast] == [int(value) for value in array]
        np.testing.assert_array_equal(to_fp32(cast), array)
    else:
        with pytest.raises(InvalidArgument, match=f"here takes {element.kserve}"):
            from_fp32(array, element, "here")


def test_floats_are_rounded_and_what_does_not_fit_is_refused() -> None:
    array = np.array([0.1, -2.5, np.nan, np.inf, 60_000], np.float32)
    for token in ("f16", "bf16", "f64"):
        element = dtypes.by_token(token)
        cast = from_fp32(array, element, "here")
        assert cast.dtype == element.numpy
        np.testing.assert_allclose(to_fp32(cast), array, rtol=2**-8)
    with pytest.raises(InvalidArgument, match="too large"):
        from_fp32(np.array([70_000], np.float32), dtypes.by_token("f16"), "here")
    assert to_fp32(np.array([1e300, 2.0])).tolist() == [np.inf, 2.0]
    assert from_fp32(np.array([0, 1], np.float32), dtypes.by_token("bool"), "here").tolist() == [False, True]
    with pytest.raises(InvalidArgument, match="send 0 and 1"):
        from_fp32(np.array([0.5], np.float32), dtypes.by_token("bool"), "here")
