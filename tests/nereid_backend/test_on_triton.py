"""The runtime inside the real tritonserver. ``make test`` runs this file on both numpy generations."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from fake_engine import write_fake
from serving import WIRE_DTYPES, answered, input_tensor, random_tensors, raw_infer
from tritonclient.utils import InferenceServerException

from nereid_backend import dtypes
from nereid_backend.errors import ModelLoadError
from nereid_backend.spec import TensorSpec

pytestmark = pytest.mark.triton


def rows(name: str, dtype: str, *row_shape: int) -> TensorSpec:
    return TensorSpec(name, dtype, (-1, *row_shape), 0)


def infer(client: Any, model: str, output: str, **arrays: np.ndarray) -> np.ndarray:
    tensors = [input_tensor(name, array) for name, array in arrays.items()]
    return client.infer(model, tensors).as_numpy(output)


@pytest.fixture(scope="session")
def identities(triton: Any) -> str:
    """One model with an input and an output of every wire dtype; outputs come back by different ways."""
    inputs = tuple(rows(f"in_{row.token}", row.token, 5) for row in WIRE_DTYPES)
    outputs = tuple(rows(f"out_{row.token}", row.token, 5) for row in WIRE_DTYPES)
    body = """
        results = []
        for index, array in enumerate(inputs):
            if index % 3 == 0:
                array = np.asfortranarray(array)   # strided
            elif index % 3 == 1:
                array = array.copy()
                array.flags.writeable = False      # as numpy views of JAX results are
            results.append(array)
        return results
"""
    return write_fake(triton, "identities", body, inputs, outputs, max_batch_size=8, coalesce=True)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_random_bytes_of_every_dtype_come_back_exactly(triton: Any, identities: str, count: int) -> None:
    sent, printed = random_tensors(np.random.default_rng(count).bytes, count, 5), len(triton.printed)
    response = raw_infer(triton.address, identities, sent)
    assert answered(response) == {name.replace("in_", "out_"): value for name, value in sent.items()}
    assert [line for line in triton.printed[printed:] if "Error" in line] == []


def test_zero_rows_come_back_as_zero_rows(triton: Any) -> None:
    tensor = TensorSpec("x", "f32", (-1, 3))
    write_fake(triton, "any_rows", "return inputs", (tensor,), (TensorSpec("y", "f32", (-1, 3)),))
    response = raw_infer(triton.address, "any_rows", {"x": ("FP32", [0, 3], b"")})
    assert (list(response.outputs[0].shape), response.raw_output_contents[0]) == ([0, 3], b"")


def test_a_scalar_travels_as_one_dimension_of_one(client: Any, triton: Any) -> None:
    scalar = TensorSpec("x", "f32", ())
    per_row = rows("x", "i32")
    write_fake(triton, "scalar", "assert inputs[0].shape == (); return [inputs[0] + inputs[0]]", (scalar,), (scalar,))
    write_fake(
        triton,
        "row_scalar",
        "assert inputs[0].ndim == 1; return [inputs[0] * 2]",
        (per_row,),
        (per_row,),
        max_batch_size=4,
    )
    assert infer(client, "scalar", "x", x=np.array([21], np.float32)).tolist() == [42]
    assert infer(client, "row_scalar", "x", x=np.array([[1], [2]], np.int32)).tolist() == [[2], [4]]


def test_requests_that_share_a_run_each_get_their_own_rows(triton: Any) -> None:
    body = "time.sleep(0.02); return [inputs[0] + 1, np.full(len(inputs[0]), len(inputs[0]), np.int32)]"
    write_fake(
        triton, "counts", body, (rows("x", "f32", 2),), (rows("y", "f32", 2), rows("size", "i32")),
        max_batch_size=16, coalesce=True,
    )  # fmt: skip
    results: dict[int, Any] = {}

    def call(index: int) -> None:
        data = np.full((1 + index % 3, 2), index, np.float32)
        response = raw_infer(triton.address, "counts", {"x": ("FP32", list(data.shape), data.tobytes())})
        y, size = response.raw_output_contents
        results[index] = np.frombuffer(y, np.float32), np.frombuffer(size, np.int32)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {i: y.tolist() for i, (y, _) in results.items()} == {i: [i + 1] * 2 * (1 + i % 3) for i in range(24)}
    assert max(size.max() for _, size in results.values()) > 3, "no two requests ever shared a run"


def test_a_request_that_breaks_a_shared_run_fails_alone(triton: Any) -> None:
    body = """
        time.sleep(0.02)
        if (inputs[0] < 0).any():
            raise InvalidArgument("negative index")
        return [inputs[0] * 10]
