"""When calls of an open loop are due."""

from __future__ import annotations

from heapq import merge
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from native_service.bench import arrivals

RATES = st.floats(0.1, 1e5)
SHARES = st.integers(1, 8)


def all_of(kind: str, rate: float, shares: int, count: int) -> list[float]:
    return list(islice(merge(*(arrivals.due_s(kind, rate, share, shares) for share in range(shares))), count))


@given(RATES, SHARES)
def test_constant_arrivals_of_all_processes_are_evenly_spaced(rate: float, shares: int) -> None:
    times = all_of(arrivals.CONSTANT, rate, shares, 50)
    assert times == pytest.approx([number / rate for number in range(50)])


@given(RATES, SHARES)
def test_poisson_arrivals_have_the_rate_and_the_scatter_of_independent_callers(rate: float, shares: int) -> None:
    gaps = np.diff(all_of(arrivals.POISSON, rate, shares, 4000)) * rate
    # Exponential: mean and deviation are 1; the bounds are eight standard errors away.
    assert 0.87 < gaps.mean() < 1.13
    assert 0.8 < gaps.std() < 1.25


@given(st.sampled_from(arrivals.KINDS), RATES, SHARES)
def test_times_do_not_go_back(kind: str, rate: float, shares: int) -> None:
    times = list(islice(arrivals.due_s(kind, rate, 0, shares), 100))
    assert times == sorted(times)


def test_processes_do_not_send_at_the_same_moments_and_a_run_can_be_repeated() -> None:
    one, other, again = (list(islice(arrivals.due_s(arrivals.POISSON, 10, share, 2), 20)) for share in (0, 1, 0))
    assert not set(one) & set(other)
    assert one == again
