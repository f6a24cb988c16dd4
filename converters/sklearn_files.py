"""Reader of scikit-learn models (``.skops``, ``.joblib``, ``.pkl``), by way of ONNX.

A pickle runs what its author wrote while it is read, so it is opened only when that was allowed. skops files are data;
types that skops does not trust need the same consent.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from converters import by_onnx, sample_rows
from converters.artifact import Artifact
from converters.sample_rows import Tree
from nereid_backend.engines import Array
from nereid_backend.errors import BundleError, SignatureError

EXTRA = "sklearn"
_OPSET = {"": 17, "ai.onnx.ml": 3}
_INPUT = "input"
_FLOAT, _INT_ATTRIBUTE = 1, 2  # TensorProto.FLOAT, AttributeProto.INT
# What skl2onnx calls a result -> what it is served under -> which method of the model it is.
_SERVED = {"probabilities": "probabilities", "label": "label", "variable": "output"}
_METHODS = {"probabilities": "predict_proba", "label": "predict", "output": "predict"}


def read_skops(path: Path, *, allow_code: bool) -> Artifact:
    """Read a skops file. Raises BundleError, SignatureError."""
    by_onnx.import_converter("sklearn", "scikit-learn", EXTRA)
    skops = by_onnx.import_converter("skops.io", "skops", EXTRA)
    try:
        untrusted = skops.get_untrusted_types(file=path)
        if untrusted and not allow_code:
            raise BundleError(
                f"{path.name} holds types that skops does not trust ({', '.join(sorted(untrusted)[:5])}); if you do, "
                "allow it with --allow-code"
            )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = skops.load(path, trusted=untrusted)
    except BundleError:
        raise
    # A damaged archive raises whatever its reader stumbles over.
    except Exception as error:
        raise SignatureError(
            f"{path.name}: is not a skops file that can be read ({by_onnx.first_line(error)})"
        ) from error
    return convert(model, path.name, _version_note(caught))


def read_pickle(path: Path) -> Artifact:
    """Read a pickle, which runs code from it. Raises BundleError, SignatureError."""
    by_onnx.import_converter("sklearn", "scikit-learn", EXTRA)
    joblib = by_onnx.import_converter("joblib", "scikit-learn", EXTRA)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = joblib.load(path)
    # Whatever the code in it does, this one model cannot be converted.
    except Exception as error:
        raise SignatureError(
            f"{path.name}: is not a pickle that this Python can read ({type(error).__name__}: "
            f"{by_onnx.first_line(error)})"
        ) from error
    return convert(model, path.name, _version_note(caught))


def convert(model: Any, name: str, notes: Sequence[str] = (), tolerance: float = by_onnx.TOLERANCE) -> Artifact:
    """Convert to float32, or to float64 where only that agrees with the model within ``tolerance``.

    ``name`` is for messages. The model stays as it is. Raises BundleError.
    """
    skl2onnx = by_onnx.import_converter("skl2onnx", "scikit-learn", EXTRA)
    features = getattr(model, "n_features_in_", None)
    if not isinstance(features, int) or not hasattr(model, "fit"):
        raise BundleError(
            f"{name}: holds {type(model).__name__}, not a fitted scikit-learn model of a table of numbers"
        )
    sample_rows.check_columns(name, features)
    with np.errstate(all="ignore"), warnings.catch_warnings(), _convertible(last_step(model)):
        warnings.simplefilter("ignore")
        problems = []
        for dtype in (np.float32, np.float64):
            try:
                rows = sample(model, name, dtype, np.random.default_rng(0))
                graph = _to_onnx(skl2onnx, model, features, dtype)
                outputs = _outputs(model, graph, name)
                by_name = predictions(model, outputs.values(), rows, name)
                expected = {output: by_name[served] for output, served in outputs.items()}
                session, source = by_onnx.session_of(graph), type(last_step(model)).__name__
                shapes = by_onnx.compare(session, {_INPUT: rows}, expected, source, scores(model, rows), tolerance)
            except BundleError as error:
                problems.append(error)
                continue
            notes = [*notes, *_column_notes(model), *_class_notes(model)]
            if dtype is np.float64:
                notes.append("takes FP64: with float32 it would not agree")
            notes.append(f"agrees with scikit-learn on {len(rows)} sample rows")
            return by_onnx.artifact(graph, outputs, shapes, notes)
    raise problems[0]


@contextmanager
def _convertible(step: Any) -> Iterator[None]:
    """Without an attribute of voting which shapes what is not served, and which skl2onnx refuses."""
    before = getattr(step, "flatten_transform", None)
    if before is None:
        yield
        return
    step.flatten_transform = False
    try:
        yield
    finally:
        step.flatten_transform = before


def _to_onnx(skl2onnx: Any, model: Any, features: int, dtype: Any) -> Any:
    from skl2onnx.common.data_types import DoubleTensorType, FloatTensorType

    kind = FloatTensorType if dtype is np.float32 else DoubleTensorType
    types = [(_INPUT, kind([None, features]))]
    # Otherwise probabilities are a list of dicts; a few classifiers do not know the option.
    options = {id(model): {"zipmap": False}} if hasattr(model, "classes_") else None
    try:
        try:
            graph = skl2onnx.convert_sklearn(model, initial_types=types, options=options, target_opset=_OPSET)
        except NameError:
            graph = skl2onnx.convert_sklearn(model, initial_types=types, target_opset=_OPSET)
    # Its refusals are of many classes; whichever it is, this model cannot be converted.
    except Exception as error:
        raise BundleError(
            f"skl2onnx {skl2onnx.__version__} cannot convert {type(last_step(model)).__name__} "
            f"({type(error).__name__}: {by_onnx.first_line(error)})"
        ) from error
    _correct_trees(graph, [tree for tree, _ in _trees(model)])
    if dtype is np.float64:
        _feed_trees_float32(graph)
    return graph


def _feed_trees_float32(graph: Any) -> None:
    """Round to float32 in front of trees, as scikit-learn does; ONNX Runtime's trees of doubles give floats, too."""
    nodes = []
    for node in graph.graph.node:
        if node.op_type.startswith("TreeEnsemble"):
            rounded = f"{node.input[0]}_rounded_for_{node.name}"
            cast = type(node)(op_type="Cast", input=[node.input[0]], output=[rounded], name=rounded)
            cast.attribute.add(name="to", type=_INT_ATTRIBUTE, i=_FLOAT)
            node.input[0] = rounded
            nodes.append(cast)
            for output in graph.graph.output:
                if node.op_type == "TreeEnsembleRegressor" and output.name in node.output:
                    output.type.tensor_type.elem_type = _FLOAT
        nodes.append(node)
    nodes = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del graph.graph.node[:]
    graph.graph.node.extend(nodes)


