"""ONNX models in ONNX Runtime."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from nereid_backend import dtypes
from nereid_backend.engines import Array, Port, import_library, parse_device
from nereid_backend.errors import BundleError, DeviceMissing, EngineError, InvalidArgument, SignatureError
from nereid_backend.spec import ModelSpec

CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"

_decode, _encode = np.frompyfunc(bytes.decode, 1, 1), np.frompyfunc(str.encode, 1, 1)
_BF16_ONNX = 16  # TensorProto.BFLOAT16
# A run that streams so many weights takes milliseconds; to call another thread for less costs more than it saves.
_BYTES_A_THREAD = 1 << 24


def open_session(path: Path, device: str = "cpu", threads: int | None = None) -> Any:
    """An InferenceSession on exactly ``device``. Raises EngineMissing, DeviceMissing, SignatureError.

    One intra-op thread by default, and no spinning: on shared cores a spinning pool costs everyone else.
    """
    ort = import_library("onnx")
    providers = _providers(ort, device)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    try:
        session = ort.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # onnxruntime raises a dozen unrelated classes of its own here
        if type(error).__module__.partition(".")[0] != "onnxruntime" and not isinstance(
            error, RuntimeError | ValueError
        ):
            raise
        raise SignatureError(
            f"{path.name}: ONNX Runtime {ort.__version__} cannot load it ({_message(error)}); check the file, its "
            "opset and its external data"
        ) from error
    # onnxruntime falls back to the CPU with only a warning when a provider cannot start.
    session.disable_fallback()
    name = providers[0][0]
    if name not in session.get_providers():
        raise DeviceMissing(
            f"device {device!r} was asked for but ONNX Runtime started without {name}; check the driver and CUDA"
        )
    return session


def threads_for(directory: Path, instances: int = 1) -> int:
    """How many threads run a model whose files lie in ``directory``: one for each 16 MiB, as the processors allow."""
    size_bytes = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    return max(1, min(size_bytes // _BYTES_A_THREAD, len(os.sched_getaffinity(0)) // instances))


def ports(session: Any) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    """Inputs and outputs of the graph in graph order. Raises SignatureError for a type without a table row."""
    return tuple(map(_port, session.get_inputs())), tuple(map(_port, session.get_outputs()))


class OnnxEngine:
    """One session; inputs and outputs bind by the graph's names."""

    def __init__(self, session: Any, spec: ModelSpec) -> None:
        self._session = session
        self._inputs = [t.artifact_name for t in spec.inputs]
        self._outputs = [t.artifact_name for t in spec.outputs]
        self._texts = [t.artifact_name for t in spec.inputs if t.element is dtypes.BYTES]
        self._text_outputs = [index for index, t in enumerate(spec.outputs) if t.element is dtypes.BYTES]
        self._bf16 = any(t.dtype == "bf16" for t in (*spec.inputs, *spec.outputs))

    @classmethod
    def check_device(cls, device: str) -> None:
        _providers(import_library("onnx"), device)

    @classmethod
    def load(cls, spec: ModelSpec, directory: Path) -> OnnxEngine:
        (program,) = spec.programs
        threads = spec.threads or threads_for(directory, spec.instances)
        return cls(open_session(directory / program.file, spec.device, threads), spec)

    def run(self, inputs: list[Array]) -> list[Array]:
        try:
            if self._bf16:
                return self._run_bf16(inputs)
            feed = dict(zip(self._inputs, inputs, strict=True))
            for name in self._texts:
                feed[name] = _decoded(feed[name], name)
            outputs: list[Array] = self._session.run(self._outputs, feed)
        except Exception as error:  # onnxruntime raises a dozen unrelated classes of its own here
            if isinstance(error, InvalidArgument):
                raise
            kind = type(error).__name__
            if kind == "InvalidArgument":
                raise InvalidArgument(f"ONNX Runtime refused the input: {_message(error)}") from error
            raise EngineError(f"the ONNX model failed: {_message(error)}") from error
        for index in self._text_outputs:
            outputs[index] = np.asarray(_encode(outputs[index]), object)
        return outputs

    def _run_bf16(self, inputs: list[Array]) -> list[Array]:
        # numpy has no BF16, so such tensors pass as 16-bit patterns with the ONNX type attached.
        value = import_library("onnx").OrtValue
        feed = {
            name: value.ortvalue_from_numpy_with_onnx_type(a.view(np.uint16), _BF16_ONNX)
            if a.dtype.name == "bfloat16"
            else value.ortvalue_from_numpy(a)
            for name, a in zip(self._inputs, inputs, strict=True)
        }
        bfloat16 = dtypes.by_token("bf16").numpy
        results = self._session.run_with_ort_values(self._outputs, feed)
        return [_read_bf16(r, bfloat16) if r.data_type() == "tensor(bfloat16)" else r.numpy() for r in results]

    def close(self) -> None:
        self._session = None


def _providers(ort: Any, device: str) -> list[tuple[str, dict[str, Any]]]:
    kind, index = parse_device(device)
    if kind == "cpu":
        return [(CPU_PROVIDER, {})]
    available = ort.get_available_providers()
    if CUDA_PROVIDER not in available:
        raise DeviceMissing(
            f"device {device!r} is not there: this ONNX Runtime offers {', '.join(available)}; install onnxruntime-gpu "
            "instead of onnxruntime, or use device cpu"
        )
    return [(CUDA_PROVIDER, {"device_id": index}), (CPU_PROVIDER, {})]


def _port(node: Any) -> Port:
    match = re.fullmatch(r"tensor\((\w+)\)", node.type)
    if match is None:
        raise SignatureError(f"ONNX tensor {node.name!r} is a {node.type}; only tensors are supported")
    try:
        dtype = dtypes.by_onnx(match[1])
    except BundleError:
        raise SignatureError(
            f"ONNX tensor {node.name!r} has type {node.type}; only tensors of numbers and texts are supported"
        ) from None
    return Port(node.name, dtype.token, tuple(node.shape))


def _read_bf16(value: Any, dtype: np.dtype[Any]) -> Array:
    """A copy of a BF16 OrtValue on the CPU, whose own ``numpy()`` refuses the type."""
    array = np.empty(value.shape(), dtype)
    if array.nbytes:
        ctypes.memmove(array.ctypes.data, value.data_ptr(), array.nbytes)
    return array


def _decoded(array: Array, name: str) -> Array:
    """Texts as ONNX Runtime takes them. Raises InvalidArgument."""
    try:
        return np.asarray(_decode(array), object)
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"input {name!r} holds a text that is not UTF-8 ({error.reason})") from None


def _message(error: Exception) -> str:
    # "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : text" -> "text"
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    text = first.rsplit(" : ", 1)[-1].rpartition("Status Message: ")[2]
    # "/build/path/file.h:84 ns::Function(args) text" -> "text": the place in its source is no use to a client.
    return re.sub(r"^\S*/\S+:\d+ .*?\)\s+(?=\S)", "", text)
