"""TorchScript files in torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nereid_backend.engines.torch_engine import TorchEngine, last_line
from nereid_backend.errors import SignatureError

_NUMBERS = ("int", "float", "bool", "number")


class TorchScriptEngine(TorchEngine):
    """One ScriptModule."""

    name = "torchscript"
    what = "the TorchScript module"

    @classmethod
    def open(cls, torch: Any, path: Path, device: Any) -> Callable[..., Any]:
        return _with_numbers(load_module(torch, path, device).eval())


def load_module(torch: Any, path: Path, device: Any) -> Any:
    """The ScriptModule of a file. Raises SignatureError."""
    try:
        with warnings.catch_warnings():
            # Serving an existing file is no reason to tell its user about a deprecation in the exporter.
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.load(str(path), map_location=device)
    except (RuntimeError, ValueError, OSError) as error:
        raise SignatureError(
            f"{path.name}: is not a TorchScript file that torch {torch.__version__} can load "
            f"({last_line(error)}); save it with torch.jit.save"
        ) from error


def forward_arguments(module: Any) -> list[Any]:
    """The schema's arguments of ``forward``, each with ``name`` and ``type``; none when the module does not say."""
    schema = getattr(getattr(module, "forward", None), "schema", None)
    return [] if schema is None else schema.arguments[1:]  # the first is the module itself


def _with_numbers(module: Any) -> Callable[..., Any]:
    """``module`` with tensors of one value where its ``forward`` takes a plain number."""
    call: Callable[..., Any] = module
    numbers = {index: a.name for index, a in enumerate(forward_arguments(module)) if str(a.type) in _NUMBERS}
    if not numbers:
        return call

    def call_with_numbers(*tensors: Any) -> Any:
        for index, name in numbers.items():
            if index < len(tensors) and tensors[index].numel() != 1:
                raise ValueError(f"argument {name!r} is a number, got shape {list(tensors[index].shape)}")
        return call(*(t.item() if index in numbers else t for index, t in enumerate(tensors)))

    return call_with_numbers
