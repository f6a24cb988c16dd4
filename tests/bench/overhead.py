"""What the runtime costs: its import, and the digits model against a hand-written model.py around the same engine.

Both models are loaded in one tritonserver and measured in turn, window by window (A B B A ...), so that a drift of the
machine falls on both. The client is one asyncio process with a raw gRPC stub, request bytes made once, answers not
parsed.

usage: python overhead.py [--seconds 0.5] [--repeats 40]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from converters.convert import convert
from native_service.triton import embedded as embedded_triton
from native_service.triton.process import TritonServer

HERE = Path(__file__).resolve().parent
OURS, MINIMAL = "digits", "minimal"
CONCURRENCIES = (1, 32)
# The bars: ours / minimal.
P50_AT_MOST, RATE_AT_LEAST = 1.1, 0.95
IMPORT_BELOW_MS = 100


def prepare(folder: Path) -> Path:
    subprocess.run([sys.executable, HERE.parent / "demo" / "make_models.py", folder / "bundles"], check=True)
    repository = folder / "repository"
    for name in (OURS, MINIMAL):
        convert(folder / "bundles" / "digits", repository, name=name)
    shutil.copyfile(HERE / "minimal_model.py", repository / MINIMAL / "1" / "model.py")
    return repository


def request(model: str) -> bytes:
    message = service_pb2.ModelInferRequest(model_name=model)
    message.inputs.add(name="pixels", datatype="FP32", shape=[1, 64])
    message.raw_input_contents.append(np.arange(64, dtype=np.float32).tobytes())
    return message.SerializeToString()


async def window(channel: Any, model: str, concurrency: int, seconds: float) -> tuple[float, float]:
    """Closed loop for ``seconds``: median latency in ms, requests per second."""
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    data, times = request(model), []
    start = time.perf_counter()
    end = start + seconds

    async def loop() -> None:
        while (begin := time.perf_counter()) < end:
            await call(data)
            times.append(time.perf_counter() - begin)

    await asyncio.gather(*(loop() for _ in range(concurrency)))
    return statistics.median(times) * 1e3, len(times) / (time.perf_counter() - start)


async def measure(repository: Path, seconds: float, repeats: int) -> bool:
    install = await embedded_triton.find()
    met = True
    prefix = f"nereid-bench-{os.getpid()}-"
    async with TritonServer(install, repository, shared_memory_prefix=prefix) as server:
        await server.start()
        for model in (OURS, MINIMAL):
            await server.load(model, 120)
        async with grpc.aio.insecure_channel(server.addresses.grpc) as channel:
            for concurrency in CONCURRENCIES:
                results: dict[str, list[tuple[float, float]]] = {OURS: [], MINIMAL: []}
                for model in (OURS, MINIMAL):
                    await window(channel, model, concurrency, 1)
                for repeat in range(repeats):
                    for model in (OURS, MINIMAL) if repeat % 2 == 0 else (MINIMAL, OURS):
                        results[model].append(await window(channel, model, concurrency, seconds))
                met &= report(concurrency, results[OURS], results[MINIMAL])
    return met


def report(concurrency: int, ours: Sequence[tuple[float, float]], minimal: Sequence[tuple[float, float]]) -> bool:
    p50, rate = (statistics.median(a[i] / b[i] for a, b in zip(ours, minimal, strict=True)) for i in range(2))
    print(
        f"concurrency {concurrency:>2}: p50 {statistics.median(o[0] for o in ours):.3f} ms against "
        f"{statistics.median(m[0] for m in minimal):.3f} ms, ratio {p50:.3f} (bar <= {P50_AT_MOST}); "
        f"{statistics.median(o[1] for o in ours):.0f} req/s against {statistics.median(m[1] for m in minimal):.0f}, "
        f"ratio {rate:.3f} (bar >= {RATE_AT_LEAST}); medians of {len(ours)} pairs"
    )
    return p50 <= P50_AT_MOST and rate >= RATE_AT_LEAST


def import_time() -> bool:
    """The import of the package with numpy, in fresh processes."""
    code = (
        "import time; t = time.perf_counter(); import numpy; n = time.perf_counter(); import nereid_backend; "
        "print((n - t) * 1e3, (time.perf_counter() - t) * 1e3)"
    )
    runs = [subprocess.check_output([sys.executable, "-c", code]).split() for _ in range(9)]
    numpy_ms, all_ms = (statistics.median(float(run[i]) for run in runs) for i in range(2))
    print(f"import nereid_backend: {all_ms:.0f} ms, of which numpy {numpy_ms:.0f} ms (bar < {IMPORT_BELOW_MS})")
    return all_ms < IMPORT_BELOW_MS


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    met = import_time()
    with tempfile.TemporaryDirectory() as folder:
        met &= asyncio.run(measure(prepare(Path(folder)), options.seconds, options.repeats))
    print("bars met" if met else "bars MISSED")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
