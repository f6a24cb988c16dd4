"""TorchScript files in torch, always in inference mode."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from nereid_backend import dtypes
from nereid_backend.engines import Array, import_library, parse_device
from nereid_backend.errors import DeviceMissing, EngineError, SignatureError
from nereid_backend.spec import ModelSpec


class TorchScriptEngine:
    """One ScriptModule; inputs bind by position, outputs are a tensor or a tuple of tensors."""

    def __init__(self, torch: Any, module: Any, device: Any) -> None:
        self._torch = torch
        self._module = module
        self._device, self._on_cpu = device, device.type == "cpu"

    @classmethod
    def check_device(cls, device: str) -> None:
        _device(import_library("torchscript"), device)

    @classmethod
    def load(cls, spec: ModelSpec, directory: Path) -> TorchScriptEngine:
        torch = import_library("torchscript")
        device = _device(torch, spec.device)
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        (program,) = spec.programs
        try:
            with warnings.catch_warnings():
                # Serving an existing file is no reason to tell its user about a deprecation in the exporter.
                warnings.simplefilter("ignore", DeprecationWarning)
                module = torch.jit.load(str(directory / program.file), map_location=device)
        except (RuntimeError, ValueError, OSError) as error:
            raise SignatureError(
                f"{program.file}: is not a TorchScript file that torch {torch.__version__} can load "
                f"({_last_line(error)}); save it with torch.jit.save"
            ) from error
        module.eval()
        return cls(torch, module, device)

    def run(self, inputs: list[Array]) -> list[Array]:
        torch = self._torch
        with torch.inference_mode():
            try:
                result = self._module(*[self._to_torch(array) for array in inputs])
            except (RuntimeError, torch.jit.Error) as error:  # what the model raises itself comes as the latter
                raise EngineError(f"the TorchScript module failed: {_last_line(error)}") from error
        if isinstance(result, torch.Tensor):
            return [self._to_numpy(result)]
        if not isinstance(result, list | tuple) or not all(isinstance(o, torch.Tensor) for o in result):
            raise EngineError(f"the TorchScript module returned {type(result).__name__}, expected tensors")
        return [self._to_numpy(output) for output in result]

    def close(self) -> None:
        self._module = None

    def _to_torch(self, array: Array) -> Any:
        torch = self._torch
        if not array.flags.writeable:
            array = array.copy()  # torch has no read-only tensors, and a module may write to its input
        # A dtype's name costs a microsecond, a quarter of a small module's call; so do moves that move nothing.
        if array.dtype.kind == "V" and array.dtype.name == "bfloat16":
            tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(array)
        return tensor if self._on_cpu else tensor.to(self._device)

    def _to_numpy(self, tensor: Any) -> Array:
        try:
            array: Array = tensor.numpy()
        except (TypeError, RuntimeError):  # on another device, BF16, or a parameter given back as it is
            return self._moved_to_numpy(tensor.detach().to("cpu").contiguous())
        return array if array.flags.c_contiguous else np.ascontiguousarray(array)

    def _moved_to_numpy(self, tensor: Any) -> Array:
        if tensor.dtype is self._torch.bfloat16:
            raw: Array = tensor.view(self._torch.int16).numpy()
            return raw.view(dtypes.by_token("bf16").numpy)
        try:
            array: Array = tensor.numpy()
        except TypeError as error:
            raise EngineError(f"the TorchScript module returned {tensor.dtype}, which numpy does not have") from error
        return array


def _device(torch: Any, device: str) -> Any:
    kind, index = parse_device(device)
    if kind == "cuda" and index >= (count := torch.cuda.device_count()):
        raise DeviceMissing(
            f"device {device!r} is not there: torch sees {count} cuda device(s); use another device, or install a "
            "torch built for it"
        )
    return torch.device(kind, index) if kind == "cuda" else torch.device("cpu")


def _last_line(error: Exception) -> str:
    # TorchScript puts the interpreter's traceback first and the cause last.
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
