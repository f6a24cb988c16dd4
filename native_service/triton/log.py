"""Sorts what tritonserver and the models in it print."""

from __future__ import annotations

import json
import logging
import re
from collections import deque

_LOG = logging.getLogger("nereid.triton")
_MODELS = logging.getLogger("nereid.models")

# I1130 07:02:03.123456 1234 model_lifecycle.cc:839] "successfully loaded 'x'"
_HEADER = re.compile(r"^([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ (\S+:\d+)\] ?(.*)$")
_LEVELS = {"I": logging.DEBUG, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}
_KEPT_LINES = 50
# What nereid_backend says of a request whose caller only gets a short text; the call itself is told elsewhere.
_REQUEST_FAILED = re.compile(r"model '([^']*)' request (.*?) failed\n")
_TRACEBACK, _LONGEST_TRACEBACK = "Traceback (most recent call last):", 200
# All but the last line come on every machine without a GPU, at any level; nothing is wrong there. The last repeats
# what the caller of a load or a stop is told anyway.
_NOISE = re.compile(
    r"Unable to allocate pinned system memory|CUDA memory pool disabled|CudaDriverHelper has not been initialized"
    r"|GPU metrics will not be available|Failed to initialize NVML|Cannot get CUDA device count|DCGM"
    r"|^unable to create stream for .*CUDA driver version"
    r"|^failed to allocate pinned system memory: no pinned memory pool"
    r"|^failed to load '|^Signal \(\d+\) received|^Exit timeout expired"
)


class TritonLog:
    """Receives each line once; keeps the last ones for error messages."""

    def __init__(self) -> None:
        self._complaints: deque[str] = deque(maxlen=_KEPT_LINES)
        self._level = logging.DEBUG
        self._in_block = False
        self._tracebacks: dict[str, list[str]] = {"stdout": [], "stderr": []}

    @property
    def complaints(self) -> tuple[str, ...]:
        """The last warnings and errors, text only, oldest first."""
        return tuple(self._complaints)

    def printed(self, line: str) -> None:
        """A line of the server's stdout: Triton's log never goes there, so nearly always a model printed it."""
        if not _NOISE.search(line):
            self._of_a_model(line, "stdout")

    def logged(self, line: str) -> None:
        """A line of the server's stderr: Triton's log, or something a model wrote to its stderr."""
        header = _HEADER.match(line)
        if header is not None:
            self._level = _LEVELS[header[1]]
            # An empty message is the head of a table or an option dump that ends with an empty line.
            self._in_block = header[3] == ""
            text = _unquoted(header[3])
            if _NOISE.search(text):
                self._level = logging.DEBUG
            elif self._level > logging.INFO:
                self._complaints.append(text)
            if failed := _REQUEST_FAILED.match(text):
                fields = {"model": failed[1], "request_id": failed[2], "source": header[2]}
                _MODELS.info("%s", text.rstrip(), extra={"fields": fields, "kind": f"failed requests of {failed[1]}"})
                return
            # Whoever sends nonsense gets Triton to complain: there may be any number of these.
            kind = None if self._level < logging.WARNING else header[2]
            _LOG.log(self._level, "%s", text, extra={"fields": {"source": header[2]}, "kind": kind})
        elif self._in_block:
            self._in_block = line.strip() != ""
            _LOG.log(self._level, "%s", line)
        elif (line.strip() or self._tracebacks["stderr"]) and not _NOISE.search(line):
            self._of_a_model(line, "stderr")

    def _of_a_model(self, line: str, stream: str) -> None:
        """One record per line, and per traceback: from its head to the first line that is not indented."""
        begun = self._tracebacks[stream]
        if not begun and line.strip() != _TRACEBACK:
            _MODELS.info("%s", line, extra={"fields": {"stream": stream}})
            return
        begun.append(line)
        if len(begun) == 1 or (line.startswith(" ") and len(begun) < _LONGEST_TRACEBACK):
            return
        _MODELS.info("%s", "\n".join(begun), extra={"fields": {"stream": stream}})
        begun.clear()


def _unquoted(text: str) -> str:
    """A message without the quotes and escapes that Triton puts round it."""
    try:
        return str(json.loads(text)) if text.startswith('"') else text
    except ValueError:
        return text.strip('"')
