"""``nereid serve`` as a user runs it: a real process, a real tritonserver, real clients, signals and kills."""

from __future__ import annotations

import os
import signal
import socket
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as tritonclient
from grpc_health.v1 import health_pb2, health_pb2_grpc
from onnx import TensorProto, helper, save
from serving import READY_TIMEOUT_S, Served, alive, checkpoint, chunk, meta, our_shared_memory, tensor_of

from native_service.proto import inference_pb2 as pb
from nereid_backend.cache import cache_folder

pytestmark = pytest.mark.triton


def write_adder(folder: Path, *, width: int = 16, max_batch_size: int = 10) -> None:
    """A nereid folder: output = input + 1."""
    folder.mkdir(parents=True)
    shape = ["n", width] if max_batch_size else [width]
    graph = helper.make_graph(
        [helper.make_node("Add", ["input", "one"], ["output"])],
        "adder",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, shape)],
        [helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "model.onnx")
    (folder / "model_inference.textproto").write_text(
        f"input_shape: [{width}]\noutput_shape: [{width}]\nmax_batch_size: {max_batch_size}\n"
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    write_adder(folder / "models" / "adder")
    write_adder(folder / "models" / "wide", width=50_000, max_batch_size=0)
    (folder / "nereid.yaml").write_text(
        "server: {bind_addr: '127.0.0.1:0', http_addr: '[::1]:0', ml_backends_path: models}\n"
        "models:\n"
        "  - {name: wide, device: cpu, queue_capacity: 4}\n"
        "  - {name: adder, device: cpu, queue_capacity: 16}\n"
    )
    server = Served(folder, "--config", str(folder / "nereid.yaml"))
    yield server
    server.end()


R16 = np.arange(16, dtype=np.float32)


@pytest.mark.parametrize("shape", [[1, 16], [16]])
def test_a_checkpoint_runs_with_and_without_the_batch_dimension(served: Served, shape: list[int]) -> None:
    responses = checkpoint(served, [meta("adder"), chunk(shape, R16.tobytes())])
    assert tensor_of(responses) == ([1, 16], (R16 + 1).tobytes())


def test_chunks_are_joined_in_order_of_arrival(served: Served) -> None:
    data = R16.tobytes()
    messages = [meta("adder"), chunk([1, 16], data[:32], end=False), chunk([1, 16], data[32:])]
    assert tensor_of(checkpoint(served, messages)) == ([1, 16], (R16 + 1).tobytes())


def test_a_batch_of_two_comes_back_as_two(served: Served) -> None:
    data = np.arange(32, dtype=np.float32).reshape(2, 16)
    responses = checkpoint(served, [meta("adder"), chunk([2, 16], data.tobytes())])
    assert tensor_of(responses) == ([2, 16], (data + 1).tobytes())


def test_a_large_tensor_comes_back_in_chunks_of_64_kib(served: Served) -> None:
    data = np.random.default_rng(0).random(50_000, np.float32)
    responses = checkpoint(served, [meta("wide"), chunk([50_000], data.tobytes())])
    assert tensor_of(responses) == ([50_000], (data + 1).tobytes())
    assert [len(r.output_chunk.data) for r in responses[1:-1]] == [65_536, 65_536, 65_536, 3_392]


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([meta("adder"), chunk([1, 15], bytes(60))], "INVALID_ARGUMENT"),
        ([meta("adder"), chunk([1, 1, 16], bytes(64))], "INVALID_ARGUMENT"),
        ([meta("adder"), chunk([11, 16], bytes(704))], "INVALID_ARGUMENT"),
        ([meta("adder"), chunk([1, 16], bytes(60))], "INVALID_ARGUMENT"),
        ([meta("adder")], "INVALID_ARGUMENT"),
        ([meta("nobody"), chunk([1, 16], bytes(64))], "NOT_FOUND"),
        ([chunk([1, 16], bytes(64))], "INVALID_ARGUMENT"),
        ([], "INVALID_ARGUMENT"),
    ],
)
def test_a_bad_checkpoint_is_refused_and_the_next_one_runs(served: Served, messages: list[Any], code: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        checkpoint(served, messages)
    assert caught.value.code() is grpc.StatusCode[code]
    assert tensor_of(checkpoint(served, [meta("adder"), chunk([16], R16.tobytes())]))[0] == [1, 16]


def test_health_and_model_names_are_told(served: Served) -> None:
    with grpc.insecure_channel(served.state["address"]) as channel:
        health = channel.unary_unary(
            "/inference.Nereid/HealthCheck",
            pb.HealthCheckRequest.SerializeToString,
            pb.HealthCheckResponse.FromString,
        )
        names = channel.unary_unary(
            "/inference.Nereid/ViewModels", pb.ViewModelsRequest.SerializeToString, pb.ViewModelsResponse.FromString
        )
        standard = health_pb2_grpc.HealthStub(channel)
        assert health(pb.HealthCheckRequest()).status == "ok"
        assert list(names(pb.ViewModelsRequest()).model_names) == ["wide", "adder"]
        for service in ("", "inference.Nereid", "adder"):
            answer = standard.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_http_tells_health_and_metrics(served: Served) -> None:
    def get(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{served.state['http']}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""

    codes = {
        "/v2/health/live": 200,
        "/v2/health/ready": 200,
        "/v2/models/adder/ready": 200,
        "/v2/models/adder/versions/1/ready": 200,
        "/v2/models/adder/versions/2/ready": 400,
        "/v2/models/nobody/ready": 400,
        "/v2/models/adder": 404,
    }
    assert {path: get(path)[0] for path in codes} == codes
    assert 'nv_inference_request_success{model="adder",version="1"}' in get("/metrics")[1]


def test_a_stock_client_is_answered_at_triton_with_the_models_platform(served: Served) -> None:
    with tritonclient.InferenceServerClient(served.state["address"]) as client:
        assert client.get_model_metadata("adder").platform == "onnxruntime_onnx"
        tensor = tritonclient.InferInput("input", [3, 16], "FP32")
        tensor.set_data_from_numpy(np.stack([R16] * 3))
        answer = client.infer("adder", [tensor], request_id="an id")
        assert answer.get_response().id == "an id"
        assert answer.as_numpy("output").tolist() == np.stack([R16 + 1] * 3).tolist()


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write_adder(tmp_path / "models" / "adder")
    return tmp_path / "models"


def ends_and_leaves_nothing(server: Served, number: int) -> None:
    processes, pid = server.descendants(), server.process.pid
    assert our_shared_memory(pid), "the stubs' regions do not carry our prefix"
    code, output = server.end(number)
    assert (code, alive(processes), our_shared_memory(pid), server.state_file.exists()) == (0, set(), [], False), output


def test_a_cache_folder_with_a_long_path_serves_too_and_ctrl_c_ends_everything_with_code_0(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / ("a-long-name-" * 8)
    cache.mkdir()
    (cache / "triton").symlink_to(cache_folder() / "triton")
    monkeypatch.setenv("NEREID_CACHE_DIR", str(cache))
    server = Served(tmp_path, str(models), "--bind", "127.0.0.1:0")
    with tritonclient.InferenceServerClient(server.state["address"]) as client:
        tensor = tritonclient.InferInput("input", [1, 16], "FP32")
        tensor.set_data_from_numpy(R16[np.newaxis])
        assert client.infer("adder", [tensor]).as_numpy("output").tolist() == [(R16 + 1).tolist()]
    ends_and_leaves_nothing(server, signal.SIGINT)


def test_triton_takes_grpc_from_this_users_processes_only(served: Served) -> None:
    address = served.state["triton_grpc"]
    assert address.startswith("unix:")
    folder = Path(address.removeprefix("unix:")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with tritonclient.InferenceServerClient(address) as client:
        assert client.is_server_live()


def test_a_signal_during_the_start_ends_everything_with_code_0(tmp_path: Path, models: Path) -> None:
    server = Served(tmp_path, str(models), "--bind", "127.0.0.1:0", wait=False)
    while not (processes := server.descendants()):
        assert server.process.poll() is None, server.end()
        time.sleep(0.01)
    pid = server.process.pid
    code, output = server.end()
    assert (code, alive(processes), our_shared_memory(pid)) == (0, set(), []), output


def test_what_a_killed_supervisor_leaves_is_gone_after_the_next_start_and_sigterm_ends_that_with_code_0(
    tmp_path: Path, models: Path
) -> None:
    killed = Served(tmp_path, str(models), "--bind", "127.0.0.1:0")
    processes, pid = killed.descendants(), killed.process.pid
    killed.end(signal.SIGKILL)
    successor = Served(tmp_path, str(models), "--bind", "127.0.0.1:0")
    left = alive(processes), our_shared_memory(pid)
    ends_and_leaves_nothing(successor, signal.SIGTERM)
    assert left == (set(), [])


def failing_start(tmp_path: Path, *arguments: str) -> str:
    """The output of a start that must fail with code 1 and leave nothing."""
    server = Served(tmp_path, *arguments, wait=False)
    output, _ = server.process.communicate(timeout=READY_TIMEOUT_S)
    assert server.process.returncode == 1, output
    assert our_shared_memory(server.process.pid) == []
    assert "Traceback" not in output
    return output


def test_every_model_that_cannot_be_prepared_is_named_in_one_line(tmp_path: Path, models: Path) -> None:
    write_adder(models / "broken")
    (models / "broken" / "model.onnx").write_bytes(b"not a model")
    write_adder(models / "script")
    (models / "script" / "model.onnx").unlink()
    (models / "script" / "main.py").write_text("print 1\n")
    (models / "script" / "requirements.txt").write_text("")
    output = failing_start(tmp_path, str(models), "--bind", "127.0.0.1:0")
    assert "model 'broken': model.onnx: ONNX Runtime" in output
    assert "model 'script': main.py is not Python that this interpreter reads" in output
    assert "'adder'" not in output


def test_a_device_that_is_not_there_stops_the_start(tmp_path: Path, models: Path) -> None:
    config = tmp_path / "nereid.yaml"
    config.write_text(
        "server: {bind_addr: '127.0.0.1:0', ml_backends_path: models}\n"
        "models: [{name: adder, device: cuda:7, queue_capacity: 1}]\n"
    )
    output = failing_start(tmp_path, "--config", str(config))
    assert "device 'cuda:7' is not there: this ONNX Runtime offers CPUExecutionProvider" in output.replace(
        "AzureExecutionProvider, ", ""
    )


def test_a_port_in_use_stops_the_start_before_anything_is_converted(tmp_path: Path, models: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        output = failing_start(tmp_path, str(models), "--bind", address)
    assert f"server.bind_addr {address} cannot be bound" in output
    assert "converting" not in output


def test_a_load_that_hangs_is_killed_at_its_deadline(tmp_path: Path) -> None:
    write_adder(tmp_path / "models" / "adder")  # its conversion, bound by the same limit, imports nothing slow
    config = tmp_path / "nereid.yaml"
    config.write_text(
        "server: {bind_addr: '127.0.0.1:0', ml_backends_path: models, limits: {load_timeout_s: 8}}\n"
        "models: [{name: adder, device: cpu, queue_capacity: 1}]\n"
    )
    server = Served(tmp_path, "--config", str(config), wait=False)
    stopped = stop_first_stub(server)
    output, _ = server.process.communicate(timeout=READY_TIMEOUT_S)
    assert server.process.returncode == 1, output
    assert "error: model 'adder' did not load within 8 s" in output
    assert (alive({stopped}), our_shared_memory(server.process.pid)) == (set(), [])


def stop_first_stub(server: Served) -> int:
    """SIGSTOP the model's process as soon as it is there; its own imports take longer than that."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        for pid in server.descendants():
            try:
                name = (Path("/proc") / str(pid) / "cmdline").read_bytes()
            except OSError:
                continue
            if b"/1/model.py\0" in name:
                os.kill(pid, signal.SIGSTOP)
                return pid
        time.sleep(0.005)
    raise AssertionError("no stub was started")
