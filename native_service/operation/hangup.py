"""What SIGHUP means to a server: read the settings again; or the end, when the terminal it was started in has gone."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

_LOG = logging.getLogger("nereid.reload")


class Hangup:
    """``received`` is the signal's handler. One that comes before ``will`` is obeyed then."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        # Under nohup, which has the signal ignored, the end of the terminal is not meant to be ours.
        self._has_terminal = _terminal_is_there() and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        self._reload: Callable[[], Awaitable[Any]] | None = None
        self._is_due = False
        self._running: asyncio.Task[None] | None = None

    def will(self, reload: Callable[[], Awaitable[Any]]) -> None:
        """What to do from now on."""
        self._reload = reload
        self._begin()

    def received(self) -> None:
        if self._has_terminal and not _terminal_is_there():
            self._stop()
            return
        self._is_due = True
        self._begin()

    def _begin(self) -> None:
        # One that is running may have read the file already: another follows it.
        if self._is_due and self._reload is not None and self._running is None:
            self._is_due = False
            self._running = asyncio.ensure_future(self._run(self._reload))

    async def _run(self, reload: Callable[[], Awaitable[Any]]) -> None:
        try:
            await reload()
        except Exception:  # noqa: BLE001 - the edge of a task nobody waits for
            _LOG.exception("a reload failed in a way nobody planned for")
        finally:
            self._running = None
        self._begin()


def _terminal_is_there() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
