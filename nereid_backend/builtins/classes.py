"""``softmax``, ``argmax`` and ``labels``: from a classifier's scores to what a client wants to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from nereid_backend.builtins import POSTPROCESS, Array, Arrays, Builtin, put
from nereid_backend.errors import BundleError, OutputError
from nereid_backend.spec import VARIABLE, TensorSpec

_FLOATS = ("f16", "bf16", "f32", "f64")


def softmax(scores: Array, axis: int = -1) -> Array:
    """Shares that add up to 1 along ``axis``, in the dtype of ``scores``; 16-bit ones are summed in 32 bits."""
    wide = scores.astype(np.float32) if scores.dtype.itemsize == 2 else scores
    # Subtracting the largest keeps exp in range.
    shares = np.exp(wide - wide.max(axis, keepdims=True))
    shares /= shares.sum(axis, keepdims=True)
    result: Array = shares.astype(scores.dtype, copy=False)
    return result


@dataclass(frozen=True, slots=True)
class _AlongAxis(Builtin):
    """Of the scores ``input`` along ``axis``."""

    input: str
    output: str
    axis: int = -1

    stage: ClassVar[str] = POSTPROCESS

    def fitted(self, variants: Sequence[Sequence[TensorSpec]]) -> Self:
        return replace(self, axis=self.axis_of(self.find(variants[0], self.input), self.axis))


@dataclass(frozen=True, slots=True)
class Softmax(_AlongAxis):
    """``output`` = softmax of ``input`` along ``axis`` (the last)."""

    name: ClassVar[str] = "softmax"

    def tensors(self, others: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        scores = self.find(others, self.input)
        if scores.dtype not in _FLOATS:
            raise BundleError(f"softmax: {scores.name!r} is {scores.dtype}; it needs one of {', '.join(_FLOATS)}")
        return put(others, replace(scores, name=self.output))

    def open(self, directory: Path) -> Callable[[Arrays], Arrays]:  # noqa: ARG002 - nothing to read
        return lambda arrays: {**arrays, self.output: softmax(arrays[self.input], self.axis)}


@dataclass(frozen=True, slots=True)
class Argmax(_AlongAxis):
    """``output`` = i32 index of the largest entry of ``input`` along ``axis`` (the last), which goes."""

    name: ClassVar[str] = "argmax"

    def tensors(self, others: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        scores = self.find(others, self.input)
        if scores.batch_axis is not None and scores.batch_axis > self.axis:
            raise BundleError(f"argmax: the batch of {scores.name!r} must come before axis {self.axis}")
        shape = (*scores.shape[: self.axis], *scores.shape[self.axis + 1 :])
        return put(others, TensorSpec(self.output, "i32", shape, scores.batch_axis))

    def open(self, directory: Path) -> Callable[[Arrays], Arrays]:  # noqa: ARG002 - nothing to read
        return lambda arrays: {**arrays, self.output: arrays[self.input].argmax(self.axis).astype(np.int32)}


@dataclass(frozen=True, slots=True)
class Labels(Builtin):
    """``output`` = the line of ``file`` for each number in ``input``: UTF-8 bytes, padded with zeros to the longest.

    The format has no strings, so text travels as u8 with a last axis more.
    """

    input: str
    output: str
    file: str

    name: ClassVar[str] = "labels"
    stage: ClassVar[str] = POSTPROCESS

    def tensors(self, others: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        ids = self.find(others, self.input)
        if ids.element.numpy.kind not in "iu":
            raise BundleError(f"labels: {ids.name!r} is {ids.dtype}; it needs integers (see argmax)")
        return put(others, TensorSpec(self.output, "u8", (*ids.shape, VARIABLE), ids.batch_axis))

    def files(self) -> tuple[str, ...]:
        return (self.file,)

    def check(self, directory: Path) -> None:
        self._table(directory)

    def open(self, directory: Path) -> Callable[[Arrays], Arrays]:
        table = self._table(directory)

        def labelled(arrays: Arrays) -> Arrays:
            ids = arrays[self.input]
            if ids.size and not (ids.min() >= 0 and ids.max() < len(table)):
                raise OutputError(
                    f"labels: output {self.input!r} has {int(ids.min())} to {int(ids.max())}, {self.file} has "
                    f"{len(table)} lines"
                )
            return {**arrays, self.output: table[ids]}

        return labelled

    def _table(self, directory: Path) -> Array:
        """One zero-padded row per line."""
        try:
            lines = (directory / self.file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BundleError(f"labels: {self.file} cannot be read as UTF-8 text ({type(error).__name__})") from None
        encoded = [line.encode() for line in lines]
        if not encoded or not any(encoded):
            raise BundleError(f"labels: {self.file} is empty; write one label per line")
        table = np.zeros((len(encoded), max(map(len, encoded))), np.uint8)
        for row, label in zip(table, encoded, strict=True):
            row[: len(label)] = np.frombuffer(label, np.uint8)
        return table
