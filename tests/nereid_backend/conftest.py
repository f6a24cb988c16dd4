"""A stand-in for Triton's python stub, an engine made by the test, and StableHLO programs exported on the spot."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nereid_backend import engines, tensors
from nereid_backend.spec import SPEC_FILE, ModelSpec, Program, TensorSpec

NUMPY_2 = int(np.__version__.split(".")[0]) >= 2
CODES = ["UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED"]
_KINDS = {0: "i", 1: "u", 2: "f", 6: "b"}


def take(producer: Any) -> np.ndarray:
    """Consume a DLPack producer as Triton 2.51 does: strides are ignored, the deleter is called."""
    capsule = producer.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer(ctypes.py_object(capsule), b"dltensor")
    managed = tensors._DLManagedTensor.from_address(pointer)
    dl = managed.dl_tensor
    shape = [dl.shape[i] for i in range(dl.ndim)]
    if dl.dtype.code == 4:
        dtype = np.dtype(ml_dtypes.bfloat16)
    else:
        dtype = np.dtype(f"{_KINDS[dl.dtype.code]}{dl.dtype.bits // 8}")
    data = ctypes.string_at(dl.data + dl.byte_offset, int(np.prod(shape, dtype=int)) * dtype.itemsize)
    managed.deleter(ctypes.pointer(managed))
    return np.frombuffer(data, dtype).reshape(shape)


class FakeTensor:
    """``pb_utils.Tensor`` of server 2.51 with its traps: what is exact depends on the numpy generation."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        # numpy 2: the real one sends an empty tensor without a word.
        self._name, self._array = name, np.zeros(0, array.dtype) if NUMPY_2 else np.array(array, order="C")

    @classmethod
    def from_dlpack(cls, name: str, producer: Any) -> FakeTensor:
        if isinstance(producer, np.ndarray) and not NUMPY_2:
            raise AssertionError("the real stub segfaults on an ndarray of numpy 1.26")
        self = cls.__new__(cls)
        self._name, self._array = name, take(producer if not isinstance(producer, np.ndarray) else _export(producer))
        return self

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        if self._array.dtype.name == "bfloat16":
            raise TypeError("numpy has no BF16")
        return np.zeros_like(self._array) if NUMPY_2 else self._array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: Any) -> Any:
        return tensors.Capsule(self._array).__dlpack__()


def _export(array: np.ndarray) -> tensors.Capsule:
    if not array.flags.writeable:
        raise BufferError("numpy exports no read-only array")
    return tensors.Capsule(array)


class FakeError(Exception):
    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.text, self.code = message, code

    def message(self) -> str:
        return self.text


class FakeResponse:
    def __init__(self, output_tensors: Sequence[FakeTensor] | None = None, error: FakeError | None = None) -> None:
        if not all(isinstance(tensor, FakeTensor) for tensor in output_tensors or ()):
            raise TypeError("output_tensors holds something else than tensors")
        self.tensors, self.error = list(output_tensors or ()), error

    @property
    def answer(self) -> Any:
        """Outputs by name as nested lists, or the code and the text of the error."""
        if self.error is not None:
            return CODES[self.error.code], self.error.message()
        return {tensor.name(): tensor._array.tolist() for tensor in self.tensors}


class FakeRequest:
    """One request; arrays are put into the stub's memory, so the model sees views of them."""

    def __init__(self, *, cancelled: bool = False, **arrays: Any) -> None:
        self.arrays = {name: np.asarray(array) for name, array in arrays.items()}
        self.cancelled, self.asked = cancelled, 0
        self.parameters_json = "{}"

    def request_id(self) -> str:
        return ""

    def parameters(self) -> str:
        return self.parameters_json

    def is_cancelled(self) -> bool:
        self.asked += 1
        return self.cancelled

    def inputs(self) -> list[FakeTensor]:
        """In an order of Triton's own: that of a hash table."""
        return [self.tensor(name) for name in sorted(self.arrays, reverse=True)]

    def tensor(self, name: str) -> FakeTensor | None:
        if name not in self.arrays:
            return None
        tensor = FakeTensor.__new__(FakeTensor)
        tensor._name, tensor._array = name, self.arrays[name]
        return tensor