def _correct_trees(graph: Any, trees: list[Tree]) -> None:
    """Let values that are missing or at a threshold go where the trees send them.

    skl2onnx leaves the first out and rounds thresholds of float64 to the nearest float32, which may be above. Some
    ensembles become a node for each of their models: which tree is meant shows in its shape and thresholds.
    """
    left_over = list(trees)
    for node in graph.graph.node:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if "nodes_treeids" not in attributes:
            continue
        tree_ids = np.array(attributes["nodes_treeids"].ints)
        goes_left, thresholds = np.zeros(len(tree_ids), np.int64), _thresholds(attributes)
        for number in dict.fromkeys(tree_ids.tolist()):
            of_tree = tree_ids == number
            places = np.array(attributes["nodes_nodeids"].ints)[of_tree]
            below = np.array(attributes["nodes_truenodeids"].ints)[of_tree]
            for index, tree in enumerate(left_over):
                if _is_tree(tree, places, below, thresholds[of_tree]):
                    thresholds[of_tree] = np.where(tree.left[places] < 0, thresholds[of_tree], tree.edge[places])
                    if tree.missing_left is not None:
                        goes_left[of_tree] = tree.missing_left[places]
                    del left_over[index]
                    break
        if "nodes_missing_value_tracks_true" not in attributes:
            node.attribute.add(name="nodes_missing_value_tracks_true", type=attributes["nodes_treeids"].type)
            attributes["nodes_missing_value_tracks_true"] = node.attribute[-1]
        if "nodes_values" in attributes:
            del attributes["nodes_values"].floats[:]
            attributes["nodes_values"].floats.extend(thresholds.tolist())
        del attributes["nodes_missing_value_tracks_true"].ints[:]
        attributes["nodes_missing_value_tracks_true"].ints.extend(goes_left.tolist())


def _thresholds(attributes: Mapping[str, Any]) -> Array:
    if (wide := attributes.get("nodes_values_as_tensor")) is not None:
        onnx = by_onnx.import_converter("onnx", "scikit-learn", EXTRA)
        return np.array(onnx.numpy_helper.to_array(wide.t))
    return np.array(attributes["nodes_values"].floats)


