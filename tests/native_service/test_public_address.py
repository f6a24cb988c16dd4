"""KServe v2 at the public address of ``nereid serve``, as a stock tritonclient sees it; the real Envoy and Triton.

Case numbers are those of the nereid facts (section 8); the models are made here.
"""

from __future__ import annotations

import asyncio
import http.client
import queue
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import endings
import grpc
import numpy as np
import pytest
import tritonclient.grpc as tritonclient
from grpc_health.v1 import health_pb2, health_pb2_grpc
from onnx import TensorProto, helper, save
from prometheus_client.parser import text_string_to_metric_families
from serving import Served, checkpoint, chunk, infer, input_tensor, meta, tensors_of
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from native_service.proto import inference_pb2 as pb
from native_service.telemetry.failures import SURFACES

pytestmark = pytest.mark.triton

R16 = np.arange(16, dtype=np.float32)
A, B = np.array([[1, 2, 3, 4]], np.float32), np.array([[10, 20, 30, 40]], np.float32)
FULL = "model queue full, retry later"
MODELS = ("adder", "whole", "multi", "single", "counted", "idle-model_1.0", "slow", "recurrent")


def write(path: Path, inputs: dict[str, int], nodes: list[tuple[str, list[str], str]], element: int, size: int) -> None:
    """``path``.onnx: tensors of [n, width]; the constant ``one`` is there to be added."""
    outputs = [output for _, _, output in nodes]
    graph = helper.make_graph(
        [helper.make_node(kind, names, [output]) for kind, names, output in nodes],
        "graph",
        [helper.make_tensor_value_info(name, element, ["n", width]) for name, width in inputs.items()],
        [helper.make_tensor_value_info(name, element, ["n", next(iter(inputs.values()))]) for name in outputs],
        [helper.make_tensor("one", element, [1], [1])],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def write_recurrent(path: Path) -> None:
    """A detector that carries its state, as voice detectors do: two outputs, three inputs, one of them a scalar."""
    tensors = {
        "frame": (TensorProto.FLOAT, [1, 512]),
        "state": (TensorProto.FLOAT, [2, 1, 128]),
        "rate": (TensorProto.INT64, []),
        "loudness": (TensorProto.FLOAT, [1, 1]),
        "next_state": (TensorProto.FLOAT, [2, 1, 128]),
    }
    described = {name: helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in tensors.items()}
    nodes = [
        helper.make_node("ReduceMean", ["frame"], ["loudness"], axes=[1], keepdims=1),
        helper.make_node("Cast", ["rate"], ["rate_float"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["state", "rate_float"], ["next_state"]),
    ]
    inputs, outputs = ("frame", "state", "rate"), ("loudness", "next_state")
    graph = helper.make_graph(nodes, "graph", [described[n] for n in inputs], [described[n] for n in outputs])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("public")
    models = folder / "models"
    models.mkdir()
    add_one = [("Add", ["input", "one"], "output")]
    write(models / "adder.onnx", {"input": 16}, add_one, TensorProto.FLOAT, 10)
    write(models / "whole.onnx", {"input": 4}, add_one, TensorProto.INT64, 4)
    both = [("Add", ["a", "b"], "sum"), ("Mul", ["a", "b"], "prod")]
    write(models / "multi.onnx", {"a": 4, "b": 4}, both, TensorProto.FLOAT, 4)
    write(models / "single.onnx", {"input": 16}, add_one, TensorProto.FLOAT, 4)
    endings.write_slow(models / "slow.onnx")
    write_recurrent(models / "recurrent.onnx")
    entry = "  - {{name: {}, device: cpu, queue_capacity: {}, options: {{max_batch_size: 10}}}}\n"
    for name in ("counted", "idle-model_1.0"):
        write(models / f"{name}.onnx", {"input": 16}, add_one, TensorProto.FLOAT, 4)
    capacities = {"adder": 16, "whole": 16, "multi": 16, "single": 1, "counted": 16, "idle-model_1.0": 16}
    capacities["slow"] = endings.CAPACITY
    (folder / "nereid.yaml").write_text(
        "server: {bind_addr: '127.0.0.1:0', http_addr: '127.0.0.1:0', ml_backends_path: models}\nmodels:\n"
        + "".join(entry.format(name, capacity) for name, capacity in capacities.items())
        + "  - {name: recurrent, device: cpu, queue_capacity: 16}\n"
    )
    server = Served(folder, "--config", str(folder / "nereid.yaml"))
    yield server
    assert server.end()[0] == 0


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with tritonclient.InferenceServerClient(served.state["address"]) as client:
        yield client


def code_of(call: Callable[[], Any]) -> str:
    with pytest.raises(InferenceServerException) as caught:
        call()
    return str(caught.value.status()).removeprefix("StatusCode.")


def test_k1_k2_raw_and_typed_contents_give_the_same_bytes(served: Served, client: Any) -> None:
    request = service_pb2.ModelInferRequest(model_name="adder", id="typed")
    request.inputs.add(name="input", datatype="FP32", shape=[1, 16]).contents.fp32_contents.extend(R16)
    with grpc.insecure_channel(served.state["address"]) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            service_pb2.ModelInferRequest.SerializeToString,
            service_pb2.ModelInferResponse.FromString,
        )
        typed = call(request)
    assert typed.id == "typed"
    raw = infer(client, "adder", input=R16[None])["output"]
    assert list(typed.raw_output_contents) == [raw.tobytes()] == [(R16[None] + 1).tobytes()]


def test_the_batch_dimension_may_be_left_out(client: Any) -> None:
    assert infer(client, "adder", input=R16)["output"].tolist() == [(R16 + 1).tolist()]
    answer = infer(client, "multi", a=A[0], b=B)
    assert answer["sum"].tolist() == [[11, 22, 33, 44]]


def test_k3_health_and_metadata_of_the_server_and_of_models(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("adder")
    assert not client.is_model_ready("nobody")
    assert client.get_server_metadata().name == "nereid"
    metadata = client.get_model_metadata("adder")
    assert (metadata.platform, list(metadata.versions)) == ("onnxruntime_onnx", ["1"])
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [("input", "FP32", [-1, 16])]
    assert client.get_model_config("adder").config.max_batch_size == 10


def test_k6_a_requested_output_is_given_and_an_unknown_one_refused(client: Any) -> None:
    def ask(name: str) -> Any:
        return client.infer(
            "adder", [input_tensor("input", R16[None])], outputs=[tritonclient.InferRequestedOutput(name)]
        )

    assert [output.name for output in ask("output").get_response().outputs] == ["output"]
    assert code_of(lambda: ask("nothing")) == "INVALID_ARGUMENT"


def test_k9_inputs_bind_by_name_whatever_their_order(client: Any) -> None:
    answer = infer(client, "multi", b=B, a=A)
    assert {name: array.tolist() for name, array in answer.items()} == {
        "sum": [[11, 22, 33, 44]],
        "prod": [[10, 40, 90, 160]],
    }


@pytest.mark.parametrize(
    ("case", "inputs"),
    [
        ("K10 missing", [("a", A)]),
        ("K11 duplicate", [("a", A), ("a", A), ("b", B)]),
        ("K11 duplicate in the place of another", [("a", A), ("a", A)]),
        ("K12 extra", [("a", A), ("b", B), ("c", A)]),
        ("K12 extra that makes up for what is left out", [("a", A[0]), ("b", B[0]), ("c", A)]),
        ("wrong size", [("a", A), ("b", R16[None])]),
        ("wrong rank", [("a", A[None]), ("b", B)]),
        ("wrong type", [("a", A), ("b", B.astype(np.int64))]),
        ("too many rows", [("a", np.repeat(A, 11, 0)), ("b", np.repeat(B, 11, 0))]),
        ("rows that differ", [("a", np.repeat(A, 2, 0)), ("b", B)]),
    ],
)
def test_inputs_that_break_the_contract_are_refused(client: Any, case: str, inputs: list[Any]) -> None:
    tensors = [input_tensor(name, array) for name, array in inputs]
    assert code_of(lambda: client.infer("multi", tensors)) == "INVALID_ARGUMENT", case


def test_a_checkpoint_takes_several_inputs_by_name_in_any_order_and_interleaved(served: Served) -> None:
    def half(name: str, array: np.ndarray, number: int) -> Any:
        return chunk([1, 4], array.tobytes()[8 * number : 8 * number + 8], end=number == 1, name=name)

    for order in ("abab", "bbaa", "abba"):
        sent = {"a": 0, "b": 0}
        messages = [meta("multi")]
        for name in order:
            messages.append(half(name, {"a": A, "b": B}[name], sent[name]))
            sent[name] += 1
        outputs = tensors_of(checkpoint(served, messages))
        assert list(outputs.items()) == [("sum", ([1, 4], (A + B).tobytes())), ("prod", ([1, 4], (A * B).tobytes()))]


def test_a_checkpoint_carries_a_state_in_and_out(served: Served) -> None:
    state, frame = np.zeros((2, 1, 128), np.float32), np.ones((1, 512), np.float32)
    for call in range(1, 4):
        outputs = tensors_of(
            checkpoint(
                served,
                [
                    meta("recurrent"),
                    chunk([2, 1, 128], state.tobytes(), name="state"),
                    chunk([1], np.int64(8).tobytes(), name="rate"),
                    chunk([1, 512], (call * frame).tobytes(), name="frame"),
                ],
            )
        )
        assert outputs["loudness"] == ([1, 1], np.float32(call).tobytes())
        shape, data = outputs["next_state"]
        state = np.frombuffer(data, np.float32).reshape(shape)
        assert (shape, set(state.ravel())) == ([2, 1, 128], {8.0 * call})


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([chunk([4], A.tobytes(), name="a")], r"needs the inputs \['a', 'b'\]; not sent: \['b'\]"),
        ([chunk([4], A.tobytes(), name="c")], r"no input 'c'; tensor_name must be one of \['a', 'b'\]"),
        ([chunk([4], A.tobytes(), name="a"), chunk([4], A.tobytes(), name="a")], "input 'a': a chunk came after"),
    ],
)
def test_a_checkpoint_that_misses_or_mistakes_an_input_is_told(served: Served, chunks: list[Any], words: str) -> None:
    with pytest.raises(grpc.RpcError, match=words) as caught:
        checkpoint(served, [meta("multi"), *chunks])
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_k13_an_unknown_output_is_refused(client: Any) -> None:
    wanted = [tritonclient.InferRequestedOutput(name) for name in ("sum", "difference")]
    inputs = [input_tensor("a", A), input_tensor("b", B)]
    assert code_of(lambda: client.infer("multi", inputs, outputs=wanted)) == "INVALID_ARGUMENT"


