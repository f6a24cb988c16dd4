"""The public address: a real Envoy, our gRPC server, and a fake Triton that can be told to misbehave."""

import asyncio
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2

from native_service import front
from native_service.envoy import files
from native_service.envoy import process as envoy_process
from native_service.envoy.admin import EnvoyAdmin
from native_service.envoy.settings import Admitted
from native_service.proto import inference_pb2 as pb
from native_service.settings import Limits
from nereid_backend.errors import EnvoyUnavailable, SettingsError
from nereid_backend.spec import ModelSpec

Fronting = Callable[..., Any]
Spec = Callable[..., ModelSpec]
R16 = np.arange(16, dtype="<f4")
KSERVE = "/inference.GRPCInferenceService/"
FULL = (grpc.StatusCode.RESOURCE_EXHAUSTED, "model queue full, retry later")


def infer_request(shape: tuple[int, ...] = (1, 16), model: str = "adder", version: str = "") -> Any:
    request = service_pb2.ModelInferRequest(model_name=model, model_version=version, id="an id")
    request.inputs.add(name="input", datatype="FP32", shape=shape)
    request.raw_input_contents.append(np.arange(np.prod(shape), dtype="<f4").tobytes())
    return request


def infer(channel: Any, request: Any = None, **options: Any) -> Any:
    call = channel.unary_unary(
        KSERVE + "ModelInfer",
        service_pb2.ModelInferRequest.SerializeToString,
        service_pb2.ModelInferResponse.FromString,
    )
    return call(infer_request() if request is None else request, **options)


def stream(channel: Any, **options: Any) -> Any:
    return channel.stream_stream(
        KSERVE + "ModelStreamInfer",
        service_pb2.ModelInferRequest.SerializeToString,
        service_pb2.ModelStreamInferResponse.FromString,
    )(**options)


def test_an_admin_socket_that_was_left_answers_nothing_any_more(tmp_path: Path) -> None:
    async def ask() -> None:
        admin = EnvoyAdmin(str(tmp_path / "admin.sock"))
        await admin.close()
        assert not await admin.is_ready()
        with pytest.raises(EnvoyUnavailable, match="has ended"):
            await admin.look()

    asyncio.run(ask())


ROW = pb.CheckpointRequest(chunk=pb.TensorChunk(shape=[16], data=R16.tobytes(), end_of_tensor=True))


def checkpoint(channel: Any, *chunks: pb.CheckpointRequest) -> Any:
    call = channel.stream_stream(
        "/inference.Nereid/Checkpoint", pb.CheckpointRequest.SerializeToString, pb.CheckpointResponse.FromString
    )
    return call(iter([pb.CheckpointRequest(meta=pb.CheckpointMeta(model_name="adder")), *(chunks or [ROW])]))


