"""``nereid serve``: converts, starts Triton, loads, opens the public address, and ends everything in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from native_service.children import orphans
from native_service.edge.http_endpoints import HttpEndpoints, Metrics
from native_service.envoy import access as envoy_access
from native_service.envoy import install as envoy_install
from native_service.envoy.settings import HTTP_SOCKET, REST_SOCKET
from native_service.front import Front
from native_service.models.catalogue import Catalogue
from native_service.models.control import ModelControl
from native_service.models.conversion import Converted, Converter, Source
from native_service.models.residency import Residency
from native_service.operation import preflight
from native_service.operation.control_channel import ControlChannel
from native_service.operation.hangup import Hangup
from native_service.operation.reload import Reload, live_access, live_limits, live_residency
from native_service.operation.status import Status
from native_service.run_directory import RunDirectory
from native_service.settings import Address, ServerSettings, Settings
from native_service.snooze.metrics import SnoozeMetrics
from native_service.snooze.rest import RestServer
from native_service.telemetry.exposition import Loads
from native_service.telemetry.failures import LostProcesses
from native_service.telemetry.recent_failures import RecentFailures
from native_service.triton import embedded as embedded_triton
from native_service.triton.addresses import SOCKET_SUFFIX
from native_service.triton.embedded import TritonInstall
from native_service.triton.process import TritonServer
from native_service.triton.watchdog import Watchdog
from nereid_backend.cache import cache_folder
from nereid_backend.errors import ServerUnavailable, SettingsError

_LOG = logging.getLogger("nereid.serve")

T = TypeVar("T")

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a running service listens; the addresses for HTTP are None when they are off."""

    public: Address
    http: Address | None
    http_infer: Address | None
    rest: Address | None
    triton_grpc: str
    triton_metrics: str
    models: tuple[str, ...]

    @property
    def addresses(self) -> dict[str, str | None]:
        """Each as text, by what it is for."""
        return {
            "address": str(self.public),
            "triton_grpc": self.triton_grpc,
            "triton_metrics": self.triton_metrics,
            "http": None if self.http is None else str(self.http),
            "http_infer": None if self.http_infer is None else str(self.http_infer),
            "rest": None if self.rest is None else str(self.rest),
        }

    def to_json(self) -> str:
        """The text of the state file."""
        state = {"pid": os.getpid(), **self.addresses, "models": list(self.models)}
        return json.dumps(state, indent=2) + "\n"


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says beside the settings: programs to run, a file to write, whether to follow changes.

    ``grace_s``: how long calls in progress have at the end, and then Triton; None for ten seconds each.

    ``reread`` gives the settings anew while they are followed and when they are to be reloaded; None when there is no
    file. ``settings_file`` is its name for people.
    """

    tritonserver: Path | None = None
    envoy: Path | None = None
    state_file: Path | None = None
    watch: bool = False
    reread: Callable[[], Settings] | None = None
    settings_file: Path | None = None
    grace_s: float | None = None


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
    hangup = Hangup(stop.set)
    loop.add_signal_handler(signal.SIGHUP, hangup.received)
    failures = RecentFailures()
    logging.getLogger("nereid").addHandler(failures)
    try:
        async with contextlib.AsyncExitStack() as ending:
            if orphans.is_first():
                reaping = asyncio.create_task(orphans.reap())
                ending.callback(reaping.cancel)
            running = await _unless(stop, _start(settings, options, ending, hangup, failures))
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
        for number in (*_STOP_SIGNALS, signal.SIGHUP):
            loop.remove_signal_handler(number)
        logging.getLogger("nereid").removeHandler(failures)


async def _start(
    settings: Settings,
    options: Options,
    ending: contextlib.AsyncExitStack,
    hangup: Hangup,
    failures: RecentFailures,
) -> tuple[Endpoints, Watchdog, Front]:
    """Everything up to the open address; what has to be undone is pushed on ``ending`` as it is made."""
    server = settings.server
    for key, address in server.addresses.items():
        preflight.check_free(key, address)
    access = envoy_access.read(server)  # before minutes of converting and loading
    envoy = envoy_install.find(options.envoy)
    install = await embedded_triton.find(options.tritonserver)
    preflight.check(install, server.limits, cache_folder())
    run = RunDirectory.open(cache_folder())
    ending.callback(run.close)
    triton = _triton(install, run)
    status = Status(_sources(settings, options), triton, install.version, failures)
    reload: Reload | None = None
    await _open_channel(run, status, lambda: reload, ending)
    catalogue = Catalogue(run, triton, server.limits.load_timeout_s)
    ending.enter_context(LostProcesses(catalogue.end_given_up))
    # Sources that may change while they are served must not be shared with what runs.
    link = not (options.watch or server.allow_model_control)

    def new_converter() -> Converter:
        return Converter(run.environment, catalogue.load_timeout_s, link=link)

    residency = Residency(catalogue, server.residency)
    ending.push_async_callback(residency.stop)
    control = ModelControl(settings, catalogue, residency, new_converter, lenient=options.watch)
    status.preparing(catalogue, residency, control)
    ending.push_async_callback(triton.stop, options.grace_s)
    await control.load_converted(await _converted_beside(triton, control))
    front = Front(envoy, run, triton, access, residency, options.grace_s)
    # They answer as soon as Envoy asks, and until it asks no more.
    await _open_http(server, run, triton, catalogue, control, residency, front, ending)
    ending.push_async_callback(front.stop)
    public = await catalogue.open(front, server, control if server.allow_model_control else None)
    residency.open(front.traffic)
    ending.callback(asyncio.create_task(residency.sweep()).cancel)
    ending.push_async_callback(control.stop)
    if options.watch:
        ending.callback(_following(control, options).cancel)
    where, names = triton.addresses, tuple(catalogue.models)
    endpoints = Endpoints(public, front.http, front.http_infer, front.rest, where.grpc, where.metrics, names)
    status.opened(front, endpoints.addresses)
    parts = [live_access(front), live_limits(front, catalogue), live_residency(residency)]
    reload = Reload(settings, options.reread, control, parts)
    hangup.will(reload.run)
    return endpoints, Watchdog(catalogue, control, triton, front.restore_regions), front


async def _open_channel(
    run: RunDirectory, status: Status, reload: Callable[[], Reload | None], ending: contextlib.AsyncExitStack
) -> None:
    """What the commands for a running server ask and tell it; ``reload`` gives None before it is ready."""

    async def order_reload() -> dict[str, list[str]]:
        if (ready := reload()) is None:
            raise ServerUnavailable("the server is still starting; try again when it is ready")
        return asdict(await ready.run())

    channel = ControlChannel(
        run, questions={"/status": status.server, "/models": status.models}, orders={"/reload": order_reload}
    )
    ending.push_async_callback(channel.stop)
    await channel.start()


async def _converted_beside(triton: TritonServer, control: ModelControl) -> list[tuple[Source, Converted]]:
    """What ``control`` converts, while ``triton`` starts. Raises the error of whichever fails first."""
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(triton.start())
            converting = both.create_task(control.convert())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return converting.result()


def _following(control: ModelControl, options: Options) -> asyncio.Task[None]:
    """What follows the changes of the folder and of the list, until it is cancelled."""
    following = asyncio.create_task(control.follow(options.reread))
    following.add_done_callback(_report_failure)
    return following


def _triton(install: TritonInstall, run: RunDirectory) -> TritonServer:
    return TritonServer(
        install,
        run.repository,
        shared_memory_prefix=run.shared_memory_prefix,
        environment=run.environment,
        grpc_socket=run.socket_path(f"triton{SOCKET_SUFFIX}"),
        pulses=run.pulses,
    )


async def _open_http(
    server: ServerSettings,
    run: RunDirectory,
    triton: TritonServer,
    catalogue: Catalogue,
    control: ModelControl,
    residency: Residency,
    front: Front,
    ending: contextlib.AsyncExitStack,
) -> None:
    """Health, metrics and SnoozeML's REST, on the sockets that Envoy hands them to, as far as they are asked for."""
    if server.http is None and server.rest is None:
        return
    metrics = _metrics(triton, catalogue, control, residency, front)
    ending.push_async_callback(metrics.stop)
    await metrics.start()
    catalogue.before_unload = metrics.look
    if server.http is not None:
        probes = HttpEndpoints(
            f"{run.short_path}/{HTTP_SOCKET}",
            models=catalogue.models,
            is_answering=front.is_answering,
            metrics=metrics,
        )
        ending.push_async_callback(probes.stop)
        await probes.start()
    if server.rest is not None:
        rest = RestServer(
            server, catalogue=catalogue, control=control, residency=residency, front=front, metrics=metrics.answer
        )
        ending.push_async_callback(rest.stop)
        await rest.start(f"{run.short_path}/{REST_SOCKET}")


def _metrics(
    triton: TritonServer, catalogue: Catalogue, control: ModelControl, residency: Residency, front: Front
) -> Metrics:
    return Metrics(
        triton.addresses.metrics,
        models=catalogue.models,
        counted=front.counted,
        loads=lambda: Loads(
            dict(catalogue.conversion_s),
            dict(catalogue.load_s),
            control.restarts,
            {"tritonserver": triton.restarts, "envoy": front.envoy_restarts},
            residency.residences,
        ),
        more=SnoozeMetrics(lambda: front.snooze.counts, residency).text,
    )


def _sources(settings: Settings, options: Options) -> dict[str, str | None]:
    """Where the settings, the models and the state file are, for whoever looks for this server."""
    paths = {
        "settings": options.settings_file,
        "folder": settings.server.folder,
        "state_file": options.state_file,
    }
    return {key: None if path is None else os.path.realpath(path) for key, path in paths.items()}


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
