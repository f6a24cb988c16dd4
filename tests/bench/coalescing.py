"""Eight one-row requests that share a run, against eight runs of one row, inside the runtime (no Triton, no network).

The digits model through the executor that Triton's calls go through: check, gather, run, check, split.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from converters.convert import convert
from nereid_backend.engines import engine_class
from nereid_backend.executor import Executor
from nereid_backend.spec import ModelSpec

MAKE_MODELS = Path(__file__).resolve().parents[1] / "demo" / "make_models.py"
REQUESTS, CALLS, REPEATS = 8, 200, 25
# The bar: together / one by one.
AT_MOST = 0.5


def opened(folder: Path) -> Executor:
    subprocess.run([sys.executable, MAKE_MODELS, folder / "bundles"], check=True)
    convert(folder / "bundles" / "digits", folder / "repository")
    version = folder / "repository" / "digits" / "1"
    spec = ModelSpec.read(version)
    executor = Executor(spec, engine_class(spec.engine).load(spec, version))
    executor.warm_up()
    return executor


def us_per_call(executor: Executor, calls: list[list[list[np.ndarray]]]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        for requests in calls:
            executor.run(requests)
    return (time.perf_counter() - start) / CALLS * 1e6


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        executor = opened(Path(folder))
        images = np.load(Path(folder) / "bundles" / "held_out.npz")["images"].astype(np.float32)
        requests = [[images[i : i + 1]] for i in range(REQUESTS)]
        together, apart = [requests], [[request] for request in requests]
        pairs = [(us_per_call(executor, together), us_per_call(executor, apart)) for _ in range(REPEATS + 1)][1:]
    ratio = statistics.median(a / b for a, b in pairs)
    print(
        f"{REQUESTS} requests of one row: {statistics.median(a for a, _ in pairs):.0f} us together against "
        f"{statistics.median(b for _, b in pairs):.0f} us one by one, ratio {ratio:.3f} (bar <= {AT_MOST}); "
        f"medians of {len(pairs)} pairs"
    )
    print("bars met" if ratio <= AT_MOST else "bars MISSED")
    return 0 if ratio <= AT_MOST else 1


if __name__ == "__main__":
    sys.exit(main())
