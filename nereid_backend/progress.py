"""Steps that may take minutes say so at their start and, now and then, that they are still at it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# The first reminder, and the longest pause between two: each is twice the one before, so that a log stays readable.
_FIRST_S, _LONGEST_S = 5.0, 60.0


@contextmanager
def told(log: logging.Logger, what: str, *, at_start: bool = True) -> Iterator[None]:
    """Log ``what`` now and, while the block runs, after 5 s, 10 s, 20 s, ... again with the seconds it has taken.

    Without ``at_start`` nothing is said of a quick one.
    A thread of its own tells the time: the block may be a coroutine's, or wait for a child process.
    """
    over = threading.Event()
    if at_start:
        log.info("%s", what)
    reminder = threading.Thread(target=_remind, args=(log, what, over), name="progress", daemon=True)
    reminder.start()
    try:
        yield
    finally:
        over.set()
        reminder.join()


def _remind(log: logging.Logger, what: str, over: threading.Event) -> None:
    began, pause_s = time.monotonic(), _FIRST_S
    while not over.wait(pause_s):
        elapsed_s = time.monotonic() - began
        log.info("still %s (%.0f s)", what, elapsed_s)
        pause_s = min(elapsed_s, _LONGEST_S)
