"""tritonserver as a child: out of other hosts' reach, told to load models one by one, and always brought to an end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from tritonclient.grpc import service_pb2

from native_service.children import processes
from native_service.edge.local_channel import open_channel
from native_service.triton import command, stubs
from native_service.triton.addresses import TritonAddresses, free_addresses, is_open
from native_service.triton.embedded import TritonInstall
from native_service.triton.errors import load_failure
from native_service.triton.log import TritonLog
from nereid_backend.errors import ModelLoadError, TritonUnavailable

_LOG = logging.getLogger("nereid.triton")

_START_TIMEOUT_S = 60.0
_START_POLL_S = 0.05
_START_TRIES = 3
_END_AFTER_ERROR_S = 0.3
_STOP_GRACE_S = 10.0
# After a swap that failed, or the death of a model's process, 2.51 always sits out its exit time-out; calls have ended
# by then (Envoy was drained).
_STOP_HANGING_S = 3.0
_LET_GO_S = 10.0
_UNLOAD_TIMEOUT_S = 30.0
_HEALTH_TIMEOUT_S = 1.0
_LAST_LINES_S = 0.5
# Triton looks for life in a process once a second, and gives it up after 0.7 s at least.
_GIVES_UP_S = 0.7
# A call that met a process at its death is given up within 2 s (1.8 at most was seen).
_LATEST_WORD_S = 3.0
_IN_USE = "currently in use"
_PORT_TAKEN = ("already in use", "Address in use", "Failed to bind")


class TritonServer:
    """One tritonserver process. ``start`` once, ``load`` and ``unload`` models, ``stop`` at the end (always)."""

    def __init__(
        self,
        install: TritonInstall,
        repository: Path,
        *,
        shared_memory_prefix: str,
        environment: Mapping[str, str] | None = None,
        grpc_socket: str | None = None,
        pulses: Path | None = None,
    ) -> None:
        """``environment`` is added to this process's own; the prefix names the stubs' regions in /dev/shm.

        In the folder ``pulses`` the stubs tell how they are.

        gRPC listens on the Unix socket ``grpc_socket`` (it must end in ``SOCKET_SUFFIX``), or on a port of loopback.
        """
        self._install = install
        self._repository = repository
        self._prefix = shared_memory_prefix
        self._environment = {**command.environment(install), **(environment or {})}
        # Where gRPC is a port, other users of this machine may reach it; only we may change what is served. Like any
        # argument it shows in the process list: it keeps programs out by mistake, not a determined local user. A socket
        # is in a private folder, and needs none.
        self._key = secrets.token_hex(16)
        self._grpc_socket = grpc_socket
        self._log = TritonLog()
        self._child: processes.Child | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._channel: Any = None
        self._addresses: TritonAddresses | None = None
        self._loading: set[str] = set()
        self._loaded: dict[str, float] = {}  # when, by the monotonic clock
        self._stuck: set[str] = set()
        self._exit_hangs = False
        self.restarts = 0
        """How often ``restart`` was called."""
        self._record = stubs.StubRecord(repository, shared_memory_prefix, pulses)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def addresses(self) -> TritonAddresses:
        if self._addresses is None:
            raise TritonUnavailable("tritonserver has not been started")
        return self._addresses

    @property
    def channel(self) -> Any:
        """The grpc.aio channel to the server; unlimited message sizes, closed by ``stop``."""
        if self._channel is None:
            raise TritonUnavailable("tritonserver has not been started")
        return self._channel

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        """The metadata of calls that only we may make."""
        return ((f"triton-grpc-protocol-{command.KEY_NAME}", self._key),)

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.process.pid

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.is_running

    async def start(self) -> None:
        """Return once the gRPC port answers. Raises TritonUnavailable with the reason."""
        for tries_left in reversed(range(_START_TRIES)):
            self._addresses = addresses = free_addresses(self._grpc_socket)
            self._channel = open_channel(addresses.grpc)
            try:
                await self._launch()
            except TritonUnavailable:
                await self._end(grace_s=0)
                # Between our look at a free port and Triton's bind another program may take it.
                if tries_left and any(mark in line for line in self._log.complaints for mark in _PORT_TAKEN):
                    _LOG.info("a port was taken meanwhile; starting tritonserver again on others")
                    continue
                raise
            return

    async def drop(self) -> None:
        """End what is left of the process and its models: they count as dead until they are loaded again."""
        self._bury()
        await self._end_process(grace_s=0)

    async def restart(self) -> None:
        """Start a new process in the place of a dropped one, at its addresses; the channel stays good.

        Raises TritonUnavailable with the reason.
        """
        self.restarts += 1
        await self._launch()

    def _bury(self) -> None:
        """Nothing that was known of the process that has ended holds any more."""
        if self._child is not None:
            # The stubs hold its sockets: with them gone the callers learn of it.
            self._child.kill_group()
        self._record.all_died()
        self._loading.clear()
        self._loaded.clear()
        self._stuck.clear()
        self._exit_hangs = False

    async def _launch(self) -> None:
        self._log = TritonLog()
        key = self._key if self._grpc_socket is None else None
        words = command.command(self._install, self._repository, self.addresses, self._prefix, key)
        try:
            child = await processes.start(words, self._environment, new_session=False)
        except OSError as error:
            raise TritonUnavailable(f"tritonserver cannot be started ({error.strerror})") from None
        self._child = child
        self._readers = _read_output(self._child, self._log)
        await self._until_live()

    async def load(self, model: str, timeout_s: float, behind: Sequence[str] = ()) -> None:
        """Load ``model`` of the repository, or what has become of it there: the one before serves until then.

        ``behind`` an ensemble are the models that Triton loads with it. Raises ModelLoadError with Triton's reason;
        what was loaded before is served as before. A load that passes its deadline cannot be cancelled on 2.51, but it
        fails when its new processes are killed.
        """
        models = (*behind, model)
        if not self._stuck.isdisjoint(models):
            raise ModelLoadError(f"model {model!r} cannot be loaded: an earlier load still hangs; restart the server")
        self._loading.update(models)
        before = {each: self._stubs(each) for each in models}
        work = asyncio.ensure_future(self._while_running(self._control("Load", model), f"while loading {model!r}"))
        try:
            await asyncio.wait((work,), timeout=timeout_s)
            if late := not work.done():
                for each in models:
                    stubs.kill(self._stubs(each) - before[each])
                await asyncio.wait((work,), timeout=_LET_GO_S)
            problem = await self._outcome(models, work)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        if late:
            problem = (
                f"model {model!r} did not load within {timeout_s:g} s; see the log above for what it waits for,"
                " or raise server.limits.load_timeout_s"
            )
        if model not in self._stuck:
            self._loading.difference_update(models)
        if problem:
            self._exit_hangs |= not self._loaded.keys().isdisjoint(models)
            raise ModelLoadError(problem)
        self._loaded.update(dict.fromkeys(models, time.monotonic()))
        if self.pid is not None:
            for each in models:
                self._record.take_note(self.pid, each, before[each])

    def find_dead(self) -> frozenset[str]:
        """The models of which a process has died: Triton 2.51 starts none again until the model is loaded.

        Their shared memory is gone after this.
        """
        if self.pid is None:
            return frozenset()
        dead = self._record.look(self.pid, self._loading)
        self._exit_hangs |= not dead.isdisjoint(self._loaded)
        return dead

    def processes_of(self, model: str) -> list[int]:
        """The ids of the processes that serve ``model``."""
        return self._record.processes_of(model)

    def kill_hung(self, limits: Mapping[str, float]) -> list[str]:
        """Kill the processes that will not answer any more; a line for each. ``limits`` are of a model's run, in s."""
        hung = self._record.find_hung(limits)
        stubs.kill(hung)
        return [*hung.values()]

    def kill_given_up(self, model: str, call_s: float) -> list[int]:
        """Kill the processes of ``model``, one of which Triton may have given up with a call of ``call_s``; their ids.

        None of a model that has just been loaded, when the call may have begun before that: what Triton says then is
        about the process that died.
        """
        loaded_s = time.monotonic() - self._loaded.get(model, -math.inf)
        if loaded_s < _GIVES_UP_S or loaded_s < min(call_s, _LATEST_WORD_S):
            return []
        pids = self._record.processes_of(model)
        stubs.kill(pids)
        return pids

    def find_lost(self) -> frozenset[str]:
        """The dead that no load brings back: an earlier one still hangs."""
        return frozenset(self._stuck) & self.find_dead()

    async def _outcome(self, models: Sequence[str], work: asyncio.Future[Any]) -> str:
        """Why a load of the last of ``models`` that should be over failed; empty when it did not."""
        if not work.done():
            # Nothing more can be done from outside, and another load of this model would queue behind.
            self._stuck.update(models)
            return "Triton does not let go of it"
        try:
            await work
        except grpc.aio.AioRpcError as error:
            return f"model {models[-1]!r} could not be loaded: {load_failure(error.details() or '')}"
        return ""

    async def unload(self, model: str) -> None:
        """Forget ``model``; calls in progress finish. Raises ModelLoadError with Triton's reason."""
        if model in self._stuck:
            return
        self._loading.add(model)  # its processes may end from here on
        call = self._control("Unload", model, timeout_s=_UNLOAD_TIMEOUT_S)
        try:
            await self._while_running(call, f"while unloading {model!r}")
        except grpc.aio.AioRpcError as error:
            # What stayed would hold its memory for nobody, and count nowhere.
            stubs.kill(self._record.processes_of(model))
            reason = load_failure(error.details() or "")
            raise ModelLoadError(f"model {model!r} could not be unloaded: {reason}") from None
        else:
            self._loaded.pop(model, None)
        finally:
            # Also when nobody knows whether Triton did it: should its processes end, that was asked for.
            self._record.forget(model)
            self._loading.discard(model)

    async def share_memory(self, name: str, size_bytes: int) -> None:
        """Map the shared memory ``name``, which requests may then use. Raises grpc.aio.AioRpcError."""
        asked = service_pb2.SystemSharedMemoryRegisterRequest(name=name, key=f"/{name}", byte_size=size_bytes)
        await self._restricted("SystemSharedMemoryRegister", asked)

    async def unshare_memory(self, name: str) -> bool:
        """Unmap it; False while a request uses it. Raises grpc.aio.AioRpcError."""
        try:
            asked = service_pb2.SystemSharedMemoryUnregisterRequest(name=name)
            await self._restricted("SystemSharedMemoryUnregister", asked)
        except grpc.aio.AioRpcError as error:
            if _IN_USE in (error.details() or ""):
                return False
            raise
        return True

    def _control(self, verb: str, model: str, *, timeout_s: float | None = None) -> Any:
        """The call RepositoryModelLoad or RepositoryModelUnload, started."""
        kind = f"RepositoryModel{verb}"
        return self._restricted(kind, getattr(service_pb2, f"{kind}Request")(model_name=model), timeout_s)

    def _restricted(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        """A call that Triton takes from us only, started."""
        call = self.channel.unary_unary(
            f"/inference.GRPCInferenceService/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=getattr(service_pb2, f"{method}Response").FromString,
        )
        metadata = self.key
        return call(request, timeout=timeout_s, metadata=metadata)

    def _stubs(self, model: str) -> set[int]:
        return set() if self.pid is None else stubs.stubs_of(self.pid, self._repository / model)

    async def _while_running(self, call: Any, when: str) -> None:
        """Await ``call``, but no longer than the process lives.

        The stubs inherit the server's sockets: while one of them hangs, a call to a dead server stays open.
        """
        if self._child is None:
            raise TritonUnavailable("tritonserver has not been started")
        answered = asyncio.ensure_future(_awaited(call))
        ended = asyncio.ensure_future(self._child.process.wait())
        try:
            await asyncio.wait((answered, ended), return_when=asyncio.FIRST_COMPLETED)
            stopped = answered.cancelled()  # by ``stop``, which closes the channel
            if stopped or (answered.done() and _is_broken(answered.exception())):
                # A server that ends breaks its connections just before.
                await asyncio.wait((ended,), timeout=_END_AFTER_ERROR_S)
            if stopped or ended.done():
                raise TritonUnavailable(await self._death(when))
            await answered
        finally:
            for task in (answered, ended):
                task.cancel()
            await asyncio.gather(answered, ended, return_exceptions=True)

    async def is_ready(self) -> bool:
        """Whether the server answers within a second.

        Not its own readiness: one model that could not be loaded, or was unloaded, turns that off for good on 2.51
        while all others are served.
        """
        if not self.is_running or self._channel is None:
            return False
        call = self._channel.unary_unary(
            "/inference.GRPCInferenceService/ServerLive",
            request_serializer=service_pb2.ServerLiveRequest.SerializeToString,
            response_deserializer=service_pb2.ServerLiveResponse.FromString,
        )
        try:
            answer = await call(service_pb2.ServerLiveRequest(), timeout=_HEALTH_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.live)

    async def wait(self) -> str:
        """Wait for the process's end, which nobody asked for; the reason as a sentence. Its models are gone then."""
        if self._child is None:
            raise TritonUnavailable("tritonserver has not been started")
        await self._child.process.wait()
        self._bury()
        return await self._death("while serving")

    async def stop(self, most_s: float | None = None) -> None:
        """SIGTERM, a wait of ``most_s`` at most, SIGKILL of the group; at once that while a load is in progress."""
        self.find_dead()  # one may have died since anybody looked
        grace_s = _STOP_HANGING_S if self._exit_hangs else _STOP_GRACE_S
        grace_s = grace_s if most_s is None else min(grace_s, most_s)
        await self._end(grace_s=0 if self._loading else grace_s)

    async def _end(self, grace_s: float) -> None:
        await self._end_process(grace_s)
        # After the process, so that a call in progress learns of its end and not of a closed channel.
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()

    async def _end_process(self, grace_s: float) -> None:
        readers = self._readers
        try:
            if self._child is not None:
                code = await self._child.stop(grace_s)
                _LOG.debug("tritonserver ended with code %s", code)
            # The last lines are there already, unless something that left the group holds the pipes for ever.
            if readers:
                await asyncio.wait(readers, timeout=_LAST_LINES_S)
        finally:  # whoever waits for this may be cancelled
            for reader in readers:
                reader.cancel()
            if self._child is not None:
                self._child.close()
        await asyncio.gather(*readers, return_exceptions=True)
        self._readers = []

    async def _until_live(self) -> None:
        call = self.channel.unary_unary(
            "/inference.GRPCInferenceService/ServerLive",
            request_serializer=service_pb2.ServerLiveRequest.SerializeToString,
            response_deserializer=service_pb2.ServerLiveResponse.FromString,
        )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if not self.is_running:
                raise TritonUnavailable(await self._death("while starting"))
            # A refused connection puts gRPC into a back-off of a second; a plain connect does not.
            if await is_open(self.addresses.grpc):
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await call(service_pb2.ServerLiveRequest(), timeout=_HEALTH_TIMEOUT_S)
                    return
            await asyncio.sleep(_START_POLL_S)
        raise TritonUnavailable(f"tritonserver did not answer within {_START_TIMEOUT_S:g} s of its start")

    async def _death(self, when: str) -> str:
        """Why the process ended, as far as its last lines tell."""
        if self._readers:
            await asyncio.wait(self._readers, timeout=_LAST_LINES_S)
        code = None if self._child is None else self._child.process.returncode
        how = "stopped answering" if code is None else f"ended with code {code}"
        last = f": {self._log.complaints[-1]}" if self._log.complaints else ""
        return f"tritonserver {how} {when}{last}"


def _is_broken(error: BaseException | None) -> bool:
    """Whether a call ended for the connection and not by an answer of the server."""
    lost = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)
    return isinstance(error, grpc.aio.AioRpcError) and error.code() in lost


async def _awaited(call: Any) -> Any:
    return await call


def _read_output(child: processes.Child, log: TritonLog) -> list[asyncio.Task[None]]:
    async def read(stream: asyncio.StreamReader, take: Callable[[str], None]) -> None:
        async for line in processes.lines(stream):
            take(line)

    pairs = ((child.stdout, log.printed), (child.stderr, log.logged))
    return [asyncio.create_task(read(stream, take)) for stream, take in pairs]
