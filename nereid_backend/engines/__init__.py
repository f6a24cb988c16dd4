"""What executes a program, and the registry that finds it.

Adding an engine is one file in this package and one line in ``ENGINES``. An engine imports its own library
inside ``load`` only, so that this package stays importable everywhere.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nereid_backend.errors import BundleError, EngineMissing
from nereid_backend.spec import ModelSpec

Array = np.ndarray[Any, Any]


class Engine(Protocol):
    """A loaded model. One thread calls it at a time."""

    @classmethod
    def load(cls, spec: ModelSpec, directory: Path) -> Engine:
        """Open the artifacts of ``spec`` in ``directory`` on ``spec.device``.

        Raises EngineMissing, DeviceMissing, WeightsError, SignatureError or EngineError.
        """

    @classmethod
    def check_device(cls, device: str) -> None:
        """Raise EngineMissing or DeviceMissing unless this interpreter could run on ``device``."""

    def run(self, inputs: list[Array]) -> list[Array]:
        """Run once. Inputs in spec order, C-contiguous, program shape, borrowed for this call only.

        Outputs in spec order; they may be read-only and may alias the inputs. Raises InvalidArgument when the
        library says the input is at fault, EngineError otherwise.
        """

    def close(self) -> None:
        """Free what the engine holds."""


@dataclass(frozen=True, slots=True)
class EngineEntry:
    module: str
    class_name: str
    library: str
    extra: str
    description: str


ENGINES: dict[str, EngineEntry] = {
    "identity": EngineEntry("nereid_backend.engines.identity", "IdentityEngine", "numpy", "", "hooks alone"),
    "stablehlo": EngineEntry("nereid_backend.engines.stablehlo", "StableHloEngine", "jax", "jax", "StableHLO in JAX"),
    "torchscript": EngineEntry(
        "nereid_backend.engines.torchscript", "TorchScriptEngine", "torch", "torch", "TorchScript in torch"
    ),
    "onnx": EngineEntry(
        "nereid_backend.engines.onnx", "OnnxEngine", "onnxruntime", "onnx", "ONNX models in ONNX Runtime"
    ),
}


def engine_class(name: str) -> type[Engine]:
    """The class of a registered engine. Raises BundleError for an unknown name."""
    entry = ENGINES.get(name)
    if entry is None:
        raise BundleError(f"unknown engine {name!r}; known: {', '.join(ENGINES)}; convert the bundle again")
    cls: type[Engine] = getattr(importlib.import_module(entry.module), entry.class_name)
    return cls


def import_library(engine: str) -> Any:
    """Import the library of an engine. Raises EngineMissing naming the extra that brings it."""
    entry = ENGINES[engine]
    try:
        return importlib.import_module(entry.library)
    except ImportError as error:
        raise EngineMissing(
            f"engine {engine!r} needs {entry.library}, which this Python cannot import ({error}); "
            f"install it with: pip install 'nereid-triton[{entry.extra}]'"
        ) from None


def parse_device(device: str) -> tuple[str, int]:
    """``cpu`` -> ("cpu", 0); ``cuda`` -> ("cuda", 0); ``cuda:1`` -> ("cuda", 1). Raises BundleError."""
    kind, _, index = device.partition(":")
    if device == "cpu":
        return "cpu", 0
    if kind == "cuda" and (device == "cuda" or (index.isascii() and index.isdecimal() and len(index) <= 3)):
        return "cuda", int(index or 0)
    raise BundleError(f"unknown device {device!r}; use cpu, cuda or cuda:<index>")
