"""What Checkpoint costs the service in memory: its peak over rest, in tensors of 64 MiB, and the time of a call.

One ``nereid serve`` process holds the service; its regions of shared memory are counted, Triton and Envoy, which are
processes of their own, are not. The model copies its input, so that each call carries a tensor in and one out.

usage: python memory.py [--concurrent 4] [--sequential 8]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from front import MODELS, UNLIMITED, write_identity

sys.path.insert(0, str(Path(__file__).parents[1]))
from serving import Served

from native_service.proto import inference_pb2 as pb

MODEL = "mib64"
TENSOR_BYTES = 4 * MODELS[MODEL]
CHUNK_BYTES = 256 * 1024
# The bar: peak over rest per call in progress, in tensors.
PEAK_AT_MOST = 2.5


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def rest_bytes(pid: int) -> int:
    """What the process holds now; its peak begins again from here."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak_bytes(pid)


class RegionPeak:
    """The most bytes of shared memory that process ``pid`` has held open, looked at every few milliseconds."""

    def __init__(self, pid: int) -> None:
        self._files, self.bytes, self._over = Path(f"/proc/{pid}/fd"), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> RegionPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self.bytes = max(self.bytes, sum(self._sizes()))

    def _sizes(self) -> Iterator[int]:
        for entry in self._files.iterdir():
            with suppress(OSError):
                if str(entry.readlink()).startswith("/dev/shm/"):
                    yield entry.stat().st_blocks * 512


async def messages(shape: Sequence[int]) -> Any:
    yield pb.CheckpointRequest(meta=pb.CheckpointMeta(model_name=MODEL))
    piece = bytes(CHUNK_BYTES)
    for _ in range(TENSOR_BYTES // CHUNK_BYTES):
        yield pb.CheckpointRequest(chunk=pb.TensorChunk(shape=shape, data=piece))


async def checkpoint(channel: Any) -> float:
    """Seconds of one call; what comes back is counted and forgotten."""
    call = channel.stream_stream(
        "/inference.Nereid/Checkpoint", pb.CheckpointRequest.SerializeToString, pb.CheckpointResponse.FromString
    )
    started, received = time.perf_counter(), 0
    async for response in call(messages([1, MODELS[MODEL]])):
        received += len(response.output_chunk.data)
    if received != TENSOR_BYTES:
        raise SystemExit(f"{received} bytes came back, expected {TENSOR_BYTES}")
    return time.perf_counter() - started


async def measure(state: dict[str, Any], concurrent: int, sequential: int) -> bool:
    pid, passed = state["pid"], True

    async def report(label: str, calls: int, work: Awaitable[Any]) -> Any:
        nonlocal passed
        rest = rest_bytes(pid)
        with RegionPeak(pid) as regions:
            result = await work
        growth = (peak_bytes(pid) - rest + regions.bytes) / TENSOR_BYTES
        good = growth <= PEAK_AT_MOST * calls
        passed &= good
        print(
            f"{label:<28}{growth:6.2f} tensors   bar {PEAK_AT_MOST * calls:<6g}{'ok' if good else 'MISSED'}", flush=True
        )
        return result

    async with grpc.aio.insecure_channel(state["address"], options=UNLIMITED) as channel:
        await checkpoint(channel)  # what is allocated once
        gc.collect()
        await report("one call", 1, checkpoint(channel))

        async def one_after_the_other() -> list[float]:
            return [await checkpoint(channel) for _ in range(sequential)]

        times = await report(f"{sequential} calls, one by one", 1, one_after_the_other())
        print(f"{'median time of a call':<28}{statistics.median(times) * 1e3:6.0f} ms")
        await report(
            f"{concurrent} calls at once", concurrent, asyncio.gather(*(checkpoint(channel) for _ in range(concurrent)))
        )
        rest = rest_bytes(pid)
        print(f"{'held afterwards':<28}{rest / 2**20:6.0f} MiB")
    return passed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrent", type=int, default=4)
    parser.add_argument("--sequential", type=int, default=8)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        write_identity(Path(scratch) / MODEL, MODELS[MODEL])
        served = Served(Path(scratch), scratch, "--bind", "127.0.0.1:0")
        try:
            passed = asyncio.run(measure(served.state, options.concurrent, options.sequential))
        finally:
            served.end()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
