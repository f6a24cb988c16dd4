"""``nereid serve`` as a process of its own, and a client of its Checkpoint stream, for tests of the whole."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as tritonclient
from onnx import TensorProto, helper, save
from tritonclient.grpc import service_pb2

from native_service.proto import inference_pb2 as pb
from nereid_backend import dtypes

WIRE_DTYPES = [row for row in dtypes.TABLE if row.kserve is not None]
READY_TIMEOUT_S, STOP_TIMEOUT_S = 120, 30


class Served:
    """A ``nereid serve`` process and what its state file says."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        wait: bool = True,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``log``: where its output goes, when there may be more than a pipe that nobody reads holds.

        ``environment`` is added to this process's own.
        """
        self.state_file = folder / f"state-{time.monotonic_ns()}.json"
        command = [sys.executable, "-m", "native_service.cli", "serve", *arguments, "--state", str(self.state_file)]
        self._log = log
        with contextlib.nullcontext(subprocess.PIPE) if log is None else log.open("w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, text=True, env={**os.environ, **(environment or {})}
            )
        atexit.register(self.process.kill)  # a test that fails half-way must not leave a server behind
        self.state: dict[str, Any] = {}
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self.state_file.exists():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, "not ready in time"
            time.sleep(0.05)
        self.state = json.loads(self.state_file.read_text())

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        if self.process.poll() is None:
            self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=STOP_TIMEOUT_S)
        return self.process.returncode, output if self._log is None else self._log.read_text()

    def descendants(self) -> set[int]:
        """Every process that carries this supervisor's mark or descends from it."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                except OSError:
                    continue
                children.setdefault(parent, []).append(int(entry.name))
        found: set[int] = set()
        front = [self.process.pid]
        while front:
            front = [child for pid in front for child in children.get(pid, ())]
            found.update(front)
        return found


def alive(pids: set[int]) -> set[int]:
    """Those that hold something still: the first thread of a killed process may be dead before the others, and the last
    one closes its files."""
    living = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            threads = int(fields[16])
            if state != "Z" or threads > 1:
                living.add(pid)
    return living


def our_shared_memory(pid: int) -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"nereid-*-{pid}-*")]


def checkpoint(served: Served, messages: list[Any]) -> list[Any]:
    with grpc.insecure_channel(served.state["address"]) as channel:
        call = channel.stream_stream(
            "/inference.Nereid/Checkpoint",
            request_serializer=pb.CheckpointRequest.SerializeToString,
            response_deserializer=pb.CheckpointResponse.FromString,
        )
        return list(call(iter(messages), timeout=30))


def meta(model: str) -> Any:
    return pb.CheckpointRequest(meta=pb.CheckpointMeta(model_name=model))


def chunk(shape: list[int], data: bytes, *, end: bool = True, name: str = "") -> Any:
    return pb.CheckpointRequest(chunk=pb.TensorChunk(tensor_name=name, shape=shape, data=data, end_of_tensor=end))


def tensors_of(responses: list[Any]) -> dict[str, tuple[list[int], bytes]]:
    """The outputs and their bytes, after checking that the parts come in their order."""
    kinds = ["output" if r.HasField("output_chunk") else "done" if r.done else "text" for r in responses]
    assert kinds == ["text", *["output"] * (len(kinds) - 2), "done"]
    assert responses[-1].exit_code == 0
    tensors = {}
    for name, group in itertools.groupby((r.output_chunk for r in responses[1:-1]), lambda chunk: chunk.tensor_name):
        chunks = list(group)
        assert name not in tensors
        assert [c.chunk_index for c in chunks] == list(range(len(chunks)))
        assert [c.end_of_tensor for c in chunks] == [False] * (len(chunks) - 1) + [True]
        tensors[name] = (list(chunks[0].shape), b"".join(c.data for c in chunks))
    return tensors


def tensor_of(responses: list[Any]) -> tuple[list[int], bytes]:
    """The only output and its bytes."""
    [tensor] = tensors_of(responses).values()
    return tensor


def input_tensor(name: str, array: np.ndarray) -> Any:
    """``array`` as an input of a stock client."""
    tensor = tritonclient.InferInput(name, list(array.shape), dtypes.by_numpy(array.dtype).kserve)
    tensor.set_data_from_numpy(array)
    return tensor


def infer(client: Any, model: str, outputs: list[str] | None = None, **arrays: np.ndarray) -> dict[str, np.ndarray]:
    """What a stock client gets: all outputs, or those that are named."""
    tensors = [input_tensor(name, array) for name, array in arrays.items()]
    wanted = None if outputs is None else [tritonclient.InferRequestedOutput(name) for name in outputs]
    answer = client.infer(model, tensors, outputs=wanted, request_id="the id")
    assert answer.get_response().id == "the id"
    return {output.name: answer.as_numpy(output.name) for output in answer.get_response().outputs}


def write_adder(path: Path, amount: float = 1.0, dtype: int = TensorProto.FLOAT, width: int = 4) -> None:
    """``path``, a bare .onnx: output = input + ``amount``, rows of ``width``."""
    tensors = [helper.make_tensor_value_info(name, dtype, ["n", width]) for name in ("input", "output")]
    graph = helper.make_graph(
        [helper.make_node("Add", ["input", "amount"], ["output"])],
        "adder",
        tensors[:1],
        tensors[1:],
        [helper.make_tensor("amount", dtype, [1], [amount])],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def raw_infer(address: str, model: str, inputs: dict[str, tuple[str, list[int], bytes]], **call: Any) -> Any:
    """One ModelInfer of raw bytes; ``inputs`` are datatype, shape and content by name."""
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, (datatype, shape, data) in inputs.items():
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(data)
    with grpc.insecure_channel(address) as channel:
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )
        return infer(request, **call)


def random_tensors(draw: Callable[[int], bytes], rows: int, width: int) -> dict[str, tuple[str, list[int], bytes]]:
    """Inputs for ``raw_infer``: ``in_TOKEN`` of every wire dtype; ``draw`` gives so many random bytes."""
    sent = {}
    for row in WIRE_DTYPES:
        data = draw(rows * width * row.size_bytes)
        data = bytes(byte & 1 for byte in data) if row.token == "bool" else data
        sent[f"in_{row.token}"] = (row.kserve, [rows, width], data)
    return sent


def answered(response: Any) -> dict[str, tuple[str, list[int], bytes]]:
    """The outputs of ``raw_infer`` in the form of its inputs."""
    pairs = zip(response.outputs, response.raw_output_contents, strict=True)
    return {output.name: (output.datatype, list(output.shape), data) for output, data in pairs}