def test_k15_metadata_names_all_tensors(client: Any) -> None:
    metadata = client.get_model_metadata("multi")
    assert [t.name for t in metadata.inputs] == ["a", "b"]
    assert [t.name for t in metadata.outputs] == ["sum", "prod"]


def test_k16_integers_stay_integers(client: Any) -> None:
    answer = infer(client, "whole", input=np.array([[10, 20, 30, 2**53 + 1]], np.int64))["output"]
    assert (answer.dtype, answer.tolist()) == (np.dtype(np.int64), [[11, 21, 31, 2**53 + 2]])


def test_k19_a_payload_shorter_than_its_shape_is_refused(client: Any) -> None:
    short = input_tensor("input", R16[None, :8])
    for shape in ([1, 16], [16]):
        short.set_shape(shape)
        assert code_of(lambda: client.infer("adder", [short])) == "INVALID_ARGUMENT"


def test_k20_the_version_is_1_or_left_out(client: Any) -> None:
    for version in ("", "1"):
        assert client.infer("adder", [input_tensor("input", R16[None])], model_version=version).as_numpy("output").shape
        assert client.is_model_ready("adder", version)
        assert client.get_model_metadata("adder", version).name == "adder"
    assert not client.is_model_ready("adder", "2")
    assert code_of(lambda: client.get_model_metadata("adder", "2")) == "NOT_FOUND"
    assert code_of(lambda: client.infer("adder", [input_tensor("input", R16[None])], model_version="2")) == "NOT_FOUND"


