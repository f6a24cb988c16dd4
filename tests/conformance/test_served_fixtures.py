"""The shared fixtures through the whole path: converted, served, and asked by stock clients.

Case numbers are those of the nereid facts (section 8). Skipped where the fixtures are not beside the checkout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as tritonclient
from serving import Served, checkpoint, chunk, infer, meta, tensor_of
from tritonclient.utils import InferenceServerException

FIXTURES = Path(__file__).resolve().parents[3] / "shared" / "fixtures"
FOLDERS, BUNDLES = FIXTURES / "nereid-ml-backends", FIXTURES / "reactant" / "generated"
SERVED_FOLDERS = ("model3", "multi", "rustint", "onnxadd")
SERVED_BUNDLES = ("affine_legacy", "affine_xla", "scale4", "fixed_buffer_count", "pool_variants")

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(not FIXTURES.exists(), reason="../shared/fixtures is not beside this checkout"),
]

R16 = np.arange(16, dtype=np.float32)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    pytest.importorskip("torch", reason="the torch extra is not installed in this interpreter")
    folder = tmp_path_factory.mktemp("conformance")
    models = folder / "models"
    models.mkdir()
    for path in [*(FOLDERS / name for name in SERVED_FOLDERS), *(BUNDLES / name for name in SERVED_BUNDLES)]:
        (models / path.name).symlink_to(path)
    entries = "".join(f"  - {{name: {n}, device: cpu, queue_capacity: 16}}\n" for n in SERVED_FOLDERS + SERVED_BUNDLES)
    (folder / "nereid.yaml").write_text(
        f"server: {{bind_addr: '127.0.0.1:0', ml_backends_path: models}}\nmodels:\n{entries}"
    )
    server = Served(folder, "--config", str(folder / "nereid.yaml"))
    yield server
    assert server.end()[0] == 0


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with tritonclient.InferenceServerClient(served.state["address"]) as client:
        yield client


def expected(model: str, case: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDERS / model / "expected.json").read_text())["cases"][case]
    return found


def model3(rows: np.ndarray) -> bytes:
    """A direct forward pass, for bit equality."""
    import torch

    module = torch.jit.load(str(FOLDERS / "model3" / "mlp.pt"))
    with torch.inference_mode():
        result: bytes = module(torch.from_numpy(rows.copy())).numpy().tobytes()
    return result


def test_c1_c2_one_row_in_one_or_two_chunks_equals_the_direct_forward_pass(served: Served) -> None:
    data = R16.tobytes()
    one = checkpoint(served, [meta("model3"), chunk([1, 16], data)])
    two = checkpoint(served, [meta("model3"), chunk([1, 16], data[:32], end=False), chunk([1, 16], data[32:])])
    assert tensor_of(one) == tensor_of(two) == ([1, 4], model3(R16[None]))
    values = expected("model3", 0)["outputs"]["output"]["data"]
    np.testing.assert_allclose(np.frombuffer(tensor_of(one)[1], np.float32), values, rtol=1e-5, atol=1e-5)


def test_c3_a_batch_of_two_has_two_rows(served: Served) -> None:
    rows = np.arange(32, dtype=np.float32).reshape(2, 16)
    assert tensor_of(checkpoint(served, [meta("model3"), chunk([2, 16], rows.tobytes())])) == ([2, 4], model3(rows))


def test_c4_a_bare_row_is_a_batch_of_one(served: Served) -> None:
    responses = checkpoint(served, [meta("model3"), chunk([16], R16.tobytes())])
    assert tensor_of(responses) == ([1, 4], model3(R16[None]))


@pytest.mark.parametrize(
    ("case", "messages", "code"),
    [
        ("C5", [meta("model3"), chunk([1, 15], bytes(60))], "INVALID_ARGUMENT"),
        ("C6", [meta("model3"), chunk([1, 1, 16], bytes(64))], "INVALID_ARGUMENT"),
        ("C7", [meta("model3"), chunk([11, 16], bytes(704))], "INVALID_ARGUMENT"),
        ("C18", [meta("nobody"), chunk([1, 16], bytes(64))], "NOT_FOUND"),
        ("C19", [chunk([1, 16], bytes(64))], "INVALID_ARGUMENT"),
        ("C20", [], "INVALID_ARGUMENT"),
    ],
)
def test_bad_checkpoints_end_with_their_code(served: Served, case: str, messages: list[Any], code: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        checkpoint(served, messages)
    assert caught.value.code() is grpc.StatusCode[code], case


def test_k1_k2_raw_and_typed_contents_give_the_same_bytes(served: Served, client: Any) -> None:
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name="model3", id="typed")
    tensor = request.inputs.add(name="input", datatype="FP32", shape=[1, 16])
    tensor.contents.fp32_contents.extend(R16)
    with grpc.insecure_channel(served.state["address"]) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            service_pb2.ModelInferRequest.SerializeToString,
            service_pb2.ModelInferResponse.FromString,
        )
        typed = call(request)
    raw = infer(client, "model3", input=R16[None])
    assert typed.id == "typed"
    assert {name: array.tobytes() for name, array in raw.items()} == {"output": model3(R16[None])}
    assert list(typed.raw_output_contents) == [model3(R16[None])]


def test_k5_onnxadd_adds_one_and_names_its_platform(client: Any) -> None:
    answer = infer(client, "onnxadd", input=np.array([[1, 2, 3, 4]], np.float32))
    assert answer["output"].tolist() == [[2, 3, 4, 5]]
    assert client.get_model_metadata("onnxadd").platform == "onnxruntime_onnx"


def test_k9_inputs_bind_by_name_whatever_their_order(client: Any) -> None:
    a, b = np.array([[1, 2, 3, 4]], np.float32), np.array([[10, 20, 30, 40]], np.float32)
    answer = infer(client, "multi", b=b, a=a)
    assert {name: array.tolist() for name, array in answer.items()} == {
        "sum": [[11, 22, 33, 44]],
        "prod": [[10, 40, 90, 160]],
    }


def test_k15_metadata_names_the_tensors_of_a_nested_contract(client: Any) -> None:
    metadata = client.get_model_metadata("multi")
    assert [t.name for t in metadata.inputs] == ["a", "b"]
    assert [t.name for t in metadata.outputs] == ["sum", "prod"]


def test_k16_integers_stay_integers(client: Any) -> None:
    answer = infer(client, "rustint", input=np.array([[10, 20, 30, 40]], np.int64))
    assert (answer["output"].dtype, answer["output"].tolist()) == (np.dtype(np.int64), [[11, 21, 31, 41]])


@pytest.mark.parametrize("model", SERVED_FOLDERS)
def test_every_expected_case_of_a_folder_is_answered(client: Any, model: str) -> None:
    cases = json.loads((FOLDERS / model / "expected.json").read_text())["cases"]
    for case in cases:
        arrays, wanted = (
            {name: tensor_array(tensor) for name, tensor in case[kind].items()} for kind in ("inputs", "outputs")
        )
        got = infer(client, model, **arrays)
        assert got.keys() == wanted.keys()
        for name, array in wanted.items():
            assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)
            np.testing.assert_allclose(got[name], array, rtol=case["rtol"], atol=case["atol"], err_msg=case["name"])


def tensor_array(tensor: dict[str, Any]) -> np.ndarray:
    dtype = {"FP32": np.float32, "INT64": np.int64}[tensor["datatype"]]
    return np.frombuffer(bytes.fromhex(tensor["le_hex"]), dtype).reshape(tensor["shape"])


@pytest.mark.parametrize("model", ["affine_legacy", "affine_xla"])
def test_both_weight_layouts_give_the_same_bits(client: Any, model: str) -> None:
    case = json.loads((BUNDLES / "expected.json").read_text())["affine"]
    x = np.array(case["x_row_major"], np.float32).reshape(case["wire_input_shape"])
    y = infer(client, model, x=x)["y"]
    assert list(y.shape) == case["wire_output_shape"]
    assert y.tobytes() == np.array(case["y_row_major"], np.float32).tobytes()


def test_a_bundle_without_batch_sizes_answers_at_its_own_shape(client: Any) -> None:
    cases = json.loads((BUNDLES / "expected.json").read_text())
    scale4, fixed = cases["scale4"], cases["fixed_buffer_count"]
    assert infer(client, "scale4", x=np.array(scale4["x"], np.float32))["y"].tolist() == scale4["y"]
    answer = infer(client, "fixed_buffer_count", x=np.array(fixed["x"], np.float32))
    assert answer["VALUES"].tobytes() == np.array(fixed["VALUES"], np.float32).tobytes()
    assert answer["COUNT"].tolist() == fixed["COUNT"]


def test_variants_are_told_apart_at_the_public_address(client: Any) -> None:
    cases = json.loads((BUNDLES / "expected.json").read_text())["pool_variants"]
    for case in cases:
        image = np.array(case["input_row_major"], np.float32).reshape(case["wire_shape"])
        # a scalar per row travels as a dimension of one
        assert infer(client, "pool_variants", img=image)["total"][:, 0].tolist() == case["total"]
    for shape, words in (([1, 4, 2], r"no program for img\[-1, 4, 2\]; compiled are"), ([3, 2, 4], "must be <= 2")):
        with pytest.raises(InferenceServerException, match=words) as caught:
            infer(client, "pool_variants", img=np.zeros(shape, np.float32))
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_c17_the_models_are_listed_as_configured(served: Served) -> None:
    from native_service.proto import inference_pb2 as pb

    with grpc.insecure_channel(served.state["address"]) as channel:
        names = channel.unary_unary(
            "/inference.Nereid/ViewModels", pb.ViewModelsRequest.SerializeToString, pb.ViewModelsResponse.FromString
        )
        health = channel.unary_unary(
            "/inference.Nereid/HealthCheck", pb.HealthCheckRequest.SerializeToString, pb.HealthCheckResponse.FromString
        )
        assert tuple(names(pb.ViewModelsRequest()).model_names) == SERVED_FOLDERS + SERVED_BUNDLES
        assert health(pb.HealthCheckRequest()).status == "ok"
