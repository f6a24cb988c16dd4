"""Writing so that a crash finds either what was there or what was written."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from pathlib import Path

_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
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
    """Put ``fresh`` at ``target``; what was there ends in ``fresh``'s place, which the caller removes.

    What somebody else has put there meanwhile stays, unless that is to be replaced too. Raises OSError, then
    FileExistsError.
    """
    if not (replace and target.exists()):
        _put_where_nothing_is(fresh, target)
        return
    if _renamed(fresh, target, _RENAME_EXCHANGE) == 0:
        return
    # A file system without exchange: two renames, with the old model kept until the new one is in place.
    old = fresh.with_name(f"{fresh.name} replaced")
    target.rename(old)
    try:
        fresh.rename(target)
    except OSError:
        old.rename(target)
        raise


def _put_where_nothing_is(fresh: Path, target: Path) -> None:
    error = _renamed(fresh, target, _RENAME_NOREPLACE)
    if error == errno.EEXIST:
        raise FileExistsError(error, os.strerror(error), str(target))
    if error == 0:
        return
    # A file system without that, or another error, which the next call meets as well.
    if fresh.is_dir():
        fresh.rename(target)  # onto a folder that is empty, at most
    else:
        os.link(fresh, target)
        fresh.unlink()


def _renamed(fresh: Path, target: Path, how: int) -> int:
    """0, or the number of the error."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.renameat2(_AT_FDCWD, os.fsencode(fresh), _AT_FDCWD, os.fsencode(target), how)
    return ctypes.get_errno() if failed else 0
