"""Windows of several processes and of one after another, and when they agree."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from native_service.bench.latencies import Latencies
from native_service.bench.scan import Plan
from native_service.bench.windows import Failure, Spent, Window, agree, in_a_row, of_processes, spread

FULL = Failure("RESOURCE_EXHAUSTED", "full")


def window(rate: int, latency_s: float = 0.01, *, process: int = 0, busy: float = 0.5, **more: int) -> Window:
    """One second of ``rate`` answers."""
    spent = Spent(busy / 2, busy / 2, 1.0, busy)
    return Window(Latencies([latency_s] * rate), spent={process: spent}, **more)


def test_windows_of_processes_over_the_same_time_add_their_rates() -> None:
    both = of_processes([window(100, waiting=2), window(50, process=1, busy=0.9, waiting=3)])
    assert (both.per_second, both.waiting, both.passed_s) == (150, 5, 1)
    assert both.busiest == pytest.approx(0.9)


def test_windows_in_a_row_keep_the_rate_and_what_waits_at_the_end() -> None:
    row = in_a_row([window(100, waiting=9), window(200, waiting=4)])
    assert (row.per_second, row.waiting, row.passed_s) == (150, 4, 2)
    assert row.busiest == pytest.approx(0.5)


def test_failures_of_a_class_are_counted_together_and_an_example_stays() -> None:
    one, other = window(1), window(1)
    one.failures, other.failures = Counter({FULL: 2}), Counter({FULL: 3})
    one.examples, other.examples = {FULL: "full 1"}, {FULL: "full 2"}
    row = in_a_row([one, other])
    assert (row.failed, row.failures[FULL], row.examples[FULL]) == (5, 5, "full 1")


@given(st.lists(st.integers(95, 105), min_size=3, max_size=3))
def test_equal_rates_and_latencies_agree(rates: list[int]) -> None:
    assert agree([window(rate) for rate in rates], 0.1)


@pytest.mark.parametrize(
    "windows",
    [
        [window(100), window(100)],
        [window(100), window(100), window(130)],
        [window(100), window(100), window(100, latency_s=0.02)],
        [window(100), window(100), window(0)],
        [window(0), window(0), window(0)],
    ],
)
def test_too_few_or_different_or_empty_windows_do_not_agree(windows: list[Window]) -> None:
    assert not agree(windows, 0.1)


def test_only_the_last_windows_have_to_agree() -> None:
    assert agree([window(10), window(50), *[window(100)] * 3], 0.1)


@given(st.lists(st.floats(0.1, 100), min_size=1), st.floats(0.1, 10))
def test_a_spread_has_no_unit_and_bounds_every_value(values: list[float], factor: float) -> None:
    mean = sum(values) / len(values)
    found = spread(values)
    assert all(abs(value - mean) <= found * mean * (1 + 1e-9) for value in values)
    assert spread([value * factor for value in values]) == pytest.approx(found)


def test_a_load_is_measured_until_windows_agree_or_there_are_enough() -> None:
    plan = Plan(1, 1, 0.1, windows_at_most=4)
    steady, wild = window(100), [window(100), window(200), window(100), window(200)]
    assert not plan.is_enough([steady] * 2)
    assert plan.is_enough([steady] * 3)
    assert not plan.is_enough(wild[:3])
    assert plan.is_enough(wild)


def test_a_duration_is_kept_whether_windows_agree_or_not() -> None:
    plan = Plan(1, 2.0, 0.1, windows_at_most=3, duration_s=9)
    assert [plan.is_enough([window(100)] * count) for count in (4, 5)] == [False, True]
