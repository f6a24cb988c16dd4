"""Calls that end in every way there is, and whether their permits come back: success, error, cancel, deadline, a
client process that is killed; unary, streamed and Checkpoint.

The suite runs a hundred and fifty of them. As a script a thousand, against a server of its own:

usage: python endings.py [--calls 1000] [--seed 1]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from onnx import TensorProto, helper, save
from serving import Served, chunk, meta
from tritonclient.grpc import service_pb2

from native_service.proto import inference_pb2 as pb

WIDTH, CAPACITY = 16, 8
AT_ONCE, CALLS_OF_A_KILLED_CLIENT = 16, 4
LONGEST_WAIT_S = 0.04
GONE_AT_LAST_S = 20
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
CHECKPOINT = "/inference.Nereid/Checkpoint"
FULL = grpc.StatusCode.RESOURCE_EXHAUSTED

CLIENT_TO_KILL = """
import sys, grpc
channel = grpc.insecure_channel(sys.argv[1])
call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
futures = []
print("ready", flush=True)
while True:
    futures = [call.future(bytes.fromhex(sys.argv[2])) for _ in range(int(sys.argv[3]))]
    for future in futures:
        future.exception()
"""


def write_slow(path: Path, *, layers: int = 6, hidden: int = 1200) -> None:
    """A model of some milliseconds that takes rows of ``WIDTH`` and adds 1 to their sum."""
    shapes = {"first": (WIDTH, hidden), "middle": (hidden, hidden), "last": (hidden, 1)}
    nodes, tensors = [], []
    for name, shape in shapes.items():
        tensors.append(helper.make_tensor(f"{name}_shape", TensorProto.INT64, [2], shape))
        one_over = helper.make_tensor("value", TensorProto.FLOAT, [1], [1.0 / hidden if name != "first" else 1.0])
        nodes.append(helper.make_node("ConstantOfShape", [f"{name}_shape"], [name], value=one_over))
    weights = ["first", *["middle"] * layers, "last"]
    names = ["input", *(f"hidden{index}" for index in range(len(weights)))]
    nodes += [
        helper.make_node("MatMul", [source, weight], [target])
        for source, weight, target in zip(names, weights, names[1:], strict=False)
    ]
    tensors.append(helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0]))
    nodes.append(helper.make_node("Add", [names[-1], "one"], ["output"]))
    described = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width])
        for name, width in (("input", WIDTH), ("output", 1))
    ]
    graph = helper.make_graph(nodes, "graph", described[:1], described[1:], tensors)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def infer_request(model: str, shape: Sequence[int] = (1, WIDTH)) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="input", datatype="FP32", shape=shape)
    request.raw_input_contents.append(bytes(4 * WIDTH))
    data: bytes = request.SerializeToString()
    return data


class Endings:
    """Random calls to one model; ``outcomes`` counts how they ended."""

    def __init__(self, channel: Any, address: str, model: str, seed: int) -> None:
        self._channel, self._address, self._model = channel, address, model
        self._random = random.Random(seed)
        self.outcomes: Counter[str] = Counter()

    async def run(self, calls: int, killed_clients: int) -> None:
        """``calls`` in all, those of the killed clients among them."""
        alone = calls - killed_clients * CALLS_OF_A_KILLED_CLIENT
        turns = asyncio.Semaphore(AT_ONCE)

        async def one() -> None:
            async with turns:
                await self._one()

        await asyncio.gather(*(one() for _ in range(alone)), *(self._kill_client() for _ in range(killed_clients)))

    async def _one(self) -> None:
        start = self._random.choice(
            [self._unary, self._bad_unary, self._without_batch, self._checkpoint, self._half_checkpoint, self._stream]
        )
        timeout = self._random.choice([None, None, self._random.uniform(0.001, LONGEST_WAIT_S)])
        call, work = start(timeout)
        task = asyncio.ensure_future(work)
        if self._random.random() < 0.4:
            await asyncio.sleep(self._random.uniform(0, LONGEST_WAIT_S))
            call.cancel()
        try:
            await task
        except grpc.aio.AioRpcError as error:
            # A deadline that passes while the library writes: its own words, nothing of ours.
            own = error.details() == "Internal error from Core"
            self.outcomes["OWN" if own else error.code().name] += 1
        except (asyncio.CancelledError, asyncio.InvalidStateError):
            self.outcomes["CANCELLED"] += 1
        else:
            self.outcomes["OK"] += 1

    def _unary(self, timeout: float | None, shape: Sequence[int] = (1, WIDTH)) -> tuple[Any, Any]:
        call = self._channel.unary_unary(INFER)(infer_request(self._model, shape), timeout=timeout)
        return call, _answer(call)

    def _bad_unary(self, timeout: float | None) -> tuple[Any, Any]:
        return self._unary(timeout, (1, WIDTH - 1))

    def _without_batch(self, timeout: float | None) -> tuple[Any, Any]:
        return self._unary(timeout, (WIDTH,))

    def _checkpoint(self, timeout: float | None) -> tuple[Any, Any]:
        messages = [meta(self._model), chunk([1, WIDTH], bytes(4 * WIDTH))]
        call = self._channel.stream_stream(CHECKPOINT, pb.CheckpointRequest.SerializeToString)(
            iter(messages), timeout=timeout
        )
        return call, _all_answers(call)

    def _half_checkpoint(self, timeout: float | None) -> tuple[Any, Any]:
        async def messages() -> AsyncIterator[Any]:
            yield meta(self._model)
            yield chunk([1, WIDTH], bytes(2 * WIDTH), end=False)
            await asyncio.sleep(self._random.uniform(0, LONGEST_WAIT_S))
            call.cancel()

        call = self._channel.stream_stream(CHECKPOINT, pb.CheckpointRequest.SerializeToString)(
            messages(), timeout=timeout
        )
        return call, _all_answers(call)

    def _stream(self, timeout: float | None) -> tuple[Any, Any]:
        requests = [infer_request(self._model), infer_request(self._model, (WIDTH - 1,)), infer_request(self._model)]
        call = self._channel.stream_stream(STREAM)(iter(requests), timeout=timeout)
        return call, _all_answers(call)

    async def _kill_client(self) -> None:
        arguments = (self._address, infer_request(self._model).hex(), str(CALLS_OF_A_KILLED_CLIENT))
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CLIENT_TO_KILL, *arguments), stdout=asyncio.subprocess.PIPE
        )
        assert client.stdout is not None
        await client.stdout.readline()
        await asyncio.sleep(self._random.uniform(0.05, 0.3))
        client.kill()
        await client.wait()
        self.outcomes["KILLED"] += CALLS_OF_A_KILLED_CLIENT


async def _answer(call: Any) -> None:
    await call


async def _all_answers(call: Any) -> None:
    async for _ in call:
        pass


@contextmanager
def stopped(served: Served, model: str) -> Iterator[None]:
    """The process of ``model`` stands still: its calls run for as long as the caller likes."""
    ending = f"/{model}/1/model.py\0".encode()
    (pid,) = (
        pid for pid in served.descendants() if ending in (Path("/proc") / str(pid) / "cmdline").read_bytes()
    )  # fmt: skip
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def all_permits_taken(channel: Any, served: Served, model: str) -> AsyncIterator[list[asyncio.Future[None]]]:
    """The model stands still and one call more than it has permits was made: at least one is refused, nothing runs."""
    call = channel.unary_unary(INFER)
    with stopped(served, model):
        asked = [
            asyncio.ensure_future(_answer(call(infer_request(model), timeout=GONE_AT_LAST_S)))
            for _ in range(CAPACITY + 1)
        ]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        yield asked
    await asyncio.gather(*asked, return_exceptions=True)


async def permits(channel: Any, served: Served, model: str) -> int:
    """How many calls are taken at once, found by asking for one more than is there; all that were taken succeed."""
    async with all_permits_taken(channel, served, model) as asked:
        await asyncio.sleep(0.2)
    refused = [error for call in asked if (error := call.exception()) is not None]
    assert all(isinstance(error, grpc.aio.AioRpcError) and error.code() is FULL for error in refused), refused
    return len(asked) - len(refused)


async def until_full(channel: Any, served: Served, model: str) -> int:
    """The permits there are once what was cancelled last has ended in the model too; at most ``CAPACITY``."""
    deadline = time.monotonic() + GONE_AT_LAST_S
    while (found := await permits(channel, served, model)) < CAPACITY and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    return found


async def refusal_times_ms(channel: Any, served: Served, model: str, count: int) -> list[float]:
    """How long it takes to be told that there is no permit, ``count`` times."""
    call, times = channel.unary_unary(INFER), []
    async with all_permits_taken(channel, served, model):
        for _ in range(count):
            started = time.perf_counter()
            with suppress(grpc.aio.AioRpcError):
                await call(infer_request(model), timeout=GONE_AT_LAST_S)
            times.append((time.perf_counter() - started) * 1e3)
    return times


def serve_slow(folder: Path) -> Served:
    (folder / "models").mkdir()
    write_slow(folder / "models" / "slow.onnx")
    (folder / "nereid.yaml").write_text(
        "server: {bind_addr: '127.0.0.1:0', ml_backends_path: models}\n"
        f"models: [{{name: slow, device: cpu, queue_capacity: {CAPACITY}, options: {{max_batch_size: 8}}}}]\n"
    )
    return Served(folder, "--config", str(folder / "nereid.yaml"))


async def measure(served: Served, calls: int, seed: int, say: Callable[[str], None]) -> bool:
    address = served.state["address"]
    async with grpc.aio.insecure_channel(address) as channel:
        endings = Endings(channel, address, "slow", seed)
        started = time.monotonic()
        await endings.run(calls, killed_clients=max(2, calls // 50))
        say(f"{calls} calls in {time.monotonic() - started:.1f} s: {dict(endings.outcomes.most_common())}")
        found = await until_full(channel, served, "slow")
        say(f"permits afterwards: {found} of {CAPACITY}")
        times = sorted(await refusal_times_ms(channel, served, "slow", 500))
        say(f"refusal: median {statistics.median(times):.2f} ms, 99 % within {times[-5]:.2f} ms (bar 5 ms)")
    return found == CAPACITY and statistics.median(times) <= 5


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        served = serve_slow(Path(scratch))
        try:
            passed = asyncio.run(measure(served, options.calls, options.seed, partial(print, flush=True)))
        finally:
            served.end()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
