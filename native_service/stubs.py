"""The processes that tritonserver starts for the instances of a python model."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory lives on Linux
_PROC = Path("/proc")


def stubs_of(server: int, model: Path) -> set[int]:
    """The ids of the children of process ``server`` that run ``model``, a directory of its repository."""
    script = os.fsencode(model / "1" / "model.py")
    found = set()
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # A zombie's command line reads as empty.
            if script in (entry / "cmdline").read_bytes().split(b"\0") and _parent(entry) == server:
                found.add(int(entry.name))
        except OSError:
            continue  # gone meanwhile, or not ours to look at
    return found


def is_running(pid: int, model: Path) -> bool:
    """Whether process ``pid``, a stub of ``model`` once, still is: neither gone nor a zombie nor another by now."""
    try:
        return os.fsencode(model / "1" / "model.py") in (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def regions_of(pid: int, prefix: str) -> frozenset[Path]:
    """The files of shared memory whose name begins with ``prefix`` that process ``pid`` has mapped."""
    try:
        paths = {line.split(maxsplit=5)[-1] for line in (_PROC / str(pid) / "maps").read_text().splitlines()}
    except OSError:
        return frozenset()
    return frozenset(Path(path) for path in paths if path.startswith(f"{SHARED_MEMORY}/{prefix}"))


def kill(pids: Iterable[int]) -> None:
    """SIGKILL each of ``pids`` that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _parent(entry: Path) -> int:
    # pid (name of any characters) state parent ...
    return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
