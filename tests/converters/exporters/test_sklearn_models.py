"""scikit-learn models in memory: what is written predicts what they do, or nothing is written."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

pytest.importorskip("sklearn")
pytest.importorskip("skl2onnx")

from sklearn.compose import make_column_transformer
from sklearn.ensemble import (
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
    VotingClassifier,
)
from sklearn.linear_model import LinearRegression, LogisticRegression, SGDClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, SVR

from converters.convert import prepare
from converters.exporters import export_sklearn, sklearn_models
from converters.exporters.command import export
from nereid_backend.errors import BundleError, ExportError

RNG = np.random.default_rng(5)
X = RNG.normal(3, 2, size=(200, 4))
SUM = X.sum(axis=1)
THREE, TWO = np.digitize(SUM, [10, 14]), (SUM > 12).astype(int)
ROWS = RNG.uniform(X.min(), X.max(), (1000, 4))

MODELS = [
    (RandomForestClassifier(10, random_state=0), THREE),
    (RandomForestRegressor(10, random_state=0), SUM),
    (GradientBoostingClassifier(n_estimators=5, random_state=0), THREE),
    (GradientBoostingRegressor(n_estimators=5, random_state=0), SUM),
    (LogisticRegression(), TWO),
    (SVC(), THREE),
    (SVR(), SUM),
    (make_pipeline(StandardScaler(), LogisticRegression()), THREE),
    (make_pipeline(StandardScaler(), RandomForestClassifier(10, random_state=0)), THREE),
]


@pytest.mark.parametrize(("model", "target"), MODELS, ids=lambda value: type(value).__name__)
def test_a_written_model_predicts_on_a_thousand_random_rows_what_the_estimator_does(
    tmp_path: Path, run: Any, model: Any, target: Any
) -> None:
    done = export_sklearn(model.fit(X, target), tmp_path / "model", X[:20])
    assert max(done.differences.values()) < 1e-5
    prepared = prepare(done.directory)  # data, so nobody has to allow code
    rows = ROWS.astype(prepared.spec.inputs[0].element.numpy)
    outputs = run(prepared, tmp_path / "repository", rows)
    results = dict(zip([tensor.name for tensor in prepared.spec.outputs], outputs, strict=True))
    classifies = hasattr(model, "classes_")
    assert set(results) - {"probabilities"} == ({"label"} if classifies else {"output"})
    if "probabilities" in results:
        np.testing.assert_allclose(results["probabilities"], model.predict_proba(rows), rtol=1e-5, atol=1e-5)
    if classifies:
        # Where trees or votes are as many for two classes, the order of a sum decides.
        best = np.sort(results.get("probabilities", np.tile([0.0, 1.0], (1000, 1))), axis=1)
        clear = best[:, -1] - best[:, -2] > 1e-5
        assert clear.mean() > 0.8
        np.testing.assert_array_equal(results["label"][clear], model.predict(rows)[clear])
    else:
        np.testing.assert_allclose(results["output"].ravel(), model.predict(rows), rtol=1e-5, atol=1e-5)


def test_the_estimator_stays_as_it_is(tmp_path: Path) -> None:
    voting = VotingClassifier([("a", LogisticRegression()), ("b", LogisticRegression(C=9))], voting="soft").fit(X, TWO)
    assert voting.flatten_transform
    before = pickle.dumps(voting)
    export_sklearn(voting, tmp_path / "voting")
    assert pickle.dumps(voting) == before


def test_what_is_written_is_a_graph_a_contract_and_where_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, TWO)
    done = export_sklearn(model, tmp_path / "line", max_batch_size=8, provenance={"auc": 0.9})
    files = sorted(path.name for path in done.directory.iterdir())
    assert files == ["model.onnx", "model_inference.textproto", "provenance.yaml"]
    origin = yaml.safe_load((done.directory / "provenance.yaml").read_text())
    assert {"source_framework": "scikit-learn", "estimator": "LogisticRegression", "auc": 0.9}.items() <= origin.items()
    assert {"scikit_learn_version", "skl2onnx_version", "onnxruntime_version"} <= origin.keys()
    spec = prepare(done.directory).spec
    assert (spec.max_batch_size, spec.coalesce, spec.inputs[0].shape) == (8, True, (-1, 4))


def test_labels_that_are_text_are_told_and_not_served(tmp_path: Path) -> None:
    model = LogisticRegression().fit(X, np.array(["cat", "dog", "elk"])[THREE])
    done = export_sklearn(model, tmp_path / "animals")
    assert done.notes[0] == "the columns of 'probabilities' are cat, dog, elk; labels are text and are not served"
    assert [tensor.name for tensor in prepare(done.directory).spec.outputs] == ["probabilities"]


class Shifted(LinearRegression):
    """An estimator of the user's own that predicts something else than its base."""

    def predict(self, rows: Any) -> Any:
        return super().predict(rows) + 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (LogisticRegression(), "holds LogisticRegression, not a fitted scikit-learn model"),
        (Shifted().fit(X, SUM), "cannot convert Shifted|differs from what Shifted predicts"),
        (SGDClassifier(loss="log_loss", random_state=0).fit(X, THREE), "differs from what SGDClassifier predicts"),
        (RandomForestClassifier(2).fit(X, np.stack([TWO, THREE], 1)), "has several targets; convert one"),
        (make_column_transformer((StandardScaler(), ["height"])), "not a fitted scikit-learn model"),
        ({"a": 1}, "holds dict, not a fitted scikit-learn model"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_onnx_does_not_say_exactly_is_refused_in_one_line_and_nothing_is_written(
    tmp_path: Path, model: Any, words: str
) -> None:
    with pytest.raises(BundleError, match=words) as caught:
        export_sklearn(model, tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_answers_otherwise_on_rows_it_was_not_exported_with_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sklearn_models.sklearn_files.convert

    def then_change(model: Any, *arguments: Any, **options: Any) -> Any:
        artifact = found(model, *arguments, **options)
        model.intercept_ = model.intercept_ + 0.1
        return artifact

    monkeypatch.setattr(sklearn_models.sklearn_files, "convert", then_change)
    with pytest.raises(ExportError, match=r"output 'output' .*differs .*rows that were not exported with at batch"):
        export_sklearn(LinearRegression().fit(X, SUM), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_examples_of_another_table_are_refused(tmp_path: Path) -> None:
    model = LinearRegression().fit(X, SUM)
    with pytest.raises(ExportError, match=r"has shape \[200, 3\], the model's is \[-1, 4\]"):
        export_sklearn(model, tmp_path / "model", X[:, :3])


def test_the_command_exports_a_described_estimator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
    from sklearn.linear_model import LinearRegression
    from converters.exporters import SklearnModel

    def line():
        return SklearnModel(LinearRegression().fit([[0.0], [1.0]], [1.0, 3.0]))
    """
    (tmp_path / "line_of_two.py").write_text("\n".join(line[4:] for line in code.splitlines()))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(export, ["line_of_two.py:line"])
    assert (result.exit_code, (tmp_path / "bundles/line/model.onnx").is_file()) == (0, True), result.output
