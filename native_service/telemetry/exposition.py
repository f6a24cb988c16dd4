"""The text of ``/metrics``: Triton's series, completed, and ours after them.

Every series of a served model is there from its start, at zero, and ends with the model. Labels hold names of served
models only, never anything a caller chose.
"""

from __future__ import annotations

import platform
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from native_service.envoy.settings import Admitted
from native_service.models.residence import BUSY, READY, REASONS, Residences
from native_service.nereid.script_calls import Counts, with_script_counts
from native_service.telemetry.calls import SECONDS, Calls
from native_service.telemetry.failures import UNARY
from native_service.telemetry.metrics import Failed, with_failures

# Envoy counts times by two digits: from 100 ms on a step is 10 ms wide, and so on.
_STEP_DIGITS = 2


@dataclass(frozen=True, slots=True)
class Counted:
    """What the front counts, at one moment: see ``Front.counted``."""

    failed: Failed
    answered_ms: Mapping[tuple[str, int], int]
    """Calls that Envoy handed to Triton and that were answered, by model and whole milliseconds (cut off)."""
    permits_in_use: Mapping[str, int]
    connections: int
    connections_ever: int
    scripts: Mapping[str, Counts]
    calls: Calls
    buffered_bytes: int
    buffered_bytes_limit: int


@dataclass(frozen=True, slots=True)
class Loads:
    """Of each served model the last conversion and the last load, in seconds, and the restarts of its process."""

    conversion_s: Mapping[str, float]
    load_s: Mapping[str, float]
    restarts: Mapping[str, int]
    server_restarts: Mapping[str, int] = field(default_factory=dict)
    """Of tritonserver and Envoy, by program."""
    residences: Residences = field(default_factory=Residences)


def exposition(triton: str, models: Mapping[str, Admitted], counted: Counted, loads: Loads) -> str:
    """The whole text in Prometheus' format 0.0.4; ``triton`` is that of Triton, ``models`` those clients may call."""
    text = with_failures(with_script_counts(triton, counted.scripts), counted.failed)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Own(models, counted, loads))
    return text + generate_latest(registry).decode()


