"""Rows of different requests share a run only when nothing shows that they influence each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from converters import rows
from converters.convert import prepare
from nereid_backend.errors import BundleError, EngineError
from nereid_backend.spec import ModelSpec, Program, TensorSpec

Run = Callable[[np.ndarray], np.ndarray]


class Engine:
    def __init__(self, run: Run) -> None:
        self._run = run

    def run(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        return [self._run(inputs[0])]


def dependence(run: Run, dtype: str = "f32", width: int = 3, size: int = 3) -> str | None:
    tensor = TensorSpec("x", dtype, (-1, width), 0)
    spec = ModelSpec("m", "fake", "fake", (tensor,), (tensor,), (Program("none"),), max_batch_size=8)
    return rows.dependence(Engine(run), spec, size, spec.outputs)


def clamp_by_the_largest(x: np.ndarray) -> np.ndarray:
    return x / max(x.max(), 10)


def zero_when_any_is_negative(x: np.ndarray) -> np.ndarray:
    return x * 0 if (x < 0).any() else x


def recurrence_from_the_first_row(x: np.ndarray) -> np.ndarray:
    result, state = [], np.zeros_like(x[0])
    for row in x:
        state = np.tanh(row + 0.5 * state)
        result.append(state)
    return np.array(result)


def recurrence_from_the_last_row(x: np.ndarray) -> np.ndarray:
    return recurrence_from_the_first_row(x[::-1])[::-1]


@pytest.mark.parametrize(
    "run",
    [
        lambda x: np.cumsum(x, 0),
        lambda x: x - x.mean(0),
        lambda x: x + np.arange(len(x), dtype=x.dtype)[:, None],
        lambda x: np.sort(x, 0),
        lambda x: x * len(x),
        clamp_by_the_largest,
        zero_when_any_is_negative,
        recurrence_from_the_first_row,
        recurrence_from_the_last_row,
    ],
)
def test_rows_that_influence_each_other_are_found(run: Run) -> None:
    assert (dependence(run) or "").startswith("a row gives another result beside other rows")


@pytest.mark.parametrize(("dtype", "run"), [("bool", lambda x: x & x.all(0)), ("i64", lambda x: x * x.min(0))])
def test_rows_of_booleans_and_integers_that_influence_each_other_are_found(dtype: str, run: Run) -> None:
    assert dependence(run, dtype) == "a row gives another result beside other rows"


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x + 1,
        lambda x: np.tanh(x @ np.arange(9, dtype=np.float32).reshape(3, 3)),
        lambda x: x / (np.abs(x).max(1, keepdims=True) + 1),
        lambda x: np.sort(x, 1),
    ],
)
def test_independent_rows_pass(run: Run) -> None:
    assert dependence(run) is None


def test_a_model_that_writes_to_its_input_is_judged_by_its_result() -> None:
    def in_place(x: np.ndarray) -> np.ndarray:
        x += 1
        return x

    assert dependence(in_place) is None


def test_a_model_that_remembers_is_found() -> None:
    calls = iter(range(10_000))
    assert dependence(lambda x: x + next(calls)) == "a row gives another result beside other rows"


NOTHING_COMPARED = "the results on made-up input are not finite, so nothing can be compared"


def half_unknown(x: np.ndarray) -> np.ndarray:
    return x * np.array([1, np.nan, np.nan], x.dtype)


@pytest.mark.parametrize("run", [lambda x: x * np.nan, lambda x: x / 0, half_unknown])
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_results_that_are_not_finite_prove_nothing(run: Run) -> None:
    assert dependence(run) == NOTHING_COMPARED


def attend(x: np.ndarray) -> np.ndarray:
    """Attention that hides zeros: a row of zeros alone has nothing left and gives NaN."""
    scores = np.where(x == 0, -np.inf, x / 100)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(1, keepdims=True))
        return weights / weights.sum(1, keepdims=True)


@pytest.mark.parametrize(
    ("dtype", "run"),
    [
        ("f32", attend),
        ("i64", attend),
        ("bool", attend),
        ("f32", lambda x: np.log(x)),
        ("f32", lambda x: np.where(x == 1, x, np.nan)),
        ("f32", lambda x: np.where([True, False, True], x, -np.inf)),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_rows_that_give_nan_by_themselves_hide_no_independence(dtype: str, run: Run) -> None:
    assert dependence(run, dtype) is None


@pytest.mark.parametrize(
    "run",
    [
        lambda x: attend(x) - attend(x).mean(0),
        lambda x: attend(x) * len(x),
        lambda x: attend(x) * np.nansum(x),
        lambda x: attend(x) + np.isnan(attend(x)).any(),
        lambda x: np.cumsum(attend(x), 0),
        lambda x: np.nancumsum(attend(x), 0),
        lambda x: np.where(np.isnan(attend(x)).any(0), np.nan, attend(x)),
        lambda x: np.where(x == 1, x * len(x), np.nan),
    ],
)
def test_nan_hides_no_influence_of_other_rows(run: Run) -> None:
    assert (dependence(run) or "").startswith("a row gives another result beside other rows")


def test_a_model_that_fails_for_several_rows_is_found() -> None:
    def only_one(x: np.ndarray) -> np.ndarray:
        if len(x) > 1:
            raise EngineError("one at a time")
        return x

    assert dependence(only_one) == "several rows at once fail (one at a time)"


def test_an_onnx_model_that_accumulates_over_rows_is_not_coalesced(make_onnx: Any) -> None:
    shape = ["n", 3]
    nodes = [("CumSum", ["x", "axis"], ["y"])]
    prepared = prepare(make_onnx(nodes, [("x", 1, shape)], [("y", 1, shape)], constants={"axis": np.array(0)}))
    assert (prepared.spec.max_batch_size, prepared.spec.coalesce) == (32, False)
    assert prepared.notes == ("requests run one by one: a row gives another result beside other rows",)


def test_an_onnx_model_that_hides_zeros_from_its_attention_is_coalesced(make_onnx: Any) -> None:
    nodes = [
        ("Equal", ["x", "zero"], ["hidden"]),
        ("Where", ["hidden", "minus_infinity", "x"], ["scores"]),
        ("Softmax", ["scores"], ["y"]),
    ]
    constants = {"zero": np.array(0, np.float32), "minus_infinity": np.array(-np.inf, np.float32)}
    shape = ["n", 3]
    prepared = prepare(make_onnx(nodes, [("x", 1, shape)], [("y", 1, shape)], constants=constants))
    assert (prepared.spec.max_batch_size, prepared.spec.coalesce, prepared.notes) == (32, True, ())


@pytest.mark.parametrize(
    ("node", "limit", "coalesce"),
    [("CumSum", 3, False), ("CumSum", 1, False), ("Abs", 3, True), ("Abs", 1, True)],
)
def test_a_graph_of_three_rows_is_padded_only_when_its_rows_are_independent(
    make_onnx: Any, tmp_path: Path, node: str, limit: int, coalesce: bool
) -> None:
    folder = tmp_path / "three"
    folder.mkdir()
    inputs, constants = (["x", "axis"], {"axis": np.array(0)}) if node == "CumSum" else (["x"], {})
    shape = ("x", 1, [3, 2]), ("y", 1, [3, 2])
    make_onnx([(node, inputs, ["y"])], shape[:1], shape[1:], folder / "model.onnx", constants)
    (folder / "model_inference.textproto").write_text(
        f'max_batch_size: {limit} input {{ name: "x" dims: [2] }} output {{ name: "y" dims: [2] }}'
    )
    if limit < 3 and not coalesce:
        with pytest.raises(BundleError, match=r"takes exactly 3 rows and they cannot be padded .* max_batch_size is 1"):
            prepare(folder)
        return
    prepared = prepare(folder)
    assert (prepared.spec.batch_sizes, prepared.spec.max_batch_size, prepared.spec.coalesce) == ((3,), limit, coalesce)
    told = "requests run one by one, without padding, at exactly [3] rows: a row gives another result beside other rows"
    assert prepared.notes == (() if coalesce else (told,))


def centred(x: Any, w: Any, b: Any) -> Any:
    return (x - x.mean(0)) @ w + b


def test_a_bundle_whose_rows_influence_each_other_runs_at_exact_sizes(
    make_bundle: Any, program_writer: Any, tmp_path: Path
) -> None:
    bundle = make_bundle()
    assert prepare(bundle).spec.coalesce is True
    for size in (1, 4):
        program_writer(
            bundle / f"model.b{size}.mlir", centred, ((size, 4), "float32"), ((4, 4), "float32"), ((4,), "float32")
        )
    prepared = prepare(bundle)
    assert (prepared.spec.max_batch_size, prepared.spec.coalesce, prepared.spec.batch_sizes) == (0, False, (1, 4))
    assert prepared.notes == (
        "requests run one by one, without padding, at exactly [1, 4] rows: "
        "a row gives another result beside other rows",
    )
