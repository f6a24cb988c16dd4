"""A linear layer of torch exported as StableHLO: how its product is written, in the engine's JAX on this machine.

The weights are [out, in] as torch keeps them. `transposed` is `x @ w.T`, as torch's operators say; `turned` is what
``export_torch`` writes for up to so many rows (converters/exporters/torch_linear.py); `[in, out]` is a product with
weights that were transposed before. The smallest of many times, taken in turn.

usage: python linear.py [--runs 60]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np

from converters.exporters import torch_linear

SIZES = ((2400, 1800), (384, 1536), (1536, 384), (256, 256))
ROWS = (1, 4, 16, 64, torch_linear.FEW_ROWS)
MOST = 1.0  # turned / transposed, the median of all


def best_us(runs: int, rows: int, width: int, out: int) -> dict[str, float]:
    import jax

    chance = np.random.default_rng(0)
    x, w = (chance.standard_normal(shape).astype(np.float32) for shape in ((rows, width), (out, width)))
    ways = {
        "transposed": (lambda x, w: x @ w.T, w),
        "turned": (torch_linear.product, w),
        "[in, out]": (lambda x, w: x @ w, np.ascontiguousarray(w.T)),
    }
    calls = {name: (jax.jit(way), jax.device_put(x), jax.device_put(weights)) for name, (way, weights) in ways.items()}
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(runs):
        for name, (call, *arguments) in calls.items():
            begun = time.perf_counter()
            call(*arguments).block_until_ready()
            best[name] = min(best[name], (time.perf_counter() - begun) * 1e6)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60)
    runs = parser.parse_args().runs
    print("| in, out | rows | transposed, us | turned | [in, out] | turned / transposed |")
    print("| --- | --- | --- | --- | --- | --- |")
    ratios = []
    for width, out in SIZES:
        for rows in ROWS:
            best = best_us(runs, rows, width, out)
            ratio = best["turned"] / best["transposed"]
            ratios.append(ratio)
            cells = " | ".join(f"{each:.0f}" for each in best.values())
            print(f"| {width}, {out} | {rows} | {cells} | {ratio:.2f} |", flush=True)
    median = statistics.median(ratios)
    print(f"turned / transposed, median {median:.2f} (bar: {MOST})")
    return 0 if median <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
