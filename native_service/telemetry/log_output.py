"""Writes the log without waiting for whoever reads it.

A pipe that nobody empties (``nereid serve 2>&1 | less``, a stuck collector) blocks its writer. A blocked supervisor
answers nobody, and a tritonserver whose output it no longer takes stands still as well: seen after 64 KiB of complaints
about malformed requests.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from native_service.telemetry.log_records import JsonFormatter, KindLimit

_MOST_BYTES = 4 * 1024 * 1024
_LAST_WORDS_S = 1.0
# How often it is told what was left out.
_TELL_S = 5.0


class BackgroundHandler(logging.Handler):
    """Hands lines to a thread that writes them to a descriptor; what it cannot get rid of is counted and dropped."""

    def __init__(self, descriptor: int, most_bytes: int = _MOST_BYTES) -> None:
        """``most_bytes`` is what may wait."""
        super().__init__()
        self._descriptor, self._most_bytes = descriptor, most_bytes
        self._lines: list[bytes] = []
        self._waiting_bytes = self._dropped = 0
        self._left_out, self._told_s = False, 0.0
        self._changed = threading.Condition()
        self._limit = KindLimit()
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            passes = self._limit.passes(record)
            if not passes and not self._left_out:
                self._left_out, self._told_s = True, time.monotonic()
                self._changed.notify_all()
        if passes:
            self._put_aside(record)

    def _put_aside(self, record: logging.LogRecord) -> None:
        try:
            line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        except Exception:  # noqa: BLE001 - a record that cannot be formatted; what logging's own handlers do
            self.handleError(record)
            return
        with self._changed:
            if self._waiting_bytes + len(line) > self._most_bytes:
                self._dropped += 1
                self._changed.notify_all()
                return
            self._lines.append(line)
            self._waiting_bytes += len(line)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything is written, a second at most."""
        end = time.monotonic() + _LAST_WORDS_S
        with self._changed:
            while self._waiting_bytes and self._changed.wait(end - time.monotonic()):
                pass

    def close(self) -> None:
        self._tell_left_out()
        self.flush()
        super().close()

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._lines and not self._dropped and not self._may_tell:
                    self._changed.wait(_TELL_S if self._left_out else None)
                telling = self._may_tell
                lines, dropped = self._lines, self._dropped
                self._lines, self._dropped = [], 0
            if telling:
                self._tell_left_out()
            if dropped:
                lines.append(self._loss(dropped))
            for line in lines:
                self._put(line)
            with self._changed:
                self._waiting_bytes = sum(map(len, self._lines))
                self._changed.notify_all()

    @property
    def _may_tell(self) -> bool:
        return self._left_out and time.monotonic() - self._told_s >= _TELL_S

    def _tell_left_out(self) -> None:
        with self._changed:
            self._left_out, records = False, self._limit.take_stopped()
        for record in records:
            self._put_aside(record)

    def _loss(self, lines: int) -> bytes:
        text = f"{lines} lines of the log were dropped: it is read too slowly"
        record = logging.makeLogRecord({"name": "nereid.log", "levelname": "WARNING", "msg": text})
        # In the middle of lines of text a bare sentence is seen best.
        return f"{self.format(record) if isinstance(self.formatter, JsonFormatter) else text}\n".encode()

    def _put(self, line: bytes) -> None:
        # Not through sys.stderr: a thread that is stuck in its buffer aborts the interpreter at the end.
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError:  # whoever read it has gone
            return
