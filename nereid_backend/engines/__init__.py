"""What executes a program, and the registry that finds it.

Adding an engine is one file in this package and one line in ``ENGINES``, or one file in any installed distribution
that declares it in the entry point group ``nereid.engines``. An engine imports its own library inside ``load`` only,
so that this package stays importable everywhere.
"""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nereid_backend.errors import BundleError, EngineMissing
from nereid_backend.spec import ModelSpec

Array = np.ndarray[Any, Any]

ENTRY_POINTS = "nereid.engines"
_METHODS = ("load", "check_device", "run", "close")


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output as an artifact itself declares it. A symbolic or unknown axis is its name, or None."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]


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
    "jax_export": EngineEntry(
        "nereid_backend.engines.jax_export", "JaxExportEngine", "jax", "jax", "jax.export functions in JAX"
    ),
    "torchscript": EngineEntry(
        "nereid_backend.engines.torchscript", "TorchScriptEngine", "torch", "torch", "TorchScript in torch"
    ),
    "torch_export": EngineEntry(
        "nereid_backend.engines.pt2", "ExportedProgramEngine", "torch", "torch", "torch.export programs in torch"
    ),
    "aotinductor": EngineEntry(
        "nereid_backend.engines.pt2", "AotInductorEngine", "torch", "torch", "AOTInductor packages in torch"
    ),
    "onnx": EngineEntry(
        "nereid_backend.engines.onnx", "OnnxEngine", "onnxruntime", "onnx", "ONNX models in ONNX Runtime"
    ),
    "snooze": EngineEntry("nereid_backend.engines.snooze", "SnoozeEngine", "numpy", "", "SnoozeML worker directories"),
}


def engine_class(name: str) -> type[Engine]:
    """The class of a registered or installed engine. Raises BundleError for an unknown name, EngineMissing."""
    cls: type[Engine]
    if (entry := ENGINES.get(name)) is not None:
        cls = getattr(importlib.import_module(entry.module), entry.class_name)
        return cls
    installed = installed_engines()
    if name not in installed:
        raise BundleError(
            f"unknown engine {name!r}; known: {', '.join((*ENGINES, *installed))}; install the distribution that "
            "brings it into this Python, or convert the model again"
        )
    origin = _origin(installed[name])
    try:
        cls = installed[name].load()
    except (ImportError, AttributeError) as error:
        raise EngineMissing(
            f"engine {name!r} of {origin} cannot be imported ({error}); repair its installation"
        ) from None
    if missing := [method for method in _METHODS if not hasattr(cls, method)]:
        raise EngineMissing(
            f"engine {name!r} of {origin} has no {', '.join(missing)}; see nereid_backend.engines.Engine"
        )
    return cls


def installed_engines() -> dict[str, EntryPoint]:
    """Engines that other installed distributions declare, by name; none of them is imported.

    Raises BundleError when a name cannot be one, is built in or declared twice.
    """
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: (point.name, point.value)):
        if not re.fullmatch(r"[a-z][a-z0-9_]*", point.name):
            raise BundleError(
                f"{_origin(point)} declares an engine {point.name!r}; a name is lower-case letters, digits and _"
            )
        if point.name in ENGINES:
            raise BundleError(f"{_origin(point)} declares an engine {point.name!r}, which is built in; rename it")
        if point.name in found and found[point.name].value != point.value:
            raise BundleError(
                f"{_origin(found[point.name])} and {_origin(point)} both declare an engine {point.name!r}; "
                "uninstall one"
            )
        found[point.name] = point
    return found


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


# ONNX Runtime 1.32 reports to its maker, and keeps a file in the temporary folder for it, unless told not to before its
# import. Who wants that sets it to 0.
_NO_TELEMETRY = ("ORT_DISABLE_TELEMETRY", "1")


def import_library(engine: str) -> Any:
    """Import the library of an engine. Raises EngineMissing naming the extra that brings it."""
    entry = ENGINES[engine]
    os.environ.setdefault(*_NO_TELEMETRY)
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
