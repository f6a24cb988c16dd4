"""Reader of TensorFlow SavedModel folders, by way of ONNX.

TensorFlow is needed while a model is converted, never while it is served. Its graphs may read and write files when they
run, so a conversion asks for consent first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from converters import by_onnx, rows
from converters.artifact import Artifact
from nereid_backend import dtypes
from nereid_backend.engines import Array
from nereid_backend.errors import BundleError, SignatureError
from nereid_backend.spec import VARIABLE, TensorSpec

EXTRA = "tensorflow"
FILE = "saved_model.pb"
RUNS_CODE = "TensorFlow runs it while it is converted"
DEFAULT_SIGNATURE = "serving_default"
_TAG = "serve"
_OPSET = 17
_BATCH = 4
# Two implementations of every kernel: convolutions and the like differ in the order of their sums.
_TOLERANCE = 1e-3


def read(folder: Path, signature: str) -> Artifact:
    """Read, convert and compare one signature of a SavedModel. Raises SignatureError, BundleError."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    tensorflow = by_onnx.import_converter("tensorflow", "TensorFlow", EXTRA)
    tf2onnx = by_onnx.import_converter("tf2onnx", "TensorFlow", EXTRA)
    try:
        tensorflow.config.set_visible_devices([], "GPU")
        loaded = tensorflow.saved_model.load(str(folder), tags=[_TAG])
    # Damaged files raise whatever their reader stumbles over.
    except Exception as error:
        raise SignatureError(
            f"{FILE}: cannot be loaded by TensorFlow {tensorflow.__version__} with tag {_TAG!r} "
            f"({by_onnx.first_line(error)})"
        ) from error
    if signature not in loaded.signatures:
        known = ", ".join(loaded.signatures) or "none"
        raise BundleError(
            f"the SavedModel has no signature {signature!r}; it has {known}: set signature to one of them"
        )
    function = loaded.signatures[signature]
    _, keywords = function.structured_input_signature
    declared = {name: keywords[name] for name in sorted(keywords)}
    model = _to_onnx(tensorflow, tf2onnx, function, declared)
    session = by_onnx.session_of(model)
    samples = _samples(declared)
    for feed in samples:
        answer = function(**{name: tensorflow.constant(array) for name, array in feed.items()})
        expected = {name: np.asarray(answer[name]) for name in sorted(answer)}
        by_onnx.compare(session, feed, expected, "TensorFlow", tolerance=_TOLERANCE)
    note = f"agrees with TensorFlow on {len(samples)} made-up batches"
    if missing := set(function.structured_outputs) - {output.name for output in model.graph.output}:
        raise BundleError(f"tf2onnx lost the outputs {', '.join(sorted(missing))}; nothing was written")
    return by_onnx.as_declared(model, sorted(function.structured_outputs), [note])


def _to_onnx(tensorflow: Any, tf2onnx: Any, function: Any, declared: Mapping[str, Any]) -> Any:
    def call(*tensors: Any) -> Any:
        return function(**dict(zip(declared, tensors, strict=True)))

    specs = [tensorflow.TensorSpec(spec.shape, spec.dtype, name=name) for name, spec in declared.items()]
    try:
        model, _ = tf2onnx.convert.from_function(
            tensorflow.function(call, input_signature=specs), input_signature=specs, opset=_OPSET
        )
    # Its refusals are of many classes; whichever it is, this model cannot be converted.
    except Exception as error:
        raise BundleError(
            f"tf2onnx {tf2onnx.__version__} cannot convert this model ({type(error).__name__}: "
            f"{by_onnx.first_line(error)})"
        ) from error
    return model


def _samples(declared: Mapping[str, Any]) -> list[dict[str, Array]]:
    """Made-up inputs by name, one batch for each kind of row."""
    specs = []
    for name, spec in declared.items():
        if spec.shape.rank is None:
            raise BundleError(f"input {name!r} has no fixed rank; export the model with one")
        try:
            token = dtypes.by_numpy(np.dtype(spec.dtype.as_numpy_dtype)).token
        except (BundleError, TypeError):
            raise BundleError(f"input {name!r} is {spec.dtype.name}; only tensors of numbers are supported") from None
        shape = tuple(VARIABLE if axis is None else axis for axis in spec.shape.as_list())
        specs.append(TensorSpec(name, token, shape))
    rng = np.random.default_rng(0)
    made = [rows.made_up(specs, _BATCH, rng, kind) for kind in range(rows.KINDS)]
    return [{spec.name: array for spec, array in zip(specs, row, strict=True)} for row in made]
