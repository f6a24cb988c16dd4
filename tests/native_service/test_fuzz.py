"""Whatever is sent to the public address of a real server: it answers, nothing dies, nothing is left behind.

Seconds by default; ``make fuzz`` sends 10,000 of each kind.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hostile_client import CHECKPOINT, END_HEADERS, END_STREAM, HEADERS, INFER, STREAM, Connection, frame, message
from hypothesis import given
from hypothesis import strategies as st
from serving import Served, alive, checkpoint, chunk, input_tensor, meta, our_shared_memory, write_adder
from tritonclient.grpc import InferenceServerClient, service_pb2

from native_service.access import roles
from native_service.proto import inference_pb2

pytestmark = pytest.mark.triton

ROW = np.arange(4, dtype=np.float32)[None]
PATHS = sorted(path for path in roles.RPCS if not path.endswith("Watch"))
TIMEOUT_S = 30
# What a client may be told; anything else would be an accident.
TOLD = {
    *("INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "OK"),
    "UNAVAILABLE",  # a connection that Envoy ends for what came over it
}


class Target:
    """A served model, and how it was before anything was sent."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.address: str = served.state["address"]
        self.client = InferenceServerClient(self.address)
        self.check()
        self.processes = served.descendants()
        self.regions = our_shared_memory(served.process.pid)
        self.descriptors = self.count()

    def check(self) -> None:
        answer = self.client.infer("adder", [input_tensor("input", ROW)], client_timeout=TIMEOUT_S)
        assert (answer.as_numpy("output") == ROW + 1).all()

    def count(self) -> int:
        pids = {self.served.process.pid, *self.served.descendants()}
        return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)

    def memory_mib(self) -> float:
        total = 0.0
        for pid in {self.served.process.pid, *self.served.descendants()}:
            with contextlib.suppress(OSError, IndexError):
                total += int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) / 1024
        return total

    def unchanged(self) -> None:
        """The same processes, the same regions, no descriptors more than a few connections need."""
        self.check()
        assert alive(self.processes) == self.processes
        assert self.served.descendants() == self.processes
        assert our_shared_memory(self.served.process.pid) == self.regions
        deadline = time.monotonic() + TIMEOUT_S
        while self.count() > self.descriptors + 20:
            assert time.monotonic() < deadline, (self.count(), self.descriptors)
            time.sleep(0.1)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "models").mkdir()
    write_adder(folder / "models" / "adder.onnx")
    served = Served(folder, str(folder / "models"), "--bind", "127.0.0.1:0", "--http", "127.0.0.1:0")
    target = Target(served)
    yield target
    target.client.close()
    assert served.end()[0] == 0


@pytest.fixture
def target(running: Target) -> Iterator[Target]:
    before = running.memory_mib()
    yield running
    running.unchanged()
    assert running.memory_mib() < before + 500


def told(target: Target, path: str, data: bytes, **options: Any) -> str:
    with grpc.insecure_channel(target.address) as channel:
        return code_of(channel, path, data, **options)


def code_of(channel: Any, path: str, data: bytes, **options: Any) -> str:
    try:
        if path in (STREAM, CHECKPOINT):
            list(channel.stream_stream(path)(iter([data]), timeout=TIMEOUT_S, **options))
        else:
            channel.unary_unary(path)(data, timeout=TIMEOUT_S, **options)
    except grpc.RpcError as error:
        name: str = error.code().name
        return name if len(error.details() or "") < 8192 else "a long story"
    return "OK"


def infer_bytes(**fields: Any) -> bytes:
    request = service_pb2.ModelInferRequest(**{"model_name": "adder", "id": "an id", **fields})
    request.inputs.add(name="input", datatype="FP32", shape=[1, 4])
    request.raw_input_contents.append(ROW.tobytes())
    data: bytes = request.SerializeToString()
    return data


@given(data=st.data())
def test_any_bytes_as_a_message_get_an_answer(target_in_module: Target, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(PATHS))
    whole = infer_bytes() if path in (INFER, STREAM) else b""
    cut = st.integers(0, len(whole)).map(lambda end: whole[:end])
    flipped = st.tuples(st.integers(0, max(0, len(whole) - 1)), st.integers(0, 255)).map(
        lambda change: whole[: change[0]] + bytes([change[1]]) + whole[change[0] + 1 :]
    )
    sent = data.draw(st.one_of(st.binary(max_size=200), cut, flipped))
    assert told(target_in_module, path, sent) in {*TOLD, "INTERNAL"}


@given(
    shape=st.lists(st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, 1, 4, 2**31, 2**32 + 1, 2**62]), max_size=8),
    kind=st.sampled_from(["FP32", "INT64", "BYTES", "BF16", "", "NONE"]),
    raw=st.binary(max_size=64),
    stream=st.booleans(),
)
def test_any_tensor_gets_an_answer(
    target_in_module: Target, shape: list[int], kind: str, raw: bytes, stream: bool
) -> None:
    request = service_pb2.ModelInferRequest(model_name="adder")
    request.inputs.add(name="input", datatype=kind, shape=shape)
    request.raw_input_contents.append(raw)
    assert told(target_in_module, STREAM if stream else INFER, request.SerializeToString()) in TOLD


