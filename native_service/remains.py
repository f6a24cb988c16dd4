"""What is left of a run whose supervisor has gone: processes, shared memory, a folder; and their end.

Run as a script, this file is what a supervisor leaves beside itself: it waits for the lease of the run, which it gets
when the supervisor ends in whatever way, and clears. Nothing else would: a model's process waits for its tritonserver
in shared memory, and when that was killed under load some wait for ever, with all their memory. A script needs no more
than a bare interpreter (6 MB), so nothing but the standard library is imported here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "NEREID_RUN"
"""The variable that every process of a run has in its environment; its value is the run's folder."""
LEASE = "lease"
_PROC = Path("/proc")
_KILL_WAIT_S = 5.0
_KILL_POLL_S = 0.05


def clear(run: Path, regions: Path) -> list[int]:
    """Kill what is left of ``run``, remove its shared memory and its folder; the processes that do not die.

    ``regions`` is how the paths of its shared memory begin.
    """
    staying = _kill_marked(run)
    for region in regions.parent.glob(f"{regions.name}*"):
        with contextlib.suppress(FileNotFoundError):
            if region.stat().st_uid == os.getuid():
                region.unlink()
    shutil.rmtree(run, ignore_errors=True)
    return staying


def clear_afterwards(run: Path, regions: Path) -> subprocess.Popen[bytes]:
    """Start the process that clears ``run`` when nobody holds its lease any more, and ends then."""
    return subprocess.Popen(  # in a session of its own: a terminal's Ctrl-C is not for it
        [sys.executable, "-I", "-S", os.path.abspath(__file__), str(run), str(regions)],  # noqa: PTH100
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )


def _kill_marked(run: Path) -> list[int]:
    """SIGKILL every process of ``run`` and wait until they are gone (a region may only go after its users)."""
    deadline = time.monotonic() + _KILL_WAIT_S
    while pids := list(_marked(run)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return pids
        time.sleep(_KILL_POLL_S)
    return []


def _marked(run: Path) -> Iterator[int]:
    """The ids of this user's other processes whose environment carries the mark of ``run``.

    A zombie's environment reads as empty, so what is dead but not yet waited for is not listed.
    """
    mark = os.fsencode(f"{MARK}={run}")
    for entry in _PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if entry.stat().st_uid == os.getuid() and mark in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
        except OSError:
            continue  # gone meanwhile, or not ours to look at


def _wait_and_clear(run: Path, regions: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the supervisor, whose end is waited for
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(FileNotFoundError), (run / LEASE).open("rb") as lease:
        fcntl.flock(lease, fcntl.LOCK_EX)
        clear(run, regions)


if __name__ == "__main__":
    _wait_and_clear(Path(sys.argv[1]), Path(sys.argv[2]))
