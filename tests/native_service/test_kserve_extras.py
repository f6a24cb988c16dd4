"""What a stock tritonclient may use beside plain calls, on the real server: HTTP, compression, shared memory, texts."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
import queue
import struct
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import endings
import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from onnx import TensorProto, helper, save
from serving import Served, checkpoint, chunk, input_tensor, meta, our_shared_memory, raw_infer, write_adder
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException, shared_memory

pytestmark = pytest.mark.triton

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


def write_texts(path: Path) -> None:
    """``path``, a bare .onnx: rows of two texts with a mark behind each, and as they came."""
    names = ("words", "marked", "same")
    words, *outputs = [helper.make_tensor_value_info(name, TensorProto.STRING, ["n", 2]) for name in names]
    nodes = [
        helper.make_node("StringConcat", ["words", "mark"], ["marked"]),
        helper.make_node("Identity", ["words"], ["same"]),
    ]
    mark = helper.make_tensor("mark", TensorProto.STRING, [1], [b"!"])
    graph = helper.make_graph(nodes, "texts", [words], outputs, [mark])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("extras")
    models = folder / "models"
    models.mkdir()
    write_adder(models / "adder.onnx")
    endings.write_slow(models / "slow.onnx", layers=40)
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("input", "output")]
    graph = helper.make_graph([helper.make_node("Neg", ["input"], ["output"])], "graph", tensors[:1], tensors[1:])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), models / "wide.onnx")
    write_texts(models / "texts.onnx")
    (models / "failing").mkdir()
    (models / "failing" / "main.py").write_text("import sys; sys.exit('no luck')\n")
    (models / "failing" / "requirements.txt").write_text("")
    (models / "failing" / "model_inference.textproto").write_text("output_shape: [1]\n")
    (folder / "nereid.yaml").write_text(
        "server: {bind_addr: '127.0.0.1:0', http_addr: '127.0.0.1:0', http_infer_addr: '127.0.0.1:0',"
        " allow_shared_memory: true, ml_backends_path: models}\n"
        "models:\n"
        "  - {name: adder, device: cpu, queue_capacity: 4, options: {max_batch_size: 8}}\n"
        "  - {name: slow, device: cpu, queue_capacity: 8}\n"
        "  - {name: wide, device: cpu, queue_capacity: 8, options: {max_batch_size: 0}}\n"
        "  - {name: texts, device: cpu, queue_capacity: 64}\n"
        "  - {name: failing, device: cpu, queue_capacity: 4}\n"
    )
    server = Served(folder, "--config", str(folder / "nereid.yaml"))
    yield server
    assert server.end()[0] == 0


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[Any]:
    with httpclient.InferenceServerClient(served.state["http_infer"]) as client:
        yield client


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with grpcclient.InferenceServerClient(served.state["address"]) as client:
        yield client


def http_input(array: np.ndarray, *, binary: bool = True) -> Any:
    tensor = httpclient.InferInput("input", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


@pytest.mark.parametrize("answer", [None, "gzip", "deflate"])
@pytest.mark.parametrize("request_coding", [None, "gzip", "deflate"])
def test_the_stock_http_client_infers(http: Any, request_coding: str | None, answer: str | None) -> None:
    codings = {"request_compression_algorithm": request_coding, "response_compression_algorithm": answer}
    for binary in (True, False):
        for rows in (ROWS, ROWS[0]):
            wanted = [httpclient.InferRequestedOutput("output", binary_data=binary)]
            for outputs in (None, wanted):
                inputs = [http_input(rows, binary=binary)]
                result = http.infer("adder", inputs, outputs=outputs, request_id="the id", **codings)
                assert result.get_response()["id"] == "the id"
                assert (result.as_numpy("output") == rows.reshape(-1, 4) + 1).all()


def test_http_tells_what_grpc_tells(http: Any, client: Any) -> None:
    assert http.is_server_live()
    assert http.is_server_ready()
    assert [http.is_model_ready("adder", version) for version in ("", "1", "2")] == [True, True, False]
    assert not http.is_model_ready("nope")
    assert http.get_server_metadata()["extensions"] == list(client.get_server_metadata().extensions)
    # The library's own way from protobuf to JSON writes numbers of 64 bits as text and leaves zeros out.
    metadata = client.get_model_metadata("adder", as_json=True)
    for tensor in (*metadata["inputs"], *metadata["outputs"]):
        tensor["shape"] = [int(size) for size in tensor["shape"]]
    assert http.get_model_metadata("adder", "1") == metadata
    config = client.get_model_config("adder", as_json=True)["config"]
    told = http.get_model_config("adder")
    assert (told["name"], told["max_batch_size"], told["input"][0]["dims"]) == ("adder", 8, [4])
    assert told.keys() >= config.keys()
    assert http.get_model_repository_index() == client.get_model_repository_index(as_json=True)["models"]
    before = http.get_inference_statistics("adder")["model_stats"][0]["inference_count"]
    http.infer("adder", [http_input(ROWS)])
    assert http.get_inference_statistics("adder", "1")["model_stats"][0]["inference_count"] == before + 2
    assert len(http.get_inference_statistics()["model_stats"]) == 5


def test_errors_over_http_have_tritons_form(http: Any) -> None:
    with pytest.raises(InferenceServerException) as caught:
        http.infer("nope", [http_input(ROWS)])
    assert (caught.value.status(), "'nope' is not served here" in caught.value.message()) == ("404", True)
    with pytest.raises(InferenceServerException) as caught:
        http.infer("adder", [http_input(np.zeros((9, 4), np.float32))])
    assert (caught.value.status(), "batch-size must be <= 8" in caught.value.message()) == ("400", True)
    with pytest.raises(InferenceServerException) as caught:
        http.infer("failing", [])
    assert (caught.value.status(), "no luck" in caught.value.message()) == ("500", True)
    for call in (http.unload_model, http.load_model):
        with pytest.raises(InferenceServerException) as caught:
            call("adder")
        assert (caught.value.status(), "allow_model_control" in caught.value.message()) == ("501", True)


def test_curl_can_ask(served: Served) -> None:
    tensor = {"name": "input", "shape": [4], "datatype": "FP32", "data": [1, 2.5, 3, 4]}
    request = urllib.request.Request(
        f"http://{served.state['http_infer']}/v2/models/adder/infer",
        gzip.compress(json.dumps({"inputs": [tensor]}).encode()),
        {"Content-Encoding": "gzip"},
    )
    with urllib.request.urlopen(request) as answer:
        assert json.load(answer)["outputs"] == [
            {"name": "output", "datatype": "FP32", "shape": [1, 4], "data": [2.0, 3.5, 4.0, 5.0]}
        ]


def test_refusals_over_http_are_in_the_metrics(served: Served, http: Any) -> None:
    line = 'nv_inference_request_failure{model="adder",reason="OTHER",version="1"} '
    before = _metric(served, line)
    with pytest.raises(InferenceServerException):
        http.infer("adder", [http_input(np.zeros((0, 4), np.float32))])
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"http://{served.state['http_infer']}/v2/models/adder/infer", b"no JSON")
    assert _metric(served, line) == before + 2


def _metric(served: Served, name: str) -> float:
    with urllib.request.urlopen(f"http://{served.state['http']}/metrics") as answer:
        [value] = [line.removeprefix(name) for line in answer.read().decode().splitlines() if line.startswith(name)]
    return float(value)


def test_triton_listens_on_no_http_port_of_its_own(served: Served) -> None:
    [server] = [pid for pid in served.descendants() if b"tritonserver\0" in _command(pid)]
    assert b"--allow-http=false" in _command(server)


def _command(pid: int) -> bytes:
    return (Path("/proc") / str(pid) / "cmdline").read_bytes()


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_the_stock_grpc_client_compresses(client: Any, coding: str) -> None:
    for rows in (ROWS, ROWS[0]):
        result = client.infer("adder", [input_tensor("input", rows)], compression_algorithm=coding)
        assert (result.as_numpy("output") == rows.reshape(-1, 4) + 1).all()


class Region:
    """A shared memory object of this process, registered under a name of its own."""

    def __init__(self, client: Any, byte_size: int) -> None:
        self.client, self.byte_size = client, byte_size
        self.name = f"region{next(NUMBERS)}"
        self.key = f"/test-{os.getpid()}-{self.name}"
        self.handle = shared_memory.create_shared_memory_region(self.name, self.key, byte_size)
        client.register_system_shared_memory(self.name, self.key, byte_size)

    def write(self, *arrays: np.ndarray) -> None:
        shared_memory.set_shared_memory_region(self.handle, arrays)

    def read(self, shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
        return np.array(shared_memory.get_contents_as_numpy(self.handle, np.float32, shape, offset))

    def close(self) -> None:
        self.client.unregister_system_shared_memory(self.name)
        shared_memory.destroy_shared_memory_region(self.handle)


NUMBERS = itertools.count()


@pytest.fixture
def region(client: Any) -> Iterator[Region]:
    region = Region(client, 4096)
    yield region
    region.close()


def in_region(library: Any, region: str, shape: tuple[int, ...], offset: int = 0, size: int | None = None) -> Any:
    tensor = library.InferInput("input", list(shape), "FP32")
    tensor.set_shared_memory(region, 4 * math.prod(shape) if size is None else size, offset)
    return tensor


def to_region(library: Any, region: str, size: int, offset: int) -> Any:
    output = library.InferRequestedOutput("output")
    output.set_shared_memory(region, size, offset)
    return output


@pytest.mark.parametrize("shape", [(2, 4), (4,)])
@pytest.mark.parametrize("library", [grpcclient, httpclient], ids=["grpc", "http"])
def test_tensors_may_lie_in_shared_memory(
    client: Any, http: Any, region: Region, library: Any, shape: tuple[int, ...]
) -> None:
    rows, asked = np.resize(ROWS, shape), client if library is grpcclient else http
    region.write(rows)
    inputs, outputs = [in_region(library, region.name, shape)], [to_region(library, region.name, 1024, 2048)]
    asked.infer("adder", inputs, outputs=outputs)
    assert (region.read(shape, 2048) == rows + 1).all()
    assert (asked.infer("adder", inputs).as_numpy("output") == (rows + 1).reshape(-1, 4)).all()
    plain = input_tensor("input", rows) if library is grpcclient else http_input(rows)
    asked.infer("adder", [plain], outputs=[to_region(library, region.name, 1024, 0)])
    assert (region.read(shape) == rows + 1).all()


def test_tensors_of_a_stream_may_lie_in_shared_memory(client: Any, region: Region) -> None:
    region.write(ROWS)
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    for offset, size in ((0, 32), (4090, 32)):
        client.async_stream_infer("adder", [in_region(grpcclient, region.name, (2, 4), offset, size)])
    (result, error), (_, refused) = answers.get(timeout=20), answers.get(timeout=20)
    client.stop_stream()
    assert error is None
    assert (result.as_numpy("output") == ROWS + 1).all()
    assert "are not in region" in refused.message()


@pytest.mark.parametrize(
    ("offset", "size"),
    [(4096, 32), (4080, 32), (-8, 32), (2**62, 32), (0, -1), (8, 2**63 - 1), (8, -1), (0, 16), (0, 0)],
)
def test_a_place_outside_of_a_region_is_refused(client: Any, region: Region, offset: int, size: int) -> None:
    """Triton 2.51 adds the two without looking: 8 and -1 are within any region, and it writes as much as it has."""
    region.write(ROWS)
    with pytest.raises(InferenceServerException) as caught:
        client.infer("adder", [in_region(grpcclient, region.name, (2, 4), offset, size)])
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    if (offset, size) not in {(0, 16), (0, 0)}:
        outputs = [to_region(grpcclient, region.name, size, offset)]
        with pytest.raises(InferenceServerException) as caught:
            client.infer("adder", [input_tensor("input", ROWS)], outputs=outputs)
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert (client.infer("adder", [input_tensor("input", ROWS)]).as_numpy("output") == ROWS + 1).all()


def test_what_a_request_hides_from_the_front_is_checked_all_the_same(served: Served, region: Region) -> None:
    """A large tensor before the parameters, and a compressed request."""
    request = service_pb2.ModelInferRequest(model_name="wide")
    request.outputs.add(name="output").parameters["shared_memory_region"].string_param = region.name
    request.outputs[0].parameters["shared_memory_byte_size"].int64_param = -1
    request.outputs[0].parameters["shared_memory_offset"].int64_param = 8
    tensor = service_pb2.ModelInferRequest(raw_input_contents=[bytes(4 * 65536)])
    tensor.inputs.add(name="input", datatype="FP32", shape=[65536])
    message = tensor.SerializeToString() + request.SerializeToString()
    with grpc.insecure_channel(served.state["address"]) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for compression in (None, grpc.Compression.Gzip):
            with pytest.raises(grpc.RpcError) as caught:
                call(message, compression=compression)
            assert "are not in region" in caught.value.details()


def test_a_region_is_registered_looked_at_and_forgotten(client: Any, http: Any, region: Region) -> None:
    [told] = http.get_system_shared_memory_status(region.name)
    assert told == {"name": region.name, "key": region.key, "offset": 0, "byte_size": 4096}
    assert region.name in client.get_system_shared_memory_status().regions
    with pytest.raises(InferenceServerException, match="already"):
        http.register_system_shared_memory(region.name, region.key, 4096)
    second = Region(http, 64)
    second.close()
    with pytest.raises(InferenceServerException) as caught:
        client.infer("adder", [in_region(grpcclient, second.name, (1, 4))])
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    http.unregister_system_shared_memory()
    assert not client.get_system_shared_memory_status().regions


def test_objects_that_are_not_a_clients_are_refused(served: Served, client: Any, http: Any) -> None:
    own = our_shared_memory(served.process.pid)
    assert own
    link = Path("/dev/shm") / f"test-{os.getpid()}-link"
    link.symlink_to("/etc/passwd")
    keys = [*own, f"/{own[0]}", "/../etc/passwd", "//x", "", "/", "/..", "/nothing-there", f"/{link.name}", "x" * 300]
    try:
        for key in keys:
            for asked in (client, http):
                with pytest.raises(InferenceServerException) as caught:
                    asked.register_system_shared_memory("mine", key, 64)
                assert caught.value.status() in {"StatusCode.INVALID_ARGUMENT", "400"}, key
    finally:
        link.unlink()
    assert not client.get_system_shared_memory_status().regions


def test_a_region_is_no_larger_than_its_object(client: Any, region: Region) -> None:
    for size, offset in ((4097, 0), (64, 4096), (2**64 - 1, 8), (0, 0)):
        with pytest.raises(InferenceServerException) as caught:
            client.register_system_shared_memory("larger", region.key, size, offset)
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_regions_are_bounded_and_those_of_clients_that_have_gone_make_room(client: Any) -> None:
    regions = [Region(client, 64) for _ in range(256)]
    with pytest.raises(InferenceServerException) as caught:
        client.register_system_shared_memory("one more", regions[0].key, 64)
    assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
    for region in regions[:3]:  # as if its client had died: the object is gone, nobody has unregistered it
        shared_memory.destroy_shared_memory_region(region.handle)
    regions += [Region(client, 64) for _ in range(3)]
    for region in regions[3:]:
        region.close()
    assert not client.get_system_shared_memory_status().regions


def test_a_region_may_be_forgotten_while_calls_use_it(client: Any, served: Served) -> None:
    """Some of their clients have gone by then."""

    def ask(region: Region, wait_s: float | None) -> str:
        inputs = [in_region(grpcclient, region.name, (32, 16))]
        outputs = [to_region(grpcclient, region.name, 128, 65536)]
        try:
            client.infer("slow", inputs, outputs=outputs, client_timeout=wait_s)
        except InferenceServerException as error:
            return str(error.status())
        return "OK"

    ends: Counter[str] = Counter()
    with ThreadPoolExecutor(4) as pool:
        for wait_s in (0, 0.01, 0.05, 0.2):
            region = Region(client, 1 << 20)
            calls = [pool.submit(ask, region, limit) for limit in (None, 0.05, 0.1, None)]
            time.sleep(wait_s)
            region.close()
            ends.update(call.result() for call in calls)
    gone = {"StatusCode.DEADLINE_EXCEEDED", "StatusCode.NOT_FOUND", "StatusCode.CANCELLED"}
    assert ends["OK"] > 0, ends
    assert ends.keys() <= {"OK", *gone}
    assert (client.infer("adder", [input_tensor("input", ROWS)]).as_numpy("output") == ROWS + 1).all()
    assert served.process.poll() is None


def test_scripts_and_cuda_take_no_shared_memory(client: Any, http: Any, region: Region) -> None:
    with pytest.raises(InferenceServerException, match="is a script, which takes no shared memory"):
        client.infer("failing", [], outputs=[to_region(grpcclient, region.name, 64, 0)])
    for call in (client.get_cuda_shared_memory_status, client.unregister_cuda_shared_memory):
        with pytest.raises(InferenceServerException) as caught:
            call()
        assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
    with pytest.raises(InferenceServerException) as caught:
        http.get_cuda_shared_memory_status()
    assert caught.value.status() == "501"


TEXTS = np.array([[b"a", b""], ["\u00e4\U0001f40d".encode(), b"x\0y"], [b"z" * 70_000, b" "]], object)


def marked(texts: np.ndarray) -> list[list[bytes]]:
    return [[text + b"!" for text in row] for row in texts.reshape(-1, 2)]


@pytest.mark.parametrize("texts", [TEXTS, TEXTS[:1], TEXTS[1]], ids=["rows", "row", "without the batch"])
def test_texts_are_exact_over_grpc_and_http(client: Any, http: Any, texts: np.ndarray) -> None:
    tensor = grpcclient.InferInput("words", list(texts.shape), "BYTES")
    tensor.set_data_from_numpy(texts)
    results = [client.infer("texts", [tensor])]
    for binary in (True, False):
        sent = httpclient.InferInput("words", list(texts.shape), "BYTES")
        sent.set_data_from_numpy(texts, binary_data=binary)
        for answer in (True, False):
            outputs = [httpclient.InferRequestedOutput(name, binary_data=answer) for name in ("marked", "same")]
            results.append(http.infer("texts", [sent], outputs=outputs))
    for result in results:
        got = {name: result.as_numpy(name).tolist() for name in ("marked", "same")}
        if isinstance(got["same"][0][0], str):
            got = {name: [[text.encode() for text in row] for row in rows] for name, rows in got.items()}
        assert got == {"marked": marked(texts), "same": texts.reshape(-1, 2).tolist()}


def test_texts_of_many_callers_share_runs_and_stay_apart(client: Any) -> None:
    def ask(number: int) -> bool:
        texts = np.array([[b"%d" % number, b"x" * (number % 7)]] * (1 + number % 3), object)
        tensor = grpcclient.InferInput("words", list(texts.shape), "BYTES")
        tensor.set_data_from_numpy(texts)
        return client.infer("texts", [tensor]).as_numpy("marked").tolist() == marked(texts)

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(200)))


def packed(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


PAST_THE_END = "is no BYTES tensor: a length leads past its end"
HOSTILE_TEXTS = {
    "a length beyond the end": (packed(b"b") + struct.pack("<I", 100) + b"a", PAST_THE_END),
    "the largest length": (packed(b"b") + struct.pack("<I", 2**32 - 1) + b"a", PAST_THE_END),
    "half a length": (packed(b"a") + b"xy", PAST_THE_END),
    "too few": (packed(b"a"), "expected 2 string elements"),
    "too many": (packed(b"a", b"b", b"c"), "unexpected number of string elements"),
    "nothing": (b"", "expected 2 string elements"),
    "no UTF-8": (packed(b"a", b"\xff"), "input 'words' holds a text that is not UTF-8"),
}


@pytest.mark.parametrize("what", HOSTILE_TEXTS)
def test_bytes_that_are_no_texts_are_refused_and_hurt_nobody(served: Served, what: str) -> None:
    """A length past the end is not seen by Triton 2.51 before its backend, where it fails the whole batch."""
    data, said = HOSTILE_TEXTS[what]
    good = {"words": ("BYTES", [1, 2], packed(b"a", b"b"))}
    with ThreadPoolExecutor(4) as pool:
        neighbours = [pool.submit(raw_infer, served.state["address"], "texts", good) for _ in range(8)]
        for shape in ([1, 2], [2]):
            with pytest.raises(grpc.RpcError) as caught:
                raw_infer(served.state["address"], "texts", {"words": ("BYTES", shape, data)}, timeout=20)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert said in caught.value.details()
        assert all(call.result().raw_output_contents[0] == packed(b"a!", b"b!") for call in neighbours)


def test_texts_do_not_travel_by_checkpoint_or_in_shared_memory(served: Served, client: Any, region: Region) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        checkpoint(served, [meta("texts"), chunk([1, 2], packed(b"a", b"b"))])
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "call ModelInfer" in caught.value.details()
    tensor = grpcclient.InferInput("words", [1, 2], "BYTES")
    tensor.set_shared_memory(region.name, 10)
    with pytest.raises(InferenceServerException, match="cannot be in shared memory"):
        client.infer("texts", [tensor])
