from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereid_backend import dtypes
from nereid_backend.engines import Port
from nereid_backend.engines.onnx import OnnxEngine, open_session, ports, threads_for
from nereid_backend.errors import DeviceMissing, EngineError, InvalidArgument, SignatureError
from nereid_backend.spec import ModelSpec, Program, TensorSpec

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
TensorProto, helper = onnx.TensorProto, onnx.helper

Value = tuple[str, int, list[Any]]


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """A model file of one node per (operator, inputs, outputs)."""

    def saved(nodes: Any, inputs: list[Value], outputs: list[Value], **attributes: Any) -> Path:
        graph = helper.make_graph(
            [helper.make_node(op, i, o, **attributes) for op, i, o in nodes],
            "g",
            [helper.make_tensor_value_info(*v) for v in inputs],
            [helper.make_tensor_value_info(*v) for v in outputs],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        onnx.save(model, str(tmp_path / "model.onnx"))
        return tmp_path / "model.onnx"

    return saved


def spec(inputs: list[TensorSpec], outputs: list[TensorSpec], **options: Any) -> ModelSpec:
    return ModelSpec("m", "onnx", "p", tuple(inputs), tuple(outputs), (Program("model.onnx"),), **options)


F32 = TensorProto.FLOAT


def subtract(save: Any) -> Path:
    return save(
        [("Sub", ["a", "b"], ["d"]), ("Mul", ["a", "b"], ["p"])],
        [("a", F32, ["n", 2]), ("b", F32, ["n", 2])],
        [("d", F32, ["n", 2]), ("p", F32, ["n", 2])],
    )


A, B = np.array([[1, 2]], np.float32), np.array([[10, 20]], np.float32)


def test_inputs_and_outputs_bind_by_name_in_the_specs_order(save: Any, rows: Any) -> None:
    path = subtract(save)
    for names, arrays in ((("a", "b"), [A, B]), (("b", "a"), [B, A])):
        model = spec([rows(n, "f32", 2) for n in names], [rows("p", "f32", 2), rows("d", "f32", 2)])
        product, difference = OnnxEngine.load(model, path.parent).run(arrays)
        assert (product.tolist(), difference.tolist()) == ([[10, 40]], [[-9, -18]])


def test_a_tensor_binds_by_the_graphs_own_name_when_it_has_another_on_the_wire(save: Any) -> None:
    path = subtract(save)
    model = spec(
        [TensorSpec("left", "f32", (-1, 2), 0, "a"), TensorSpec("right", "f32", (-1, 2), 0, "b")],
        [TensorSpec("out", "f32", (-1, 2), 0, "d")],
    )
    assert [o.tolist() for o in OnnxEngine.load(model, path.parent).run([A, B])] == [[[-9, -18]]]


@pytest.mark.parametrize("row", [r for r in dtypes.TABLE if r.kserve and r.token != "bf16"], ids=lambda r: r.token)
def test_every_wire_dtype_passes_exactly(save: Any, row: dtypes.DType) -> None:
    kind = TensorProto.DataType.Value({"float": "FLOAT", "double": "DOUBLE"}.get(row.onnx, row.onnx.upper()))
    path = save([("Identity", ["x"], ["y"])], [("x", kind, [3])], [("y", kind, [3])])
    array = np.array([0, 1, 1]).astype(row.numpy)
    (got,) = OnnxEngine.load(
        spec([TensorSpec("x", row.token, (3,))], [TensorSpec("y", row.token, (3,))]), path.parent
    ).run([array])
    assert (got.dtype, got.tobytes()) == (row.numpy, array.tobytes())


def test_bf16_passes_exactly_beside_another_dtype(save: Any) -> None:
    kind = TensorProto.BFLOAT16
    path = save(
        [("Identity", ["x"], ["y"]), ("Identity", ["i"], ["j"])],
        [("x", kind, [2, 2]), ("i", TensorProto.INT64, [1])],
        [("y", kind, [2, 2]), ("j", TensorProto.INT64, [1])],
    )
    bf16 = dtypes.by_token("bf16").numpy
    x = np.array([[1.5, -2], [3e38, 0]], bf16)
    model = spec(
        [TensorSpec("x", "bf16", (2, 2)), TensorSpec("i", "i64", (1,))],
        [TensorSpec("y", "bf16", (2, 2)), TensorSpec("j", "i64", (1,))],
    )
    y, j = OnnxEngine.load(model, path.parent).run([x, np.array([2**40])])
    assert (y.dtype, y.shape, y.tobytes(), j.tolist()) == (bf16, (2, 2), x.tobytes(), [2**40])


def test_a_graph_tells_its_own_ports(save: Any) -> None:
    path = save(
        [("Shape", ["x"], ["y"])], [("x", TensorProto.FLOAT16, ["n", 3, None])], [("y", TensorProto.INT64, [3])]
    )
    assert ports(open_session(path)) == ((Port("x", "f16", ("n", 3, None)),), (Port("y", "i64", (3,)),))


def test_a_shape_the_graph_refuses_is_the_callers_fault_in_one_line(save: Any, rows: Any) -> None:
    path = subtract(save)
    engine = OnnxEngine.load(spec([rows("a", "f32", 2), rows("b", "f32", 2)], [rows("d", "f32", 2)]), path.parent)
    with pytest.raises(InvalidArgument, match="ONNX Runtime refused the input: Got invalid dimensions") as caught:
        engine.run([np.zeros((1, 3), np.float32), B])
    assert "\n" not in str(caught.value)


def test_a_failing_graph_is_an_engine_error_and_the_session_goes_on(save: Any) -> None:
    path = save([("Gather", ["x", "i"], ["y"])], [("x", F32, [3]), ("i", TensorProto.INT64, [1])], [("y", F32, [1])])
    model = spec([TensorSpec("x", "f32", (3,)), TensorSpec("i", "i64", (1,))], [TensorSpec("y", "f32", (1,))])
    engine = OnnxEngine.load(model, path.parent)
    x = np.array([1, 2, 3], np.float32)
    with pytest.raises((EngineError, InvalidArgument), match=r"(?i)ONNX.*(index|indices)") as caught:
        engine.run([x, np.array([99])])
    assert "\n" not in str(caught.value)
    assert engine.run([x, np.array([2])])[0].tolist() == [3]


@pytest.mark.parametrize(
    ("mib", "processors", "instances", "threads"),
    [(0, 8, 1, 1), (31, 8, 1, 1), (32, 8, 1, 2), (50, 8, 1, 3), (500, 8, 1, 8), (500, 8, 3, 2), (500, 2, 4, 1)],
)
def test_a_large_model_runs_in_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mib: int, processors: int, instances: int, threads: int
) -> None:
    (tmp_path / "data").mkdir()
    for name in ("model.onnx", "data/weights"):  # weights may lie beside the graph
        with (tmp_path / name).open("wb") as file:
            file.truncate(mib << 19)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    assert threads_for(tmp_path, instances) == threads


