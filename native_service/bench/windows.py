"""What one stretch of time showed, in one process or in all, and when a row of them says enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from native_service.bench.latencies import Latencies

# How many windows in a row have to agree.
AGREEING = 3
MOST_ERROR_CLASSES = 20


class Failure(NamedTuple):
    """A class of failed calls: gRPC's code, and the text with its numbers taken out."""

    code: str
    text: str


class Spent(NamedTuple):
    """What the thread that makes the calls of a process did: seconds of running, and of waiting for a processor."""

    ran_s: float
    waited_s: float
    passed_s: float
    process_s: float
    """Of the processors, all threads together."""

    @property
    def busy(self) -> float:
        """1 for a thread that never had nothing to do."""
        return (self.ran_s + self.waited_s) / self.passed_s if self.passed_s else 0.0


@dataclass(slots=True)
class Window:
    """Calls that ended in a stretch of time."""

    latencies: Latencies = field(default_factory=Latencies)
    late: Latencies = field(default_factory=Latencies)
    """How long after they were due the calls of an open loop went, but for those that were held."""
    held: int = 0
    """Calls of an open loop that had to wait because too many were open."""
    waiting: int = 0
    """Calls of an open loop that were due, and not sent at its end."""
    failures: Counter[Failure] = field(default_factory=Counter)
    examples: dict[Failure, str] = field(default_factory=dict)
    """The text of one call of each class, as it was."""
    spent: dict[int, Spent] = field(default_factory=dict)
    """By process."""

    @property
    def passed_s(self) -> float:
        return max((spent.passed_s for spent in self.spent.values()), default=0.0)

    @property
    def per_second(self) -> float:
        """Calls that were answered."""
        return self.latencies.count / self.passed_s if self.passed_s else 0.0

    @property
    def failed(self) -> int:
        return self.failures.total()

    @property
    def busiest(self) -> float:
        """How busy the busiest process was, see :attr:`Spent.busy`."""
        return max((spent.busy for spent in self.spent.values()), default=0.0)


def of_processes(windows: Iterable[Window]) -> Window:
    """The windows of several processes over the same time as one."""
    parts = list(windows)
    whole = _joined(parts)
    whole.waiting = sum(part.waiting for part in parts)
    return whole


def in_a_row(windows: Sequence[Window]) -> Window:
    """Windows of one after another as one; what waited at the end of the last is what waits."""
    whole = _joined(windows)
    whole.waiting = windows[-1].waiting if windows else 0
    return whole


def _joined(windows: Iterable[Window]) -> Window:
    whole = Window()
    for window in windows:
        whole.latencies.merge(window.latencies)
        whole.late.merge(window.late)
        whole.failures.update(window.failures)
        whole.examples = {**window.examples, **whole.examples}
        whole.held += window.held
        for process, spent in window.spent.items():
            before = whole.spent.get(process, Spent(0, 0, 0, 0))
            whole.spent[process] = Spent(*(a + b for a, b in zip(before, spent, strict=True)))
    return whole


def spread(values: Sequence[float]) -> float:
    """How far the values lie from their mean at most, as a part of it."""
    mean = sum(values) / len(values) if values else 0.0
    return max(abs(value - mean) for value in values) / mean if mean else 0.0


def agree(windows: Sequence[Window], within: float) -> bool:
    """Whether the last ones have the same rate and mean latency, give or take ``within`` (a part of 1)."""
    last = windows[-AGREEING:]
    if len(last) < AGREEING or not all(window.latencies.count for window in last):
        return False
    return all(
        spread(values) <= within
        for values in ([window.per_second for window in last], [window.latencies.mean_s for window in last])
    )
