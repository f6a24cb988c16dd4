"""A model ready to be written: its specification and where each artifact comes from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nereid_backend.spec import ModelSpec

Source = Path | Callable[[Path], None]
"""A file to link or copy, or a function that writes the file at the given path."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """``files`` maps names in the version directory to sources; ``notes`` are remarks for the user.

    ``stages`` are models of their own that this one, an ensemble, is made of.
    """

    spec: ModelSpec
    files: Mapping[str, Source]
    notes: tuple[str, ...] = ()
    stages: tuple[Prepared, ...] = ()


def place(source: Source, target: Path, *, link: bool) -> None:
    """Make ``target`` from ``source``: a hard link (symbolic across file systems), or a copy synced to disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(source, Path):
        source(target)
        return
    source = source.resolve()
    if link:
        try:
            os.link(source, target)
        except OSError:  # another file system, or one without hard links
            target.symlink_to(source)
        return
    shutil.copy(source, target)  # a program must stay executable
    with target.open("rb") as file:
        os.fsync(file.fileno())
