"""Where Triton's own statistics say that the time of a call went."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class Counters:
    """ModelStatistics of one model, all versions together, since its load. Times are sums over the calls."""

    calls: int
    failed: int
    rows: int
    runs: int
    cache_hits: int
    whole_ns: int
    queue_ns: int
    input_ns: int
    infer_ns: int
    output_ns: int

    @classmethod
    def of(cls, answer: Any) -> Self:
        """From a ModelStatisticsResponse."""
        sums = dict.fromkeys((field.name for field in fields(cls)), 0)
        for model in answer.model_stats:
            stats = model.inference_stats
            for name, number in {
                "calls": stats.success.count,
                "failed": stats.fail.count,
                "rows": model.inference_count,
                "runs": model.execution_count,
                "cache_hits": stats.cache_hit.count,
                "whole_ns": stats.success.ns,
                "queue_ns": stats.queue.ns,
                "input_ns": stats.compute_input.ns,
                "infer_ns": stats.compute_infer.ns,
                "output_ns": stats.compute_output.ns,
            }.items():
                sums[name] += number
        return cls(**sums)

    def since(self, before: Self) -> Self:
        """What came after ``before``."""
        return type(self)(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """Means of a call in seconds, and of a run in calls and rows."""

    whole_s: float
    queue_s: float
    input_s: float
    """Handing the tensors to the model's process."""
    infer_s: float
    """In the model's process: nereid's runtime and the engine."""
    output_s: float
    """Taking the results from it."""
    calls: int
    calls_per_run: float
    rows_per_run: float
    cache_hits: int

    @classmethod
    def between(cls, before: Counters | None, after: Counters | None) -> Self | None:
        """None where there are no statistics, or no call that was answered, or the model was loaded again."""
        if before is None or after is None:
            return None
        passed = after.since(before)
        if passed.calls <= 0 or passed.whole_ns < 0:
            return None
        runs = max(1, passed.runs)
        sums_ns = passed.whole_ns, passed.queue_ns, passed.input_ns, passed.infer_ns, passed.output_ns
        whole_s, queue_s, input_s, infer_s, output_s = (ns / _NS_PER_S / passed.calls for ns in sums_ns)
        return cls(
            whole_s,
            queue_s,
            input_s,
            infer_s,
            output_s,
            passed.calls,
            passed.calls / runs,
            passed.rows / runs,
            passed.cache_hits,
        )
