"""Notices that Triton or a model's process has died or hangs, sends callers away meanwhile, and starts it again.

Triton 2.51 does not: every call of a model whose process has died ends with INTERNAL from then on, while all its own
health stays green.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

from native_service.children.restarts import Pauses, Tries
from nereid_backend.errors import NereidError, TritonUnavailable

_LOG = logging.getLogger("nereid.watchdog")

_LOOK_S, _BLIND_S = 0.25, 10.0
# Triton answers within milliseconds, also while it loads; so often in a row it must fail to.
_QUESTION_S, _MOST_SILENCES = 3.0, 10
_MOST_RESTARTS, _RESTART_WINDOW_S = 5, 600.0


class Triton(Protocol):
    """The process that runs the models."""

    @property
    def is_running(self) -> bool: ...

    def find_lost(self) -> Collection[str]:
        """The models that only a new process can load."""

    async def is_ready(self) -> bool:
        """Whether it answers at all; tells within a second or so."""

    async def wait(self) -> str:
        """Why it has ended, once it has."""

    async def drop(self) -> None:
        """End what is left of it; its models are dead then."""

    async def restart(self) -> None:
        """A new one, without models, in the place of one that was dropped. Raises TritonUnavailable."""


class Catalogue(Protocol):
    def find_dead(self) -> list[str]:
        """The models that cannot answer until they are revived, in the order in which they load."""

    def kill_hung(self) -> list[str]:
        """Make dead what will not answer any more; a line for the log for each."""


class Control(Protocol):
    """Both raise NereidError."""

    async def route_dead(self) -> None: ...

    async def revive(self, name: str) -> None: ...


class Watchdog:
    """``watch`` until cancelled."""

    def __init__(
        self, catalogue: Catalogue, control: Control, triton: Triton, restore: Callable[[], Awaitable[None]]
    ) -> None:
        """``restore``: what a new Triton has to be told before its models come back."""
        self._catalogue, self._control, self._triton, self._restore = catalogue, control, triton, restore
        self._pauses: defaultdict[str, Pauses] = defaultdict(Pauses)
        self._reviving: dict[str, asyncio.Task[None]] = {}
        self._given_up: set[str] = set()

    async def watch(self) -> str:
        """Look after everything until Triton is beyond restarting; the reason as a sentence."""
        tries, pauses = Tries(_MOST_RESTARTS, _RESTART_WINDOW_S), Pauses()
        reason = await self._while_it_runs(reload=False)
        while tries.take():
            pause_s = pauses.next_s()
            _LOG.error("%s; it is started again %s, with all its models", reason, _when(pause_s))
            await self._triton.drop()
            await self._try(self._control.route_dead())
            await asyncio.sleep(pause_s)
            try:
                await self._triton.restart()
            except TritonUnavailable as error:
                reason = str(error)
            else:
                pauses.back()
                await self._try(self._restore())
                reason = await self._while_it_runs(reload=True)
        return f"{reason}, {tries}"

    async def _while_it_runs(self, *, reload: bool) -> str:
        """Look after the models, all of which have to be loaded first if ``reload``; why a new process is needed."""
        ended = asyncio.create_task(self._triton.wait())
        asking = asyncio.create_task(self._ask())
        looking = asyncio.create_task(self._look(reload=reload))
        try:
            done, _ = await asyncio.wait((ended, asking, looking), return_when=asyncio.FIRST_COMPLETED)
            return await (ended if ended in done else done.pop())
        finally:
            tasks = (ended, asking, looking, *self._reviving.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self) -> str:
        """Ask Triton now and then, until it has given no answer for half a minute."""
        silences = 0
        while silences < _MOST_SILENCES:
            await asyncio.sleep(_QUESTION_S)
            silences = 0 if await self._triton.is_ready() else silences + 1
        return "tritonserver does not answer any more"

    async def _look(self, *, reload: bool) -> str:
        """Four times a second, until a model needs a new Triton."""
        if reload:
            # One after the other, as at the start; what fails is dead and has its turn below.
            for name in self._catalogue.find_dead():
                await self._try(self._control.revive(name))
            _LOG.info("tritonserver is back")
        while True:
            pause_s = _LOOK_S
            lost: set[str] = set()
            try:
                self._revive_dead()
                lost = set(self._triton.find_lost()) - self._given_up
            except OSError as error:  # too many open files, say
                _LOG.warning("the processes of the models cannot be looked at (%s)", error.strerror)
                pause_s = _BLIND_S
            # A model that brings Triton to this once more is left alone: the others pay for each restart.
            if lost:
                self._given_up |= lost
                return f"the load of {', '.join(sorted(lost))} hangs in tritonserver"
            await asyncio.sleep(pause_s)

    def _revive_dead(self) -> None:
        """Begin to revive what is dead, or hangs; nothing while Triton itself is gone."""
        if not self._triton.is_running:
            return
        for line in self._catalogue.kill_hung():
            _LOG.error("%s", line)
        for name in self._catalogue.find_dead():
            if name not in self._reviving:
                self._reviving[name] = asyncio.create_task(self._revive(name))

    async def _revive(self, name: str) -> None:
        pauses = self._pauses[name]
        try:
            pause_s = pauses.next_s()
            _LOG.error("model %r: its process has died; it is started again %s", name, _when(pause_s))
            await self._try(self._control.route_dead())
            await asyncio.sleep(pause_s)
            while not await self._try(self._control.revive(name)):
                await asyncio.sleep(pauses.next_s())
            pauses.back()
        finally:
            del self._reviving[name]

    async def _try(self, change: Awaitable[None]) -> bool:
        try:
            await change
        except NereidError as error:
            _LOG.error("%s", error)
            return False
        except Exception:  # noqa: BLE001 - the edge of a task nobody waits for
            _LOG.exception("starting a model again failed in a way nobody planned for")
            return False
        return True


def _when(pause_s: float) -> str:
    return f"in {pause_s:g} s" if pause_s else "now"
