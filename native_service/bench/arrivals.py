"""When the calls of an open loop are due, whatever the server does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

CONSTANT, POISSON = "constant", "poisson"
KINDS = (POISSON, CONSTANT)


def due_s(kind: str, rate: float, share: int, shares: int) -> Iterator[float]:
    """Seconds from the start at which one of ``shares`` processes sends, without an end; together ``rate`` a second.

    Poisson arrivals are those of many callers who do not know of each other; the same ``share`` gives the same times.
    """
    if kind == CONSTANT:
        yield from ((number * shares + share) / rate for number in count())
    chance, time_s = random.Random(share), 0.0  # noqa: S311 - no secret
    while True:
        time_s += chance.expovariate(rate / shares)
        yield time_s
