"""The last errors of the log, for people who ask a running server how it is."""

from __future__ import annotations

import logging
from collections import deque

from native_service.telemetry.log_records import SECRETS, visible

_MOST, _LONGEST = 10, 500


class RecentFailures(logging.Handler):
    """Keeps the last ten errors, each cut to 500 characters; ``lines`` are (seconds since the epoch, text)."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._kept: deque[tuple[float, str]] = deque(maxlen=_MOST)

    @property
    def lines(self) -> list[tuple[float, str]]:
        return list(self._kept)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # Callers choose a part of it, and a terminal shows it.
            text = visible(record.getMessage().replace("\n", " "))
            self._kept.append((record.created, SECRETS.masked(text)[:_LONGEST]))
        except Exception:  # noqa: BLE001 - a record that cannot be formatted; what logging's own handlers do
            self.handleError(record)