def test_k21_an_unknown_model_is_not_found(client: Any) -> None:
    calls = (
        lambda: client.infer("nobody", [input_tensor("input", R16[None])]),
        lambda: client.get_model_metadata("nobody"),
        lambda: client.get_model_config("nobody"),
        lambda: client.get_inference_statistics("nobody"),
    )
    assert [code_of(call) for call in calls] == ["NOT_FOUND"] * 4


def test_lists_and_statistics_show_what_is_served(client: Any) -> None:
    index = client.get_model_repository_index()
    assert [(m.name, m.version, m.state) for m in index.models] == [(name, "1", "READY") for name in MODELS]
    assert [s.name for s in client.get_inference_statistics().model_stats] == list(MODELS)
    before = client.get_inference_statistics("whole").model_stats[0].inference_count
    infer(client, "whole", input=np.zeros((3, 4), np.int64))
    assert client.get_inference_statistics("whole").model_stats[0].inference_count == before + 3


def test_what_changes_the_server_is_switched_off(client: Any) -> None:
    calls = (
        lambda: client.load_model("adder"),
        lambda: client.unload_model("adder"),
        lambda: client.get_system_shared_memory_status(),
        lambda: client.get_cuda_shared_memory_status(),
        lambda: client.get_trace_settings(),
        lambda: client.get_log_settings(),
    )
    assert [code_of(call) for call in calls] == ["UNIMPLEMENTED"] * 6
    assert client.is_model_ready("adder")


