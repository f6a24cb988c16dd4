"""Many durations in little memory: counts in buckets that are 0.5 % wide, so quantiles are within 0.3 %."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

_PER_OCTAVE = 128
_SHORTEST_S = 1e-6
# From a microsecond to more than an hour.
_BUCKETS = 32 * _PER_OCTAVE


class Latencies:
    """Durations in seconds. Only count, sum, least and most are exact."""

    def __init__(self, durations_s: Iterable[float] = ()) -> None:
        self._counts: np.ndarray[Any, np.dtype[np.int64]] = np.zeros(_BUCKETS, np.int64)
        self.count = 0
        self.total_s, self.least_s, self.most_s = 0.0, math.inf, 0.0
        self.add(np.fromiter(durations_s, float))

    def add(self, durations_s: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        """Copies what it needs."""
        if not durations_s.size:
            return
        octaves = np.log2(np.maximum(durations_s, _SHORTEST_S) / _SHORTEST_S)
        buckets = np.minimum((octaves * _PER_OCTAVE).astype(np.int64), _BUCKETS - 1)
        self._counts += np.bincount(buckets, minlength=_BUCKETS)
        self.count += durations_s.size
        self.total_s += float(durations_s.sum())
        self.least_s = min(self.least_s, float(durations_s.min()))
        self.most_s = max(self.most_s, float(durations_s.max()))

    def merge(self, other: Latencies) -> None:
        """Take in all that ``other`` has."""
        self._counts += other._counts
        self.count += other.count
        self.total_s += other.total_s
        self.least_s, self.most_s = min(self.least_s, other.least_s), max(self.most_s, other.most_s)

    @property
    def mean_s(self) -> float:
        return self.total_s / self.count if self.count else math.nan

    def quantile_s(self, fraction: float) -> float:
        """The least duration that ``fraction`` of all do not exceed; NaN without any."""
        if not self.count:
            return math.nan
        rank = max(1, math.ceil(fraction * self.count))
        if rank >= self.count:
            return self.most_s
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        middle_s = _SHORTEST_S * 2 ** ((bucket + 0.5) / _PER_OCTAVE)
        return min(max(middle_s, self.least_s), self.most_s)
