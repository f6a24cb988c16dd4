"""Envoy as a child: validated, started, started again when it dies, drained at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from native_service.access.credentials import Credentials
from native_service.children import processes
from native_service.children.restarts import Tries
from native_service.envoy import access as envoy_access
from native_service.envoy import config as envoy_config
from native_service.envoy import huge_pages
from native_service.envoy.access import Access
from native_service.envoy.admin import EnvoyAdmin
from native_service.envoy.files import EnvoyFiles, put
from native_service.envoy.settings import (
    ADMIN_SOCKET,
    CLUSTERS_FILE,
    INNER_SOCKET,
    ROUTES_FILE,
    TOKENS_FILE,
    Admitted,
    EnvoySettings,
    Place,
)
from native_service.settings import Address
from native_service.telemetry.failures import of_envoy, tell
from nereid_backend.errors import EnvoyUnavailable, SettingsError

_LOG = logging.getLogger("nereid.envoy")

_START_TIMEOUT_S, _START_POLL_S, _START_TRIES = 20.0, 0.02, 3
# How long the calls of a model that goes are waited for.
_LAST_CALLS_S = 10.0
_MOST_RESTARTS, _RESTART_WINDOW_S, _RETRY_S = 5, 60.0, 1.0
# How long clients are asked to leave before the address closes, and between two looks at what is still running.
_DRAIN_S, _DRAIN_POLL_S = 1, 0.02
_STOP_GRACE_S, _LAST_LINES_S = 2.0, 0.5
_CONFIG, _IN_MEMORY = "envoy.json", "envoy-in-memory"
_MOST_WORKERS = 4
_FLUSH_MS = 100
_LEVELS = {"warning": logging.WARNING, "error": logging.ERROR, "critical": logging.CRITICAL}
_LINE = re.compile(r"^\[(\w+)\] (.*)$")
_RESETTING, _OVERLOAD_EVERY_S = re.compile(r"resetting \d+ streams in \d+ buckets"), 10.0
_PUBLIC_CALLS = r"^http\.(public|http_infer|rest)\.downstream_(cx|rq)_active$"


class EnvoyServer:
    """One Envoy in front of one Triton. ``start`` once, ``set_models`` as they come and go, ``stop`` always."""

    def __init__(
        self,
        program: Path,
        folder: Path,
        short_folder: str,
        *,
        bind: Address,
        max_message_bytes: int,
        max_buffered_bytes: int,
        environment: Mapping[str, str],
        access: Access = envoy_access.OPEN,
        http: Address | None = None,
        http_infer: Address | None = None,
        rest: Address | None = None,
    ) -> None:
        """``folder`` is the private run directory, ``short_folder`` a short name of it; ``environment`` is added."""
        self._access, self._http, self._http_infer, self._rest = access, http, http_infer, rest
        self._program, self._folder, self._short_folder = program, folder, short_folder
        self._bind, self._max_message_bytes, self._max_buffered_bytes = bind, max_message_bytes, max_buffered_bytes
        self._environment = {**os.environ, **environment}
        self._settings: EnvoySettings | None = None
        self._files = EnvoyFiles(program, folder, self._environment)
        self._admin: EnvoyAdmin | None = None
        self._copy: int | None = None
        self._started_from = program
        self._child: processes.Child | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._complaints: deque[str] = deque(maxlen=10)
        self._models: list[Admitted] = []
        self._changing = asyncio.Lock()
        self._supervision: asyncio.Task[str] | None = None
        self.restarts = 0
        """How often it was started again after its death."""
        self._overload_told = -_OVERLOAD_EVERY_S

    @property
    def admin(self) -> EnvoyAdmin:
        if self._admin is None:
            raise EnvoyUnavailable("Envoy has not been started")
        return self._admin

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.process.pid

    @property
    def http(self) -> Address | None:
        """Where health and metrics are, with the real port."""
        return None if self._settings is None else self._settings.http

    @property
    def http_infer(self) -> Address | None:
        """Where KServe v2 over HTTP is, with the real port."""
        return None if self._settings is None else self._settings.http_infer

    @property
    def rest(self) -> Address | None:
        """Where SnoozeML's REST is, with the real port."""
        return None if self._settings is None else self._settings.rest

    async def start(self, triton: str, models: Sequence[Admitted]) -> Address:
        """Open the public address in front of Triton's gRPC at ``triton``; the address with its real port.

        Raises SettingsError for a taken port, EnvoyUnavailable with the reason for anything else.
        """
        self._files.write_certificates(self._access.tls)
        self._admin = EnvoyAdmin(f"{self._short_folder}/{ADMIN_SOCKET}")
        await self._copy_program()
        for tries_left in reversed(range(_START_TRIES)):
            with contextlib.ExitStack() as probes:  # all open until the last: two looks may find the same port
                bind, http = _with_port(self._bind, probes), self._http and _with_port(self._http, probes)
                http_infer = self._http_infer and _with_port(self._http_infer, probes)
                rest = self._rest and _with_port(self._rest, probes)
            limits = (self._max_message_bytes, self._max_buffered_bytes)
            settings = EnvoySettings(bind, triton, *limits, self._access, http, http_infer, rest)
            self._files.write_token_secret(settings)
            await self._files.validate(settings, models)
            self._files.write(CLUSTERS_FILE, envoy_config.clusters_file(settings, models))
            self._write_access(settings, models)
            put(self._folder / _CONFIG, envoy_config.bootstrap(settings))
            try:
                await self._launch()
            except EnvoyUnavailable:
                await self._end(grace_s=0)
                if not any("Address already in use" in line for line in self._complaints):
                    raise
                # Between our look at a free port and Envoy's bind another program may take it.
                if self._bind.port or not tries_left:
                    others = {"http_addr": http, "http_infer_addr": http_infer, "rest_addr": rest}
                    keys = [key for key, address in others.items() if f"'{address}'" in self._complaints[-1]]
                    key, taken = (keys[0], others[keys[0]]) if keys else ("bind_addr", bind)
                    raise SettingsError(f"server.{key} {taken} cannot be bound (Address already in use)") from None
                continue
            self._settings, self._models = settings, list(models)
            self._supervision = asyncio.create_task(self._supervise())
            return bind
        raise EnvoyUnavailable("Envoy found no free port")

    async def wait(self) -> str:
        """Wait until Envoy is beyond restarting; the reason as a sentence."""
        if self._supervision is None:
            raise EnvoyUnavailable("Envoy has not been started")
        return await asyncio.shield(self._supervision)

    async def set_models(self, models: Sequence[Admitted]) -> None:
        """Serve exactly ``models``; calls in progress, also of models that go, are not disturbed.

        Returns when the permits of those that go are back, or after ten seconds. Raises EnvoyUnavailable when Envoy
        refuses the new files or dies meanwhile; then those from before are served.
        """
        if self._settings is None:
            raise EnvoyUnavailable("Envoy has not been started")
        async with self._changing:
            if _anywhere(models) != _anywhere(self._models):
                await self._files.validate(self._settings, models)
            try:
                await self._switch(self._settings, models)
            except EnvoyUnavailable:
                # Also an Envoy that has died half-way, and reads the files when it is started again.
                coming = [model for model in models if model.spec.name not in {old.spec.name for old in self._models}]
                clusters = envoy_config.clusters_file(self._settings, [*self._models, *coming])
                self._files.write(CLUSTERS_FILE, clusters)
                self._files.write(ROUTES_FILE, envoy_config.routes_file(self._settings, self._models))
                raise
            self._models = list(models)

    async def set_credentials(self, credentials: Credentials) -> None:
        """Let exactly ``credentials`` in from now on, also on open connections; certificates stay as they are.

        Raises EnvoyUnavailable; then those from before do.
        """
        if self._settings is None or self._access.credentials is None:
            raise EnvoyUnavailable("Envoy has not been started with keys")
        async with self._changing:
            settings = replace(self._settings, access=replace(self._access, credentials=credentials))
            if credentials.tokens != self._access.credentials.tokens:
                settings = replace(settings, token_secret_file=self._files.new_token_secret_file())
            self._files.write_token_secret(settings)
            await self._files.validate(settings, self._models)
            try:
                await self._replace_access(settings)
            except EnvoyUnavailable:
                self._write_access(self._settings, self._models)
                raise
            self._settings, self._access = settings, settings.access

    async def _replace_access(self, settings: EnvoySettings) -> None:
        await self._files.replace(self.admin, TOKENS_FILE, envoy_config.tokens_file(settings))
        await self._files.replace(self.admin, ROUTES_FILE, envoy_config.routes_file(settings, self._models))
        for file, content in envoy_config.http_routes_files(settings).items():
            await self._files.replace(self.admin, file, content)

    def _write_access(self, settings: EnvoySettings, models: Sequence[Admitted]) -> None:
        self._files.write(TOKENS_FILE, envoy_config.tokens_file(settings))
        self._files.write(ROUTES_FILE, envoy_config.routes_file(settings, models))
        for file, content in envoy_config.http_routes_files(settings).items():
            self._files.write(file, content)

    async def _switch(self, settings: EnvoySettings, models: Sequence[Admitted]) -> None:
        staying = {model.spec.name for model in models}
        going = [model for model in self._models if model.spec.name not in staying]
        # A route may only name clusters that are there: they come before it and go after it.
        await self._files.replace(self.admin, CLUSTERS_FILE, envoy_config.clusters_file(settings, [*models, *going]))
        await self._files.replace(self.admin, ROUTES_FILE, envoy_config.routes_file(settings, models))
        if going:
            await self._until_back({model.spec.name for model in going})
            await self._files.replace(self.admin, CLUSTERS_FILE, envoy_config.clusters_file(settings, models))

    async def _until_back(self, models: Collection[str]) -> None:
        """Wait until no call holds a permit of ``models``, which no route leads to any more."""
        deadline = time.monotonic() + _LAST_CALLS_S
        while busy := [name for name, calls in (await self.admin.permits_in_use()).items() if calls and name in models]:
            if time.monotonic() > deadline:
                _LOG.warning("calls of %s are still running; they may finish", ", ".join(busy))
                return
            await asyncio.sleep(_DRAIN_POLL_S)

    async def stop(self, grace_s: float) -> None:
        """Ask clients to leave, close the address, let calls finish within ``grace_s``, end the process."""
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
        if self._child is not None and self._child.is_running:
            with contextlib.suppress(EnvoyUnavailable):
                await self._drain(grace_s)
        await self._end(_STOP_GRACE_S)
        if self._admin is not None:
            await self._admin.close()
        if self._copy is not None:
            os.close(self._copy)
            self._copy = None

    async def _drain(self, grace_s: float) -> None:
        if not any((await self.admin.counters(_PUBLIC_CALLS)).values()):
            return  # nobody is connected
        await self.admin.drain()
        await asyncio.sleep(_DRAIN_S)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline:
            active = await self.admin.counters(_PUBLIC_CALLS)
            if not any(count for name, count in active.items() if name.endswith("rq_active")):
                return
            await asyncio.sleep(_DRAIN_POLL_S)
        _LOG.warning("calls that did not end within %g s are cut", grace_s)

    async def _supervise(self) -> str:
        """Restart on every death, but not for ever; the reason for giving up."""
        tries = Tries(_MOST_RESTARTS, _RESTART_WINDOW_S)
        reason = await self._next_death()
        while tries.take():
            self.restarts += 1
            _LOG.error("%s; starting it again", reason)
            await self._end(grace_s=0)
            try:
                await self._launch()
            except EnvoyUnavailable as error:
                reason = str(error)
                await asyncio.sleep(_RETRY_S)  # what it lacks may be back by then
            else:
                reason = await self._next_death()
        return f"{reason}, {tries}"

    async def _next_death(self) -> str:
        if self._child is None:
            raise EnvoyUnavailable("Envoy has not been started")
        await self._child.process.wait()
        return await self._death("while serving")

    async def _copy_program(self) -> None:
        """From here on Envoy is started from memory, where its code lies in huge pages, if that can be."""
        try:
            self._copy = await asyncio.to_thread(huge_pages.copy_program, self._program)
        except (OSError, ValueError) as error:
            _LOG.debug("Envoy runs from its file: %s", error)
            return
        # The link gives the process a name.
        self._started_from = self._folder / _IN_MEMORY
        self._started_from.symlink_to(f"/proc/{os.getpid()}/fd/{self._copy}")

    async def _launch(self) -> None:
        """Return once the address is open. Raises EnvoyUnavailable with the reason."""
        self._complaints.clear()
        for name in (ADMIN_SOCKET, INNER_SOCKET):
            (self._folder / name).unlink(missing_ok=True)
        workers = max(1, min(os.cpu_count() or 1, _MOST_WORKERS))
        command = [
            *(str(self._started_from), "--config-path", _CONFIG, "--concurrency", str(workers)),
            # One bad file would otherwise silently replace everything that is served.
            *("--reject-unknown-dynamic-fields", "--disable-hot-restart", "--drain-time-s", str(_DRAIN_S)),
            *("--file-flush-interval-msec", str(_FLUSH_MS)),
            *("--log-level", "warning", "--log-format", "[%l] %v"),
        ]
        try:
            child = await processes.start(command, self._environment, folder=self._folder, new_session=False)
        except OSError as error:
            raise EnvoyUnavailable(f"Envoy cannot be started ({error.strerror})") from None
        self._child = child
        self._readers = [asyncio.create_task(self._read(s)) for s in (self._child.stdout, self._child.stderr)]
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if not self._child.is_running:
                raise EnvoyUnavailable(await self._death("while starting"))
            if await self.admin.is_ready():
                return
            await asyncio.sleep(_START_POLL_S)
        raise EnvoyUnavailable(f"Envoy did not answer within {_START_TIMEOUT_S:g} s of its start")

    async def _end(self, grace_s: float) -> None:
        if self._child is None:
            return
        try:
            await self._child.stop(grace_s)
            await asyncio.wait(self._readers, timeout=_LAST_LINES_S)
        finally:  # whoever waits for this may be cancelled
            for reader in self._readers:
                reader.cancel()
            self._child.close()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _read(self, stream: asyncio.StreamReader) -> None:
        async for line in processes.lines(stream):
            if line.startswith("{"):  # the access log of failures
                if (failure := of_envoy(line)) is not None:
                    tell(failure)
                continue
            match = _LINE.match(line)
            level, text = (_LEVELS.get(match[1], logging.DEBUG), match[2]) if match else (logging.DEBUG, line)
            if level >= logging.ERROR or match is None:
                self._complaints.append(text)
            if _RESETTING.match(text):
                self._tell_of_overload()
            elif "caught ENVOY_SIGTERM" not in text:  # our own doing
                _LOG.log(level, "%s", text)

    def _tell_of_overload(self) -> None:
        """Envoy says so twenty times a second."""
        now = time.monotonic()
        if now > self._overload_told + _OVERLOAD_EVERY_S:
            self._overload_told = now
            _LOG.warning("callers hold too much memory; the calls that hold most are ended")

    async def _death(self, when: str) -> str:
        await asyncio.wait(self._readers, timeout=_LAST_LINES_S)
        code = None if self._child is None else self._child.process.returncode
        last = f": {self._complaints[-1]}" if self._complaints else ""
        return f"Envoy ended with code {code} {when}{last}"

    def read_certificates_again(self) -> None:
        """Use what the files of ``server.tls`` hold now, for new connections; without TLS this does nothing."""
        self._files.write_certificates(self._access.tls)


def _anywhere(models: Sequence[Admitted]) -> list[Admitted]:
    """``models`` wherever their calls go: that changes often, and in ways that were checked at the start."""
    return [replace(model, place=Place.TRITON, away=False) for model in models]


def _with_port(address: Address, probes: contextlib.ExitStack) -> Address:
    """``address``, with a port that is free now in the place of port 0; it is taken until ``probes`` are closed."""
    if address.port:
        return address
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    probe = probes.enter_context(socket.socket(family, socket.SOCK_STREAM))
    probe.bind((address.host, 0))
    return address._replace(port=probe.getsockname()[1])
