"""What is said of a measurement."""

from __future__ import annotations

import json
from typing import Any

import pytest

from native_service.bench import page, report
from native_service.bench.latencies import Latencies
from native_service.bench.report import Circumstances
from native_service.bench.scan import Measurement, Point
from native_service.bench.server_times import ServerTimes
from native_service.bench.windows import Spent, Window

ABOUT = Circumstances("m", "a:1", "kserve", "fake 1", (), {}, {}, "now")


def measured(point: Point, calls: int = 2000, *, busy: float = 0.1, server: Any = None, **more: Any) -> Measurement:
    """Three seconds, in windows of one."""
    window = Window(Latencies([0.01] * calls), spent={0: Spent(busy / 2, busy / 2, 1, busy)}, **more)
    return Measurement(point, [window] * 3, True, server)


def times(calls: int, cache_hits: int = 0) -> ServerTimes:
    return ServerTimes(0.004, 0.001, 0.001, 0.001, 0.001, calls, 1, 1, cache_hits)


CLOSED, OPEN = Point(1, clients=8), Point(1, rate=2000)


@pytest.mark.parametrize(
    ("each", "words"),
    [
        (measured(CLOSED), None),
        (measured(CLOSED, busy=0.9), "the client is the limit, busy 90 %"),
        (measured(CLOSED, 10), "only 30 calls: p99 says little"),
        (measured(CLOSED, server=times(6000)), None),
        (measured(CLOSED, server=times(9000)), "other callers share the model"),
        (measured(CLOSED, server=times(6000, 7)), "7 answers came from Triton's response cache"),
        (measured(OPEN), None),
        (measured(OPEN, 1800), "does not keep up with 2000 calls/s"),
        (measured(OPEN, late=Latencies([0.02] * 2000)), "1 % of the calls went 20"),
        (measured(OPEN, late=Latencies([0.0005] * 2000)), None),
        (measured(OPEN, held=5), "15 calls waited to be sent"),
    ],
)
def test_a_reader_is_told_what_limits_the_numbers(each: Measurement, words: str | None) -> None:
    notes = list(report.notes(each))
    assert [words in note for note in notes] == ([] if words is None else [True])


@pytest.mark.parametrize("each", [measured(CLOSED, 0), measured(OPEN, 0), Measurement(CLOSED, [], False, None)])
def test_a_load_without_an_answer_is_reported_as_well(each: Measurement) -> None:
    (row,) = json.loads(report.as_json(ABOUT, [each], "why"))["measurements"]
    assert (row["calls"], row["latency_ms"]["p50"], row["triton_ms"]) == (0, None, None)
    assert report.line(each).split()[1:3] == ["1", "0.0"]
    assert "why" in page.as_html(ABOUT, [each], "why")
    assert len(report.as_csv(ABOUT, [each], "why").splitlines()) == 2


def test_parts_of_the_time_add_up_to_the_latency() -> None:
    each = measured(CLOSED, server=times(6000))
    shares = report.shares_s(each)
    assert shares is not None
    assert sum(shares.values()) == pytest.approx(each.whole.latencies.mean_s)


def test_lines_of_the_table_stand_under_their_heading() -> None:
    for each in (measured(CLOSED), measured(OPEN, server=times(6000))):
        heading = report.heading(closed=not each.point.rate)
        assert len(report.line(each)) == len(heading)
        assert report.line(each).index("|") == heading.index("|")
