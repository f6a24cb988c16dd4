"""``nereid serve``: converts, starts Triton, loads, opens the public address, and ends everything in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from native_service import certificates, credentials, embedded_triton, envoy_install, preflight
from native_service.catalogue import Catalogue
from native_service.conversion import Converter
from native_service.envoy_access import Access
from native_service.envoy_config import HTTP_SOCKET
from native_service.front import Front
from native_service.http_endpoints import HttpEndpoints
from native_service.model_control import ModelControl
from native_service.run_directory import RunDirectory
from native_service.settings import Address, ServerSettings, Settings
from native_service.triton_process import SOCKET_SUFFIX, TritonServer
from native_service.watchdog import Watchdog
from nereid_backend.cache import cache_folder
from nereid_backend.errors import SettingsError

_LOG = logging.getLogger("nereid.serve")

T = TypeVar("T")

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a running service listens; ``http`` and ``http_infer`` are None when they are off."""

    public: Address
    http: Address | None
    http_infer: Address | None
    triton_grpc: str
    triton_metrics: str
    models: tuple[str, ...]

    def to_json(self) -> str:
        """The text of the state file."""
        state = {
            "pid": os.getpid(),
            "address": str(self.public),
            "triton_grpc": self.triton_grpc,
            "triton_metrics": self.triton_metrics,
            "http": None if self.http is None else str(self.http),
            "http_infer": None if self.http_infer is None else str(self.http_infer),
            "models": list(self.models),
        }
        return json.dumps(state, indent=2) + "\n"


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says beside the settings: programs to run, a file to write, whether to follow changes.

    ``reread`` gives the settings anew while they are followed; None when there is no file.
    """

    tritonserver: Path | None = None
    envoy: Path | None = None
    state_file: Path | None = None
    watch: bool = False
    reread: Callable[[], Settings] | None = None


async def serve(settings: Settings, options: Options, *, announce: Callable[[str], None] = print) -> int:
    """Serve until SIGTERM or SIGINT (0), or until Triton or Envoy cannot be kept up (1).

    Raises NereidError for a failed start. On every way out nothing is left: no process, no shared memory, no run
    directory, no state file.
    """
    state_file = options.state_file
    if state_file is not None and (state_file.is_dir() or not state_file.absolute().parent.is_dir()):
        raise SettingsError(f"--state {state_file} must be a file in a folder that is there")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)
    try:
        async with contextlib.AsyncExitStack() as ending:
            running = await _unless(stop, _start(settings, options, ending))
            if running is None:
                _LOG.info("stopped before it was ready")
                return 0
            endpoints, watchdog, front = running
            if state_file is not None:
                _write_atomically(state_file, endpoints.to_json())
                ending.callback(_remove_own, state_file, endpoints.to_json())
            announce(_greeting(endpoints))
            reason = await _unless(stop, _first(watchdog.watch(), front.wait()))
            if reason is None:
                _LOG.info("stopping")
                return 0
            _LOG.error("%s; stopping", reason)
            return 1
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)


async def _start(
    settings: Settings, options: Options, ending: contextlib.AsyncExitStack
) -> tuple[Endpoints, Watchdog, Front]:
    """Everything up to the open address; what has to be undone is pushed on ``ending`` as it is made."""
    server = settings.server
    for key, address in server.addresses.items():
        _check_free(key, address)
    access = _access(server)
    envoy = envoy_install.find(options.envoy)
    install = await embedded_triton.find(options.tritonserver)
    preflight.check(install)
    run = RunDirectory.open(cache_folder())
    ending.callback(run.close)
    triton = TritonServer(
        install,
        run.repository,
        shared_memory_prefix=run.shared_memory_prefix,
        environment=run.environment,
        grpc_socket=run.socket_path(f"triton{SOCKET_SUFFIX}"),
        pulses=run.pulses,
    )
    catalogue = Catalogue(run, triton, server.limits.load_timeout_s)
    # Sources that may change while they are served must not be shared with what runs.
    link = not (options.watch or server.allow_model_control)
    new_converter = partial(Converter, run.environment, server.limits.load_timeout_s, link=link)
    control = ModelControl(settings, catalogue, new_converter, lenient=options.watch)
    converted = await control.convert()
    ending.push_async_callback(triton.stop)
    await triton.start()
    await control.load_converted(converted)
    front = Front(envoy, run, triton, access)
    ending.push_async_callback(front.stop)
    public = await catalogue.open(front, server, control if server.allow_model_control else None)
    http, where = front.http, triton.addresses
    if http is not None:
        endpoints = HttpEndpoints(
            f"{run.short_path}/{HTTP_SOCKET}",
            models=catalogue.models,
            is_answering=front.is_answering,
            metrics=where.metrics,
            failed=front.failed,
            scripts=lambda: front.script_counts,
            restarts=lambda: control.restarts,
        )
        await endpoints.start()
        ending.push_async_callback(endpoints.stop)
    ending.push_async_callback(control.stop)
    if options.watch:
        following = asyncio.create_task(control.follow(options.reread))
        following.add_done_callback(_report_failure)
        ending.callback(following.cancel)
    names = tuple(catalogue.models)
    watchdog = Watchdog(catalogue, control, triton)
    return Endpoints(public, http, front.http_infer, where.grpc, where.metrics, names), watchdog, front


def _access(server: ServerSettings) -> Access:
    """Certificates checked and keys read, before minutes of converting and loading. Raises SettingsError."""
    if server.tls is not None:
        certificates.check(server.tls)
    return Access(server.tls, None if server.auth is None else credentials.read(server.auth))


def _report_failure(following: asyncio.Task[None]) -> None:
    if not following.cancelled() and (error := following.exception()) is not None:
        _LOG.error("the models are not followed any more; restart the server", exc_info=error)


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
    return f"nereid is ready on {endpoints.public} with {', '.join(endpoints.models) or 'no models yet'}{http}"
