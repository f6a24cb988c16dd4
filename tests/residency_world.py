"""Everything around a residency made of lines: a Triton, an Envoy with workers that learn late, callers, and a clock.

The clock runs only while everybody waits, so that minutes of calls take no time, and a seed decides how long each step
takes. Whoever asks a Triton for a model that it does not have finds out.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from native_service.envoy.admin import Traffic
from native_service.envoy.settings import Admitted, Place
from native_service.models import catalogue as catalogue_module
from native_service.models import residency as residency_module
from native_service.models.catalogue import Catalogue
from native_service.models.conversion import Converted, Source
from native_service.models.residency import Residency
from native_service.settings import ModelOptions, ModelSettings, ResidencySettings
from nereid_backend.errors import EnvoyUnavailable, ModelLoadError
from nereid_backend.spec import ModelSpec

LEARNING_S = 0.015
"""Envoy's workers go by old routes and clusters for that long at most."""


class _Selector(selectors.DefaultSelector):
    """Waits for nothing: the time that would pass is told instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout is not None:
            self.now += timeout
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


class Triton:
    """Loads and unloads in its time. ``broken`` models do not load, nor do those that are ``large`` while others are
    there."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.loaded: set[str] = set()
        self.loads: Counter[str] = Counter()
        self.broken: set[str] = set()
        self.large: set[str] = set()
        self.dead: set[str] = set()
        self.load_s: float | None = None
        self._changing: set[str] = set()

    async def load(self, model: str, _timeout_s: float, behind: Sequence[str] = ()) -> None:
        assert model not in self._changing, f"two changes of {model} at a time"
        self._changing.add(model)
        self.loads[model] += 1
        await self._world.pass_time(self.load_s or 0.4)
        self._changing.discard(model)
        if model in self.broken:
            raise ModelLoadError(f"model {model!r} could not be loaded: no such luck")
        if model in self.large and self.loaded:
            raise ModelLoadError(f"model {model!r} could not be loaded: std::bad_alloc")
        self.loaded |= {model, *behind}
        self._world.check()

    async def unload(self, model: str) -> None:
        assert model not in self._changing, f"two changes of {model} at a time"
        assert not self._world.in_triton[model], f"{model} is unloaded while it runs"
        self._changing.add(model)
        try:
            await self._world.pass_time(0.1)
            self.loaded.discard(model)
        finally:
            self.dead.discard(model)
            self._changing.discard(model)

    def find_dead(self) -> frozenset[str]:
        return frozenset(self.dead)

    def processes_of(self, model: str) -> list[int]:
        return [self._world.names.index(model)] if model in self.loaded else []


