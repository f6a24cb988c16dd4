"""Writing so that a crash finds either what was there or what was written."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from pathlib import Path

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def write_text(path: Path, text: str) -> None:
    """Write ``path`` and sync it to disk. Line ends stay as they are."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``path`` and sync it to disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Sync the names in ``directory`` to disk: what was renamed or removed there stays so."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def scratch(parent: Path, prefix: str) -> tempfile.TemporaryDirectory[str]:
    """A temporary directory in ``parent``, after removing those of that prefix that killed processes left."""
    for leftover in parent.glob(f"{prefix}*"):
        owner = leftover.name[len(prefix) :].partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(leftover, ignore_errors=True)
    return tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", dir=parent, ignore_cleanup_errors=True)


def swap_in(fresh: Path, target: Path, *, replace: bool) -> None:
    """Put ``fresh`` at ``target``; what was there ends in ``fresh``'s place, which the caller removes."""
    if not (replace and target.exists()):
        fresh.rename(target)  # fails when somebody else has put something there meanwhile
        return
    libc = ctypes.CDLL(None, use_errno=True)
    names = (os.fsencode(fresh), os.fsencode(target))
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return
    # A file system without exchange: two renames, with the old model kept until the new one is in place.
    old = fresh.with_name(f"{fresh.name} replaced")
    target.rename(old)
    try:
        fresh.rename(target)
    except OSError:
        old.rename(target)
        raise
