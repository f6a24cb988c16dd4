"""What a folder's contract leaves open, learned by running the model once at convert time.

A nereid contract may leave an output's shape and dtype undeclared, and says nothing about whether rows influence each
other. Both are settled here on made-up input, so that the runtime has nothing to guess: a model whose rows agree
whether they run alone or together may have requests coalesced, any other runs one request per call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from converters import rows
from converters.contract import ONE_NUMBER
from nereid_backend import dtypes
from nereid_backend.engines import Array, Engine, engine_class
from nereid_backend.errors import BundleError, EngineError, InvalidArgument
from nereid_backend.spec import VARIABLE, ModelSpec, TensorSpec

_VARIABLE_SIZES = (2, 3)
_SMALL = 2  # the kind of made-up row around one: valid for logarithms and square roots, too
_ROWS = 3


@dataclass(frozen=True, slots=True)
class OpenOutput:
    """A declared output; ``dtype`` or ``dims`` (without batch) are None when the contract leaves them open."""

    name: str
    dtype: str | None
    dims: tuple[int, ...] | None
    binding: str = ""


@dataclass(frozen=True, slots=True)
class Learned:
    outputs: tuple[TensorSpec, ...]
    coalesce: bool
    notes: tuple[str, ...] = ()

    def complete(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, outputs=self.outputs, coalesce=self.coalesce)


def learn(spec: ModelSpec, directory: Path, outputs: Sequence[OpenOutput], device: str = "cpu") -> Learned:
    """Run ``spec`` (its outputs not yet known) on made-up input on ``device`` and complete ``outputs``.

    Raises BundleError when the model cannot run and something is left open, SignatureError when it cannot be opened.
    """
    # The engine needs the outputs' names only; shapes and dtypes come from the run.
    draft = tuple(TensorSpec(o.name, o.dtype or "f32", o.dims or (), None, o.binding) for o in outputs)
    engine = engine_class(spec.engine).load(replace(spec, outputs=draft, device=device), directory)
    try:
        return try_out(engine, spec, outputs)
    finally:
        engine.close()


def try_out(engine: Engine, spec: ModelSpec, outputs: Sequence[OpenOutput]) -> Learned:
    """``learn`` with an ``engine`` that is open."""
    batched = spec.max_batch_size > 0
    try:
        alone, varied = (_run_once(engine, spec, size) for size in _VARIABLE_SIZES)
    except (EngineError, InvalidArgument) as error:
        if any(o.dtype is None or o.dims is None for o in outputs):
            raise BundleError(
                f"a trial run failed ({error}), and an output is not declared in full; correct the model, or declare "
                "the output's shape and datatype"
            ) from None
        return Learned(
            tuple(_declared(o, batched) for o in outputs),
            False,
            _kept_apart(spec, f"a trial run failed ({error})"),
        )
    if len(alone) != len(outputs):
        raise BundleError(f"the model returns {len(alone)} outputs, the contract declares {len(outputs)}")
    outputs = _one_number_each(engine, spec, outputs, alone)
    specs = tuple(_complete(o, a, v, batched) for o, a, v in zip(outputs, alone, varied, strict=True))
    # A graph of several rows is padded even for a single one.
    size = _rows_to_try(spec)
    if size < 2:
        return Learned(specs, False)
    problem = rows.dependence(engine, spec, size, specs)
    return Learned(specs, problem is None, _kept_apart(spec, problem) if problem else ())


def _run_once(engine: Engine, spec: ModelSpec, variable: int) -> list[Array]:
    """One made-up row, padded to the one size of a model that runs no other; the outputs of that row."""
    size = spec.batch_sizes[0] if spec.batch_sizes else 1
    try:
        row = rows.made_up(spec.inputs, variable, np.random.default_rng(0), _SMALL)
        outputs = engine.run([np.concatenate([array] * size) if size > 1 else array for array in row])
    except (MemoryError, ValueError) as error:
        raise BundleError(f"its shapes are too large for a trial run ({error}); correct the contract") from None
    return [output[:1] if size > 1 and output.shape[:1] == (size,) else output for output in outputs]


def _one_number_each(
    engine: Engine, spec: ModelSpec, outputs: Sequence[OpenOutput], alone: Sequence[Array]
) -> Sequence[OpenOutput]:
    """``outputs`` without dims where [1] stands for one number per row: n rows give a result of shape [n]."""
    size = _rows_to_try(spec)
    doubtful = [o.dims == ONE_NUMBER and a.shape == ONE_NUMBER for o, a in zip(outputs, alone, strict=True)]
    if size < 2 or not any(doubtful):
        return outputs
    row = rows.made_up(spec.inputs, _VARIABLE_SIZES[0], np.random.default_rng(0), _SMALL)
    try:
        several = engine.run([np.concatenate([array] * size) for array in row])
    except (EngineError, InvalidArgument):  # told by the comparison of rows
        return outputs
    return [
        replace(output, dims=()) if doubt and result.shape == (size,) else output
        for output, doubt, result in zip(outputs, doubtful, several, strict=True)
    ]


def _rows_to_try(spec: ModelSpec) -> int:
    if spec.batch_sizes:
        return next((size for size in spec.batch_sizes if size > 1), 1)
    return min(spec.max_batch_size, _ROWS)


def _kept_apart(spec: ModelSpec, why: str) -> tuple[str]:
    if spec.batch_sizes and spec.batch_sizes[0] > spec.max_batch_size:
        raise BundleError(
            f"the model takes exactly {spec.batch_sizes[0]} rows and they cannot be padded ({why}), but the contract's "
            f"max_batch_size is {spec.max_batch_size}; raise it, or export the model with a symbolic first axis"
        )
    return (rows.kept_apart(spec, why),)


def _declared(output: OpenOutput, batched: bool) -> TensorSpec:
    dims = output.dims or ()
    return TensorSpec(
        output.name,
        output.dtype or "f32",
        (VARIABLE, *dims) if batched else dims,
        0 if batched else None,
        output.binding,
    )


def _complete(output: OpenOutput, alone: Array, varied: Array, batched: bool) -> TensorSpec:
    dtype = dtypes.by_numpy(alone.dtype)
    if output.dtype is not None and dtype.token != output.dtype:
        raise BundleError(
            f"output {output.name!r} is {dtype.kserve} in a trial run, the contract says "
            f"{dtypes.element(output.dtype).kserve}; correct data_type"
        )
    if dtype.kserve is None:
        raise BundleError(
            f"output {output.name!r} is {dtype.token}, which has no KServe datatype; cast it in the model"
        )
    shapes = [_row_shape(array.shape, output.dims, batched) for array in (alone, varied)]
    dims = output.dims
    if dims is None:
        if len(shapes[0]) != len(shapes[1]):
            raise BundleError(f"output {output.name!r} changes its rank with its input; declare output_shape")
        dims = tuple(a if a == b else VARIABLE for a, b in zip(*shapes, strict=True))
    for shape in shapes:
        if len(shape) != len(dims) or any(want not in (VARIABLE, got) for want, got in zip(dims, shape, strict=True)):
            raise BundleError(
                f"output {output.name!r} has shape {list(shape)} per row in a trial run, the contract says "
                f"{list(dims)}; correct the contract"
            )
    return _declared(OpenOutput(output.name, dtype.token, dims, output.binding), batched)


def _row_shape(shape: tuple[int, ...], declared: tuple[int, ...] | None, batched: bool) -> tuple[int, ...]:
    """The shape of one row of a one-row run, which may have left the batch axis out."""
    if not batched or (declared is not None and len(shape) == len(declared)):
        return shape
    return shape[1:] if shape[:1] == (1,) else shape
