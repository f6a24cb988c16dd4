"""The cases of ``../shared/fixtures`` through the readers and the engines, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from converters import bundle, folder, manifest, repository
from converters.check import check, check_all
from converters.kinds import Opening
from nereid_backend import dtypes
from nereid_backend.batching import Staging, padded_size, split
from nereid_backend.engines import engine_class
from nereid_backend.errors import ManifestError
from nereid_backend.executor import Executor
from nereid_backend.spec import ModelSpec, Program, TensorSpec

FIXTURES = Path(__file__).resolve().parents[3] / "shared" / "fixtures"
FOLDERS, BUNDLES = FIXTURES / "nereid-ml-backends", FIXTURES / "reactant" / "generated"

pytestmark = pytest.mark.skipif(not FIXTURES.exists(), reason="../shared/fixtures is not beside this checkout")


def load(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


MANIFESTS = (load(FIXTURES / "reactant" / "cases" / "manifest_cases.json") or {"cases": []})["cases"]
ARITHMETIC = [
    pytest.param(name, case, id=f"{name}-{case['name']}")
    for name in ("model3", "multi", "rustint", "onnxadd")
    for case in (load(FOLDERS / name / "expected.json") or {"cases": []})["cases"]
]


def test_all_manifest_cases_are_there() -> None:
    assert len(MANIFESTS) == 49
    assert len(ARITHMETIC) >= 8


@pytest.mark.parametrize("case", MANIFESTS, ids=[case["id"] for case in MANIFESTS])
def test_a_manifest_case_has_the_upstream_result(case: dict[str, Any]) -> None:
    if not case["ok"]:
        with pytest.raises(ManifestError) as caught:
            manifest.parse(case["manifest"], has_hook=case["has_model_jl"])
        assert case["error_contains"].lower() in str(caught.value).lower()
        return
    got = manifest.parse(case["manifest"], has_hook=case["has_model_jl"])
    expect = case.get("expect", {})
    found: dict[str, Any] = {}
    if inputs := got.client_inputs or got.executable_inputs:
        x = inputs[0].spec()
        found |= {"wire_input_shape": list(x.shape), "wire_batch_axis": x.batch_axis}
    if outputs := got.client_outputs or got.executable_outputs:
        found["wire_output_shape"] = list(outputs[0].spec().shape)
    found["variant_keys"] = [list(key) for key in got.variant_keys]
    found["calls"] = list(got.calls)
    unknown = {key: value for key, value in expect.items() if key not in found}
    assert ({key: found[key] for key in expect if key in found}, unknown) == (expect, {})


def open_written(prepared: Any, target: Path) -> tuple[ModelSpec, Any]:
    version = repository.write(prepared, target, link=False, force=True) / "1"
    spec = ModelSpec.read(version)
    return spec, engine_class(spec.engine).load(spec, version)


def array_of(tensor: dict[str, Any]) -> np.ndarray:
    dtype = dtypes.by_kserve(tensor["datatype"]).numpy
    return np.frombuffer(bytes.fromhex(tensor["le_hex"]), dtype).reshape(tensor["shape"])


@pytest.mark.parametrize(("name", "case"), ARITHMETIC)
def test_a_nereid_folder_computes_what_upstream_computes(name: str, case: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the torch extra is not installed in this interpreter")
    spec, engine = open_written(folder.read(FOLDERS / name, name, Opening("cpu"), None), tmp_path)
    inputs = [array_of(case["inputs"][tensor.name]) for tensor in spec.inputs]
    got = dict(zip((t.name for t in spec.outputs), engine.run(inputs), strict=True))
    assert set(got) == set(case["outputs"])
    for output, tensor in case["outputs"].items():
        expected = array_of(tensor)
        assert (got[output].dtype, list(got[output].shape)) == (expected.dtype, tensor["shape"])
        if case["rtol"] == 0 and case["atol"] == 0:
            assert got[output].tobytes() == expected.tobytes()
        else:
            np.testing.assert_allclose(got[output], expected, rtol=case["rtol"], atol=case["atol"])


def run_rows(spec: ModelSpec, engine: Any, x: np.ndarray) -> np.ndarray:
    """Pad to a compiled size, run, drop the padding."""
    batch = Staging(spec.inputs).gather([[x]], [len(x)], padded_size(spec.batch_sizes, len(x)))
    return split(engine.run(batch), [0], [len(x)])[0][0]


def test_both_weight_layouts_give_the_same_bits_and_the_expected_numbers(tmp_path: Path) -> None:
    case = load(BUNDLES / "expected.json")["affine"]
    x = np.array(case["x_row_major"], np.float32).reshape(case["wire_input_shape"])
    results = []
    for name in ("affine_legacy", "affine_xla"):
        spec, engine = open_written(bundle.read(BUNDLES / name, name, "cpu"), tmp_path)
        assert spec.batch_sizes == (1, 4)
        results.append(run_rows(spec, engine, x))
        assert [run_rows(spec, engine, row[None]).tolist() for row in x] == [[row] for row in results[-1].tolist()]
    assert [list(r.shape) for r in results] == [case["wire_output_shape"]] * 2
    assert results[0].ravel().tolist() == case["y_row_major"]
    assert results[0].tobytes() == results[1].tobytes()


def test_a_size_less_bundle_computes_the_expected_numbers(tmp_path: Path) -> None:
    case = load(BUNDLES / "expected.json")["scale4"]
    _, engine = open_written(bundle.read(BUNDLES / "scale4", "scale4", "cpu"), tmp_path)
    assert [o.tolist() for o in engine.run([np.array(case["x"], np.float32)])] == [case["y"]]


def test_a_fixed_buffer_and_its_count_come_out_in_manifest_order(tmp_path: Path) -> None:
    case = load(BUNDLES / "expected.json")["fixed_buffer_count"]
    spec, engine = open_written(bundle.read(BUNDLES / "fixed_buffer_count", "fbc", "cpu"), tmp_path)
    got = dict(zip((t.name for t in spec.outputs), engine.run([np.array(case["x"], np.float32)]), strict=True))
    assert {name: array.tolist() for name, array in got.items()} == {k: case[k] for k in ("VALUES", "COUNT")}
    assert got["VALUES"][: case["COUNT"][0]].tolist() == case["trimmed"]


def test_variants_compute_the_expected_totals_and_an_unknown_one_lists_them(tmp_path: Path) -> None:
    cases = load(BUNDLES / "expected.json")["pool_variants"]
    spec, engine = open_written(bundle.read(BUNDLES / "pool_variants", "pool", "cpu"), tmp_path)
    images = [np.array(case["input_row_major"], np.float32).reshape(case["wire_shape"]) for case in cases]
    *totals, problem = Executor(spec, engine).run([[image] for image in (*images, np.zeros((1, 4, 2), np.float32))])
    assert [total[0].tolist() for total in totals] == [case["total"] for case in cases]
    assert str(problem) == ("model 'pool' has no program for img[-1, 4, 2]; compiled are img[-1, 2, 4], img[-1, 5, 3]")


def test_queued_rows_share_one_dispatch_as_upstream() -> None:
    case = load(FIXTURES / "reactant" / "cases" / "scheduler_cases.json")["coalesced_rows"]
    dispatches: list[list[np.ndarray]] = []

    class Times:
        def run(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
            dispatches.append(inputs)
            return [inputs[0] * np.array([10, 100], np.float32)]

    x, y = (TensorSpec(name, "f32", (-1, 2), 0) for name in "xy")
    spec = ModelSpec("m", "e", "p", (x,), (y,), (Program("a", 1), Program("b", 4)), max_batch_size=4, coalesce=True)
    results = Executor(spec, Times()).run([[np.array(rows, np.float32)] for rows in case["requests"]])
    assert ([r[0].tolist() for r in results], len(dispatches)) == (case["responses"], case["dispatches"])


def test_check_accepts_every_bundle_that_runs_and_tells_what_the_upstream_one_lacks() -> None:
    pytest.importorskip("jax")
    reports = list(check_all(sorted(path for path in BUNDLES.iterdir() if path.is_dir()), in_child=False))
    assert {report.name: report.problem for report in reports} == dict.fromkeys(
        ("affine_legacy", "affine_xla", "fixed_buffer_count", "pool_variants", "scale4")
    )
    arities = {r.name: (r.arity.expected, len(r.arity.modules), r.arity.servable) for r in reports if r.arity}
    assert arities == {
        "affine_legacy": (3, 2, True),
        "affine_xla": (3, 2, True),
        "fixed_buffer_count": (2, 1, True),
        "pool_variants": (2, 4, True),
        "scale4": (2, 1, True),
    }
    layouts = {r.name: r.weights.layout.partition(" ")[0] for r in reports if r.weights}
    assert (layouts["affine_legacy"], layouts["affine_xla"]) == ("legacy", "program")
    without_program = check(FIXTURES / "reactant" / "upstream" / "scale4")
    assert str(without_program.problem).startswith("there is neither model.mlir nor model.b{N}.mlir")
