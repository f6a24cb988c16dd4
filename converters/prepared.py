"""A model ready to be written: its specification and where each artifact comes from."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from nereid_backend.errors import BundleError
from nereid_backend.spec import SPEC_FILE, ModelSpec

MODEL_FILE = "model.py"
# Triton's stub puts the version directory on Python's path: what lies there may be imported without being asked for.
_IMPORTABLE = (*importlib.machinery.all_suffixes(), ".dist-info", ".egg-info")

Source = Path | Callable[[Path], None]
"""A file to link or copy, or a function that writes the file at the given path."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """``files`` maps names in the version directory to sources; ``notes`` are remarks for the user.

    ``stages`` are models of their own that this one, an ensemble, is made of. ``most_waiting``: the requests that
    Triton itself lets wait, None for no limit (``backpressure``). ``batch_delay_ms``: how long a request waits for
    others to share its run. ``labels``: by output, the one of
    ``files`` with a label per class. ``taken_over`` says what of a Triton model's configuration stays as it was.

    Raises BundleError for files that would take the place of the converted model's own, or be code of a model that has
    none.
    """

    spec: ModelSpec
    files: Mapping[str, Source]
    notes: tuple[str, ...] = ()
    stages: tuple[Prepared, ...] = ()
    most_waiting: int | None = None
    batch_delay_ms: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    taken_over: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.files:
            parts = PurePosixPath(name).parts
            if parts[0] in (MODEL_FILE, SPEC_FILE):
                raise BundleError(f"the bundle holds a {name}, a name that the converted model needs; rename it")
            if not self.spec.runs_code and any(part.endswith(_IMPORTABLE) for part in parts):
                raise BundleError(f"the model needs a file {name}, which Python could run as code; rename it")


class Once:
    """A source that writes its file the first time it is asked for it, and links or copies that one from then on.

    What it wrote lies in a temporary folder of its own until nobody holds it any more.
    """

    def __init__(self, write: Callable[[Path], None]) -> None:
        self._write = write
        self._written: Path | None = None

    def __call__(self, target: Path) -> None:
        if self._written is None:
            folder = tempfile.mkdtemp(prefix="nereid-")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            written = Path(folder) / target.name
            self._write(written)
            self._written = written
        try:
            target.hardlink_to(self._written)
        except OSError:  # another file system, or one without hard links
            _copy(self._written, target)


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
    _copy(source, target)


def _copy(source: Path, target: Path) -> None:
    """Copy a file and sync it to disk."""
    shutil.copy(source, target)  # a program must stay executable
    with target.open("rb") as file:
        os.fsync(file.fileno())
