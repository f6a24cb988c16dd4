"""Admission: a model takes as many calls at once as it has permits, and refuses the next one immediately."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nereid_backend.errors import ResourceExhausted


class Permits:
    """``capacity`` counts calls running and waiting together. For one event loop, not for threads."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.in_use = 0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """One permit, given back on every way out. Raises ResourceExhausted when none is free."""
        if self.in_use >= self.capacity:
            raise ResourceExhausted("model queue full, retry later")
        self.in_use += 1
        try:
            yield
        finally:
            self.in_use -= 1
