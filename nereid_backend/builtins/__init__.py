"""Hooks that need no code: declared in a manifest under ``nereid:``, resolved at convert time.

A built-in is a frozen dataclass whose fields are its options. At convert time it says which tensors it needs or makes;
at load it opens its files and becomes a function of one request's arrays. Adding one is one file in this package and
one line in ``BUILTINS``. Everything is numpy; a library beyond it is imported in ``open`` only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from nereid_backend.errors import BundleError
from nereid_backend.records import record
from nereid_backend.spec import POSTPROCESS as POSTPROCESS
from nereid_backend.spec import PREPROCESS as PREPROCESS
from nereid_backend.spec import BuiltinSpec, TensorSpec

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


class Builtin:
    """A declared hook; the defaults are those of one without files. Axes are counted on the wire, the slowest first."""

    __slots__ = ()

    name: ClassVar[str]
    stage: ClassVar[str]

    def fitted(self, variants: Sequence[Sequence[TensorSpec]]) -> Self:  # noqa: ARG002
        """The same with the options filled in that the tensors on the executable's side decide. Raises BundleError.

        ``variants`` are those tensors as each variant has them, at least one; they differ in sizes only.
        """
        return self

    def tensors(self, others: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """The tensors on the client's side, given those on the executable's side. Raises BundleError."""
        raise NotImplementedError

    def files(self) -> tuple[str, ...]:
        """Names of the bundle's files that ``open`` reads."""
        return ()

    def check(self, directory: Path) -> None:
        """Raise BundleError for files of the bundle in ``directory`` that cannot be right."""

    def open(self, directory: Path) -> Callable[[Arrays], Arrays]:
        """The function of one request's arrays. Raises BundleError, EngineMissing.

        It gives what the next hook or the executable gets; arrays it is given are read-only. It raises InvalidArgument
        for a client's fault, OutputError for the executable's.
        """
        raise NotImplementedError

    # For the subclasses.

    def find(self, tensors: Sequence[TensorSpec], name: str) -> TensorSpec:
        """The tensor called ``name``. Raises BundleError."""
        for tensor in tensors:
            if tensor.name == name:
                return tensor
        raise BundleError(f"{self.name}: there is no tensor {name!r}, only {[tensor.name for tensor in tensors]}")

    def axis_of(self, tensor: TensorSpec, axis: int) -> int:
        """``axis`` counted from the front. Raises BundleError when ``tensor`` has no such axis, or it is the batch."""
        rank = len(tensor.shape)
        if not -rank <= axis < rank or axis % rank == tensor.batch_axis:
            raise BundleError(
                f"{self.name}: axis {axis} is none of {tensor.name!r}, whose wire shape is {list(tensor.shape)}"
                f"{'' if tensor.batch_axis is None else f' with the batch at {tensor.batch_axis}'}"
            )
        return axis % rank


def put(tensors: Sequence[TensorSpec], *new: TensorSpec) -> tuple[TensorSpec, ...]:
    """``tensors`` with ``new`` ones in place of those of the same name, the others appended."""
    return tuple({tensor.name: tensor for tensor in (*tensors, *new)}.values())


BUILTINS: dict[str, tuple[str, str]] = {
    "add_column": ("nereid_backend.builtins.columns", "AddColumn"),
    "argmax": ("nereid_backend.builtins.classes", "Argmax"),
    "bert_text": ("nereid_backend.builtins.bert_text", "BertText"),
    "detection": ("nereid_backend.builtins.detection", "Detection"),
    "drop_column": ("nereid_backend.builtins.columns", "DropColumn"),
    "labels": ("nereid_backend.builtins.classes", "Labels"),
    "reshape_input": ("nereid_backend.builtins.reshape", "ReshapeInput"),
    "reshape_output": ("nereid_backend.builtins.reshape", "ReshapeOutput"),
    "softmax": ("nereid_backend.builtins.classes", "Softmax"),
    "trim": ("nereid_backend.builtins.trim", "Trim"),
}

# Declared by the writer of repositories, not by manifests.
INTERNAL = {"add_column", "drop_column", "reshape_input", "reshape_output"}


def builtin(spec: BuiltinSpec) -> Builtin:
    """The built-in that ``spec`` declares. Raises BundleError for an unknown name, RecordError for wrong options."""
    entry = BUILTINS.get(spec.name)
    if entry is None:
        raise BundleError(f"unknown built-in {spec.name!r}; known: {', '.join(sorted(set(BUILTINS) - INTERNAL))}")
    cls: type[Builtin] = getattr(importlib.import_module(entry[0]), entry[1])
    return record(cls, spec.options)
