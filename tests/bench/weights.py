"""What loading weights costs: a 400 MB file into an engine's device arrays, against one aligned read of its bytes.

Two files: one of our own writer, and one as a foreign writer leaves it, where odd sizes put nearly every tensor at an
unaligned place. Loads and plain reads take turns in one process, and the figure is the median of the pairs' ratios;
how far the peak memory rises is told by a fresh process each. Mapping the file is measured as well, for the record:
see the decisions of ``nereid_backend/README.md``.

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


def read(path: Path) -> Any:
    buffer = safetensors.aligned_empty(path.stat().st_size)
    with path.open("rb", buffering=0) as file:
        left = buffer.data
        while left:
            left = left[file.readinto(left) :]
    return buffer


def load(path: Path) -> Any:
    import jax

    held = [jax.device_put(tensor, jax.devices("cpu")[0]) for tensor in safetensors.read(path).tensors.values()]
    return jax.block_until_ready(held)


def map_pages(path: Path) -> Any:
    import jax

    header, mapped, held = safetensors.read_header(path), np.memmap(path, np.uint8, "r"), []
    for entry in header.entries.values():
        raw = mapped[header.data_start + entry.start : header.data_start + entry.end]
        held.append(jax.device_put(raw.view(entry.dtype.numpy).reshape(entry.shape), jax.devices("cpu")[0]))
    for array in jax.block_until_ready(held):
        np.asarray(array).reshape(-1)[::1024].sum()  # every page
    return held


WAYS = {"read": read, "load": load, "map": map_pages}


def seconds(how: str, path: Path) -> float:
    start = time.perf_counter()
    WAYS[how](path)
    return time.perf_counter() - start


def peak_of(how: str, path: Path) -> float:
    """How far the peak memory of a fresh process rises, as a share of the file."""
    return float(subprocess.check_output([sys.executable, __file__, "--peak", how, str(path)]))


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
    import jax

    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--peak", nargs=2)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.device_put(np.zeros(1), jax.devices("cpu")[0]).block_until_ready()
    if options.peak:
        how, path = options.peak[0], Path(options.peak[1])
        before = peak_bytes()
        held = WAYS[how](path)  # kept until it is measured
        print((peak_bytes() - before) / path.stat().st_size)
        del held
        return 0
    met = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        square = np.ones((SIDE, SIDE), np.float32)
        weights_files.write(folder / "own", {f"w{place}": square for place in range(COUNT)}, {})
        write_foreign(folder / "foreign", square)
        for path in (folder / "own", folder / "foreign"):
            loads, maps = [], []
            for pair in range(options.pairs):
                ways = list(WAYS) if pair % 2 == 0 else list(WAYS)[::-1]
                taken = {how: seconds(how, path) for how in ways}
                loads.append(taken["load"] / taken["read"])
                maps.append(taken["map"] / taken["read"])
            peak = {how: peak_of(how, path) for how in WAYS}
            ratio = statistics.median(loads)
            print(f"{path.name} file: load / read {ratio:.2f} (bar <= {TIME_AT_MOST})")
            print(f"  peak memory / file {peak['load']:.2f} (bar <= {MEMORY_AT_MOST})")
            print(f"  mapping instead: {statistics.median(maps):.2f} and {peak['map']:.2f}", flush=True)
            met &= ratio <= TIME_AT_MOST and peak["load"] <= MEMORY_AT_MOST
        met &= shared(folder)
    print("bars met" if met else "bars MISSED")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
