"""What the cache of compiled programs saves: loading a ResNet-18-sized bundle the first and the second time.

Each load is a fresh process that imports JAX first, then opens the engine (weights, programs of two sizes) and runs
every size once; compilations are counted by JAX. The first load finds an empty cache, the second what the first left.
The bar is on opening the engine; the runs are the same work both times.

usage: python second_start.py [--pairs 5]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import programs

from nereid_backend.engines.stablehlo import StableHloEngine
from nereid_backend.spec import SPEC_FILE, ModelSpec

FASTER_AT_LEAST = 5


def load(folder: Path) -> dict[str, float]:
    """One load in this process: seconds to open, seconds of the first runs, number of compilations."""
    import jax
    import jax.monitoring

    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _seconds, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    jax.devices("cpu")
    spec = ModelSpec.read(folder)
    start = time.perf_counter()
    engine = StableHloEngine.load(spec, folder)
    opened = time.perf_counter()
    for size in spec.batch_sizes:
        engine.run([np.zeros((size, 3, 224, 224), np.float32)])
    return {"open": opened - start, "run": time.perf_counter() - opened, "compiled": len(compiled)}


def measure(folder: Path, cache: Path) -> dict[str, float]:
    environment = {**os.environ, "NEREID_CACHE_DIR": str(cache)}
    answer = subprocess.check_output([sys.executable, __file__, "--load", str(folder)], env=environment)
    result: dict[str, float] = json.loads(answer)
    return result


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--load", type=Path)
    options = parser.parse_args()
    if options.load:
        print(json.dumps(load(options.load)))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = programs.values(programs.resnet18_shapes())
        spec = programs.write(folder, programs.resnet18, (3, 224, 224), (1000,), weights, sizes=(1, 4))
        (folder / SPEC_FILE).write_text(spec.to_json())
        firsts, seconds = [], []
        for pair in range(options.pairs):
            cache = folder / f"cache{pair}"
            firsts.append(measure(folder, cache))
            seconds.append(measure(folder, cache))
    ratio = statistics.median(a["open"] / b["open"] for a, b in zip(firsts, seconds, strict=True))
    compiled = [sorted({int(each["compiled"]) for each in loads}) for loads in (firsts, seconds)]
    first, second = (
        ", ".join(f"{what} {statistics.median(each[what] for each in loads) * 1e3:.0f} ms" for what in ("open", "run"))
        for loads in (firsts, seconds)
    )
    print(f"first start: {first}, compilations {compiled[0]}; second start: {second}, compilations {compiled[1]}")
    print(f"opening is {ratio:.1f} times faster (bar >= {FASTER_AT_LEAST}), median of {options.pairs} pairs")
    met = ratio >= FASTER_AT_LEAST and compiled[1] == [0]
    print("bars met" if met else "bars MISSED")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
