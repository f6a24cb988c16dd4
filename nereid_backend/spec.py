"""ModelSpec: everything about a model, resolved once at convert time.

``nereid-convert`` writes it as ``1/nereid.json``; the runtime reads nothing else about the model. The
JSON carries its own format version; a key or a version this code does not know is refused, because
guessing would serve a model under another contract than the one that was checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nereid_backend import dtypes
from nereid_backend.dtypes import DType
from nereid_backend.errors import BundleError, RecordError, SpecError
from nereid_backend.records import mismatch, record

FORMAT_VERSION = 1
SPEC_FILE = "nereid.json"
VARIABLE = -1
PREPROCESS, POSTPROCESS = "preprocess", "postprocess"
MAX_SIZE = 2**31 - 1
"""The largest dimension or batch: a batch size is an int32 in Triton's configuration."""

Variant = tuple[int, ...]
"""Sizes of every variable input axis (``ModelSpec.variable_axes``); ``()`` where programs take any size there."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One named tensor as the executable sees it, in wire order (row-major, slowest axis first).

    ``shape`` holds the batch axis and every variable axis as -1. ``binding`` is the tensor's name inside
    the artifact when that differs from the name on the wire (an ONNX graph's own name).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    batch_axis: int | None = None
    binding: str = ""

    @property
    def element(self) -> DType:
        return dtypes.element(self.dtype)

    @property
    def artifact_name(self) -> str:
        return self.binding or self.name

    @property
    def row_shape(self) -> tuple[int, ...]:
        """``shape`` without the batch axis."""
        if self.batch_axis is None:
            return self.shape
        return self.shape[: self.batch_axis] + self.shape[self.batch_axis + 1 :]

    def at_batch(self, size: int) -> tuple[int, ...]:
        """``shape`` with the batch axis set to ``size``."""
        if self.batch_axis is None:
            return self.shape
        return (*self.shape[: self.batch_axis], size, *self.shape[self.batch_axis + 1 :])


def variable_axes(tensors: Sequence[TensorSpec]) -> tuple[tuple[int, int], ...]:
    """(tensor, axis) of every variable axis but the batch, in their order and wire order."""
    return tuple(
        (index, axis)
        for index, tensor in enumerate(tensors)
        for axis, size in enumerate(tensor.shape)
        if size == VARIABLE and axis != tensor.batch_axis
    )


@dataclass(frozen=True, slots=True)
class Program:
    """One executable file. ``batch_size`` is the size it was compiled for, None when it takes any.

    ``variant`` holds the sizes it was compiled for of the variable input axes.
    """

    file: str
    batch_size: int | None = None
    variant: Variant = ()


@dataclass(frozen=True, slots=True)
class Weights:
    """A safetensors file in program order and the order in which it feeds the program."""

    file: str
    argument_order: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Script:
    """A program of the user's, run once per request (:mod:`nereid_backend.scripts`).

    ``children`` run at a time, more wait. ``preload`` names what a warm worker imports; empty starts an interpreter per
    request. ``any_dtype``: a flat contract's datatype does not bind what the program writes.
    """

    children: int
    time_limit_s: int
    any_dtype: bool
    preload: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker directory of SnoozeML (:mod:`nereid_backend.snooze`): a class that loads once and answers many calls.

    ``raw``: its tensors are flat arrays of the standard library, not numpy's. ``python`` is an interpreter of the
    user's own; empty: that of ``requirements.txt``. ``environment`` is added to the variables it runs with.
    """

    entrypoint: str
    class_name: str
    raw: bool
    python: str
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class BuiltinSpec:
    """A declared built-in hook: its name in :mod:`nereid_backend.builtins` and its options, resolved."""

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Hooks:
    """What is done with each request around the executable, and the tensors clients see because of it.

    In the order they run: the preprocess of the bundle's Python file, ``preprocess``, the executable, ``postprocess``,
    the postprocess of the Python file. ``code`` names those of the Python file that run.
    """

    client_inputs: tuple[TensorSpec, ...]
    client_outputs: tuple[TensorSpec, ...]
    preprocess: tuple[BuiltinSpec, ...] = ()
    postprocess: tuple[BuiltinSpec, ...] = ()
    code: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A served model. See the fields for units and meaning.

    ``inputs`` and ``outputs`` are the executable's; clients see those of ``hooks`` instead, where there are any.

    ``max_batch_size`` is Triton's: 0 means requests carry their full shape, one to a call.
    ``coalesce`` says whether the rows of a run are independent: requests may then share it and be padded.
    ``instances`` is the number of processes that serve it, each with one request or batch at a time.
    ``calls`` is None except for a meta model: the contracts of its callees.
    ``stages`` are the contracts of the models an ensemble runs in order: hooks in processes of their own.
    ``batch_may_be_omitted`` is the nereid folder rule: an output of a one-row run may lack the batch axis.
    """

    name: str
    engine: str
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    programs: tuple[Program, ...]
    weights: Weights | None = None
    max_batch_size: int = 0
    coalesce: bool = False
    batch_may_be_omitted: bool = False
    device: str = "cpu"
    threads: int | None = None
    instances: int = 1
    calls: tuple[ModelSpec, ...] | None = None
    hooks: Hooks | None = None
    stages: tuple[ModelSpec, ...] = ()
    script: Script | None = None
    worker: Worker | None = None

    @property
    def artifacts(self) -> tuple[str, ...]:
        """The files its engine reads."""
        return (*(p.file for p in self.programs), *((self.weights.file,) if self.weights else ()))

    @property
    def client_inputs(self) -> tuple[TensorSpec, ...]:
        """What requests carry."""
        return self.inputs if self.hooks is None else self.hooks.client_inputs

    @property
    def client_outputs(self) -> tuple[TensorSpec, ...]:
        """What responses carry."""
        return self.outputs if self.hooks is None else self.hooks.client_outputs

    @property
    def runs_code(self) -> bool:
        """Whether code of its bundle or folder runs with it."""
        programs = (self.calls, self.script, self.worker)
        return any(program is not None for program in programs) or (self.hooks is not None and bool(self.hooks.code))

    @property
    def contract(self) -> ModelSpec:
        """What a caller needs to know: all but hooks, programs and weights."""
        return replace(
            self,
            inputs=self.client_inputs,
            outputs=self.client_outputs,
            hooks=None,
            programs=(),
            weights=None,
            stages=(),
        )

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The compiled sizes, ascending; empty when the executable takes any number of rows."""
        return tuple(sorted({p.batch_size for p in self.programs if p.batch_size is not None}))

    @property
    def variants(self) -> tuple[Variant, ...]:
        """What programs were compiled for; ``((),)`` when they take any size of the variable axes."""
        return tuple(dict.fromkeys(p.variant for p in self.programs)) or ((),)

    @property
    def variable_axes(self) -> tuple[tuple[int, int], ...]:
        return variable_axes(self.inputs)

    def at_variant(self, variant: Variant) -> ModelSpec:
        """The model of one variant alone: its programs, the variable input axes fixed to its sizes."""
        if not variant:
            return self
        shapes = [list(tensor.shape) for tensor in self.inputs]
        for (index, axis), size in zip(self.variable_axes, variant, strict=True):
            shapes[index][axis] = size
        return replace(
            self,
            inputs=tuple(replace(t, shape=tuple(shape)) for t, shape in zip(self.inputs, shapes, strict=True)),
            programs=tuple(replace(p, variant=()) for p in self.programs if p.variant == variant),
        )

    def is_scalar(self, tensor: TensorSpec) -> bool:
        """Whether ``tensor`` has no dimension beside Triton's batch; Triton has no rank 0, so it travels as [1]."""
        return not (tensor.row_shape if self.max_batch_size else tensor.shape)

    def dims(self, tensor: TensorSpec) -> tuple[int, ...]:
        """``dims`` of ``tensor`` in config.pbtxt: without the batch axis when Triton batches."""
        return (tensor.row_shape if self.max_batch_size else tensor.shape) or (1,)

    def to_json(self) -> str:
        return json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ModelSpec:
        """Parse ``to_json``'s text. Raises SpecError for anything else."""
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"{SPEC_FILE} is not JSON ({error}); convert the bundle again") from None
        if not isinstance(raw, dict):
            raise SpecError(
                f"{SPEC_FILE} must hold one JSON object, got {type(raw).__name__}; convert the bundle again"
            )
        version = raw.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise SpecError(
                f"{SPEC_FILE} has format_version {version!r}, this runtime reads {FORMAT_VERSION}; "
                "convert the bundle again with the installed version"
            )
        try:
            spec = record(cls, raw)
            _check(spec)
        except RecordError as error:
            raise SpecError(f"{SPEC_FILE} is incomplete or malformed ({error}); convert the bundle again") from None
        return spec

    @classmethod
    def read(cls, directory: Path) -> ModelSpec:
        """Read ``nereid.json`` of a version directory. Raises SpecError."""
        try:
            return cls.from_json((directory / SPEC_FILE).read_text(encoding="utf-8"))
        except OSError as error:
            raise SpecError(f"cannot read {SPEC_FILE} ({error.strerror}); convert the bundle again") from None
        except UnicodeDecodeError:
            raise SpecError(f"{SPEC_FILE} is not UTF-8 text; convert the bundle again") from None


