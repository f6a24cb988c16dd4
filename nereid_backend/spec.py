"""ModelSpec: everything about a model, resolved once at convert time.

``nereid-convert`` writes it as ``1/nereid.json``; the runtime reads nothing else about the model. The
JSON carries its own format version; a key or a version this code does not know is refused, because
guessing would serve a model under another contract than the one that was checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from nereid_backend import dtypes
from nereid_backend.dtypes import DType
from nereid_backend.errors import BundleError, SpecError

FORMAT_VERSION = 1
SPEC_FILE = "nereid.json"
VARIABLE = -1

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
    """One executable file. ``batch_size`` is the size it was compiled for, None when it takes any."""

    file: str
    batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """A safetensors file in program order and the order in which it feeds the program."""

    file: str
    argument_order: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A served model. See the fields for units and meaning.

    ``max_batch_size`` is Triton's: 0 means requests carry their full shape and are never coalesced.
    ``coalesce`` says whether rows of different requests may share one run.
    ``instances`` is the number of processes that serve it, each with one request or batch at a time.
    ``calls`` is None except for a meta model: the contracts of its callees, which are specifications without programs
    and weights.
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
        """What a caller needs to know."""
        return replace(self, programs=(), weights=None)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The compiled sizes, ascending; empty when the executable takes any number of rows."""
        return tuple(sorted(p.batch_size for p in self.programs if p.batch_size is not None))

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
            return _model(raw)
        except SpecError:
            raise
        except (KeyError, TypeError, AttributeError, BundleError) as error:
            raise SpecError(f"{SPEC_FILE} is incomplete or malformed ({error}); convert the bundle again") from None

    @classmethod
    def read(cls, directory: Path) -> ModelSpec:
        """Read ``nereid.json`` of a version directory. Raises SpecError."""
        try:
            return cls.from_json((directory / SPEC_FILE).read_text(encoding="utf-8"))
        except OSError as error:
            raise SpecError(f"cannot read {SPEC_FILE} ({error.strerror}); convert the bundle again") from None
        except UnicodeDecodeError:
            raise SpecError(f"{SPEC_FILE} is not UTF-8 text; convert the bundle again") from None


def _model(raw: Mapping[str, Any]) -> ModelSpec:
    weights, calls = raw.get("weights"), raw.get("calls")
    if weights is not None:
        weights = _strict(Weights, {**weights, "argument_order": tuple(weights["argument_order"])})
    return _strict(
        ModelSpec,
        {
            **raw,
            "inputs": tuple(_tensor(t) for t in raw["inputs"]),
            "outputs": tuple(_tensor(t) for t in raw["outputs"]),
            "programs": tuple(_strict(Program, p) for p in raw["programs"]),
            "weights": weights,
            "calls": None if calls is None else tuple(_model(callee) for callee in calls),
        },
    )


def _tensor(raw: Mapping[str, Any]) -> TensorSpec:
    tensor: TensorSpec = _strict(TensorSpec, {**raw, "shape": tuple(raw["shape"])})
    dtypes.by_token(tensor.dtype)
    return tensor


def _strict(cls: type[_T], raw: Mapping[str, Any]) -> _T:
    unknown = set(raw) - {f.name for f in fields(cls)}  # type: ignore[arg-type]
    if unknown:
        raise SpecError(f"{SPEC_FILE} has unknown keys {sorted(unknown)} in {cls.__name__}; convert the bundle again")
    return cls(**raw)
