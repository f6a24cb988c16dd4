"""The public address: Envoy, and behind it our gRPC server for what Triton cannot answer by itself.

Where ``server.http_infer_addr`` is set our HTTP server stands beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from native_service.access import certificates
from native_service.edge.grpc import Inference, Residency
from native_service.edge.local_channel import open_channel
from native_service.edge.regions import Regions
from native_service.envoy.access import OPEN, Access
from native_service.envoy.admin import EnvoyAdmin, Traffic
from native_service.envoy.listeners import TURNED_CALLS, TURNED_MS
from native_service.envoy.process import EnvoyServer
from native_service.envoy.settings import HTTP_INFER_SOCKET, INNER_SOCKET, SERVICE_SOCKET, Admitted, Place
from native_service.kserve.grpc import KServeService, ModelControl
from native_service.kserve.http import HttpInference
from native_service.kserve.shared_memory import SharedMemory
from native_service.nereid.checkpoint import Budget
from native_service.nereid.grpc import NativeServer, NereidService
from native_service.nereid.script_calls import ScriptCalls
from native_service.run_directory import RunDirectory
from native_service.settings import Address, Limits, ServerSettings
from native_service.snooze.grpc import SnoozeService
from native_service.snooze.inference import Counts, SnoozeInference
from native_service.telemetry.exposition import Counted
from native_service.telemetry.metrics import Failed, Refusals, Tally
from native_service.triton.process import TritonServer
from nereid_backend.errors import EnvoyUnavailable
from nereid_backend.spec import ModelSpec

_DRAIN_S = 10.0
# Of the largest: what our server holds while it answers is no attack.
_REQUESTS_AT_ONCE = 4
# gRPC's.
_OK = "0"


class Front:
    """Opened once with ``start``; what it opened is undone by ``stop``, also after a failed start."""

    def __init__(
        self,
        envoy: Path,
        run: RunDirectory,
        triton: TritonServer,
        access: Access = OPEN,
        residency: Residency | None = None,
        drain_s: float | None = None,
    ) -> None:
        """``access``: what protects the address; ``residency`` None: what is served is always in Triton; ``drain_s``:
        how long calls in progress have at the end, None for ten seconds."""
        self._program, self._run, self._triton, self._access = envoy, run, triton, access
        self._residency, self._drain_s = residency, drain_s
        self._envoy: EnvoyServer | None = None
        self._server: NativeServer | None = None
        self._inference: Inference | None = None
        self._scripts: ScriptCalls | None = None
        self._services: tuple[KServeService | NereidService | SnoozeInference, ...] = ()
        self._native: NereidService | None = None
        self._memory: SharedMemory | None = None
        self._snooze: SnoozeInference | None = None
        self.limits = Limits()
        """What calls that begin now may send, once it has been started."""
        self.envoy_buffered_bytes = self.limits.max_buffered_bytes
        """What Envoy may hold, as it was started."""
        self._http_inference: HttpInference | None = None
        self._specs: list[ModelSpec] = []
        self._lacks = False
        self._refusals = Refusals()
        self._failed_calls: Tally[tuple[str, int | None]] = Tally()
        self._answered_calls: Tally[tuple[str, int]] = Tally()
        self._turned_calls: Tally[tuple[str, str]] = Tally()
        self._connections: Tally[str] = Tally()
        self._counting = asyncio.Lock()
        self._ending = contextlib.AsyncExitStack()

    @property
    def admin(self) -> EnvoyAdmin:
        if self._envoy is None:
            raise RuntimeError("the front has not been started")
        return self._envoy.admin

    async def start(
        self, models: Sequence[Admitted], server: ServerSettings, control: ModelControl | None = None
    ) -> Address:
        """Serve ``models`` on the addresses of ``server``; gives ``server.bind`` with its real port.

        ``control``: what callers may do. Raises SettingsError for a taken port, EnvoyUnavailable with Envoy's reason
        for anything else.
        """
        self._specs, self.limits = [model.spec for model in models], server.limits
        service = await self._open_services(models, server, control)
        envoy = self._envoy = EnvoyServer(
            self._program,
            self._run.path,
            self._run.short_path,
            bind=server.bind,
            max_message_bytes=self.limits.max_request_bytes,
            max_buffered_bytes=self.limits.max_buffered_bytes,
            environment=self._run.environment,
            access=self._access,
            http=server.http,
            http_infer=server.http_infer,
            rest=server.rest,
        )
        self.envoy_buffered_bytes = self.limits.max_buffered_bytes
        self._ending.push_async_callback(envoy.stop, _DRAIN_S if self._drain_s is None else self._drain_s)
        service.set_serving(True)
        bound = await envoy.start(self._triton.addresses.grpc, models)
        if (tls := self._access.tls) is not None:
            following = certificates.follow(tls, envoy.read_certificates_again)
            self._ending.callback(asyncio.create_task(following).cancel)
        # The first thing at the end: probes learn of it while calls are still taken.
        self._ending.callback(service.set_serving, False)
        return bound

    async def _open_services(
        self, models: Sequence[Admitted], server: ServerSettings, control: ModelControl | None
    ) -> NativeServer:
        """Our servers on the sockets that Envoy hands calls to; the one for gRPC, which says that it does not serve."""
        limits, specs = self.limits, self._specs
        channel = open_channel(f"unix:{self._run.short_path}/{INNER_SOCKET}")
        self._ending.push_async_callback(channel.close)
        self._inference = inference = Inference(channel, self._refusals)
        inference.time_limits_s, inference.idle = _time_limits_s(models), _idle(models)
        inference.residency = self._residency
        self._scripts = scripts = ScriptCalls(inference)
        await scripts.start(self._run.short_path)
        self._ending.push_async_callback(scripts.stop)
        if server.allow_shared_memory:
            self._memory = SharedMemory(self._triton.channel, self._triton.key)
        kserve = KServeService(
            specs,
            inference,
            self._triton.channel,
            self.is_ready,
            control,
            scripts,
            self._memory,
            name=server.name,
            repository=self._run.repository,
        )
        regions = Regions(self._run.shared_memory_prefix, self._triton)
        self._ending.push_async_callback(regions.close)
        native = NereidService(specs, inference, limits, scripts, regions)
        self._snooze = snooze = SnoozeInference(specs, inference, scripts)
        snooze.capacities = _capacities(models)
        snooze_service = SnoozeService(snooze, inference.half_sent, native.budget)
        self._native, self._services = native, (kserve, native, snooze)
        room = limits.max_buffered_bytes + _REQUESTS_AT_ONCE * limits.max_request_bytes
        watching = inference.half_sent.watch(room, lambda: native.budget.is_crowded)
        self._ending.callback(asyncio.create_task(watching).cancel)
        inference.calls.set_models([spec.name for spec in specs])
        handlers = (native.handler, kserve.handler, snooze_service.handler)
        service = NativeServer(handlers, [spec.name for spec in specs], limits.max_request_bytes)
        self._ending.push_async_callback(service.stop, 0)
        self._server = service
        await service.start(f"unix:{self._run.short_path}/{SERVICE_SOCKET}")
        if server.http_infer is not None:
            self._http_inference = http = HttpInference(kserve, limits, native.budget)
            self._ending.push_async_callback(http.stop)
            await http.start(f"{self._run.short_path}/{HTTP_INFER_SOCKET}")
        return service

    async def restore_regions(self) -> None:
        """Tell a Triton that has been started again of the shared memory that clients have registered."""
        if self._memory is not None:
            await self._memory.restore()

    async def is_answering(self) -> bool:
        """Whether the address is open and Triton behind it answers."""
        return self._envoy is not None and await self._envoy.admin.is_ready() and await self._triton.is_ready()

    async def is_ready(self) -> bool:
        """Whether a call of every required model would be answered now."""
        return not self._lacks and await self.is_answering()

    async def traffic(self) -> Mapping[str, Traffic]:
        """The calls of each model, as Envoy counts them. Raises EnvoyUnavailable."""
        return {} if self._envoy is None else await self._envoy.admin.traffic()

    async def counted(self) -> Counted:
        """What was counted since the start, also over restarts of Envoy. Raises EnvoyUnavailable."""
        if self._inference is None or self._native is None or self._scripts is None:
            raise RuntimeError("the front has not been started")
        async with self._counting:  # an older look that comes later would read like a counter that fell
            life, look = self.envoy_pid, await self.admin.look()
            if life != self.envoy_pid:
                raise EnvoyUnavailable("Envoy is being started again")
            ever = self._connections.total(life, {"": look.connections_ever})
            self.snooze.turned = _turned(self._turned_calls.total(life, look.turned))
            return Counted(
                Failed(self._failed_calls.total(life, look.failed), self._refusals.counts),
                self._answered_calls.total(life, look.answered_ms),
                look.permits_in_use,
                look.connections,
                ever.get("", 0),
                self._scripts.counts,
                self._inference.calls,
                self._native.budget.used_bytes,
                self._native.budget.total_bytes,
            )

    @property
    def snooze(self) -> SnoozeInference:
        """What runs models for SnoozeML's clients."""
        if self._snooze is None:
            raise RuntimeError("the front has not been started")
        return self._snooze

    @property
    def inference(self) -> Inference:
        """The way to Triton."""
        if self._inference is None:
            raise RuntimeError("the front has not been started")
        return self._inference

    @property
    def budget(self) -> Budget:
        """The tensor bytes that all calls may hold together."""
        if self._native is None:
            raise RuntimeError("the front has not been started")
        return self._native.budget

    @property
    def envoy_restarts(self) -> int:
        """How often Envoy was started again after its death."""
        return 0 if self._envoy is None else self._envoy.restarts

    @property
    def http(self) -> Address | None:
        """Where health and metrics are, with the real port; None when they are off."""
        return None if self._envoy is None else self._envoy.http

    @property
    def http_infer(self) -> Address | None:
        """Where KServe v2 over HTTP is, with the real port; None when it is off."""
        return None if self._envoy is None else self._envoy.http_infer

    @property
    def rest(self) -> Address | None:
        """Where SnoozeML's REST is, with the real port; None when it is off."""
        return None if self._envoy is None else self._envoy.rest

    @property
    def envoy_pid(self) -> int | None:
        return None if self._envoy is None else self._envoy.pid

    async def set_models(self, models: Sequence[Admitted]) -> None:
        """Serve exactly ``models``, which Triton has loaded; calls in progress are not disturbed.

        Calls of those that are away end with UNAVAILABLE, whatever becomes of Envoy.
        Those that go are done with when this returns, but for calls that take longer than ten seconds.
        Raises EnvoyUnavailable; then the models from before are served.
        """
        if self._envoy is None or self._inference is None or self._server is None:
            raise RuntimeError("the front has not been started")
        specs = [model.spec for model in models]
        self._inference.away = frozenset(model.spec.name for model in models if model.away)
        self._inference.idle = _idle(models)
        self._inference.time_limits_s = _time_limits_s(models)
        if self._snooze is not None:
            self._snooze.capacities = _capacities(models)
        self._lacks = any(model.away and model.required for model in models)
        known = {spec.name for spec in self._specs}
        # Our services send calls through Envoy: they stop before a model's way there goes, and start when it is there.
        self._tell([spec for spec in specs if spec.name in known])
        try:
            await self._envoy.set_models(models)
        except EnvoyUnavailable:
            specs = self._specs
            raise
        finally:
            self._specs = specs
            self._tell(specs)
            self._inference.calls.set_models([spec.name for spec in specs])
        self._server.set_models([spec.name for spec in specs], self._inference.away, complete=not self._lacks)

    def _tell(self, specs: Sequence[ModelSpec]) -> None:
        for service in self._services:
            service.set_models(specs)

    @property
    def access(self) -> Access:
        """What protects the addresses now."""
        return self._access

    async def set_access(self, access: Access) -> None:
        """Let the keys and tokens of ``access`` in instead of those from before, and read the certificates again.

        Which files hold the certificates stays as it is. Raises EnvoyUnavailable.
        """
        if self._envoy is None:
            raise RuntimeError("the front has not been started")
        if access.credentials is not None and access != self._access:
            await self._envoy.set_credentials(access.credentials)
            self._access = access
        self._envoy.read_certificates_again()

    def set_limits(self, limits: Limits) -> None:
        """Bound Checkpoint calls, and calls over HTTP, that begin from now on by ``limits``.

        ``max_request_bytes``, and what Envoy may hold, stay as they are.
        """
        self.limits = limits
        if self._native is not None:
            self._native.set_limits(limits)
        if self._http_inference is not None:
            self._http_inference.set_limits(limits)

    async def wait(self) -> str:
        """Wait until the address is gone for good; the reason as a sentence."""
        if self._envoy is None:
            raise RuntimeError("the front has not been started")
        return await self._envoy.wait()

    async def stop(self) -> None:
        """Health first, then Envoy within the bound, then our server."""
        await self._ending.aclose()


def _capacities(models: Sequence[Admitted]) -> dict[str, int]:
    return {model.spec.name: model.capacity for model in models}


def _idle(models: Sequence[Admitted]) -> frozenset[str]:
    return frozenset(model.spec.name for model in models if model.place is Place.IDLE)


def _turned(counted: Mapping[tuple[str, str], int]) -> Counts:
    """Of SnoozeML's calls, those that Envoy did not send to our service."""
    good = counted.get((TURNED_CALLS, _OK), 0)
    bad = sum(count for (name, status), count in counted.items() if name == TURNED_CALLS and status != _OK)
    return Counts(good, bad, counted.get((TURNED_MS, _OK), 0) / 1000)


def _time_limits_s(models: Sequence[Admitted]) -> dict[str, float]:
    return {model.spec.name: model.time_limit_s for model in models if model.time_limit_s is not None}
