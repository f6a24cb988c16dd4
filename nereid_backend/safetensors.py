"""Reader for safetensors files: one scattering read, views instead of copies, every dtype of the table.

Why an own reader: the public one cannot load F8 tensors into numpy and copies every tensor. Here the file is
read once into one buffer, each tensor to a 64-byte aligned place wherever it lies in the file, so that XLA on
the CPU aliases all of them. The format: 8 bytes little-endian header length, a JSON header (space padded), then
the data without gaps (github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nereid_backend import dtypes
from nereid_backend.errors import BundleError, WeightsError

ALIGNMENT_BYTES = 64
MAX_HEADER_BYTES = 100_000_000
MAX_RANK = 32
"""What numpy 1 holds."""
_IOV_MAX = os.sysconf("SC_IOV_MAX")


@dataclass(frozen=True, slots=True)
class TensorFile:
    """``tensors`` are views of one shared buffer; ``metadata`` is the text-to-text header part."""

    tensors: dict[str, np.ndarray[Any, Any]]
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class Entry:
    """One header entry. ``start`` and ``end`` are byte offsets into the data region."""

    dtype: dtypes.DType
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int
    data_bytes: int


def aligned_empty(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An uninitialised uint8 array whose first byte is 64-byte aligned."""
    raw = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[skip : skip + nbytes]


def read_header(path: Path) -> Header:
    """Parse and check the header without touching the data. Raises WeightsError."""
    with opened(path) as file:
        return file.header


def read(path: Path) -> TensorFile:
    """Read a whole file. The arrays are writable views of one private buffer, each aligned. Raises WeightsError."""
    with opened(path) as file:
        return TensorFile(file.tensors(), file.header.metadata)


@contextmanager
def opened(path: Path) -> Iterator[OpenFile]:
    """Open a file whose header is checked; it stays the same file when another takes its name. Raises WeightsError."""
    with ExitStack() as stack:
        try:
            file = OpenFile(path.name, stack.enter_context(path.open("rb", buffering=0)))
        except OSError as error:
            raise WeightsError(f"{path.name}: cannot be read ({error.strerror}); check that it exists") from None
        yield file


class OpenFile:
    """A safetensors file being read."""

    def __init__(self, name: str, raw: BinaryIO) -> None:
        self._name, self.descriptor = name, raw.fileno()
        self.header = _parse_header(name, self.descriptor)

    def tensors(self) -> dict[str, np.ndarray[Any, Any]]:
        """Every tensor, in the order of the header."""
        entries = sorted(self.header.entries.items(), key=lambda item: item[1].start)
        places: dict[str, int] = {}
        targets: list[tuple[int, int]] = []
        position = 0
        for name, entry in entries:
            places[name], end = position, position + entry.end - entry.start
            if targets and targets[-1][1] == position:
                targets[-1] = targets[-1][0], end
            else:
                targets.append((position, end))
            position = end + -end % ALIGNMENT_BYTES
        buffer = aligned_empty(position)
        self._read_into([buffer.data[start:end] for start, end in targets if start < end], 0)
        return {
            name: _view(buffer[places[name] : places[name] + entry.end - entry.start], entry)
            for name, entry in self.header.entries.items()
        }

    def tensor(self, name: str) -> np.ndarray[Any, Any]:
        """One tensor, in a buffer of its own."""
        entry = self.header.entries[name]
        buffer = aligned_empty(entry.end - entry.start)
        self._read_into([buffer.data] if buffer.nbytes else [], entry.start)
        return _view(buffer, entry)

    def _read_into(self, targets: list[memoryview], start: int) -> None:
        """Fill ``targets`` one after the other from ``start`` of the data region on."""
        offset = self.header.data_start + start
        while targets:
            # One call fills at most _IOV_MAX buffers and 2 GiB.
            try:
                count = os.preadv(self.descriptor, targets[:_IOV_MAX], offset)
            except OSError as error:
                raise WeightsError(f"{self._name}: cannot be read ({error.strerror})") from None
            if not count:
                raise WeightsError(f"{self._name}: ended early; it changed while it was read, try again")
            offset += count
            while targets and count >= len(targets[0]):
                count -= len(targets.pop(0))
            if count:
                targets[0] = targets[0][count:]


def _view(buffer: np.ndarray[Any, Any], entry: Entry) -> np.ndarray[Any, Any]:
    return buffer.view(entry.dtype.numpy).reshape(entry.shape)


def _parse_header(name: str, descriptor: int) -> Header:
    size = os.fstat(descriptor).st_size
    prefix = os.pread(descriptor, 8, 0)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise WeightsError(
            f"{name}: the header says {length} bytes but the file has {size}; it is truncated or no "
            "safetensors file, copy or export it again"
        )
    text = os.pread(descriptor, length, 8)
    try:
        raw = json.loads(text, object_pairs_hook=_unique)
        if not isinstance(raw, dict):
            raise ValueError("not an object")
        metadata = raw.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("__metadata__ must map text to text")
        entries = {name: _entry(value) for name, value in raw.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, BundleError) as error:
        raise WeightsError(f"{name}: the header is malformed ({error}); export the file again") from None
    _check_layout(name, entries, size - 8 - length)
    return Header(entries, metadata, 8 + length, size - 8 - length)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


def _entry(raw: dict[str, Any]) -> Entry:
    shape = tuple(raw["shape"])
    start, end = raw["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
        raise ValueError("shape and data_offsets must be non-negative integers")
    return Entry(dtypes.by_safetensors(raw["dtype"]), shape, start, end)


def _check_layout(name: str, entries: dict[str, Entry], data_bytes: int) -> None:
    position = 0
    for tensor, e in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        need = math.prod(e.shape) * e.dtype.size_bytes
        # numpy counts the other axes even where one of them is 0
        if len(e.shape) > MAX_RANK or math.prod(max(n, 1) for n in e.shape) * e.dtype.size_bytes > sys.maxsize:
            raise WeightsError(f"{name}: tensor {tensor!r} has a shape that no array can have; export the file again")
        if e.end - e.start != need:
            raise WeightsError(
                f"{name}: tensor {tensor!r} has {e.end - e.start} bytes, its shape {list(e.shape)} of "
                f"{e.dtype.safetensors} needs {need}; export the file again"
            )
        if e.start != position:
            raise WeightsError(
                f"{name}: tensor {tensor!r} starts at byte {e.start}, expected {position}; the data must be "
                "contiguous, export the file again"
            )
        position = e.end
    if position != data_bytes:
        raise WeightsError(
            f"{name}: the header describes {position} data bytes, the file has {data_bytes}; it is truncated or "
            "damaged, copy or export it again"
        )
