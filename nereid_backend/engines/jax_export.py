"""Files written by ``jax.export``: functions with their own calling convention, in JAX.

A symbolic axis is refined and compiled anew for every size, so the specification lists the sizes to compile.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nereid_backend.engines import Array, import_library
from nereid_backend.engines.stablehlo import configure, find_device, first_line
from nereid_backend.errors import EngineError, SignatureError
from nereid_backend.spec import ModelSpec


class JaxExportEngine:
    """One exported function under ``jax.jit``; inputs in the order of its flattened arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function: Callable[..., Any] | None = function

    @classmethod
    def check_device(cls, device: str) -> None:
        jax = import_library("jax_export")
        configure(jax, device)
        find_device(jax, device)

    @classmethod
    def load(cls, spec: ModelSpec, directory: Path) -> JaxExportEngine:
        jax = import_library("jax_export")
        configure(jax, spec.device)
        device = find_device(jax, spec.device)
        (file,) = {program.file for program in spec.programs}
        exported = read(directory / file)

        def nereid_program(*tensors: Any) -> list[Any]:
            arguments, keywords = jax.tree_util.tree_unflatten(exported.in_tree, tensors)
            leaves: list[Any] = jax.tree_util.tree_leaves(exported.call(*arguments, **keywords))
            return leaves

        placement = {} if spec.device == "cpu" else {"in_shardings": jax.sharding.SingleDeviceSharding(device)}
        return cls(jax.jit(nereid_program, **placement))

    def run(self, inputs: list[Array]) -> list[Array]:
        if self._function is None:
            raise EngineError("the exported function was closed")
        try:
            return [np.asarray(output) for output in self._function(*inputs)]
        except (ValueError, TypeError, RuntimeError) as error:
            raise EngineError(f"the exported function failed: {first_line(error)}") from error

    def close(self) -> None:
        self._function = None


def read(path: Path) -> Any:
    """The ``jax.export.Exported`` of a file. Raises SignatureError, EngineMissing."""
    jax = import_library("jax_export")
    from jax import export

    try:
        return export.deserialize(bytearray(path.read_bytes()))
    except OSError as error:
        raise SignatureError(f"{path.name}: cannot be read ({error.strerror})") from None
    # A damaged flatbuffer raises whatever its reader stumbles over.
    except Exception as error:
        raise SignatureError(
            f"{path.name}: is not a jax.export file that jax {jax.__version__} can read ({first_line(error)}); write "
            "it with jax.export.export(...)(...).serialize()"
        ) from error
