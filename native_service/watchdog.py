"""Notices that a model's process has died, sends its callers away meanwhile, and starts it again.

Triton 2.51 does not: every call of such a model ends with INTERNAL from then on, while all its own health stays green.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import NamedTuple

from native_service.catalogue import Catalogue
from native_service.model_control import ModelControl
from nereid_backend.errors import NereidError

_LOG = logging.getLogger("nereid.watchdog")

_LOOK_S = 0.25
# Who lives for so long after a restart is started again at once; until then each pause is twice the one before.
_STEADY_S = 60.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class _Restart(NamedTuple):
    """The last restart of a model: when it was over, and how long it had been put off."""

    over: float
    pause_s: float


class Watchdog:
    """``watch`` until cancelled."""

    def __init__(self, catalogue: Catalogue, control: ModelControl) -> None:
        self._catalogue, self._control = catalogue, control
        self._restarts: dict[str, _Restart] = {}
        self._reviving: dict[str, asyncio.Task[None]] = {}

    async def watch(self) -> None:
        """Look four times a second."""
        try:
            while True:
                for name in self._catalogue.find_dead():
                    if name not in self._reviving:
                        self._reviving[name] = asyncio.create_task(self._revive(name))
                await asyncio.sleep(_LOOK_S)
        finally:
            for task in self._reviving.values():
                task.cancel()

    async def _revive(self, name: str) -> None:
        try:
            pause_s = self._pause_s(name)
            when = f"in {pause_s:g} s" if pause_s else "now"
            _LOG.error("model %r: its process has died; it is started again %s", name, when)
            await self._try(name, self._control.route_dead())
            await asyncio.sleep(pause_s)
            while not await self._try(name, self._control.revive(name)):
                pause_s = _next_pause_s(pause_s)
                await asyncio.sleep(pause_s)
            self._restarts[name] = _Restart(time.monotonic(), pause_s)
        finally:
            del self._reviving[name]

    async def _try(self, name: str, change: Awaitable[None]) -> bool:
        try:
            await change
        except NereidError as error:
            _LOG.error("%s", error)
            return False
        except Exception:  # noqa: BLE001 - the edge of a task nobody waits for
            _LOG.exception("model %r: starting it again failed in a way nobody planned for", name)
            return False
        return True

    def _pause_s(self, name: str) -> float:
        last = self._restarts.get(name)
        if last is None or time.monotonic() - last.over > _STEADY_S:
            return 0.0
        return _next_pause_s(last.pause_s)


def _next_pause_s(pause_s: float) -> float:
    return min(max(2 * pause_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
