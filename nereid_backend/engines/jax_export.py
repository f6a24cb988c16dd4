"""Files written by ``jax.export``: functions with their own calling convention, in JAX.

A symbolic axis is refined and compiled anew for every size, so the specification lists the sizes to compile. An axis
that is symbolic without being a batch compiles when a size is first seen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nereid_backend.engines import Array, import_library
from nereid_backend.engines.jax_programs import Compiler, first_line, open_device, read_artifact
from nereid_backend.errors import EngineError, SignatureError
from nereid_backend.spec import VARIABLE, ModelSpec


class JaxExportEngine:
    """One exported function, compiled for each size; inputs in the order of its flattened arguments."""

    def __init__(
        self,
        function: Callable[..., Any],
        programs: dict[tuple[int, ...], Callable[..., Any]],
        axes: list[tuple[int, int]],
    ) -> None:
        """``programs`` by the sizes that the inputs have at ``axes``; ``function`` runs any other size."""
        self._function: Callable[..., Any] | None = function
        self._programs = programs
        self._axes = axes

    @classmethod
    def check_device(cls, device: str) -> None:
        open_device("jax_export", device)

    @classmethod
    def load(cls, spec: ModelSpec, directory: Path) -> JaxExportEngine:
        jax, device = open_device("jax_export", spec.device)
        (file,) = {program.file for program in spec.programs}
        data = read_artifact(directory / file)
        exported = _exported(data, file)

        def nereid_program(*tensors: Any) -> list[Any]:
            arguments, keywords = jax.tree_util.tree_unflatten(exported.in_tree, tensors)
            leaves: list[Any] = jax.tree_util.tree_leaves(exported.call(*arguments, **keywords))
            return leaves

        compiler = Compiler(jax, device)
        programs: dict[tuple[int, ...], Callable[..., Any]] = {}
        for program in spec.programs:
            size = program.batch_size
            shapes = [tensor.shape if size is None else tensor.at_batch(size) for tensor in spec.inputs]
            if any(VARIABLE in shape for shape in shapes):
                continue
            arguments = [(shape, t.element.numpy) for shape, t in zip(shapes, spec.inputs, strict=True)]
            content = data + repr(arguments).encode()
            lower = partial(compiler.lower, nereid_program, arguments)
            programs[() if size is None else (size,)] = compiler.program(file, content, lower)
        batched = [(i, t.batch_axis) for i, t in enumerate(spec.inputs) if t.batch_axis is not None]
        placement = {} if spec.device == "cpu" else {"in_shardings": jax.sharding.SingleDeviceSharding(device)}
        return cls(jax.jit(nereid_program, **placement), programs, batched[:1])

    def run(self, inputs: list[Array]) -> list[Array]:
        if self._function is None:
            raise EngineError("the exported function was closed")
        function = self._programs.get(tuple([inputs[i].shape[axis] for i, axis in self._axes]), self._function)
        try:
            return [np.asarray(output) for output in function(*inputs)]
        except (ValueError, TypeError, RuntimeError) as error:
            raise EngineError(f"the exported function failed: {first_line(error)}") from error

    def close(self) -> None:
        self._function, self._programs = None, {}


def read(path: Path) -> Any:
    """The ``jax.export.Exported`` of a file. Raises SignatureError, EngineMissing."""
    return _exported(read_artifact(path), path.name)


def _exported(data: bytes, name: str) -> Any:
    jax = import_library("jax_export")
    from jax import export

    try:
        return export.deserialize(bytearray(data))
    # A damaged flatbuffer raises whatever its reader stumbles over.
    except Exception as error:
        raise SignatureError(
            f"{name}: is not a jax.export file that jax {jax.__version__} can read ({first_line(error)}); write "
            "it with jax.export.export(...)(...).serialize()"
        ) from error
