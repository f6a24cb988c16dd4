"""ONNX models: the graph as it is, its own names and types, external data with it, equal to ONNX Runtime or refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from converters.convert import prepare  # noqa: E402
from converters.exporters import export_onnx, onnx_graphs  # noqa: E402
from converters.exporters.command import export  # noqa: E402
from nereid_backend.errors import BundleError, ExportError, SignatureError  # noqa: E402

RNG = np.random.default_rng(3)
HEADER = '<ir_version: 8, opset_import: ["" : 17], producer_name: "by hand">'
EMBEDDED = """
embedded (int64[batch, time] ids, float[batch] weight) => (float[batch, 4] vector, int64[batch] largest)
<int64[1] one = {1}>
{
  vectors = Gather (table, ids)
  summed = ReduceSum <keepdims = 0> (vectors, one)
  column = Unsqueeze (weight, one)
  vector = Mul (summed, column)
  largest = ReduceMax <axes = [1], keepdims = 0> (ids)
}
"""
IDS = RNG.integers(0, 20, (6, 7))
WEIGHT = RNG.normal(size=6).astype(np.float32)


def model(graph: str, **constants: np.ndarray) -> Any:
    """A model written as text, and ``constants`` too large for it."""
    made = onnx.parser.parse_model(HEADER + graph)
    made.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in constants.items())
    return made


@pytest.fixture
def embedded() -> Any:
    return model(EMBEDDED, table=RNG.normal(size=(20, 4)).astype(np.float32))


def original(made: Any, **inputs: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    results: list[np.ndarray] = session.run(None, inputs)
    return results


def test_several_inputs_and_outputs_keep_their_names_types_and_open_axes(
    tmp_path: Path, run: Any, embedded: Any
) -> None:
    done = export_onnx(embedded, tmp_path / "embedded", {"weight": WEIGHT, "ids": IDS}, max_batch_size=4)
    assert (done.differences, done.notes) == ({"vector": 0.0, "largest": 0.0}, ())
    prepared = prepare(done.directory)
    assert [(t.name, t.dtype, t.shape) for t in (*prepared.spec.inputs, *prepared.spec.outputs)] == [
        ("ids", "i64", (-1, -1)),
        ("weight", "f32", (-1,)),
        ("vector", "f32", (-1, 4)),
        ("largest", "i64", (-1,)),
    ]
    assert (prepared.spec.max_batch_size, prepared.spec.coalesce) == (4, True)
    vector, largest = run(prepared, tmp_path / "repository", IDS, WEIGHT)
    np.testing.assert_array_equal(vector, original(embedded, ids=IDS, weight=WEIGHT)[0])
    assert largest.tolist() == IDS.max(1).tolist()


def test_external_data_lies_beside_the_graph_and_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any, embedded: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "source"
    (source / "weights").mkdir(parents=True)
    onnx.save(
        type(embedded).FromString(embedded.SerializeToString()),  # which saving empties
        source / "net.onnx",
        save_as_external_data=True,
        location="weights/table.bin",
        size_threshold=0,
        convert_attribute=False,
    )
    (source / "secret.txt").touch()
    done = export_onnx(source / "net.onnx", tmp_path / "embedded", [IDS, WEIGHT], provenance={"loss": 0.5})
    files = sorted(str(path.relative_to(done.directory)) for path in done.directory.rglob("*") if path.is_file())
    assert files == ["model.onnx", "model_inference.textproto", "provenance.yaml", "weights/table.bin"]
    shutil.rmtree(source)
    vector, _ = run(prepare(done.directory), tmp_path / "repository", IDS, WEIGHT)
    np.testing.assert_array_equal(vector, original(embedded, ids=IDS, weight=WEIGHT)[0])
    origin = yaml.safe_load((done.directory / "provenance.yaml").read_text())
    expected = {"source_framework": "onnx", "onnx_opsets": {"ai.onnx": 17}, "onnx_producer": "by hand", "loss": 0.5}
    assert expected.items() <= origin.items()
    assert origin["onnxruntime_version"] == onnxruntime.__version__
    assert str(tmp_path) not in str(origin)
    export_onnx(embedded, done.directory, [IDS, WEIGHT], force=True, provenance=None)
    assert sorted(path.name for path in done.directory.iterdir()) == ["model.onnx", "model_inference.textproto"]


@pytest.mark.parametrize(
    ("graph", "asked", "limit", "dims"),
    [
        ("g (float[batch, 3] x) => (float[batch, 3] y) { y = Abs (x) }", None, 32, (3,)),
        ("g (float[batch, 3] x) => (float[batch, 3] y) { y = Abs (x) }", 0, 0, (-1, 3)),
        ("g (float[unk_1, 3] x) => (float[unk_2, 3] y) { y = Abs (x) }", None, 32, (3,)),
        ("g (float[time, 3] x) => (float[rest, 3] y) { y = Transpose <perm = [0, 1]> (x) }", 0, 0, (-1, 3)),
        ("g (float[4, 3] x) => (float[4, 3] y) { y = Abs (x) }", None, 0, (4, 3)),
        ("g (float[4, 3] x) => (float[4, 3] y) { y = Abs (x) }", 4, 4, (3,)),
        ("g (float[1, 3] x) => (float[1, 3] y) { y = Abs (x) }", 1, 1, (3,)),
        ("g (float x) => (float y) { y = Abs (x) }", None, 0, ()),
        ("g (bfloat16[batch, 3] x) => (bfloat16[batch, 3] y) { y = Identity (x) }", None, 32, (3,)),
    ],
)
def test_the_batch_is_the_open_first_axis(
    tmp_path: Path, graph: str, asked: int | None, limit: int, dims: tuple[int, ...]
) -> None:
    done = export_onnx(model(graph), tmp_path / "g", max_batch_size=asked)
    spec = prepare(done.directory).spec
    assert done.differences == {"y": 0.0}
    assert (spec.max_batch_size, spec.inputs[0].shape) == (limit, (-1, *dims) if limit else dims)
    assert spec.outputs[0].shape == spec.inputs[0].shape


def test_rows_that_influence_each_other_are_served_one_request_at_a_time_and_that_is_said(tmp_path: Path) -> None:
    centred = model(
        "g (float[n, 3] x) => (float[n, 3] y) { mean = ReduceMean <axes = [0]> (x) y = Sub (x, mean) }",
    )
    done = export_onnx(centred, tmp_path / "centred")
    assert done.notes == ("requests run one by one: a row gives another result beside other rows",)


def test_a_folder_that_differs_from_onnx_runtime_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_graphs, "_original", lambda path, spec: lambda inputs: [inputs[0] + np.float32(1e-3)])
    with pytest.raises(ExportError, match=r"output 'y' of the bundle differs .*made-up inputs at batch size 1"):
        export_onnx(model(SAME), tmp_path / "g")
    assert list(tmp_path.iterdir()) == []


SAME = "g (float[n, 3] x) => (float[n, 3] y) { y = Abs (x) }"
MIXED = "g (float[5, 3] x, float[n] w) => (float[5, 3] y, float[n] z) { y = Abs (x) z = Abs (w) }"
NARROW = "g (int64[n, 3] x) => (float[n, 3] y) <float[2] t = {1, 2}> { y = Gather (t, x) }"


@pytest.mark.parametrize(
    ("graph", "options", "error", "words"),
    [
        (SAME, {"example_inputs": np.zeros((2, 4), np.float32)}, ExportError, r"has shape \[2, 4\].* is \[-1, 3\]"),
        (SAME, {"example_inputs": {"z": 1}}, ExportError, r"for \['z'\], the model's inputs are \['x'\]"),
        (SAME, {"example_inputs": [1, 2]}, ExportError, "2 example_inputs, the model has the inputs"),
        (NARROW, {"example_inputs": np.zeros((1, 3))}, ExportError, "'x' is float64, the model takes int64"),
        (NARROW, {"example_inputs": np.full((1, 3), 9)}, ExportError, "not run on the example inputs .*check them"),
        (SAME.replace("[n,", "[4,"), {"max_batch_size": 5}, ExportError, "is 5, the graph was made for 4 rows"),
        (MIXED, {"max_batch_size": 2}, BundleError, "symbolic first axis"),
        ("g (string[n] x) => (string[n] y) { y = Identity (x) }", {}, ExportError, "'x' is a tensor of texts"),
    ],
)
def test_what_cannot_be_exported_is_said_in_one_line_and_nothing_is_written(
    tmp_path: Path, graph: str, options: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        export_onnx(model(graph), tmp_path / "g", **options)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_made_up_ids_that_a_model_refuses_ask_for_examples(tmp_path: Path) -> None:
    graph = "g (int64[n, 3] x) => (float[n, 3] y) <float[2] t = {1, 2}, int64 first = {7}> "
    from_seven = model(graph + "{ place = Sub (x, first) y = Gather (t, place) }")
    with pytest.raises(ExportError, match=r"does not run on made-up inputs .*give example_inputs"):
        export_onnx(from_seven, tmp_path / "g")
    assert export_onnx(from_seven, tmp_path / "g", np.array([[7, 8, 7]])).differences == {"y": 0.0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m.opset_import[0], "version", 999), "opset"),
        (lambda m: setattr(m, "ir_version", 999), "IR version"),
        (lambda m: setattr(m.graph.node[0], "op_type", "Nonsense"), "Nonsense"),
        (lambda m: setattr(m.graph.node[0], "domain", "elsewhere"), "elsewhere"),
    ],
)
def test_a_version_or_an_operator_that_onnx_runtime_does_not_know_is_named(
    tmp_path: Path, change: Any, words: str
) -> None:
    made = model(SAME)
    change(made)
    with pytest.raises(SignatureError, match=rf"cannot load it .*{words}"):
        export_onnx(made, tmp_path / "g")


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="is not there or no file"):
        export_onnx(tmp_path / "absent.onnx", tmp_path / "g")
    with pytest.raises(ExportError, match="of type dict was given, expected an"):
        export_onnx({}, tmp_path / "g")
    (tmp_path / "text.onnx").write_text("no graph")
    with pytest.raises(SignatureError, match=r"text.onnx: .*cannot load it"):
        export_onnx(tmp_path / "text.onnx", tmp_path / "g")


def test_the_command_exports_a_described_onnx_file(tmp_path: Path) -> None:
    onnx.save(model(SAME), tmp_path / "net.onnx")
    code = f"from converters.exporters import OnnxModel\nnet = OnnxModel({str(tmp_path / 'net.onnx')!r})\n"
    (tmp_path / "models.py").write_text(code)
    result = CliRunner().invoke(export, [f"{tmp_path / 'models.py'}:net", "-o", str(tmp_path / "out"), "--name", "abs"])
    assert (result.exit_code, "largest difference: y 0.0e+00" in result.stdout) == (0, True), result.output
    assert prepare(tmp_path / "out" / "abs").spec.name == "abs"
    result = CliRunner().invoke(export, [f"{tmp_path / 'models.py'}:net", "--layout", "legacy"])
    assert (result.exit_code, "OnnxModel has no --layout" in result.stderr) == (1, True)
