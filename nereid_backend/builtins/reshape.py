"""``reshape_input`` and ``reshape_output``: the same elements in another shape, row by row.

Triton's ``reshape`` of a tensor: clients see its ``dims``, the executable another shape. The reader of Triton models
declares these; manifests have no need of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from nereid_backend.builtins import POSTPROCESS, PREPROCESS, Array, Arrays, Builtin, put
from nereid_backend.spec import VARIABLE, TensorSpec


@dataclass(frozen=True, slots=True)
class _Reshape(Builtin):
    """``before`` becomes ``after``; variable sizes keep their order.

    ``rows``: axis 0 counts rows and is in neither.
    """

    tensor: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    rows: bool

    def tensors(self, others: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        dims = self.before if self.stage == PREPROCESS else self.after
        return put(others, replace(self.find(others, self.tensor), shape=(VARIABLE, *dims) if self.rows else dims))

    def open(self, directory: Path) -> Callable[[Arrays], Arrays]:  # noqa: ARG002 - nothing to read
        return lambda arrays: {**arrays, self.tensor: self._reshaped(arrays[self.tensor])}

    def _reshaped(self, array: Array) -> Array:
        first = 1 if self.rows else 0
        sizes = zip(self.before, array.shape[first:], strict=True)
        variable = iter([size for declared, size in sizes if declared == VARIABLE])
        shape = [next(variable) if size == VARIABLE else size for size in self.after]
        return array.reshape((*array.shape[:first], *shape))


@dataclass(frozen=True, slots=True)
class ReshapeInput(_Reshape):
    """What a client sends, for the executable."""

    name: ClassVar[str] = "reshape_input"
    stage: ClassVar[str] = PREPROCESS


@dataclass(frozen=True, slots=True)
class ReshapeOutput(_Reshape):
    """What the executable gives, for the client."""

    name: ClassVar[str] = "reshape_output"
    stage: ClassVar[str] = POSTPROCESS
