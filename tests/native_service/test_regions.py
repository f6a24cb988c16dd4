"""Large tensors of Checkpoint calls in shared memory; the fake Triton keeps a region while a call runs on it."""

import asyncio
import errno
import itertools
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from onnx import TensorProto, helper, save
from serving import Served, checkpoint, chunk, meta, tensors_of

from native_service.edge import regions
from native_service.edge.regions import Region
from native_service.proto import inference_pb2 as pb
from native_service.settings import Limits
from nereid_backend.spec import ModelSpec

Serving = Callable[..., Any]
Spec = Callable[..., ModelSpec]

WIDE = 600_000  # floats of a row: 2.3 MiB
PREFIX = f"nereid-test-regions-{os.getpid()}-"
WAIT_S = 20


def left(prefix: str = PREFIX) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{prefix}*"))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert left() == []


def open_regions() -> int:
    """How many regions this process holds, named or not."""
    targets = {str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    return sum(PREFIX in target for target in targets)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def call(channel: Any, values: np.ndarray, timeout: float | None = None) -> Any:
    checkpoint = channel.stream_stream(
        "/inference.Nereid/Checkpoint", pb.CheckpointRequest.SerializeToString, pb.CheckpointResponse.FromString
    )
    return checkpoint(iter(messages("adder", values)), timeout=timeout)


async def refusal(channel: Any, values: np.ndarray) -> grpc.aio.AioRpcError:
    """How the call ends. grpc.aio's client loses the server's status when it comes while a message is being sent."""
    while True:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            assert [response async for response in call(channel, values)]
        if caught.value.details() != "Internal error from Core":
            return caught.value


def regions_of(request: Any) -> list[str]:
    """The names of the regions of a request to Triton."""
    return [t.parameters["shared_memory_region"].string_param for t in (*request.inputs, *request.outputs)]


def messages(model: str, values: np.ndarray, name: str = "") -> list[pb.CheckpointRequest]:
    data, piece = values.tobytes(), 1 << 20
    chunks = [
        chunk(list(values.shape), data[start : start + piece], end=start + piece >= len(data), name=name)
        for start in range(0, len(data), piece)
    ]
    return [meta(model), *chunks]


def joined(responses: Sequence[pb.CheckpointResponse]) -> bytes:
    return b"".join(response.output_chunk.data for response in responses)


def test_large_tensors_are_not_in_the_messages_to_triton(serving: Serving, spec: Spec) -> None:
    async def scenario() -> None:
        async with serving(spec(dims=(WIDE,)), region_prefix=PREFIX) as service:
            values = np.random.default_rng(1).random((2, WIDE), np.float32)
            answer = [response async for response in call(service.channel, values)]
            assert joined(answer) == (values + 1).tobytes()
            [seen] = service.triton.requests
            assert seen.ByteSize() < 1000
            # Let go of on both sides.
            await until(lambda: not service.triton.regions and open_regions() == 0)

    asyncio.run(scenario())


def test_small_tensors_and_those_of_unknown_size_travel_in_the_messages(serving: Serving, spec: Spec) -> None:
    async def scenario() -> None:
        small, unknown = spec("adder"), spec("adder", dims=(-1,))
        for model, values in ((small, np.ones((2, 16), "<f4")), (unknown, np.ones((1, WIDE), "<f4"))):
            async with serving(model, region_prefix=PREFIX) as service:
                assert joined([r async for r in call(service.channel, values)]) == (values + 1).tobytes()
                [seen] = service.triton.requests
                assert all(not output.parameters for output in seen.outputs)
                assert bool(seen.raw_input_contents) == (model is small)

    asyncio.run(scenario())


def test_a_region_is_kept_until_triton_has_ended_with_it(serving: Serving, spec: Spec) -> None:
    async def scenario() -> None:
        room = 3 * 4 * WIDE  # of one call and a half
        async with serving(spec(dims=(WIDE,)), limits=Limits(max_buffered_bytes=room), region_prefix=PREFIX) as service:
            service.triton.behave = service.triton.never
            values = np.ones((1, WIDE), "<f4")
            given_up = call(service.channel, values)
            reading = asyncio.ensure_future(anext(aiter(given_up)))
            await service.triton.entered.wait()
            # As the real one: what runs goes on, whatever became of its caller.
            service.triton.used_regions.update(list(service.triton.regions))
            given_up.cancel()
            await until(lambda: service.triton.cancelled == 1)
            await asyncio.gather(reading, return_exceptions=True)
            service.triton.behave = None
            assert len(service.triton.regions) == open_regions() == 2
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                assert [r async for r in call(service.channel, values)]
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

            service.triton.used_regions.clear()
            await until(lambda: not service.triton.regions and open_regions() == 0)
            assert joined([r async for r in call(service.channel, values)]) == (values + 1).tobytes()

    asyncio.run(scenario())


@pytest.mark.parametrize("missing", ["pwrite", "posix_fallocate"])
def test_a_call_without_room_in_shared_memory_may_come_back(
    serving: Serving, spec: Spec, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    async def scenario() -> None:
        def full(*_: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        room = Limits(max_buffered_bytes=2 * 4 * WIDE + 4096)  # of one call and its messages
        async with serving(spec(dims=(WIDE,)), limits=room, region_prefix=PREFIX) as service:
            values = np.ones((1, WIDE), "<f4")
            with monkeypatch.context() as patched:
                patched.setattr(os, missing, full)
                refused = await refusal(service.channel, values)
            assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "no shared memory left" in (refused.details() or "")
            assert ("retry-after", "1") in tuple(refused.trailing_metadata() or ())
            assert service.triton.requests == []
            assert joined([r async for r in call(service.channel, values)]) == (values + 1).tobytes()
            await until(lambda: open_regions() == 0)

    asyncio.run(scenario())


def test_the_next_call_takes_the_regions_of_one_that_was_answered(
    serving: Serving, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(regions, "_KEPT_S", WAIT_S)
        async with serving(spec(dims=(WIDE,)), region_prefix=PREFIX) as service:
            draw = np.random.default_rng(3)
            for rows in (2, 2, 2):
                values = draw.random((rows, WIDE), np.float32)
                assert joined([r async for r in call(service.channel, values)]) == (values + 1).tobytes()
            # One of half the size is another one: what a call holds is what it needs.
            values = draw.random((1, WIDE), np.float32)
            assert joined([r async for r in call(service.channel, values)]) == (values + 1).tobytes()
            used = [{*regions_of(request)} for request in service.triton.requests]
            assert used[0] == used[1] == used[2]
            assert used[0].isdisjoint(used[3])

    asyncio.run(scenario())


def test_nothing_of_another_call_is_seen_in_a_region_that_is_used_again(
    serving: Serving, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(regions, "_KEPT_S", WAIT_S)
        async with serving(spec(dims=(WIDE,)), region_prefix=PREFIX) as service:
            secret, values = np.full((3, WIDE), 42, "<f4"), np.ones((2, WIDE), "<f4")
            assert joined([r async for r in call(service.channel, secret)]) == (secret + 1).tobytes()
            before = regions_of(service.triton.requests[0])

            async def too_short() -> Any:
                for message in messages("adder", values)[:-1]:
                    yield message

            async def answers_without_rows(request: Any, context: Any) -> Any:
                answer = await service.triton._add_one(request, context)
                answer.outputs[0].shape[0] = 1
                return answer

            checkpoint = service.channel.stream_stream(
                "/inference.Nereid/Checkpoint", pb.CheckpointRequest.SerializeToString, pb.CheckpointResponse.FromString
            )
            with pytest.raises(grpc.aio.AioRpcError, match=r"needs .* bytes, got"):
                assert [r async for r in checkpoint(too_short())]
            service.triton.behave = answers_without_rows
            answer = joined([r async for r in call(service.channel, values)])
            assert {*regions_of(service.triton.requests[-1])} & {*before}
            assert answer == (values[:1] + 1).tobytes()
            place = service.triton.requests[-1].inputs[0].parameters
            assert place["shared_memory_byte_size"].int64_param == values.nbytes

    asyncio.run(scenario())


def test_the_regions_of_a_call_that_failed_are_not_used_again(serving: Serving, spec: Spec) -> None:
    async def scenario() -> None:
        async with serving(spec(dims=(WIDE,)), region_prefix=PREFIX) as service:
            values = np.ones((1, WIDE), "<f4")
            service.triton.behave = service.triton.fail(grpc.StatusCode.INTERNAL, "no")
            assert (await refusal(service.channel, values)).code() is grpc.StatusCode.INTERNAL
            service.triton.behave = None
            assert joined([r async for r in call(service.channel, values)]) == (values + 1).tobytes()
            failed, good = ({*regions_of(request)} for request in service.triton.requests)
            assert failed.isdisjoint(good)

    asyncio.run(scenario())


def test_a_new_triton_is_told_of_regions_that_the_one_before_knew(
    serving: Serving, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(regions, "_KEPT_S", WAIT_S)
        async with serving(spec(dims=(WIDE,)), region_prefix=PREFIX) as service:
            values = np.random.default_rng(4).random((1, WIDE), np.float32)
            assert joined([r async for r in call(service.channel, values)]) == (values + 1).tobytes()
            service.server.restart()  # while the regions are kept
            assert joined([r async for r in call(service.channel, values)]) == (values + 1).tobytes()
            half_way, go_on = asyncio.Event(), asyncio.Event()

            async def upload() -> Any:
                for index, message in enumerate(messages("adder", values)):
                    if index == 2:
                        half_way.set()
                        await go_on.wait()
                    yield message

            checkpoint = service.channel.stream_stream(
                "/inference.Nereid/Checkpoint", pb.CheckpointRequest.SerializeToString, pb.CheckpointResponse.FromString
            )
            answering = checkpoint(upload())
            await half_way.wait()
            await until(lambda: service.half_sent.waiting == 1)
            service.server.restart()  # while one of them is being written again
            go_on.set()
            assert joined([r async for r in answering]) == (values + 1).tobytes()

    asyncio.run(scenario())


def test_what_no_call_holds_is_bounded(serving: Serving, spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(regions, "_KEPT_S", WAIT_S)
        monkeypatch.setattr(Region, "spare_bytes", lambda _: 3 * 4 * WIDE)
        async with serving(spec(dims=(WIDE,)), region_prefix=PREFIX) as service:
            values = np.ones((1, WIDE), "<f4")
            at_once = [call(service.channel, values) for _ in range(4)]
            for each in at_once:
                assert joined([r async for r in each]) == (values + 1).tobytes()
            await until(lambda: open_regions() == 3)

    asyncio.run(scenario())


def test_an_upload_that_is_given_up_leaves_nothing(serving: Serving, spec: Spec) -> None:
    async def scenario() -> None:
        async def half() -> Any:
            for message in messages("adder", np.ones((1, WIDE), "<f4"))[:2]:
                yield message
            await asyncio.sleep(WAIT_S)

        async with serving(spec(dims=(WIDE,)), region_prefix=PREFIX) as service:
            checkpoint = service.channel.stream_stream(
                "/inference.Nereid/Checkpoint", pb.CheckpointRequest.SerializeToString, pb.CheckpointResponse.FromString
            )
            given_up = checkpoint(half())
            await until(lambda: len(left()) == 1)
            given_up.cancel()
            await until(lambda: left() == [] and open_regions() == 0)
            assert service.triton.regions == {}

    asyncio.run(scenario())


def test_callers_with_many_half_sent_tensors_do_not_take_all_descriptors(
    serving: Serving, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async def half() -> Any:
            for message in messages("adder", np.ones((1, WIDE), "<f4"))[:2]:
                yield message
            await asyncio.sleep(WAIT_S)

        monkeypatch.setattr(resource, "getrlimit", lambda _: (12, 12))
        async with serving(spec(dims=(WIDE,)), region_prefix=PREFIX) as service:
            checkpoint = service.channel.stream_stream(
                "/inference.Nereid/Checkpoint", pb.CheckpointRequest.SerializeToString, pb.CheckpointResponse.FromString
            )
            calls = [checkpoint(half()) for _ in range(10)]
            await until(lambda: service.half_sent.waiting == 10 and open_regions() == 3)
            values = np.ones((1, WIDE), "<f4")
            assert joined([r async for r in call(service.channel, values)]) == (values + 1).tobytes()
            assert open_regions() == 3
            for each in calls:
                each.cancel()
            await until(lambda: open_regions() == 0)
            assert joined([r async for r in call(service.channel, values)]) == (values + 1).tobytes()
            assert service.triton.requests[-1].inputs[0].parameters
            await until(lambda: open_regions() == 0)

    asyncio.run(scenario())


def test_a_region_reads_what_was_written_and_no_more() -> None:
    region = Region(f"{PREFIX}one", 10)
    region.append(b"abc")
    region.append(b"defg")
    assert (region.read(0, 4), region.read(4, 100), region.read(7, 100)) == (b"abcd", b"efg", b"")
    region.unname()
    assert left() == []
    region.close()


# The real server.


def write_mixed(path: Path) -> None:
    """Adds 1 to two inputs, of which one is large; a third output is as long as its values say."""
    floats = {"large": WIDE, "small": 4}
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width]) for name, width in floats.items()]
    outputs = [
        helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, ["n", width]) for name, width in floats.items()
    ]
    nodes = [helper.make_node("Add", [name, "one"], [f"{name}_out"]) for name in floats]
    one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])
    graph = helper.make_graph(nodes, "graph", tensors, outputs[::-1], [one])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def write_slow(folder: Path, *, layers: int = 1000) -> None:
    """Sines of sines of a large row: a second or more. No batches: those would be tried while converting."""
    folder.mkdir()
    contract = f"input_shape: [1, {WIDE}]\noutput_shape: [1, {WIDE}]\n"
    (folder / "model_inference.textproto").write_text(contract)
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, WIDE]) for name in ("input", "output")]
    names = ["input", *(f"sine{index}" for index in range(1, layers)), "output"]
    nodes = [helper.make_node("Sin", [a], [b]) for a, b in itertools.pairwise(names)]
    model = helper.make_model(
        helper.make_graph(nodes, "graph", tensors[:1], tensors[1:]),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=9,
    )
    save(model, folder / "model.onnx")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("regions")
    (folder / "models").mkdir()
    write_mixed(folder / "models" / "mixed.onnx")
    write_slow(folder / "models" / "slow")
    server = Served(folder, str(folder / "models"), "--bind", "127.0.0.1:0")
    yield server
    print(server.end()[1])


