"""Reader of XGBoost models (``.json``, ``.ubj``), by way of ONNX.

The files are data: nothing of them is executed. What is served is what XGBoost's scikit-learn interface predicts: up to
``best_iteration`` of a training that stopped early, probabilities and a label for a classifier. Missing is NaN.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from converters import by_onnx, sample_rows
from converters.artifact import Artifact
from converters.sample_rows import Tree
from nereid_backend.engines import Array
from nereid_backend.errors import BundleError, SignatureError, short_repr

EXTRA = "xgboost"
PREDICTION_ONLY_SUFFIX = ".xgb.json"
"""What SnoozeML calls such a file. Its one output is XGBoost's own prediction, which clients of SnoozeML expect."""
_OPSET = 15
_INPUT = "input"
_HEAD_BYTES = 256


def is_model(path: Path) -> bool:
    """Whether a ``.json`` or ``.ubj`` file begins as XGBoost's do, both of which have many other uses."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    return head.lstrip()[:1] == b"{" and b"learner" in head


@dataclass(frozen=True, slots=True)
class Ensemble:
    """A trained model: the first ``rounds`` of ``booster``, which has no names of columns, are served."""

    name: str
    booster: Any
    objective: str
    trees: list[Tree]
    rounds: int
    notes: tuple[str, ...]

    def sample(self, rng: np.random.Generator) -> Array:
        """Rows [n, features]: at thresholds, far out, with missing values."""
        return _rows(self.trees, self.booster.num_features(), rng)

    def predictions(self, served: Collection[str], rows: Array) -> dict[str, Array]:
        """XGBoost's own results, by the names that they are ``served`` under."""
        xgboost = by_onnx.import_converter("xgboost", "XGBoost", EXTRA)
        data, span = xgboost.DMatrix(rows, missing=np.nan), (0, self.rounds)
        predicted = np.asarray(self.booster.predict(data, iteration_range=span))
        if "label" not in served:
            return {"output": predicted}
        if self.objective == "multi:softmax":
            margins = np.asarray(self.booster.predict(data, iteration_range=span, output_margin=True))
            powers = np.exp(margins - margins.max(axis=1, keepdims=True))
            return {"probabilities": powers / powers.sum(axis=1, keepdims=True), "label": predicted.astype(np.int64)}
        if predicted.ndim == 1:
            predicted = np.stack([1 - predicted, predicted], axis=1)
        return {"probabilities": predicted, "label": predicted.argmax(axis=1)}


def read(path: Path) -> Artifact:
    """Read, convert and compare a model. Raises SignatureError, BundleError."""
    xgboost = by_onnx.import_converter("xgboost", "XGBoost", EXTRA)
    booster = xgboost.Booster()
    try:
        booster.load_model(str(path))
        learner = _learner(booster)
    except (xgboost.core.XGBoostError, ValueError, KeyError, TypeError) as error:
        raise SignatureError(
            f"{path.name}: is not a model that XGBoost {xgboost.__version__} can load ({_first_line(error)}); save it "
            "with save_model"
        ) from None
    source = _ensemble(booster, learner, path.name)
    return convert(source, prediction_only=path.name.endswith(PREDICTION_ONLY_SUFFIX))


def ensemble(booster: Any, name: str) -> Ensemble:
    """A trained ``xgboost.Booster``, which stays as it is; ``name`` is for messages. Raises BundleError."""
    xgboost = by_onnx.import_converter("xgboost", "XGBoost", EXTRA)
    try:
        copy = booster.copy()
        return _ensemble(copy, _learner(copy), name)
    except xgboost.core.XGBoostError as error:
        raise BundleError(f"{name}: XGBoost cannot save this model ({_first_line(error)}); train it first") from error


def _learner(booster: Any) -> Mapping[str, Any]:
    learner: Mapping[str, Any] = json.loads(bytes(booster.save_raw("json")))["learner"]
    return learner


def _ensemble(booster: Any, learner: Mapping[str, Any], name: str) -> Ensemble:
    sample_rows.check_columns(name, booster.num_features())
    trees = _trees(name, learner, booster.num_features())
    notes = []
    if booster.feature_names:
        notes.append(f"the columns of {_INPUT!r} are {', '.join(booster.feature_names)}")
        booster.feature_names = booster.feature_types = None
    total = booster.num_boosted_rounds()
    used = _rounds_used(name, booster.attr("best_iteration"), total)
    if used < total:
        notes.append(f"the first {used} of {total} rounds are served: training stopped early")
    return Ensemble(name, booster, learner["objective"]["name"], trees, used, tuple(notes))