@given(data=st.binary(max_size=300), hello=st.booleans())
def test_any_bytes_on_a_connection_end_with_it(target_in_module: Target, data: bytes, hello: bool) -> None:
    if hello:
        connection = Connection(target_in_module.address)
        connection.send(data)
        connection.close()
        return
    for address in (target_in_module.address, target_in_module.served.state["http"]):
        host, _, port = address.rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as raw:
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            raw.recv(100)


@pytest.fixture(scope="module")
def target_in_module(running: Target) -> Iterator[Target]:
    yield running
    running.unchanged()


NAMES = {
    "traversal": "../../../../etc/passwd",
    "absolute": "/etc/passwd",
    "null": "adder\0",
    "dots": "..",
    "long": "a" * 10_000,
    "percent": "%2e%2e%2fadder",
    "line": "adder\nINFO forged",
    "empty": "",
}


@pytest.mark.parametrize("what", NAMES)
def test_a_name_never_becomes_a_path(target: Target, what: str) -> None:
    name = NAMES[what]
    asked = {
        INFER: infer_bytes(model_name=name),
        STREAM: infer_bytes(model_name=name),
        CHECKPOINT: inference_pb2.CheckpointRequest(
            meta=inference_pb2.CheckpointMeta(model_name=name, output_file="/tmp/written-by-a-stranger")
        ).SerializeToString(),
    }
    for method in ("ModelMetadata", "ModelConfig", "ModelReady", "ModelStatistics"):
        request = getattr(service_pb2, f"{method}Request")(name=name)
        asked[f"/inference.GRPCInferenceService/{method}"] = request.SerializeToString()
    load = service_pb2.RepositoryModelLoadRequest(model_name=name)
    load.parameters["file:1/model.py"].bytes_param = b"raise SystemExit"
    asked["/inference.GRPCInferenceService/RepositoryModelLoad"] = load.SerializeToString()
    codes = {path: told(target, path, data) for path, data in asked.items()}
    assert set(codes.values()) <= TOLD
    assert codes[INFER] in {"NOT_FOUND", "INVALID_ARGUMENT"}
    assert codes["/inference.GRPCInferenceService/RepositoryModelLoad"] == "UNIMPLEMENTED"
    assert not Path("/tmp/written-by-a-stranger").exists()


def test_a_name_that_is_no_text_is_refused(target: Target) -> None:
    data = infer_bytes(model_name="a-name").replace(b"a-name", b"a\xff\xfe-me")
    for path in (INFER, STREAM, CHECKPOINT):
        assert told(target, path, data) in TOLD


@pytest.mark.parametrize("path", [INFER, CHECKPOINT])
def test_metadata_without_end_is_refused(target: Target, path: str) -> None:
    for metadata in ([("x", "y" * 1_000_000)], [(f"x{number}", "y") for number in range(20_000)]):
        assert told(target, path, infer_bytes(), metadata=metadata) in {*TOLD, "INTERNAL", "UNKNOWN", "CANCELLED"}


@pytest.mark.parametrize("kind", ["application/json", "text/html", "application/grpc-web+proto", ""])
def test_another_content_type_is_answered_and_hurts_nobody(target: Target, kind: str) -> None:
    connection = Connection(target.address)
    pairs = [(":method", "POST"), (":scheme", "http"), (":path", INFER), (":authority", "a"), ("content-type", kind)]
    block = connection.encoder.encode(pairs)
    connection.send(frame(HEADERS, END_HEADERS, 1, block))
    connection.upload(1, message(infer_bytes()), END_STREAM)
    target.check()
    connection.close()


def test_a_million_empty_chunks_end_at_the_limit(target: Target) -> None:
    empty = chunk([4], b"", end=False)
    messages: Any = (meta("adder"), *[empty] * 1_000_000)
    with pytest.raises(grpc.RpcError) as caught:
        checkpoint(target.served, messages)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_chunks" in caught.value.details()


def test_callers_beside_a_crowd_of_bad_ones_get_right_answers(target: Target) -> None:
    generator = np.random.default_rng(0)
    bad: list[Callable[[], object]] = [
        lambda: told(target, INFER, generator.bytes(100)),
        lambda: told(target, STREAM, infer_bytes()[:-7]),
        lambda: told(target, CHECKPOINT, b"\x0a\xff\xff\xff\xff\x0f"),
        lambda: told(target, INFER, infer_bytes(model_name="../adder")),
        lambda: told(target, INFER, infer_bytes(), metadata=[("x", "y" * 100_000)]),
    ]
    with ThreadPoolExecutor(6) as crowd:
        running = [crowd.submit(each) for each in bad * 20]
        while not all(one.done() for one in running):
            target.check()
        for one in running:
            one.result()