class FakeLogger:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def _log(self, text: str) -> None:
        self.lines.append(text)

    log_verbose = log_info = log_warn = log_error = _log


def make_pb_utils() -> types.ModuleType:
    module = types.ModuleType("triton_python_backend_utils")
    module.Tensor, module.InferenceResponse, module.Logger = FakeTensor, FakeResponse, FakeLogger()
    module.TritonModelException = type("TritonModelException", (Exception,), {})
    module.TritonError = FakeError
    for code, name in enumerate(CODES):
        setattr(FakeError, name, code)
    module.get_input_tensor_by_name = lambda request, name: request.tensor(name)
    return module


@pytest.fixture(scope="session")
def pb_utils() -> Iterator[types.ModuleType]:
    """The fake ``triton_python_backend_utils``, with ``nereid_backend.model`` imported on top of it."""
    with pytest.MonkeyPatch.context() as patch:
        module = make_pb_utils()
        patch.setitem(sys.modules, module.__name__, module)
        patch.delitem(sys.modules, "nereid_backend.model", raising=False)
        importlib.import_module("nereid_backend.model")
        yield module
        patch.delitem(sys.modules, "nereid_backend.model", raising=False)


@pytest.fixture
def request_of() -> type[FakeRequest]:
    return FakeRequest


@pytest.fixture
def dlpack_take() -> Callable[[Any], np.ndarray]:
    return take


@pytest.fixture
def log(pb_utils: Any) -> list[str]:
    pb_utils.Logger.lines.clear()
    return pb_utils.Logger.lines


@pytest.fixture
def serve(pb_utils: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Open a model whose engine's ``run`` is a function of the test; every run's batch is in ``model.runs``."""
    numbers = itertools.count()

    def open_model(run: Callable[[list[np.ndarray]], Any], inputs: Any, outputs: Any, **options: Any) -> Any:
        runs: list[list[Any]] = []

        class Engine:
            @classmethod
            def load(cls, spec: ModelSpec, directory: Path) -> Engine:
                return cls()

            def run(self, batch: list[np.ndarray]) -> Any:
                runs.append([array.tolist() for array in batch])
                return run(batch)

            def close(self) -> None:
                runs.append(["closed"])

        number = next(numbers)
        module = types.ModuleType(f"engine_of_a_test_{number}")
        module.Engine = Engine
        monkeypatch.setitem(sys.modules, module.__name__, module)
        entry = engines.EngineEntry(module.__name__, "Engine", "numpy", "fake", "made by a test")
        monkeypatch.setitem(engines.ENGINES, "fake", entry)
        sizes = options.pop("sizes", (None,))
        spec = ModelSpec(
            options.pop("name", "m"), "fake", "fake", inputs, outputs, tuple(Program("f", s) for s in sizes), **options
        )
        version = tmp_path / f"model{number}" / "1"
        version.mkdir(parents=True)
        (version / SPEC_FILE).write_text(spec.to_json())
        model = importlib.import_module("nereid_backend.model").TritonPythonModel()
        model.initialize({"model_repository": str(version.parent), "model_version": "1"})
        model.runs = runs
        runs.clear()
        return model

    return open_model


@pytest.fixture(scope="session")
def export() -> Callable[..., bytes]:
    """A StableHLO artifact of a function and the shapes and dtypes of its arguments."""

    def exported(function: Callable[..., Any], *arguments: tuple[tuple[Any, ...], Any], **options: Any) -> bytes:
        import jax
        import jax.export

        jax.config.update("jax_enable_x64", True)
        shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arguments]
        program = jax.jit(function, keep_unused=True)
        return jax.export.export(program, platforms=options.get("platforms", ["cpu"]))(*shapes).mlir_module_serialized

    return exported


@pytest.fixture
def rows() -> Callable[..., TensorSpec]:
    """A tensor whose first axis is the batch."""
    return lambda name, dtype, *row_shape: TensorSpec(name, dtype, (-1, *row_shape), 0)
