"""Sorts what tritonserver and the models in it print."""

from __future__ import annotations

import logging
import re
from collections import deque

_LOG = logging.getLogger("nereid.triton")
_MODELS = logging.getLogger("nereid.models")

# I1130 07:02:03.123456 1234 model_lifecycle.cc:839] "successfully loaded 'x'"
_HEADER = re.compile(r"^([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ (\S+:\d+)\] ?(.*)$")
_LEVELS = {"I": logging.DEBUG, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}
_KEPT_LINES = 50
# All but the last line come on every machine without a GPU, at any level; nothing is wrong there. The last repeats
# what the caller of a load or a stop is told anyway.
_NOISE = re.compile(
    r"Unable to allocate pinned system memory|CUDA memory pool disabled|CudaDriverHelper has not been initialized"
    r"|GPU metrics will not be available|Failed to initialize NVML|Cannot get CUDA device count|DCGM"
    r"|^unable to create stream for .*CUDA driver version"
    r"|^failed to allocate pinned system memory: no pinned memory pool"
    r"|^failed to load '|^Signal \(\d+\) received"
)


class TritonLog:
    """Receives each line once; keeps the last ones for error messages."""

    def __init__(self) -> None:
        self._complaints: deque[str] = deque(maxlen=_KEPT_LINES)
        self._level = logging.DEBUG
        self._in_block = False

    @property
    def complaints(self) -> tuple[str, ...]:
        """The last warnings and errors, text only, oldest first."""
        return tuple(self._complaints)

    def printed(self, line: str) -> None:
        """A line of the server's stdout: Triton's log never goes there, so nearly always a model printed it."""
        if not _NOISE.search(line):
            _MODELS.info("%s", line)

    def logged(self, line: str) -> None:
        """A line of the server's stderr: Triton's log, or something a model wrote to its stderr."""
        header = _HEADER.match(line)
        if header is not None:
            self._level = _LEVELS[header[1]]
            # An empty message is the head of a table or an option dump that ends with an empty line.
            self._in_block = header[3] == ""
            text = header[3].strip('"')
            if _NOISE.search(text):
                self._level = logging.DEBUG
            elif self._level > logging.INFO:
                self._complaints.append(text)
            _LOG.log(self._level, "%s", text)
        elif self._in_block:
            self._in_block = line.strip() != ""
            _LOG.log(self._level, "%s", line)
        elif line.strip() and not _NOISE.search(line):
            _MODELS.info("%s", line)
