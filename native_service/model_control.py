"""Decides which models are served: those at the start, then what callers ask for and what the folder holds.

The settings say what may be served: the listed models, or, without a list, whatever is in the folder.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import NamedTuple

from native_service.catalogue import Catalogue
from native_service.conversion import Converted, Converter, Source
from native_service.settings import Settings
from native_service.triton_errors import without_paths
from native_service.watch import Fingerprint, fingerprint, settled
from nereid_backend.errors import (
    BundleError,
    ModelLoadError,
    NereidError,
    NotFound,
    ResourceExhausted,
    SettingsError,
    TritonUnavailable,
)
from nereid_backend.spec import ModelSpec

_LOG = logging.getLogger("nereid.serve")

_MOST_WAITING = 16


class _Attempt(NamedTuple):
    """What a model was made of, with the contracts of its callees when it is a meta model."""

    source: Source
    state: Fingerprint
    callees: Mapping[str, ModelSpec]


class ModelControl:
    """``convert`` and ``load_converted`` at the start; then ``load``, ``unload`` and ``follow``."""

    def __init__(
        self, settings: Settings, catalogue: Catalogue, new_converter: Callable[[], Converter], *, lenient: bool
    ) -> None:
        """``lenient``: what cannot be served at the start is logged and left out, instead of stopping the start."""
        self._settings = settings
        self._catalogue = catalogue
        self._new_converter = new_converter
        self._lenient = lenient
        # What was made of each name last, whether it went well or not: only something else is worth another try.
        self._tried: dict[str, _Attempt] = {}
        self._unloaded: set[str] = set()
        self._view: Mapping[str, Fingerprint] | None = None
        self._complaints: set[str] = set()
        self._restarts: Counter[str] = Counter()
        self._turn = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()

    @property
    def restarts(self) -> dict[str, int]:
        """How often each served model was started again after its process had died."""
        return {name: self._restarts[name] for name in self._catalogue.specs}

    async def convert(self) -> list[tuple[Source, Converted]]:
        """Convert everything the settings name. Raises BundleError with a line per model that failed."""
        async with self._new_converter() as converter:
            sources, problems = await converter.sources(self._settings)
            self._report(problems, BundleError)
            converted, problems = [], []
            specs: dict[str, ModelSpec] = {}
            for source in sources:
                try:
                    staged = await self._stage(source, converter, specs)
                except NereidError as error:
                    problems.append(f"model {source.name!r}: {error}")
                else:
                    converted.append((source, staged))
                    specs[source.name] = staged.spec
                    _LOG.info("converted %s", source.name)
        self._report(problems, BundleError)
        return converted

    async def load_converted(self, converted: Sequence[tuple[Source, Converted]]) -> None:
        """Load what ``convert`` gave. Raises ModelLoadError with a line per model that failed."""
        problems = []
        for source, staged in converted:
            try:
                await self._catalogue.put(source, staged)
            except TritonUnavailable:
                raise
            except NereidError as error:
                problems.append(str(error))
            else:
                _LOG.info("loaded %s (%s on %s)", source.name, staged.spec.engine, staged.spec.device)
        self._report(problems, ModelLoadError)

    async def load(self, name: str) -> None:
        """Serve the model ``name`` of the settings as it is on disk now. Raises NereidError, fit for a caller."""
        await self._in_turn(partial(self._load, name))

    async def unload(self, name: str) -> None:
        """Serve ``name`` no longer, until it is loaded by name. Raises NereidError, fit for a caller."""
        await self._in_turn(partial(self._unload, name))

    async def route_dead(self) -> None:
        """Send the callers of models whose process has died away. Raises NereidError."""
        await self._catalogue.route_dead()

    async def revive(self, name: str) -> None:
        """Serve ``name``, whose process has died, again, if it is still to be served. Raises NereidError.

        It does not wait for the changes of other models.
        """
        if await self._catalogue.revive(name):
            self._restarts[name] += 1
            _LOG.info("model %r is back", name)

    async def follow(self, reread: Callable[[], Settings] | None = None) -> None:
        """Keep up with the folder, and with the list of models that ``reread`` gives, until cancelled."""
        folder = self._settings.server.folder
        is_a_model = any(source.path == folder for source, *_ in self._tried.values())
        async with aclosing(settled(folder, as_one=is_a_model)) as views:
            async for view in views:
                if reread is not None:
                    self._read_again(reread)
                if view == self._view:
                    continue
                try:
                    await self._in_turn(partial(self._catch_up, view))
                    continue
                except NereidError as error:
                    self._complain(f"the models cannot be followed now: {error}")
                except Exception:  # noqa: BLE001 - the edge of a task nobody waits for
                    _LOG.exception("following the models failed in a way nobody planned for; trying again")
                self._view = None

    async def stop(self) -> None:
        """Cut what is being changed."""
        for change in self._changes:
            change.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)

    async def _in_turn(self, change: Callable[[], Awaitable[None]]) -> None:
        """Run ``change`` after those before it, to its end also when whoever asked has gone."""
        if len(self._changes) >= _MOST_WAITING:
            raise ResourceExhausted("too many changes of models are waiting; try later")

        async def run() -> None:
            async with self._turn:
                await change()

        task = asyncio.create_task(run())
        self._changes.add(task)
        task.add_done_callback(self._done)
        await asyncio.shield(task)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked may have gone

    async def _load(self, name: str) -> None:
        async with self._new_converter() as converter:
            sources, _ = await converter.sources(self._settings)
            source = next((source for source in sources if source.name == name and not source.hidden), None)
            if source is None:
                raise NotFound(
                    f"no model {name!r} to load; it must be among the models of this server, and in its folder"
                )
            self._unloaded.discard(name)
            missing = {*(source.calls or ())} - self._catalogue.specs.keys()
            try:
                for callee in [callee for callee in sources if callee.hidden and callee.name in missing]:
                    await self._put(callee, converter)
                await self._put(source, converter)
            except BundleError as error:
                raise ModelLoadError(f"model {name!r} could not be loaded: {without_paths(str(error))}") from None

    async def _unload(self, name: str) -> None:
        if name in self._catalogue.models:
            if callers := self._catalogue.callers(name):
                raise ModelLoadError(f"model {name!r} is called by {', '.join(callers)}; unload that first")
            await self._catalogue.remove(name)
            _LOG.info("unloaded %s", name)
        elif name not in self._unloaded and (name not in self._tried or self._tried[name].source.hidden):
            raise NotFound(f"no model {name!r} to unload; RepositoryIndex lists what is served")
        self._unloaded.add(name)

    async def _put(self, source: Source, converter: Converter) -> None:
        staged = await self._stage(source, converter, self._catalogue.specs)
        await self._catalogue.put(source, staged)
        _LOG.info("loaded %s (%s on %s)", source.name, staged.spec.engine, staged.spec.device)

    async def _stage(self, source: Source, converter: Converter, others: Mapping[str, ModelSpec]) -> Converted:
        as_it_is = await asyncio.to_thread(fingerprint, source.path)
        callees = _callees(source, others)
        self._tried[source.name] = _Attempt(source, as_it_is, callees)
        staged = await self._catalogue.stage(source, converter, callees)
        if await asyncio.to_thread(fingerprint, source.path) != as_it_is:
            await self._catalogue.discard(staged)
            raise BundleError(f"{source.path.name} changed while it was read; try again when it is complete")
        return staged

    async def _catch_up(self, view: Mapping[str, Fingerprint]) -> None:
        """Serve what ``view`` holds. What comes comes first: a renamed model is always there under one of its names."""
        self._view = view
        async with self._new_converter() as converter:
            sources, problems = await converter.sources(self._settings)
            for source in sources:
                state = view.get(source.path.name)
                if state is None or source.name in self._unloaded:
                    continue
                # Callees come before who calls them: their contracts are those of now.
                if self._tried.get(source.name) == _Attempt(source, state, _callees(source, self._catalogue.specs)):
                    continue
                await self._try(source, converter)
        for line in problems:
            self._complain(line)
        names = {source.name for source in sources}
        for name in [name for name in {*self._tried, *self._catalogue.specs} if name not in names]:
            await self._miss(name, view)

    async def _try(self, source: Source, converter: Converter) -> None:
        try:
            await self._put(source, converter)
        except NereidError as error:
            then = "the version before goes on serving" if source.name in self._catalogue.specs else "it is not served"
            _LOG.error("model %r: %s; %s", source.name, error, then)
            if error.code == "UNAVAILABLE":  # not the model's fault
                self._tried.pop(source.name, None)
                self._view = None

    async def _miss(self, name: str, view: Mapping[str, Fingerprint]) -> None:
        """``name`` has been there and is not any more, or is not a model any more."""
        source, state, _ = self._tried[name]
        listed = not self._settings.models or any(model.name == name for model in self._settings.models)
        entry = source.path.name
        if listed and entry in view:
            if view[entry] != state:
                _LOG.error("%s is not a model any more; what is served stays", entry)
                self._tried[name] = self._tried[name]._replace(state=view[entry])
            return
        if name in self._catalogue.specs:
            await self._catalogue.remove(name)
            _LOG.info("removed %s", name)
        self._unloaded.discard(name)
        del self._tried[name]

    def _read_again(self, reread: Callable[[], Settings]) -> None:
        try:
            fresh = reread()
        except SettingsError as error:
            self._complain(f"{'; '.join(str(error).splitlines())}; the settings from before hold")
            return
        if fresh.server != self._settings.server:
            self._complain("the section server of the settings has changed; it takes a restart")
        if fresh.models != self._settings.models:
            self._settings = self._settings.model_copy(update={"models": fresh.models})
            self._view = None

    def _report(self, problems: Sequence[str], kind: type[NereidError]) -> None:
        if problems and not self._lenient:
            raise kind("\n".join(problems))
        for line in problems:
            self._complain(line)

    def _complain(self, line: str) -> None:
        """Say ``line`` once, not at every look."""
        if line not in self._complaints:
            self._complaints.add(line)
            _LOG.warning("%s", line)


def _callees(source: Source, others: Mapping[str, ModelSpec]) -> Mapping[str, ModelSpec]:
    """The contracts of those of ``others`` that ``source`` calls."""
    return {name: others[name].contract for name in source.calls or () if name in others}
