"""Whether the rows of a batch are independent, so that rows of different requests may share a run.

Nothing in a file says so: a model that centres its batch, runs a recurrence along axis 0 or branches on ``any()`` has
the same signature as one that does not, and coalescing it would answer silently wrong. So the model is run on made-up
rows of several kinds (small, negative, large, zero as padding is) in many arrangements of one size: the same kernels
run, hence a row's result may not depend on its place or its neighbours. A row that makes no sense to the model, as one
that a mask of zeros hides altogether, may give NaN: then NaN in the same places everywhere, and its neighbours what
they give without it. A model that passes may still depend on them in a way no made-up row meets; its bundle or folder
is then wrong about its batch axis.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import cache

import numpy as np

from nereid_backend.engines import Array, Engine
from nereid_backend.errors import EngineError, InvalidArgument
from nereid_backend.spec import VARIABLE, ModelSpec, TensorSpec

VARIABLE_SIZE = 2
# Which kinds of rows lie beside each other first; the rest is drawn.
_FIRST_ARRANGEMENTS = ((1, 5, 0), (4, 1, 6), (3, 2, 1), (3, 8, 0))
_ARRANGEMENTS = 24
# A slow model gets the first arrangements only.
_ENOUGH_S = 5.0
# Large tensors repeat a pattern of so many values, and so many of a result are compared.
_PATTERN, _COMPARED = 2**16 + 1, 2**20
# Relative to the largest value of a row's result. Within one size only the place in a vector register differs; a run of
# another size may take other kernels, whose rounding a deep model amplifies.
_SAME_SIZE, _OTHER_SIZE = 1e-3, 5e-2

_FLOAT_KINDS = ((0, 0), (0, 1), (1, 0.5), (-1, 0.5), (0, 100), (100, 10), (-100, 10), (2, 0), (1, 0))
"""Mean and spread of each made-up row; the first is what padding looks like, the last a mask that hides nothing."""

KINDS = len(_FLOAT_KINDS)
_PADDING, _ONES = 0, KINDS - 1
_TEXTS = [b"a", b"1", b"0.5", b"two words", "\u00e4".encode()]

Row = list[Array]


def made_up(inputs: Sequence[TensorSpec], variable: int, rng: np.random.Generator, kind: int) -> Row:
    """One row per input, [1, ...], with every variable axis at ``variable``; integers are 0 and 1, valid as indices."""
    mean, spread = _FLOAT_KINDS[kind]
    row = []
    for tensor in inputs:
        shape = [variable if n == VARIABLE else n for n in tensor.at_batch(1)]
        dtype = tensor.element.numpy
        count = min(math.prod(shape), _PATTERN)
        if dtype.kind == "O":
            values = rng.choice(_TEXTS, count).astype(object) if kind else np.full(count, b"", object)
        elif dtype.kind in "biu":
            values = np.full(count, kind == _ONES) if kind in (_PADDING, _ONES) else rng.integers(0, 2, count)
        else:
            values = rng.normal(mean, spread, count)
        row.append(np.resize(values.astype(dtype), shape))
    return row


def dependence(engine: Engine, spec: ModelSpec, size: int, outputs: Sequence[TensorSpec]) -> str | None:
    """Why rows must not share a run, None when nothing speaks against it. ``size`` (>= 2) is one the engine can run."""
    rng = np.random.default_rng(0)
    axes = [tensor.batch_axis or 0 for tensor in outputs]
    pool = [made_up(spec.inputs, VARIABLE_SIZE, rng, kind) for kind in range(KINDS)]
    tried: set[int] = set()
    deadline = time.monotonic() + _ENOUGH_S

    @cache
    def expected(kind: int) -> list[Array]:
        """What a row of ``kind`` gives beside padding, and the padding with it."""
        return _run(engine, spec, [pool[kind]] + [pool[_PADDING]] * (size - 1))

    try:
        if problem := _misshapen(outputs, expected(1), size):
            return problem
        for count in range(_ARRANGEMENTS):
            if count >= len(_FIRST_ARRANGEMENTS) and time.monotonic() > deadline:
                break
            drawn = rng.integers(0, len(pool), size).tolist()
            places = [*_FIRST_ARRANGEMENTS[count], *drawn][:size] if count < len(_FIRST_ARRANGEMENTS) else drawn
            results = _run(engine, spec, [pool[kind] for kind in places])
            for place, kind in enumerate(places):
                if not _agree(_row(results, axes, place), _row(expected(kind), axes, 0), _SAME_SIZE):
                    return "a row gives another result beside other rows"
            tried.update(places)
        if not spec.batch_sizes or 1 in spec.batch_sizes:
            for kind in (1, 2, _ONES):
                beside = _row(expected(kind), axes, 0)
                alone = [a.reshape(b.shape) for a, b in zip(_run(engine, spec, [pool[kind]]), beside, strict=True)]
                if not _agree(alone, beside, _OTHER_SIZE):
                    return "a row gives another result beside other rows than alone"
    except (EngineError, InvalidArgument, ValueError, IndexError) as error:
        return f"several rows at once fail ({error})"
    if not _comparable([_row(expected(kind), axes, 0) for kind in sorted(tried - {_PADDING})]):
        return "the results on made-up input are not finite, so nothing can be compared"
    return None


def kept_apart(spec: ModelSpec, why: str) -> str:
    """The remark on a model whose rows must not share a run."""
    exactly = f", without padding, at exactly {list(spec.batch_sizes)} rows" if spec.batch_sizes else ""
    return f"requests run one by one{exactly}: {why}"


def _run(engine: Engine, spec: ModelSpec, rows: Sequence[Row]) -> list[Array]:
    """The outputs of one run of ``rows``; copies both ways, as a model may write to its input or return it."""
    parts = zip(*rows, strict=True)
    batch = [np.concatenate(arrays, t.batch_axis or 0) for t, arrays in zip(spec.inputs, parts, strict=True)]
    return [np.array(output) for output in engine.run(batch)]


def _row(outputs: Sequence[Array], axes: Sequence[int], place: int) -> list[Array]:
    return [np.take(output, place, axis) for output, axis in zip(outputs, axes, strict=True)]


def _misshapen(outputs: Sequence[TensorSpec], results: Sequence[Array], size: int) -> str | None:
    for tensor, result in zip(outputs, results, strict=True):
        want = tensor.at_batch(size)
        if len(want) != result.ndim or any(w not in (VARIABLE, g) for w, g in zip(want, result.shape, strict=True)):
            return f"{size} rows give an output {tensor.name!r} of shape {list(result.shape)}, not one entry per row"
    return None


def _comparable(results: Sequence[Sequence[Array]]) -> bool:
    """Whether each value of a row's result was a number for some row that was tried, so that an influence would show.

    A value that is the same infinity for every row is the model's own: a constant mask of logits.
    """
    for arrays in zip(*results, strict=True):
        if arrays[0].dtype.kind in "biuO":
            continue
        values = [_sampled(array).astype(np.float64) for array in arrays]
        shown = np.logical_or.reduce([np.isfinite(array) for array in values])
        same = np.logical_and.reduce([array == values[0] for array in values])
        if not (shown | same).all():
            return False
    return True


def _agree(left: Sequence[Array], right: Sequence[Array], tolerance: float) -> bool:
    for whole_a, whole_b in zip(left, right, strict=True):
        a, b = _sampled(whole_a), _sampled(whole_b)
        if a.dtype.kind in "biuO":
            if tolerance == _SAME_SIZE and not np.array_equal(a, b):
                return False
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        largest = np.abs(b[np.isfinite(b)]).max(initial=0.0)
        if not np.allclose(a, b, rtol=tolerance, atol=tolerance * largest, equal_nan=True):
            return False
    return True


def _sampled(array: Array) -> Array:
    """All values, or evenly spaced ones of a large array."""
    step = -(-array.size // _COMPARED) or 1
    return array.reshape(-1)[::step]
