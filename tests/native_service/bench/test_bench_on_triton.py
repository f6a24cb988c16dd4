"""``nereid bench`` on a real tritonserver without a front."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import write_adder


@pytest.mark.triton
def test_a_plain_triton_is_measured_from_both_sides(triton: Any, tmp_path: Path) -> None:
    write_adder(tmp_path / "loaded.onnx")
    name = triton.add(tmp_path / "loaded.onnx")
    command = [sys.executable, "-m", "native_service.cli", "bench", name, "--address", triton.address]
    options = ["--concurrency", "4", "--batch", "2", "--duration", "1", "--window", "0.5", "--warm-up", "0.2"]
    subprocess.run([*command, *options, "--output", "r.json"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    result = json.loads((tmp_path / "r.json").read_text())
    (each,) = result["measurements"]
    assert result["server"].startswith("triton 2.")
    assert (each["failed"], each["calls"] > 0) == (0, True)
    parts, runs = each["triton_ms"], each["triton"]
    assert all(parts[name] > 0 for name in ("queue", "in", "model", "out"))
    assert sum(parts[name] for name in ("queue", "in", "model", "out")) <= parts["outside"] + each["latency_ms"]["mean"]
    assert runs["rows_per_run"] == pytest.approx(2 * runs["calls_per_run"], abs=0.01)
    assert 2 <= runs["rows_per_run"] <= 8