def convert(source: Ensemble, tolerance: float = by_onnx.TOLERANCE, *, prediction_only: bool = False) -> Artifact:
    """Convert and compare. Raises BundleError.

    ``prediction_only``: one ``output`` f32 [n, k] with what ``Booster.predict`` gives, [n, 1] where that is [n].
    """
    onnxmltools = by_onnx.import_converter("onnxmltools", "XGBoost", EXTRA)
    booster = source.booster
    served = booster[: source.rounds] if source.rounds < booster.num_boosted_rounds() else booster.copy()
    if source.objective == "multi:softmax":  # the same trees; its converter would give margins for probabilities
        served.set_param({"objective": "multi:softprob"})
    model = _convert(onnxmltools, served, source.name, source.objective)
    session = by_onnx.session_of(model)
    present = {output.name for output in session.get_outputs()}
    outputs: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    outputs = {"probabilities": "probabilities", "label": "label"} if "label" in present else {"variable": "output"}
    rows = source.sample(np.random.default_rng(0))
    by_name = source.predictions(outputs.values(), rows)
    expected = {output: by_name[name] for output, name in outputs.items()}
    scores = expected.get("probabilities")
    shapes = by_onnx.compare(session, {_INPUT: rows}, expected, f"XGBoost ({source.objective})", scores, tolerance)
    compared = f"agrees with XGBoost on {len(rows)} sample rows, at thresholds and with missing values"
    if prediction_only and scores is not None:
        outputs, shapes = _prediction(model.graph, source.objective, shapes)
    return by_onnx.artifact(model, outputs, shapes, [*source.notes, compared])


def _prediction(
    graph: Any, objective: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Mapping[str, str], Mapping[str, tuple[int, ...]]]:
    """The output of a classifier's ``graph`` that is XGBoost's prediction, added to it where there is none; its shape.

    That is the class for multi:softmax and the probability of the second one of two classes.
    """
    from onnx import TensorProto, helper

    if objective == "multi:softprob":
        return {"probabilities": "output"}, shapes
    name, index = "nereid_prediction", "nereid_prediction_index"
    # The axis that Unsqueeze adds, or the class that Gather takes.
    graph.initializer.append(helper.make_tensor(index, TensorProto.INT64, [1], [1]))
    if objective == "multi:softmax":
        graph.node.append(helper.make_node("Cast", ["label"], ["nereid_class"], to=TensorProto.FLOAT))
        graph.node.append(helper.make_node("Unsqueeze", ["nereid_class", index], [name]))
    else:
        graph.node.append(helper.make_node("Gather", ["probabilities", index], [name], axis=1))
    graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return {name: "output"}, {name: (1,)}


def _rounds_used(name: str, best_iteration: str | None, total: int) -> int:
    if best_iteration is None:
        return total
    if not (best_iteration.isascii() and best_iteration.isdecimal() and len(best_iteration) < 10):
        raise SignatureError(
            f"{name}: best_iteration is {short_repr(best_iteration)}, no number of a round; train again"
        )
    return min(int(best_iteration) + 1, total)


def _convert(onnxmltools: Any, booster: Any, name: str, objective: str) -> Any:
    from onnxmltools.convert.common.data_types import FloatTensorType

    types = [(_INPUT, FloatTensorType([None, booster.num_features()]))]
    try:
        return onnxmltools.convert_xgboost(booster, initial_types=types, target_opset=_OPSET)
    # Its refusals are of many classes; whichever it is, this model cannot be converted.
    except Exception as error:
        raise BundleError(
            f"{name}: onnxmltools {onnxmltools.__version__} cannot convert this model (objective {objective}: "
            f"{type(error).__name__}: {_first_line(error)})"
        ) from error


def _trees(name: str, learner: Mapping[str, Any], features: int) -> list[Tree]:
    """The trees of a model. Raises BundleError for what ONNX cannot represent exactly."""
    booster = learner["gradient_booster"]
    if booster.get("name") != "gbtree":
        raise BundleError(f"{name}: has booster {booster.get('name')!r}; only gbtree can be converted exactly")
    trees = []
    for raw in booster["model"]["trees"]:
        if any(raw.get("split_type", ())):
            raise BundleError(
                f"{name}: splits on categories, which cannot be converted exactly; encode them as numbers"
            )
        if int(raw["tree_param"].get("size_leaf_vector", "1")) > 1:
            raise BundleError(f"{name}: has trees of several outputs, which cannot be converted; train one per output")
        left, right, split = (np.array(raw[key]) for key in ("left_children", "right_children", "split_indices"))
        looked_at = split[left >= 0]
        if max(left.max(), right.max()) >= len(left) or not ((looked_at >= 0) & (looked_at < features)).all():
            raise SignatureError(f"{name}: has a tree that points outside itself or its columns; save it again")
        trees.append(
            Tree(
                left,
                right,
                split,
                sample_rows.largest_float32_below(np.array(raw["split_conditions"], np.float32)),
            )
        )
    return trees


def _rows(trees: list[Tree], features: int, rng: np.random.Generator) -> Array:
    edges = sample_rows.edges_by_feature(trees, features)
    centre = np.array([e.mean() if len(e) else 0 for e in edges])
    spread = np.array([e.std() + 1 if len(e) else 1 for e in edges])
    drawn = sample_rows.drawn(centre, spread, edges, rng)
    at_thresholds = sample_rows.at_thresholds(trees, drawn, rng)
    return np.concatenate([drawn, sample_rows.with_missing(drawn, rng), at_thresholds])


def _first_line(error: Exception) -> str:
    # XGBoost's messages begin with the time and a place in its source, and go on with a stack.
    return re.sub(r"^(\[[\d:]+\] )?(\S*/\S+:\d+: )?", "", by_onnx.first_line(error))