@pytest.mark.parametrize(("said", "threads"), [(None, 3), (1, 1)])
def test_the_number_of_threads_is_the_specs_where_it_says_one(
    save: Any, rows: Any, monkeypatch: pytest.MonkeyPatch, said: int | None, threads: int
) -> None:
    path = subtract(save)
    monkeypatch.setattr("nereid_backend.engines.onnx.threads_for", lambda *_: 3)
    opened = []
    monkeypatch.setattr(
        "nereid_backend.engines.onnx.open_session", lambda *arguments: opened.append(open_session(*arguments))
    )
    OnnxEngine.load(spec([rows("a", "f32", 2), rows("b", "f32", 2)], [rows("d", "f32", 2)], threads=said), path.parent)
    assert [session.get_session_options().intra_op_num_threads for session in opened] == [threads]


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SignatureError, match=r"^model\.onnx: ONNX Runtime .* cannot load it") as caught:
        OnnxEngine.load(spec([], []), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"garbage", bytes(range(256)) * 10, b"\x08\x09"])
def test_a_file_that_is_no_model_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(SignatureError, match=r"^model\.onnx: ONNX Runtime .* cannot load it"):
        open_session(tmp_path / "model.onnx")


def test_external_data_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    weight = onnx.numpy_helper.from_array(np.zeros((64, 64), np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", F32, [1, 64])],
        [helper.make_tensor_value_info("y", F32, [1, 64])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(
        model, str(tmp_path / "model.onnx"), save_as_external_data=True, location="model.onnx.data", size_threshold=0
    )
    (tmp_path / "model.onnx.data").unlink()
    with pytest.raises(SignatureError, match=r"^model\.onnx: .*check the file, its opset and its external data"):
        open_session(tmp_path / "model.onnx")


def test_a_tensor_of_complex_numbers_is_refused_by_name(save: Any) -> None:
    kind = TensorProto.COMPLEX64
    path = save([("Identity", ["words"], ["y"])], [("words", kind, [1])], [("y", kind, [1])])
    with pytest.raises(SignatureError, match=r"'words' .*only tensors of numbers and texts|cannot load it"):
        ports(open_session(path))


def test_texts_pass_as_bytes_and_must_be_utf8(save: Any) -> None:
    path = save([("Identity", ["x"], ["y"])], [("x", TensorProto.STRING, ["n"])], [("y", TensorProto.STRING, ["n"])])
    assert [port.dtype for side in ports(open_session(path)) for port in side] == ["bytes", "bytes"]
    tensors = [(TensorSpec(name, "bytes", (-1,), 0),) for name in "xy"]
    engine = OnnxEngine(open_session(path), ModelSpec("texts", "onnx", "onnxruntime_onnx", *tensors, ()))
    for texts in ([], [b"", b"a\0b", "\u00e4".encode()]):
        [result] = engine.run([np.array(texts, object)])
        assert (result.dtype.kind, result.tolist()) == ("O", texts)
    with pytest.raises(InvalidArgument, match="input 'x' holds a text that is not UTF-8"):
        engine.run([np.array([b"\xff"], object)])


def test_a_sequence_is_refused_by_name(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("SequenceConstruct", ["x"], ["s"])],
        "g",
        [helper.make_tensor_value_info("x", F32, [1])],
        [helper.make_tensor_sequence_value_info("s", F32, [1])],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(tmp_path / "m.onnx")
    )
    with pytest.raises(SignatureError, match=r"ONNX tensor 's' is a seq\(tensor\(float\)\)"):
        ports(open_session(tmp_path / "m.onnx"))


def test_cuda_on_a_build_without_it_is_refused_with_what_to_install(save: Any, rows: Any) -> None:
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    path = subtract(save)
    model = spec([rows("a", "f32", 2), rows("b", "f32", 2)], [rows("d", "f32", 2)])
    words = "device 'cuda:1' is not there: this ONNX Runtime offers .*CPUExecutionProvider.*install onnxruntime-gpu"
    with pytest.raises(DeviceMissing, match=words):
        OnnxEngine.load(replace(model, device="cuda:1"), path.parent)
    with pytest.raises(DeviceMissing, match=words):
        OnnxEngine.check_device("cuda:1")


def test_a_cuda_provider_that_does_not_start_is_refused_instead_of_running_on_the_cpu(
    save: Any, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime itself falls back with only a warning."""
    path = subtract(save)
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    original = ort.InferenceSession
    monkeypatch.setattr(ort, "InferenceSession", lambda p, o, providers: original(p, o, providers=providers[-1:]))
    with pytest.raises(DeviceMissing, match="device 'cuda' was asked for but ONNX Runtime started without"):
        open_session(path, "cuda")


def test_the_library_reports_to_nobody_and_leaves_no_file(save: Callable[..., Path], tmp_path: Path) -> None:
    """Its telemetry keeps the number of its session in the temporary folder."""
    value = [("x", TensorProto.FLOAT, [2]), ("y", TensorProto.FLOAT, [2])]
    model = save([("Neg", ["x"], ["y"])], value[:1], value[1:])
    (folder := tmp_path / "temporary").mkdir()
    code = (
        "import pathlib, sys; from nereid_backend.engines.onnx import open_session as o; o(pathlib.Path(sys.argv[1]))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"}
    subprocess.run([sys.executable, "-c", code, model], env={**environment, "TMPDIR": str(folder)}, check=True)
    assert list(folder.iterdir()) == []
