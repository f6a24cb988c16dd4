"""XGBoost models in memory: what is written predicts what they do, missing values included, or nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("xgboost")
pytest.importorskip("onnxmltools")

import xgboost

from converters.convert import prepare
from converters.exporters import export_sklearn, export_xgboost
from nereid_backend.errors import BundleError, ExportError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, 4)).astype(np.float32)
X[RNG.random(X.shape) < 0.2] = np.nan
SUM = np.nansum(X, axis=1)
TWO, THREE = (SUM > 0).astype(int), np.digitize(SUM, [-1, 1])
ROWS = RNG.uniform(-3, 3, (1000, 4)).astype(np.float32)
ROWS[RNG.random(ROWS.shape) < 0.1] = np.nan
SMALL: dict[str, Any] = {"n_estimators": 5, "max_depth": 4, "n_jobs": 1}


@pytest.fixture
def served(run: Any, tmp_path: Path) -> Any:
    def results(directory: Path) -> dict[str, np.ndarray]:
        prepared = prepare(directory)
        outputs = run(prepared, tmp_path / "repository", ROWS)
        return dict(zip([tensor.name for tensor in prepared.spec.outputs], outputs, strict=True))

    return results


@pytest.mark.parametrize("target", [TWO, THREE], ids=["two classes", "three classes"])
def test_a_classifier_gives_its_probabilities_and_labels_on_a_thousand_random_rows(
    tmp_path: Path, served: Any, target: Any
) -> None:
    model = xgboost.XGBClassifier(**SMALL).fit(X, target)
    done = export_xgboost(model, tmp_path / "model", X[:20])
    results = served(done.directory)
    np.testing.assert_allclose(results["probabilities"], model.predict_proba(ROWS), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(results["label"], model.predict(ROWS))


@pytest.mark.parametrize("options", [{}, {"base_score": 3.5}, {"objective": "count:poisson"}], ids=str)
def test_a_regressor_gives_its_predictions(tmp_path: Path, served: Any, options: Any) -> None:
    model = xgboost.XGBRegressor(**SMALL, **options).fit(X, np.exp(SUM / 4))
    done = export_xgboost(model, tmp_path / "model", provenance={"rmse": 0.1})
    np.testing.assert_allclose(served(done.directory)["output"][:, 0], model.predict(ROWS), rtol=1e-5, atol=1e-6)
    origin = yaml.safe_load((done.directory / "provenance.yaml").read_text())
    assert {"source_framework": "xgboost", "rounds": 5, "rmse": 0.1}.items() <= origin.items()


@pytest.mark.parametrize(
    ("objective", "target"), [("multi:softmax", THREE), ("multi:softprob", THREE), ("binary:logistic", TWO)]
)
def test_a_booster_is_exported_and_stays_as_it_is(tmp_path: Path, served: Any, objective: str, target: Any) -> None:
    names = ["a", "b", "c", "d"]
    settings = {"objective": objective, "max_depth": 3, "nthread": 1}
    if objective.startswith("multi"):
        settings["num_class"] = 3
    booster = xgboost.train(settings, xgboost.DMatrix(X, target, feature_names=names), 4)
    before = booster.save_raw("json")
    done = export_xgboost(booster, tmp_path / "model")
    assert (booster.save_raw("json"), booster.feature_names) == (before, names)
    assert done.notes[0] == "the columns of 'input' are a, b, c, d"
    predicted = booster.predict(xgboost.DMatrix(ROWS, feature_names=names))
    results = served(done.directory)
    if objective == "multi:softmax":
        np.testing.assert_array_equal(results["label"], predicted)
    else:
        probabilities = results["probabilities"] if predicted.ndim == 2 else results["probabilities"][:, 1]
        np.testing.assert_allclose(probabilities, predicted, rtol=1e-5, atol=1e-6)


def test_a_training_that_stopped_early_is_served_up_to_its_best_round(tmp_path: Path, served: Any) -> None:
    model = xgboost.XGBRegressor(**{**SMALL, "n_estimators": 60}, learning_rate=0.9, early_stopping_rounds=3)
    model.fit(X[:200], SUM[:200], eval_set=[(X[200:], SUM[200:])], verbose=False)
    assert model.best_iteration + 1 < model.get_booster().num_boosted_rounds()
    done = export_xgboost(model, tmp_path / "model")
    assert done.notes[0].startswith(f"the first {model.best_iteration + 1} of ")
    np.testing.assert_allclose(served(done.directory)["output"][:, 0], model.predict(ROWS), rtol=1e-5, atol=1e-6)


def test_what_cannot_be_exported_exactly_is_refused_in_one_line_and_nothing_is_written(tmp_path: Path) -> None:
    categories = xgboost.DMatrix(np.abs(X).round(), SUM, feature_types=["c"] * 4, enable_categorical=True)
    refused = [
        (xgboost.XGBClassifier(), "XGBClassifier is not trained"),
        (xgboost.Booster(), "train it first"),
        (xgboost.XGBRegressor(**SMALL, missing=-1).fit(X, SUM), "missing is -1, in what is served it is NaN"),
        (xgboost.XGBRegressor(**SMALL, booster="dart").fit(X, SUM), "has booster 'dart'"),
        (xgboost.XGBRegressor(booster="gblinear", n_estimators=2).fit(X, SUM), "has booster 'gblinear'"),
        (xgboost.train({"max_cat_to_onehot": 1, "nthread": 1}, categories, 3), "splits on categories"),
        (xgboost.XGBRegressor(**SMALL).fit(X, np.stack([SUM, SUM], 1)), "nothing was written|cannot be converted"),
        (object(), "of type object was given, expected a Booster"),
    ]
    for model, words in refused:
        with pytest.raises(BundleError, match=words) as caught:
            export_xgboost(model, tmp_path / "model")
        assert "\n" not in str(caught.value)
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(ExportError, match="is a model of XGBoost; export it with export_xgboost"):
        export_sklearn(xgboost.XGBRegressor(**SMALL).fit(X, SUM), tmp_path / "model")
