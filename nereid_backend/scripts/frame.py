"""The file a program leaves its answer in: ``<dtype> <d0,d1,...>``, a newline, the raw bytes.

Dtypes are numpy's names; words after the second and empty dimensions are ignored, as nereid-server does.
"""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nereid_backend import dtypes
from nereid_backend.dtypes import DType
from nereid_backend.errors import BundleError, OutputError, OutputRefused

_LONGEST_HEADER = 4096
# What one gRPC message carries, with room for what goes around the tensor.
_LARGEST_BYTES = 2**31 - 2**20


@dataclass(frozen=True, slots=True)
class Frame:
    """One tensor as the program wrote it."""

    element: DType
    shape: tuple[int, ...]
    data: memoryview

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """The tensor as a read-only array on ``data``."""
        return np.frombuffer(self.data, self.element.numpy).reshape(self.shape)


def read(path: Path) -> Frame:
    """Read the file a program has left. Raises OutputRefused when there is none, OutputError when it is malformed."""
    try:
        # Not through a link and without waiting: the program may have left anything there.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        raise OutputRefused("it ended with code 0 and left no readable tensor at NEREID_OUTPUT_PATH") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OutputRefused("it left something else than a file at NEREID_OUTPUT_PATH")
    with os.fdopen(descriptor, "rb") as file:
        if status.st_size > _LARGEST_BYTES:
            raise OutputError(f"its output has {status.st_size} bytes, the most an answer carries is {_LARGEST_BYTES}")
        return parse(file.read())


def parse(content: bytes) -> Frame:
    """The tensor in the content of an output file. Raises OutputError."""
    end = content.find(b"\n", 0, _LONGEST_HEADER)
    if end < 0:
        raise OutputError("its output does not begin with a line '<dtype> <d0,d1,...>'")
    try:
        words = content[:end].decode("utf-8").split()
        element = dtypes.by_numpy_name(words[0])
        shape = tuple(int(word) for word in words[1].split(",") if word.strip())
    except (UnicodeDecodeError, IndexError, ValueError, BundleError):
        header = content[:end][:80].decode(errors="replace")
        raise OutputError(f"its output begins with {header!r}, expected '<dtype> <d0,d1,...>'") from None
    if element.kserve is None:
        raise OutputError(f"its output is {element.numpy_name}, which has no KServe datatype; write another")
    if not shape or min(shape) <= 0:
        raise OutputError(f"its output has shape {list(shape)}; dimensions are at least 1, and there is at least one")
    data = memoryview(content)[end + 1 :]
    expected = math.prod(shape) * element.size_bytes
    if len(data) != expected:
        raise OutputError(f"its output has {len(data)} bytes, {element.numpy_name} {list(shape)} needs {expected}")
    return Frame(element, shape, data)
