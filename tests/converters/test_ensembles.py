"""Ensembles of Triton: the same tensors through the same models, called in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("onnxruntime")

from converters.check import check_all
from converters.cli import command
from converters.convert import convert, prepare
from converters.discover import calls_of
from nereid_backend import user_code
from nereid_backend.engines import engine_class
from nereid_backend.errors import BundleError
from nereid_backend.hooks import MetaModel, NamedArray
from nereid_backend.spec import ModelSpec

FP32 = "data_type: TYPE_FP32"
X = np.arange(8, dtype=np.float32).reshape(2, 4)


def step(model: str, takes: str, gives: str) -> str:
    maps = [f'input_map {{ key: "x" value: "{takes}" }}', f'output_map {{ key: "y" value: "{gives}" }}']
    return f'step {{ model_name: "{model}" model_version: -1 {" ".join(maps)} }} '


def config(*steps: str, before: str = "dims: 4", after: str = "dims: 4") -> str:
    return (
        f'platform: "ensemble" max_batch_size: 8 input {{ name: "in" {FP32} {before} }} '
        f'output {{ name: "out" {FP32} {after} }} ensemble_scheduling {{ {" ".join(steps)} }}'
    )


# Not in the order they run.
PLUS_THEN_TIMES = config(step("times_three", "between", "out"), step("plus_one", "in", "between"))


@pytest.fixture
def models(tmp_path: Path, make_onnx: Any) -> Path:
    """A repository with plus_one, times_three and the ensemble of both."""
    folder = tmp_path / "models"
    for name, operator, number in (("plus_one", "Add", 1), ("times_three", "Mul", 3)):
        (folder / name / "1").mkdir(parents=True)
        tensors = f'input {{ name: "x" {FP32} dims: 4 }} output {{ name: "y" {FP32} dims: 4 }}'
        (folder / name / "config.pbtxt").write_text(f'backend: "onnxruntime" max_batch_size: 8 {tensors}')
        values = [("x", 1, ["n", 4]), ("y", 1, ["n", 4])]
        constant = {"number": np.float32(number)}
        path = folder / name / "1" / "model.onnx"
        make_onnx([(operator, ["x", "number"], ["y"])], values[:1], values[1:], path, constant)
    (folder / "both").mkdir()
    (folder / "both" / "config.pbtxt").write_text(PLUS_THEN_TIMES)
    return folder


def answer_of(repository: Path, model: str, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    """What the code of a meta model gives, its callees run by their engines."""
    spec = ModelSpec.read(repository / model / "1")

    def call(callee: str, given: Any, outputs: Any) -> list[NamedArray]:
        version = repository / callee / "1"
        contract = ModelSpec.read(version)
        engine = engine_class(contract.engine).load(contract, version)
        results = engine.run([given[tensor.name] for tensor in contract.inputs])
        engine.close()
        return [NamedArray(t.name, r) for t, r in zip(contract.outputs, results, strict=True) if t.name in outputs]

    run = user_code.load(repository / model / "1", spec.name, MetaModel, "register_meta_model").run
    return dict(run([NamedArray(name, array) for name, array in inputs.items()], call))  # type: ignore[arg-type]


def test_an_ensemble_calls_its_steps_in_the_order_of_its_tensors(models: Path, tmp_path: Path) -> None:
    assert calls_of(models / "both") == ("times_three", "plus_one")
    out = tmp_path / "out"
    result = CliRunner().invoke(command, [str(models), "-o", str(out)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "meta model that calls its steps in turn" in result.stderr
    np.testing.assert_array_equal(answer_of(out, "both", **{"in": X})["out"], (X + 1) * 3)
    spec = ModelSpec.read(out / "both" / "1")
    assert [(t.name, t.shape) for t in (*spec.inputs, *spec.outputs)] == [("in", (-1, 4)), ("out", (-1, 4))]


def test_a_check_and_a_dry_run_know_the_steps(models: Path, tmp_path: Path) -> None:
    reports = {report.name: report for report in check_all(sorted(models.iterdir()), in_child=False)}
    assert (reports["both"].problem, reports["both"].calls) == (None, ("times_three", "plus_one"))
    result = CliRunner().invoke(command, [str(models), "-o", str(tmp_path / "out"), "--dry-run"])
    assert (result.exit_code, (tmp_path / "out").exists()) == (0, False)


def test_names_in_an_ensemble_stay_names(models: Path, tmp_path: Path) -> None:
    odd = '\\"); import os; os.abort() # {'
    text = config(step("plus_one", "in", odd), step("times_three", odd, "out"))
    (models / "both" / "config.pbtxt").write_text(text)
    for name in ("plus_one", "times_three", "both"):
        convert(models / name, tmp_path / "out")
    np.testing.assert_array_equal(answer_of(tmp_path / "out", "both", **{"in": X})["out"], (X + 1) * 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (config(step("gone", "in", "out")), "calls 'gone', which is not among the converted models; convert it"),
        (config(step("both", "in", "out")), "the model itself"),
        (config(step("plus_one", "nowhere", "out")), "waits for 'nowhere', which no step before it gives"),
        (config(step("plus_one", "a", "b"), step("times_three", "b", "a")), "which no step before it gives"),
        (config(step("plus_one", "in", "other")), "no step gives the ensemble's output 'out'"),
        (config(step("plus_one", "in", "in")), "gives 'in', which is there already"),
        (config(step("plus_one", "in", "out").replace('"x"', '"z"')), r"maps the inputs \['z'\], the model takes"),
        (config(step("plus_one", "in", "out").replace('"y"', '"z"')), "the model does not give 'z'"),
        (config(step("plus_one", "in", "out"), before="dims: 5"), "correct the ensemble or the step's model"),
        (config(step("plus_one", "in", "out"), after="dims: [4, 1]"), "correct the ensemble or the step's model"),
        (config(step("plus_one", "in", "out"), before="dims: [2, 2] reshape { shape: 4 }"), "move the reshape"),
        (config(), "no step gives the ensemble's output"),
        ('platform: "ensemble"', "must declare its inputs and outputs"),
    ],
)
def test_an_ensemble_that_does_not_fit_is_refused(models: Path, tmp_path: Path, text: str, words: str) -> None:
    (models / "both" / "config.pbtxt").write_text(text)
    callees = {name: prepare(models / name).spec for name in ("plus_one", "times_three")}
    with pytest.raises(BundleError, match=words):
        prepare(models / "both", callees=callees)


@pytest.mark.triton
def test_an_ensemble_that_moved_over_answers_on_triton(models: Path, triton: Any, client: Any) -> None:
    from serving import infer

    for name in ("plus_one", "times_three", "both"):
        triton.add(models / name)
    np.testing.assert_array_equal(infer(client, "both", **{"in": X})["out"], (X + 1) * 3)
