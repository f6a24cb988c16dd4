"""A torch module as a function of plain tensors, as it runs in Python: the source that exports are compared with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from converters.artifact import positional_names
from converters.bundle import Array
from converters.exporters import comparison
from converters.exporters.programs import given_names
from nereid_backend.engines.torch_engine import TorchEngine
from nereid_backend.errors import ExportError
from nereid_backend.spec import TensorSpec

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# Two runs of one input: rounding of parallel sums may differ, what dropout or a kept state does is far larger.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-5


class ModuleCall(TorchEngine):
    """``module``, called with tensors in the places where ``example_inputs`` has arrays, gives a tuple of tensors.

    ``example_inputs`` is one tensor or array, a tuple of positional arguments or a mapping of keyword arguments; each
    may be a tree. What is no array in it (numbers, flags, None) keeps its value. ``flat`` is the ``torch.nn.Module`` of
    that form, whose parameters are ``module``'s own under the prefix ``PREFIX``.
    """

    name = "torch"
    what = "the module"
    PREFIX = "module."

    def __init__(
        self,
        torch: Any,
        module: Callable[..., Any],
        example_inputs: Any,
        input_names: Sequence[str] | None,
        output_names: Sequence[str] | None,
    ) -> None:
        self.module, self._output_names = module, output_names
        self._pytree = pytree = torch.utils._pytree
        if not isinstance(example_inputs, tuple | list | Mapping):
            example_inputs = (example_inputs,)
        by_name = isinstance(example_inputs, Mapping)
        leaves, self._structure = pytree.tree_flatten_with_path(
            dict(example_inputs) if by_name else tuple(example_inputs)
        )
        self._by_name = by_name
        self._leaves = [leaf for _, leaf in leaves]
        self._places = [
            i for i, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor | np.ndarray | np.generic)
        ]
        paths = [leaves[place][0] for place in self._places]
        self.input_names = (
            self._names_of_inputs(paths) if input_names is None else given_names("input", input_names, len(paths))
        )
        self._result_paths: list[Any] = []
        self.flat = _flat_module(torch, module, self._call_tree)
        super().__init__(torch, self.flat, torch.device("cpu"))
        self._check_on_cpu()
        self.examples = [self.array(self._leaves[place]) for place in self._places]

    def of(self, module: Callable[..., Any]) -> ModuleCall:
        """``module`` called in the same way."""
        leaves = self._pytree.tree_unflatten(self._leaves, self._structure)
        return ModuleCall(self._torch, module, leaves, self.input_names, self._output_names)

    def rows(self, inputs: Sequence[TensorSpec], size: int | None) -> list[Array]:
        """The examples at a batch size, their rows repeated where they are too few; None: as they are."""
        _, rows = next(comparison.inputs_to_try(inputs, self.examples, size))
        return rows

    def array(self, value: Any) -> Array:
        """A tensor as an array, which shares its memory where numpy can; arrays as they are."""
        return self._to_numpy(value.detach()) if isinstance(value, self._torch.Tensor) else np.asarray(value)

    def tensors(self, arrays: Sequence[Array]) -> tuple[Any, ...]:
        """Arrays as the tensors that ``flat`` takes."""
        return tuple(self._to_torch(np.ascontiguousarray(array)) for array in arrays)

    def named_tensors(self) -> dict[str, Any]:
        """Parameters and buffers of the module by their names, those that share one tensor each by its own name."""
        if not isinstance(self.module, self._torch.nn.Module):
            return {}
        return dict(self.module.named_parameters(remove_duplicate=False)) | dict(
            self.module.named_buffers(remove_duplicate=False)
        )

    def parameters(self) -> list[str]:
        """The names of the module's parameters."""
        named = getattr(self.module, "named_parameters", None)
        return [] if named is None else [name for name, _ in named(remove_duplicate=False)]

    @property
    def code(self) -> Callable[..., Any]:
        """What the provenance takes for the code of the module."""
        code: Callable[..., Any] = getattr(self.module, "forward", self.module)
        return code

    def results(self, inputs: Sequence[Array]) -> dict[str, Array]:
        """One run by the names of its outputs. Raises what the module raises, and ExportError for no tensors."""
        with self._torch.no_grad():
            outputs = self.flat(*self.tensors(inputs))
        return dict(zip(self._names_of_outputs(), map(self.array, outputs), strict=True))

    def check(self) -> None:
        """Run the examples twice. Raises ExportError when that changes anything or does not give the same twice."""
        torch = self._torch
        buffers = {} if not self.named_tensors() else dict(self.module.named_buffers())  # type: ignore[attr-defined]
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        inputs = self.tensors([array.copy() for array in self.examples])
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                runs = [[self.array(output).copy() for output in self.flat(*inputs)] for _ in range(2)]
                changed = [
                    name for name, buffer in buffers.items() if not _same(self.array(buffer), self.array(before[name]))
                ]
            finally:
                for name, buffer in buffers.items():
                    buffer.copy_(before[name])
        if changed:
            raise ExportError(
                f"forward changes the buffer {changed[0]!r}, which no export keeps; call module.eval(), or "
                "make the state an input and an output"
            )
        for name, example, tensor in zip(self.input_names, self.examples, inputs, strict=True):
            if not _same(self.array(tensor), example):
                raise ExportError(f"forward changes its input {name!r} in place; work on a copy ({name}.clone())")
        if not all(_same(a, b) for a, b in zip(*runs, strict=True)):
            raise ExportError(
                "the module gives other results for the same inputs (dropout, random numbers, a state it keeps); call "
                "module.eval(), or make the noise or state an input"
            )

    def _call_tree(self, *tensors: Any) -> tuple[Any, ...]:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        arguments = self._pytree.tree_unflatten(leaves, self._structure)
        result = self.module(**arguments) if self._by_name else self.module(*arguments)
        found = [
            (path, leaf if isinstance(leaf, self._torch.Tensor) else self._torch.as_tensor(leaf))
            for path, leaf in self._pytree.tree_flatten_with_path(result)[0]
            if isinstance(leaf, self._torch.Tensor | bool | int | float)
        ]
        if not found:
            raise ExportError("the module returns no tensor; return a tensor, or a tuple or dict of tensors")
        self._result_paths = [path for path, _ in found]
        return tuple(leaf for _, leaf in found)

    def _names_of_inputs(self, paths: Sequence[Any]) -> list[str]:
        if self._by_name:
            return [_joined(path) for path in paths]
        try:
            signature = inspect.signature(getattr(self.module, "forward", self.module))
            arguments = [p for p in signature.parameters.values() if p.kind in _POSITIONAL]
        except (TypeError, ValueError):  # no Python function
            arguments = []
        if len(arguments) <= max((path[0].idx for path in paths), default=-1):
            return positional_names("input", len(paths))
        return ["/".join(filter(None, (arguments[path[0].idx].name, _joined(path[1:])))) for path in paths]

    def _names_of_outputs(self) -> list[str]:
        paths = self._result_paths
        if self._output_names is not None:
            return given_names("output", self._output_names, len(paths))
        names = [_joined(path) for path in paths]
        return positional_names("output", len(paths)) if any(not n or n[0].isdigit() for n in names) else names

    def _check_on_cpu(self) -> None:
        elsewhere = {
            name: tensor.device for name, tensor in self.named_tensors().items() if tensor.device.type != "cpu"
        }
        for name, device in elsewhere.items():
            raise ExportError(f"{name!r} is on the device {device}, an export runs on the CPU; call module.cpu() first")


def _flat_module(torch: Any, module: Callable[..., Any], call: Callable[..., tuple[Any, ...]]) -> Any:
    class FlatModule(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = module  # its parameters are found here

        def forward(self, *tensors: Any) -> tuple[Any, ...]:
            return call(*tensors)

    flat = FlatModule()
    flat.training = getattr(module, "training", False)
    return flat


def _same(a: Array, b: Array) -> bool:
    if a.dtype.kind in "biu":
        return np.array_equal(a, b)
    return a.shape == b.shape and np.allclose(
        a.astype(np.float64), b.astype(np.float64), rtol=_RELATIVE, atol=_ABSOLUTE, equal_nan=True
    )


def _joined(path: Sequence[Any]) -> str:
    """A path in a tree as a name: the keys, indices and fields on the way."""
    words = (next(getattr(key, at) for at in ("key", "idx", "name") if hasattr(key, at)) for key in path)
    return "/".join(map(str, words))
