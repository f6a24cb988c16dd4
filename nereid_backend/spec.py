"""ModelSpec: everything about a model, resolved once at convert time.

``nereid-convert`` writes it as ``1/nereid.json``; the runtime reads nothing else about the model. The
JSON carries its own format version; a key or a version this code does not know is refused, because
guessing would serve a model under another contract than the one that was checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from nereid_backend import dtypes
from nereid_backend.dtypes import DType
from nereid_backend.errors import BundleError, SpecError, short_repr

FORMAT_VERSION = 1
SPEC_FILE = "nereid.json"
VARIABLE = -1
MAX_SIZE = 2**31 - 1
"""The largest dimension or batch: a batch size is an int32 in Triton's configuration."""

Variant = tuple[int, ...]
"""Sizes of every variable input axis (``ModelSpec.variable_axes``); ``()`` where programs take any size there."""

_T = TypeVar("_T")


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
        return dtypes.by_token(self.dtype)

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
class ModelSpec:
    """A served model. See the fields for units and meaning.

    ``max_batch_size`` is Triton's: 0 means requests carry their full shape, one to a call.
    ``coalesce`` says whether the rows of a run are independent: requests may then share it and be padded.
    ``instances`` is the number of processes that serve it, each with one request or batch at a time.
    ``calls`` is None except for a meta model: the contracts of its callees.
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

    @property
    def contract(self) -> ModelSpec:
        """What a caller needs to know: all but programs and weights."""
        return replace(self, programs=(), weights=None)

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
        """(input, axis) of every variable input axis but the batch, in input and wire order."""
        return tuple(
            (index, axis)
            for index, tensor in enumerate(self.inputs)
            for axis, size in enumerate(tensor.shape)
            if size == VARIABLE and axis != tensor.batch_axis
        )

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
        spec = _build(cls, raw, "")
        _check(spec)
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


# Reading JSON by the annotations of the dataclasses above.


def _malformed(where: str, expected: str, got: Any) -> SpecError:
    return SpecError(
        f"{SPEC_FILE} is incomplete or malformed ({where or 'the specification'} must be {expected}, got "
        f"{short_repr(got)}); convert the bundle again"
    )


def _build(cls: type[_T], raw: Any, where: str) -> _T:
    if not isinstance(raw, Mapping):
        raise _malformed(where, "an object", raw)
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    if unknown := set(raw) - set(known):
        raise SpecError(f"{SPEC_FILE} has unknown keys {sorted(unknown)} in {cls.__name__}; convert the bundle again")
    for name, field in known.items():
        if field.default is MISSING and name not in raw:
            raise SpecError(
                f"{SPEC_FILE} is incomplete or malformed ({cls.__name__} has no {name!r}); convert the bundle again"
            )
    kinds = get_type_hints(cls)
    return cls(**{name: _value(kinds[name], value, f"{where}.{name}".lstrip(".")) for name, value in raw.items()})


def _value(kind: Any, raw: Any, where: str) -> Any:
    """``raw`` as the annotated ``kind``: a dataclass, a tuple of one kind, a kind or None, a scalar."""
    if is_dataclass(kind):
        return _build(kind, raw, where)  # type: ignore[arg-type]
    inner, *_ = (*get_args(kind), kind)
    if get_origin(kind) is tuple:
        if not isinstance(raw, list):
            raise _malformed(where, "a list", raw)
        return tuple(_value(inner, item, f"{where}[{index}]") for index, item in enumerate(raw))
    if isinstance(kind, UnionType):
        return None if raw is None else _value(inner, raw, where)
    if type(raw) is not kind:  # True is no number here
        raise _malformed(where, f"of type {kind.__name__}", raw)
    return raw


def _check(spec: ModelSpec) -> None:
    """What the types cannot say. Raises SpecError."""
    for tensor in (*spec.inputs, *spec.outputs):
        try:
            dtypes.by_token(tensor.dtype)
        except BundleError as error:
            raise SpecError(f"{SPEC_FILE}: tensor {tensor.name!r}: {error}; convert the bundle again") from None
        if not all(VARIABLE <= size <= MAX_SIZE for size in tensor.shape):
            raise _malformed(f"shape of {tensor.name!r}", f"of sizes from -1 to {MAX_SIZE}", tensor.shape)
        if tensor.batch_axis is not None and not 0 <= tensor.batch_axis < len(tensor.shape):
            raise _malformed(f"batch_axis of {tensor.name!r}", f"below {len(tensor.shape)}", tensor.batch_axis)
    if not 0 <= spec.max_batch_size <= MAX_SIZE:
        raise _malformed("max_batch_size", f"from 0 to {MAX_SIZE}", spec.max_batch_size)
    variable = len(spec.variable_axes)
    for program in spec.programs:
        if program.batch_size is not None and not 1 <= program.batch_size <= MAX_SIZE:
            raise _malformed(f"batch_size of {program.file!r}", f"from 1 to {MAX_SIZE}", program.batch_size)
        if len(program.variant) not in {0, variable} or bool(program.variant) != bool(spec.programs[0].variant):
            raise _malformed(f"variant of {program.file!r}", f"{variable} sizes, as of every program", program.variant)
