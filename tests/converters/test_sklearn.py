"""scikit-learn models: the cases a careless converter gets wrong are exact or refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("skl2onnx")

import joblib
from sklearn.calibration import CalibratedClassifierCV
from sklearn.cluster import KMeans
from sklearn.compose import make_column_transformer
from sklearn.ensemble import (
    AdaBoostClassifier,
    BaggingClassifier,
    BaggingRegressor,
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    IsolationForest,
    RandomForestClassifier,
    RandomForestRegressor,
    StackingClassifier,
    StackingRegressor,
    VotingClassifier,
    VotingRegressor,
)
from sklearn.linear_model import LinearRegression, LogisticRegression, PoissonRegressor, SGDClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, StandardScaler
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from converters.convert import prepare
from converters.discover import find
from nereid_backend.errors import BundleError, SignatureError

RNG = np.random.default_rng(0)
X = RNG.normal(3, 2, size=(200, 4))
SUM = X.sum(axis=1)
THREE, TWO = np.digitize(SUM, [10, 14]), (SUM > 12).astype(int)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    def save(model: Any, target: Any = None, name: str = "m.joblib") -> Path:
        path = tmp_path / name
        joblib.dump(model.fit(X, target), path)
        return path

    return save


FORESTS = [
    (RandomForestClassifier(10, random_state=0), THREE),
    (RandomForestRegressor(10, random_state=0), SUM),
    (make_pipeline(StandardScaler(), RandomForestClassifier(10, random_state=0)), THREE),
]
TREE, LINE = DecisionTreeClassifier(max_depth=4), LogisticRegression()
# Each becomes several nodes of trees in a graph.
OF_TREES = [
    (BaggingClassifier(TREE, 5, max_features=0.5, random_state=0), THREE),
    (BaggingRegressor(DecisionTreeRegressor(max_depth=4), 5, random_state=0), SUM),
    (CalibratedClassifierCV(RandomForestClassifier(5, max_depth=4, random_state=0), cv=3), TWO),
    (IsolationForest(n_estimators=5, random_state=0), None),
]
# Their thresholds are float64: rounded to the nearest float32, rows at them went the other way.
HISTOGRAMS = [
    (HistGradientBoostingRegressor(max_iter=5), SUM),
    (HistGradientBoostingClassifier(max_iter=5), TWO),
    (HistGradientBoostingClassifier(max_iter=5), THREE),
]
MODELS = [
    *FORESTS,
    *HISTOGRAMS,
    *OF_TREES,
    (VotingClassifier([("line", LINE), ("tree", TREE)], voting="soft"), THREE),
    (VotingClassifier([("line", LINE), ("tree", TREE)], voting="hard"), THREE),
    (VotingRegressor([("line", LinearRegression()), ("tree", DecisionTreeRegressor(max_depth=4))]), SUM),
    (StackingClassifier([("line", LINE), ("tree", TREE)], LINE), THREE),
    (StackingRegressor([("line", LinearRegression()), ("tree", DecisionTreeRegressor(max_depth=4))]), SUM),
    (PoissonRegressor(), np.exp(SUM / 8)),
    (AdaBoostClassifier(n_estimators=5, random_state=0), THREE),
    (GradientBoostingClassifier(n_estimators=5, random_state=0), THREE),
    (SGDClassifier(random_state=0), TWO),
    (SVC(kernel="linear"), THREE),
    (make_pipeline(MinMaxScaler(clip=True), LogisticRegression()), THREE),
    (MLPClassifier((8,), max_iter=20, random_state=0), TWO),
    (KMeans(3, n_init=1, random_state=0), None),
    (RandomForestRegressor(5, random_state=0), X[:, :2]),
    (StandardScaler(), None),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model", "target"), MODELS, ids=lambda value: type(value).__name__)
def test_a_model_predicts_what_scikit_learn_does(saved: Any, run: Any, tmp_path: Path, model: Any, target: Any) -> None:
    prepared = prepare(saved(model, target), allow_code=True)
    rows = (X * 1.5).astype(prepared.spec.inputs[0].element.numpy)
    outputs = run(prepared, tmp_path / "r", rows)
    for tensor, output in zip(prepared.spec.outputs, outputs, strict=True):
        method = {"probabilities": "predict_proba", "label": "predict"}.get(tensor.name)
        method = method or ("predict" if hasattr(model, "predict") else "transform")
        wanted = getattr(model, method)(rows)
        np.testing.assert_allclose(output.reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5)
    assert prepared.notes[-1].startswith("agrees with scikit-learn on ")


@pytest.mark.parametrize("fitted_with_missing", [False, True])
@pytest.mark.parametrize(
    ("model", "target"), [*FORESTS[:2], *OF_TREES, *HISTOGRAMS], ids=lambda value: type(value).__name__
)
def test_trees_send_missing_values_where_scikit_learn_does(
    run: Any, tmp_path: Path, model: Any, target: Any, fitted_with_missing: bool
) -> None:
    rows = np.where(RNG.random(X.shape) < 0.3, np.nan, X).astype(np.float32)
    joblib.dump(model.fit(rows if fitted_with_missing else X, target), tmp_path / "m.joblib")
    prepared = prepare(tmp_path / "m.joblib", allow_code=True)
    wanted = model.predict_proba(rows) if hasattr(model, "predict_proba") else model.predict(rows)[:, None]
    np.testing.assert_allclose(run(prepared, tmp_path / "r", rows)[0].reshape(wanted.shape), wanted, atol=1e-5)


def test_a_table_too_wide_to_compare_is_refused_at_once(tmp_path: Path) -> None:
    model = LinearRegression().fit(X, SUM)
    model.n_features_in_ = 10**8
    joblib.dump(model, tmp_path / "m.joblib")
    with pytest.raises(BundleError, match=r"m\.joblib: takes a table of 100000000 columns, more than the 100000"):
        prepare(tmp_path / "m.joblib", allow_code=True)


def test_a_forest_behind_a_scaler_takes_float64_because_float32_would_round_at_thresholds(saved: Any) -> None:
    prepared = prepare(saved(*FORESTS[2]), allow_code=True)
    assert prepared.spec.inputs[0].dtype == "f64"
    assert "takes FP64: with float32 it would not agree" in prepared.notes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "target", "words"),
    [
        (HistGradientBoostingRegressor(categorical_features=[0]), SUM, "has columns of categories"),
        (SGDClassifier(loss="log_loss", random_state=0), THREE, "differs from what SGDClassifier"),
        (make_pipeline(StandardScaler(), BaggingClassifier(TREE, 5, random_state=0)), THREE, "what BaggingClassifier"),
        (RandomForestClassifier(3), np.stack([TWO, THREE], axis=1), "has several targets"),
        (make_pipeline(make_column_transformer((OneHotEncoder(), [0])), LinearRegression()), SUM, "m.joblib|Linear"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_model_that_is_not_converted_exactly_is_refused(saved: Any, model: Any, target: Any, words: str) -> None:
    with pytest.raises(BundleError, match=words):
        prepare(saved(model, target), allow_code=True)


def test_a_classifier_of_one_class_is_served(saved: Any, run: Any, tmp_path: Path) -> None:
    prepared = prepare(saved(DecisionTreeClassifier(), np.full(len(X), 7)), allow_code=True)
    probabilities, label = run(prepared, tmp_path / "r", X[:2].astype(np.float32))
    assert (probabilities.tolist(), label.tolist()) == ([[1], [1]], [7, 7])


def test_text_labels_are_told_and_not_served(saved: Any) -> None:
    prepared = prepare(saved(LogisticRegression(), np.array(["low", "mid", "high"])[THREE]), allow_code=True)
    assert [tensor.name for tensor in prepared.spec.outputs] == ["probabilities"]
    assert "the columns of 'probabilities' are high, low, mid; labels are text and are not served" in prepared.notes


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("ending", [".pkl", ".joblib"])
def test_a_pickle_is_not_opened_before_somebody_allows_its_code(tmp_path: Path, ending: str) -> None:
    path, trace = tmp_path / f"m{ending}", tmp_path / "trace"
    path.write_bytes(pickle.dumps(Trap(trace)))
    with pytest.raises(BundleError, match=r"runs whatever its author wrote.*--allow-code"):
        prepare(path)
    assert (find(tmp_path), trace.exists()) == ([], False)
    with pytest.raises(BundleError, match="holds NoneType, not a fitted scikit-learn model"):
        prepare(path, allow_code=True)
    assert trace.exists()


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x04N."])
def test_a_file_that_holds_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.pkl").write_bytes(content)
    with pytest.raises(BundleError, match=r"m\.pkl: (is not a pickle|holds NoneType)"):
        prepare(tmp_path / "m.pkl", allow_code=True)


def test_a_skops_file_needs_no_consent_unless_it_holds_untrusted_types(tmp_path: Path) -> None:
    skops = pytest.importorskip("skops.io")
    skops.dump(make_pipeline(StandardScaler(), LogisticRegression()).fit(X, THREE), tmp_path / "safe.skops")
    skops.dump(RandomForestClassifier(3).fit(X, THREE), tmp_path / "forest.skops")
    (tmp_path / "bad.skops").write_text("hello")
    assert prepare(tmp_path / "safe.skops").spec.coalesce
    with pytest.raises(BundleError, match=r"does not trust \(sklearn\.tree\._tree\.Tree\).*--allow-code"):
        prepare(tmp_path / "forest.skops")
    assert prepare(tmp_path / "forest.skops", allow_code=True).spec.outputs[0].name == "probabilities"
    with pytest.raises(SignatureError, match="is not a skops file"):
        prepare(tmp_path / "bad.skops")
    assert [path.name for path in find(tmp_path)] == ["bad.skops", "forest.skops", "safe.skops"]
