"""What the SnoozeML SDK was seen to put on the wire, sent again byte for byte to a running server: case 34.

Skipped where the fixtures are not beside the checkout.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import snoozeml
from serving import write_adder
from snoozing import Snoozing, snoozing_folder

WIRE = Path(__file__).resolve().parents[3] / "shared" / "fixtures" / "snoozeml" / "wire.json"
BOUNDARY = "0123456789abcdef"

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(not WIRE.exists(), reason="../shared/fixtures is not beside this checkout"),
]


@pytest.fixture(scope="module")
def wire() -> Any:
    return json.loads(WIRE.read_text())


@pytest.fixture(scope="module")
def snooze(wire: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snoozing]:
    keys = {"admin": wire["rest"][0]["headers"], "inference": wire["grpc"][0]["metadata"]}
    config = snoozeml.SnoozeConfig()
    for role, headers in keys.items():
        lower = {name.lower(): value for name, value in headers.items()}
        config.add_api_key(role, key=lower["x-api-key"], name=f"wire {role}")
    folder = tmp_path_factory.mktemp("wire")
    with snoozing_folder(folder, config, lambda models: write_adder(models / "m.onnx", width=2)) as running:
        yield running


def body_of(sent: Any) -> bytes:
    if "parts_in_order" not in sent:
        return str(sent["body"]).encode()
    parts = []
    for part in sent["parts_in_order"]:
        name = f'form-data; name="{part["name"]}"' + (f'; filename="{part["filename"]}"' if part["filename"] else "")
        kind = f"Content-Type: {part['content_type']}\r\n" if part["content_type"] else ""
        parts.append(f"--{BOUNDARY}\r\nContent-Disposition: {name}\r\n{kind}\r\n{part['value']}\r\n")
    return "".join([*parts, f"--{BOUNDARY}--\r\n"]).encode()


def test_each_request_of_rest_gets_the_status_that_it_should(snooze: Snoozing, wire: Any) -> None:
    statuses, expected = {}, {}
    for sent in wire["rest"]:
        body, headers = body_of(sent), dict(sent["headers"])
        if "Content-Type" in headers:
            headers["Content-Type"] = headers["Content-Type"].replace("<any>", BOUNDARY)
        if body:
            headers["Content-Length"] = str(len(body))
        connection = http.client.HTTPConnection(snooze.served.state["rest"], timeout=60)
        connection.request(sent["method"], sent["path"], body or None, headers)
        answer = connection.getresponse()
        statuses[sent["call"]] = answer.status
        told = answer.read()
        connection.close()
        is_token, is_upload = headers["Authorization"] == "Bearer tok", sent["path"].endswith("upload")
        expected[sent["call"]] = 401 if is_token else 400 if is_upload else 200
        if sent["path"].endswith("/infer"):
            [output] = json.loads(told)["outputs"]
            numbers = json.loads(sent["body"])["inputs"][0]["data"]
            assert output["data"] == [number + 1 for number in numbers]
    assert statuses == expected


def test_each_call_of_grpc_gets_the_code_that_it_should(snooze: Snoozing, wire: Any) -> None:
    codes, expected = {}, {}
    with grpc.insecure_channel(snooze.address) as channel:
        for sent in wire["grpc"]:
            known = sent["metadata"].get("x-api-key")
            expected[sent["call"]] = "OK" if known else "UNAUTHENTICATED"
            try:
                call = channel.unary_unary(sent["method"])
                # The 250 ms of one of them are for a model that is there, on a machine that is idle.
                if "client_timeout_ms" in sent["call"]:
                    call(bytes.fromhex(wire["grpc"][1]["request_hex"]), metadata=tuple(sent["metadata"].items()))
                call(bytes.fromhex(sent["request_hex"]), metadata=tuple(sent["metadata"].items()), timeout=60)
                codes[sent["call"]] = "OK"
            except grpc.RpcError as error:
                codes[sent["call"]] = error.code().name
    timed = next(call for call in expected if "client_timeout_ms" in call)
    assert codes[timed] in ("OK", "DEADLINE_EXCEEDED")
    assert {**codes, timed: "OK"} == expected


def test_of_the_signed_tokens_the_one_of_the_server_s_algorithm_is_taken(snooze: Snoozing, wire: Any) -> None:
    taken = []
    for vector in wire["jwt"]:
        client = snooze.client(None, use_grpc=False, token=vector["token"])
        try:
            client.models.list()
            taken.append(vector["args"]["algorithm"])
        except snoozeml.AuthenticationError:
            continue
    snooze.close_clients()
    assert taken == ["HS256"]
