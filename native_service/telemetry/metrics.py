"""Triton's metrics with the calls in them that failed where Triton does not count.

Triton 2.51 counts no input that it refuses before a model's queue, and takes an error that the model's runtime answers
for a success; what Envoy and our service refuse it never sees. Envoy knows how every call ended. A call counts for the
model it named, and nowhere when there is none of that name: names from requests never become labels.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

from nereid_backend.errors import (
    DeadlineExceeded,
    EnvoyUnavailable,
    ModelLoadError,
    ModelUnavailable,
    ResourceExhausted,
    TritonUnavailable,
)

REASONS = REJECTED, CANCELED, BACKEND, OTHER = "REJECTED", "CANCELED", "BACKEND", "OTHER"

_FAILURES = "nv_inference_request_failure"
# nv_inference_request_failure{model="x",reason="REJECTED",version="1"} 0
_LINE = re.compile(rf'^({_FAILURES}{{(?=[^}}]*?model="([^"]*)")(?=[^}}]*?reason="([^"]*)")[^}}]*}}) (\S+)$')
# gRPC's status numbers. An aborted call is Triton's to count, which alone knows whether it ran.
_ABORTED, _EXHAUSTED, _BROKEN = (None, 1, 4), 8, (2, 13, 14)

K = TypeVar("K", bound=Hashable)


class Failed(NamedTuple):
    """Calls that did not end well: as Envoy saw them, by model and gRPC status (None when the client went before there
    was one), and those that ended in our service before Envoy was asked for a permit, by model and reason."""

    by_status: Mapping[tuple[str, int | None], int]
    by_reason: Mapping[tuple[str, str], int]

    def beside(self, model: str, reason: str, counted: float) -> float:
        """What the series should say where Triton says ``counted``. Never falls while its arguments do not."""
        ours = self.by_reason.get((model, reason), 0)
        statuses = {status: n for (name, status), n in self.by_status.items() if name == model}
        if reason == REJECTED:
            return counted + ours + statuses.get(_EXHAUSTED, 0)
        if reason == BACKEND:
            return max(counted, sum(statuses.get(status, 0) for status in _BROKEN)) + ours
        if reason == OTHER:
            told = {_EXHAUSTED, *_ABORTED, *_BROKEN}
            return counted + ours + sum(n for status, n in statuses.items() if status not in told)
        return counted + ours


def with_failures(text: str, failed: Failed) -> str:
    """``text`` in Prometheus' format, its failures completed by ``failed``.

    A model's name needs no escaping (settings). Triton shows all four reasons, at zero, from a model's load on.
    """
    lines = []
    for line in text.split("\n"):
        if match := _LINE.match(line):
            line = f"{match[1]} {failed.beside(match[2], match[3], float(match[4])):.15g}"
        lines.append(line)
    return "\n".join(lines)


class Refusals:
    """Calls for a served model that our service ended before Envoy was asked for a permit, by model and reason."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def add(self, model: str, error: BaseException) -> None:
        """Count the call that ``error`` ended."""
        if isinstance(error, (asyncio.CancelledError, DeadlineExceeded)):
            reason = CANCELED  # the client is gone or about to go
        elif isinstance(error, (ModelUnavailable, ModelLoadError, TritonUnavailable, EnvoyUnavailable)):
            reason = BACKEND
        else:
            reason = REJECTED if isinstance(error, ResourceExhausted) else OTHER
        self.counts[model, reason] += 1


class Tally(Generic[K]):
    """Counters of a process that is started again now and then, added up over its lives.

    What it counted between the last look and its death is lost; the sums never fall.
    """

    def __init__(self) -> None:
        self._past: Counter[K] = Counter()
        self._last: dict[K, int] = {}
        self._life: Hashable = None

    def total(self, life: Hashable, counts: Mapping[K, int]) -> Mapping[K, int]:
        """The sums, now that the process called ``life`` says ``counts``."""
        if life != self._life:
            self._past.update(self._last)
            self._life, self._last = life, {}
        # A counter that fell belongs to a cluster that was replaced meanwhile.
        fell = {key: n for key, n in self._last.items() if counts.get(key, 0) < n}
        self._past.update(fell)
        self._last = dict(counts)
        return self._past + Counter(counts)

    def forget(self, keys: Iterable[K]) -> None:
        """Should they be counted again, they begin at zero."""
        for key in keys:
            self._past.pop(key, None)
            self._last.pop(key, None)
