"""Models that come with their calls and go without them, on the real server, over every way to call them."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as tritonclient
from click.testing import CliRunner
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from live import ROW, code_of, live, stubs, write_adding_twice
from serving import checkpoint, chunk, infer, input_tensor, meta, write_adder

from native_service import cli

pytestmark = pytest.mark.triton

JOB = """import os, sys
with open(os.environ["NEREID_OUTPUT_PATH"], "wb") as file:
    file.write(b"float32 1\\n" + len(sys.stdin.buffer.read()).to_bytes(4, "little"))
"""
# It loads when, and if, a file beside the models says so.
MOODY = """import time
from pathlib import Path
from nereid_backend.hooks import register_meta_model

while (mood := Path({mood!r}).read_text()) not in ("good", "bad"):
    time.sleep(0.05)
if mood == "bad":
    raise ValueError("not in the mood")

def run(inputs, call):
    return call("adder", {{"input": inputs[0].array}})

register_meta_model(run=run)
"""
SERVER = """
server: {{bind_addr: '127.0.0.1:0', http_addr: '127.0.0.1:0', http_infer_addr: '127.0.0.1:0', ml_backends_path: models,
         allow_model_control: true{more}}}
models:
  - {{name: kept, device: cpu, queue_capacity: 8, options: {{max_batch_size: 8}}}}
  - {{name: quick, device: cpu, queue_capacity: 32, options: {{max_batch_size: 8, idle_timeout_s: {quick_s}, load: first_request}}}}
