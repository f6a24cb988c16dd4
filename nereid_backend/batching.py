"""Gather rows of several requests, pad to a compiled size, check and split the results.

Pure numpy: nothing here knows Triton. Each tensor has its rows on its own batch axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

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
    raise InvalidArgument(f"{rows} rows are more than the largest compiled batch size {sizes[-1]}; send fewer rows")


class Staging:
    """One reused, 64-byte aligned buffer per input, grown to the largest batch seen.

    A batch handed out by ``gather`` is valid until the next ``gather``.
    """

    def __init__(self, inputs: Sequence[TensorSpec], *, bounded: bool = False) -> None:
        """``bounded``: variable axes take compiled sizes only, so that a buffer for them is worth keeping."""
        self._inputs = tuple(inputs)
        self._kept = [bounded or VARIABLE not in tensor.row_shape for tensor in self._inputs]
        self._buffers: list[np.ndarray[Any, np.dtype[np.uint8]] | None] = [None] * len(self._inputs)

    def gather(self, requests: Sequence[Sequence[Array]], rows: Sequence[int], size: int) -> list[Array]:
        """Join each input of ``requests`` along its batch axis and append zero rows up to ``size``.

        A single request of exactly ``size`` rows passes through uncopied.
        """
        if len(requests) == 1 and rows[0] == size:
            return [np.asarray(array, order="C") for array in requests[0]]
        batch = []
        total = sum(rows)
        for index, tensor in enumerate(self._inputs):
            axis = tensor.batch_axis or 0
            parts = [request[index] for request in requests]
            shape = parts[0].shape
            target = self._buffer(index, tensor.element.numpy, (*shape[:axis], size, *shape[axis + 1 :]))
            np.concatenate(parts, axis, out=target[_rows(axis, 0, total)])
            target[_rows(axis, total, size)] = 0
            batch.append(target)
        return batch

    def _buffer(self, index: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        if not self._kept[index]:
            return np.empty(shape, dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        buffer = self._buffers[index]
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers[index] = aligned_empty(nbytes)
        return buffer[:nbytes].view(dtype).reshape(shape)

    def owns(self, array: Array) -> bool:
        """Whether ``array`` may live in one of the reused buffers (an identity model returns its input)."""
        return any(buffer is not None and np.may_share_memory(array, buffer) for buffer in self._buffers)


class OutputCheck:
    """Compares a run's outputs with the spec, because Triton does not."""

    def __init__(self, spec: ModelSpec, what: str = "output") -> None:
        """``what`` the arrays are called in messages."""
        self._spec = spec
        self._what = what
        self._dtypes = [tensor.element.numpy for tensor in spec.outputs]
        self._shapes: dict[int, list[tuple[int, ...]]] = {}

    def __call__(self, outputs: Sequence[Array], size: int) -> list[Array]:
        """The outputs of a run of ``size`` rows, in program shape. Raises OutputError.

        A nereid folder may leave the batch axis out of a one-row output; it is put back here.
        """
        spec = self._spec
        if len(outputs) != len(spec.outputs):
            raise OutputError(f"model {spec.name!r} returned {len(outputs)} outputs, expected {len(spec.outputs)}")
        if size not in self._shapes and len(self._shapes) < _MAX_REMEMBERED_SIZES:
            self._shapes[size] = [tensor.at_batch(size) for tensor in spec.outputs]
        shapes = self._shapes.get(size) or [tensor.at_batch(size) for tensor in spec.outputs]
        return [
            array if array.shape == shape and array.dtype == dtype else self._checked(tensor, array, dtype, shape, size)
            for tensor, array, dtype, shape in zip(spec.outputs, outputs, self._dtypes, shapes, strict=True)
        ]

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
    batched = [axis or 0 for axis in axes]
    if len(rows) == 1 and all(o.shape[axis] == rows[0] for o, axis in zip(outputs, batched, strict=True)):
        return [list(outputs)]
    results, position = [], 0
    for count in rows:
        results.append([o[_rows(axis, position, position + count)] for o, axis in zip(outputs, batched, strict=True)])
        position += count
    return results


def _rows(axis: int, start: int, stop: int) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, slice(start, stop))
