"""Script folders through the whole path: converted, served, and asked by stock clients at the public address.

Case numbers are those of the nereid facts (section 8). The scripts use the standard library only, so that all of them
share one environment without packages.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as tritonclient
from serving import Served, alive, checkpoint, chunk, input_tensor, meta
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from native_service.proto import inference_pb2 as pb

pytestmark = pytest.mark.triton

P16 = "input_shape: [16]\nmax_batch_size: 10\noutput_shape: [1]\n"
COMPILER = shutil.which("c++")
R16 = np.arange(16, dtype="<f4")

# What every script may use: its input as numbers, and its answer.
PRELUDE = """
import array, math, os, sys, time
CODES = {"float32": "f", "int32": "i"}

def numbers():
    return array.array(CODES[os.environ["NEREID_INPUT_DTYPE"]], sys.stdin.buffer.read())

def answer(shape, values, dtype=None):
    dtype = dtype or os.environ["NEREID_OUTPUT_DTYPE"]
    with open(os.environ["NEREID_OUTPUT_PATH"], "wb") as file:
        file.write(f"{dtype} {','.join(map(str, shape))}\\n".encode())
        file.write(array.array(CODES[dtype], values).tobytes())

def shape():
    return [int(size) for size in os.environ["NEREID_INPUT_SHAPE"].split(",")]