class World:
    """One seed's."""

    def __init__(
        self, folder: Path, seed: int, settings: ResidencySettings, models: Mapping[str, ModelOptions]
    ) -> None:
        self.random = random.Random(seed)
        self.names = list(models)
        self.triton = Triton(self)
        self.in_triton: Counter[str] = Counter()
        """Calls that run there now."""
        self.ended: Counter[str] = Counter()
        """Calls, by how they ended."""
        self.memory_bytes: dict[str, int] = {}
        self.callees: dict[str, tuple[str, ...]] = {}
        self.most_loaded: int | None = settings.max_loaded_models
        self.envoy_is_away = False
        self._active: Counter[str] = Counter()
        self._total: Counter[str] = Counter()
        self._routes: dict[str, Place] = {}
        self._learnt_at = 0.0
        places: Any = SimpleNamespace(repository=folder / "repository", staging=folder / "staging")
        for place in vars(places).values():
            place.mkdir(parents=True)
        self._folder, self._options = folder, models
        triton: Any = self.triton
        self.catalogue = Catalogue(places, triton, 60)
        self.residency = Residency(self.catalogue, settings)

    async def start(self) -> None:
        for name, options in self._options.items():
            await self.put(name, options)
        front: Any = SimpleNamespace(start=self._set_models, set_models=self._set_models)
        nothing: Any = None
        await self.catalogue.open(front, nothing, None)
        self.residency.open(self._traffic)

    async def put(self, name: str, options: ModelOptions) -> None:
        """Serve a model of that name, as new ones are."""
        staged = self._folder / "staging" / name
        (staged / name / "1").mkdir(parents=True)
        settings = ModelSettings(name=name, device="cpu", queue_capacity=64, options=options)
        source = Source(self._folder / name, settings, self.callees.get(name), name.startswith("hidden"))
        self.names += [] if name in self.names else [name]
        idle = self.residency.begins_idle(source)
        if not idle:
            for callee in source.calls or ():
                await self.residency.wake(callee)
        await self.catalogue.put(source, Converted(ModelSpec(name, "fake", "fake", (), (), ()), staged), idle=idle)
        await self.residency.arrived(name)
        if idle:
            await self.residency.begin(source)

    async def pass_time(self, most_s: float) -> None:
        """Anything from nothing to ``most_s``."""
        await asyncio.sleep(self.random.choice((0, self.random.random() * most_s, most_s)))

    def check(self) -> None:
        """What must hold at any time."""
        for name in self.triton.loaded:
            missing = set(self.callees.get(name, ())) - self.triton.loaded
            assert not missing, f"{name} is loaded without {missing}"
        if self.most_loaded is not None:
            assert len([name for name in self.triton.loaded if not name.startswith("hidden")]) <= self.most_loaded

    async def call(self, name: str, budget_s: float | None = None) -> None:
        """One call of the public address: its route is chosen when it begins and taken when its body is here."""
        how = "fine"
        try:
            route = self._routes.get(name, Place.IDLE)
            await self.pass_time(2.0)
            if route is Place.TRITON and self._routes[name] is not Place.IDLE:
                await self._run(name)
            else:
                async with self.residency.using(name, budget_s):
                    await self.pass_time(0.1)
                    assert self._routes[name] is not Place.IDLE, "our own call came back to us"
                    await self._run(name)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is counted
            how = f"{type(error).__name__}: {error}"
        self.ended[how] += 1

    async def _run(self, name: str) -> None:
        self._active[name] += 1
        self._total[name] += 1
        self.in_triton[name] += 1
        try:
            for each in (name, *self.callees.get(name, ())):
                assert each in self.triton.loaded, f"{each} is not in Triton"
            await self.pass_time(0.5)
            for each in (name, *self.callees.get(name, ())):
                assert each in self.triton.loaded, f"{each} left while it was running"
        finally:
            self._active[name] -= 1
            self.in_triton[name] -= 1

    async def _set_models(self, models: Sequence[Admitted], *_: Any) -> None:
        await self.pass_time(0.05)
        if self.envoy_is_away:
            raise EnvoyUnavailable("no such luck")
        loop = asyncio.get_running_loop()
        # Routes come in the order in which they were given.
        self._learnt_at = max(self._learnt_at, loop.time() + LEARNING_S * self.random.random())
        loop.call_at(self._learnt_at, self._routes.update, {model.spec.name: model.place for model in models})
        await asyncio.sleep(0)

    async def _traffic(self) -> dict[str, Traffic]:
        await self.pass_time(0.01)
        if self.envoy_is_away:
            raise EnvoyUnavailable("no such luck")
        return {name: Traffic(self._active[name], self._total[name]) for name in self.names}


async def _at_once(work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The clock would not wait for another thread."""
    return work(*arguments, **options)


@contextmanager
def fake_clock(loop: asyncio.AbstractEventLoop, world: World) -> Iterator[None]:
    clock: Any = SimpleNamespace(monotonic=loop.time, time=loop.time)
    memory: Any = SimpleNamespace(memory_bytes_of=lambda pid: world.memory_bytes.get(world.names[pid], 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residency_module, "time", clock)
        patch.setattr(catalogue_module, "time", clock)
        patch.setattr(residency_module, "stubs", memory)
        patch.setattr(asyncio, "to_thread", _at_once)
        yield


def run(world: World, scenario: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    """Run ``scenario`` in ``world``, with the sweep beside it."""

    async def inside() -> None:
        await world.start()
        sweeping = asyncio.create_task(world.residency.sweep())
        try:
            await scenario(world)
        finally:
            sweeping.cancel()
            await asyncio.gather(sweeping, return_exceptions=True)
            await world.residency.stop()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    loop = _Loop()
    try:
        with fake_clock(loop, world):
            loop.run_until_complete(inside())
    finally:
        loop.close()
