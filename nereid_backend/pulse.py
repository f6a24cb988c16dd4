"""What a model's process tells the supervisor, without a word: since when it runs something, and that it lives.

Two numbers in a file of the run directory that ``NEREID_RUN`` names, both nanoseconds of the machine's monotonic clock.
Writing them costs a call of ``execute`` some microseconds. Outside ``nereid serve`` there is nobody to tell.

A process that stood still (stopped, swapped out) with a call may have lost that call: Triton 2.51 gives it up when the
process has shown no life for a second, takes what comes of it later for the answer of another call, or crashes when it
is asked about it. So the process ends itself before it goes on with such a call; the supervisor starts it again.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nereid_backend.scripts.link import RUN_VARIABLE

PULSE_FOLDER = "pulse"
BEAT_S = 0.2
_STOOD_STILL_S = 0.7
"""Triton looks for life once a second, and the process shows it three times in that: less is never taken for death."""
_LATE_S = 1.0
"""After a time of standing still: what came meanwhile begins to run within this."""
_CELLS = struct.Struct("=qq")
_BUSY_SINCE, _BEAT = 0, 1

Execute = Callable[[list[Any]], list[Any]]


class Pulse(NamedTuple):
    """When the run in progress began, 0 when there is none; and when the process last had a moment to itself."""

    busy_since_ns: int
    beat_ns: int


def read(file: Path) -> Pulse | None:
    """What the process of ``file`` tells; None when it tells nothing."""
    try:
        return Pulse(*_CELLS.unpack(file.read_bytes()))
    except (OSError, struct.error):
        return None


def told(execute: Execute) -> Execute:
    """``execute`` that tells when it begins and ends; a thread beats meanwhile, and while nothing runs."""
    run = os.environ.get(RUN_VARIABLE)
    if run is None or not Path(run, PULSE_FOLDER).is_dir():
        return execute
    try:
        cells = _opened(Path(run, PULSE_FOLDER, str(os.getpid())))
    except OSError as error:  # no room on the disk, say: better a model that nobody watches than none
        sys.stderr.write(f"this model's process cannot tell how it is ({error.strerror}); it is served unwatched\n")
        return execute
    watch = _Watch(cells)
    with contextlib.suppress(ValueError):  # not in the main thread, where alone a process can ask for signals
        signal.signal(signal.SIGCONT, lambda *_: watch.continued())

    def telling(requests: list[Any]) -> list[Any]:
        watch.begin()
        try:
            return execute(requests)
        finally:
            watch.end()

    def beat() -> None:
        while True:
            time.sleep(BEAT_S)
            watch.beat()

    threading.Thread(target=beat, name="nereid-pulse", daemon=True).start()
    return telling


class _Watch:
    """Writes the pulse, and notices from it when the process has stood still."""

    def __init__(self, cells: memoryview) -> None:
        self._cells = cells
        self._cpu_ns = time.process_time_ns()
        # When beats came back after a pause, and when the process had certainly stood still in it; 0: never.
        self._back_ns = self._stood_ns = 0

    def begin(self) -> None:
        self.beat()
        self._end_if_lost()
        self._cells[_BUSY_SINCE] = time.monotonic_ns()

    def end(self) -> None:
        # The beat first: it may be old after a run that held the interpreter all the time.
        self.beat()
        self._end_if_lost()
        self._cells[_BUSY_SINCE] = 0

    def beat(self) -> None:
        """Also from a thread of its own. In a run a pause tells nothing: the model may have held the interpreter."""
        now, last, cpu_ns = time.monotonic_ns(), self._cells[_BEAT], time.process_time_ns()
        if now - last > _STOOD_STILL_S * 1e9:
            self._back_ns = now
            if not self._cells[_BUSY_SINCE] and 3 * (cpu_ns - self._cpu_ns) < now - last:
                self._stood_ns = now
        self._cpu_ns, self._cells[_BEAT] = cpu_ns, now

    def continued(self) -> None:
        """After a signal that had stopped the process."""
        self.beat()
        if self._is_recent(self._back_ns):
            self._stood_ns = self._back_ns

    def _end_if_lost(self) -> None:
        if self._is_recent(self._stood_ns):
            os.write(2, b"this model's process stood still, and Triton may have given its call up; it ends\n")
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_recent(self, when_ns: int) -> bool:
        return when_ns > 0 and time.monotonic_ns() - when_ns < _LATE_S * 1e9


def _opened(file: Path) -> memoryview:
    with file.open("w+b") as opened:
        opened.write(_CELLS.pack(0, time.monotonic_ns()))
        opened.flush()
        return memoryview(mmap.mmap(opened.fileno(), _CELLS.size)).cast("q")
