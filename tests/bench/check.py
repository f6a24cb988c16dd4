"""Triage of 1,000 bundles by ``nereid check``: 770 small ones, 180 of ResNet-18's size and 50 damaged ones.

The command runs as from a shell, in a fresh process. The damaged ones have flipped bytes in a program; what ends its
reader costs two fresh children, half a second each.

usage: python check.py [--bundles 1000]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import programs
import yaml

from converters import weights

BAR_S = 30
COMMAND = (sys.executable, "-P", "-c", "from native_service.cli import main; main()", "check", "--json")


def write_bundle(folder: Path, function: Any, row: tuple[int, ...], outputs: int, shapes: Any) -> None:
    """A bundle of sizes 1 and 4 in the format's own files."""
    folder.mkdir()
    values = programs.values(shapes)
    spec = programs.write(folder, function, row, (outputs,), values, sizes=(1, 4))
    if spec.weights is None:
        raise SystemExit("the bundle has no weights")
    order = {"argument_order": json.dumps(list(spec.weights.argument_order)), "axis_order": "xla"}
    named = dict(zip(spec.weights.argument_order, values, strict=True))
    weights.write(folder / "weights.safetensors", named, order)
    letters = "acd"[: len(row)]
    tensors = {
        "executable_inputs": [
            {"name": "x", "dtype": "f32", "shape": f"{letters}n", "dims": dict(zip(letters, row[::-1], strict=True))}
        ],
        "executable_outputs": [{"name": "y", "dtype": "f32", "shape": "kn", "dims": {"k": outputs}}],
    }
    (folder / "manifest.yaml").write_text(yaml.safe_dump({"format_version": "2.1", **tensors}))


def copies(folder: Path, source: Path, prefix: str, count: int) -> list[Path]:
    """Bundles of the same files, by hard links."""
    made = [folder / f"{prefix}{index:04}" for index in range(count)]
    for path in made:
        shutil.copytree(source, path, copy_function=os.link)
    return made


def damage(bundle: Path, flips: random.Random) -> None:
    file = bundle / "model.b4.mlir"
    content = bytearray(file.read_bytes())
    for _ in range(3):
        content[flips.randrange(len(content))] = flips.randrange(256)
    file.unlink()
    file.write_bytes(content)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bundles", type=int, default=1000)
    count = parser.parse_args().bundles
    with tempfile.TemporaryDirectory() as name:
        parts, folder = Path(name, "parts"), Path(name, "bundles")
        parts.mkdir()
        folder.mkdir()
        write_bundle(parts / "small", programs.linear, (8,), 4, [(8, 4), (4,)])
        write_bundle(parts / "large", programs.resnet18, (3, 224, 224), 1000, programs.resnet18_shapes())
        large, bad = count * 18 // 100, count * 5 // 100
        copies(folder, parts / "large", "large", large)
        copies(folder, parts / "small", "small", count - large - bad)
        for bundle in copies(folder, parts / "small", "bad", bad):
            damage(bundle, random.Random(bundle.name))
        start = time.perf_counter()
        done = subprocess.run([*COMMAND, str(folder)], stdout=subprocess.PIPE, text=True, check=False)
        wall_s = time.perf_counter() - start
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    refused = [report for report in reports if not report["ok"]]
    ended = [report for report in refused if "ended the converter" in report["problem"]]
    print(
        f"{len(reports)} bundles in {wall_s:.1f} s (bar < {BAR_S} for 1000), {used.ru_utime + used.ru_stime:.1f} s of "
        f"processor time; {len(refused)} refused, {len(ended)} of them ended their reader"
    )
    right = len(reports) == count and all(Path(report["path"]).name.startswith("bad") for report in refused)
    met = right and wall_s < BAR_S * max(count / 1000, 0.1)
    print("bars met" if met else "bars MISSED")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
