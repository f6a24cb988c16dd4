"""Every feature that the README lists is shown by a test that is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADING = "## What is promised\n"


def missing(readme: str, root: Path = ROOT) -> list[str]:
    """The features in the table of promises without a test; a link's text is the name of a test of its file."""
    section = readme.partition(HEADING)[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert rows
    return [row for row in rows if not _is_shown(row, root)]


def _is_shown(row: str, root: Path) -> bool:
    links = re.findall(r"\[([^\]]+)\]\((tests/[^)]+/test_[^)]+\.py)\)", row)
    return bool(links) and all(f"test_{text.replace(' ', '_')}" in _tests_of(root / file) for text, file in links)


def _tests_of(file: Path) -> set[str]:
    if not file.is_file():
        return set()
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_feature_of_the_readme_is_shown_by_a_test_that_is_there() -> None:
    assert missing((ROOT / "README.md").read_text()) == []


def test_a_feature_without_a_link_or_with_one_to_nothing_is_noticed(tmp_path: Path) -> None:
    (folder := tmp_path / "tests" / "part").mkdir(parents=True)
    (folder / "test_a.py").write_text("def test_it_works(): ...\n")
    head = f"{HEADING}\n| what | shown by |\n| --- | --- |\n"
    shown = "| this | [it works](tests/part/test_a.py) |\n"
    not_shown = [
        "| that | |",
        "| that | it works |",
        "| that | [it flies](tests/part/test_a.py) |",
        "| that | [it works](tests/part/test_b.py) |",
        "| that | [it works](tests/part/test_a.py) [it flies](tests/part/test_a.py) |",
    ]
    assert missing(head + shown + "\n".join(not_shown) + "\n\n## Else\n\n| a | b |\n", tmp_path) == not_shown
