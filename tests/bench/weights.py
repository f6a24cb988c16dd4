"""What loading weights costs: a 400 MB file into an engine's device arrays, against one aligned read of its bytes.

Two files: one of our own writer, and one as a foreign writer leaves it, where odd sizes put nearly every tensor at an
unaligned place. Each load is a fresh process that reports its time and how far its peak memory rose; loads and plain
reads take turns, and the figure is the median of the pairs' ratios. Mapping the file is measured as well, for the
record: see the decisions in the README.

usage: python weights.py [--pairs 9]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import programs

from converters import weights as weights_files
from nereid_backend import safetensors
from nereid_backend.engines.stablehlo import StableHloEngine

TIME_AT_MOST, MEMORY_AT_MOST = 1.3, 1.15
COUNT, SIDE = 25, 2048  # 16 MiB of f32 each


def peak_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def load(how: str, path: Path) -> dict[str, float]:
    """One load in this process: seconds, and the rise of its peak memory in bytes."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    device = jax.devices("cpu")[0]
    jax.device_put(np.zeros(1), device).block_until_ready()
    before, start = peak_bytes(), time.perf_counter()
    held: list[Any] = []
    if how == "read":
        buffer = safetensors.aligned_empty(path.stat().st_size)
        with path.open("rb", buffering=0) as file:
            left = buffer.data
            while left:
                left = left[file.readinto(left) :]
        held = [buffer]
    elif how == "load":
        held = [jax.device_put(tensor, device) for tensor in safetensors.read(path).tensors.values()]
    elif how == "map":
        header, mapped = safetensors.read_header(path), np.memmap(path, np.uint8, "r")
        for entry in header.entries.values():
            raw = mapped[header.data_start + entry.start : header.data_start + entry.end]
            held.append(jax.device_put(raw.view(entry.dtype.numpy).reshape(entry.shape), device))
        for array in held:
            np.asarray(array).reshape(-1)[::1024].sum()  # every page
    jax.block_until_ready(held)
    return {"seconds": time.perf_counter() - start, "bytes": peak_bytes() - before}


def measure(how: str, path: Path) -> dict[str, float]:
    answer = subprocess.check_output([sys.executable, __file__, "--load", how, str(path)])
    result: dict[str, float] = json.loads(answer)
    return result


def write_foreign(path: Path, square: np.ndarray[Any, Any]) -> None:
    header: dict[str, Any] = {}
    arrays, position = [], 0
    for place in range(COUNT):
        for name, array in ((f"b{place}", square[0, : SIDE - 1]), (f"w{place}", square)):
            end = position + array.nbytes
            header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [position, end]}
            arrays.append(array)
            position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            file.write(np.ascontiguousarray(array).data)


def shared(folder: Path) -> bool:
    """Whether the programs of four sizes are called with the very same arrays, and hold no weights themselves."""
    weights = programs.values([(SIDE, SIDE), (SIDE,)] * 4)
    spec = programs.write(folder, programs.mlp, (SIDE,), (SIDE,), weights, sizes=(1, 2, 4, 8))
    import jax

    engine = StableHloEngine.load(spec, folder)
    before = peak_bytes()
    for size in spec.batch_sizes:
        engine.run([np.ones((size, SIDE), np.float32)])
    total, rise = sum(w.nbytes for w in weights), peak_bytes() - before
    held = {array.unsafe_buffer_pointer() for array in jax.live_arrays() if array.nbytes >= SIDE}
    print(
        f"4 sizes: {len(weights)} weights, {len(held)} buffers, {total / 1e6:.0f} MB; running all: +{rise / 1e6:.0f} MB"
    )
    return len(held) == len(weights) and rise < total / 4


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--load", nargs=2)
    options = parser.parse_args()
    if options.load:
        print(json.dumps(load(options.load[0], Path(options.load[1]))))
        return 0
    met = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        square = np.ones((SIDE, SIDE), np.float32)
        weights_files.write(folder / "own", {f"w{place}": square for place in range(COUNT)}, {})
        write_foreign(folder / "foreign", square)
        for path in (folder / "own", folder / "foreign"):
            size = path.stat().st_size
            ratios, memory, maps = [], [], []
            for pair in range(options.pairs):
                ways = ("read", "load", "map") if pair % 2 == 0 else ("map", "load", "read")
                results = {how: measure(how, path) for how in ways}
                ratios.append(results["load"]["seconds"] / results["read"]["seconds"])
                memory.append(results["load"]["bytes"] / size)
                maps.append((results["map"]["seconds"] / results["read"]["seconds"], results["map"]["bytes"] / size))
            ratio, peak = statistics.median(ratios), max(memory)
            print(f"{path.name} file of {size / 1e6:.0f} MB: load / read {ratio:.2f} (bar <= {TIME_AT_MOST})")
            print(f"  peak memory / file {peak:.2f} (bar <= {MEMORY_AT_MOST})")
            mapped = statistics.median(m[0] for m in maps), max(m[1] for m in maps)
            print(f"  mapping instead: time / read {mapped[0]:.2f}, peak / file {mapped[1]:.2f}", flush=True)
            met &= ratio <= TIME_AT_MOST and peak <= MEMORY_AT_MOST
        met &= shared(folder)
    print("bars met" if met else "bars MISSED")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
