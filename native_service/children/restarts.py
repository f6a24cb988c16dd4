"""How soon, and how often, what has died is started again."""

from __future__ import annotations

import time
from collections import deque

# Who lives for so long after a restart is started again at once; until then each pause is twice the one before.
_STEADY_S = 60.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class Pauses:
    """The pauses before the restarts of one thing: none after a steady life, else longer and longer."""

    def __init__(self) -> None:
        self._pause_s: float | None = None
        self._back_at: float | None = None

    def next_s(self) -> float:
        """How long to wait before the next try."""
        steady = self._back_at is not None and time.monotonic() - self._back_at > _STEADY_S
        if self._pause_s is None or steady:
            self._pause_s = 0.0
        else:
            self._pause_s = min(max(2 * self._pause_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
        self._back_at = None
        return self._pause_s

    def back(self) -> None:
        """It runs again."""
        self._back_at = time.monotonic()


class Tries:
    """At most ``most`` tries within ``window_s``."""

    def __init__(self, most: int, window_s: float) -> None:
        self._most, self._window_s = most, window_s
        self._taken: deque[float] = deque(maxlen=most)

    def take(self) -> bool:
        """Whether there was one left."""
        now = time.monotonic()
        if len(self._taken) == self._most and now - self._taken[0] <= self._window_s:
            return False
        self._taken.append(now)
        return True

    def __str__(self) -> str:
        return f"for the {self._most + 1}th time within {self._window_s:g} s"