class _Own(Collector):
    """Our series."""

    def __init__(self, models: Mapping[str, Admitted], counted: Counted, loads: Loads) -> None:
        self._models, self._counted, self._loads = models, counted, loads

    def collect(self) -> Iterator[Metric]:
        models, counted, loads = self._models, self._counted, self._loads
        yield from self._histograms()
        in_use = {name: counted.permits_in_use.get(name, 0) for name in models}
        yield _gauge("nereid_permits_in_use", "Calls running and waiting", in_use)
        capacity = {name: model.capacity for name, model in models.items()}
        yield _gauge("nereid_permits_limit", "Calls that may run and wait (queue_capacity)", capacity)
        up = {name: 0 if model.away else 1 for name, model in models.items()}
        yield _gauge("nereid_model_up", "Whether the model takes calls (0: its process is being started again)", up)
        restarts = CounterMetricFamily(
            "nereid_model_restarts", "Restarts of a model whose process died", labels=("model",)
        )
        for name, count in loads.restarts.items():
            restarts.add_metric((name,), count)
        yield restarts
        programs = CounterMetricFamily(
            "nereid_program_restarts", "Restarts of tritonserver and Envoy after their death", labels=("program",)
        )
        for program, count in loads.server_restarts.items():
            programs.add_metric((program,), count)
        yield programs
        for what, seconds in (("conversion", loads.conversion_s), ("load", loads.load_s)):
            known = {name: seconds[name] for name in models if name in seconds}
            yield _gauge(f"nereid_model_{what}_duration_seconds", f"Duration of the last {what} of the model", known)
        yield from self._stays()
        yield GaugeMetricFamily("nereid_connections", "Open connections to the public address", counted.connections)
        yield CounterMetricFamily(
            "nereid_connections_accepted", "Connections to the public address since the start", counted.connections_ever
        )
        yield GaugeMetricFamily(
            "nereid_checkpoint_buffered_bytes",
            "Tensor bytes held for calls of Checkpoint and over HTTP",
            counted.buffered_bytes,
        )
        yield GaugeMetricFamily(
            "nereid_checkpoint_buffered_bytes_limit",
            "Tensor bytes that may be held (server.limits.max_buffered_bytes)",
            counted.buffered_bytes_limit,
        )
        build = GaugeMetricFamily("nereid_build_info", "Versions of this server", labels=("version", "python"))
        build.add_metric((own_version(), platform.python_version()), 1)
        yield build

    def _stays(self) -> Iterator[Metric]:
        """What comes and goes; a model that nobody has told of is always there."""
        residences = self._loads.residences
        known = {name: residences.models[name] for name in self._models if name in residences.models}
        loaded = {name: float(its.state in (READY, BUSY)) for name, its in known.items()}
        yield _gauge("nereid_model_loaded", "Whether the model is in Triton (0: its next call loads it)", loaded)
        held = {name: its.memory_bytes for name, its in known.items()}
        yield _gauge("nereid_model_memory_bytes", "Memory of the processes of the model, shared pages in parts", held)
        starts = CounterMetricFamily("nereid_model_cold_starts", "Loads that calls waited for", labels=("model",))
        waited = CounterMetricFamily("nereid_model_cold_start_seconds", "Time of those loads", labels=("model",))
        for name, its in known.items():
            starts.add_metric((name,), its.cold_starts)
            waited.add_metric((name,), its.cold_start_total_s)
        yield from (starts, waited)
        last = {name: its.cold_start_last_s for name, its in known.items()}
        yield _gauge("nereid_model_cold_start_last_seconds", "Duration of the last load that calls waited for", last)
        gone = CounterMetricFamily(
            "nereid_model_deallocations", "Models unloaded that nobody asked to be", labels=("reason",)
        )
        for reason in REASONS:
            gone.add_metric((reason,), residences.deallocations.get(reason, 0))
        yield gone
        yield CounterMetricFamily(
            "nereid_model_load_retries", "Loads tried again once memory was free", residences.load_retries
        )
        yield CounterMetricFamily(
            "nereid_model_thrashing", "Models loaded again within 30 s of having to go", residences.thrashing
        )

    def _histograms(self) -> Iterator[Metric]:
        for histogram in self._counted.calls.histograms:
            for family in histogram.collect():
                # When each series was made is of no use to anybody, and in this format it would be one more family.
                family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
                if family.name == "nereid_request_duration_seconds":
                    steps: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
                    for (model, begin_ms), count in self._counted.answered_ms.items():
                        steps[model].append((begin_ms, count))
                    for model in self._models:
                        family.samples += _envoy_times(family.name, model, steps[model])
                yield family


def _gauge(name: str, text: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=("model",))
    for model, value in values.items():
        family.add_metric((model,), value)
    return family


def _envoy_times(name: str, model: str, steps: Iterable[tuple[int, int]]) -> Iterable[Sample]:
    """The samples of one histogram, of how many calls took how many ms: ``n`` is less than ``n + 1``, or than the end
    of Envoy's step."""
    labels = {"model": model, "surface": UNARY}
    buckets = [0] * (len(SECONDS) + 1)
    total_s = 0.0
    for begin_ms, count in steps:
        width_ms = 10 ** max(0, len(str(begin_ms)) - _STEP_DIGITS)
        buckets[bisect_right(SECONDS, begin_ms / 1000)] += count
        total_s += count * (begin_ms + width_ms / 2) / 1000
    below = 0
    for limit, count in zip((*SECONDS, float("inf")), buckets, strict=True):
        below += count
        yield Sample(f"{name}_bucket", {**labels, "le": "+Inf" if limit == float("inf") else str(limit)}, below)
    yield Sample(f"{name}_count", labels, below)
    yield Sample(f"{name}_sum", labels, total_s)


def own_version() -> str:
    """The version of this distribution."""
    try:
        return version("nereid-triton")
    except PackageNotFoundError:
        return "unknown"
