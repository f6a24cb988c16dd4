"""StableHLO programs of torch modules: torch.export once per batch size, then JAX.

Parameters and buffers become named weights, stored once when the module shares them; those that no program uses are
left out. So are constants of ``forward``, under torch's own names.
"""

from __future__ import annotations

import importlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any

from converters.bundle import Array
from converters.exporters import torch_operators
from converters.exporters.programs import Run, compiled_sizes, dtype_token, input_tensor
from converters.exporters.torch_calls import ModuleCall
from converters.exporters.torch_operators import Operators
from nereid_backend.engines.jax_programs import first_line
from nereid_backend.errors import ExportError
from nereid_backend.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class _Program:
    """A decomposed ``torch.export`` program. ``sources``: by placeholder, a weight's name or an input's index."""

    exported: Any
    sources: tuple[str | int, ...]


class _Weights:
    """The tensors of all programs by name, each once, and which of them a program uses."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._tensors: dict[str, Any] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._used: set[str] = set()

    def add(self, name: str, tensor: Any, *, used: bool) -> str:
        """The name under which ``tensor`` is stored: the first of those that share it."""
        place = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        stored = self._names.get(place) if tensor.numel() else None
        if stored is None:
            stored, number = name, 1
            # A constant that forward makes anew, or another one where it depends on the shapes of the inputs.
            while stored in self._tensors and not self._torch.equal(self._tensors[stored], tensor):
                stored, number = f"{name}_{number}", number + 1
            self._tensors.setdefault(stored, tensor)
            self._names[place] = stored
        if used:
            self._used.add(stored)
        return stored

    def used(self) -> dict[str, Any]:
        return {name: tensor for name, tensor in self._tensors.items() if name in self._used}

    def unused(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self._tensors and name not in self._used]


def programs_of(
    calls: Sequence[ModuleCall], axes: Mapping[str, str], batch_sizes: Sequence[int] | None
) -> list[TorchPrograms]:
    """Sources for ``export_programs``, one for each variant, with one set of weights. Raises BundleError subclasses."""
    operators = torch_operators.open_operators()
    weights = _Weights(operators.torch)
    return [TorchPrograms(operators, call, axes, batch_sizes, weights) for call in calls]


class TorchPrograms:
    """A ModuleCall as a ``ProgramSource``."""

    def __init__(
        self,
        operators: Operators,
        call: ModuleCall,
        axes: Mapping[str, str],
        batch_sizes: Sequence[int] | None,
        weights: _Weights,
    ) -> None:
        self._operators, self._call, self._weights = operators, call, weights
        self.examples = call.examples
        self.inputs = [
            input_tensor(name, array, axes.get(name), batched=bool(batch_sizes))
            for name, array in zip(call.input_names, call.examples, strict=True)
        ]
        self._programs = {size: self._traced(size) for size in compiled_sizes(batch_sizes)}

    @property
    def weights(self) -> dict[str, Array]:
        return {name: self._call.array(tensor) for name, tensor in self._weights.used().items()}

    @property
    def notes(self) -> list[str]:
        unused = self._weights.unused(self._call.parameters())
        return [f"parameters that forward does not use are left out: {', '.join(unused)}"] if unused else []

    def outputs(self, size: int | None) -> list[TensorSpec]:
        results = self._call.results(self._call.rows(self.inputs, size))
        return [TensorSpec(name, dtype_token(f"output {name!r}", a.dtype), a.shape) for name, a in results.items()]

    def module(self, size: int | None) -> bytes:
        jax, export = importlib.import_module("jax"), importlib.import_module("jax.export")
        program, stored = self._programs[size], self.weights
        inputs = len(self.inputs)

        def flat(*arrays: Any) -> list[Any]:
            weights = dict(zip(stored, arrays[inputs:], strict=True))
            # A weight that no program uses is no argument.
            values = [arrays[s] if isinstance(s, int) else weights.get(s) for s in program.sources]
            return torch_operators.run(program.exported, self._operators, values)

        structs = [
            jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*self._call.rows(self.inputs, size), *stored.values())
        ]
        jax.config.update("jax_enable_x64", True)  # torch's integers have 64 bits
        # Else the precision of matrix products is that of the platform that the program runs on.
        with jax.default_matmul_precision("highest"):
            exported = export.export(jax.jit(flat, keep_unused=True), platforms=["cpu"])(*structs)
        module: bytes = exported.mlir_module_serialized
        return module

    def original(self) -> Run:
        return self._call.run

    def _traced(self, size: int | None) -> _Program:
        exported = exported_program(self._call, self._call.rows(self.inputs, size), self._operators.decompositions)
        kinds = self._operators.torch.export.graph_signature.InputKind
        placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
        sources: list[str | int] = []
        inputs = 0
        for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
            if spec.kind == kinds.USER_INPUT:
                sources.append(inputs)
                inputs += 1
            elif spec.kind in (kinds.PARAMETER, kinds.BUFFER, kinds.CONSTANT_TENSOR):
                tensor = exported.state_dict.get(spec.target, exported.constants.get(spec.target))
                name = spec.target.removeprefix(self._call.PREFIX)
                sources.append(self._weights.add(name, tensor, used=bool(node.users)))
            else:
                raise ExportError(f"the module holds {spec.target!r}, which is no tensor; use format='torchscript'")
        return _Program(exported, tuple(sources))


def exported_program(call: ModuleCall, rows: Sequence[Array], decompositions: Any, **options: Any) -> Any:
    """``torch.export`` of the module on ``rows``; decomposed with a table, as it is with None. Raises ExportError."""
    torch = importlib.import_module("torch")
    try:
        with torch.no_grad(), _quiet():
            exported = torch.export.export(call.flat, call.tensors(rows), strict=False, **options)
            if decompositions is None:
                return exported
            return exported.run_decompositions(decompositions)
    except ExportError:
        raise
    # It raises whatever the code of the module provokes; the module alone has run before.
    except Exception as error:
        if "data-dependent" in str(error):
            raise ExportError(
                f"forward decides by the values of a tensor ({first_line(error)}); write it with torch.where, or "
                "export torch.jit.script(module) with format='torchscript'"
            ) from error
        raise ExportError(
            f"torch.export cannot follow the module ({type(error).__name__}: {first_line(error)}); "
            "format='torchscript' may"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warnings about its own modules (LSTM keeps its weights in a list, pytree's old names).

    Its log and what it prints say in a hundred lines what the error says in one.
    """
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore", UserWarning)
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        log.setLevel(level)
