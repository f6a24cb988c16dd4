"""What every engine of torch shares: arrays in and out without copies, always in inference mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from nereid_backend import dtypes
from nereid_backend.engines import Array, import_library, parse_device
from nereid_backend.errors import DeviceMissing, EngineError, InvalidArgument
from nereid_backend.spec import ModelSpec


class TorchEngine:
    """Inputs bind by position, outputs are a tensor or a sequence of tensors. A subclass opens one kind of file."""

    name: ClassVar[str]
    what: ClassVar[str]
    """What the file holds, for messages."""

    def __init__(self, torch: Any, call: Callable[..., Any], device: Any) -> None:
        self._torch = torch
        self._call: Callable[..., Any] | None = call
        self._device, self._on_cpu = device, device.type == "cpu"
        self._inference_mode = torch.inference_mode()  # entered by one run after the other, never by two at once

    @classmethod
    def check_device(cls, device: str) -> None:
        torch_device(import_library(cls.name), device)

    @classmethod
    def load(cls, spec: ModelSpec, directory: Path) -> Self:
        torch = import_library(cls.name)
        device = torch_device(torch, spec.device)
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        (file,) = {program.file for program in spec.programs}
        return cls(torch, cls.open(torch, directory / file, device), device)

    @classmethod
    def open(cls, torch: Any, path: Path, device: Any) -> Callable[..., Any]:
        """What takes the input tensors and gives the output tensors. Raises SignatureError, DeviceMissing."""
        raise NotImplementedError

    @classmethod
    def is_callers_fault(cls, error: Exception) -> bool:  # noqa: ARG003
        """Whether the program itself says that an input is at fault."""
        return False

    def run(self, inputs: list[Array]) -> list[Array]:
        torch = self._torch
        if self._call is None:
            raise EngineError(f"{self.what} was closed")
        with self._inference_mode:
            try:
                result = self._call(*[self._to_torch(array) for array in inputs])
            # What a script module raises itself comes as torch.jit.Error, a failed guard as AssertionError.
            except (RuntimeError, AssertionError, TypeError, ValueError, IndexError, torch.jit.Error) as error:
                if self.is_callers_fault(error):
                    raise InvalidArgument(f"{self.what} refused the input: {last_line(error)}") from error
                raise EngineError(f"{self.what} failed: {last_line(error)}") from error
        if isinstance(result, torch.Tensor):
            return [self._to_numpy(result)]
        if not isinstance(result, list | tuple) or not all(isinstance(o, torch.Tensor) for o in result):
            raise EngineError(f"{self.what} returned {type(result).__name__}, expected tensors")
        return [self._to_numpy(output) for output in result]

    def close(self) -> None:
        self._call = None

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
            raise EngineError(f"{self.what} returned {tensor.dtype}, which numpy does not have") from error
        return array


def torch_device(torch: Any, device: str) -> Any:
    """``torch.device`` of a device's name. Raises DeviceMissing, BundleError."""
    kind, index = parse_device(device)
    if kind == "cuda" and index >= (count := torch.cuda.device_count()):
        raise DeviceMissing(
            f"device {device!r} is not there: torch sees {count} cuda device(s); use another device, or install a "
            "torch built for it"
        )
    return torch.device(kind, index) if kind == "cuda" else torch.device("cpu")


def last_line(error: Exception) -> str:
    """The cause: TorchScript puts the interpreter's traceback first and the cause last."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