def streamed(client: Any, requests: list[tuple[str, list[Any]]]) -> list[Any]:
    """The answer, or the error, to each request of one stream, in order."""
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put(error or result))
    try:
        for model, tensors in requests:
            client.async_stream_infer(model, tensors)
        return [answers.get(timeout=60) for _ in requests]
    finally:
        client.stop_stream()


def test_k22_a_stream_answers_in_order(client: Any) -> None:
    rows = [np.full((1, 16), number, np.float32) for number in range(3)]
    answers = streamed(client, [("adder", [input_tensor("input", row)]) for row in rows])
    assert [answer.as_numpy("output")[0, 0] for answer in answers] == [1, 2, 3]


def test_k23_a_stream_survives_a_bad_request(client: Any) -> None:
    good = ("adder", [input_tensor("input", R16[None])])
    bad = ("adder", [input_tensor("input", R16[None, :15])])
    first, second, third = streamed(client, [good, bad, ("adder", [input_tensor("input", R16)])])
    assert first.as_numpy("output").tolist() == third.as_numpy("output").tolist() == [(R16 + 1).tolist()]
    assert "unexpected shape for input 'input' for model 'adder'" in str(second)


Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def metrics(served: Served) -> Series:
    """Every series by name and labels, as Prometheus' own parser reads them; none comes twice."""
    with urllib.request.urlopen(f"http://{served.state['http']}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    series = {
        (sample.name.removesuffix("_total"), tuple(sorted(sample.labels.items()))): sample.value for sample in samples
    }
    assert len(series) == len(samples)
    return series


def of_model(series: Series, model: str) -> dict[str, float]:
    """The series of one model, by the end of their name or, for failures, by their reason."""
    found = {}
    for (name, labels), value in series.items():
        label = dict(labels)
        if label.get("model") == model and name.startswith("nv_inference_"):
            assert label["version"] == "1"
            found[label.get("reason", name.removeprefix("nv_inference_"))] = value
    return found


def refusals(served: Served, model: str) -> float:
    return of_model(metrics(served), model)["REJECTED"]


COUNTERS = {
    *(
        "request_success",
        "count",
        "exec_count",
        "request_duration_us",
        "queue_duration_us",
        "compute_input_duration_us",
    ),
    *("compute_infer_duration_us", "compute_output_duration_us", "OTHER", "BACKEND", "CANCELED", "REJECTED"),
}


def test_m4_m6_every_series_of_every_model_is_there_before_its_first_call(served: Served) -> None:
    series = metrics(served)
    assert {dict(labels)["model"] for _, labels in series if "model" in dict(labels)} == set(MODELS)
    for model in MODELS:
        assert of_model(series, model).keys() == COUNTERS | {"pending_request_count"}
    assert of_model(series, "idle-model_1.0") == dict.fromkeys([*COUNTERS, "pending_request_count"], 0)


