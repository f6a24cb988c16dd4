"""Models that are served by way of ONNX: converted, compared with their source, and only then written."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from converters import durable
from converters.artifact import Artifact
from converters.graph import PLATFORM
from nereid_backend.engines import Array
from nereid_backend.engines.onnx import open_session, ports
from nereid_backend.errors import BundleError

FILE = "model.onnx"
# Relative to a value, and to the median of all: float32 rounds at 1e-7, a tree that went the other way shows.
TOLERANCE = 1e-5
_BATCH = "batch"


def import_converter(name: str, kind: str, extra: str) -> Any:
    """Import a converter's library. Raises BundleError naming the extra that brings it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BundleError(
            f"{kind} models are converted with {name}, which this Python cannot import ({error}); install it with: "
            f"pip install 'nereid-triton[{extra}]'"
        ) from None


def session_of(model: Any) -> Any:
    """A session of an ``onnx.ModelProto``. Raises BundleError subclasses."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / FILE
        path.write_bytes(model.SerializeToString())
        return open_session(path)


def artifact(
    model: Any, outputs: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], notes: Sequence[str]
) -> Artifact:
    """A converted ``onnx.ModelProto`` as an Artifact of the outputs in ``outputs``, renamed and in that order.

    ``outputs`` maps the graph's names to the served ones; ``shapes`` are what a row has in a run, which a converter
    does not always declare.
    """
    graph = model.graph
    for value in graph.input:
        value.type.tensor_type.shape.dim[0].dim_param = _BATCH
    kept = {output.name: output for output in graph.output}
    del graph.output[:]
    for name, served in outputs.items():
        if name != served:
            graph.node.add(op_type="Identity", input=[name], output=[served], name=f"nereid_{served}")
        graph.output.add(name=served, type=kept[name].type)
        shape = graph.output[-1].type.tensor_type.shape
        del shape.dim[:]
        shape.dim.add(dim_param=_BATCH)
        for size in shapes[name]:
            shape.dim.add(dim_value=size)
    return as_declared(model, list(outputs.values()), notes)


def as_declared(model: Any, outputs: Sequence[str], notes: Sequence[str]) -> Artifact:
    """A converted ``onnx.ModelProto`` as an Artifact, its ``outputs`` in that order."""
    by_name = {output.name: output for output in model.graph.output}
    ordered = [by_name[name] for name in outputs]
    del model.graph.output[:]
    model.graph.output.extend(ordered)
    data = model.SerializeToString()
    inputs, found = ports(session_of(model))
    files = {FILE: lambda target: durable.write_bytes(target, data)}
    return Artifact(FILE, "onnx", PLATFORM, None, files, inputs, found, binds_by_name=True, notes=tuple(notes))


def compare(
    session: Any,
    feed: Mapping[str, Array],
    expected: Mapping[str, Array],
    source: str,
    scores: Array | None = None,
    tolerance: float = TOLERANCE,
) -> dict[str, tuple[int, ...]]:
    """Raise BundleError unless ``session`` gives what the source does on ``feed``; the shape of a row of each result.

    ``expected`` is the source's own result by the graph's output names. Whole numbers (labels) must be equal, except
    where the source's two best ``scores`` ([n, classes], or [n] around zero) are equal but for rounding.
    """
    got = dict(zip(expected, session.run(list(expected), dict(feed)), strict=True))
    for name, want in expected.items():
        have = np.asarray(got[name])
        if have.size != want.size or have.shape[:1] != want.shape[:1]:
            raise BundleError(
                f"the ONNX graph gives {name!r} of shape {list(have.shape)} where {source} gives {list(want.shape)}; "
                "nothing was written"
            )
        have, want = (array.reshape(want.shape[0] if want.ndim else 1, -1) for array in (have, want))
        if want.dtype.kind == "f":
            wrong, most = _far_apart(have.astype(np.float64), want.astype(np.float64), tolerance)
        else:
            wrong, most = (have != want).any(axis=1), ""
            if scores is not None:
                wrong &= ~ties(scores)
        if wrong.any():
            raise BundleError(
                f"the converted {name!r} differs from what {source} predicts on {int(wrong.sum())} of {len(want)} "
                f"sample rows{most}; nothing was written: its converter does not represent this model exactly"
            )
    return {name: np.shape(result)[1:] for name, result in got.items()}


def _far_apart(have: Array, want: Array, tolerance: float) -> tuple[Array, str]:
    """[rows] whether a row of ``have`` differs, and by how much the worst does, in words."""
    finite = np.abs(want[np.isfinite(want)])
    scale = np.median(finite) if finite.size else 0.0
    wrong = ~np.isclose(have, want, rtol=tolerance, atol=tolerance * scale, equal_nan=True).all(axis=1)
    return wrong, f", by up to {np.nanmax(np.abs(have - want)[wrong], initial=0):.3g}"


def ties(scores: Array) -> Array:
    """[n] whether a row's two best scores are the same but for rounding."""
    if scores.ndim == 1:
        scores = np.stack([scores, -scores], axis=1)
    if scores.shape[1] < 2:  # a classifier that knows one class
        return np.zeros(len(scores), bool)
    best = np.sort(scores.astype(np.float64), axis=1)[:, -2:]
    tied: Array = best[:, 1] - best[:, 0] <= TOLERANCE * np.abs(best).max(initial=1e-30)
    return tied


def first_line(error: Exception) -> str:
    """The first line of a library's error, at most 200 characters, or its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
