import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2

from native_service.proto import inference_pb2 as pb
from native_service.settings import Limits
from nereid_backend.spec import ModelSpec

Serving = Callable[..., Any]
Spec = Callable[..., ModelSpec]
R16 = np.arange(16, dtype="<f4")


def checkpoint(channel: Any, messages: Sequence[pb.CheckpointRequest], timeout: float | None = 10) -> Any:
    call = channel.stream_stream(
        "/inference.Nereid/Checkpoint", pb.CheckpointRequest.SerializeToString, pb.CheckpointResponse.FromString
    )
    return call(iter(messages), timeout=timeout)


async def responses(channel: Any, messages: Sequence[pb.CheckpointRequest]) -> list[pb.CheckpointResponse]:
    return [response async for response in checkpoint(channel, messages)]


def request(shape: Sequence[int], values: np.ndarray, name: str = "adder") -> list[pb.CheckpointRequest]:
    return [
        pb.CheckpointRequest(meta=pb.CheckpointMeta(model_name=name)),
        pb.CheckpointRequest(chunk=pb.TensorChunk(shape=shape, data=values.tobytes(), end_of_tensor=True)),
    ]


async def refusal(channel: Any, messages: Sequence[pb.CheckpointRequest]) -> tuple[grpc.StatusCode, str]:
    """How the call ends. grpc.aio's client loses the server's status when it comes while a message is being sent."""
    for _ in range(10):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await responses(channel, messages)
        if not (caught.value.details() or "").startswith("Internal error from Core"):
            break
    return caught.value.code(), caught.value.details() or ""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_run_answers_with_a_text_the_output_and_the_end(serving: Serving, spec: Spec) -> None:
    async def scenario() -> None:
        async with serving(spec()) as service:
            text, output, end = await responses(service.channel, request([1, 16], R16))
            assert text == pb.CheckpointResponse(chunk="inference completed for model 'adder'")
            assert output == pb.CheckpointResponse(
                output_chunk=pb.TensorChunk(
                    tensor_name="output", shape=[1, 16], data=(R16 + 1).tobytes(), end_of_tensor=True
                )
            )
            assert end == pb.CheckpointResponse(done=True, exit_code=0)

    asyncio.run(scenario())


def test_a_bare_row_runs_as_a_batch_of_one(serving: Serving, spec: Spec) -> None:
    async def scenario() -> None:
        async with serving(spec()) as service:
            await responses(service.channel, request([16], R16))
            [seen] = service.triton.requests
            assert (seen.inputs[0].name, seen.inputs[0].datatype, list(seen.inputs[0].shape)) == (
                "input", "FP32", [1, 16],
            )  # fmt: skip

    asyncio.run(scenario())


def test_large_tensors_and_several_outputs_come_in_order(serving: Serving, spec: Spec) -> None:
    async def scenario() -> None:
        model = spec(dims=(100_000,), outputs=2)
        async with serving(model) as service:
            service.triton.outputs = ("output0", "output1")
            values = np.arange(100_000, dtype="<f4")
            data = values.tobytes()
            messages = [pb.CheckpointRequest(meta=pb.CheckpointMeta(model_name="adder"))]
            messages += [
                pb.CheckpointRequest(chunk=pb.TensorChunk(shape=[100_000], data=data[start : start + 50_000]))
                for start in range(0, len(data), 50_000)
            ]
            answer = await responses(service.channel, messages)
            chunks = [r.output_chunk for r in answer if r.HasField("output_chunk")]
            assert [(c.tensor_name, c.chunk_index) for c in chunks] == [
                (name, index) for name in ("output0", "output1") for index in range(7)
            ]
            for offset, name in enumerate(("output0", "output1")):
                joined = b"".join(c.data for c in chunks if c.tensor_name == name)
                assert joined == (values + 1 + offset).tobytes()

    asyncio.run(scenario())


