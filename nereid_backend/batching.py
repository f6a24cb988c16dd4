"""Gather rows of several requests, pad to a compiled size, check and split the results.

Pure numpy: nothing here knows Triton. Each tensor has its rows on its own batch axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nereid_backend.dtypes import BYTES
from nereid_backend.errors import InvalidArgument, OutputError
from nereid_backend.safetensors import aligned_empty
from nereid_backend.spec import VARIABLE, ModelSpec, TensorSpec

Array = np.ndarray[Any, Any]

_MAX_REMEMBERED_SIZES = 256


def padded_size(sizes: Sequence[int], rows: int) -> int:
    """The smallest of the ascending ``sizes`` that holds ``rows``; ``rows`` itself when any size runs.

    Raises InvalidArgument when none does.
    """
    if not sizes:
        return rows
    for size in sizes:
        if size >= rows:
            return size
    raise too_many_rows(sizes, rows)


def too_many_rows(sizes: Sequence[int], rows: int) -> InvalidArgument:
    """The error of a request with more rows than the largest of the ascending ``sizes``."""
    return InvalidArgument(f"{rows} rows are more than the largest compiled batch size {sizes[-1]}; send fewer rows")


class Staging:
    """One reused, 64-byte aligned buffer per input, grown to the largest batch seen.

    A batch handed out by ``gather`` is valid until the next ``gather``.
    """

    def __init__(self, inputs: Sequence[TensorSpec], *, bounded: bool = False) -> None:
        """``bounded``: variable axes take compiled sizes only, so that a buffer for them is worth keeping."""
        self._inputs = [(tensor.batch_axis or 0, tensor.element.numpy) for tensor in inputs]
        self._kept = [
            (bounded or VARIABLE not in tensor.row_shape) and tensor.element is not BYTES for tensor in inputs
        ]
        self._buffers: list[np.ndarray[Any, np.dtype[np.uint8]] | None] = [None] * len(self._inputs)
        self._latest: list[Array | None] = [None] * len(self._inputs)  # the buffers as batches see them

    def gather(self, requests: Sequence[Sequence[Array]], rows: Sequence[int], size: int) -> list[Array]:
        """Join each input of ``requests`` along its batch axis and append zero rows up to ``size``.

        A single request of exactly ``size`` rows passes through uncopied.
        """
        if len(requests) == 1 and rows[0] == size:
            return [np.asarray(array, order="C") for array in requests[0]]
        batch = []
        total = sum(rows)
        for index, (axis, dtype) in enumerate(self._inputs):
            parts = [request[index] for request in requests]
            shape = parts[0].shape
            target = self._buffer(index, dtype, (*shape[:axis], size, *shape[axis + 1 :]))
            joined = target
            if total < size:
                target[rows_on(axis, total, size)] = b"" if dtype.kind == "O" else 0
                joined = target[rows_on(axis, 0, total)]
            np.concatenate(parts, axis, out=joined)
            batch.append(target)
        return batch

    def _buffer(self, index: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        if not self._kept[index]:
            return np.empty(shape, dtype)
        latest = self._latest[index]
        if latest is not None and latest.shape[1:] == shape[1:] and len(latest) >= shape[0]:
            return latest[: shape[0]]  # as contiguous as the whole; the size may be another one in every call
        nbytes = math.prod(shape) * dtype.itemsize
        buffer = self._buffers[index]
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers[index] = aligned_empty(nbytes)
        self._latest[index] = latest = buffer[:nbytes].view(dtype).reshape(shape)
        return latest

    def owns(self, array: Array) -> bool:
        """Whether ``array`` may live in one of the reused buffers (an identity model returns its input)."""
        if array.flags.owndata:  # the buffers are views of what they were cut from
            return False
        return any(buffer is not None and np.may_share_memory(array, buffer) for buffer in self._buffers)


class OutputCheck:
    """Compares a run's outputs with the spec, because Triton does not."""

    def __init__(self, spec: ModelSpec, what: str = "output") -> None:
        """``what`` the arrays are called in messages."""
        self._spec = spec
        self._what = what
        self._dtypes = [tensor.element.numpy for tensor in spec.outputs]
        self._expected: dict[int, list[tuple[tuple[int, ...], np.dtype[Any]]]] = {}

    def __call__(self, outputs: Sequence[Array], size: int) -> list[Array]:
        """The outputs of a run of ``size`` rows, in program shape. Raises OutputError.

        A nereid folder may leave the batch axis out of a one-row output; it is put back here.
        """
        expected = self._expected.get(size)
        if expected is None:
            expected = self._at(size)
        if [(array.shape, array.dtype) for array in outputs] == expected:
            return list(outputs)
        spec = self._spec
        if len(outputs) != len(expected):
            raise OutputError(f"model {spec.name!r} returned {len(outputs)} outputs, expected {len(expected)}")
        return [
            self._checked(tensor, array, dtype, shape, size)
            for tensor, array, (shape, dtype) in zip(spec.outputs, outputs, expected, strict=True)
        ]

    def _at(self, size: int) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and dtype of every output of ``size`` rows."""
        shapes = [tensor.at_batch(size) for tensor in self._spec.outputs]
        expected = list(zip(shapes, self._dtypes, strict=True))
        if len(self._expected) < _MAX_REMEMBERED_SIZES:
            self._expected[size] = expected
        return expected

    def _checked(
        self, tensor: TensorSpec, array: Array, dtype: np.dtype[Any], expected: tuple[int, ...], size: int
    ) -> Array:
        where = f"model {self._spec.name!r} {self._what} {tensor.name!r}"
        if array.dtype != dtype:
            raise OutputError(f"{where} has dtype {array.dtype.name}, expected {dtype.name}")
        shape = array.shape
        if self._spec.batch_may_be_omitted and size == 1 and len(shape) == len(expected) - 1:
            shape = (1, *shape)
        if len(shape) != len(expected) or any(
            want not in (VARIABLE, got) for want, got in zip(expected, shape, strict=True)
        ):
            raise OutputError(f"{where} has shape {list(array.shape)}, expected {list(expected)}")
        return array.reshape(shape)


def split(outputs: Sequence[Array], axes: Sequence[int | None], rows: Sequence[int]) -> list[list[Array]]:
    """The rows of each request along each output's batch axis, as views, padding dropped."""
    stops = list(itertools.accumulate(rows))
    ranges = list(map(slice, [0, *stops], stops))
    if len(outputs) == 1 and not axes[0]:
        (output,) = outputs
        return [[output[part]] for part in ranges]
    parts = []
    for output, axis in zip(outputs, axes, strict=True):
        if axis:
            rows_first = np.moveaxis(output, axis, 0)
            parts.append([np.moveaxis(rows_first[part], 0, axis) for part in ranges])
        else:
            parts.append([output[part] for part in ranges])
    return list(map(list, zip(*parts, strict=True)))


def rows_on(axis: int, start: int, stop: int) -> tuple[slice, ...]:
    """The index of these rows of an array whose rows are on ``axis``."""
    return (*(slice(None),) * axis, slice(start, stop))
