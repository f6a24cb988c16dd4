"""What the texts of ``nereid bench``'s options mean, where they are more than a number or a word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

ENDINGS = (".json", ".csv", ".html")


def numbers(most: int, *, whole: bool) -> Callable[[Any, Any, str | None], list[float]]:
    """Of ``1,8,32``: numbers above zero, in the order in which they are measured; none for no text."""
    kind = "whole numbers" if whole else "numbers"

    def of_text(_context: Any, _parameter: Any, text: str | None) -> list[float]:
        if text is None:
            return []
        try:
            found = [(int if whole else float)(part) for part in text.split(",")]
        except ValueError:
            found = []
        if not found or not all(0 < number <= most for number in found):
            raise click.BadParameter(f"takes {kind} above 0 and up to {most}, as in 1,8,32; got {text!r}")
        return found

    return of_text


def shapes(_context: Any, _parameter: Any, texts: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Of ``NAME:1,3``: an input and its sizes."""
    found = {}
    for text in texts:
        tensor, _, sizes = text.rpartition(":")
        try:
            shape = tuple(int(size) for size in sizes.split(","))
        except ValueError:
            shape = (-1,)
        if not tensor or any(size < 0 for size in shape):
            raise click.BadParameter(f"takes an input and its sizes without the rows, as in tokens:128; got {text!r}")
        found[tensor] = shape
    return found


def outputs(_context: Any, _parameter: Any, files: tuple[Path, ...]) -> tuple[Path, ...]:
    """Files that are written in the end; one that could not be is told at once."""
    for file in files:
        if file.suffix not in ENDINGS:
            raise click.BadParameter(f"must end in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}, got {file.name}")
        if file.is_dir() or not file.parent.is_dir():
            raise click.BadParameter(f"{file}: cannot be written")
    return files
