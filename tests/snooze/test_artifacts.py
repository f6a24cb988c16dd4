"""What the unmodified SnoozeML SDK writes, served and asked with its own clients: the cases of the specification."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import snoozeml
from snoozing import INF, Snoozing, snoozing

pytestmark = pytest.mark.triton

for module in ("sklearn", "skl2onnx", "xgboost", "onnxmltools"):
    pytest.importorskip(module, reason=f"{module} is not installed in this interpreter")

X = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
CLASSES = np.digitize(X[:, 0] + X[:, 1], [-1, 1])
ROWS = X[:20]
WORKER = """
import numpy as np

class Model:
    def load(self, model_dir, device):
        self.errors = {7: ValueError("seven"), 8: MemoryError("eight"), 9: RuntimeError("nine")}

    def predict(self, inputs):
        rows = inputs["input"]
        for value in rows[:, 0]:
            if value in self.errors:
                raise self.errors[value]
        return {"output": np.sqrt(rows)}
"""
CENTRED = """
class Model:
    def load(self, model_dir, device):
        pass

    def predict(self, inputs):
        return {"output": inputs["input"] - inputs["input"].mean(0)}
"""


def estimators() -> dict[str, Any]:
    import xgboost
    from sklearn.linear_model import LogisticRegression
    from sklearn.naive_bayes import GaussianNB
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    options = {"n_estimators": 4, "max_depth": 3, "n_jobs": 1}
    models = {
        "native": make_pipeline(StandardScaler(), LogisticRegression()),
        "fallback": GaussianNB(),
        "boosted": xgboost.XGBClassifier(**options),
    }
    return {name: model.fit(X, CLASSES) for name, model in models.items()} | {
        "boosted_two": xgboost.XGBClassifier(**options).fit(X, CLASSES > 0)
    }


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    return estimators()


@pytest.fixture(scope="module")
def snooze(tmp_path_factory: pytest.TempPathFactory, trained: dict[str, Any]) -> Iterator[Snoozing]:
    from snoozeml import converters

    def make(models: Path) -> None:
        for name in ("native", "fallback"):
            converters.export_sklearn(trained[name], [("float_input", (None, 4))], models / f"{name}.onnx")
        for name in ("boosted", "boosted_two"):
            converters.export_xgboost(trained[name], models / f"{name}.xgb.json")
        snoozeml.scaffold_worker(models / "worker", model_code=WORKER)
        snoozeml.scaffold_worker(models / "centred", model_code=CENTRED)

    models: dict[str, Any] = {name: {"options": {"allow_code": True}} for name in ("worker", "centred")}
    models |= {name: {} for name in trained}
    server = {"rest_addr": "127.0.0.1:0"}
    with snoozing(tmp_path_factory.mktemp("artifacts"), models, server=server, make=make) as running:
        yield running


def test_22_exported_estimators_predict_what_they_did_before(sdk: Any, trained: dict[str, Any]) -> None:
    with_scores = sdk(INF).infer("native", {"float_input": ROWS})
    np.testing.assert_allclose(with_scores["output"], trained["native"].predict_proba(ROWS), atol=1e-5)
    fallback = sdk(INF).infer("fallback", {"float_input": ROWS})
    np.testing.assert_array_equal(fallback["label"].reshape(-1), trained["fallback"].predict(ROWS))
    np.testing.assert_allclose(fallback["probabilities"], trained["fallback"].predict_proba(ROWS), atol=1e-4)


def test_7_27_boosters_predict_what_they_did_before_and_nan_is_missing(sdk: Any, trained: dict[str, Any]) -> None:
    import xgboost

    rows = ROWS.copy()
    rows[::3, 1] = np.nan
    for name, columns in (("boosted", 3), ("boosted_two", 1)):
        answer = sdk(INF).infer(name, rows)["output"]
        expected = trained[name].get_booster().predict(xgboost.DMatrix(rows, missing=np.nan))
        np.testing.assert_allclose(answer, expected.reshape(len(rows), columns), atol=1e-5)


def test_32_a_worker_answers_and_its_errors_are_those_of_the_sdk(caller: Any) -> None:
    client = caller(INF)
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_allclose(client.infer("worker", rows)["output"], np.sqrt(rows))
    for value, error, words in (
        (7, snoozeml.InvalidInputError, "seven"),
        (8, snoozeml.OutOfMemoryError, "out of memory"),
        (9, snoozeml.RuntimeInferenceError, "nine"),
    ):
        with pytest.raises(error, match=words):
            client.infer("worker", np.full((1, 4), value, np.float32))
    np.testing.assert_allclose(client.infer("worker", rows)["output"], np.sqrt(rows))


def test_a_worker_takes_as_many_rows_as_its_caller_has(sdk: Any) -> None:
    client, rows = sdk(INF), np.arange(600, dtype=np.float32).reshape(150, 4) + 16
    np.testing.assert_allclose(client.infer("worker", rows)["output"], np.sqrt(rows), rtol=1e-6)
    # Its rows depend on each other, so that they go together.
    np.testing.assert_allclose(client.infer("centred", rows)["output"], rows - rows.mean(0), atol=1e-3)
