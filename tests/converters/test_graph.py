"""A bare ``.onnx`` file is a model of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")

from converters import graph
from converters.artifact import serve_as_is
from nereid_backend.errors import BundleError, SignatureError
from nereid_backend.spec import ModelSpec, Program, TensorSpec

F32 = 1


def read(path: Path, max_batch_size: int | None = None) -> Any:
    return serve_as_is(graph.read(path), "m", "cpu", max_batch_size)


def test_a_symbolic_first_axis_is_the_batch(plus_one: Any, run: Any, tmp_path: Path) -> None:
    path = plus_one(("batch", 4))
    prepared = read(path)
    assert prepared.spec == ModelSpec(
        "m",
        "onnx",
        "onnxruntime_onnx",
        (TensorSpec("x", "f32", (-1, 4), 0),),
        (TensorSpec("y", "f32", (-1, 4), 0),),
        (Program("model.onnx"),),
        max_batch_size=32,
        coalesce=True,
    )
    assert (prepared.files, prepared.notes) == ({"model.onnx": path}, ())
    assert [o.tolist() for o in run(prepared, tmp_path / "r", np.zeros((3, 4), np.float32))] == [[[1] * 4] * 3]


@pytest.mark.parametrize(("asked", "limit", "coalesce"), [(7, 7, True), (1, 1, False), (0, 0, False)])
def test_the_batch_limit_may_be_given(plus_one: Any, asked: int, limit: int, coalesce: bool) -> None:
    spec = read(plus_one(("batch", 4)), asked).spec
    assert (spec.max_batch_size, spec.coalesce, spec.inputs[0].shape) == (limit, coalesce, (-1, 4))


def test_the_limit_that_is_there_by_default_is_no_error_for_what_cannot_be_batched(plus_one: Any) -> None:
    for shape, limit in ((("batch", 4), 5), ((2, 4), 0)):
        assert serve_as_is(graph.read(plus_one(shape)), "m", "cpu", None, 5).spec.max_batch_size == limit


def test_a_fixed_shape_is_served_as_it_is(plus_one: Any) -> None:
    spec = read(plus_one((2, 4))).spec
    assert (spec.inputs, spec.max_batch_size, spec.coalesce) == ((TensorSpec("x", "f32", (2, 4)),), 0, False)


def test_a_fixed_shape_has_no_batch_limit(plus_one: Any) -> None:
    with pytest.raises(BundleError, match=r"--max-batch-size needs a symbolic first axis .*x \[2, 4\], y \[2, 4\]"):
        read(plus_one((2, 4)), 8)


def test_a_scalar_graph_is_served_as_it_is(plus_one: Any) -> None:
    spec = read(plus_one(())).spec
    assert (spec.inputs, spec.max_batch_size, spec.dims(spec.inputs[0])) == ((TensorSpec("x", "f32", ()),), 0, (1,))


def test_other_symbolic_axes_stay_variable(plus_one: Any) -> None:
    spec = read(plus_one(("batch", "time", 3))).spec
    assert (spec.inputs[0].shape, spec.dims(spec.inputs[0]), spec.coalesce) == ((-1, -1, 3), (-1, 3), True)


def test_axes_of_different_names_with_one_meaning_are_the_batch(plus_one: Any) -> None:
    spec = read(plus_one(("unk__1", 4), ("unk__2", 4))).spec
    assert (spec.max_batch_size, spec.coalesce) == (32, True)


def test_axes_of_different_names_and_meanings_are_not_the_batch(make_onnx: Any) -> None:
    path = make_onnx([("Transpose", ["x"], ["y"])], [("x", F32, ["a", "b"])], [("y", F32, ["b", "a"])], perm=[1, 0])
    prepared = read(path)
    assert (prepared.spec.max_batch_size, prepared.spec.inputs) == (0, (TensorSpec("x", "f32", (-1, -1)),))
    assert prepared.notes == ("the first axes have different names and no common meaning: not batched",)


def test_one_axis_name_whose_rows_influence_each_other_is_batched_but_not_shared(make_onnx: Any) -> None:
    path = make_onnx(
        [("ReduceMean", ["x"], ["m"]), ("Sub", ["x", "m"], ["y"])], [("x", F32, ["n", 2])], [("y", F32, ["n", 2])]
    )
    prepared = read(path)
    assert (prepared.spec.max_batch_size, prepared.spec.coalesce) == (32, False)
    assert prepared.notes == ("requests run one by one: a row gives another result beside other rows",)


@pytest.fixture
def with_external_data(tmp_path: Path) -> Callable[[str], Path]:
    """A model whose one weight lies in a file of the given name."""
    from onnx import TensorProto, external_data_helper, helper, numpy_helper, save

    def make(location: str) -> Path:
        weight = numpy_helper.from_array(np.arange(4, dtype=np.float32), "w")
        graph = helper.make_graph(
            [helper.make_node("Add", ["x", "w"], ["y"])],
            "external",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
            [weight],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        data = weight.raw_data
        external_data_helper.set_external_data(model.graph.initializer[0], location, 0, len(data))
        model.graph.initializer[0].ClearField("raw_data")
        model.graph.initializer[0].data_location = TensorProto.EXTERNAL
        if not location.startswith(("/", "..")):
            (tmp_path / location).parent.mkdir(exist_ok=True)
            (tmp_path / location).write_bytes(data)
        save(model, str(tmp_path / "model.onnx"))
        return tmp_path / "model.onnx"

    return make


@pytest.mark.parametrize("location", ["model.onnx.data", "weights.bin", "parts/w0"])
def test_external_data_travels_with_the_graph_whatever_its_name(
    with_external_data: Any, run: Any, tmp_path: Path, location: str
) -> None:
    prepared = read(with_external_data(location))
    assert sorted(prepared.files) == sorted(["model.onnx", location])
    assert run(prepared, tmp_path / "out", np.ones((1, 4), np.float32))[0].tolist() == [[1, 2, 3, 4]]


@pytest.fixture
def never_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: Any) -> Any:
        pytest.fail("ONNX Runtime has opened the model")

    monkeypatch.setattr(graph, "open_session", opened)


@pytest.mark.parametrize("location", ["../secret", "/etc/hostname"])
@pytest.mark.usefixtures("never_opened")
def test_external_data_outside_the_folder_is_refused(with_external_data: Any, location: str) -> None:
    with pytest.raises(BundleError, match=r"model\.onnx: external data .* lies outside"):
        read(with_external_data(location))


@pytest.mark.usefixtures("never_opened")
@pytest.mark.parametrize("where", ["function", "default", "branch", "sparse"])
def test_external_data_is_found_wherever_a_model_may_have_a_tensor(tmp_path: Path, where: str) -> None:
    from onnx import GraphProto, ModelProto, TensorProto

    def refer(tensor: TensorProto) -> None:
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="../secret")

    model = ModelProto()
    nodes = model.functions.add().node if where == "function" else model.graph.node
    if where == "default":
        refer(model.functions.add().attribute_proto.add(name="a").t)
    elif where == "sparse":
        refer(nodes.add().attribute.add(name="a").sparse_tensor.values)
    elif where == "branch":
        inner: GraphProto = nodes.add().attribute.add(name="a").g
        refer(inner.initializer.add())
    else:
        refer(nodes.add().attribute.add(name="a").t)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(SignatureError, match=r"external data '\.\./secret' lies outside"):
        graph.read(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    "location", ["model.py", "nereid.json", "__init__.py", "triton_python_backend_utils.py", "cupy/_core.abi3.so"]
)
def test_external_data_never_becomes_code_or_specification_of_the_served_model(
    with_external_data: Any, location: str
) -> None:
    with pytest.raises(BundleError, match=rf"{location},.* rename it"):
        read(with_external_data(location))


def test_a_file_that_is_no_model_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"garbage")
    with pytest.raises(SignatureError, match=r"^model\.onnx: ONNX Runtime"):
        read(tmp_path / "model.onnx")
