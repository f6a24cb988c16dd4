"""File locks between processes of one user; the kernel gives them back however their holder ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


def try_lock(path: Path) -> int | None:
    """Take the exclusive flock of ``path`` without waiting; the open descriptor, or None when another holds it.

    The lock lasts until the descriptor is closed or the process ends; children do not inherit it (O_CLOEXEC).
    """
    with ExitStack() as undo:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        undo.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        undo.pop_all()
        return descriptor


def try_share(path: Path) -> int | None:
    """Share the flock of a file that is there, without waiting; the open descriptor, or None when there is no file.

    Who takes it exclusively before removing the file knows that nobody uses it: a file that goes counts as gone.
    """
    with ExitStack() as undo:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            undo.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):
            return None
        if os.fstat(descriptor).st_nlink == 0:
            return None
        undo.pop_all()
        return descriptor


def wait_lock(path: Path) -> int:
    """Take the exclusive flock of ``path``, waiting for it; the open descriptor."""
    with ExitStack() as undo:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        undo.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        undo.pop_all()
        return descriptor


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the exclusive flock of ``path``, waiting for it. For short critical sections only."""
    descriptor = wait_lock(path)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the exclusive flock of a folder itself, waiting for it; nothing where its file system has no locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
