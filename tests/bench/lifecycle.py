"""What it costs that a model is loaded by its first call, and what is left after it has come and gone many times.

A small ONNX model that is loaded by its first call. Cold: the first call of a model that is in no process. Together: 50
clients call it at once. Then it is unloaded by name and loaded by a call, again and again; between two looks at the
server's processes nothing but that happens. What a process holds is measured as the soak does it: anonymous memory
that is in use; Envoy's allocator keeps its spare pages.

Bars: a cold call under 3 s; 50 first calls are one load; after 200 rounds the server holds less than 5 % more than
after the first 20, and no process, descriptor or region of shared memory is left.

usage: python lifecycle.py [--rounds 200] [--cold 10]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tritonclient.grpc as tritonclient

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from footprint import pulses, roles, shared_memory
from serving import Served, infer, write_adder

MODEL, TOGETHER = "sleeper", 50
COLD_S, GROWTH = 3.0, 0.05
# The first rounds fill caches and the heaps of allocators.
SETTLED_AFTER, GONE_AFTER_S = 20, 20.0
ROW = np.zeros((1, 4), np.float32)
SETTINGS = f"""
server: {{bind_addr: '127.0.0.1:0', http_addr: '127.0.0.1:0', ml_backends_path: models, allow_model_control: true}}
models:
  - {{name: {MODEL}, device: cpu, queue_capacity: {TOGETHER}, options: {{max_batch_size: 8, load: first_request}}}}
"""


class Left(NamedTuple):
    """What is there while the model is idle: bytes and descriptors by process, names of shared memory."""

    used_bytes: dict[str, int]
    descriptors: dict[str, int]
    processes: Counter[str]
    regions: frozenset[str]


def call(served: Served) -> float:
    """Seconds until a new client has its answer."""
    begun = time.perf_counter()
    with tritonclient.InferenceServerClient(served.state["address"]) as client:
        answer = infer(client, MODEL, input=ROW)["output"]
    assert answer[0, 0] == 1
    return time.perf_counter() - begun


def unload(served: Served) -> None:
    with tritonclient.InferenceServerClient(served.state["address"]) as client:
        client.unload_model(MODEL)


def loads(served: Served) -> int:
    with urllib.request.urlopen(f"http://{served.state['http']}/metrics") as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("nereid_model_cold_starts_total{"):
                return int(float(line.rpartition(" ")[2]))
    raise SystemExit("no cold starts in /metrics")


def look(served: Served) -> Left:
    """What is left once the model's processes have ended, which they do a moment after Triton has said so."""
    deadline = time.monotonic() + GONE_AFTER_S
    while MODEL in roles(served).values() and time.monotonic() < deadline:
        time.sleep(0.05)
    found = pulses(served)
    return Left(
        {each.role: each.used_bytes for each in found.values()},
        {each.role: each.descriptors for each in found.values()},
        Counter(roles(served).values()),
        frozenset(shared_memory(served)),
    )


def cold_calls(served: Served, count: int) -> bool:
    seconds = []
    for _ in range(count):
        unload(served)
        seconds.append(call(served))
    warm_s = statistics.median(call(served) for _ in range(20))
    print(f"  cold call: {statistics.median(seconds):.2f} s median, {max(seconds):.2f} s longest (bar < {COLD_S})")
    print(f"  then: {warm_s * 1e3:.1f} ms with a new connection each")
    unload(served)
    before = loads(served)
    with ThreadPoolExecutor(TOGETHER) as clients:
        together = list(clients.map(lambda _: call(served), range(TOGETHER)))
    count = loads(served) - before
    print(f"  {TOGETHER} first calls at once: {count} load (bar 1), the last answer after {max(together):.2f} s")
    return max(seconds) < COLD_S and count == 1


def rounds(served: Served, count: int) -> bool:
    settled: Left | None = None
    for number in range(count):
        call(served)
        unload(served)
        if number + 1 == min(SETTLED_AFTER, count // 2):
            settled = look(served)
    assert settled is not None
    end = look(served)
    growth = sum(end.used_bytes.values()) / sum(settled.used_bytes.values()) - 1
    for role in end.used_bytes:
        before, after = settled.used_bytes.get(role, 0), end.used_bytes[role]
        print(f"    {role:<14}{before / 2**20:8.1f} to {after / 2**20:6.1f} MiB, "
              f"{settled.descriptors.get(role, 0)} to {end.descriptors[role]} descriptors")  # fmt: skip
    print(f"  {count} rounds: memory {growth:+.1%} (bar < {GROWTH:.0%})")
    left = {
        "processes": end.processes - settled.processes,
        "descriptors": _more(settled.descriptors, end.descriptors),
        "regions": sorted(end.regions - settled.regions),
    }
    for what, its in left.items():
        print(f"  {what} left: {dict(its) if isinstance(its, Mapping) else its or 'none'}")
    return growth < GROWTH and not any(left.values())


def _more(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Descriptors that came; a connection more or less is no leak."""
    return {role: count - before.get(role, 0) for role, count in after.items() if count > before.get(role, 0) + 2}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--cold", type=int, default=10)
    options: Any = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "models").mkdir()
        write_adder(folder / "models" / f"{MODEL}.onnx")
        (folder / "nereid.yaml").write_text(SETTINGS)
        served = Served(folder, "--config", str(folder / "nereid.yaml"), log=folder / "log")
        met = []
        try:
            met = [cold_calls(served, options.cold), rounds(served, options.rounds)]
        finally:
            _, output = served.end()
            if not met:
                print(output)
    print("bars met" if all(met) else "bars MISSED")
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
