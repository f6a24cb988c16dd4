"""What ``nereid serve --log-format json`` says of calls that fail; the real Envoy and Triton."""

from __future__ import annotations

import json
import time
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as tritonclient
from hooked_bundle import tensor, write_bundle
from serving import Served, checkpoint, chunk, input_tensor, meta
from tritonclient.utils import InferenceServerException

pytest.importorskip("jax")

pytestmark = pytest.mark.triton

HOOKS = """
from nereid_backend.hooks import register_model

def preprocess(inputs):
    x = dict(inputs)["x"]
    print("authorization: Bearer not-for-the-log", x.shape[0])
    if x[0, 0] > 5:
        raise ValueError("too large for me")
    return {"x": x}

register_model(preprocess=preprocess)
"""
TOO_LARGE = np.full((1, 4), 9, np.float32)
FLOOD = 400


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Every record of a server that met one failing call of each kind and a flood of one; what callers were told."""
    folder = tmp_path_factory.mktemp("logs")
    write_bundle(
        folder / "bundles" / "hooked",
        HOOKS,
        client_inputs=[tensor("x", "cn", c=4)],
        client_outputs=[tensor("y", "cn", c=4)],
    )
    served = Served(folder, str(folder / "bundles"), "--bind", "127.0.0.1:0", "--log-format", "json")
    told: dict[str, str] = {}
    with tritonclient.InferenceServerClient(served.state["address"]) as client:

        def ask(name: str, request_id: str, array: np.ndarray, model: str = "hooked", **headers: str) -> None:
            try:
                client.infer(model, [input_tensor(name, array)], request_id=request_id, headers=headers)
            except InferenceServerException as error:
                told[request_id] = str(error.status()).removeprefix("StatusCode.")

        ask("x", "fine", TOO_LARGE * 0)
        ask("x", "native", TOO_LARGE)
        ask("x", "assisted", TOO_LARGE[0])
        ask("x", "unknown", TOO_LARGE, "nobody")
        ask("x", "", TOO_LARGE[0], **{"x-request-id": "header"})
        with pytest.raises(grpc.RpcError) as caught:
            checkpoint(served, [meta("hooked"), chunk([1, 4], TOO_LARGE.tobytes())])
        told["checkpoint"] = caught.value.code().name
        for number in range(FLOOD):
            ask("no\nsuch", f"flood-{number}", TOO_LARGE)
        time.sleep(1)
    code, output = served.end()
    assert code == 0
    lines = [line for line in output.splitlines() if not line.startswith("nereid is ready")]
    return [json.loads(line) for line in lines], told


def complaints(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    # What the start has to say about the machine is nobody's call.
    about_calls = [
        record for record in records if record["logger"] in ("nereid.calls", "nereid.triton", "nereid.models")
    ]
    return [record for record in about_calls if record["level"] in ("WARNING", "ERROR") and "flood" not in str(record)]


def test_a_call_that_fails_is_one_line_with_its_id_wherever_it_ends(log: Any) -> None:
    records, told = log
    found = [
        (record["surface"], record["model"], record["code"], record["level"])
        for record in complaints(records)
        if "left out" not in record["message"]
    ]
    assert found == [
        ("unary", "hooked", "INTERNAL", "ERROR"),
        ("assisted", "hooked", "INTERNAL", "ERROR"),
        ("assisted", "nobody", "NOT_FOUND", "WARNING"),
        ("assisted", "hooked", "INTERNAL", "ERROR"),
        ("checkpoint", "hooked", "INTERNAL", "ERROR"),
    ]
    by_id = {record["request_id"]: record for record in complaints(records) if "request_id" in record}
    assert {key: by_id[key]["code"] for key in ("native", "assisted", "unknown")} == {
        key: told[key] for key in ("native", "assisted", "unknown")
    }
    assert by_id["header"]["surface"] == "assisted"
    assert all(record["duration_ms"] >= 0 for record in by_id.values())
    assert "fine" not in str(records)


def test_the_model_s_traceback_has_the_id_of_the_call(log: Any) -> None:
    records, _ = log
    tracebacks = [record for record in records if "Traceback" in record["message"]]
    failed = [record["request_id"] for record in complaints(records) if record.get("code") == "INTERNAL"]
    assert [record["request_id"] for record in tracebacks] == failed
    for record in tracebacks:
        assert (record["level"], record["logger"], record["model"]) == ("INFO", "nereid.models", "hooked")
        assert "ValueError: too large for me" in record["message"]


def test_a_flood_is_cut_and_counted(log: Any) -> None:
    records, told = log
    assert [told[f"flood-{number}"] for number in range(FLOOD)] == ["INVALID_ARGUMENT"] * FLOOD
    written = [record for record in records if str(record.get("request_id")).startswith("flood-")]
    left_out = [record for record in records if "left out: INVALID_ARGUMENT on unary" in record["message"]]
    assert len(written) < FLOOD / 2
    assert len(written) + sum(int(record["message"].split()[0]) for record in left_out) == FLOOD


def test_what_a_model_prints_is_folded_in_without_secrets(log: Any) -> None:
    records, _ = log
    printed = [record for record in records if record["logger"] == "nereid.models" and "stream" in record]
    assert {record["message"] for record in printed} == {"authorization: *** 1"}
    assert "not-for-the-log" not in str(records)
