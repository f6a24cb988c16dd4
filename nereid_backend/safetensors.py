"""Reader for safetensors files: one aligned read, views instead of copies, every dtype of the table.

Why an own reader: the public one cannot load F8 tensors into numpy and copies every tensor. Here the data
region is read once into a 64-byte aligned buffer, so that XLA on the CPU can alias a tensor whose own offset
is a multiple of 64. The format: 8 bytes little-endian header length, a JSON header (space padded), then the
data without gaps (github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nereid_backend import dtypes
from nereid_backend.errors import BundleError, WeightsError

ALIGNMENT_BYTES = 64
MAX_HEADER_BYTES = 100_000_000
MAX_RANK = 32
"""What numpy 1 holds."""


@dataclass(frozen=True, slots=True)
class TensorFile:
    """``tensors`` are views of one shared buffer, in file order; ``metadata`` is the text-to-text header part."""

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
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise WeightsError(
                    f"{path.name}: the header says {length} bytes but the file has {size}; it is truncated or no "
                    "safetensors file, copy or export it again"
                )
            text = file.read(length)
    except OSError as error:
        raise WeightsError(f"{path.name}: cannot be read ({error.strerror}); check that it exists") from None
    try:
        raw = json.loads(text, object_pairs_hook=_unique)
        if not isinstance(raw, dict):
            raise ValueError("not an object")
        metadata = raw.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("__metadata__ must map text to text")
        entries = {name: _entry(value) for name, value in raw.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, BundleError) as error:
        raise WeightsError(f"{path.name}: the header is malformed ({error}); export the file again") from None
    _check_layout(path.name, entries, size - 8 - length)
    return Header(entries, metadata, 8 + length, size - 8 - length)


def read(path: Path) -> TensorFile:
    """Read a whole file. The arrays are writable views of one private buffer. Raises WeightsError."""
    header = read_header(path)
    buffer = aligned_empty(header.data_bytes)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(header.data_start)
            _read_fully(file, buffer.data, path.name)
    except OSError as error:
        raise WeightsError(f"{path.name}: cannot be read ({error.strerror})") from None
    tensors = {name: buffer[e.start : e.end].view(e.dtype.numpy).reshape(e.shape) for name, e in header.entries.items()}
    return TensorFile(tensors, header.metadata)


def _read_fully(file: Any, target: memoryview, name: str) -> None:
    # One read() call moves at most 2 GiB on Linux.
    while target:
        count = file.readinto(target)
        if not count:
            raise WeightsError(f"{name}: ended {len(target)} bytes early; it changed while it was read, try again")
        target = target[count:]


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
