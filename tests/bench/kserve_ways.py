"""The same calls of a stock tritonclient over gRPC, over HTTP and with tensors in shared memory, one client at a time.

``nereid serve`` with an identity of rows of 16 and of 16 Mi floats (64 MiB). The ways take turns, call by call, so that
a drift of the machine falls on all.

usage: python kserve_ways.py [--calls 200] [--large-calls 8]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from front import write_identity
from tritonclient.utils import shared_memory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from serving import Served

WIDTHS = {"small": 16, "mib64": 16 * 1024 * 1024}
GRPC = "gRPC"
# Shared memory both ways, as a part of the time that gRPC takes for 64 MiB.
SHARED_AT_MOST = 0.5


def ways(served: Served, model: str) -> dict[str, Callable[[], Any]]:
    """By name, one call each way; every answer lies where the client asked for it."""
    array = np.zeros((1, WIDTHS[model]), np.float32)
    by_grpc = grpcclient.InferenceServerClient(served.state["address"])
    by_http = httpclient.InferenceServerClient(served.state["http_infer"], network_timeout=600)
    plain = grpcclient.InferInput("input", list(array.shape), "FP32")
    plain.set_data_from_numpy(array)
    found: dict[str, Callable[[], Any]] = {GRPC: lambda: by_grpc.infer(model, [plain])}
    for name, binary in (("HTTP binary", True), ("HTTP JSON", False)):
        if not binary and model != "small":
            continue
        sent = httpclient.InferInput("input", list(array.shape), "FP32")
        sent.set_data_from_numpy(array, binary_data=binary)
        outputs = [httpclient.InferRequestedOutput("output", binary_data=binary)]
        found[name] = lambda sent=sent, outputs=outputs: by_http.infer(model, [sent], outputs=outputs)
    region = f"bench-{model}"
    handle = shared_memory.create_shared_memory_region(region, f"/{region}", 2 * array.nbytes)
    shared_memory.set_shared_memory_region(handle, [array])
    by_grpc.register_system_shared_memory(region, f"/{region}", 2 * array.nbytes)
    there = grpcclient.InferInput("input", list(array.shape), "FP32")
    there.set_shared_memory(region, array.nbytes)
    back = grpcclient.InferRequestedOutput("output")
    back.set_shared_memory(region, array.nbytes, array.nbytes)
    found["shared memory"] = lambda: by_grpc.infer(model, [there], outputs=[back])
    return found


def medians_ms(calls: dict[str, Callable[[], Any]], count: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(count + 1):
        for name, call in calls.items():
            begun = time.perf_counter()
            call()
            taken[name].append((time.perf_counter() - begun) * 1e3)
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--large-calls", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, width in WIDTHS.items():
            write_identity(folder / "models" / model, width)
        (folder / "nereid.yaml").write_text(
            "server: {bind_addr: '127.0.0.1:0', http_infer_addr: '127.0.0.1:0', allow_shared_memory: true,"
            " ml_backends_path: models}\n"
            "models:\n" + "".join(f"  - {{name: {model}, device: cpu, queue_capacity: 4}}\n" for model in WIDTHS)
        )
        served = Served(folder, "--config", str(folder / "nereid.yaml"))
        try:
            for model, count in (("small", arguments.calls), ("mib64", arguments.large_calls)):
                took = medians_ms(ways(served, model), count)
                text = ", ".join(f"{name} {ms:.2f} ms ({ms / took[GRPC]:.2f}x)" for name, ms in took.items())
                print(f"{model}: {text}", flush=True)
        finally:
            for model in WIDTHS:
                Path(f"/dev/shm/bench-{model}").unlink(missing_ok=True)
            served.end()
    ratio = took["shared memory"] / took[GRPC]
    verdict = "met" if ratio <= SHARED_AT_MOST else "MISSED"
    print(f"shared memory {ratio:.2f} of gRPC for 64 MiB, bar {SHARED_AT_MOST}: {verdict}")
    return 0 if ratio <= SHARED_AT_MOST else 1


if __name__ == "__main__":
    sys.exit(main())