"""

SCRIPTS = {
    "printer": ("output_shape: [1]", "print('one'); print(''); print('three'); answer([1], [42.0])"),
    "stderr": (
        "output_shape: [1]",
        "print('out'); time.sleep(.2); sys.stderr.write('err\\n'); answer([1], [0])",
    ),
    "exit3": ("output_shape: [1]", "print('before'); sys.stderr.write('the reason\\n' * 2000); sys.exit(3)"),
    "summing": (
        P16,
        "x = numbers(); print(os.environ['NEREID_INPUT_SHAPE']); print(len(x)); print(sum(x)); answer([1], [sum(x)])",
    ),
    "integers": (P16, "answer([1], [1], 'int32')"),
    "deaf": ("input_shape: [200000]\nmax_batch_size: 1\noutput_shape: [1]", "print('here'); answer([1], [1])"),
    "pymul": (
        "input_shape: [4]\noutput_shape: [4]\nmax_batch_size: 4",
        "answer(shape(), [2 * x + 1 for x in numbers()])",
    ),
    "five": ("input_shape: [4]\noutput_shape: [4]\nmax_batch_size: 4", "answer([1, 5], range(5))"),
    "flood": (
        "input_shape: [200000]\noutput_shape: [200000]\nmax_batch_size: 1",
        "x = numbers()\nfor i in range(8000): print('line', i)\nanswer(shape(), [v + 2 for v in x])",
    ),
    "addint": (
        "input_shape: [4]\noutput_shape: [4]\nmax_batch_size: 4\ndata_type: INT32",
        "answer(shape(), [x + 1 for x in numbers()])",
    ),
    "alone": ("output_shape: [2]", "answer([2], [7, 8])"),
    "silent": ("output_shape: [1]", "pass"),
    "bytes": (
        "input_shape: [-1]\noutput_shape: [-1]\nmax_batch_size: 1",
        "data = sys.stdin.buffer.read(); print(os.environ['NEREID_INPUT_SHAPE'], data.decode())\n"
        "answer([2], [len(data), 0])",
    ),
    "sleeper": (
        "output_shape: [1]",
        "import subprocess; p = subprocess.Popen(['sleep', '600']); print(os.getpid(), p.pid); time.sleep(600)",
    ),
    "limited": ("output_shape: [1]\ntime_limit_s: 1", "print('begun'); time.sleep(600)"),
    "bounded": ("output_shape: [1]", "print(os.getpid()); time.sleep(600)"),
    "second": ("output_shape: [1]", "time.sleep(1); answer([1], [1])"),
    "secrets": ("output_shape: [1]", "print(sorted(os.environ)); print(os.getcwd()); answer([1], [1])"),
    "doomed": ("output_shape: [1]", "print(os.getpid(), flush=True); time.sleep(600)"),
    "warm": (
        "input_shape: [4]\noutput_shape: [4]\nmax_batch_size: 4\nwarm: true",
        "print('warm', len(sys.modules['array'].__name__)); answer(shape(), [2 * x + 1 for x in numbers()])",
    ),
    "chatty": ("output_shape: [1]", "for i in range(40_000): print(i)\nanswer([1], [0])"),
    "stubborn": (
        "output_shape: [1]",
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid()); time.sleep(600)",
    ),
}
CAPACITY = {"second": 1, "sleeper": 2}
OPTIONS = {"bounded": "time_limit_s: 1"}
CPP_ADD = """
#include <cstdio>
#include <cstdlib>
int main() {
    std::FILE* file = std::fopen(std::getenv("NEREID_OUTPUT_PATH"), "wb");
    std::fprintf(file, "float32 %s\\n", std::getenv("NEREID_INPUT_SHAPE"));
    for (float x; std::fread(&x, sizeof x, 1, stdin) == 1;) std::fwrite(&++x, sizeof x, 1, file);
    return std::fclose(file);
}
"""


def write_script(folder: Path, contract: str, body: str) -> None:
    folder.mkdir(parents=True)
    (folder / "main.py").write_text(PRELUDE + body)
    (folder / "requirements.txt").write_text("")
    (folder / "model_inference.textproto").write_text(contract + "\n")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("scripts")
    for name, (contract, body) in SCRIPTS.items():
        write_script(folder / "models" / name, contract, body)
    cpp = folder / "models" / "cppadd"
    cpp.mkdir()
    (cpp / "main.cpp").write_text(CPP_ADD)
    (cpp / "model_inference.textproto").write_text("input_shape: [4]\noutput_shape: [4]\nmax_batch_size: 8\n")
    names = [*SCRIPTS, *(["cppadd"] if COMPILER else [])]
    entries = "".join(
        f"  - {{name: {n}, device: cpu, queue_capacity: {CAPACITY.get(n, 8)}, options: {{{OPTIONS.get(n, '')}}}}}\n"
        for n in names
    )
    (folder / "nereid.yaml").write_text(
        f"server: {{bind_addr: '127.0.0.1:0', http_addr: '127.0.0.1:0', ml_backends_path: models}}\nmodels:\n{entries}"
    )
    os.environ["A_SECRET_OF_THE_SERVER"] = "hunter2"
    server = Served(folder, "--config", str(folder / "nereid.yaml"))
    del os.environ["A_SECRET_OF_THE_SERVER"]
    yield server
    left = server.descendants()
    code, output = server.end()
    assert code == 0, output
    assert alive(left) == set()


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with tritonclient.InferenceServerClient(served.state["address"]) as client:
        yield client


def lines(responses: list[Any]) -> list[str]:
    return [r.chunk for r in responses if not r.done and not r.HasField("output_chunk")]


def output(responses: list[Any]) -> tuple[list[int], list[float]]:
    chunks = [r.output_chunk for r in responses if r.HasField("output_chunk")]
    return list(chunks[0].shape), np.frombuffer(b"".join(c.data for c in chunks), "<f4").tolist()


def end(responses: list[Any]) -> tuple[bool, int]:
    return responses[-1].done, responses[-1].exit_code


def metric(served: Served, name: str, model: str, **labels: str) -> float:
    text = urllib.request.urlopen(f"http://{served.state['http']}/metrics").read().decode()
    wanted = [f'{key}="{value}"' for key, value in {"model": model, **labels}.items()]
    (value,) = [
        line.rpartition(" ")[2]
        for line in text.splitlines()
        if line.startswith(name + "{") and all(w in line for w in wanted)
    ]
    return float(value)


def test_c8_printed_lines_come_in_order_then_the_tensor_then_the_end(served: Served) -> None:
    responses = checkpoint(served, [meta("printer")])
    assert lines(responses) == ["one", "", "three"]
    assert output(responses) == ([1], [42.0])
    assert [r.output_chunk.tensor_name for r in responses if r.HasField("output_chunk")] == ["output"]
    assert end(responses) == (True, 0)


def test_c9_stderr_lines_carry_a_prefix(served: Served) -> None:
    assert lines(checkpoint(served, [meta("stderr")])) == ["out", "stderr: err"]


def test_c10_m3_an_exit_code_is_an_answer_and_counts_as_a_failure(served: Served) -> None:
    before = metric(served, "nv_inference_request_failure", "exit3", reason="BACKEND")
    responses = checkpoint(served, [meta("exit3")])
    assert lines(responses)[0] == "before"
    assert lines(responses).count("stderr: the reason") == 2000
    assert end(responses) == (True, 3)
    assert not any(r.HasField("output_chunk") for r in responses)
    assert metric(served, "nv_inference_request_failure", "exit3", reason="BACKEND") == before + 1
    assert metric(served, "nv_inference_request_success", "exit3") == 0


def test_m3_a_finished_script_counts_as_a_success(served: Served) -> None:
    before = metric(served, "nv_inference_request_success", "printer")
    checkpoint(served, [meta("printer")])
    assert metric(served, "nv_inference_request_success", "printer") == before + 1
    assert metric(served, "nv_inference_request_failure", "printer", reason="BACKEND") == 0


@pytest.mark.parametrize("shape", [[1, 16], [16]])
def test_c11_c12_c13_a_script_is_told_its_shape_and_gets_its_numbers(served: Served, shape: list[int]) -> None:
    responses = checkpoint(served, [meta("summing"), chunk(shape, R16.tobytes())])
    assert lines(responses) == ["1,16", "16", "120.0"]
    assert output(responses) == ([1], [120.0])


@pytest.mark.parametrize(
    ("case", "messages", "code", "word"),
    [
        ("C14", [meta("integers"), chunk([1, 16], R16.tobytes())], "FAILED_PRECONDITION", "FP32"),
        ("C15", [meta("summing"), chunk([1, 15], bytes(60))], "INVALID_ARGUMENT", "16"),
        ("no file", [meta("silent")], "FAILED_PRECONDITION", "NEREID_OUTPUT_PATH"),
        ("wrong shape", [meta("five"), chunk([1, 4], bytes(16))], "INTERNAL", "[1, 5]"),
        ("time limit", [meta("limited")], "DEADLINE_EXCEEDED", "1 s"),
    ],
)
def test_bad_calls_end_with_their_code(served: Served, case: str, messages: list[Any], code: str, word: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        checkpoint(served, messages)
    assert caught.value.code() is grpc.StatusCode[code], (case, caught.value.details())
    assert word in caught.value.details()


def test_c16_a_script_may_ignore_a_large_input(served: Served) -> None:
    data = np.ones(200_000, "<f4").tobytes()
    chunks = [chunk([200_000], data[i : i + 65_536], end=False) for i in range(0, len(data), 65_536)]
    responses = checkpoint(served, [meta("deaf"), *chunks])
    assert (lines(responses), end(responses)) == (["here"], (True, 0))


def test_a_script_gets_bytes_that_are_not_as_many_as_the_shape_says(served: Served) -> None:
    responses = checkpoint(served, [meta("bytes"), chunk([5], b"hello")])
    assert lines(responses) == ["1,5 hello"]
    assert output(responses) == ([2], [5.0, 0.0])


def infer(client: Any, model: str, *arrays: np.ndarray, **options: Any) -> np.ndarray:
    tensors = [input_tensor("input", array) for array in arrays]
    return client.infer(model, tensors, **options).as_numpy("output")


def test_k4_pymul_doubles_and_adds_one(client: Any) -> None:
    result = infer(client, "pymul", np.array([[1, 2, 3, 4]], "f4"))
    assert result.tolist() == [[3, 5, 7, 9]]
    assert infer(client, "pymul", np.array([1, 2, 3, 4], "f4")).tolist() == [[3, 5, 7, 9]]
    assert client.get_model_metadata("pymul").platform == "python"


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
def test_k5_a_cpp_folder_is_built_and_adds_one(served: Served, client: Any) -> None:
    x = np.array([[1, 2, 3, 4]], "f4")
    assert infer(client, "cppadd", x).tolist() == [[2, 3, 4, 5]]
    assert client.get_model_metadata("cppadd").platform == "cpp_subprocess"
    assert output(checkpoint(served, [meta("cppadd"), chunk([4], x.tobytes())])) == ([1, 4], [2, 3, 4, 5])


def test_a_warm_script_answers_on_both_surfaces(served: Served, client: Any) -> None:
    x = np.array([[1, 2, 3, 4]], "f4")
    assert infer(client, "warm", x).tolist() == [[3, 5, 7, 9]]
    responses = checkpoint(served, [meta("warm"), chunk([1, 4], x.tobytes())])
    assert (lines(responses), output(responses)) == (["warm 5"], ([1, 4], [3, 5, 7, 9]))


def test_k22_k23_a_stream_outlives_a_bad_request(client: Any) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put(error or result.as_numpy("output").tolist()))
    for width in (4, 3, 4):
        client.async_stream_infer("pymul", [input_tensor("input", np.ones((1, width), "f4"))])
    first, second, third = (answers.get(timeout=20) for _ in range(3))
    client.stop_stream()
    assert (first, third) == ([[3, 3, 3, 3]], [[3, 3, 3, 3]])
    assert isinstance(second, InferenceServerException)


def refused(client: Any, model: str, *arrays: np.ndarray, **options: Any) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        infer(client, model, *arrays, **options)
    return caught.value.status().removeprefix("StatusCode."), caught.value.message()


def test_k7_an_output_of_another_shape_than_declared_is_internal(client: Any) -> None:
    code, text = refused(client, "five", np.ones((1, 4), "f4"))
    assert (code, "[1, 5]" in text) == ("INTERNAL", True)


def test_k8_a_large_tensor_and_thousands_of_lines_complete(client: Any) -> None:
    assert (infer(client, "flood", np.ones((1, 200_000), "f4")) == 3.0).all()


def test_k8_the_same_over_checkpoint_has_every_line(served: Served) -> None:
    data = np.ones(200_000, "<f4").tobytes()
    chunks = [chunk([1, 200_000], data[i : i + 65_536], end=False) for i in range(0, len(data), 65_536)]
    responses = checkpoint(served, [meta("flood"), *chunks])
    assert lines(responses) == [f"line {i}" for i in range(8000)]
    assert output(responses)[1] == [3.0] * 200_000


def test_k17_integers_stay_integers(client: Any) -> None:
    result = infer(client, "addint", np.array([[10, 20, 30, 40]], "i4"))
    assert (result.dtype, result.tolist()) == (np.dtype("int32"), [[11, 21, 31, 41]])
    assert client.get_model_metadata("addint").inputs[0].datatype == "INT32"
    assert refused(client, "addint", np.ones((1, 4), "f4"))[0] == "INVALID_ARGUMENT"


def test_k18_a_script_without_input_takes_none(served: Served, client: Any) -> None:
    metadata = client.get_model_metadata("alone")
    assert ([t.name for t in metadata.inputs], [t.name for t in metadata.outputs]) == ([], ["output"])
    assert infer(client, "alone").tolist() == [7, 8]
    assert refused(client, "alone", np.ones((1, 4), "f4"))[0] == "INVALID_ARGUMENT"
    with grpc.insecure_channel(served.state["address"]) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            service_pb2.ModelInferRequest.SerializeToString,
            service_pb2.ModelInferResponse.FromString,
        )
        with pytest.raises(grpc.RpcError) as caught:
            call(service_pb2.ModelInferRequest(model_name="alone", raw_input_contents=[b"1234"]))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_unary_error_tells_the_exit_code_and_the_end_of_stderr(client: Any) -> None:
    code, text = refused(client, "exit3")
    assert code == "INTERNAL"
    assert "exit code 3" in text
    assert text.rstrip().endswith("the reason")


def test_a_script_that_leaves_nothing_is_a_failed_precondition(client: Any) -> None:
    code, text = refused(client, "silent")
    assert (code, "NEREID_OUTPUT_PATH" in text) == ("FAILED_PRECONDITION", True)


def test_the_time_limit_ends_a_unary_call_too(client: Any) -> None:
    assert refused(client, "limited")[0] == "DEADLINE_EXCEEDED"


def test_the_time_limit_of_the_settings_holds_for_scripts_as_well(client: Any, served: Served) -> None:
    assert refused(client, "bounded") == (
        "DEADLINE_EXCEEDED", "model 'bounded' took longer than its time limit of 1 s",
    )  # fmt: skip
    live = Live(served, "bounded")
    with pytest.raises(grpc.RpcError) as caught:
        list(live.call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    live.channel.close()
    assert gone_within(live.pids, 10)


def test_a_script_sees_no_secret_of_the_server_and_runs_in_its_folder(served: Served) -> None:
    names, folder = lines(checkpoint(served, [meta("secrets")]))
    assert "A_SECRET_OF_THE_SERVER" not in names
    assert "'NEREID_OUTPUT_PATH'" in names
    assert "'NEREID_INPUT_SHAPE'" not in names
    assert Path(folder, "main.py").is_file()


def test_a_bad_token_of_a_client_opens_nothing(client: Any) -> None:
    assert infer(client, "alone", parameters={"nereid_link": "0" * 32}).tolist() == [7, 8]


class Live:
    """A Checkpoint call whose first line has arrived."""

    def __init__(self, served: Served, model: str, timeout: float | None = None) -> None:
        self.channel = grpc.insecure_channel(served.state["address"])
        call = self.channel.stream_stream(
            "/inference.Nereid/Checkpoint", pb.CheckpointRequest.SerializeToString, pb.CheckpointResponse.FromString
        )
        self.call = call(iter([meta(model)]), timeout=timeout)
        self.pids = {int(word) for word in next(self.call).chunk.split()}


def gone_within(pids: set[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pids)


def test_a_client_that_reads_late_gets_every_line(served: Served) -> None:
    live = Live(served, "chatty")
    time.sleep(2)  # Envoy once took so many waiting frames for an attack and closed the connection
    assert [r.chunk for r in live.call if r.chunk] == [str(i) for i in range(1, 40_000)]
    live.channel.close()


@pytest.mark.parametrize("ending", ["cancel", "deadline", "client loss"])
@pytest.mark.parametrize("model", ["sleeper", "stubborn"])
def test_whatever_ends_a_call_ends_the_process_group(served: Served, model: str, ending: str) -> None:
    live = Live(served, model, timeout=2 if ending == "deadline" else None)
    assert alive(live.pids) == live.pids
    if ending == "deadline":
        with pytest.raises(grpc.RpcError) as caught:
            next(live.call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    elif ending == "cancel":
        live.call.cancel()
    else:
        live.channel.close()
    assert gone_within(live.pids, 5)
    live.channel.close()


def test_a_cancelled_unary_call_ends_its_child(served: Served, client: Any) -> None:
    # The child of a unary call tells nobody its id: it is looked for below the server.
    before = served.descendants()
    with pytest.raises(InferenceServerException):
        client.infer("sleeper", [], client_timeout=1.5)
    assert gone_within(served.descendants() - before, 5)


def test_queue_capacity_bounds_children_on_both_surfaces(served: Served, client: Any) -> None:
    first, second = Live(served, "sleeper"), Live(served, "sleeper")
    try:
        assert refused(client, "sleeper")[0] == "RESOURCE_EXHAUSTED"
        with pytest.raises(grpc.RpcError) as caught:
            checkpoint(served, [meta("sleeper")])
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert metric(served, "nv_inference_request_failure", "sleeper", reason="REJECTED") >= 2
    finally:
        for live in (first, second):
            live.call.cancel()
            live.channel.close()


def test_k24_of_two_overlapping_calls_one_is_refused(served: Served, client: Any) -> None:
    results: list[str] = []

    def call() -> None:
        with tritonclient.InferenceServerClient(served.state["address"]) as own:
            try:
                own.infer("second", [])
                results.append("OK")
            except InferenceServerException as error:
                results.append(error.status())

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["OK", "StatusCode.RESOURCE_EXHAUSTED"]


def test_children_of_one_model_run_side_by_side(served: Served) -> None:
    live = [Live(served, "stubborn") for _ in range(4)]
    assert all(alive(call.pids) for call in live)
    for call in live:
        call.call.cancel()
    assert gone_within(set().union(*(call.pids for call in live)), 5)


def test_a_dead_model_process_ends_its_calls_on_both_surfaces_and_their_children(served: Served, client: Any) -> None:
    live = Live(served, "doomed")
    told: list[Any] = []
    client.async_infer("doomed", [], callback=lambda result, error: told.append(error or result))
    (stub,) = [pid for pid in served.descendants() if is_stub_of(pid, "doomed")]
    deadline = time.monotonic() + 20
    while len(children_of("doomed")) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    children = children_of("doomed")
    assert len(children) == 2
    os.kill(stub, signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as caught:
        next(live.call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    while not told and time.monotonic() < deadline + 20:
        time.sleep(0.05)
    assert told[0].status() == "StatusCode.UNAVAILABLE"
    assert gone_within(children, 10)
    live.channel.close()


def is_stub_of(pid: int, model: str) -> bool:
    command = (Path("/proc") / str(pid) / "cmdline").read_bytes()
    return b"triton_python_backend_stub" in command and f"/{model}/".encode() in command


def children_of(model: str) -> set[int]:
    """Processes that run the main.py of ``model``, wherever they hang in the tree."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().endswith(b"-u\0main.py\0"):
                folder = (entry / "cwd").readlink()
                if folder.parents[1].name == model:
                    found.add(int(entry.name))
        except OSError:
            continue
    return found
