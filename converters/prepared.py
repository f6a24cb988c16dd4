"""A model ready to be written: its specification and where each artifact comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nereid_backend.spec import ModelSpec

Source = Path | Callable[[Path], None]
"""A file to link or copy, or a function that writes the file at the given path."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """``files`` maps names in the version directory to sources; ``notes`` are remarks for the user."""

    spec: ModelSpec
    files: Mapping[str, Source]
    notes: tuple[str, ...] = ()
