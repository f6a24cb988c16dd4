"""Weights of a bundle: argument order, axis order, and the writer of program-order files.

``__metadata__["argument_order"]`` is a JSON list encoded as a string and decides which tensor feeds which argument.
``axis_order`` says how axes are stored: ``xla`` is program order; absent is the legacy Julia order, whose header shape
is the reverse of the program's and whose data must be transposed (``array.T``). It is never inferred from shapes: a
wrong guess on a square matrix is a silent wrong answer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nereid_backend import dtypes, safetensors
from nereid_backend.errors import WeightsError

PROGRAM_ORDER = "xla"


@dataclass(frozen=True, slots=True)
class BundleWeights:
    """The header of a bundle's weights: ``shapes`` in program order, in argument order."""

    path: Path
    argument_order: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    legacy: bool

    @property
    def needs_transpose(self) -> bool:
        return self.legacy and any(len(shape) > 1 for shape in self.shapes)

    def writer(self) -> Callable[[Path], None]:
        """A function that writes this file's tensors in program order."""

        def write_program_order(target: Path) -> None:
            tensors = safetensors.read(self.path).tensors
            write(
                target,
                {name: np.ascontiguousarray(tensors[name].T) for name in self.argument_order},
                {"argument_order": json.dumps(list(self.argument_order)), "axis_order": PROGRAM_ORDER},
            )

        return write_program_order


def read(path: Path) -> BundleWeights:
    """Read the header of a bundle's weights file. Raises WeightsError."""
    header = safetensors.read_header(path)
    axis_order = header.metadata.get("axis_order")
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
    )


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
        raise WeightsError(f"{name}: metadata argument_order must be a JSON list of names, got {text!r}")
    if missing := [item for item in order if item not in header.entries]:
        raise WeightsError(f"{name}: argument_order names {missing}, which the file does not hold")
    if len(set(order)) != len(order):
        raise WeightsError(f"{name}: argument_order names a tensor twice")
    if unused := sorted(set(header.entries) - set(order)):
        raise WeightsError(f"{name}: tensors {unused} are not in argument_order; export the bundle again")
    return tuple(order)


def write(path: Path, tensors: Mapping[str, np.ndarray[Any, Any]], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whose data region and whose 64-byte multiples are 64-byte aligned.

    The header is space padded to a multiple of 64; tensors whose size is a multiple of 64 come first, so that each of
    them stays aligned (gaps are not legal). The file is synced to disk.
    """
    ordered = sorted(tensors.items(), key=lambda item: (item[1].nbytes % safetensors.ALIGNMENT_BYTES != 0, item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, array in ordered:
        header[name] = {
            "dtype": dtypes.by_numpy(array.dtype).safetensors,
            "shape": list(array.shape),
            "data_offsets": [position, position + array.nbytes],
        }
        position += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % safetensors.ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, array in ordered:
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
