"""What a record of the log looks like at the output: text or JSON, without secrets, and not without end.

A record may carry ``fields`` (a mapping: model, request_id, ...) and a ``kind``: of one kind thirty are written at
once and then two a second, however many there are, and the rest is counted.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Hashable
from datetime import UTC, datetime
from typing import Any

TEXT, JSON = "text", "json"

_AT_ONCE, _EACH_S = 30, 0.5
_MOST_KINDS = 1000
_HIDDEN = "***"
_SHORTEST_SECRET = 4
# authorization: Bearer x, "x-api-key": "x", ('authorization', 'Basic x'), metadata_api_key=x
_NAMED = re.compile(
    r"""((?:authorization|x-api-key|api[-_]?key|cookie)\\?["']?\s*[:=,]\s*\\?["']?)(?:[a-z]+[ \t]+)?[^\s"',;)}\]\\]+""",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class Secrets:
    """Texts that are never written; ``masked`` also finds what stands behind the name of a header that holds one."""

    def __init__(self) -> None:
        self._texts: tuple[str, ...] = ()

    def hide(self, *texts: str) -> None:
        """Keep ``texts``, as long as they are more than a few characters, out of the log from now on."""
        known = {text for text in texts if len(text) >= _SHORTEST_SECRET}
        # In JSON a quote is written in another way.
        known |= {json.dumps(text)[1:-1] for text in known} | {*self._texts}
        self._texts = tuple(sorted(known, key=len, reverse=True))

    def masked(self, text: str) -> str:
        """``text`` without them."""
        for secret in self._texts:
            text = text.replace(secret, _HIDDEN)
        return _BEARER.sub(rf"\1 {_HIDDEN}", _NAMED.sub(rf"\1{_HIDDEN}", text))


SECRETS = Secrets()
"""Those of this process. Whoever reads one says so here."""


def visible(text: str) -> str:
    """``text`` with the characters that steer a terminal written out, but for tabs and ends of lines."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


class TextFormatter(logging.Formatter):
    """One line; further ones, as of a traceback, are indented."""

    def __init__(self) -> None:
        super().__init__(_TEXT)

    def format(self, record: logging.LogRecord) -> str:
        # Callers choose a part of many messages: what they send must not look like a line of its own, nor steer a
        # terminal.
        text = super().format(record).replace("\n", "\n    ")
        return SECRETS.masked(visible(text))


class JsonFormatter(logging.Formatter):
    """One JSON object on one line: time, level, logger, message, the record's own fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        shown: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": SECRETS.masked(record.getMessage()),
            **{key: _masked(value) for key, value in getattr(record, "fields", {}).items()},
        }
        if record.exc_info:
            shown["exception"] = SECRETS.masked(self.formatException(record.exc_info))
        return json.dumps(shown, default=str)


FORMATTERS: dict[str, Callable[[], logging.Formatter]] = {TEXT: TextFormatter, JSON: JsonFormatter}


class KindLimit:
    """Lets so many records of a kind pass at once, then one each half second; counts the rest."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        # Of each kind the moment until which what has passed counts, and how many did not.
        self._used_s: dict[tuple[str, Hashable], float] = {}
        self._stopped: dict[tuple[str, Hashable], tuple[int, int]] = {}

    def passes(self, record: logging.LogRecord) -> bool:
        """Whether ``record`` is to be written. One without a kind always is."""
        if getattr(record, "kind", None) is None:
            return True
        kind, now = (record.name, record.__dict__["kind"]), self._now()
        if len(self._used_s) > _MOST_KINDS:
            self._used_s = {key: used for key, used in self._used_s.items() if used > now}
        used = max(self._used_s.get(kind, now), now) + _EACH_S
        if used - now > _AT_ONCE * _EACH_S:
            count, _ = self._stopped.get(kind, (0, 0))
            self._stopped[kind] = (count + 1, record.levelno)
            return False
        self._used_s[kind] = used
        return True

    def take_stopped(self) -> list[logging.LogRecord]:
        """A record for each kind of which some did not pass since the last time."""
        stopped, self._stopped = self._stopped, {}
        return [
            logging.makeLogRecord(
                {
                    "name": logger,
                    "levelno": level,
                    "levelname": logging.getLevelName(level),
                    "msg": "%d more of these were left out: %s",
                    "args": (count, kind),
                }
            )
            for (logger, kind), (count, level) in stopped.items()
        ]


def _masked(value: Any) -> Any:
    return SECRETS.masked(value) if isinstance(value, str) else value
