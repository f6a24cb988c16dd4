"""Weights of a bundle: argument order, axis order, and the writer of program-order files.

``__metadata__["argument_order"]`` is a JSON list encoded as a string and decides which tensor feeds which argument.
``axis_order`` says how axes are stored: ``xla`` is program order; absent is the legacy Julia order, whose header shape
is the reverse of the program's and whose data must be transposed (``array.T``). It is never inferred from shapes: a
wrong guess on a square matrix is a silent wrong answer.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nereid_backend import dtypes, safetensors
from nereid_backend.dtypes import DType
from nereid_backend.errors import WeightsError, short_repr

AXIS_ORDER, PROGRAM_ORDER = "axis_order", "xla"
ORIGIN_KEY = "migrated_from"
"""Metadata of a file that a migration wrote: the original's name, size, time and SHA-256, as JSON."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Origin:
    """The legacy file that a migrated one was made from, beside it in the bundle."""

    file: str
    size_bytes: int
    mtime_ns: int
    sha256: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Origin:
        """Parse ``to_json``'s text. Raises ValueError for anything else, a path in place of a name included."""
        raw = json.loads(text)
        if not isinstance(raw, dict) or {key: type(value) for key, value in raw.items()} != {
            "file": str, "size_bytes": int, "mtime_ns": int, "sha256": str,
        }:  # fmt: skip
            raise ValueError("not an origin")
        if not is_file_name(raw["file"]):
            raise ValueError("not a file name")
        return cls(**raw)

    def is_as_recorded(self, status: os.stat_result) -> bool:
        """Whether a file has the recorded size and time, which a copied bundle's may not."""
        return (status.st_size, status.st_mtime_ns) == (self.size_bytes, self.mtime_ns)


def is_file_name(text: str) -> bool:
    """Whether ``text`` names a file in a folder, and no path out of it."""
    return bool(text) and Path(text).name == text and text != ".." and "\0" not in text


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class BundleWeights:
    """The header of a bundle's weights: ``shapes`` in program order, in argument order."""

    path: Path
    argument_order: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    legacy: bool
    origin: Origin | None = None

    @property
    def layout(self) -> str:
        """In words, how the file's shapes are to be read."""
        return f"{'legacy' if self.legacy else 'program'} axis order"

    @property
    def size_bytes(self) -> int:
        shapes = zip(self.dtypes, self.shapes, strict=True)
        return sum(dtypes.by_token(dtype).size_bytes * math.prod(shape) for dtype, shape in shapes)

    @property
    def needs_transpose(self) -> bool:
        return self.legacy and any(len(shape) > 1 for shape in self.shapes)

    def writer(self) -> Callable[[Path], None]:
        """A function that writes this file's tensors in program order, one at a time."""

        def write_program_order(target: Path) -> None:
            with safetensors.opened(self.path) as file:
                # Between the check and now a migration may have put a file of the other layout under this name.
                if _describe(self.path, file.header) != self:
                    raise WeightsError(f"{self.path.name}: changed while the bundle was converted; convert it again")
                write_reversed(target, file, {"argument_order": json.dumps(list(self.argument_order))})

        return write_program_order


def read(path: Path) -> BundleWeights:
    """Read the header of a bundle's weights file. Raises WeightsError."""
    return _describe(path, safetensors.read_header(path))


def in_use(directory: Path, file: str) -> tuple[BundleWeights, tuple[str, ...]]:
    """The weights that a manifest's ``weights_file`` stands for, and remarks. Raises WeightsError.

    A migrated copy stands for its original: when that has changed since, it is the one that is used.
    """
    weights = read(directory / file)
    if weights.origin is None or weights.origin.file == file:
        return weights, ()
    original = directory / weights.origin.file
    try:
        status, copy_status = original.stat(), (directory / file).stat()
        if os.path.samestat(status, copy_status):  # a replacement was interrupted
            return weights, ()
        if weights.origin.is_as_recorded(status) or digest(original) == weights.origin.sha256:
            return weights, ()
    except FileNotFoundError:
        return weights, ()
    except OSError as error:
        raise WeightsError(f"{original.name}: cannot be read ({error.strerror})") from None
    note = f"{original.name} has changed since {file} was made from it and is used; run nereid migrate again"
    return read(original), (note,)


