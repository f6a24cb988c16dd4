"""The metrics that SnoozeML's clients read, under the names they know.

Their parser does not add up: there is exactly one sample of each name and label.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from native_service.snooze.inference import Counts
from native_service.telemetry.metrics import Tally

_RUNS = re.compile(r'^nv_inference_exec_count\{model="([^"]*)"[^}]*\} (\S+)$', re.MULTILINE)
_REASONS = ("oom", "idle", "capacity")


class Lifecycle(Protocol):
    """What happened to models that nobody asked for."""

    load_retries: int
    thrashing: int

    @property
    def deallocations(self) -> Mapping[str, int]:
        """By reason."""
        ...


class SnoozeMetrics:
    """``text`` at each look."""

    def __init__(self, counts: Callable[[], Counts], lifecycle: Lifecycle) -> None:
        self._counts, self._lifecycle = counts, lifecycle
        self._runs: Tally[str] = Tally()

    def text(self, triton: str) -> str:
        """In Prometheus' format 0.0.4, now that Triton's own text is ``triton``, kept over its restarts."""
        # A model that was removed meanwhile is not in it any more, which reads as a counter that fell.
        runs = self._runs.total(None, {model: int(float(n)) for model, n in _RUNS.findall(triton)})
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Own(self._counts(), self._lifecycle, sum(runs.values())))
        return generate_latest(registry).decode()


class _Own(Collector):
    def __init__(self, counts: Counts, lifecycle: Lifecycle, runs: int) -> None:
        self._counts, self._lifecycle, self._runs = counts, lifecycle, runs

    def collect(self) -> Iterator[Metric]:
        counts, lifecycle = self._counts, self._lifecycle
        good, bad = counts.succeeded, counts.failed
        by_status = {"all": good + bad, "success": good, "error": bad}
        yield _counter("requests", "Calls of SnoozeML's clients", "status", by_status)
        yield _counter("inference_latency_seconds", "Time of those that went well", value=counts.seconds)
        # Calls of other protocols share the runs, or have runs of their own that are not looked for here.
        runs = min(self._runs, good)
        yield _counter("batches_dispatched", "Runs of models, one for each of these calls at most", value=runs)
        gone = {reason: lifecycle.deallocations[reason] for reason in _REASONS}
        yield _counter("model_deallocations", "Models unloaded that nobody asked to be", "reason", gone)
        yield _counter("model_load_retries", "Loads tried again after room was made", value=lifecycle.load_retries)
        thrashing = lifecycle.thrashing
        yield _counter("deallocation_thrashing", "Models unloaded and soon loaded again", value=thrashing)
        for what in ("messages_consumed", "messages_published", "errors"):
            yield _counter(f"stream_{what}", "Always zero: message brokers are not read here", value=0)


def _counter(
    name: str, text: str, label: str | None = None, values: Mapping[str, float] | None = None, *, value: float = 0
) -> Metric:
    family = CounterMetricFamily(f"snoozeml_{name}", text, labels=() if label is None else (label,))
    if values is None:
        family.add_metric((), value)
    for each, count in (values or {}).items():
        family.add_metric((each,), count)
    return family
