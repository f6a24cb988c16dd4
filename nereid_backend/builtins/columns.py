"""``add_column`` and ``drop_column``: a scalar per row as a column.

Between the processes of one model a tensor with one number per row travels as [rows, 1], because Triton has no rank 0
beside the batch. The writer of repositories declares these; manifests have no need of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from nereid_backend.builtins import POSTPROCESS, PREPROCESS, Arrays, Builtin, put
from nereid_backend.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class AddColumn(Builtin):
    """[rows] of each of ``names`` becomes [rows, 1]."""

    names: tuple[str, ...]

    name: ClassVar[str] = "add_column"
    stage: ClassVar[str] = POSTPROCESS

    def tensors(self, others: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        return put(others, *(replace(t, shape=(*t.shape, 1)) for t in others if t.name in self.names))

    def open(self, directory: Path) -> Callable[[Arrays], Arrays]:  # noqa: ARG002 - nothing to read
        return lambda arrays: {**arrays, **{name: arrays[name][..., None] for name in self.names}}


@dataclass(frozen=True, slots=True)
class DropColumn(Builtin):
    """[rows, 1] of each of ``names`` becomes [rows]."""

    names: tuple[str, ...]

    name: ClassVar[str] = "drop_column"
    stage: ClassVar[str] = PREPROCESS

    def tensors(self, others: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        return put(others, *(replace(t, shape=(*t.shape, 1)) for t in others if t.name in self.names))

    def open(self, directory: Path) -> Callable[[Arrays], Arrays]:  # noqa: ARG002 - nothing to read
        return lambda arrays: {**arrays, **{name: arrays[name][..., 0] for name in self.names}}
