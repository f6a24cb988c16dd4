"""What a model's process tells the supervisor, without a word: since when it runs something, and that it lives.

Two numbers in a file of the run directory that ``NEREID_RUN`` names, both nanoseconds of the machine's monotonic clock.
Writing them costs a call of ``execute`` less than a microsecond. Outside ``nereid serve`` there is nobody to tell.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nereid_backend.scripts.link import RUN_VARIABLE

PULSE_FOLDER = "pulse"
BEAT_S = 2.0
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
    clock = time.monotonic_ns

    def telling(requests: list[Any]) -> list[Any]:
        cells[_BUSY_SINCE] = clock()
        try:
            return execute(requests)
        finally:
            # The beat first: it may be old after a run that held the interpreter all the time.
            cells[_BEAT] = clock()
            cells[_BUSY_SINCE] = 0

    def beat() -> None:
        while True:
            time.sleep(BEAT_S)
            cells[_BEAT] = clock()

    threading.Thread(target=beat, name="nereid-pulse", daemon=True).start()
    return telling


def _opened(file: Path) -> memoryview:
    with file.open("w+b") as opened:
        opened.write(_CELLS.pack(0, time.monotonic_ns()))
        opened.flush()
        return memoryview(mmap.mmap(opened.fileno(), _CELLS.size)).cast("q")
