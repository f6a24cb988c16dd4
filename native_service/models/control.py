"""Decides which models are served: those at the start, then what callers ask for and what the folder holds.

The settings say what may be served: the listed models, or, without a list, whatever is in the folder.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from native_service.models.attempt import Attempt, callees_of, news_of_admission
from native_service.models.catalogue import Catalogue
from native_service.models.changes import Changes
from native_service.models.conversion import Converted, Converter, Source
from native_service.models.records import ModelRecord, ModelRecords
from native_service.models.residency import Residency
from native_service.models.watch import Fingerprint, fingerprint, scan, settled
from native_service.settings import ModelSettings, Settings
from native_service.triton.errors import without_paths
from nereid_backend.errors import (
    AlreadyExists,
    BundleError,
    ModelLoadError,
    NereidError,
    NotFound,
    RepositoryError,
    ResourceExhausted,
    SettingsError,
    TritonUnavailable,
)
from nereid_backend.spec import ModelSpec

_LOG = logging.getLogger("nereid.serve")

_MOST_WAITING = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line per thing that a reload has changed, could not change, and leaves for a restart."""

    applied: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


class ModelControl:
    """``convert`` and ``load_converted`` at the start; then ``load``, ``unload``, ``reload`` and ``follow``."""

    def __init__(
        self,
        settings: Settings,
        catalogue: Catalogue,
        residency: Residency,
        new_converter: Callable[[], Converter],
        *,
        lenient: bool,
    ) -> None:
        """``lenient``: what cannot be served at the start is logged and left out, instead of stopping the start."""
        self._settings = settings
        # What the file said when it was read last: uploads are served before it says them.
        self._said = settings.models, settings.others
        self._catalogue = catalogue
        self._residency = residency
        self._new_converter = new_converter
        self._lenient = lenient
        # What was made of each name last, whether it went well or not: only something else is worth another try.
        self._tried: dict[str, Attempt] = {}
        self._unloaded: set[str] = set()
        self._view: Mapping[str, Fingerprint] | None = None
        self._complaints: set[str] = set()
        self._restarts: Counter[str] = Counter()
        self._records = ModelRecords()
        self._turn = asyncio.Lock()
        self._changes = Changes()

    @property
    def restarts(self) -> dict[str, int]:
        """How often each served model was started again after its process had died."""
        return {name: self._restarts[name] for name in self._catalogue.specs}

    @property
    def records(self) -> dict[str, ModelRecord]:
        """What is known of every model that is served or should be, hidden ones too."""
        listed = [model.name for model in self._settings.models]
        names = dict.fromkeys((*listed, *self._tried, *self._catalogue.specs))
        return {name: self._records[name] for name in names if name not in self._unloaded}

    async def convert(self) -> list[tuple[Source, Converted]]:
        """Convert everything the settings name. Raises BundleError with a line per model that failed.

        What nobody has asked for does not keep the others from starting: it is left out.
        """
        async with self._new_converter() as converter:
            sources, problems = await converter.sources(self._settings)
            self._report(problems, BundleError)
            converted, problems = [], []
            specs: dict[str, ModelSpec] = {}
            for source in sources:
                try:
                    staged = await self._stage(source, converter, specs)
                except NereidError as error:
                    if _is_asked_for(source, self._settings):
                        problems.append(f"model {source.name!r}: {error}")
                    else:
                        self._complain(f"model {source.name!r}: {error}; it is left out")
                else:
                    converted.append((source, staged))
                    specs[source.name] = staged.spec
        self._report(problems, BundleError)
        return converted

    async def load_converted(self, converted: Sequence[tuple[Source, Converted]]) -> None:
        """Load what ``convert`` gave. Raises ModelLoadError with a line per model that failed."""
        problems, begun = [], []
        for source, staged in converted:
            try:
                begun += [source] * await self._place(source, staged)
            except TritonUnavailable:
                raise
            except NereidError as error:
                problems.append(str(error))
        # Those that are pinned come first where there is no room for all.
        for source in sorted(begun, key=lambda source: not source.settings.options.pinned):
            try:
                await self._begin(source)
            except TritonUnavailable:
                raise
            except NereidError as error:
                problems.append(str(error))
        self._report(problems, ModelLoadError)

    async def load(self, name: str) -> None:
        """Serve the model ``name`` of the settings as it is on disk now. Raises NereidError, fit for a caller."""
        await self._in_turn(partial(self._load, name))

    async def unload(self, name: str) -> None:
        """Serve ``name`` no longer, until it is loaded by name. Raises NereidError, fit for a caller."""
        await self._in_turn(partial(self._unload, name))

    async def refresh(self) -> None:
        """Serve what is in the folder now. What cannot be served is logged. Raises NereidError, fit for a caller."""
        view = await asyncio.to_thread(self._look)
        await self._in_turn(partial(self._catch_up, view))

    def settings_for(self, name: str) -> ModelSettings | None:
        """How ``name`` is served, or would be if it came; None where the settings do not have it come."""
        if name in self._tried:
            return self._tried[name].source.settings
        listed = next((model for model in self._settings.models if model.name == name), None)
        if listed is None and self._settings.others is not None:
            return self._settings.others.named(name)
        return listed

    async def adopt(self, model: ModelSettings, file: Path, *, overwrite: bool) -> ModelSettings:
        """Move ``file`` into the folder and serve it as ``model``, instead of another of that name with ``overwrite``.

        Gives the settings with the path it has there. Raises AlreadyExists, BundleError when the file cannot be
        converted, NereidError; then nothing has changed.
        """
        await self._in_turn(partial(self._adopt, model, file, overwrite))
        return self._tried[model.name].source.settings

    async def reload(self, settings: Settings, outcome: Outcome, *, before: Callable[[], Awaitable[None]]) -> None:
        """Serve what ``settings`` list, as it is on disk now, and tell ``outcome``. What is served keeps answering.

        Everything new is converted first: when that fails nothing is changed and BundleError has a line per reason,
        unless this control is lenient. ``before`` is done between that and the first change.
        """
        await self._in_turn(partial(self._reload, settings, before, outcome))

    async def route_dead(self) -> None:
        """Send the callers of models whose process has died away. Raises NereidError."""
        await self._catalogue.route_dead()

    async def revive(self, name: str) -> None:
        """Serve ``name``, whose process has died, again, if it is still to be served. Raises NereidError.

        It does not wait for the changes of other models.
        """
        if await self._catalogue.revive(name):
            self._restarts[name] += 1
            self._records.loaded(name)
            _LOG.info("model %r is back", name)

    async def follow(self, reread: Callable[[], Settings] | None = None) -> None:
        """Keep up with the folder, and with the list of models that ``reread`` gives, until cancelled."""
        folder = self._settings.server.folder
        async with aclosing(settled(folder, as_one=self._is_one_model())) as views:
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
        await self._changes.stop()

    async def _in_turn(self, change: Callable[[], Awaitable[None]]) -> None:
        """Run ``change`` after those before it, to its end also when whoever asked has gone."""
        if len(self._changes) >= _MOST_WAITING:
            raise ResourceExhausted("too many changes of models are waiting; try later")

        async def run() -> None:
            async with self._turn:
                await change()

        await self._changes.to_its_end(run())

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
        await self._residency.load(name)

    async def _unload(self, name: str) -> None:
        if name in self._catalogue.models and self._residency.is_on_demand(name):
            await self._residency.unload(name)
            return
        if name in self._catalogue.models:
            if callers := self._catalogue.callers(name):
                raise ModelLoadError(f"model {name!r} is called by {', '.join(callers)}; unload that first")
            await self._catalogue.remove(name)
            _LOG.info("unloaded %s", name)
        elif name not in self._unloaded and (name not in self._tried or self._tried[name].source.hidden):
            raise NotFound(f"no model {name!r} to unload; RepositoryIndex lists what is served")
        self._unloaded.add(name)

    async def _adopt(self, model: ModelSettings, file: Path, overwrite: bool) -> None:
        from converters import durable

        name, before, folder = model.name, self._tried.get(model.name), self._settings.server.folder
        target = folder / file.name if before is None else before.source.path
        was_there = target.exists()
        if (before is not None or was_there) and not overwrite:
            raise AlreadyExists(f"model {name!r} is there; send overwrite to replace it")
        of_another = any(each.source.path == target for other, each in self._tried.items() if other != name)
        is_alike = target.parent == folder and target.name.endswith(file.name.removeprefix(name))
        if target.is_dir() or of_another or not is_alike:
            whose = "another model" if of_another else f"model {name!r}"
            raise AlreadyExists(f"{whose} is read from {target.name}, which this file cannot replace")
        model = model.model_copy(update={"options": model.options.model_copy(update={"path": target.name})})
        failure = self._records[name].failure
        try:
            async with self._new_converter() as converter:
                file = file.rename(file.with_name(target.name))
                staged = await self._stage(Source(file, model), converter, {})
            await asyncio.to_thread(durable.swap_in, file, target, replace=was_there)
            try:
                await self._serve(Source(target, model), staged, must_fit=model.options.pinned)
            except BaseException:
                await asyncio.to_thread(_undo_swap, file, target, was_there)
                raise
        except BaseException as error:
            if before is None:
                self._tried.pop(name, None)
                self._records.forget(name)
            else:
                self._tried[name], self._records[name].failure = before, failure
            if isinstance(error, FileExistsError):  # put there by somebody else while this was converted
                raise AlreadyExists(f"{target.name} is there now; send overwrite to replace it") from None
            if isinstance(error, OSError):
                raise RepositoryError(f"model {name!r} cannot be put in place ({error.strerror})") from None
            raise
        self._tried[name] = Attempt(Source(target, model), fingerprint(target), {})
        self._unloaded.discard(name)
        others = tuple(each for each in self._settings.models if each.name != name)
        self._settings = self._settings.model_copy(update={"models": (*others, model)})

    async def _put(self, source: Source, converter: Converter) -> None:
        await self._serve(source, await self._stage(source, converter, self._catalogue.specs))

    async def _serve(self, source: Source, staged: Converted, *, must_fit: bool = False) -> None:
        if await self._place(source, staged):
            await self._begin(source, must_fit=must_fit)

    async def _place(self, source: Source, staged: Converted) -> bool:
        """Serve ``staged``; whether it is new and has begun idle."""
        idle = self._residency.begins_idle(source)
        if not (idle or self._residency.is_idle(source.name)):
            for callee in source.calls or ():
                await self._residency.wake(callee)
        with self._records.loading(source.name):
            await self._catalogue.put(source, staged, idle=idle)
        await self._residency.arrived(source.name)
        what = "keeps" if self._residency.is_idle(source.name) else "loaded"
        _LOG.info("%s %s (%s on %s)", what, source.name, staged.spec.engine, staged.spec.device)
        return idle

    async def _begin(self, source: Source, *, must_fit: bool = False) -> None:
        """Load ``source``, which has begun idle, if it need not wait for a call. Raises NereidError; then it has gone.

        Unless it ``must_fit`` one that there is no room for stays idle.
        """
        try:
            with self._records.loading(source.name):
                await self._residency.begin(source)
        except NereidError as error:
            if not isinstance(error, ResourceExhausted) or must_fit:
                await self._catalogue.remove(source.name)
                raise
            self._records[source.name].failure = None
            _LOG.warning("%s; its next call loads it", error)

    async def _stage(self, source: Source, converter: Converter, others: Mapping[str, ModelSpec]) -> Converted:
        as_it_is = await asyncio.to_thread(fingerprint, source.path)
        callees = callees_of(source, others)
        self._tried[source.name] = Attempt(source, as_it_is, callees)
        with self._records.converting(source.name):
            staged = await self._catalogue.stage(source, converter, callees)
            if await asyncio.to_thread(fingerprint, source.path) != as_it_is:
                await self._catalogue.discard(staged)
                raise BundleError(f"{source.path.name} changed while it was read; try again when it is complete")
        return staged

    async def _reload(self, settings: Settings, before: Callable[[], Awaitable[None]], outcome: Outcome) -> None:
        tried, served = dict(self._tried), self._catalogue.specs
        specs = served.copy()
        staged: list[tuple[Source, Converted]] = []
        admitted: list[Source] = []
        left_out: list[str] = []
        try:
            view = await asyncio.to_thread(self._look)
            async with self._new_converter() as converter:
                sources, problems = await converter.sources(settings)
                for source in [source for source in sources if source.name not in self._unloaded]:
                    state = await asyncio.to_thread(fingerprint, source.path)
                    attempt = Attempt(source, state, callees_of(source, specs))
                    if self._tried.get(source.name) == attempt and self._records[source.name].failure is None:
                        continue
                    if self._differs_in_admission(attempt):
                        admitted.append(source)
                        continue
                    try:
                        staged.append((source, await self._stage(source, converter, specs)))
                        specs[source.name] = staged[-1][1].spec
                    except NereidError as error:
                        asked_for = _is_asked_for(source, settings)
                        (problems if asked_for else left_out).append(f"model {source.name!r}: {error}")
            if problems and not self._lenient:
                raise BundleError("\n".join(problems))
            await before()
        except BaseException:
            self._tried = tried
            for _, ready in staged:
                await self._catalogue.discard(ready)
            raise
        outcome.failed.extend((*problems, *left_out))
        self._settings, self._view = settings, None
        self._said = settings.models, settings.others
        self._complaints.clear()
        for source, ready in staged:
            what = "changed" if source.name in served else "added"
            await self._told(self._serve(source, ready), f"model {source.name!r} {what}", outcome)
        for source in admitted:
            what = ", ".join(news_of_admission(self._tried[source.name].source.settings, source.settings))
            await self._told(self._admit(source), f"model {source.name!r}: {what}", outcome)
        for name in sorted({*self._tried, *served} - {source.name for source in sources}):
            await self._told(self._miss(name, view), None, outcome)
        outcome.applied.extend(f"model {name!r} removed" for name in served if name not in self._catalogue.specs)

    async def _told(self, change: Awaitable[None], what: str | None, outcome: Outcome) -> None:
        """Do ``change`` and tell ``what`` of it, or why it failed."""
        try:
            await change
        except NereidError as error:
            outcome.failed.append(str(error))
        else:
            if what is not None:
                outcome.applied.append(what)

    def _look(self) -> Mapping[str, Fingerprint]:
        """What is in the folder now. Raises BundleError when it cannot be listed."""
        try:
            return scan(self._settings.server.folder, as_one=self._is_one_model())
        except OSError as error:
            raise BundleError(f"the folder of models cannot be read ({error.strerror})") from None

    def _is_one_model(self) -> bool:
        """Whether the folder is a model itself, instead of one of models."""
        return any(source.path == self._settings.server.folder for source, *_ in self._tried.values())

    def _differs_in_admission(self, now: Attempt) -> bool:
        """Whether the model is served as ``now`` describes it but for what is decided before its calls reach it."""
        name = now.source.name
        tried, spec = self._tried.get(name), self._catalogue.specs.get(name)
        if tried is None or spec is None or self._records[name].failure is not None:
            return False
        return tried.differs_in_admission(now, spec)

    async def _admit(self, source: Source) -> None:
        await self._catalogue.admit(source)
        self._tried[source.name] = self._tried[source.name]._replace(source=source)
        if source.settings.options.pinned:
            await self._residency.wake(source.name)

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
                attempt = Attempt(source, state, callees_of(source, self._catalogue.specs))
                if self._tried.get(source.name) == attempt:
                    continue
                if self._differs_in_admission(attempt):
                    await self._admit(source)
                else:
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
        tried = self._tried.get(name)  # none when the last attempt met a Triton that was being started again
        if tried is not None and self._settings.serves(name) and (entry := tried.source.path.name) in view:
            if view[entry] != tried.state:
                _LOG.error("%s is not a model any more; what is served stays", entry)
                self._tried[name] = tried._replace(state=view[entry])
            return
        if name in self._catalogue.specs:
            await self._catalogue.remove(name)
            _LOG.info("removed %s", name)
        self._unloaded.discard(name)
        self._records.forget(name)
        self._tried.pop(name, None)

    def _read_again(self, reread: Callable[[], Settings]) -> None:
        try:
            fresh = reread()
        except SettingsError as error:
            self._complain(f"{'; '.join(str(error).splitlines())}; the settings from before hold")
            return
        if fresh.server != self._settings.server:
            self._complain("the section server of the settings has changed; `nereid reload` applies what it can of it")
        if (fresh.models, fresh.others) != self._said:
            self._said = fresh.models, fresh.others
            self._settings = self._settings.model_copy(update={"models": fresh.models, "others": fresh.others})
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


def _is_asked_for(source: Source, settings: Settings) -> bool:
    """Whether the settings list it, or want it in Triton before somebody calls it."""
    options = source.settings.options
    listed = any(model.name == source.name for model in settings.models)
    return listed or options.pinned or options.load == "start"


def _undo_swap(file: Path, target: Path, was_there: bool) -> None:
    from converters import durable

    if was_there:
        durable.swap_in(file, target, replace=True)
    else:
        target.unlink()
