"""Which of the served models are in Triton: loaded by their first call, unloaded when nobody calls or others need room.

A model is *idle*, *loading*, *ready* or *busy*. Whoever calls it through our service is inside ``using``:

    idle     a call (or ``wake``, ``load``, ``pin``) starts one load, which all later ones share  -> loading
    loading  callees first, then room is made, then Triton loads and Envoy routes; calls wait      -> ready, or idle
    ready    calls pass; Envoy takes them straight to Triton and only its counters tell of them    <-> busy
    ready    time out, ``unload`` or another model's need begin to leave:
               1. routes lead to our service, the model's cluster still to Triton
               2. over when none of our calls and none of Envoy's is running; from that very moment calls wait
               3. the cluster leads to our service, too; a call that was routed before 1 and had its body only now
                  shows in Envoy's counters: then everything is put back                          -> ready
               4. Triton unloads                                                                  -> idle
             a call that comes before 2 puts everything back, one that comes later wakes the model again

What makes it safe: the check in 2 and the flag that has calls wait are one step of the event loop, and changes of one
model take turns (:mod:`native_service.models.catalogue`). A model that a loaded or loading meta model calls does not
leave. Nobody waits for another model's load: room is made by models that can leave at once, or is refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress

from native_service.envoy.admin import Traffic
from native_service.envoy.listeners import QUEUE_FULL
from native_service.envoy.settings import Place
from native_service.models.catalogue import Catalogue
from native_service.models.changes import Changes
from native_service.models.conversion import Source
from native_service.models.residence import (
    BUSY,
    BY_TIMEOUT,
    FOR_ROOM,
    IDLE,
    LOADING,
    NO_CALLS,
    OUT_OF_MEMORY,
    READY,
    REASONS,
    Residence,
    Residences,
    Stay,
)
from native_service.settings import ModelOptions, ResidencySettings
from native_service.triton import stubs
from native_service.triton.errors import is_out_of_memory
from nereid_backend.errors import ModelLoadError, ModelLoading, NereidError, NotFound, ResourceExhausted

_LOG = logging.getLogger("nereid.models")

_RETRY_AFTER_S = 5
# Between two looks: often where it matters when a model was called last, else for who asks how models are.
_LOOK_S, _SELDOM_S, _MEASURE_S = 0.5, 5.0, 10.0
# How long calls of a model that is unloaded by name are waited for; Triton lets later ones finish.
_LAST_CALLS_S, _POLL_S = 10.0, 0.02
# A model that comes back so soon has left for nothing.
_THRASHING_S = 30.0


async def _no_traffic() -> Mapping[str, Traffic]:
    return {}


class Residency:
    """``open`` once there is an address, then ``sweep`` until cancelled; ``stop`` at the end."""

    def __init__(self, catalogue: Catalogue, settings: ResidencySettings) -> None:
        self._catalogue = catalogue
        self.settings = settings
        self._traffic: Callable[[], Awaitable[Mapping[str, Traffic]]] = _no_traffic
        self._stays: defaultdict[str, Stay] = defaultdict(Stay)
        self._changes = Changes()
        self._room = asyncio.Lock()
        self._came = asyncio.Event()
        self._measured = 0.0
        self.deallocations: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self.load_retries = self.thrashing = 0

    def open(self, traffic: Callable[[], Awaitable[Mapping[str, Traffic]]]) -> None:
        """From now on calls come, of which ``traffic`` tells; it raises EnvoyUnavailable."""
        self._traffic = traffic

    def begins_idle(self, source: Source) -> bool:
        """Whether a model is idle when it comes: new ones where room is bounded, and those that wait for a call."""
        options = source.settings.options
        on_call = options.load == "first_request" and not options.pinned
        return source.name not in self._catalogue.served and (self._is_bounded or on_call)

    async def begin(self, source: Source) -> None:
        """Load a model that has begun idle: one that is pinned, or that nobody has to call first and there is room for.

        Raises what ``wake`` does.
        """
        wanted = source.settings.options.load == "start" and not self._lack(0, hidden=source.hidden)
        if self._is_pinned(source.name) or wanted:
            await self.wake(source.name)

    async def arrived(self, name: str) -> None:
        """``name`` has come, or another version of it."""
        self._stays[name].since = time.monotonic()
        self._came.set()
        if self._is_loaded(name):
            await self._measure(name)

    def states(self) -> dict[str, Residence]:
        """Of everything that is served, hidden models too."""
        now, epoch = time.monotonic(), time.time()
        found = {}
        for name, model in self._catalogue.served.items():
            stay, options = self._stays[name], model.source.settings.options
            found[name] = Residence(
                self.state(name),
                self._is_pinned(name),
                None if stay.used is None else epoch - (now - stay.used),
                None if model.place is Place.IDLE else epoch - (now - stay.since),
                0 if model.place is Place.IDLE else stay.memory_bytes,
                options.idle_timeout_s,
                stay.cold_starts,
                stay.cold_last_s,
                stay.cold_total_s,
                model.source.hidden,
            )
        return found

    @property
    def residences(self) -> Residences:
        """All that is counted."""
        return Residences(self.states(), dict(self.deallocations), self.load_retries, self.thrashing)

    def state(self, name: str) -> str:
        """One of idle, loading, ready, busy."""
        stay = self._stays[name]
        if not self._is_loaded(name):
            return LOADING if stay.loading is not None else IDLE
        return BUSY if stay.is_busy else READY

    def is_idle(self, name: str) -> bool:
        """Whether ``name`` is served and not in Triton."""
        return name in self._catalogue.served and not self._is_loaded(name)

    def is_on_demand(self, name: str) -> bool:
        """Whether the settings have ``name`` come and go with its calls."""
        model = self._catalogue.served.get(name)
        options = ModelOptions() if model is None else model.source.settings.options
        return self._is_bounded or options.load == "first_request" or options.idle_timeout_s is not None

    @property
    def _is_bounded(self) -> bool:
        return self.settings.max_loaded_models is not None or self.settings.memory_budget_bytes is not None

    @asynccontextmanager
    async def using(self, name: str, budget_s: float | None = None) -> AsyncIterator[None]:
        """While inside, ``name`` is in Triton and stays there.

        Raises what ``wake`` does; ResourceExhausted also when as many calls wait as the model takes at a time.
        """
        stay = self._stays[name]
        until = None if budget_s is None else time.monotonic() + budget_s
        while not self._is_open(name):
            await self._wait(name, stay, None if until is None else until - time.monotonic())
        stay.running += 1
        try:
            yield
        finally:
            stay.running -= 1
            stay.used = time.monotonic()

    async def wake(self, name: str, budget_s: float | None = None) -> None:
        """Return once ``name`` is in Triton. Many callers share one load, which goes on when they leave.

        Raises NotFound, ModelLoading when that takes longer than ``budget_s``, ResourceExhausted when there is no room
        and every model is busy, ModelLoadError with the reason.
        """
        if self._is_open(name):
            return
        try:
            async with asyncio.timeout(budget_s):
                await self._load_once(name)
        except TimeoutError:
            raise ModelLoading(f"Model {name!r} is currently loading") from None

    async def load(self, name: str) -> None:
        """Load ``name`` if it is idle. Raises NereidError, fit for a caller."""
        self._check_public(name)
        await self.wake(name)

    async def unload(self, name: str) -> None:
        """Unload ``name``; its next call loads it again. Calls in progress are answered.

        Raises NotFound, and ModelLoadError while a loaded model calls it.
        """
        self._check_public(name)
        if users := self._loaded_callers(name):
            raise ModelLoadError(f"model {name!r} is called by {', '.join(users)}; unload that first")
        await self._leave(name, insist=True)

    async def pin(self, name: str) -> None:
        """Load ``name`` and keep it in Triton. Raises NereidError; then it is as it was."""
        self._check_public(name)
        await self._changes.to_its_end(self._pin(name, self._stays[name]))

    async def _pin(self, name: str, stay: Stay) -> None:
        stay.pinning += 1
        try:
            await self.wake(name)
            stay.pinned = True
        finally:
            stay.pinning -= 1

    async def unpin(self, name: str) -> None:
        """Let ``name`` go as any other; it is not unloaded by this. Raises NotFound."""
        self._check_public(name)
        self._stays[name].pinned = False

    async def sweep(self) -> None:
        """Unload what nobody has called for its time, until cancelled."""
        while True:
            self._came.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S if self._has_to_know() else _SELDOM_S):
                    await self._came.wait()
            try:
                await self._sweep()
            except (NereidError, OSError) as error:
                _LOG.warning("idle models cannot be unloaded now: %s", error)
            except Exception:  # noqa: BLE001 - the edge of a task nobody waits for
                _LOG.exception("unloading idle models failed in a way nobody planned for; trying again")

    async def stop(self) -> None:
        """Cut the changes that are under way."""
        await self._changes.stop()

    def _has_to_know(self) -> bool:
        """Whether a model may have to go that is in Triton now."""
        timeouts = any(model.source.settings.options.idle_timeout_s for model in self._catalogue.served.values())
        return (timeouts or self._is_bounded) and any(map(self._is_loaded, self._catalogue.served))

    async def _wait(self, name: str, stay: Stay, budget_s: float | None) -> None:
        public = self._catalogue.models.get(name)
        if public is not None and stay.waiting >= public.capacity:
            raise ResourceExhausted(QUEUE_FULL)
        stay.waiting += 1
        try:
            await self.wake(name, budget_s)
        finally:
            stay.waiting -= 1

    def _check_public(self, name: str) -> None:
        if name not in self._catalogue.models:
            raise NotFound(f"model {name!r} is not served here")

    def _is_loaded(self, name: str) -> bool:
        model = self._catalogue.served.get(name)
        return model is not None and model.place is not Place.IDLE

    def _is_open(self, name: str) -> bool:
        return self._is_loaded(name) and not self._stays[name].closed

    def _is_pinned(self, name: str) -> bool:
        stay, model = self._stays[name], self._catalogue.served.get(name)
        if stay.pinned is not None or stay.pinning:
            return stay.pinning > 0 or bool(stay.pinned)
        return model is not None and model.source.settings.options.pinned

    def _loaded_callers(self, name: str) -> list[str]:
        """The meta models that need ``name``: those in Triton, or on their way there."""
        callers = self._catalogue.callers(name)
        return [each for each in callers if self._is_loaded(each) or self._stays[each].loading is not None]

    async def _load_once(self, name: str) -> None:
        stay = self._stays[name]
        if stay.loading is None:
            stay.loading = self._changes.begin(self._load(name))
        await asyncio.shield(stay.loading)

    async def _load(self, name: str) -> None:
        stay, begun, has_room = self._stays[name], time.monotonic(), False
        try:
            if (model := self._catalogue.served.get(name)) is None:
                raise NotFound(f"model {name!r} is not served here")
            for callee in model.source.calls or ():
                if not self._is_open(callee):
                    await self._load_once(callee)
            async with self._room:
                if not (self._is_loaded(name) or stay.holds):  # one that is leaving has its room still
                    await self._make_room(name)
                stay.holds += 1
                has_room = True
            if await self._enter(name):
                stay.since = time.monotonic()
                stay.cold_starts += 1
                stay.cold_last_s = stay.since - begun
                stay.cold_total_s += stay.cold_last_s
                self.thrashing += stay.gone is not None and stay.since - stay.gone < _THRASHING_S
                stay.gone = None
                _LOG.info("model %r is loaded, after %.2f s", name, stay.cold_last_s)
                self._came.set()
                await self._fit(name)
        finally:
            stay.holds -= has_room
            stay.loading = None

    async def _enter(self, name: str) -> bool:
        try:
            return await self._catalogue.enter(name)
        except ModelLoadError as error:
            if not is_out_of_memory(str(error)):
                raise
            async with self._room:
                if not await self._evict_one(name, OUT_OF_MEMORY):
                    raise ResourceExhausted(str(error), _RETRY_AFTER_S) from None
            self.load_retries += 1
            _LOG.warning("%s; trying once more", error)
            return await self._catalogue.enter(name)

    async def _make_room(self, name: str) -> None:
        """Unload others until the settings allow ``name``. Raises ResourceExhausted when they cannot go now."""
        model = self._catalogue.served.get(name)
        hidden = model is None or model.source.hidden
        needed = self._stays[name].memory_bytes or await asyncio.to_thread(self._catalogue.files_bytes, name)
        while reason := self._lack(needed, hidden=hidden):
            if not await self._evict_one(name, FOR_ROOM):
                raise _all_busy(name, reason)

    def _lack(self, needed: int, *, hidden: bool) -> str:
        """Which bound one more model of ``needed`` bytes would break; empty for none."""
        most, budget = self.settings.max_loaded_models, self.settings.memory_budget_bytes
        if most is not None and not hidden and self._count_loaded() >= most:
            return f"max_loaded_models is {most}"
        if budget is not None and self._loaded_bytes() + needed > budget:
            return f"memory_budget_bytes is {budget}"
        return ""

    async def _fit(self, name: str) -> None:
        """Unload others, or ``name`` itself, when it turns out to hold more than there was room for."""
        await self._measure(name)
        budget = self.settings.memory_budget_bytes
        if budget is None:
            return
        async with self._room:
            while self._loaded_bytes() > budget and await self._evict_one(name, FOR_ROOM):
                await self._measure(*filter(self._is_loaded, self._catalogue.served))
            if self._loaded_bytes() <= budget or self._is_pinned(name):
                return
            own = self._stays[name].memory_bytes
            if not await self._leave(name, insist=False):
                return  # it is in use by now
        if own > budget:
            raise ModelLoadError(f"model {name!r} holds {own} bytes, memory_budget_bytes is {budget}; raise that")
        raise _all_busy(name, f"memory_budget_bytes is {budget}")

    async def _evict_one(self, name: str, reason: str) -> bool:
        """Unload the model whose last use is longest ago, for ``name``; whether there was one that could go."""
        await self.look()
        for victim in sorted(self._victims(name), key=lambda each: self._stays[each].last):
            if self._may_leave(victim) and await self._leave(victim, insist=False):
                self._count(victim, reason)
                _LOG.info("model %r is unloaded to make room for %r", victim, name)
                return True
        return False

    def _victims(self, name: str) -> Iterator[str]:
        now = time.monotonic()
        for each, model in self._catalogue.served.items():
            stay, own_s = self._stays[each], model.source.settings.options.min_residency_s
            young = now - stay.since < (self.settings.min_residency_s if own_s is None else own_s)
            if each != name and self._is_open(each) and not (stay.is_busy or young) and self._may_leave(each):
                yield each

    def _may_leave(self, name: str) -> bool:
        """Whether nobody wants ``name`` to stay, nothing else is being done with it, and it is alive."""
        kept = self._is_pinned(name) or self._loaded_callers(name) or self._catalogue.is_changing(name)
        return not kept and name not in self._catalogue.find_dead()

    def _count(self, name: str, reason: str) -> None:
        self.deallocations[reason] += 1
        self._stays[name].gone = time.monotonic()

    def _count_loaded(self) -> int:
        return sum(
            not model.source.hidden and (model.place is not Place.IDLE or self._stays[name].holds > 0)
            for name, model in self._catalogue.served.items()
        )

    def _loaded_bytes(self) -> int:
        return sum(
            self._stays[name].memory_bytes
            for name, model in self._catalogue.served.items()
            if model.place is not Place.IDLE or self._stays[name].holds > 0
        )

    async def _leave(self, name: str, *, insist: bool) -> bool:
        """Unload ``name``; whether it has gone. One that ``insist`` has its calls wait from the start."""
        return await self._changes.to_its_end(self._leave_now(name, self._stays[name], insist))

    async def _leave_now(self, name: str, stay: Stay, insist: bool) -> bool:
        closes = insist
        stay.closed += closes
        stay.holds += 1  # it may have to stay
        deadline = time.monotonic() + _LAST_CALLS_S

        async def is_over() -> bool:
            nonlocal closes
            while True:
                await self.look()
                # Who comes to call it from here on finds it closed, and waits.
                if not stay.is_busy and (insist or not (self._is_pinned(name) or self._loaded_callers(name))):
                    stay.closed += not closes
                    closes = True
                    return True
                if not insist or time.monotonic() > deadline:
                    return insist
                await asyncio.sleep(_POLL_S)

        try:
            return await self._catalogue.leave(name, is_over)
        finally:
            stay.holds -= 1
            stay.closed -= closes

    async def _sweep(self) -> None:
        await self.look()
        now = time.monotonic()
        # Who calls comes before whom it calls.
        for name, model in reversed(tuple(self._catalogue.served.items())):
            stay, timeout_s = self._stays[name], model.source.settings.options.idle_timeout_s
            over = model.source.hidden and bool(self._catalogue.callers(name))
            over |= timeout_s is not None and now - stay.last >= timeout_s
            over &= self._is_open(name) and not stay.is_busy and self._may_leave(name)
            if over and await self._leave(name, insist=False) and not model.source.hidden:
                self._count(name, BY_TIMEOUT)
                _LOG.info("model %r is unloaded: nobody has called it for %g s", name, timeout_s or 0)
        if now - self._measured > _MEASURE_S:
            self._measured = now
            await self._measure(*filter(self._is_loaded, self._catalogue.served))

    async def look(self) -> None:
        """Learn from Envoy what is called: its own counters are all that shows calls it hands to Triton.

        Raises EnvoyUnavailable.
        """
        traffic, now = await self._traffic(), time.monotonic()
        for name in self._catalogue.served:
            stay, seen = self._stays[name], traffic.get(name, NO_CALLS)
            if seen.active or seen.total != stay.traffic.total:
                stay.used = now
            stay.traffic = seen
        for name in reversed(tuple(self._catalogue.served)):
            used = self._stays[name].used
            for callee in self._catalogue.served[name].source.calls or ():
                if used is not None:
                    self._stays[callee].used = max(used, self._stays[callee].used or 0.0)
        for name in self._stays.keys() - self._catalogue.served.keys():
            with suppress(KeyError):
                if not self._stays[name].running and self._stays[name].loading is None:
                    del self._stays[name]

    async def _measure(self, *names: str) -> None:
        held = await asyncio.to_thread(_memory_bytes, {name: self._catalogue.processes_of(name) for name in names})
        for name, count in held.items():
            self._stays[name].memory_bytes = count or self._stays[name].memory_bytes


def _all_busy(name: str, reason: str) -> ResourceExhausted:
    return ResourceExhausted(f"model {name!r} has to wait: all active models are busy ({reason})", _RETRY_AFTER_S)


def _memory_bytes(processes: Mapping[str, list[int]]) -> dict[str, int]:
    return {name: sum(map(stubs.memory_bytes_of, pids)) for name, pids in processes.items()}
