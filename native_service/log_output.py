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

_MOST_BYTES = 4 * 1024 * 1024
_LAST_WORDS_S = 1.0


class BackgroundHandler(logging.Handler):
    """Hands lines to a thread that writes them to a descriptor; what it cannot get rid of is counted and dropped."""

    def __init__(self, descriptor: int, most_bytes: int = _MOST_BYTES) -> None:
        """``most_bytes`` is what may wait."""
        super().__init__()
        self._descriptor, self._most_bytes = descriptor, most_bytes
        self._lines: list[bytes] = []
        self._waiting_bytes = self._dropped = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
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
        self.flush()
        super().close()

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._lines and not self._dropped:
                    self._changed.wait()
                lines, dropped = self._lines, self._dropped
                self._lines, self._dropped = [], 0
            if dropped:
                lines.append(f"{dropped} lines of the log were dropped: it is read too slowly\n".encode())
            for line in lines:
                self._put(line)
            with self._changed:
                self._waiting_bytes = sum(map(len, self._lines))
                self._changed.notify_all()

    def _put(self, line: bytes) -> None:
        # Not through sys.stderr: a thread that is stuck in its buffer aborts the interpreter at the end.
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError:  # whoever read it has gone
            return