@pytest.mark.parametrize("surface", ["KServe", "KServe without the batch dimension", "Checkpoint"])
def test_m1_each_request_counts_once_and_unknown_models_nowhere(served: Served, client: Any, surface: str) -> None:
    rows = np.arange(32, dtype=np.float32).reshape(2, 16)

    def ask(model: str, array: np.ndarray) -> None:
        if surface == "Checkpoint":
            checkpoint(served, [meta(model), chunk(list(array.shape), array.tobytes())])
        else:
            client.infer(model, [input_tensor("input", array)])

    before = metrics(served)
    ask("counted", rows if surface != "KServe without the batch dimension" else rows[0])
    for model, array in (("counted", rows[0, :15]), ("nobody", rows)):
        with pytest.raises((InferenceServerException, grpc.RpcError)):
            ask(model, array)
    expected = {"request_success": 1, "count": len(rows), "exec_count": 1, "OTHER": 1}
    if surface == "KServe without the batch dimension":
        expected["count"] = 1
    deadline = time.monotonic() + 60
    while True:  # Envoy counts a little after it has answered
        after = metrics(served)
        old, new = of_model(before, "counted"), of_model(after, "counted")
        changed = {name: new[name] - old[name] for name in new if new[name] != old[name]}
        durations = {name: changed.pop(name) for name in list(changed) if name.endswith("_us")}
        if changed == expected or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert changed == expected
    assert durations["request_duration_us"] >= durations["compute_infer_duration_us"] > 0
    assert new["pending_request_count"] == 0
    assert after.keys() == before.keys()


def test_the_time_of_each_call_is_shown_under_its_surface(served: Served, client: Any) -> None:
    def shown(name: str, **labels: str) -> float:
        return metrics(served)[name, tuple(sorted({"model": "counted", **labels}.items()))]

    def counts() -> dict[str, float]:
        return {s: shown("nereid_request_duration_seconds_count", surface=s) for s in SURFACES}

    before, earlier = counts(), None
    while before != earlier:  # Envoy adds its times up once a second, those of earlier tests, too
        time.sleep(2)
        before, earlier = counts(), before
    received = shown("nereid_checkpoint_input_bytes_sum")
    for _ in range(3):
        client.infer("counted", [input_tensor("input", R16[None])])
    for _ in range(2):
        client.infer("counted", [input_tensor("input", R16)])
    streamed(client, [("counted", [input_tensor("input", R16[None])])] * 4)
    for _ in range(2):
        checkpoint(served, [meta("counted"), chunk([1, 16], R16.tobytes())])
    with pytest.raises(InferenceServerException):
        client.infer("nobody", [input_tensor("input", R16)])
    expected = dict(zip(SURFACES, (3, 2, 4, 2), strict=True))
    deadline = time.monotonic() + 60
    while True:
        changed = {surface: count - before[surface] for surface, count in counts().items()}
        if changed == expected or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert changed == expected
    assert shown("nereid_checkpoint_input_bytes_sum") - received == 2 * R16.nbytes
    assert shown("nereid_checkpoint_output_bytes_sum") > 0


def test_permits_in_use_are_shown_while_a_call_runs(served: Served, client: Any) -> None:
    labels, rows = (("model", "slow"),), np.zeros((8, endings.WIDTH), np.float32)
    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(infer, client, "slow", input=rows) for _ in range(60)]
        seen = set()
        while not all(each.done() for each in work):
            seen.add(metrics(served)["nereid_permits_in_use", labels])
    assert max(seen) in (1, 2, 3, 4)
    assert metrics(served)["nereid_permits_in_use", labels] == 0
    assert metrics(served)["nereid_permits_limit", labels] == endings.CAPACITY


def test_m5_the_pending_count_is_never_below_0(served: Served, client: Any) -> None:
    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(infer, client, "adder", input=R16[None]) for _ in range(200)]
        while not all(each.done() for each in work):
            assert of_model(metrics(served), "adder")["pending_request_count"] >= 0