"""  # noqa: E501 - YAML
LAZY = ("adder", "twice", "moody", "job")
ROWS = "".join(
    f"  - {{name: {name}, device: cpu, queue_capacity: 32, options: {{load: first_request}}}}\n" for name in LAZY
)


def settings(more: str = "", quick_s: float = 1) -> str:
    return SERVER.format(more=more, quick_s=quick_s) + ROWS


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("residency")
    models = folder / "models"
    models.mkdir()
    write_adding_twice(models / "twice")
    write_adding_twice(models / "moody")
    (folder / "mood").write_text("good")
    (models / "moody" / "hooks.py").write_text(MOODY.format(mood=str(folder / "mood")))
    (models / "job").mkdir()
    (models / "job" / "main.py").write_text(JOB)
    (models / "job" / "requirements.txt").write_text("")
    (models / "job" / "model_inference.textproto").write_text("input_shape: [-1]\noutput_shape: [-1]\n")
    with live(folder, settings=settings(), models=("kept", "quick", "adder")) as live_server:
        yield live_server


def state(serving: Any, name: str) -> dict[str, Any]:
    shown = CliRunner().invoke(cli.nereid, ["models", str(serving.served.process.pid), "--json"])
    (found,) = (model for model in json.loads(shown.stdout) if model["name"] == name)
    return found


def is_idle(serving: Any, name: str) -> bool:
    return state(serving, name)["state"] == "idle"


def metric(serving: Any, start: str) -> float:
    with urllib.request.urlopen(f"http://{serving.served.state['http']}/metrics", timeout=10) as answer:
        (line,) = (line for line in answer.read().decode().splitlines() if line.startswith(start))
    return float(line.rpartition(" ")[2])


def health(serving: Any, name: str) -> int:
    with grpc.insecure_channel(serving.served.state["address"]) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        return int(check(HealthCheckRequest(service=name), timeout=10).status)


def over_stream(serving: Any, name: str) -> float:
    answers: list[Any] = []
    with tritonclient.InferenceServerClient(serving.served.state["address"]) as client:
        client.start_stream(lambda result, error: answers.append(error or result))
        client.async_stream_infer(name, [input_tensor("input", ROW)])
        client.stop_stream()
    (answer,) = answers
    assert not isinstance(answer, Exception), answer
    return float((answer.as_numpy("output") - ROW)[0, 0])


def over_http(serving: Any, name: str) -> float:
    body = {"inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 4], "data": [0, 0, 0, 0]}]}
    url = f"http://{serving.served.state['http_infer']}/v2/models/{name}/infer"
    with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=60) as answer:
        return float(json.loads(answer.read())["outputs"][0]["data"][0])


def over_checkpoint(serving: Any, name: str) -> float:
    *_, output, _done = checkpoint(serving.served, [meta(name), chunk([1, 4], bytes(16))])
    return float(np.frombuffer(output.output_chunk.data, np.float32)[0])


def over_unary(serving: Any, name: str) -> float:
    return float(serving.amount(name))


def test_an_idle_model_is_told_as_one_that_can_be_called(serving: Any) -> None:
    client = serving.client
    assert is_idle(serving, "adder")
    assert client.is_server_ready()
    assert (client.is_model_ready("adder"), client.is_model_ready("kept")) == (False, True)
    assert (serving.http_says("adder"), serving.http_says("kept")) == (400, 200)
    assert health(serving, "") == health(serving, "adder") == HealthCheckResponse.SERVING
    index = {model.name: (model.state, model.reason) for model in client.get_model_repository_index().models}
    assert (index["adder"], index["kept"]) == (("UNAVAILABLE", "idle"), ("READY", ""))
    assert client.get_inference_statistics("adder").model_stats[0].inference_count == 0
    assert metric(serving, 'nereid_model_loaded{model="adder"}') == 0
    assert metric(serving, 'nereid_model_cold_starts_total{model="adder"}') == 0


def test_an_idle_model_is_described_as_triton_describes_it(serving: Any) -> None:
    for name in ("adder", "twice", "job", "quick"):
        metadata, config = serving.client.get_model_metadata(name), serving.client.get_model_config(name).config
        assert is_idle(serving, name)
        serving.client.load_model(name)
        assert metadata == serving.client.get_model_metadata(name)
        its = serving.client.get_model_config(name).config
        for field, value in config.ListFields():
            if field.name not in ("instance_group", "optimization", "dynamic_batching"):  # Triton adds to these
                assert getattr(its, field.name) == value, field.name
        serving.client.unload_model(name)


CALLS: dict[str, Callable[[Any, str], float]] = {
    "unary": over_unary,
    "stream": over_stream,
    "http": over_http,
    "checkpoint": over_checkpoint,
}


@pytest.mark.parametrize(
    ("way", "name", "adds"), [*((way, "adder", 1) for way in CALLS), ("unary", "twice", 2), ("checkpoint", "twice", 2)]
)
def test_every_way_to_call_an_idle_model_loads_it(serving: Any, way: str, name: str, adds: int) -> None:
    for each in ("twice", "moody", "adder"):  # who calls before who is called
        serving.client.unload_model(each)
    assert is_idle(serving, name)
    assert is_idle(serving, "adder")
    assert CALLS[way](serving, name) == adds
    # Envoy's counters are looked at now and then.
    serving.until(lambda: state(serving, name)["state"] == "ready")
    assert not is_idle(serving, "adder")
    assert state(serving, name)["memory_bytes"] > 1 << 20
    assert serving.client.is_model_ready(name)
    assert over_unary(serving, name) == adds  # by Envoy alone


def test_a_program_is_loaded_by_its_call_too(serving: Any) -> None:
    for _ in range(2):
        serving.client.unload_model("job")
        assert is_idle(serving, "job")
        *_, output, _done = checkpoint(serving.served, [meta("job"), chunk([4], bytes(16))])
        assert output.output_chunk.data == (16).to_bytes(4, "little")


def test_a_model_that_others_call_goes_after_them(serving: Any) -> None:
    assert over_unary(serving, "twice") == 2
    words = "model 'adder' is called by twice; unload that first"
    assert code_of(lambda: serving.client.unload_model("adder")) == ("FAILED_PRECONDITION", words)
    assert stubs(serving.served, "adder")
    serving.client.unload_model("twice")
    serving.client.unload_model("adder")
    serving.until(lambda: not stubs(serving.served, "adder"))


def hurried(serving: Any, name: str) -> tuple[str, str]:
    return code_of(lambda: serving.client.infer(name, [input_tensor("input", ROW)], client_timeout=2))


def test_many_first_callers_wait_for_one_slow_load(serving: Any) -> None:
    mood = serving.models.parent / "mood"
    serving.client.unload_model("moody")
    mood.write_text("wait")
    before = metric(serving, 'nereid_model_cold_starts_total{model="moody"}')
    with ThreadPoolExecutor(20) as callers:
        waiting = [callers.submit(over_unary, serving, "moody") for _ in range(20)]
        try:
            serving.until(lambda: state(serving, "moody")["state"] == "loading")
            seen = time.monotonic()
            index = {model.name: model.state for model in serving.client.get_model_repository_index().models}
            assert index["moody"] == "LOADING"
            # A tenth of its time is for the answer, which may still be late here.
            serving.until(lambda: hurried(serving, "moody") == ("UNAVAILABLE", "Model 'moody' is currently loading"))
            loading_s = time.monotonic() - seen
        finally:
            mood.write_text("good")
        assert [each.result() for each in waiting] == [1.0] * 20
    assert metric(serving, 'nereid_model_cold_starts_total{model="moody"}') == before + 1
    assert state(serving, "moody")["cold_start_last_s"] > loading_s


def test_a_load_that_fails_is_told_and_the_next_call_tries_again(serving: Any) -> None:
    mood = serving.models.parent / "mood"
    serving.client.unload_model("moody")
    mood.write_text("bad")
    for _ in range(2):
        code, text = code_of(lambda: over_unary(serving, "moody"))
        assert (code, "not in the mood" in text) == ("FAILED_PRECONDITION", True), text
        assert is_idle(serving, "moody")
    assert serving.client.is_server_ready()
    mood.write_text("good")
    assert over_unary(serving, "moody") == 1


def test_calls_while_the_model_is_unloaded_again_and_again_do_not_fail(serving: Any) -> None:
    over = threading.Event()

    def ask() -> Iterator[float]:
        with tritonclient.InferenceServerClient(serving.served.state["address"]) as client:
            while not over.is_set():
                yield infer(client, "quick", input=ROW)["output"][0, 0]
                answered.append(1)

    answered: list[int] = []
    with ThreadPoolExecutor(4) as callers:
        calls = [callers.submit(lambda: set(ask())) for _ in range(4)]
        try:
            for _ in range(5):
                seen = len(answered)
                serving.client.unload_model("quick")
                serving.until(lambda seen=seen: len(answered) >= seen + 20)
        finally:
            over.set()
        assert [each.result() for each in calls] == [{1.0}] * 4
    serving.until(lambda: is_idle(serving, "quick") and not stubs(serving.served, "quick"))


def test_a_model_that_nobody_calls_goes_and_one_that_is_called_stays(serving: Any) -> None:
    def times_up() -> float:
        return metric(serving, 'nereid_model_deallocations_total{reason="idle"}')

    assert over_unary(serving, "quick") == 1
    begun = last = time.monotonic()
    gone, starts = times_up(), state(serving, "quick")["cold_starts"]
    while last - begun < 2:
        assert over_unary(serving, "quick") == 1
        now = time.monotonic()
        if now - last > 0.4:  # it may have gone, as nobody called: the machine was busy
            begun, starts = now, state(serving, "quick")["cold_starts"]
        last = now
        time.sleep(0.1)
    assert state(serving, "quick")["cold_starts"] == starts
    serving.until(lambda: times_up() > gone and is_idle(serving, "quick"))
    assert (over_unary(serving, "kept"), state(serving, "kept")["cold_starts"]) == (1, 0)


def test_the_end_of_an_unloaded_models_processes_is_no_death_and_another_end_is(serving: Any) -> None:
    assert over_unary(serving, "quick") == 1
    serving.client.unload_model("quick")
    (before,) = stubs(serving.served, "kept")
    os.kill(before, signal.SIGKILL)
    serving.until(lambda: state(serving, "kept")["restarts"] == 1 and over_unary(serving, "kept") == 1)
    assert (state(serving, "quick")["restarts"], is_idle(serving, "quick")) == (0, True)


def test_a_reload_replaces_an_idle_model_without_loading_it(serving: Any) -> None:
    serving.until(lambda: is_idle(serving, "quick"))
    cold = state(serving, "quick")["cold_starts"]
    write_adder(serving.models / "fresh.onnx", 5)
    (serving.models / "fresh.onnx").replace(serving.models / "quick.onnx")
    assert CliRunner().invoke(cli.nereid, ["reload", str(serving.served.process.pid)]).exit_code == 0
    assert is_idle(serving, "quick")
    assert state(serving, "quick")["cold_starts"] == cold
    assert over_unary(serving, "quick") == 5


def test_one_model_makes_room_for_another_where_there_is_room_for_one(serving: Any) -> None:
    residency = ", residency: {max_loaded_models: 1, min_residency_s: 0}"
    for each in ("twice", "moody", "adder", "job"):
        serving.client.unload_model(each)
    file = serving.models.parent / "nereid.yaml"
    file.write_text(settings(residency, quick_s=600))
    assert CliRunner().invoke(cli.nereid, ["reload", str(serving.served.process.pid)]).exit_code == 0
    gone = metric(serving, 'nereid_model_deallocations_total{reason="capacity"}')
    for name, adds in (("adder", 1), ("kept", 1), ("adder", 1)):
        assert infer(serving.client, name, input=ROW)["output"][0, 0] == ROW[0, 0] + adds
    assert metric(serving, 'nereid_model_deallocations_total{reason="capacity"}') >= gone + 3
    assert not is_idle(serving, "adder")
    row = "adder, device: cpu, queue_capacity: 32, options: {"
    file.write_text(settings(residency, quick_s=600).replace(row, f"{row}pinned: true, "))
    assert CliRunner().invoke(cli.nereid, ["reload", str(serving.served.process.pid)]).exit_code == 0
    code, text = code_of(lambda: over_unary(serving, "kept"))
    assert (code, "all active models are busy" in text) == ("RESOURCE_EXHAUSTED", True)
