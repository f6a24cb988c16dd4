"""``nereid serve``: converts, starts Triton, loads, opens the public address, and ends everything in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from native_service import embedded_triton, envoy_install, preflight
from native_service.conversion import Converter, Source
from native_service.envoy_config import Admitted
from native_service.front import Front
from native_service.http_endpoints import HttpEndpoints
from native_service.run_directory import RunDirectory
from native_service.settings import Address, Settings
from native_service.triton_process import SOCKET_SUFFIX, TritonServer
from nereid_backend.cache import cache_folder
from nereid_backend.errors import BundleError, ModelLoadError, NereidError, SettingsError
from nereid_backend.spec import ModelSpec

_LOG = logging.getLogger("nereid.serve")

T = TypeVar("T")

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a running service listens; ``http`` is None when it is off."""

    public: Address
    http: Address | None
    triton_grpc: str
    triton_http: str
    triton_metrics: str
    models: tuple[str, ...]

    def to_json(self) -> str:
        """The text of the state file."""
        state = {
            "pid": os.getpid(),
            "address": str(self.public),
            "triton_grpc": self.triton_grpc,
            "triton_http": self.triton_http,
            "triton_metrics": self.triton_metrics,
            "http": None if self.http is None else str(self.http),
            "models": list(self.models),
        }
        return json.dumps(state, indent=2) + "\n"


async def serve(
    settings: Settings,
    *,
    tritonserver: Path | None = None,
    envoy: Path | None = None,
    state_file: Path | None = None,
    announce: Callable[[str], None] = print,
) -> int:
    """Serve until SIGTERM or SIGINT (0), or until Triton ends by itself or Envoy cannot be kept up (1).

    Raises NereidError for a failed start. On every way out nothing is left: no process, no shared memory, no run
    directory, no state file.
    """
    if state_file is not None and (state_file.is_dir() or not state_file.absolute().parent.is_dir()):
        raise SettingsError(f"--state {state_file} must be a file in a folder that is there")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)
    try:
        async with contextlib.AsyncExitStack() as ending:
            running = await _unless(stop, _start(settings, tritonserver, envoy, ending))
            if running is None:
                _LOG.info("stopped before it was ready")
                return 0
            endpoints, triton, front = running
            if state_file is not None:
                _write_atomically(state_file, endpoints.to_json())
                ending.callback(_remove_own, state_file, endpoints.to_json())
            announce(_greeting(endpoints))
            reason = await _unless(stop, _first(triton.wait(), front.wait()))
            if reason is None:
                _LOG.info("stopping")
                return 0
            _LOG.error("%s; stopping", reason)
            # Its stubs hold the sockets of calls in progress: with them gone the clients learn of it.
            await triton.stop()
            return 1
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)


async def _start(
    settings: Settings, tritonserver: Path | None, envoy: Path | None, ending: contextlib.AsyncExitStack
) -> tuple[Endpoints, TritonServer, Front]:
    """Everything up to the open address; what has to be undone is pushed on ``ending`` as it is made."""
    server = settings.server
    for key, address in (("bind_addr", server.bind), ("http_addr", server.http)):
        if address is not None:
            _check_free(key, address)
    envoy = envoy_install.find(envoy)
    install = await embedded_triton.find(tritonserver)
    preflight.check(install)
    run = RunDirectory.open(cache_folder())
    ending.callback(run.close)
    async with Converter(run.environment, server.limits.load_timeout_s) as converter:
        sources = await converter.sources(settings)
        specs = await _convert_all(converter, sources, run.repository)
    triton = TritonServer(
        install,
        run.repository,
        shared_memory_prefix=run.shared_memory_prefix,
        environment=run.environment,
        grpc_socket=run.socket_path(f"triton{SOCKET_SUFFIX}"),
    )
    ending.push_async_callback(triton.stop)
    await triton.start()
    await _load_all(triton, specs, server.limits.load_timeout_s)
    front = Front(envoy, run, triton)
    ending.push_async_callback(front.stop)
    models = [
        Admitted(spec, source.settings.queue_capacity)
        for spec, source in zip(specs, sources, strict=True)
        if not source.hidden
    ]
    public = await front.start(models, server)
    names = tuple(model.spec.name for model in models)
    http, where = None, triton.addresses
    if server.http is not None:
        endpoints = HttpEndpoints(
            server.http, models=names, is_ready=front.is_ready, metrics=where.metrics, refusals=front.admin.refusals
        )
        http = await endpoints.start()
        ending.push_async_callback(endpoints.stop)
    return Endpoints(public, http, where.grpc, where.http, where.metrics, names), triton, front


async def _convert_all(converter: Converter, sources: Sequence[Source], repository: Path) -> list[ModelSpec]:
    """The specification of every source. Raises BundleError with one line per model that failed."""
    specs: dict[str, ModelSpec] = {}
    problems = []
    for source in sources:
        name = source.settings.name
        try:
            specs[name] = await converter.convert(source, repository, specs)
        except NereidError as error:
            problems.append(f"model {name!r}: {error}")
        else:
            _LOG.info("converted %s", name)
    if problems:
        raise BundleError("\n".join(problems))
    return list(specs.values())


async def _load_all(triton: TritonServer, specs: Sequence[ModelSpec], timeout_s: float) -> None:
    """Load every model. Raises ModelLoadError with one line per model that failed."""
    problems = []
    for spec in specs:
        try:
            await triton.load(spec.name, timeout_s)
        except ModelLoadError as error:
            problems.append(str(error))
            if not triton.is_running:
                break  # a load that hung took the server with it; the others could not be tried
        else:
            _LOG.info("loaded %s (%s on %s)", spec.name, spec.engine, spec.device)
    if problems:
        raise ModelLoadError("\n".join(problems))


async def _first(*work: Coroutine[Any, Any, T]) -> T:
    """The result of whichever ends first; the others have been cancelled and are over."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return await done.pop()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``; None when ``stop`` came first, and then ``work`` has been cancelled and is over."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return None
        return await task
    finally:
        stopped.cancel()
        task.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


def _check_free(key: str, address: Address) -> None:
    """Find a taken port before minutes of converting and loading. Raises SettingsError."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
            probe.listen(1)
        except OSError as error:
            raise SettingsError(f"server.{key} {address} cannot be bound ({error.strerror})") from None


def _write_atomically(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise SettingsError(f"--state {path} cannot be written ({error.strerror})") from None


def _remove_own(path: Path, text: str) -> None:
    """Remove the state file unless another server has written its own there meanwhile."""
    with contextlib.suppress(OSError):
        if path.read_text(encoding="utf-8") == text:
            path.unlink()


def _greeting(endpoints: Endpoints) -> str:
    http = "" if endpoints.http is None else f"; health and metrics on http://{endpoints.http}"
    return f"nereid is ready on {endpoints.public} with {', '.join(endpoints.models)}{http}"