def test_a_client_that_goes_before_its_tensor_is_whole_counts_as_canceled(served: Served) -> None:
    before = of_model(metrics(served), "counted")
    with grpc.insecure_channel(served.state["address"]) as channel:
        going = threading.Event()

        def messages() -> Iterator[Any]:
            yield meta("counted")
            yield chunk([16], R16.tobytes()[:32], end=False)
            going.wait()

        call = channel.stream_stream("/inference.Nereid/Checkpoint", pb.CheckpointRequest.SerializeToString)(messages())
        time.sleep(0.3)
        call.cancel()
        going.set()
    deadline = time.monotonic() + 60
    while of_model(metrics(served), "counted") == before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert of_model(metrics(served), "counted") == {**before, "CANCELED": before["CANCELED"] + 1}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v2/health/live", 200),
        ("/v2/health/ready", 200),
        ("/v2/models/adder/ready", 200),
        ("/v2/models/adder/versions/1/ready", 200),
        ("/v2/models/adder/versions/2/ready", 400),
        ("/v2/models/nobody/ready", 400),
        ("/v2/models/nobody/versions/1/ready", 400),
        ("/v2/models/adder", 404),
        ("/v2/models/adder/infer", 404),
        ("/", 404),
    ],
)
def test_m7_each_path_has_its_status(served: Served, path: str, status: int) -> None:
    connection = http.client.HTTPConnection(served.state["http"], timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.status == status
    assert answer.read() == b"" or status == 404
    connection.close()


def test_health_is_told_for_the_server_its_services_and_its_models(served: Served) -> None:
    names = ("", "inference.Nereid", "inference.GRPCInferenceService", *MODELS)
    with grpc.insecure_channel(served.state["address"]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in names:
            request = health_pb2.HealthCheckRequest(service=name)
            assert health.Check(request, timeout=5).status == health_pb2.HealthCheckResponse.SERVING
            watch = health.Watch(request, timeout=5)
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=5)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = health.Watch(health_pb2.HealthCheckRequest(service="nobody"), timeout=5)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()


def test_k24_of_two_calls_for_one_permit_one_is_refused_and_counted(served: Served, client: Any) -> None:
    before = refusals(served, "single")
    outcomes: list[Any] = []

    def ask() -> None:
        try:
            outcomes.append(infer(client, "single", input=R16[None])["output"].tolist())
        except InferenceServerException as error:
            outcomes.append(str(error))

    with endings.stopped(served, "single"):
        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        while not outcomes and time.monotonic() < deadline:
            time.sleep(0.005)
        assert outcomes == [f"[StatusCode.RESOURCE_EXHAUSTED] {FULL}"]
        with pytest.raises(grpc.RpcError) as caught:
            checkpoint(served, [meta("single"), chunk([16], R16.tobytes())])
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        (error,) = streamed(client, [("single", [input_tensor("input", R16[None])])])
        assert FULL in str(error)
        assert infer(client, "adder", input=R16[None])
    for thread in threads:
        thread.join(60)
    assert outcomes[1:] == [[(R16 + 1).tolist()]]
    deadline = time.monotonic() + 60
    while refusals(served, "single") != before + 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert refusals(served, "single") == before + 3
    assert refusals(served, "multi") == 0


def test_the_permits_come_back_whatever_way_the_calls_end(served: Served) -> None:
    async def scenario() -> None:
        address = served.state["address"]
        async with grpc.aio.insecure_channel(address) as channel:
            calls = endings.Endings(channel, address, "slow", seed=0)
            ways = {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT", "KILLED"}
            for rounds in range(1, 6):  # which ways a round takes is up to chance and the machine
                await calls.run(150, killed_clients=2)
                assert calls.outcomes.total() == rounds * 150
                if calls.outcomes.keys() >= ways:
                    break
            assert calls.outcomes.keys() >= ways
            assert await endings.until_full(channel, served, "slow") == endings.CAPACITY

    asyncio.run(scenario())


def test_a_refusal_comes_sooner_than_the_model_could_have_run(served: Served) -> None:
    async def scenario() -> None:
        async with grpc.aio.insecure_channel(served.state["address"]) as channel:
            call, times = channel.unary_unary(endings.INFER), []
            for _ in range(20):
                started = time.perf_counter()
                await call(endings.infer_request("slow"))
                times.append((time.perf_counter() - started) * 1e3)
            refusals = await endings.refusal_times_ms(channel, served, "slow", 100)
            assert statistics.median(refusals) < statistics.median(times)

    asyncio.run(scenario())
