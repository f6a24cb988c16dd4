"""Programs of torch.export as JAX functions, operator by operator, with the operators of torchax.

Only its table of operators is used: no tensors of its own, no mode of torch. What each operator gives is held to what
torch.export says of that place in the program: with 64-bit types on, JAX widens where torch does not.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from converters.exporters import torch_linear, torch_recurrent
from nereid_backend.engines.jax_programs import first_line
from nereid_backend.errors import BundleError, ExportError

EXTRA = "export"


@dataclass(frozen=True, slots=True)
class Operators:
    """``lowerings``: by an operator of torch, torchax's entry; ``own``: ours, which go first."""

    torch: Any
    lowerings: Mapping[Any, Any]
    own: Mapping[Any, Callable[..., Any]]
    decompositions: Any
    """For ``ExportedProgram.run_decompositions``."""
    dtype_of: Any
    """From a dtype of torch to JAX's."""


@cache
def open_operators() -> Operators:
    """Import torchax's operators. Raises BundleError naming the extra that brings them."""
    torch = importlib.import_module("torch")
    with _torchax(), _removed_overloads(torch):
        importlib.import_module("torchax.ops.jaten")
        registry = importlib.import_module("torchax.ops.ops_registry")
        mappings = importlib.import_module("torchax.ops.mappings")
        decompositions = importlib.import_module("torchax.decompositions")
    own = {**torch_linear.lowerings(torch), **torch_recurrent.lowerings(torch)}
    table = torch.export.default_decompositions()
    table.update(decompositions.DECOMPOSITIONS)
    for operator in own:
        table.pop(operator, None)
    return Operators(torch, registry.all_aten_ops, own, table, mappings.t2j_dtype)


@contextmanager
def _torchax() -> Iterator[None]:
    """Modules of torchax without its ``__init__``, which would change the user's process for good.

    It renames a device of torch, registers one for which ``torch.random.fork_rng`` fails, and turns off the fast path
    of attention. The modules are forgotten afterwards, so that the user may import torchax itself.
    """
    if "torchax" in sys.modules:  # the user has
        yield
        return
    found = importlib.util.find_spec("torchax")
    if found is None or found.submodule_search_locations is None:
        raise BundleError(
            "StableHLO programs of torch modules are made with torchax, which this Python does not have; install it "
            f"with: pip install 'nereid-triton[{EXTRA}]'; or use format='pt2' or 'torchscript'"
        )
    package = types.ModuleType("torchax")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["torchax"] = package
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchax"]:
            del sys.modules[name]


@contextmanager
def _removed_overloads(torch: Any) -> Iterator[None]:
    """Let torchax 0.0.13 name overloads of named tensors, which torch 2.13 has no longer, while it is imported."""
    packet = torch._ops.OpOverloadPacket
    found = packet.__getattr__

    def found_or_named(self: Any, name: str) -> Any:
        try:
            return found(self, name)
        except AttributeError:
            if "imname" in name or "names" in name:
                return self, name  # a key of its tables that no program asks for
            raise

    packet.__getattr__ = found_or_named
    try:
        yield
    finally:
        packet.__getattr__ = found


def run(program: Any, operators: Operators, values: Sequence[Any]) -> list[Any]:
    """The results of ``program``'s user outputs, ``values`` being its placeholders' in order. Traced values, too.

    Raises ExportError naming the operator that has no StableHLO.
    """
    torch = operators.torch
    remaining = iter(values)
    known: dict[Any, Any] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            known[node] = next(remaining)
        elif node.op == "call_function":
            arguments = torch.fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = _as_torch_says(operators, node, _call(operators, node.target, *arguments))
        elif node.op == "output":
            results = torch.fx.node.map_arg(node.args[0], known.__getitem__)
    return list(results)


def _call(operators: Operators, target: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    torch = operators.torch
    if not isinstance(target, torch._ops.OpOverload):
        if isinstance(target, torch._ops.OperatorBase):
            raise ExportError(f"{target} has no StableHLO here; use torch.where, or format='pt2'")
        return target(*arguments, **keywords)  # operator.getitem and the like
    if target.namespace == "aten" and "_assert" in str(target):
        return None
    if (own := operators.own.get(target)) is not None:
        return own(*arguments, **keywords)
    found = operators.lowerings.get(target) or operators.lowerings.get(target.overloadpacket)
    if found is None or not found.is_jax_function:
        raise ExportError(f"torchax has no StableHLO for {target}; write it in other operators, or use format='pt2'")
    if found.needs_env:  # torchax's own generator
        raise ExportError(f"forward draws random numbers ({target}); make the noise an input, or call module.eval()")
    try:
        return found.func(*arguments, **keywords)
    # An operator raises whatever an argument it does not expect provokes.
    except Exception as error:
        raise ExportError(
            f"torchax cannot write {target} as StableHLO ({first_line(error)}); use format='pt2'"
        ) from error


def _as_torch_says(operators: Operators, node: Any, result: Any) -> Any:
    """``result`` in the dtype that torch gives it; its shape must be torch's."""

    def one(value: Any, meta: Any) -> Any:
        if isinstance(meta, list | tuple):
            return [one(*pair) for pair in zip(value, meta, strict=True)]
        if not isinstance(meta, operators.torch.Tensor):
            return value
        array = importlib.import_module("jax.numpy").asarray(value)
        if array.shape != tuple(meta.shape):
            raise ExportError(
                f"torchax gives {list(array.shape)} for {node.target}, torch {list(meta.shape)}; use format='pt2'"
            )
        return array.astype(operators.dtype_of(meta.dtype))

    return one(result, node.meta.get("val"))