"""
    write_fake(triton, "picky", body, (rows("x", "i32", 1),), (rows("y", "i32", 1),), max_batch_size=16, coalesce=True)
    outcome: dict[int, Any] = {}

    def call(index: int) -> None:
        value = -1 if index % 8 == 5 else index
        try:
            response = raw_infer(triton.address, "picky", {"x": ("INT32", [1, 1], np.int32(value).tobytes())})
            outcome[index] = np.frombuffer(response.raw_output_contents[0], np.int32).tolist()
        except grpc.RpcError as error:
            outcome[index] = (error.code(), error.details())

    threads = [threading.Thread(target=call, args=(i,)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bad = (grpc.StatusCode.INVALID_ARGUMENT, "negative index")
    assert outcome == {i: bad if i % 8 == 5 else [i * 10] for i in range(24)}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return [inputs[0].astype(np.float64)]", "output 'y' has dtype float64, expected float32"),
        ("return [inputs[0][:, :1]]", "output 'y' has shape [1, 1], expected [1, 2]"),
        ("return [inputs[0], inputs[0]]", "returned 2 outputs, expected 1"),
        ("return []", "returned 0 outputs, expected 1"),
        ("raise ZeroDivisionError('secret detail')", "failed with ZeroDivisionError"),
    ],
)
def test_a_wrong_result_is_an_internal_error_with_a_short_text(triton: Any, body: str, words: str) -> None:
    name = f"wrong_{abs(hash(body))}"
    write_fake(triton, name, body, (rows("x", "f32", 2),), (rows("y", "f32", 2),), max_batch_size=4)
    with pytest.raises(grpc.RpcError) as caught:
        raw_infer(triton.address, name, {"x": ("FP32", [1, 2], bytes(8))})
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert words in caught.value.details()
    assert not any(leak in caught.value.details() for leak in ("Traceback", ".py", "secret", "/"))


def test_a_cancelled_request_is_dropped_before_it_runs(triton: Any, tmp_path: Path) -> None:
    log, go = tmp_path / "runs", tmp_path / "go"
    body = f"""
        import os
        value = int(inputs[0][0, 0])
        with open({str(log)!r}, "a") as log:
            log.write(f"{{value}} ")
        time.sleep(0.05)
        while value and not os.path.exists({str(go)!r}):
            time.sleep(0.01)
        return inputs
    """
    write_fake(triton, "slow", body, (rows("x", "i32", 1),), (rows("x", "i32", 1),), max_batch_size=1)
    log.write_text("")

    def call(value: int, timeout: float) -> grpc.StatusCode:
        try:
            raw_infer(triton.address, "slow", {"x": ("INT32", [1, 1], np.int32(value).tobytes())}, timeout=timeout)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    with ThreadPoolExecutor() as pool:
        running = pool.submit(call, 1, 60)
        while log.read_text().split() != ["1"]:
            time.sleep(0.01)
        assert call(2, 0.3) is grpc.StatusCode.DEADLINE_EXCEEDED
        waiting = pool.submit(call, 3, 60)
        time.sleep(0.5)  # Triton's clock of the call began a little later than ours
        go.touch()
        assert (running.result(), waiting.result()) == (grpc.StatusCode.OK, grpc.StatusCode.OK)
    assert log.read_text().split() == ["1", "3"]


def test_a_bundle_answers_at_every_size_with_padding(client: Any, triton: Any, affine_bundle: Path) -> None:
    name = triton.add(affine_bundle)
    x = np.random.default_rng(0).integers(-4, 5, (8, 4)).astype(np.float32)
    w, b = affine_weights()
    for count in range(1, 5):
        got = infer(client, name, "y", x=x[:count])
        assert got.tolist() == (np.einsum("nc,cdk->ndk", x[:count], w) + b).tolist()
    with pytest.raises(InferenceServerException, match="batch-size must be <= 4"):
        infer(client, name, "y", x=x[:5])


def affine_weights() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return (rng.integers(-8, 9, shape).astype(np.float32) / 8 for shape in ((4, 3, 2), (3, 2)))


@pytest.fixture(scope="session")
def affine_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """y[n,d,k] = x[n,c] w[c,d,k] + b[d,k] with programs for 1 and 4 rows, written by hand."""
    import jax
    import jax.export

    from converters import weights

    bundle = tmp_path_factory.mktemp("bundles") / "affine"
    bundle.mkdir()
    w, b = affine_weights()
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (w, b)]
    for size in (1, 4):
        x = jax.ShapeDtypeStruct((size, 4), np.float32)
        function = jax.jit(lambda x, w, b: jax.numpy.einsum("nc,cdk->ndk", x, w) + b)
        exported = jax.export.export(function, platforms=["cpu"])(x, *arguments)
        (bundle / f"model.b{size}.mlir").write_bytes(exported.mlir_module_serialized)
    weights.write(
        bundle / "weights.safetensors",
        {"w": w, "b": b},
        {"argument_order": json.dumps(["w", "b"]), "axis_order": "xla"},
    )
    (bundle / "manifest.yaml").write_text(
        "format_version: '2.1'\n"
        "executable_inputs: [{name: x, dtype: f32, shape: cn, dims: {c: 4}}]\n"
        "executable_outputs: [{name: y, dtype: f32, shape: kdn, dims: {k: 2, d: 3}}]\n"
        "batching: {compiled_batch_sizes: [1, 4]}\n"
    )
    return bundle


def test_an_onnx_file_answers_by_its_own_names(client: Any, triton: Any, tmp_path: Path) -> None:
    from onnx import TensorProto, helper, save

    graph = helper.make_graph(
        [helper.make_node("Add", ["left", "right"], ["sum"])],
        "add",
        [helper.make_tensor_value_info(n, TensorProto.INT64, ["batch", 3]) for n in ("left", "right")],
        [helper.make_tensor_value_info("sum", TensorProto.INT64, ["batch", 3])],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "adder.onnx")
    name = triton.add(tmp_path / "adder.onnx")
    left, right = np.arange(6).reshape(2, 3), np.full((2, 3), 2**40)
    assert infer(client, name, "sum", right=right, left=left).tolist() == (left + right).tolist()


def test_a_torchscript_folder_answers_in_contract_order(client: Any, triton: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the torch extra is not installed in this interpreter")
    folder = tmp_path / "pair"
    folder.mkdir()

    class Pair(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return a + b, a * b

    torch.jit.save(torch.jit.trace(Pair(), (torch.zeros(1, 2), torch.zeros(1, 2))), str(folder / "model.pt"))
    (folder / "model_inference.textproto").write_text(
        'max_batch_size: 4 input { name: "a" dims: [2] } input { name: "b" dims: [2] } '
        'output { name: "sum" dims: [2] } output { name: "product" dims: [2] }'
    )
    name = triton.add(folder)
    a, b = np.array([[1, 2]], np.float32), np.array([[10, 20]], np.float32)
    assert infer(client, name, "product", b=b, a=a).tolist() == [[10, 40]]
    assert infer(client, name, "sum", b=b, a=a).tolist() == [[11, 22]]


def test_random_bytes_of_every_dtype_survive_onnx_runtime(triton: Any, tmp_path: Path) -> None:
    from onnx import TensorProto, helper, save

    def port(way: str, row: dtypes.DType) -> Any:
        kind = {"float": "FLOAT", "double": "DOUBLE"}.get(row.onnx, row.onnx.upper())
        return helper.make_tensor_value_info(f"{way}_{row.token}", TensorProto.DataType.Value(kind), ["n", 3])

    graph = helper.make_graph(
        [helper.make_node("Identity", [f"in_{row.token}"], [f"out_{row.token}"]) for row in WIRE_DTYPES],
        "everything",
        *[[port(way, row) for row in WIRE_DTYPES] for way in ("in", "out")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    save(model, tmp_path / "everything.onnx")
    name = triton.add(tmp_path / "everything.onnx")
    for seed in range(10):
        sent = random_tensors(np.random.default_rng(seed).bytes, 2, 3)
        response = raw_infer(triton.address, name, sent)
        assert answered(response) == {key.replace("in_", "out_"): value for key, value in sent.items()}


def test_random_bytes_of_every_dtype_survive_torch(triton: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the torch extra is not installed in this interpreter")
    folder = tmp_path / "echo"
    folder.mkdir()
    echo = torch.jit.trace(lambda *x: x, tuple(torch.zeros(2, 3) for _ in WIRE_DTYPES), check_trace=False)
    torch.jit.save(echo, str(folder / "echo.pt"))
    blocks = [
        f'{kind} {{ name: "{way}_{row.token}" data_type: "{row.kserve}" dims: [3] }}'
        for kind, way in (("input", "in"), ("output", "out"))
        for row in WIRE_DTYPES
    ]
    (folder / "model_inference.textproto").write_text("max_batch_size: 4\n" + "\n".join(blocks))
    name = triton.add(folder)
    for seed in range(10):
        sent = random_tensors(np.random.default_rng(seed).bytes, 2, 3)
        response = raw_infer(triton.address, name, sent)
        assert answered(response) == {key.replace("in_", "out_"): value for key, value in sent.items()}


def test_a_damaged_artifact_fails_the_load_with_one_short_reason(triton: Any, affine_bundle: Path) -> None:
    from converters.convert import convert

    convert(affine_bundle, triton.repository, name="damaged")
    weights = triton.repository / "damaged" / "1" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(ModelLoadError, match=r"weights\.safetensors: tensor .* truncated|damaged") as caught:
        triton.load("damaged")
    assert "\n" not in str(caught.value)
    assert str(triton.repository) not in str(caught.value)
