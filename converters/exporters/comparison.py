"""The proof of an export: the written bundle, run by the engine that serves it, beside the model it comes from."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from converters.bundle import Array
from converters.prepared import Prepared, place
from nereid_backend.engines import engine_class
from nereid_backend.errors import EngineError, ExportError
from nereid_backend.spec import VARIABLE, ModelSpec, TensorSpec

TOLERANCE = {8: 1e-12, 4: 1e-5, 2: 2e-2, 1: 0.25}
"""By the bytes of a floating-point type: the largest difference, relative to the largest value of the output."""

_EXAMPLE_RUNS, _UNSEEN_RUNS = 16, 2
_ODD_SIZE = 3


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: inputs and what the model gives for them, in the order of the bundle. ``what`` is for messages."""

    what: str
    inputs: list[Array]
    expected: list[Array]


def examples_of(spec: ModelSpec, given: Any) -> list[Array]:
    """Examples of the model's types in its order; ``given`` as one array, a sequence or by name. Raises ExportError."""
    names = [tensor.name for tensor in spec.inputs]
    if isinstance(given, Mapping):
        if set(given) != set(names):
            raise ExportError(f"example_inputs are for {sorted(given)}, the model's inputs are {names}")
        given = [given[name] for name in names]
    elif not isinstance(given, tuple | list):
        given = [given]
    if len(given) != len(names):
        raise ExportError(f"there are {len(given)} example_inputs, the model has the inputs {names}")
    return [_example(tensor, np.asarray(array)) for tensor, array in zip(spec.inputs, given, strict=True)]


def _example(tensor: TensorSpec, array: Array) -> Array:
    shape = tensor.shape
    if array.ndim != len(shape) or any(w not in (VARIABLE, g) for w, g in zip(shape, array.shape, strict=True)):
        raise ExportError(
            f"the example of input {tensor.name!r} has shape {list(array.shape)}, the model's is {list(shape)}"
        )
    want = tensor.element.numpy
    if array.dtype != want and not np.can_cast(array.dtype, want, "same_kind"):
        raise ExportError(f"the example of input {tensor.name!r} is {array.dtype}, the model takes {want}")
    return np.ascontiguousarray(array, want)


def sizes_to_try(spec: ModelSpec) -> tuple[int | None, ...]:
    """The batch sizes at which a served model is compared: all it was compiled for, else some up to the largest.

    None alone stands for the examples as they are, for a model without a batch.
    """
    if not spec.max_batch_size:
        return (None,)
    return spec.batch_sizes or tuple(sorted({1, min(_ODD_SIZE, spec.max_batch_size), spec.max_batch_size}))


def trials_of(
    run: Callable[[list[Array]], Sequence[Array]],
    tensors: Sequence[TensorSpec],
    examples: Sequence[Array],
    sizes: Sequence[int | None],
) -> list[Trial]:
    """What the model itself, ``run``, gives on the examples and on rows that nobody has seen, at every batch size."""
    return [
        Trial(what, inputs, list(run(inputs)))
        for size in sizes
        for what, inputs in inputs_to_try(tensors, examples, size)
    ]


def inputs_to_try(
    tensors: Sequence[TensorSpec], examples: Sequence[Array], size: int | None
) -> Iterator[tuple[str, list[Array]]]:
    """The example rows at batch ``size``, repeated where they are too few, and rows that nobody has seen.

    Those lie between the smallest and largest value of the example, so that ids stay ids; a constant example is left
    by about one. None: the examples as they are.
    """
    rng = np.random.default_rng(0)
    rows = rows_of(tensors, examples) if size is not None else 1
    at = "" if size is None else f" at batch size {size}"
    for start in range(0, rows, size or 1)[:_EXAMPLE_RUNS]:
        yield f"the example inputs{at}", _taken(tensors, examples, start, rows, size)
    for _ in range(_UNSEEN_RUNS):
        example = _taken(tensors, examples, 0, rows, size)
        yield f"inputs that were not exported with{at}", [_drawn(array, rng) for array in example]