def _is_tree(tree: Tree, places: Array, below: Array, thresholds: Array) -> bool:
    """Whether a graph's nodes are those of ``tree``: ``places`` of its nodes, what is left ``below``, thresholds."""
    if len(places) != len(tree.left) or places.max() >= len(tree.left):
        return False
    inner = tree.left[places] >= 0
    return np.array_equal(tree.left[places][inner], below[inner]) and np.allclose(
        tree.edge[places][inner], thresholds[inner], rtol=1e-6, atol=0
    )


def _outputs(model: Any, graph: Any, name: str) -> dict[str, str]:
    """Which results of the graph are served, under which names. Raises BundleError."""
    present = {output.name for output in graph.graph.output}
    found = {
        output: served for output, served in _SERVED.items() if output in present and hasattr(model, _METHODS[served])
    }
    if _text_classes(model) is not None:
        found.pop("label", None)  # a tensor of text is not exact on every server
    if not found and "variable" in present and hasattr(model, "transform"):
        found["variable"] = _SERVED["variable"]
    if not found:
        raise BundleError(
            f"{name}: {type(last_step(model)).__name__} has no result that can be served as a tensor (graph: "
            f"{', '.join(sorted(present))})"
        )
    return found


def predictions(model: Any, served: Iterable[str], rows: Array, name: str) -> dict[str, Array]:
    """What the model itself gives for ``rows``, by the names that it is ``served`` under. Raises BundleError."""
    expected = {}
    for output in served:
        method = _METHODS[output] if hasattr(model, _METHODS[output]) else "transform"
        expected[output] = getattr(model, method)(rows)
    if any(not isinstance(array, np.ndarray) or array.ndim > 2 for array in expected.values()):
        raise BundleError(
            f"{name}: {type(last_step(model)).__name__} has several targets; convert one model per target"
        )
    return expected


def scores(model: Any, rows: Array) -> Array | None:
    """What the model takes its label from."""
    for method in ("decision_function", "predict_proba"):
        if hasattr(model, "classes_") and hasattr(model, method):
            return np.asarray(getattr(model, method)(rows))
    return None


def sample(model: Any, name: str, dtype: Any, rng: np.random.Generator) -> Array:
    """Rows [n, features] of ``dtype`` that the model takes, at thresholds and far out, too. Raises BundleError."""
    return _accepted(model, _rows(model, model.n_features_in_, rng).astype(dtype), name)


def _accepted(model: Any, rows: Array, name: str) -> Array:
    """Those of ``rows`` the model takes: most of its kinds refuse missing values."""
    run = getattr(model, "predict", None) or getattr(model, "transform", None)
    if run is None:
        raise BundleError(f"{name}: {type(last_step(model)).__name__} can neither predict nor transform")
    rows = rows[~np.isinf(rows).any(axis=1)]  # which all of them refuse
    try:
        run(rows)
        return rows
    except ValueError:
        # What a model fitted to float64 says to float32 is a ValueError, too, and comes again below.
        rows = rows[~np.isnan(rows).any(axis=1)]
    try:
        run(rows)
    # Columns by name or text in them: the model is no function of a table of numbers.
    except Exception as error:
        raise BundleError(f"{name}: cannot be run on a table of numbers ({by_onnx.first_line(error)})") from error
    return rows


def _rows(model: Any, features: int, rng: np.random.Generator) -> Array:
    """Sample rows: around what the first step saw, and at the thresholds of every tree."""
    steps = [step for _, step in model.steps] if hasattr(model, "steps") else [model]
    trees = [tree for tree, of_columns in _trees(steps[-1]) if of_columns]
    centre, spread = _seen(steps[0], features)
    if not trees or len(steps) > 1:
        background = sample_rows.drawn(centre, spread, [], rng)
        rows = [background, sample_rows.with_missing(background, rng)]
    else:
        edges = sample_rows.edges_by_feature(trees, features)
        centre = np.array([e.mean() if len(e) else c for e, c in zip(edges, centre, strict=True)])
        spread = np.array([e.std() + 1 if len(e) else s for e, s in zip(edges, spread, strict=True)])
        background = sample_rows.drawn(centre, spread, edges, rng)
        rows = [background, sample_rows.with_missing(background, rng)]
        rows.append(sample_rows.at_thresholds(trees, background, rng))
    if trees and len(steps) > 1:
        rows.extend(_through(model[:-1], trees, background, rng))
    return np.concatenate(rows)


def _through(before: Any, trees: list[Tree], background: Array, rng: np.random.Generator) -> list[Array]:
    """Rows that reach the trees' thresholds after the steps ``before``, where those can be undone."""
    try:
        reached = sample_rows.at_thresholds(trees, np.asarray(before.transform(background), np.float32), rng)
        undone = before.inverse_transform(reached[np.isfinite(reached).all(axis=1)])
    except (AttributeError, ValueError, IndexError):
        return []
    return [np.asarray(undone)]


