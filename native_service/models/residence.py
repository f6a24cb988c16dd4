"""What is known of one model's stays in Triton, and what is told of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from native_service.envoy.admin import Traffic

IDLE, LOADING, READY, BUSY = "idle", "loading", "ready", "busy"
REASONS = BY_TIMEOUT, FOR_ROOM, OUT_OF_MEMORY = "idle", "capacity", "oom"
"""Why models were unloaded that nobody asked to be."""
NO_CALLS = Traffic()


@dataclass(frozen=True, slots=True)
class Residence:
    """How a model is. Times are in seconds, ``last_used_s`` (None: never) and ``loaded_s`` (None: it is not) since the
    epoch; ``memory_bytes`` is what its processes held some seconds ago. Cold starts are loads that somebody waited for.
    """

    state: str
    pinned: bool
    last_used_s: float | None
    loaded_s: float | None
    memory_bytes: int
    idle_timeout_s: float | None
    cold_starts: int
    cold_start_last_s: float
    cold_start_total_s: float
    hidden: bool


@dataclass(frozen=True, slots=True)
class Residences:
    """How all models are, and since the start: models unloaded that nobody asked to be by reason, loads tried again
    once memory had been made free, models that had to go and were loaded again within half a minute."""

    models: Mapping[str, Residence] = field(default_factory=dict)
    deallocations: Mapping[str, int] = field(default_factory=dict)
    load_retries: int = 0
    thrashing: int = 0


@dataclass(slots=True)
class Stay:
    """What is known of one model; times are monotonic. ``closed``: so many changes have its calls wait though it
    is in Triton. ``holds``: for so many its room is kept. ``pinning``: so many pins are not done yet."""

    running: int = 0
    waiting: int = 0
    closed: int = 0
    pinned: bool | None = None
    pinning: int = 0
    traffic: Traffic = NO_CALLS
    loading: asyncio.Task[None] | None = None
    holds: int = 0
    used: float | None = None
    since: float = field(default_factory=time.monotonic)
    gone: float | None = None
    memory_bytes: int = 0
    cold_starts: int = 0
    cold_last_s: float = 0.0
    cold_total_s: float = 0.0

    @property
    def is_busy(self) -> bool:
        return self.running > 0 or self.traffic.active > 0

    @property
    def last(self) -> float:
        """When it was used or came."""
        return max(self.since, self.used or 0.0)
