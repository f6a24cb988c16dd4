"""Triton's statistics as means of a stretch of time."""

from __future__ import annotations

from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from native_service.bench.server_times import Counters, ServerTimes


def statistics(calls: int, *, rows: int = 0, runs: int = 0, ms: float = 1, versions: int = 1) -> Any:
    """Every part took ``ms`` a call, the whole four times that."""
    answer = service_pb2.ModelStatisticsResponse()
    for version in range(versions):
        model = answer.model_stats.add(
            name="m", version=str(version), inference_count=rows or calls, execution_count=runs or calls
        )
        ns = round(ms * 1e6) * calls
        model.inference_stats.success.CopyFrom(service_pb2.StatisticDuration(count=calls, ns=4 * ns))
        for part in ("queue", "compute_input", "compute_infer", "compute_output"):
            getattr(model.inference_stats, part).CopyFrom(service_pb2.StatisticDuration(count=calls, ns=ns))
    return answer


def test_means_are_of_the_calls_between_two_looks() -> None:
    before, after = statistics(10, ms=100), statistics(20, rows=60, runs=12, ms=55)
    times = ServerTimes.between(Counters.of(before), Counters.of(after))
    assert times is not None
    assert (times.calls, times.calls_per_run, times.rows_per_run) == (10, 5, 25)
    assert times.queue_s == times.input_s == times.infer_s == times.output_s == pytest.approx(0.01)
    assert times.whole_s == pytest.approx(0.04)


def test_versions_of_a_model_count_together() -> None:
    two = Counters.of(statistics(10, versions=2))
    assert (two.calls, two.rows, two.runs) == (20, 20, 20)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, Counters.of(statistics(1))),
        (Counters.of(statistics(1)), None),
        (Counters.of(statistics(1)), Counters.of(statistics(1))),
        (Counters.of(statistics(9)), Counters.of(statistics(1))),
        (Counters.of(statistics(1, ms=9)), Counters.of(statistics(2))),
    ],
    ids=["none before", "none after", "no call", "loaded again", "loaded again and called more"],
)
def test_without_two_looks_at_the_same_model_there_are_no_means(before: Any, after: Any) -> None:
    assert ServerTimes.between(before, after) is None
