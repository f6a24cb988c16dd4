"""Where this installation keeps what it can make again: the embedded Triton, run directories."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nereid_backend.errors import SettingsError

PRIVATE = 0o700


def cache_folder() -> Path:
    """``$NEREID_CACHE_DIR``, else ``$XDG_CACHE_HOME/nereid``, else ``~/.cache/nereid``; made with mode 0700.

    Raises SettingsError when it cannot be made or belongs to another user.
    """
    if chosen := os.environ.get("NEREID_CACHE_DIR"):
        folder = Path(chosen).absolute()
    elif base := os.environ.get("XDG_CACHE_HOME"):
        folder = Path(base).absolute() / "nereid"
    else:
        folder = Path.home() / ".cache" / "nereid"
    try:
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        owner = folder.stat().st_uid
    except OSError as error:
        raise SettingsError(
            f"cache folder {folder} cannot be made ({error.strerror}); set NEREID_CACHE_DIR to a writable folder"
        ) from None
    if owner != os.getuid():
        # Programs are run from here: somebody else's folder would be somebody else's code.
        raise SettingsError(f"cache folder {folder} belongs to another user; set NEREID_CACHE_DIR to one of your own")
    return folder


def try_lock(path: Path) -> int | None:
    """Take the exclusive flock of ``path`` without waiting; the open descriptor, or None when another holds it.

    The lock lasts until the descriptor is closed or the process ends; children do not inherit it (O_CLOEXEC).
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the exclusive flock of ``path``, waiting for it. For short critical sections only."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
