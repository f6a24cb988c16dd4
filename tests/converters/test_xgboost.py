"""XGBoost models: what is served is what XGBoost predicts, at thresholds and with missing values, or nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("xgboost")
pytest.importorskip("onnxmltools")

import xgboost

from converters import by_onnx
from converters.cli import command
from converters.convert import model_name, prepare
from converters.discover import find
from converters.prepared import Prepared
from nereid_backend.errors import BundleError, NereidError, SignatureError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, 4)).astype(np.float32)
X[RNG.random(X.shape) < 0.2] = np.nan
SUM = np.nansum(X, axis=1)
TARGETS = {"real": SUM, "positive": np.exp(SUM / 4), "two": (SUM > 0).astype(int), "three": np.digitize(SUM, [-1, 1])}


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., Any]:
    """A booster and the file it was saved to."""

    def train(objective: str, target: str, rounds: int = 5, file: str = "m.ubj", **options: Any) -> tuple[Any, Path]:
        keys = {
            key: options.pop(key) for key in ("feature_names", "feature_types", "enable_categorical") if key in options
        }
        rows = np.abs(X).round() if "feature_types" in keys else X
        data = xgboost.DMatrix(rows, TARGETS[target], **keys)
        settings = {"objective": objective, "max_depth": 4, "eta": 0.5, "nthread": 1, **options}
        booster = xgboost.train(settings, data, rounds)
        booster.save_model(tmp_path / file)
        return booster, tmp_path / file

    return train


@pytest.fixture
def answers(run: Any, tmp_path: Path) -> Callable[..., dict[str, np.ndarray]]:
    def answer(prepared: Prepared, rows: np.ndarray) -> dict[str, np.ndarray]:
        outputs = run(prepared, tmp_path / "r", rows)
        return dict(zip([tensor.name for tensor in prepared.spec.outputs], outputs, strict=True))

    return answer


@pytest.mark.parametrize(
    ("objective", "target", "options"),
    [
        ("reg:squarederror", "real", {}),
        ("reg:squarederror", "real", {"base_score": 3.5}),
        ("reg:absoluteerror", "real", {}),
        ("count:poisson", "positive", {}),
        ("reg:gamma", "positive", {}),
        ("reg:squarederror", "real", {"num_parallel_tree": 3}),
    ],
)
def test_a_regression_predicts_what_xgboost_does(
    trained: Any, answers: Any, objective: str, target: str, options: Any
) -> None:
    booster, path = trained(objective, target, **options)
    prepared = prepare(path)
    assert (prepared.spec.engine, prepared.spec.max_batch_size, prepared.spec.coalesce) == ("onnx", 32, True)
    predicted = booster.predict(xgboost.DMatrix(X))
    np.testing.assert_allclose(answers(prepared, X)["output"][:, 0], predicted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("objective", "target", "options"),
    [
        ("binary:logistic", "two", {}),
        ("binary:logistic", "two", {"base_score": 0.2}),
        ("multi:softprob", "three", {"num_class": 3}),
        ("multi:softmax", "three", {"num_class": 3}),
    ],
)
def test_a_classifier_gives_probabilities_and_the_label(
    trained: Any, answers: Any, objective: str, target: str, options: Any
) -> None:
    booster, path = trained(objective, target, file="m.json", **options)
    answer = answers(prepare(path), X)
    assert list(answer) == ["probabilities", "label"]
    predicted = booster.predict(xgboost.DMatrix(X))
    if objective == "multi:softmax":
        np.testing.assert_array_equal(answer["label"], predicted)
    elif objective == "multi:softprob":
        np.testing.assert_allclose(answer["probabilities"], predicted, atol=1e-6)
    else:
        np.testing.assert_allclose(answer["probabilities"][:, 1], predicted, atol=1e-6)
    np.testing.assert_array_equal(answer["label"], answer["probabilities"].argmax(axis=1))
    np.testing.assert_allclose(answer["probabilities"].sum(axis=1), 1, atol=1e-5)


def test_a_training_that_stopped_early_is_served_up_to_its_best_iteration(tmp_path: Path, answers: Any) -> None:
    labels = RNG.integers(0, 2, len(X))  # noise: the validation error soon rises
    data, held_out = xgboost.DMatrix(X[:200], labels[:200]), xgboost.DMatrix(X[200:], labels[200:])
    booster = xgboost.train(
        {"objective": "binary:logistic", "nthread": 1},
        data,
        30,
        evals=[(held_out, "v")],
        early_stopping_rounds=3,
        verbose_eval=False,
    )
    booster.save_model(tmp_path / "m.json")
    used, total = booster.best_iteration + 1, booster.num_boosted_rounds()
    assert used < total
    prepared = prepare(tmp_path / "m.json")
    assert f"the first {used} of {total} rounds are served" in prepared.notes[0]
    rows = xgboost.DMatrix(X)
    served = answers(prepared, X)["probabilities"][:, 1]
    np.testing.assert_allclose(served, booster.predict(rows, iteration_range=(0, used)), atol=1e-6)
    assert np.abs(served - booster.predict(rows)).max() > 1e-3


def test_rows_one_float32_apart_at_a_threshold_go_their_own_ways(trained: Any, answers: Any) -> None:
    _, path = trained("reg:squarederror", "real", rounds=1, max_depth=1, file="m.json")
    (tree,) = json.loads(path.read_text())["learner"]["gradient_booster"]["model"]["trees"]
    feature, threshold = tree["split_indices"][0], np.float32(tree["split_conditions"][0])
    below = np.nextafter(threshold, np.float32(-np.inf))
    rows = np.zeros((2, 4), np.float32)
    rows[:, feature] = below, threshold
    left, right = answers(prepare(path), rows)["output"][:, 0]
    assert left != right


@pytest.mark.parametrize(
    ("objective", "target", "options", "words"),
    [
        ("reg:logistic", "two", {}, r"differs from what XGBoost \(reg:logistic\) predicts on \d+ of \d+ .*nothing was"),
        ("binary:hinge", "two", {}, "differs from what XGBoost"),
        ("reg:squarederror", "real", {"booster": "dart"}, "has booster 'dart'; only gbtree"),
        ("reg:squarederror", "real", {"booster": "gblinear"}, "has booster 'gblinear'"),
        ("reg:squarederror", "real", {"feature_types": ["c"] * 4, "enable_categorical": True}, "splits on categories"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_represented_exactly_is_refused(
    trained: Any, objective: str, target: str, options: Any, words: str
) -> None:
    if options.get("booster") == "gblinear":
        options = {**options, "max_depth": 0}
    _, path = trained(objective, target, **options)
    with pytest.raises(BundleError, match=words):
        prepare(path)


def test_a_model_that_claims_a_huge_table_is_refused_at_once(trained: Any, tmp_path: Path) -> None:
    _, path = trained("reg:squarederror", "real", file="m.json")
    path.write_text(path.read_text().replace('"num_feature":"4"', '"num_feature":"100000000"'))
    with pytest.raises(BundleError, match=r"m\.json: takes a table of 100000000 columns, more than the 100000"):
        prepare(path)


def test_a_wide_table_is_compared_on_fewer_rows(trained: Any, tmp_path: Path) -> None:
    _, path = trained("reg:squarederror", "real", file="m.json")
    path.write_text(path.read_text().replace('"num_feature":"4"', '"num_feature":"50000"'))
    prepared = prepare(path)
    assert prepared.spec.inputs[0].row_shape == (50000,)
    assert int(prepared.notes[-1].split()[4]) * 50000 < 2**28


def test_names_of_columns_are_told(trained: Any) -> None:
    _, path = trained("reg:squarederror", "real", feature_names=["age", "bmi", "bp", "s1"])
    assert "the columns of 'input' are age, bmi, bp, s1" in prepare(path).notes


@pytest.mark.parametrize("content", [b'{"learner":{}}', b'{"learner":{"gradient_booster":1}}', b'{"learner":'])
def test_a_damaged_model_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.json").write_bytes(content)
    with pytest.raises(SignatureError, match=r"is not a model that XGBoost .* can load \([^/]*\); save it"):
        prepare(tmp_path / "m.json")


def test_a_truncated_binary_model_never_crashes(trained: Any) -> None:
    _, path = trained("reg:squarederror", "real")
    whole = path.read_bytes()
    for size in range(40, len(whole) - 1, len(whole) // 10):
        path.write_bytes(whole[:size])
        with pytest.raises(NereidError):
            prepare(path)


def test_other_json_files_are_no_models(trained: Any, tmp_path: Path) -> None:
    trained("reg:squarederror", "real", file="diabetes.xgb.json")
    (tmp_path / "settings.json").write_text('{"learning_rate": 0.1}')
    (tmp_path / "list.json").write_text("[]")
    assert [(path.name, model_name(path)) for path in find(tmp_path)] == [("diabetes.xgb.json", "diabetes")]


def test_a_missing_library_names_its_extra(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = trained("reg:squarederror", "real")

    def absent(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(by_onnx.importlib, "import_module", absent)
    with pytest.raises(BundleError, match=r"pip install 'nereid-triton\[xgboost\]'"):
        prepare(path)


@pytest.mark.triton
def test_a_converted_model_answers_inside_triton(trained: Any, triton: Any, client: Any, tmp_path: Path) -> None:
    from serving import input_tensor

    booster, path = trained("multi:softprob", "three", num_class=3, file="trees.json")
    result = CliRunner().invoke(command, [str(path), "-o", str(triton.repository)], catch_exceptions=False)
    assert (result.exit_code, "agrees with XGBoost on" in result.stderr) == (0, True)
    triton.load("trees")
    answer = client.infer("trees", [input_tensor("input", X[:20])])
    predicted = booster.predict(xgboost.DMatrix(X[:20]))
    np.testing.assert_allclose(answer.as_numpy("probabilities"), predicted, atol=1e-6)
    np.testing.assert_array_equal(answer.as_numpy("label").ravel(), predicted.argmax(axis=1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda learner: _first_tree(learner)["left_children"].__setitem__(0, 10**6), "points outside itself"),
        (lambda learner: _first_tree(learner)["split_indices"].__setitem__(0, 10**6), "points outside itself"),
        (
            lambda learner: learner["attributes"].update(best_iteration="x"),
            "best_iteration is 'x', no number of a round",
        ),
        (lambda learner: learner["attributes"].update(best_iteration="-5"), "best_iteration is '-5', no number"),
    ],
)
def test_a_model_file_that_contradicts_itself_is_refused_before_it_predicts(
    trained: Any, change: Callable[[Any], None], words: str
) -> None:
    _, path = trained("binary:logistic", "two", file="m.json")
    model = json.loads(path.read_text())
    change(model["learner"])
    path.write_text(json.dumps(model))
    with pytest.raises(SignatureError, match=words):
        prepare(path)


def _first_tree(learner: Any) -> Any:
    return learner["gradient_booster"]["model"]["trees"][0]


@pytest.mark.parametrize(
    ("objective", "target", "options", "columns"),
    [
        ("reg:squarederror", "real", {}, 1),
        ("binary:logistic", "two", {}, 1),
        ("multi:softprob", "three", {"num_class": 3}, 3),
        ("multi:softmax", "three", {"num_class": 3}, 1),
    ],
)
def test_an_xgb_json_file_gives_what_the_booster_predicts(
    trained: Any, answers: Any, objective: str, target: str, options: Any, columns: int
) -> None:
    booster, path = trained(objective, target, file="m.xgb.json", **options)
    prepared = prepare(path)
    (input_,), (output,) = prepared.spec.inputs, prepared.spec.outputs
    assert (input_.name, input_.shape) == ("input", (-1, 4))
    assert (output.name, output.dtype, output.shape) == ("output", "f32", (-1, columns))
    predicted = booster.predict(xgboost.DMatrix(X, missing=np.nan)).reshape(len(X), columns)
    np.testing.assert_allclose(answers(prepared, X)["output"], predicted, atol=1e-5)