def test_health_check_and_the_list_of_models(serving: Serving, spec: Spec) -> None:
    async def scenario() -> None:
        async with serving(spec("zebra"), spec("ant")) as service:
            health = service.channel.unary_unary(
                "/inference.Nereid/HealthCheck", pb.HealthCheckRequest.SerializeToString,
                pb.HealthCheckResponse.FromString,
            )  # fmt: skip
            view = service.channel.unary_unary(
                "/inference.Nereid/ViewModels", pb.ViewModelsRequest.SerializeToString,
                pb.ViewModelsResponse.FromString,
            )  # fmt: skip
            assert (await health(pb.HealthCheckRequest())).status == "ok"
            assert list((await view(pb.ViewModelsRequest())).model_names) == ["zebra", "ant"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        (request([1, 16], R16, name="nope"), grpc.StatusCode.NOT_FOUND),
        (request([1, 16], R16)[1:], grpc.StatusCode.INVALID_ARGUMENT),
        ([], grpc.StatusCode.INVALID_ARGUMENT),
        (request([1, 15], R16[:15]), grpc.StatusCode.INVALID_ARGUMENT),
        (request([1, 1, 16], R16), grpc.StatusCode.INVALID_ARGUMENT),
        (request([11, 16], np.zeros(176, "<f4")), grpc.StatusCode.INVALID_ARGUMENT),
        (request([1, 16], R16[:15]), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_a_bad_request_never_reaches_triton(
    serving: Serving, spec: Spec, messages: list[pb.CheckpointRequest], code: grpc.StatusCode
) -> None:
    async def scenario() -> None:
        async with serving(spec()) as service:
            assert (await refusal(service.channel, messages))[0] is code
            assert service.triton.requests == []

    asyncio.run(scenario())


def test_a_message_over_the_limit_is_refused(serving: Serving, spec: Spec) -> None:
    async def scenario() -> None:
        async with serving(spec(dims=(1000,)), limits=Limits(max_message_bytes=1000)) as service:
            code, _ = await refusal(service.channel, request([1000], np.zeros(1000, "<f4")))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert service.triton.requests == []
            assert await responses(service.channel, request([1000], np.zeros(1000, "<f4"))[:1] + [
                pb.CheckpointRequest(chunk=pb.TensorChunk(shape=[1000], data=bytes(400))) for _ in range(10)
            ])  # fmt: skip

    asyncio.run(scenario())


@pytest.mark.parametrize("method", ["inference.Nereid/ViewModels", "inference.GRPCInferenceService/ModelInfer"])
def test_bytes_that_are_no_message_are_an_invalid_argument(serving: Serving, spec: Spec, method: str) -> None:
    async def scenario() -> None:
        async with serving(spec()) as service:
            with pytest.raises(grpc.aio.AioRpcError, match="the request is not a valid inference") as caught:
                await service.channel.unary_unary(f"/{method}")(b"\x0a\x7fabc")
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            checkpoint = service.channel.stream_stream("/inference.Nereid/Checkpoint")(iter([b"\x0a\x7fabc"]))
            with pytest.raises(grpc.aio.AioRpcError, match="not a valid inference"):
                [_ async for _ in checkpoint]
            stream = service.channel.stream_stream(
                "/inference.GRPCInferenceService/ModelStreamInfer",
                response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
            )(iter([b"\x0a\x7fabc"]))
            assert [r.error_message async for r in stream] == ["the request is not a valid inference.ModelInferRequest"]

    asyncio.run(scenario())


def test_a_name_of_any_length_makes_a_short_message(serving: Serving, spec: Spec) -> None:
    async def scenario() -> None:
        async with serving(spec(inputs=2)) as service:
            long = "x" * 100_000
            code, text = await refusal(service.channel, request([16], R16, name=long))
            assert (code, len(text) < 200) == (grpc.StatusCode.NOT_FOUND, True)
            messages = request([16], R16)
            messages[1].chunk.tensor_name = long
            code, text = await refusal(service.channel, messages)
            assert (code, len(text) < 200) == (grpc.StatusCode.INVALID_ARGUMENT, True)
            ready = service.channel.unary_unary(
                "/inference.GRPCInferenceService/ModelMetadata", service_pb2.ModelMetadataRequest.SerializeToString
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ready(service_pb2.ModelMetadataRequest(name=long))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    asyncio.run(scenario())


def test_who_finds_the_buffers_full_is_told_when_to_come_back_and_who_sends_too_much_is_not(
    serving: Serving, spec: Spec
) -> None:
    async def scenario() -> None:
        limits = Limits(max_buffered_bytes=100, max_tensor_bytes=64)
        async with serving(spec(), limits=limits) as service:
            waiting = service.channel.stream_stream(
                "/inference.Nereid/Checkpoint", pb.CheckpointRequest.SerializeToString
            )()
            for message in request([1, 16], R16):
                await waiting.write(message)
            for shape, values, hint in (([1, 16], R16, "1"), ([2, 16], np.zeros((2, 16), "<f4"), None)):
                with pytest.raises(grpc.aio.AioRpcError, match=r"server\.limits\.max_\w+_bytes") as caught:
                    await responses(service.channel, request(shape, values))
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert dict(caught.value.trailing_metadata() or ()).get("retry-after") == hint
            waiting.cancel()

    asyncio.run(scenario())


def test_an_output_nobody_reads_is_held_within_the_same_bound(serving: Serving, spec: Spec) -> None:
    async def scenario() -> None:
        async with serving(spec(dims=(-1,)), limits=Limits(max_buffered_bytes=24 << 20)) as service:

            def tensor(mib: int) -> list[pb.CheckpointRequest]:
                piece = pb.CheckpointRequest(chunk=pb.TensorChunk(shape=[mib << 18], data=bytes(2 << 20)))
                return [*request([16], R16)[:1], *[piece] * (mib // 2)]

            unread = service.channel.stream_stream(
                "/inference.Nereid/Checkpoint", pb.CheckpointRequest.SerializeToString, pb.CheckpointResponse.FromString
            )(iter(tensor(16)))
            assert (await unread.read()).chunk
            code, text = await refusal(service.channel, tensor(10))
            assert (code, "max_buffered_bytes" in text) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
            while not (await unread.read()).done:
                pass
            assert await unread.code() is grpc.StatusCode.OK
            assert (await responses(service.channel, tensor(10)))[-1].done

    asyncio.run(scenario())


def test_nothing_runs_before_the_client_has_closed_its_side(serving: Serving, spec: Spec) -> None:
    async def scenario() -> None:
        async with serving(spec()) as service:
            call = service.channel.stream_stream(
                "/inference.Nereid/Checkpoint", pb.CheckpointRequest.SerializeToString,
                pb.CheckpointResponse.FromString,
            )()  # fmt: skip
            for message in request([1, 16], R16):
                await call.write(message)
            await asyncio.sleep(0.1)
            assert service.triton.requests == []
            await call.done_writing()
            assert [r async for r in call][-1].done

    asyncio.run(scenario())


def test_a_model_without_input_runs_after_the_metadata(serving: Serving, spec: Spec) -> None:
    async def scenario() -> None:
        async with serving(spec(inputs=0)) as service:
            answer = await responses(service.channel, request([1], R16)[:1])
            assert answer[-1].done
            [seen] = service.triton.requests
            assert len(seen.inputs) == len(seen.raw_input_contents) == 0

    asyncio.run(scenario())


def test_triton_s_error_passes_through(serving: Serving, spec: Spec) -> None:
    async def scenario() -> None:
        async with serving(spec()) as service:
            service.triton.behave = service.triton.fail(grpc.StatusCode.FAILED_PRECONDITION, "no such luck")
            assert await refusal(service.channel, request([16], R16)) == (
                grpc.StatusCode.FAILED_PRECONDITION, "no such luck",
            )  # fmt: skip

    asyncio.run(scenario())


def test_an_answer_without_a_declared_output_is_an_internal_error(serving: Serving, spec: Spec) -> None:
    async def scenario() -> None:
        async with serving(spec()) as service:
            service.triton.outputs = ("other",)
            code, text = await refusal(service.channel, request([16], R16))
            assert (code, "without its outputs ['output']" in text) == (grpc.StatusCode.INTERNAL, True)

    asyncio.run(scenario())


def test_a_client_that_goes_cancels_the_call_to_triton(serving: Serving, spec: Spec) -> None:
    async def scenario() -> None:
        async with serving(spec()) as service:
            service.triton.behave = service.triton.never
            running = checkpoint(service.channel, request([16], R16), timeout=None)
            await asyncio.wait_for(service.triton.entered.wait(), 5)
            running.cancel()
            await until(lambda: service.triton.cancelled == 1)

    asyncio.run(scenario())


def test_the_client_s_deadline_is_handed_on(serving: Serving, spec: Spec) -> None:
    async def scenario() -> None:
        async with serving(spec()) as service:
            [_ async for _ in checkpoint(service.channel, request([16], R16), timeout=5)]
            [_ async for _ in checkpoint(service.channel, request([16], R16), timeout=None)]
            bounded, unbounded = service.triton.deadlines
            assert bounded is not None
            assert 4 < bounded < 5.5  # gRPC rounds up
            assert unbounded is None or unbounded > 1e6

    asyncio.run(scenario())


def test_a_call_without_time_left_is_not_handed_on(serving: Serving, spec: Spec) -> None:
    async def scenario() -> None:
        async with serving(spec()) as service:
            call = service.channel.stream_stream(
                "/inference.Nereid/Checkpoint", pb.CheckpointRequest.SerializeToString,
                pb.CheckpointResponse.FromString,
            )(timeout=0.3)  # fmt: skip
            for message in request([16], R16):
                await call.write(message)
            await asyncio.sleep(0.295)
            # Whichever side notices first ends the call, each with an exception of its own, some of them private.
            with contextlib.suppress(Exception):
                await call.done_writing()
                [_ async for _ in call]
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert service.triton.requests == []

    asyncio.run(scenario())


def test_stopping_lets_a_running_call_finish(serving: Serving, spec: Spec) -> None:
    async def scenario() -> None:
        async with serving(spec()) as service:
            finish = asyncio.Event()
            add_one = service.triton._add_one

            async def slow(request: Any, context: Any) -> Any:
                await finish.wait()
                return await add_one(request, context)

            service.triton.behave = slow
            running = asyncio.create_task(responses(service.channel, request([16], R16)))
            await asyncio.wait_for(service.triton.entered.wait(), 5)
            stopping = asyncio.create_task(service.native.stop(5))
            await asyncio.sleep(0.1)
            assert (await refusal(service.channel, request([16], R16)))[0] is grpc.StatusCode.UNAVAILABLE
            finish.set()
            assert (await running)[-1].done
            await asyncio.wait_for(stopping, 5)

    asyncio.run(scenario())


def test_health_follows_serving(serving: Serving, spec: Spec) -> None:
    async def scenario() -> None:
        async with serving(spec()) as service:
            stub = health_pb2_grpc.HealthStub(service.channel)

            async def status(name: str) -> int:
                return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status

            names = ("", "inference.Nereid", "inference.GRPCInferenceService", "adder")
            assert [await status(name) for name in names] == [health_pb2.HealthCheckResponse.SERVING] * 4
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await status("nope")
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
            service.native.set_serving(False)
            assert [await status(name) for name in names] == [health_pb2.HealthCheckResponse.NOT_SERVING] * 4

    asyncio.run(scenario())


def test_whoever_watches_health_hears_of_changes_also_after_another_has_gone(serving: Serving, spec: Spec) -> None:
    async def scenario() -> None:
        answers = health_pb2.HealthCheckResponse
        async with serving(spec()) as service:
            stub = health_pb2_grpc.HealthStub(service.channel)
            going, staying, model = (stub.Watch(health_pb2.HealthCheckRequest(service=n)) for n in ("", "", "adder"))
            for watching in (going, staying, model):
                assert (await watching.read()).status == answers.SERVING
            going.cancel()
            await asyncio.sleep(0.2)  # until the server has heard of it
            service.native.set_serving(False)
            async with asyncio.timeout(60):
                assert [(await each.read()).status for each in (staying, model)] == [answers.NOT_SERVING] * 2

    asyncio.run(scenario())