def _describe(path: Path, header: safetensors.Header) -> BundleWeights:
    axis_order = header.metadata.get(AXIS_ORDER)
    if axis_order not in (None, PROGRAM_ORDER):
        raise WeightsError(
            f"{path.name}: metadata axis_order is {axis_order!r}, expected {PROGRAM_ORDER!r} or none; export the "
            "bundle with a known layout"
        )
    order = _argument_order(path.name, header)
    entries = [header.entries[name] for name in order]
    legacy = axis_order is None
    return BundleWeights(
        path,
        order,
        tuple(entry.dtype.token for entry in entries),
        tuple(entry.shape[::-1] if legacy else entry.shape for entry in entries),
        legacy,
        _origin(path.name, header),
    )


def _origin(name: str, header: safetensors.Header) -> Origin | None:
    text = header.metadata.get(ORIGIN_KEY)
    try:
        return None if text is None else Origin.from_json(text)
    except (ValueError, RecursionError):
        raise WeightsError(
            f"{name}: metadata {ORIGIN_KEY} is {short_repr(text)}, which no migration wrote; export the bundle again"
        ) from None


def _argument_order(name: str, header: safetensors.Header) -> tuple[str, ...]:
    text = header.metadata.get("argument_order")
    if text is None:
        if header.entries:
            raise WeightsError(
                f"{name}: metadata has no argument_order but the file holds {len(header.entries)} tensors; their order "
                "of arguments is unknown, export the bundle again"
            )
        return ()
    try:
        order = json.loads(text)
    except (ValueError, RecursionError):
        order = None
    if not isinstance(order, list) or not all(isinstance(item, str) for item in order):
        raise WeightsError(f"{name}: metadata argument_order must be a JSON list of names, got {short_repr(text)}")
    if missing := [item for item in order if item not in header.entries]:
        raise WeightsError(f"{name}: argument_order names {missing}, which the file does not hold")
    if len(set(order)) != len(order):
        raise WeightsError(f"{name}: argument_order names a tensor twice")
    if unused := sorted(set(header.entries) - set(order)):
        raise WeightsError(f"{name}: tensors {unused} are not in argument_order; export the bundle again")
    return tuple(order)


def write_reversed(path: Path, source: safetensors.OpenFile, metadata: Mapping[str, str]) -> None:
    """Write the tensors of a legacy file in program order; ``axis_order`` is added to ``metadata``."""
    _write(
        path,
        {name: (entry.dtype, entry.shape[::-1]) for name, entry in source.header.entries.items()},
        {**metadata, AXIS_ORDER: PROGRAM_ORDER},
        lambda name: source.tensor(name).T,
    )


def write(path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whose data region and whose 64-byte multiples are 64-byte aligned."""
    entries = {name: (dtypes.by_numpy(array.dtype), array.shape) for name, array in tensors.items()}
    _write(path, entries, metadata, tensors.__getitem__)


def _write(
    path: Path,
    entries: Mapping[str, tuple[DType, tuple[int, ...]]],
    metadata: Mapping[str, str],
    tensor: Callable[[str], Array],
) -> None:
    """Write what ``tensor`` gives for each name, in turn, and sync the file to disk.

    The header is space padded to a multiple of 64; tensors whose size is a multiple of 64 come first, so that each of
    them stays aligned (gaps are not legal).
    """
    sizes = {name: math.prod(shape) * dtype.size_bytes for name, (dtype, shape) in entries.items()}
    ordered = sorted(sizes, key=lambda name: (sizes[name] % safetensors.ALIGNMENT_BYTES != 0, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name in ordered:
        dtype, shape = entries[name]
        header[name] = {
            "dtype": dtype.safetensors,
            "shape": list(shape),
            "data_offsets": [position, position + sizes[name]],
        }
        position += sizes[name]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % safetensors.ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in ordered:
            file.write(np.ascontiguousarray(tensor(name)).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