async def status(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def health(channel: Any, name: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    answer: int = (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status
    return answer


async def all_of(call: Any) -> list[Any]:
    return [response async for response in call]


async def until_permits(service: Any, count: int, model: str = "adder") -> None:
    async with asyncio.timeout(60):
        while await service.permits_in_use(model) != count:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("shape", "direct"), [((1, 16), True), ((2, 16), True), ((16,), False)])
def test_only_a_left_out_batch_dimension_takes_the_way_through_our_service(
    fronting: Fronting, spec: Spec, shape: tuple[int, ...], direct: bool
) -> None:
    async def scenario() -> None:
        async with fronting(spec()) as service:
            answer = await infer(service.channel, infer_request(shape))
            assert answer.raw_output_contents[0] == (np.arange(np.prod(shape), dtype="<f4") + 1).tobytes()
            [seen] = service.triton.requests
            assert list(seen.inputs[0].shape) == list(shape if direct else (1, *shape))
            counters = await service.front.admin.counters(r"^cluster\.service\.upstream_rq_total$")
            assert counters == {"cluster.service.upstream_rq_total": 0 if direct else 1}

    asyncio.run(scenario())


def test_an_ipv6_address_is_served(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec(), bind="[::1]:0") as service:
            assert service.address.startswith("[::1]:")
            assert (await infer(service.channel)).outputs

    asyncio.run(scenario())


def test_a_port_somebody_has_is_one_message(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec()) as service:
            with pytest.raises(SettingsError, match=r"server.bind_addr 127.0.0.1:\d+ cannot be bound"):
                async with fronting(spec(), bind=service.address):
                    pass

    asyncio.run(scenario())


def test_a_port_for_health_that_somebody_has_is_one_message(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec()) as service:
            with pytest.raises(SettingsError, match=f"server.http_addr {service.address} cannot be bound"):
                async with fronting(spec(), http=service.address):
                    pass

    asyncio.run(scenario())


def test_a_stream_nobody_uses_does_not_keep_the_front_from_stopping(
    fronting: Fronting, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "_DRAIN_S", 0.5)

    async def scenario() -> None:
        async with fronting(spec()) as service:
            call = stream(service.channel)
            await call.write(infer_request())
            assert (await call.read()).infer_response.outputs
            await asyncio.wait_for(service.front.stop(), 5)
            assert await call.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(scenario())


@pytest.mark.parametrize("coding", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_requests_are_answered_in_kind(fronting: Fronting, spec: Spec, coding: Any) -> None:
    async def scenario() -> None:
        size = 1 << 18
        async with fronting(spec(dims=(-1,))) as service:
            plain, packed = [], []
            for sizes, compression in ((plain, None), (packed, coding)):
                for ask in (infer, streamed):
                    before = await sent(service)
                    answer = await ask(service.channel, infer_request((1, size)), compression=compression)
                    assert np.frombuffer(answer.raw_output_contents[0], "<f4").tolist() == [1 + n for n in range(size)]
                    sizes.append(await sent(service) - before)
            assert min(plain) > 4 * size > 2 * max(packed)

    async def sent(service: Any) -> int:
        [count] = (await service.front.admin.counters(r"^http\.public\.downstream_cx_tx_bytes_total$")).values()
        return int(count)

    async def streamed(channel: Any, request: Any, **options: Any) -> Any:
        call = stream(channel, **options)
        await call.write(request)
        await call.done_writing()
        return (await call.read()).infer_response

    asyncio.run(scenario())


def test_a_little_that_unpacks_to_a_lot_is_refused(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        limits = Limits(max_request_bytes=4 << 20)
        async with fronting(spec(dims=(-1,)), limits=limits) as service:
            request = infer_request((1, 16))
            request.raw_input_contents[0] = bytes(64 << 20)
            for coding in (grpc.Compression.Gzip, grpc.Compression.Deflate):
                code, text = await status(infer(service.channel, request, compression=coding))
                assert (code, "(server.limits.max_request_bytes)" in text) == (FULL[0], True)
            assert not service.triton.requests

    asyncio.run(scenario())


def test_calls_that_are_cut_short_leave_the_others_of_their_connection_alone(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec(), capacity=1000) as service:
            service.triton.behave = service.triton.never
            patient = infer(service.channel)
            for _ in range(6):
                cut = [infer(service.channel, timeout=0.2) for _ in range(100)]
                assert {call[0] for call in [await status(call) for call in cut]} == {grpc.StatusCode.DEADLINE_EXCEEDED}
            assert not patient.done()
            patient.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (infer_request(model="nobody"), "NOT_FOUND"),
        (infer_request(model="service"), "NOT_FOUND"),
        (infer_request(version="2"), "NOT_FOUND"),
        (infer_request(model=""), "INVALID_ARGUMENT"),
    ],
)
def test_unknown_models_and_versions_never_reach_triton(
    fronting: Fronting, spec: Spec, request_: Any, code: str
) -> None:
    async def scenario() -> None:
        async with fronting(spec()) as service:
            for metadata in (None, (("nereid-cluster", "model_adder"),)):
                assert (await status(infer(service.channel, request_, metadata=metadata)))[0] is grpc.StatusCode[code]
            assert service.triton.requests == []
            assert (await infer(service.channel, infer_request(version="1"))).outputs

    asyncio.run(scenario())


def test_a_caller_cannot_choose_the_way_of_a_call(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec(), capacity=1) as service:
            index = service.channel.unary_unary(
                KSERVE + "RepositoryIndex",
                service_pb2.RepositoryIndexRequest.SerializeToString,
                service_pb2.RepositoryIndexResponse.FromString,
            )
            for cluster in ("triton", "model_adder"):
                # The fake Triton does not know this call: our service has answered.
                answer = await index(service_pb2.RepositoryIndexRequest(), metadata=(("nereid-cluster", cluster),))
                assert [model.name for model in answer.models] == ["adder"]
            service.triton.behave = service.triton.never
            running = infer(service.channel)
            await until_permits(service, 1)
            assert await status(infer(service.channel, metadata=(("nereid-cluster", "triton"),))) == FULL
            running.cancel()

    asyncio.run(scenario())


def test_all_surfaces_share_the_permits_of_a_model(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec(), spec("other"), capacity=3) as service:
            service.triton.behave = service.triton.never
            streaming = stream(service.channel)
            await streaming.write(infer_request())
            running = [infer(service.channel), checkpoint(service.channel), streaming]
            reading = asyncio.ensure_future(all_of(running[1]))
            await until_permits(service, 3)
            assert await status(infer(service.channel)) == FULL
            assert await status(infer(service.channel, infer_request((16,)))) == FULL
            assert await status(all_of(checkpoint(service.channel))) == FULL
            second = stream(service.channel)
            await second.write(infer_request())
            assert (await second.read()).error_message == FULL[1]
            service.triton.behave = None
            assert (await infer(service.channel, infer_request(model="other"))).outputs
            await second.write(infer_request(model="other"))
            assert (await second.read()).infer_response.outputs
            for call in running:
                call.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await until_permits(service, 0)
            assert (await service.failures())["adder", "REJECTED"] == 4

    asyncio.run(scenario())


def test_a_refusal_is_immediate_and_says_when_to_come_back(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec(), capacity=1) as service:
            service.triton.behave = service.triton.never
            running = infer(service.channel)
            await until_permits(service, 1)
            for _ in range(50):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await infer(service.channel)
                assert dict(caught.value.trailing_metadata() or ())["retry-after"] == "1"
            assert not running.done()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await all_of(checkpoint(service.channel))
            assert dict(caught.value.trailing_metadata() or ())["retry-after"] == "1"
            running.cancel()

    asyncio.run(scenario())


def test_a_large_checkpoint_is_refused_in_the_same_words(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec(dims=(-1,)), capacity=1) as service:
            service.triton.behave = service.triton.never
            running = infer(service.channel)
            await until_permits(service, 1)
            halves = [pb.CheckpointRequest(chunk=pb.TensorChunk(shape=[1 << 20], data=bytes(2 << 20)))] * 2
            # Envoy answers while the request is still being sent to it.
            for _ in range(10):
                assert await status(all_of(checkpoint(service.channel, *halves))) == FULL
            running.cancel()

    asyncio.run(scenario())


def test_an_idle_stream_and_a_slow_upload_hold_no_permit(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec(), capacity=1) as service:
            streams = [stream(service.channel) for _ in range(3)]
            for call in streams:
                await call.write(infer_request())
                assert (await call.read()).infer_response.id == ""
            upload = service.channel.stream_stream(
                "/inference.Nereid/Checkpoint", pb.CheckpointRequest.SerializeToString, pb.CheckpointResponse.FromString
            )()
            await upload.write(pb.CheckpointRequest(meta=pb.CheckpointMeta(model_name="adder")))
            assert await service.permits_in_use() == 0
            assert (await infer(service.channel)).outputs
            for call in (*streams, upload):
                call.cancel()

    asyncio.run(scenario())


def test_a_stream_survives_a_bad_request(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec()) as service:
            call = stream(service.channel)
            for request in (infer_request(), infer_request(model="nobody"), infer_request((16,))):
                await call.write(request)
            await call.done_writing()
            first, second, third = await all_of(call)
            assert first.infer_response.outputs
            assert third.infer_response.outputs
            assert "model 'nobody' is not served here" in second.error_message
            assert not second.HasField("infer_response")

    asyncio.run(scenario())


def test_permits_come_back_after_every_ending(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec(), capacity=64) as service:

            async def slow(request: Any, context: Any) -> Any:
                await asyncio.sleep(random.random() * 0.02)
                if random.random() < 0.2:
                    await context.abort(grpc.StatusCode.INTERNAL, "no such luck")
                return await service.triton._add_one(request, context)

            service.triton.behave = slow

            async def one(number: int) -> None:
                start = random.choice([infer, checkpoint, lambda channel: infer(channel, infer_request((16,)))])
                timeout = {"timeout": random.random() * 0.02} if start is infer and number % 3 == 0 else {}
                call = start(service.channel, **timeout)
                work = asyncio.ensure_future(all_of(call) if start is checkpoint else _awaited(call))
                if number % 3 == 1:
                    await asyncio.sleep(random.random() * 0.02)
                    call.cancel()
                await asyncio.gather(work, return_exceptions=True)

            for start in range(0, 1000, 50):
                await asyncio.gather(*(one(number) for number in range(start, start + 50)))
            await until_permits(service, 0)
            service.triton.behave = None
            assert (await infer(service.channel)).outputs

    asyncio.run(scenario())


async def _awaited(call: Any) -> Any:
    return await call


KILLED_CLIENT = """
import sys, grpc
channel = grpc.insecure_channel(sys.argv[1])
call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
calls = [call.future(bytes.fromhex(sys.argv[2])) for _ in range(4)]
print("sent", flush=True)
calls[0].result()
"""


def test_permits_come_back_when_a_client_is_killed(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec(), capacity=4) as service:
            service.triton.behave = service.triton.never
            request = infer_request().SerializeToString().hex()
            client = subprocess.Popen([sys.executable, "-c", KILLED_CLIENT, service.address, request])
            async with asyncio.timeout(60):
                while len(service.triton.requests) < 4:  # a permit is taken a little before Triton hears of the call
                    await asyncio.sleep(0.01)
            await until_permits(service, 4)
            client.kill()
            client.wait()
            await until_permits(service, 0)
            async with asyncio.timeout(60):
                while service.triton.cancelled < 4:
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_permits_come_back_when_triton_dies(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec(), capacity=4) as service:
            service.triton.behave = service.triton.never
            streaming = stream(service.channel)
            await streaming.write(infer_request())
            calls = [infer(service.channel), infer(service.channel, infer_request((16,)))]
            waiting = [asyncio.ensure_future(_awaited(call)) for call in calls]
            waiting.append(asyncio.ensure_future(all_of(checkpoint(service.channel))))
            await until_permits(service, 4)
            await service.server.server.stop(0)
            for error in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(error, grpc.aio.AioRpcError)
                assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert (await streaming.read()).error_message
            await until_permits(service, 0)
            streaming.cancel()

    asyncio.run(scenario())


def test_large_messages_pass_up_to_the_setting(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        limits = Limits(max_request_bytes=32 * 1024 * 1024)
        model = spec(dims=(-1,))
        async with fronting(model, limits=limits) as service, grpc.aio.insecure_channel(
            service.address, options=[("grpc.max_receive_message_length", -1)]
        ) as channel:  # fmt: skip
            for shape in ((1, 7 * 1024 * 1024), (7 * 1024 * 1024,)):
                answer = await infer(channel, infer_request(shape))
                assert len(answer.raw_output_contents[0]) == 28 * 1024 * 1024
            assert len(service.triton.requests) == 2

    asyncio.run(scenario())


def test_what_is_over_the_limit_is_refused_in_the_same_words_on_every_way(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        limits = Limits(max_request_bytes=4 * 1024 * 1024)
        async with fronting(spec(dims=(-1,)), limits=limits) as service:
            text = "the request is over the limit of this server, 4194304 bytes (server.limits.max_request_bytes)"
            refused = grpc.StatusCode.RESOURCE_EXHAUSTED, f"{text}; send less at once"
            small, large, bare = (infer_request(shape) for shape in ((1, 4), (1, 2 << 20), (2 << 20,)))
            for request in (large, bare):
                assert await status(infer(service.channel, request)) == refused
                assert await status(infer(service.channel, request, compression=grpc.Compression.Gzip)) == refused
            for requests in ([large], [small, large]):
                call = stream(service.channel)
                for request in requests:
                    await call.write(request)
                    if request is small:
                        assert (await call.read()).infer_response.outputs
                assert await status(call.read()) == refused
            huge = pb.CheckpointRequest(chunk=pb.TensorChunk(shape=[1 << 20], data=bytes(6 << 20)))
            assert await status(all_of(checkpoint(service.channel, huge))) == refused
            assert len(service.triton.requests) == 1

    asyncio.run(scenario())


def test_a_model_comes_and_goes_without_a_failed_call_or_a_lost_permit(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec(), spec("other"), capacity=16) as service:
            stays = [Admitted(spec(), 16), Admitted(spec("other"), 16)]
            done = False
            answered = 0

            async def load(model: str) -> None:
                nonlocal answered
                while not done:
                    assert (await infer(service.channel, infer_request(model=model))).outputs
                    answered += 1

            loads = [asyncio.create_task(load(model)) for model in ("adder", "other") for _ in range(4)]
            for number in range(6):
                await service.front.set_models([*stays, Admitted(spec(f"guest{number}"), 1)])
                assert (await infer(service.channel, infer_request(model=f"guest{number}"))).outputs
                assert await health(service.channel, f"guest{number}") == health_pb2.HealthCheckResponse.SERVING
                await service.front.set_models(stays)
                assert await health(service.channel, "adder") == health_pb2.HealthCheckResponse.SERVING
                code, _ = await status(infer(service.channel, infer_request(model=f"guest{number}")))
                assert code is grpc.StatusCode.NOT_FOUND
            done = True
            await asyncio.gather(*loads)
            assert answered > 100
            assert await service.front.admin.permits_in_use() == {"adder": 0, "other": 0}

    asyncio.run(scenario())


def test_a_watcher_of_health_is_told_of_every_change(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        answers = health_pb2.HealthCheckResponse
        async with fronting(spec()) as service:
            stub = health_pb2_grpc.HealthStub(service.channel)
            server, model = (stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", "guest"))

            async def told(watch: Any) -> int:
                return (await asyncio.wait_for(watch.read(), 5)).status

            assert (await told(server), await told(model)) == (answers.SERVING, answers.SERVICE_UNKNOWN)
            await service.front.set_models([Admitted(spec(), 2), Admitted(spec("guest"), 2)])
            assert await told(model) == answers.SERVING
            await service.front.set_models([Admitted(spec(), 2)])
            assert await told(model) == answers.SERVICE_UNKNOWN
            await service.front.set_models([Admitted(spec(), 2), Admitted(spec("guest"), 2)])
            assert await told(model) == answers.SERVING
            stopping = asyncio.create_task(service.front.stop())
            assert (await told(server), await told(model)) == (answers.NOT_SERVING, answers.NOT_SERVING)
            for watch in (server, model):
                watch.cancel()
            await stopping


@pytest.mark.parametrize(("wait_s", "is_waited_for"), [(10.0, True), (0.2, False)])
def test_a_call_of_a_model_that_goes_is_waited_for_within_a_bound_and_answered(
    fronting: Fronting, spec: Spec, monkeypatch: pytest.MonkeyPatch, wait_s: float, is_waited_for: bool
) -> None:
    monkeypatch.setattr(envoy_process, "_LAST_CALLS_S", wait_s)

    async def scenario() -> None:
        async with fronting(spec(), spec("other")) as service:
            finish = asyncio.Event()

            async def slow(request: Any, context: Any) -> Any:
                await finish.wait()
                return await service.triton._add_one(request, context)

            service.triton.behave = slow
            calls = [infer(service.channel), infer(service.channel, infer_request((16,)))]
            await until_permits(service, 2)
            going = asyncio.create_task(service.front.set_models([Admitted(spec("other"), 2)]))
            async with asyncio.timeout(60):
                while (await status(infer(service.channel)))[0] is not grpc.StatusCode.NOT_FOUND:
                    await asyncio.sleep(0.01)
            if not is_waited_for:
                await going
            assert not going.done() or not is_waited_for
            finish.set()
            for answer in await asyncio.gather(*(_awaited(call) for call in calls)):
                assert answer.outputs
            await going
            async with asyncio.timeout(60):  # Envoy forgets the counts of a cluster a moment after it has gone
                while await service.front.admin.permits_in_use() != {"other": 0}:
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_a_dead_envoy_is_started_again_at_the_same_address(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec()) as service:
            assert (await infer(service.channel)).outputs
            os.kill(service.front.envoy_pid, signal.SIGKILL)
            async with asyncio.timeout(60):
                while True:
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        await infer(service.channel, wait_for_ready=True)
                        break
            # The way through our service is there again, too.
            assert (await infer(service.channel, infer_request((16,)), wait_for_ready=True)).outputs

    asyncio.run(scenario())


def test_envoy_shares_our_session_but_not_the_signals_of_our_terminal(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec()) as service:
            envoy = service.front.envoy_pid
            assert (os.getsid(envoy), os.getpgid(envoy)) == (os.getsid(0), envoy)

    asyncio.run(scenario())


def test_an_envoy_that_does_not_stay_up_is_given_up(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec()) as service:
            gone = asyncio.create_task(service.front.wait())
            last = None
            async with asyncio.timeout(30):
                while not gone.done():
                    pid = service.front.envoy_pid
                    if pid != last and await service.front.admin.is_ready():
                        os.kill(pid, signal.SIGKILL)
                        last = pid
                    await asyncio.sleep(0.02)
            assert re.fullmatch(r"Envoy ended with code -9 while \w+, for the 6th time within 60 s", gone.result())

    asyncio.run(scenario())


def test_a_running_call_is_answered_when_the_front_stops(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec()) as service:

            async def slow(request: Any, context: Any) -> Any:
                await asyncio.sleep(2)
                return await service.triton._add_one(request, context)

            service.triton.behave = slow
            calls = [infer(service.channel), infer(service.channel, infer_request((16,)))]
            await until_permits(service, 2)
            stopping = asyncio.create_task(service.front.stop())
            await asyncio.sleep(0.3)
            assert await health(service.channel, "") == health_pb2.HealthCheckResponse.NOT_SERVING
            for answer in await asyncio.gather(*(_awaited(call) for call in calls)):
                assert answer.outputs
            await asyncio.wait_for(stopping, 5)
            with pytest.raises(OSError, match="111"):
                await asyncio.open_connection(*service.address.split(":"))

    asyncio.run(scenario())


def test_failed_calls_are_counted_once_by_model_and_reason(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec(), spec("other"), capacity=1) as service:
            assert not any((await service.failures()).values())
            for code in ("INVALID_ARGUMENT", "NOT_FOUND", "UNKNOWN", "INTERNAL"):
                service.triton.behave = service.triton.fail(grpc.StatusCode[code], "no such luck")
                for request in (infer_request(), infer_request((16,))):  # to Triton, and through our service
                    assert (await status(infer(service.channel, request)))[0] is grpc.StatusCode[code]
            service.triton.behave = service.triton.never
            running = infer(service.channel)
            await until_permits(service, 1)
            for call in (infer(service.channel), infer(service.channel, infer_request((16,)))):
                assert await status(call) == FULL
            assert await status(all_of(checkpoint(service.channel))) == FULL
            running.cancel()  # Triton's to count: only it knows whether the model has run
            await until_permits(service, 0)
            bad = pb.CheckpointRequest(chunk=pb.TensorChunk(shape=[15]))
            assert (await status(all_of(checkpoint(service.channel, bad))))[0] is grpc.StatusCode.INVALID_ARGUMENT
            for stranger in ("nobody", "service", 'a"b'):
                code, _ = await status(infer(service.channel, infer_request(model=stranger)))
                assert code is grpc.StatusCode.NOT_FOUND
            counts = {("adder", "OTHER"): 5, ("adder", "BACKEND"): 4, ("adder", "REJECTED"): 3}
            async with asyncio.timeout(60):  # Envoy counts a little after it has answered
                while (await service.failures()) != counts:
                    await asyncio.sleep(0.05)

    asyncio.run(scenario())


def test_the_counts_outlive_envoy(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec(), capacity=1) as service:

            async def refused() -> None:
                service.triton.behave = service.triton.never
                running = infer(service.channel, wait_for_ready=True)
                await until_permits(service, 1)
                assert await status(infer(service.channel)) == FULL
                running.cancel()
                await until_permits(service, 0)

            await refused()
            assert await service.failures() == {("adder", "REJECTED"): 1}
            pid = service.front.envoy_pid
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(60):
                while service.front.envoy_pid == pid or not await service.front.admin.is_ready():
                    await asyncio.sleep(0.01)
            assert await service.failures() == {("adder", "REJECTED"): 1}
            for total in (2, 3):
                await refused()
                assert await service.failures() == {("adder", "REJECTED"): total}

    asyncio.run(scenario())


def test_an_envoy_that_hangs_while_it_checks_changes_nothing(
    fronting: Fronting, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with fronting(spec()) as service:
            monkeypatch.setattr(files, "_VALIDATE_TIMEOUT_S", 0.0)
            with pytest.raises(EnvoyUnavailable, match="did not check"):
                await service.front.set_models([Admitted(spec("guest"), 1)])
            assert (await infer(service.channel)).outputs

    asyncio.run(scenario())


def test_what_envoy_refuses_changes_nothing(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec()) as service:
            with pytest.raises(EnvoyUnavailable, match="refuses the generated configuration"):
                await service.front.set_models([Admitted(spec(), -1)])
            assert (await infer(service.channel)).outputs

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("served_next", "write"), [(["adder", "guest"], 1), (["adder", "guest"], 2), *((["adder"], n) for n in (1, 2, 3))]
)
def test_an_envoy_that_dies_during_a_change_comes_back_with_the_models_from_before(
    fronting: Fronting, spec: Spec, monkeypatch: pytest.MonkeyPatch, served_next: list[str], write: int
) -> None:
    writes, envoys = 0, list[int]()
    original = files.EnvoyFiles.write

    def killing(envoy_files: Any, file: str, content: Any) -> None:
        nonlocal writes
        original(envoy_files, file, content)
        writes += 1
        if writes == write:
            os.kill(envoys[0], signal.SIGKILL)

    async def scenario() -> None:
        async with fronting(spec(), spec("other")) as service:
            pid = service.front.envoy_pid
            envoys.append(pid)
            monkeypatch.setattr(files.EnvoyFiles, "write", killing)
            with pytest.raises(EnvoyUnavailable):
                await service.front.set_models([Admitted(spec(name), 1) for name in served_next])
            async with asyncio.timeout(60):
                while service.front.envoy_pid == pid or not await service.front.admin.is_ready():
                    await asyncio.sleep(0.01)
            for name in ("adder", "other"):
                for shape in ((1, 16), (16,)):
                    assert (await infer(service.channel, infer_request(shape, name), wait_for_ready=True)).outputs
            code, _ = await status(infer(service.channel, infer_request(model="guest")))
            assert code is grpc.StatusCode.NOT_FOUND

    asyncio.run(scenario())


def test_a_full_disk_changes_nothing_and_is_told(
    fronting: Fronting, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = os.open("/dev/full", os.O_WRONLY)  # there is never room in it

    async def scenario() -> None:
        async with fronting(spec()) as service:
            with monkeypatch.context() as full:
                full.setattr(Path, "write_text", lambda _, text: os.write(nowhere, text.encode()))
                with pytest.raises(EnvoyUnavailable, match="No space left on device"):
                    await service.front.set_models([Admitted(spec("guest"), 1)])
                assert (await infer(service.channel)).outputs
            await service.front.set_models([Admitted(spec(), 1), Admitted(spec("guest"), 1)])
            assert (await infer(service.channel, infer_request(model="guest"))).outputs

    asyncio.run(scenario())
    os.close(nowhere)


@pytest.mark.parametrize("text", ["'adder' is not found", "'adder' has no available versions"])
def test_a_served_model_that_triton_does_not_know_yet_is_unavailable(fronting: Fronting, spec: Spec, text: str) -> None:
    """As after a restart of Triton: a call whose tensors took long to come was let in before it."""

    async def scenario() -> None:
        async with fronting(spec()) as service:
            triton = service.triton
            triton.behave = triton.fail(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: {text}")
            for call in (infer(service.channel, infer_request((16,))), all_of(checkpoint(service.channel))):
                assert (await status(call))[0] is grpc.StatusCode.UNAVAILABLE
            code, _ = await status(infer(service.channel, infer_request((16,), "nobody")))
            assert code is grpc.StatusCode.NOT_FOUND

    asyncio.run(scenario())


@pytest.mark.parametrize("shape", [(1, 16), (16,)])  # to Triton, and through our service
def test_a_dead_process_behind_triton_is_unavailable(fronting: Fronting, spec: Spec, shape: tuple[int, ...]) -> None:
    async def scenario() -> None:
        async with fronting(spec()) as service:
            for text, code in (
                ("Stub process 'adder_0_0' is not healthy.", grpc.StatusCode.UNAVAILABLE),
                ("no such luck", grpc.StatusCode.INTERNAL),
            ):
                service.triton.behave = service.triton.fail(grpc.StatusCode.INTERNAL, text)
                assert (await status(infer(service.channel, infer_request(shape))))[0] is code

    asyncio.run(scenario())


def test_a_model_that_is_away_is_unavailable_on_all_surfaces_and_the_others_answer(
    fronting: Fronting, spec: Spec
) -> None:
    async def scenario() -> None:
        answers = health_pb2.HealthCheckResponse
        async with fronting(spec(), spec("other"), capacity=1) as service:
            for away in (True, False):
                await service.front.set_models([Admitted(spec(), 3, away), Admitted(spec("other"), 3)])
                calls = [
                    infer(service.channel),
                    infer(service.channel, infer_request((16,))),
                    all_of(checkpoint(service.channel)),
                ]
                ended = [await status(call) if away else await call for call in calls]
                assert not away or {code for code, _ in ended} == {grpc.StatusCode.UNAVAILABLE}, ended
                assert await health(service.channel, "adder") == (answers.NOT_SERVING if away else answers.SERVING)
                assert await health(service.channel, "other") == answers.SERVING
                assert (await infer(service.channel, infer_request(model="other"))).outputs
            async with asyncio.timeout(60):  # Envoy counts a little after it has answered
                while await service.failures() != {("adder", "BACKEND"): 3}:
                    await asyncio.sleep(0.05)
            assert await service.front.admin.permits_in_use() == {"adder": 0, "other": 0}

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("limit_s", "deadline_s", "handed_on_s"),
    [
        (None, None, None),
        (None, 7, 7),
        (5, None, 5),
        (5, 2, 2),
        (5, 9, 5),
        (0.5, 3600 * 24 * 9, 0.5),
        (3600 * 30, None, 3600 * 30),
    ],
)
@pytest.mark.parametrize("shape", [(1, 16), (16,)])
def test_a_call_may_take_as_long_as_its_client_waits_and_no_longer_than_the_model_may(
    fronting: Fronting,
    spec: Spec,
    limit_s: float | None,
    deadline_s: float | None,
    handed_on_s: float | None,
    shape: Any,
) -> None:
    async def scenario() -> None:
        async with fronting(spec()) as service:
            await service.front.set_models([Admitted(spec(), 2, time_limit_s=limit_s)])
            begun = time.monotonic()
            await infer(service.channel, infer_request(shape), timeout=deadline_s)
            taken_s = time.monotonic() - begun
            (found,) = service.triton.deadlines
            if handed_on_s is None:
                assert found is None or found > 1e6
            else:
                assert 0.9 * handed_on_s - taken_s < found < 1.1 * handed_on_s  # some time has passed; gRPC rounds up

    asyncio.run(scenario())


def test_what_takes_longer_than_the_model_may_is_told_so(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec()) as service:
            await service.front.set_models([Admitted(spec(), 2, time_limit_s=0.3)])
            service.triton.behave = service.triton.never
            code, text = await status(infer(service.channel, infer_request((16,))))
            assert (code, text) == (
                grpc.StatusCode.DEADLINE_EXCEEDED, "model 'adder' took longer than its time limit of 0.3 s",
            )  # fmt: skip
            assert (await status(infer(service.channel)))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
            await until_permits(service, 0)
            await service.front.set_models([Admitted(spec(), 2)])
            assert (await status(infer(service.channel, timeout=0.5)))[0] is grpc.StatusCode.DEADLINE_EXCEEDED

    asyncio.run(scenario())
