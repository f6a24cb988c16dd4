"""The demo's two-stage pipeline at the public address: it reads digits, and its callees are nobody else's business."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as tritonclient
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from serving import Served, input_tensor, raw_infer
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from native_service.proto import inference_pb2

pytestmark = pytest.mark.triton

KSERVE, NEREID = "inference.GRPCInferenceService", "inference.Nereid"


@pytest.fixture(scope="module")
def served(demo_bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """``reader`` with one callee that the settings name as well and one that they do not."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "nereid.yaml").write_text(
        f"server: {{bind_addr: '127.0.0.1:0', ml_backends_path: {demo_bundles}}}\n"
        "models:\n"
        "  - {name: reader, device: cpu, queue_capacity: 4}\n"
        "  - {name: reader_classify, device: cpu, queue_capacity: 4}\n"
    )
    server = Served(folder, "--config", str(folder / "nereid.yaml"))
    yield server
    code, output = server.end()
    assert code == 0, output
    assert "hooks.py is run when the model is loaded" in output


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    with tritonclient.InferenceServerClient(served.state["address"]) as client:
        yield client


def call(served: Served, method: str, request: Any, response: Any) -> Any:
    with grpc.insecure_channel(served.state["address"]) as channel:
        ask = channel.unary_unary(
            method, request_serializer=type(request).SerializeToString, response_deserializer=response.FromString
        )
        return ask(request, timeout=30)


def test_the_pipeline_reads_strips_of_digits(client: Any, demo_bundles: Path) -> None:
    held_out = json.loads((demo_bundles / "strips.json").read_text())
    strips = np.asarray(held_out["strips"], np.float32)
    answers = [client.infer("reader", [input_tensor("strip", strip)]) for strip in strips]
    read = [answer.as_numpy("digits").tolist() for answer in answers]
    assert sum(text == got for text, got in zip(held_out["texts"], read, strict=True)) >= 0.7 * len(strips)
    crops = [
        strip[:, column : column + 8].reshape(1, 64)
        for strip, answer in zip(strips[:5], answers, strict=False)
        for column in answer.as_numpy("columns")
    ]
    alone = [client.infer("reader_classify", [input_tensor("pixels", crop)]) for crop in crops]
    assert [int(one.as_numpy("probabilities").argmax()) for one in alone] == [
        digit for text in read[:5] for digit in text
    ]


def test_a_strip_without_digits_reads_as_nothing(client: Any) -> None:
    answer = client.infer("reader", [input_tensor("strip", np.zeros((8, 64), np.float32))])
    assert [answer.as_numpy(name).shape for name in ("digits", "columns")] == [(0,), (0,)]


def test_lists_show_what_the_settings_name(served: Served, client: Any) -> None:
    named = {"reader", "reader_classify"}
    assert set(served.state["models"]) == named
    assert {model.name for model in client.get_model_repository_index().models} == named
    assert {stats.name for stats in client.get_inference_statistics().model_stats} == named
    view = call(served, f"/{NEREID}/ViewModels", inference_pb2.ViewModelsRequest(), inference_pb2.ViewModelsResponse)
    assert set(view.model_names) == named


def test_a_callee_the_settings_do_not_name_is_not_found(served: Served, client: Any) -> None:
    assert not client.is_model_ready("reader_find")
    strip = {"strip": ("FP32", [1, 8, 64], bytes(4 * 8 * 64))}
    asked = {
        "infer": lambda: raw_infer(served.state["address"], "reader_find", strip),
        "left out batch": lambda: raw_infer(served.state["address"], "reader_find", {"strip": ("FP32", [8, 64], b"")}),
        **{
            method: lambda method=method: call(
                served,
                f"/{KSERVE}/{method}",
                getattr(service_pb2, f"{method}Request")(name="reader_find"),
                getattr(service_pb2, f"{method}Response"),
            )
            for method in ("ModelMetadata", "ModelConfig", "ModelStatistics")
        },
        "health": lambda: call(
            served, "/grpc.health.v1.Health/Check", HealthCheckRequest(service="reader_find"), HealthCheckResponse
        ),
    }
    codes = {}
    for what, ask in asked.items():
        with pytest.raises(grpc.RpcError) as caught:
            ask()
        codes[what] = caught.value.code()
    assert codes == dict.fromkeys(asked, grpc.StatusCode.NOT_FOUND)


def test_metadata_of_a_meta_model_is_its_client_contract(client: Any) -> None:
    metadata = client.get_model_metadata("reader", as_json=True)
    assert (metadata["platform"], metadata["inputs"], metadata["outputs"]) == (
        "meta",
        [{"name": "strip", "datatype": "FP32", "shape": ["8", "64"]}],
        [{"name": name, "datatype": "INT32", "shape": ["-1"]} for name in ("digits", "columns")],
    )


def test_a_wrong_strip_is_refused_and_the_next_one_read(client: Any) -> None:
    with pytest.raises(InferenceServerException, match=r"unexpected shape for input 'strip'"):
        client.infer("reader", [input_tensor("strip", np.zeros((8, 63), np.float32))])
    assert client.infer("reader", [input_tensor("strip", np.zeros((8, 64), np.float32))]) is not None