def mapped(served: Served) -> int:
    """The regions of calls that the server's processes, and the service, have in use."""
    found: set[str] = set()
    for pid in (served.process.pid, *served.descendants()):
        try:
            lines = (Path("/proc") / str(pid) / "maps").read_text().splitlines()
            lines += [str(entry.readlink()) for entry in (Path("/proc") / str(pid) / "fd").iterdir()]
        except OSError:
            continue
        found |= {line.rpartition("/dev/shm/")[2] for line in lines if "/dev/shm/nereid-" in line and "-call-" in line}
    return len(found)


def mixed_messages() -> tuple[dict[str, np.ndarray], list[pb.CheckpointRequest]]:
    draw = np.random.default_rng(2)
    inputs = {"small": draw.random((2, 4), np.float32), "large": draw.random((2, WIDE), np.float32)}
    small, large = (messages("mixed", values, name)[1:] for name, values in inputs.items())
    return inputs, [meta("mixed"), large[0], *small, *large[1:]]


async def unused(served: Served) -> None:
    await until(lambda: mapped(served) == 0)


@pytest.mark.triton
def test_triton_takes_large_and_small_tensors_together(served: Served) -> None:
    inputs, sent = mixed_messages()
    outputs = tensors_of(checkpoint(served, sent))
    expected = {f"{name}_out": ([*values.shape], (values + 1).tobytes()) for name, values in inputs.items()}
    assert outputs == expected
    asyncio.run(unused(served))
    assert left(f"nereid-*-{served.process.pid}-*-call-") == []


@pytest.mark.triton
@pytest.mark.parametrize("ending", ["cancel", "deadline"])
def test_triton_keeps_the_region_of_a_call_that_was_given_up_until_it_has_ended(served: Served, ending: str) -> None:
    async def scenario() -> None:
        values = np.ones((1, WIDE), np.float32)
        async with grpc.aio.insecure_channel(served.state["address"]) as channel:
            method = channel.stream_stream(
                "/inference.Nereid/Checkpoint", pb.CheckpointRequest.SerializeToString, pb.CheckpointResponse.FromString
            )
            deadline_s = 0.5 if ending == "deadline" else None
            given_up = method(iter(messages("slow", values)), timeout=deadline_s)
            reading = asyncio.ensure_future(anext(aiter(given_up)))
            # Without a name any more: Triton has been told and the call runs.
            await until(lambda: mapped(served) == 2 and left(f"nereid-*-{served.process.pid}-*-call-") == [])
            if ending == "cancel":
                await asyncio.sleep(0.1)
                given_up.cancel()
            with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
                await reading
            assert mapped(served) == 2
            await unused(served)
        assert tensors_of(checkpoint(served, messages("slow", values))).keys() == {"output"}

    asyncio.run(scenario())