def _trees(estimator: Any, columns: Array | None = None) -> Iterator[tuple[Tree, bool]]:
    """Every decision tree inside an estimator, and whether it looks at the columns that the estimator is given.

    ``columns`` are those of the whole table that the estimator gets; None for all.
    """
    raw = getattr(estimator, "tree_", None)
    if raw is not None:
        edge = sample_rows.largest_float32_not_above(np.asarray(raw.threshold))
        children = np.asarray(raw.children_left), np.asarray(raw.children_right)
        looked_at = np.asarray(raw.feature) if columns is None else np.asarray(columns)[np.maximum(raw.feature, 0)]
        yield Tree(*children, looked_at, edge, getattr(raw, "missing_go_to_left", None)), True
        return
    categorical = getattr(estimator, "is_categorical_", None)
    if categorical is not None and np.any(categorical):  # its columns are in another order inside, too
        raise BundleError(
            f"{type(estimator).__name__} has columns of categories, which are not converted; encode them as numbers"
        )
    for predictors in getattr(estimator, "_predictors", ()):  # of histogram gradient boosting: one list per round
        yield from ((_histogram_tree(predictor.nodes), True) for predictor in predictors)
    inner = list(np.ravel(np.asarray(getattr(estimator, "estimators_", ()), dtype=object)))
    inner += [calibrated.estimator for calibrated in getattr(estimator, "calibrated_classifiers_", ())]
    inner += [step for _, step in getattr(estimator, "steps", ())[:1]]
    subsets = getattr(estimator, "estimators_features_", None)  # bagging
    for index, each in enumerate(inner):
        subset = columns if subsets is None else np.asarray(subsets[index])
        yield from _trees(each, subset if subsets is None or columns is None else columns[subset])
    later = [step for _, step in getattr(estimator, "steps", ())[1:]]
    if hasattr(estimator, "final_estimator_"):  # of stacking
        later.append(estimator.final_estimator_)
    for each in later:
        yield from ((tree, False) for tree, _ in _trees(each))


def _histogram_tree(nodes: Any) -> Tree:
    left = np.where(nodes["is_leaf"], -1, nodes["left"].astype(np.int64))
    edge = sample_rows.largest_float32_not_above(nodes["num_threshold"])
    return Tree(left, nodes["right"].astype(np.int64), nodes["feature_idx"], edge, nodes["missing_go_to_left"])


def _seen(step: Any, features: int) -> tuple[Array, Array]:
    """Centre and spread [features] of what a fitted step saw, as far as it tells."""
    rows = getattr(step, "_fit_X", getattr(step, "support_vectors_", None))
    if isinstance(rows, np.ndarray) and rows.ndim == 2 and len(rows):
        return rows.mean(axis=0), rows.std(axis=0) + 1e-3
    centre, spread = np.zeros(features), np.ones(features)
    for middle, width in (("mean_", "scale_"), ("center_", "scale_"), ("data_min_", "data_range_"), ("theta_", "var_")):
        c, s = getattr(step, middle, None), getattr(step, width, None)
        if isinstance(c, np.ndarray) and c.shape[-1:] == (features,):
            centre = np.asarray(c, float).reshape(-1, features).mean(axis=0)
            spread = np.abs(np.asarray(s, float)).reshape(-1, features).mean(axis=0) if s is not None else spread
            break
    return centre, spread


def last_step(model: Any) -> Any:
    return model.steps[-1][1] if hasattr(model, "steps") else model


def _class_notes(model: Any) -> list[str]:
    classes = _text_classes(model)
    if classes is None:
        return []
    return [f"the columns of 'probabilities' are {', '.join(map(str, classes))}; labels are text and are not served"]


def _column_notes(model: Any) -> list[str]:
    names = getattr(model, "feature_names_in_", None)
    return [] if names is None else [f"the columns of {_INPUT!r} are {', '.join(map(str, names))}"]


def _text_classes(model: Any) -> Array | None:
    classes = getattr(model, "classes_", None)
    return classes if isinstance(classes, np.ndarray) and classes.dtype.kind not in "biuf" else None


def _version_note(caught: Iterable[Any]) -> list[str]:
    """A note when the model was saved by another scikit-learn, which may read it wrongly."""
    return [
        f"saved by scikit-learn {warning.message.original_sklearn_version}, read by another"
        for warning in caught
        if hasattr(warning.message, "original_sklearn_version")
    ][:1]