def rows_of(tensors: Sequence[TensorSpec], examples: Sequence[Array]) -> int:
    """The number of rows that all examples have. Raises ExportError."""
    counts = {t.name: a.shape[t.batch_axis] for t, a in zip(tensors, examples, strict=True) if t.batch_axis is not None}
    if len(set(counts.values())) > 1 or 0 in counts.values():
        raise ExportError(f"the example inputs have {counts} rows along their batch axes; give each the same, not none")
    return next(iter(counts.values()), 1)


def _taken(
    tensors: Sequence[TensorSpec], arrays: Sequence[Array], start: int, rows: int, size: int | None
) -> list[Array]:
    if size is None:
        return list(arrays)
    places = (start + np.arange(size)) % rows
    return [
        array if tensor.batch_axis is None else np.ascontiguousarray(np.take(array, places, tensor.batch_axis))
        for tensor, array in zip(tensors, arrays, strict=True)
    ]


def _drawn(example: Array, rng: np.random.Generator) -> Array:
    """An array like ``example`` with other values of its range."""
    if example.dtype.kind in "biu":
        low, high = (int(example.min()), int(example.max())) if example.size else (0, 0)
        low, high = (low, high) if low < high else (min(low, 0), max(high, 1))
        kind = np.int64 if low < 0 else np.uint64
        return rng.integers(low, high, example.shape, kind, endpoint=True).astype(example.dtype)
    values = example.astype(np.float64)
    finite = values[np.isfinite(values)]
    least, most = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    share = rng.random(example.shape)
    drawn = least * (1 - share) + most * share if least < most else least + rng.normal(size=example.shape)
    return np.asarray(drawn).astype(example.dtype)


def prove(prepared: Prepared, trials: Sequence[Trial], tolerance: float | None) -> dict[str, float]:
    """Run every trial on the executable, without hooks, and give the largest relative difference by output.

    ``tolerance`` is for every floating-point output, None for that of its type. Integers must be equal. Raises
    ExportError naming the output, the inputs and the difference.
    """
    executable = next((stage for stage in prepared.stages if stage.spec.hooks is None), prepared)
    spec = executable.spec
    largest = dict.fromkeys((tensor.name for tensor in spec.outputs), 0.0)
    with tempfile.TemporaryDirectory() as scratch:
        for name, source in executable.files.items():
            place(source, Path(scratch) / name, link=True)
        engine = engine_class(spec.engine).load(spec, Path(scratch))
        try:
            for trial in trials:
                results = engine.run(trial.inputs)
                for tensor, got, want in zip(spec.outputs, results, trial.expected, strict=True):
                    found = difference(tensor, got, want, trial.what, tolerance)
                    largest[tensor.name] = max(largest[tensor.name], found)
        except EngineError as error:
            raise ExportError(f"the bundle does not run: {error}; nothing was written") from error
        finally:
            engine.close()
    return largest


def difference(tensor: TensorSpec, got: Array, want: Array, what: str, tolerance: float | None) -> float:
    """The relative difference of an output on the inputs ``what``. Raises ExportError when it is too large."""
    found, allowed = _difference(got, want), _allowed(tensor, tolerance)
    if not found <= allowed:
        raise ExportError(
            f"output {tensor.name!r} of the bundle differs from the model on {what} by {found:.3g} of its largest "
            f"value, {allowed:.3g} is allowed; nothing was written"
        )
    return found


def _allowed(tensor: TensorSpec, tolerance: float | None) -> float:
    if tensor.element.numpy.kind in "biu":
        return 0.0
    return TOLERANCE[tensor.element.size_bytes] if tolerance is None else tolerance


def _difference(got: Array, want: Array) -> float:
    """The largest difference relative to the largest value; infinite where shapes, types, NaN or infinities differ."""
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return np.inf
    if got.dtype.kind in "biu":
        return 0.0 if np.array_equal(got, want) else np.inf
    a, b = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(a[finite]).all():
        return np.inf
    scale = np.abs(b[finite]).max(initial=0.0)
    error = np.abs(a[finite] - b[finite]).max(initial=0.0)
    return float(error / scale) if scale else float(error)