def _check(spec: ModelSpec) -> None:
    """What the types cannot say. Raises RecordError, SpecError."""
    for tensor in (*spec.inputs, *spec.outputs, *spec.client_inputs, *spec.client_outputs):
        try:
            dtypes.element(tensor.dtype)
        except BundleError as error:
            raise SpecError(f"{SPEC_FILE}: tensor {tensor.name!r}: {error}; convert the bundle again") from None
        if not all(VARIABLE <= size <= MAX_SIZE for size in tensor.shape):
            raise mismatch(f"shape of {tensor.name!r}", f"of sizes from -1 to {MAX_SIZE}", tensor.shape)
        if tensor.batch_axis is not None and not 0 <= tensor.batch_axis < len(tensor.shape):
            raise mismatch(f"batch_axis of {tensor.name!r}", f"below {len(tensor.shape)}", tensor.batch_axis)
    if not 0 <= spec.max_batch_size <= MAX_SIZE:
        raise mismatch("max_batch_size", f"from 0 to {MAX_SIZE}", spec.max_batch_size)
    variable = len(spec.variable_axes)
    for program in spec.programs:
        if program.batch_size is not None and not 1 <= program.batch_size <= MAX_SIZE:
            raise mismatch(f"batch_size of {program.file!r}", f"from 1 to {MAX_SIZE}", program.batch_size)
        if len(program.variant) not in {0, variable} or bool(program.variant) != bool(spec.programs[0].variant):
            raise mismatch(f"variant of {program.file!r}", f"{variable} sizes, as of every program", program.variant)
