"""Converts bundles in a child process, so that no reader's library (or crash) is ever inside the supervisor.

The child reads one JSON request per line and answers each with one JSON line. It ends when its input does. A child
that crashes fails the request it was working on; the next request gets a new child.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self, TextIO

from pydantic import ValidationError

from native_service.children import processes
from native_service.settings import NAME_RULE, ModelOptions, ModelSettings, Settings
from nereid_backend.errors import BundleError, ConversionKilled, NereidError, short_repr
from nereid_backend.spec import ModelSpec

_LOG = logging.getLogger("nereid.convert")
_CHILDS_LEVELS = logging.getLevelNamesMapping()

# A specification names every weight of its model.
_LONGEST_ANSWER = 64 * 1024 * 1024
_LAST_LINES_S = 0.5
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Source:
    """A model on disk and what the settings say about it.

    ``calls`` is None except for a meta model. ``hidden``: it is there for a meta model only and not for clients.
    """

    path: Path
    settings: ModelSettings
    calls: tuple[str, ...] | None = None
    hidden: bool = False

    @property
    def name(self) -> str:
        """The name it is served under."""
        return self.settings.name


@dataclass(frozen=True, slots=True)
class Converted:
    """A model written as a repository of its own in ``folder``, one directory for each Triton model behind it."""

    spec: ModelSpec
    folder: Path

    @property
    def triton_models(self) -> tuple[str, ...]:
        """The public model last: it may call the hidden ones while it loads."""
        names = {path.name for path in self.folder.iterdir()}
        return (*sorted(names - {self.spec.name}), self.spec.name)


class Converter:
    """The child process, started when first needed. One request at a time."""

    def __init__(self, environment: Mapping[str, str], timeout_s: float, *, link: bool = True) -> None:
        """``environment`` is added to this process's own; ``timeout_s`` bounds each request.

        ``link`` lets artifacts be links to the source, for sources that stay as they are while they are served.
        """
        self._environment = {**os.environ, **environment}
        self._timeout_s = timeout_s
        self._link = link
        self._child: processes.Child | None = None
        self._drain: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def sources(self, settings: Settings) -> tuple[list[Source], list[str]]:
        """Every model the settings name, and the others in the folder where they are served too; a line per problem.

        A meta model's callees come along and before it, hidden unless the settings name them.
        """
        folder = settings.server.folder
        named, problems = await self._named(folder, settings) if settings.models else ([], [])
        if settings.others is None:
            return named, problems
        models = {source.name: source for source in named}
        taken = {source.path for source in named}
        found = (await self._ask({"do": "find", "path": str(folder)}))["found"]
        if not found and not named and not settings.server.allow_model_control:
            problems.append(f"{folder} holds no bundle, nereid folder or model file")
        unfit = []
        for name, path, calls in found:
            if Path(path) in taken:
                continue
            if name in models:
                unfit.append(f"{path} and {models[name].path} would both be served as {name!r}; rename one")
                continue
            try:
                models[name] = Source(Path(path), settings.others.named(name), _names(calls))
            except ValidationError:
                unfit.append(f"{short_repr(path)} cannot be served: its name {NAME_RULE}; rename it")
        if settings.others.options.load == "start":
            problems.extend(unfit)
        else:  # nobody has asked for it
            for line in unfit:
                _LOG.warning("%s", line)
        listed = {model.name for model in settings.models}
        called = {callee for source in models.values() for callee in source.calls or ()} - listed
        return _callees_first(replace(source, hidden=name in called) for name, source in models.items()), problems

    async def convert(
        self, source: Source, folder: Path, callees: Mapping[str, ModelSpec] = MappingProxyType({})
    ) -> Converted:
        """Write the model into ``folder`` and check that its engine and device are here. Raises BundleError.

        ``callees`` are the contracts of what a meta model calls, by name.
        """
        model = source.settings
        request = {
            "do": "convert",
            "path": str(source.path),
            "repository": str(folder),
            "name": model.name,
            "device": model.device,
            "backend": model.backend,
            "max_batch_size": model.options.max_batch_size,
            "default_batch_size": model.options.default_batch_size,
            "batch_delay_ms": model.options.batch_delay_ms,
            "signature": model.signature,
            "allow_code": model.options.allow_code,
            "batch_sizes": model.options.batch_sizes,
            "callees": {name: spec.to_json() for name, spec in callees.items()},
            "link": self._link,
            "children": model.queue_capacity,
        }
        try:
            answer = await self._ask(request)
        except ConversionKilled as error:
            _LOG.warning("model %r: %s; trying once more", model.name, error)
            await asyncio.to_thread(_empty, folder)
            answer = await self._ask(request)
        return Converted(ModelSpec.from_json(answer["spec"]), folder)

    async def _named(self, folder: Path, settings: Settings) -> tuple[list[Source], list[str]]:
        sources: dict[str, Source] = {}
        problems = []
        waiting = [(model, f"model {model.name!r}", False) for model in settings.models]
        while waiting:
            model, who, hidden = waiting.pop(0)
            paths = _candidates(folder, model)
            if len(paths) != 1:
                found = " and ".join(path.name for path in paths)
                what = (
                    f"{found}; keep one"
                    if paths
                    else f"no {model.options.path or 'folder and no model file of that name'}"
                )
                problems.append(f"{who}: {folder} holds {what}")
                continue
            (path,) = paths
            calls = _names((await self._ask({"do": "calls", "path": str(path)}))["calls"])
            sources[model.name] = Source(path, model, calls, hidden)
            for callee in calls or ():
                if callee in sources or any(callee == other.name for other, *_ in waiting):
                    continue
                try:
                    # On the device of who calls it and loaded with it. Nobody else reaches it, so its permits are never
                    # asked for.
                    called = ModelSettings(
                        name=callee,
                        device=model.device,
                        queue_capacity=model.queue_capacity,
                        options=ModelOptions(load=model.options.load),
                    )
                except ValidationError:
                    problems.append(f"{who} calls {short_repr(callee)}, which cannot be the name of a model")
                else:
                    waiting.append((called, f"{who} calls {callee!r}", True))
        return _callees_first(sources.values()), problems

    async def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        child = await self._running()
        if child.process.stdin is None:
            raise BundleError("the converter has no input")
        try:
            async with asyncio.timeout(self._timeout_s):
                child.process.stdin.write(json.dumps(request).encode() + b"\n")
                line = await child.stdout.readline()
        except TimeoutError:
            await self._end()
            raise BundleError(f"conversion took longer than {self._timeout_s:g} s") from None
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            code = await child.stop(grace_s=0)
            await self._end()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            kind = ConversionKilled if -code in _FROM_OUTSIDE else BundleError
            raise kind(f"the converter ended unexpectedly ({how}); its last words are in the log above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BundleError(answer["error"])
        return answer

    async def _running(self) -> processes.Child:
        if self._child is None:
            # -P: a folder of bundles may hold a numpy.py, and people start `serve` in such folders.
            command = [sys.executable, "-P", "-m", "native_service.models.conversion"]
            try:
                self._child = await processes.start(
                    command, self._environment, stdin=asyncio.subprocess.PIPE, longest_line=_LONGEST_ANSWER
                )
            except OSError as error:
                raise BundleError(f"the converter cannot be started ({error.strerror})") from None
            self._drain = asyncio.create_task(_log(self._child.stderr))
        return self._child

    async def _end(self) -> None:
        child, drain = self._child, self._drain
        self._child = self._drain = None
        if child is None or drain is None:
            return
        try:
            await child.stop(grace_s=0)
            await asyncio.wait((drain,), timeout=_LAST_LINES_S)
        finally:  # whoever waits for this may be cancelled
            drain.cancel()
            child.close()
        await asyncio.gather(drain, return_exceptions=True)


def _empty(folder: Path) -> None:
    """Remove what an interrupted conversion has left in ``folder``."""
    for path in folder.iterdir():
        shutil.rmtree(path, ignore_errors=True)


def _candidates(folder: Path, model: ModelSettings) -> list[Path]:
    """What may be meant by ``model``: the path it says, the folder of its name, or else the model files."""
    from converters import kinds

    name = model.name
    if model.options.path is not None:
        path = folder / model.options.path
        return [path] if path.exists() else []
    if (folder / name).exists():
        return [folder / name]
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in files if kinds.kind_of(path) is not None and kinds.stem(path) == name]


def _names(calls: list[str] | None) -> tuple[str, ...] | None:
    return None if calls is None else tuple(calls)


def _callees_first(sources: Iterable[Source]) -> list[Source]:
    return sorted(sources, key=lambda source: source.calls is not None)


async def _log(stream: asyncio.StreamReader) -> None:
    async for line in processes.lines(stream):
        level, _, text = line.partition(" ")
        if level in _CHILDS_LEVELS:
            _LOG.log(_CHILDS_LEVELS[level], "%s", text)
        else:  # printed by a library
            _LOG.info("%s", line)


def _find(request: Mapping[str, Any]) -> dict[str, Any]:
    from converters.convert import model_name
    from converters.discover import calls_of, find

    return {"found": [(model_name(path), str(path), calls_of(path)) for path in find(Path(request["path"]))]}


def _calls(request: Mapping[str, Any]) -> dict[str, Any]:
    from converters.discover import calls_of

    return {"calls": calls_of(Path(request["path"]))}


def _convert(request: Mapping[str, Any]) -> dict[str, Any]:
    from converters.convert import check_device, convert

    prepared = convert(
        Path(request["path"]),
        Path(request["repository"]),
        name=request["name"],
        device=request["device"],
        backend=request["backend"],
        max_batch_size=request["max_batch_size"],
        default_batch_size=request["default_batch_size"],
        batch_delay_ms=request["batch_delay_ms"],
        batch_sizes=request["batch_sizes"],
        signature=request["signature"],
        allow_code=request["allow_code"],
        callees={name: ModelSpec.from_json(text) for name, text in request["callees"].items()},
        children=request["children"],
        link=request["link"],
    )
    for note in prepared.notes:
        _LOG.info("model %r: %s", prepared.spec.name, note)
    check_device(prepared.spec)
    return {"spec": prepared.spec.to_json()}


def _answer_requests(requests: TextIO, answers: TextIO) -> None:
    """The child's loop: one request a line, one answer a line."""
    work = {"find": _find, "calls": _calls, "convert": _convert}
    for line in requests:
        request = json.loads(line)
        try:
            answer = work[request["do"]](request)
        except NereidError as error:
            answer = {"error": str(error)}
        except OSError as error:
            what = "" if error.filename is None else f", {Path(error.filename).name}"
            answer = {"error": f"conversion failed ({error.strerror or error}{what}); check the disk and its rights"}
        except Exception as error:  # noqa: BLE001 - the edge of this process: the parent fails this one model
            _LOG.exception("conversion of %s failed", request.get("path"))
            answer = {"error": f"{type(error).__name__}: {error} (a bug in the converter; see the log above)"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    _LOG.setLevel(logging.INFO)
    logging.getLogger("nereid.environments").setLevel(logging.INFO)  # a build takes minutes
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as private:
        # Libraries print to stdout; only answers may go to the parent.
        os.dup2(2, 1)
        _answer_requests(sys.stdin, private)
