"""Files as the converters of the unmodified SnoozeML SDK write them: served under their own names, row by row equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from converters.convert import prepare
from converters.prepared import Prepared

sdk = pytest.importorskip("snoozeml.converters", reason="the snoozeml package is not installed in this interpreter")
pytest.importorskip("sklearn", reason="the sklearn extra is not installed in this interpreter")

X = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
CLASSES = np.digitize(X[:, 0] + X[:, 1], [-1, 1])
SAMPLE = X[:20]

Answers = Callable[[Prepared], dict[str, np.ndarray]]


@pytest.fixture
def answers(run: Any, tmp_path: Path) -> Answers:
    def answer(prepared: Prepared) -> dict[str, np.ndarray]:
        outputs = run(prepared, tmp_path / "repository", SAMPLE)
        return dict(zip([tensor.name for tensor in prepared.spec.outputs], outputs, strict=True))

    return answer


def test_what_export_sklearn_compiles_itself_has_one_output(tmp_path: Path, answers: Answers) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, CLASSES)
    path = sdk.export_sklearn(model=model, initial_types=[("float_input", (None, 4))], output_path=tmp_path / "m.onnx")
    prepared = prepare(path)
    (given,) = prepared.spec.inputs
    assert (given.name, given.shape, prepared.spec.coalesce) == ("float_input", (-1, 4), True)
    np.testing.assert_allclose(answers(prepared)["output"], model.predict_proba(SAMPLE), atol=1e-5)


def test_what_export_sklearn_leaves_to_skl2onnx_has_a_label_and_probabilities(tmp_path: Path, answers: Answers) -> None:
    pytest.importorskip("skl2onnx", reason="the sklearn extra is not installed in this interpreter")
    from sklearn.naive_bayes import GaussianNB

    model = GaussianNB().fit(X, CLASSES)
    path = sdk.export_sklearn(model=model, initial_types=[("float_input", (None, 4))], output_path=tmp_path / "m.onnx")
    prepared = prepare(path)
    assert [(t.name, t.dtype, t.shape) for t in prepared.spec.outputs] == [
        ("label", "i64", (-1,)),
        ("probabilities", "f32", (-1, 3)),
    ]
    assert prepared.spec.coalesce
    answer = answers(prepared)
    np.testing.assert_array_equal(answer["label"], model.predict(SAMPLE))
    np.testing.assert_allclose(answer["probabilities"], model.predict_proba(SAMPLE), atol=1e-4)


def test_what_export_torch_writes_takes_any_number_of_rows(tmp_path: Path, answers: Answers) -> None:
    torch = pytest.importorskip("torch", reason="the torch extra is not installed in this interpreter")
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
    path = sdk.export_torch(model=net, sample_input=torch.zeros(1, 4), output_path=tmp_path / "m.onnx")
    prepared = prepare(path)
    assert [(t.name, t.shape) for t in prepared.spec.inputs] == [("input", (-1, 4))]
    assert prepared.spec.max_batch_size == 32
    with torch.inference_mode():
        expected = net(torch.from_numpy(SAMPLE)).numpy()
    np.testing.assert_allclose(answers(prepared)["output"], expected, atol=1e-5)


def test_what_export_xgboost_writes_predicts_as_the_booster_does(tmp_path: Path, answers: Answers) -> None:
    xgboost = pytest.importorskip("xgboost", reason="the xgboost extra is not installed in this interpreter")
    pytest.importorskip("onnxmltools", reason="the xgboost extra is not installed in this interpreter")
    model = xgboost.XGBClassifier(n_estimators=4, max_depth=3, n_jobs=1).fit(X, CLASSES > 0)
    path = sdk.export_xgboost(model=model, output_path=tmp_path / "m.xgb.json")
    expected = model.get_booster().predict(xgboost.DMatrix(SAMPLE))
    np.testing.assert_allclose(answers(prepare(path))["output"], expected[:, None], atol=1e-5)
