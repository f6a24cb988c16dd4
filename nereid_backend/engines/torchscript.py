"""TorchScript files in torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nereid_backend.engines.torch_engine import TorchEngine, last_line
from nereid_backend.errors import SignatureError


class TorchScriptEngine(TorchEngine):
    """One ScriptModule."""

    name = "torchscript"
    what = "the TorchScript module"

    @classmethod
    def open(cls, torch: Any, path: Path, device: Any) -> Callable[..., Any]:
        try:
            with warnings.catch_warnings():
                # Serving an existing file is no reason to tell its user about a deprecation in the exporter.
                warnings.simplefilter("ignore", DeprecationWarning)
                module = torch.jit.load(str(path), map_location=device)
        except (RuntimeError, ValueError, OSError) as error:
            raise SignatureError(
                f"{path.name}: is not a TorchScript file that torch {torch.__version__} can load "
                f"({last_line(error)}); save it with torch.jit.save"
            ) from error
        call: Callable[..., Any] = module.eval()
        return call
