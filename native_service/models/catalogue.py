"""What is served: each public model and the Triton models behind it, and the order in which they come and go.

A model comes: converted beside, moved into Triton's repository, loaded, routed. It goes: routed away, its permits
waited for, unloaded, removed. Whatever fails on the way, the rest is served as before, and so is the version before.
"""

from __future__ import annotations

import asyncio
import contextlib
import filecmp
import logging
import math
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from native_service.envoy.settings import Admitted, Place
from native_service.front import Front
from native_service.kserve.descriptions import VERSION
from native_service.kserve.grpc import ModelControl
from native_service.models.conversion import Converted, Converter, Source
from native_service.models.served import ServedModel
from native_service.run_directory import RunDirectory
from native_service.settings import Address, ServerSettings
from native_service.triton.process import TritonServer
from nereid_backend.errors import NereidError, NotFound, RepositoryError
from nereid_backend.spec import ModelSpec

_LOG = logging.getLogger("nereid.models")

_MEMORY = Path("/proc/meminfo")
# Envoy's workers learn of new routes and clusters a moment after it says so. A call of ours that came to a cluster too
# early would come back to us.
_WORKERS_LEARN_S = 0.02


async def _see_nothing() -> None:
    pass


class Catalogue:
    """The models of one Triton. Changes of one model take turns; a slow one does not hold up those of others."""

    def __init__(self, run: RunDirectory, triton: TritonServer, load_timeout_s: float) -> None:
        self._run, self._triton = run, triton
        self.load_timeout_s = load_timeout_s
        self._front: Front | None = None
        self._served: dict[str, ServedModel] = {}
        self._public: dict[str, Admitted] = {}
        # What the front has taken; None when it may hold a part of what it refused.
        self._told: list[Admitted] | None = []
        self.conversion_s: dict[str, float] = {}
        """How long the last conversion of each model took, in seconds; ``load_s``: its last load."""
        self.load_s: dict[str, float] = {}
        self.before_unload: Callable[[], Awaitable[None]] = _see_nothing
        """Done before a model leaves Triton, or another version takes its place: it forgets what it has counted."""
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._routing = asyncio.Lock()

    @property
    def models(self) -> Mapping[str, Admitted]:
        """What clients may call, by name; it follows what happens."""
        return MappingProxyType(self._public)

    @property
    def served(self) -> Mapping[str, ServedModel]:
        """Everything that is served, hidden models too, by name."""
        return MappingProxyType(self._served)

    @property
    def specs(self) -> dict[str, ModelSpec]:
        """The specification of everything that is served, hidden models too."""
        return {name: model.spec for name, model in self._served.items()}

    def callers(self, name: str) -> list[str]:
        """The meta models that call ``name``."""
        return [caller for caller, model in self._served.items() if name in (model.source.calls or ())]

    async def open(self, front: Front, server: ServerSettings, control: ModelControl | None) -> Address:
        """Open the public address for what has been loaded; ``front`` is told of every change from then on."""
        self._told = admitted = self._admitted(self._served)
        address = await front.start(admitted, server, control)
        self._front = front
        return address

    async def stage(self, source: Source, converter: Converter, callees: Mapping[str, ModelSpec]) -> Converted:
        """Convert ``source``, which may call ``callees``, beside the repository.

        Raises NereidError; nothing is left then.
        """
        try:
            folder = Path(tempfile.mkdtemp(dir=self._run.staging))
        except OSError as error:
            raise RepositoryError(
                f"model {source.name!r} cannot be converted ({error.strerror}); check the disk"
            ) from None
        begun = time.monotonic()
        try:
            converted = await converter.convert(source, folder, callees)
            self.conversion_s[source.name] = time.monotonic() - begun
            return converted
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    async def discard(self, staged: Converted) -> None:
        """Remove what ``stage`` made and nobody wants."""
        await asyncio.to_thread(shutil.rmtree, staged.folder, ignore_errors=True)

    async def put(self, source: Source, staged: Converted, *, idle: bool = False) -> None:
        """Serve ``staged`` under the name of ``source``, instead of what is served under it; its folder is used up.

        It is as idle as that, or ``idle`` when it is new. Raises NereidError; then everything is as it was.
        """
        name, before = source.name, staged.folder.with_name(f"{staged.folder.name}-before")
        new = ServedModel(source, staged.spec, staged.triton_models)
        try:
            async with self._turns[name]:
                begun, old = time.monotonic(), self._served.get(name)
                if idle if old is None else old.place is Place.IDLE:
                    new = replace(new, place=Place.IDLE)
                before.mkdir()
                await self._bring(new, old, staged.folder, before)
                if new.place is Place.TRITON:
                    self.load_s[name] = time.monotonic() - begun
                await self._drop(
                    [model for model in (old.triton_models if old else ()) if model not in new.triton_models]
                )
        except OSError as error:
            raise RepositoryError(f"model {name!r} cannot take its place ({error.strerror}); check the disk") from error
        finally:
            for folder in (staged.folder, before):
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def is_changing(self, name: str) -> bool:
        """Whether a change of ``name`` is under way: another one would wait for it."""
        return self._turns[name].locked()

    async def enter(self, name: str) -> bool:
        """Load ``name`` and route its calls to Triton; False when it was there.

        Raises NereidError; then it is as idle as before.
        """
        async with self._turns[name]:
            model = self._served.get(name)
            if model is None:
                raise NotFound(f"model {name!r} is not served here")
            if model.place is Place.TRITON:
                return False
            begun = time.monotonic()
            try:
                if model.place is Place.IDLE:
                    for each, behind in model.loads(at_once=True):
                        # Triton may believe that it has it still, of which the processes are dead then.
                        await self._load_anew(each, behind)
                    self.load_s[name] = time.monotonic() - begun
                await self._place(name, Place.TRITON)
            except NereidError:
                if model.place is Place.IDLE:
                    await self._unload(model.triton_models)
                raise
            return model.place is Place.IDLE

    async def leave(self, name: str, is_over: Callable[[], Awaitable[bool]]) -> bool:
        """Unload ``name`` and have it idle; whether that was done.

        ``is_over`` tells whether no call needs it. It is asked when new calls wait and old ones may still get to
        Triton, and again when none can any more. Raises EnvoyUnavailable; then the model is still loaded.
        """
        async with self._turns[name]:
            model = self._served.get(name)
            if model is None or model.place is Place.IDLE:
                return False
            gone = False
            try:
                await self._place(name, Place.LEAVING)
                if await is_over():
                    await self._place(name, Place.IDLE)
                    gone = await is_over()
            finally:
                if not gone:
                    await self._place(name, Place.TRITON)
            if gone:
                await self._unload(model.triton_models)
            return gone

    async def _place(self, name: str, place: Place) -> None:
        pause_s = 0.0 if self._front is None else _WORKERS_LEARN_S
        await self._serve(lambda served: {**served, name: replace(served[name], place=place)}, pause_s)

    def processes_of(self, name: str) -> list[int]:
        """The ids of the processes that serve ``name``, and those behind it."""
        model = self._served.get(name)
        return [pid for each in (model.triton_models if model else ()) for pid in self._triton.processes_of(each)]

    def files_bytes(self, name: str) -> int:
        """How much ``name`` takes on the disk."""
        model = self._served.get(name)
        folders = [self._run.repository / each for each in (model.triton_models if model else ())]
        return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())

    async def admit(self, source: Source) -> None:
        """Serve the model of ``source``, as it is, under the settings it has now. Raises EnvoyUnavailable."""
        name = source.name
        async with self._turns[name]:
            await self._serve(lambda served: {**served, name: replace(served[name], source=source)})

    async def remove(self, name: str) -> None:
        """Serve ``name`` no longer. Raises NereidError when it could not be routed away; then it is served as before.

        Calls in progress are answered.
        """
        async with self._turns[name]:
            gone = self._served[name].triton_models
            await self._serve(lambda served: {key: model for key, model in served.items() if key != name})
            await self._drop(gone)

    def find_dead(self) -> list[str]:
        """What is served, hidden models too, by processes of which one has died."""
        dead = self._triton.find_dead()
        return [name for name, model in self._served.items() if not dead.isdisjoint(model.triton_models)]

    def kill_hung(self) -> list[str]:
        """Kill the processes that will not answer any more: they are dead then. A line for each."""
        limits: dict[str, float] = {}
        for name, model in self._served.items():
            # What only meta models call runs for one of them: past the longest of their limits, for nobody.
            whose = self.callers(name) if model.source.hidden else [name]
            limits_s = [self._served[each].source.settings.options.time_limit_s for each in whose]
            if all(limits_s):
                limits |= dict.fromkeys(model.triton_models, max(filter(None, limits_s), default=math.inf))
        return self._triton.kill_hung(limits)

    def end_given_up(self, name: str, call_s: float) -> None:
        """Kill what lives of ``name``: Triton has said that a process of it does not answer, after so long a call.

        A process that stood still for a second in a call is given up with that call. When it goes on, its answers are
        taken for those of later calls (Triton 2.51).
        """
        model = self._served.get(name)
        pids = [
            pid for each in (model.triton_models if model else ()) for pid in self._triton.kill_given_up(each, call_s)
        ]
        if pids:
            _LOG.error("model %r: a process of it stood still for too long in a call; its processes are killed", name)

    async def route_dead(self) -> None:
        """Let callers of what has died know, and of what has come back. Raises EnvoyUnavailable."""
        async with self._routing:
            self._set(self._served)
            await self._publish(self._served)

    async def revive(self, name: str) -> bool:
        """Start again what has died of ``name`` and route to it; whether anything had. Raises NereidError.

        What is idle is unloaded once more instead: its next call loads it.
        """
        async with self._turns[name]:
            dead = self._triton.find_dead()
            model = self._served.get(name)
            lost = [] if model is None else [each for each in model.triton_models if each in dead]
            if model is not None and model.place is Place.IDLE:
                await self._unload(lost)
                lost = []
            elif model is not None:
                for each, behind in model.loads(at_once=len(lost) == len(model.triton_models)):
                    if each in dead:
                        await self._load_anew(each, behind)
            await self.route_dead()
            return bool(lost)

    async def _load_anew(self, model: str, behind: Sequence[str] = ()) -> None:
        # Triton takes a directory for changed only when something in it is newer than before.
        for each in (*behind, model):
            os.utime(self._run.repository / each / VERSION)
        await self._triton.load(model, self.load_timeout_s, behind)

    async def _serve(
        self, change: Callable[[dict[str, ServedModel]], dict[str, ServedModel]], pause_s: float = 0.0
    ) -> None:
        """Route to what ``change`` makes of all that is served, and serve it from then on. Raises EnvoyUnavailable."""
        async with self._routing:
            served = change(self._served)
            await self._publish(served)
            await asyncio.sleep(pause_s)
            self._set(served)

    def _set(self, served: dict[str, ServedModel]) -> None:
        self._served = served
        self._public.clear()
        self._public.update((model.spec.name, model) for model in self._admitted(served))

    async def _bring(self, new: ServedModel, old: ServedModel | None, fresh: Path, before: Path) -> None:
        """Load ``new`` from ``fresh`` and route to it; the directories it replaces end in ``before``."""
        repository, owned = self._run.repository, old.triton_models if old else ()
        for model in new.triton_models:
            if model not in owned and (repository / model).exists():
                raise RepositoryError(f"model {new.spec.name!r} needs the name {model!r}, which is served; rename one")
        same = new.triton_models == owned and await asyncio.to_thread(_are_same, fresh, repository, owned)
        loads = new.place is Place.TRITON
        if owned and not same and loads:
            await asyncio.to_thread(_check_memory, new.spec.name, fresh)
            await self.before_unload()
        moved: list[str] = []
        loaded: list[str] = []
        try:
            for model, behind in new.loads(at_once=not owned):
                if not same:
                    for each in (*behind, model):
                        moved.append(each)
                        _move(repository / each, before / each)
                        _move(fresh / each, repository / each)
                elif model in self._triton.find_dead():
                    os.utime(repository / model / VERSION)
                if loads:
                    await self._triton.load(model, self.load_timeout_s, behind)
                    loaded.append(model)
            await self._serve(lambda served: {**served, new.source.name: new})
        except (NereidError, OSError):
            for model in reversed(moved):
                _move(repository / model, fresh / model)
                _move(before / model, repository / model)
                # A load that failed has changed nothing in Triton.
                if loads and (model in loaded or model not in owned):
                    await self._bring_back(model, was_there=model in owned)
            raise

    async def _bring_back(self, model: str, *, was_there: bool) -> None:
        """Undo a load that went well in a change that did not."""
        try:
            if was_there:
                await self._load_anew(model)
            else:
                await self._triton.unload(model)
        except NereidError as error:
            _LOG.error("model %r could not be brought back: %s", model, error)

    async def _unload(self, models: Sequence[str]) -> None:
        if models:
            await self.before_unload()
        for model in reversed(models):
            try:
                await self._triton.unload(model)
            except NereidError as error:
                _LOG.warning("%s; its processes are killed and nobody can reach it", error)

    async def _drop(self, models: Sequence[str]) -> None:
        await self._unload(models)
        for model in reversed(models):
            await asyncio.to_thread(shutil.rmtree, self._run.repository / model, ignore_errors=True)

    async def _publish(self, served: Mapping[str, ServedModel]) -> None:
        # Before the address is open there is nobody to tell.
        admitted = self._admitted(served)
        if self._front is not None and admitted != self._told:
            self._told = None
            await self._front.set_models(admitted)
            self._told = admitted

    def _admitted(self, served: Mapping[str, ServedModel]) -> list[Admitted]:
        """The public models of ``served``; away are those of which a process has died, and those that call one."""
        dead = self._triton.find_dead()
        away = {name for name, model in served.items() if not dead.isdisjoint(model.triton_models)}
        # A meta model may call another one.
        while more := {name for name, model in served.items() if not away.isdisjoint(model.source.calls or ())} - away:
            away |= more
        return [model.admitted(away=name in away) for name, model in served.items() if not model.source.hidden]


def _check_memory(name: str, fresh: Path) -> None:
    """Until the old version has gone both are in memory: without room for that every model would be lost.

    Weights take about as much there as on disk. Raises RepositoryError.
    """
    needed = sum(path.stat().st_size for path in fresh.rglob("*") if path.is_file())
    facts = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
    free = int(facts["MemAvailable"].split()[0]) * 1024
    if needed > free:
        raise RepositoryError(
            f"model {name!r}: its new version needs about {needed >> 20} MiB beside the one that serves, "
            f"{free >> 20} MiB are free; unload it first, or restart the server"
        )


def _move(path: Path, target: Path) -> None:
    """Rename ``path`` if it is there."""
    with contextlib.suppress(FileNotFoundError):
        path.rename(target)


def _are_same(fresh: Path, repository: Path, models: Sequence[str]) -> bool:
    """Whether the directories ``models`` hold the same bytes in both folders."""
    return all(_same_files(fresh / model, repository / model) for model in models)


def _same_files(one: Path, other: Path) -> bool:
    names = _files(one)
    return names == _files(other) and all(filecmp.cmp(one / name, other / name, shallow=False) for name in names)


def _files(folder: Path) -> set[str]:
    # Python leaves its bytecode beside model.py once it runs.
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
