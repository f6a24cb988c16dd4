"""What a running server tells about itself and its models, as JSON."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from native_service.front import Front
from native_service.kserve.descriptions import VERSION
from native_service.models.catalogue import Catalogue
from native_service.models.control import ModelControl
from native_service.models.records import ModelRecord
from native_service.models.residence import IDLE, LOADING, READY, Residence
from native_service.models.residency import Residency
from native_service.telemetry.recent_failures import RecentFailures
from native_service.triton import stubs
from native_service.triton.process import TritonServer
from nereid_backend.errors import EnvoyUnavailable

Json = dict[str, Any]

STARTING, NOT_READY = "starting", "not ready"
AWAY, FAILED = "away", "failed"

_PROC = Path("/proc")
_PACKAGES = ("numpy", "jax", "torch", "onnxruntime")


class Status:
    """Answers at any time from the start on. ``opened`` once there is an address."""

    def __init__(self, sources: Json, triton: TritonServer, triton_version: str, failures: RecentFailures) -> None:
        """``sources`` says what is served from: the keys settings, folder and state_file, each a path or None."""
        self._sources, self._triton, self._triton_version = sources, triton, triton_version
        self._failures = failures
        self._began_s = time.time()
        self._began = time.monotonic()
        self._models: tuple[Catalogue, Residency, ModelControl] | None = None
        self._opened: tuple[Front, Json] | None = None

    def preparing(self, catalogue: Catalogue, residency: Residency, control: ModelControl) -> None:
        """From now on there are models to tell about."""
        self._models = catalogue, residency, control

    def opened(self, front: Front, addresses: Json) -> None:
        """From now on calls are served; ``addresses`` are those of the state file."""
        self._opened = front, addresses

    async def server(self) -> Json:
        """Everything but the models one by one."""
        models = await self.models()
        envoy = None if self._opened is None else self._opened[0].envoy_pid
        processes = {"supervisor": os.getpid(), "tritonserver": self._triton.pid, "envoy": envoy}
        return {
            "pid": os.getpid(),
            "state": await self._state(),
            **self._sources,
            "addresses": {} if self._opened is None else self._opened[1],
            "started_at": _iso(self._began_s),
            "uptime_s": round(time.monotonic() - self._began, 1),
            "versions": await self._versions(),
            "processes": {
                name: {"pid": pid, "memory_bytes": resident_bytes([pid])}
                for name, pid in processes.items()
                if pid is not None
            },
            "memory_bytes": resident_bytes(processes.values()) + sum(model["memory_bytes"] for model in models),
            "restarts": {
                "tritonserver": self._triton.restarts,
                "envoy": 0 if self._opened is None else self._opened[0].envoy_restarts,
                "models": sum(model["restarts"] for model in models),
            },
            "permits": {
                "in_use": sum(model["in_use"] or 0 for model in models),
                "total": sum(model["queue_capacity"] or 0 for model in models),
            },
            "models": {
                state: count for state in (READY, IDLE, LOADING, AWAY, FAILED) if (count := _count(models, state))
            },
            "failures": [{"at": _iso(at_s), "text": text} for at_s, text in self._failures.lines],
        }

    async def models(self) -> list[Json]:
        """One record per model that is served or should be; hidden are those that only meta models call."""
        if self._models is None:
            return []
        catalogue, residency, control = self._models
        in_use, restarts, residences = await self._permits_in_use(), control.restarts, residency.states()
        rows = []
        for name, record in control.records.items():
            served = catalogue.served.get(name)
            public = catalogue.models.get(name)
            residence = residences.get(name)
            is_away = public is not None and public.away
            state, reason = _state_of(record, residence, is_away=is_away)
            spec = None if served is None else served.spec
            pids = catalogue.processes_of(name)
            rows.append(
                {
                    "name": name,
                    "state": state,
                    "reason": reason,
                    "engine": None if spec is None else spec.engine,
                    "platform": None if spec is None else spec.platform,
                    "device": None if spec is None else spec.device,
                    "hidden": served is not None and served.source.hidden,
                    "queue_capacity": None if public is None else public.capacity,
                    "in_use": None if public is None else in_use.get(name),
                    "max_batch_size": None if spec is None else spec.max_batch_size,
                    "batch_sizes": [] if spec is None else list(spec.batch_sizes),
                    "restarts": restarts.get(name, 0),
                    "processes": pids,
                    "memory_bytes": resident_bytes(stubs.with_descendants(pids)),
                    "version": None if spec is None else VERSION,
                    "pinned": residence is not None and residence.pinned,
                    "idle_timeout_s": None if residence is None else residence.idle_timeout_s,
                    "cold_starts": 0 if residence is None else residence.cold_starts,
                    "cold_start_last_s": 0.0 if residence is None else round(residence.cold_start_last_s, 3),
                    "cold_start_total_s": 0.0 if residence is None else round(residence.cold_start_total_s, 3),
                    "loaded_at": _loaded_at(record, residence),
                }
            )
        return rows

    async def _state(self) -> str:
        if self._opened is None:
            return STARTING
        return READY if await self._opened[0].is_ready() else NOT_READY

    async def _permits_in_use(self) -> dict[str, int]:
        if self._opened is None:
            return {}
        try:
            return await self._opened[0].admin.permits_in_use()
        except EnvoyUnavailable:
            return {}

    async def _versions(self) -> Json:
        found = {"nereid": _version("nereid-triton"), "python": platform.python_version()}
        found |= {"tritonserver": self._triton_version}
        if self._opened is not None:
            try:
                found["envoy"] = await self._opened[0].admin.version()
            except EnvoyUnavailable:
                found["envoy"] = None
        return found | {name: its for name in _PACKAGES if (its := _version(name)) is not None}


def resident_bytes(pids: Iterable[int | None]) -> int:
    """The memory of those processes that are there; pages they share count for each."""
    return sum(_resident_bytes(pid) for pid in pids if pid is not None)


def _resident_bytes(pid: int) -> int:
    try:
        return int((_PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):  # gone meanwhile
        return 0


def _state_of(record: ModelRecord, residence: Residence | None, *, is_away: bool) -> tuple[str, str | None]:
    """The state of a model and what is to be said of it. One that is served stays ready while a new version comes.

    ``residence`` is None when it is not served.
    """
    is_served = residence is not None
    step = None if record.step is None else f"{record.step} a new version" if is_served else record.step
    if is_away:
        return AWAY, "a process of it or of a model it calls has died; it is being started again"
    if residence is not None and residence.state in (IDLE, LOADING):
        return residence.state, step
    if is_served:
        return READY, step or (record.failure and f"the version before goes on: {record.failure}")
    if record.step is None and record.failure is not None:
        return FAILED, record.failure
    return LOADING, step or "waiting for its turn"


def _loaded_at(record: ModelRecord, residence: Residence | None) -> str | None:
    """When it was loaded last, by a call or because its process had died; None when it is not."""
    if residence is None or residence.loaded_s is None:
        return None
    return _iso(max(residence.loaded_s, record.loaded_s or 0.0))


def _count(models: Iterable[Json], state: str) -> int:
    return sum(model["state"] == state for model in models)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _iso(time_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s))
