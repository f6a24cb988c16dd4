"""The scenarios of ``make torture``: one of them for some seconds, and what runs them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def run() -> Iterator[Any]:
    sys.path.insert(0, str(HERE))
    try:
        import run
        import strangers

        strangers.TORN_S = 3.0
        yield run
    finally:
        sys.path.remove(str(HERE))


def test_every_scenario_says_what_must_hold(run: Any) -> None:
    assert len(run.SCENARIOS) > 15
    assert [name for name, scenario in run.SCENARIOS.items() if not scenario.must_hold] == []


def test_the_table_of_the_readme_has_a_row_for_each_result(run: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(run, "README", tmp_path / "README.md")
    run.README.write_text(f"before\n{run.BEGIN}stale\n{run.END}after\n")
    results = [
        run.Result("envoy_is_killed", recovery_s=1.25, peak_mib=300),
        run.Result("the_disk_is_full", problem="it ended"),
        run.Result("shared_memory_is_full", skipped="no room"),
    ]
    for _ in range(2):
        run.write_table(results, 7)
    text = run.README.read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert [(name, holds) for name, _, holds, *_ in rows[2:]] == [
        ("envoy is killed", "yes"),
        ("the disk is full", "**no**: it ended"),
        ("shared memory is full", "not run: no room"),
    ]
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "stale" not in text


@pytest.mark.triton
def test_a_scenario_leaves_nothing_and_everybody_gets_right_answers(run: Any, tmp_path: Path) -> None:
    result = asyncio.run(run.torment(run.SCENARIOS["frames_are_malformed"], tmp_path, 1))
    assert (result.problem, result.skipped) == ("", "")
