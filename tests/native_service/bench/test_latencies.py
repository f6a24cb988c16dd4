"""Quantiles from buckets, against numpy's from the durations themselves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from native_service.bench.latencies import Latencies

DURATIONS = st.lists(st.floats(1e-6, 3000), min_size=1, max_size=200)
PRECISION = 0.004


@given(DURATIONS, st.floats(0.01, 1))
def test_a_quantile_is_that_of_the_durations_within_the_width_of_a_bucket(durations: list[float], part: float) -> None:
    exact = np.quantile(durations, part, method="inverted_cdf")
    assert Latencies(durations).quantile_s(part) == pytest.approx(exact, rel=PRECISION)


@given(DURATIONS, DURATIONS, st.floats(0, 1))
def test_merged_is_as_if_taken_together(one: list[float], other: list[float], part: float) -> None:
    merged, together = Latencies(one), Latencies(one + other)
    merged.merge(Latencies(other))
    assert merged.quantile_s(part) == together.quantile_s(part)
    assert (merged.count, merged.most_s, merged.least_s) == (together.count, together.most_s, together.least_s)
    assert merged.mean_s == pytest.approx(together.mean_s)


@given(DURATIONS)
def test_the_ends_are_exact(durations: list[float]) -> None:
    latencies = Latencies(durations)
    assert (latencies.least_s, latencies.most_s, latencies.quantile_s(1)) == (
        min(durations),
        max(durations),
        max(durations),
    )


def test_nothing_has_no_quantile() -> None:
    assert math.isnan(Latencies().quantile_s(0.5))
    assert math.isnan(Latencies().mean_s)


def test_what_is_shorter_or_longer_than_all_buckets_is_counted() -> None:
    latencies = Latencies([0.0, 1e6])
    assert latencies.count == 2
    assert (latencies.quantile_s(0.5), latencies.quantile_s(1)) == (pytest.approx(0, abs=2e-6), 1e6)
