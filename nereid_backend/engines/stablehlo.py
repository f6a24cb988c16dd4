"""StableHLO programs in JAX: an own primitive under ``jax.jit``.

The primitive's lowering merges the artifact's module into the one JAX builds and calls its ``main``, so no
model code is traced and the whole jit machinery (fast dispatch, numpy arguments, compilation cache) applies.
Only ``jax.extend`` and ``jax.interpreters.mlir`` are used: the same lines run on jax 0.7.1 to 0.12.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nereid_backend import dtypes, safetensors
from nereid_backend.engines import Array, import_library
from nereid_backend.engines.jax_programs import Compiler, first_line, open_device, read_artifact
from nereid_backend.errors import BundleError, EngineError, SignatureError
from nereid_backend.spec import ModelSpec

ENTRY = "main"
# What waits for the process that compiled the program, which nothing here answers: the run would never end.
_HOST_OPERATIONS = ("infeed", "outfeed", "send", "recv")
_CALLBACK = "callback"  # in the target of every custom call that JAX makes for io_callback, pure_callback, debug.print


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument or result of ``main``: a dtype token and a static shape in program order."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Module:
    """A parsed artifact. Hashable by content, as a static parameter of the primitive must be."""

    data: bytes
    arguments: tuple[Argument, ...]
    results: tuple[Argument, ...]


def read_module(path: Path) -> Module:
    """Parse an artifact (portable artifact, MLIR bytecode or text) and its ``main`` signature, without compiling.

    Raises SignatureError for a file that is no StableHLO, has no ``main``, is dynamic, sharded or multi-platform, or
    calls the host; EngineMissing without jax.
    """
    return _module(read_artifact(path), path.name)


def _module(data: bytes, name: str) -> Module:
    import_library("stablehlo")
    from jax.interpreters import mlir

    with mlir.make_ir_context() as context:
        module = _parse(data, context, name)
        try:
            signature = _signature(module, data, name)
        except (AttributeError, TypeError, ValueError) as error:  # attributes or symbols of an unexpected kind
            raise SignatureError(f"{name}: is not a model ({error}); export it again") from None
        _check_self_contained(module, name)
        return signature


def _check_self_contained(module: Any, name: str) -> None:
    """Raise SignatureError when the module waits for the process that runs it."""
    from jax.extend.mlir import ir

    found: list[str] = []

    def see(operation: Any) -> Any:
        kind = operation.name.rpartition(".")[2]
        if kind == "custom_call":
            target = str(operation.attributes["call_target_name"]).strip('"')
            if _CALLBACK in target:
                found.append(f"a call of the host ({target})")
        elif kind in _HOST_OPERATIONS:
            found.append(kind)
        return ir.WalkResult.ADVANCE

    module.operation.walk(see)
    if found:
        raise SignatureError(
            f"{name}: has {found[0]}, which waits for a program on the host that is not part of a model; export the "
            "function without callbacks, printing, infeed and outfeed"
        )


def _signature(module: Any, data: bytes, name: str) -> Module:
    from jax.extend.mlir import ir

    attributes = module.operation.attributes
    for key in ("mhlo.num_partitions", "mhlo.num_replicas"):
        if key in attributes and ir.IntegerAttr(attributes[key]).value > 1:
            raise SignatureError(f"{name}: is sharded ({key} > 1); export it for one device")
    symbols = ir.SymbolTable(module.operation)
    if ENTRY not in symbols:
        raise SignatureError(f"{name}: has no function {ENTRY!r}; export the model again")
    main = symbols[ENTRY]
    if "arg_attrs" in main.attributes and "_platform_index" in str(main.attributes["arg_attrs"]):
        raise SignatureError(f"{name}: was exported for several platforms; export it for one")
    signature = main.type
    return Module(
        data,
        tuple(_argument(t, name, "argument", i) for i, t in enumerate(signature.inputs)),
        tuple(_argument(t, name, "result", i) for i, t in enumerate(signature.results)),
    )


def _parse(data: bytes, context: Any, name: str) -> Any:
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo

    try:
        # Plain MLIR bytecode carries the same magic as a portable artifact; the producer string tells them apart.
        if data.startswith(b"ML\xefR") and b"StableHLO_v" in data[:64]:
            return stablehlo.deserialize_portable_artifact(context, data)
        return ir.Module.parse(data, context)
    except (ValueError, ir.MLIRError, UnicodeDecodeError):
        raise SignatureError(
            f"{name}: is not a StableHLO module that this jax can read; it is damaged, or newer than the installed "
            "jax: copy or export it again"
        ) from None


def _argument(kind: Any, name: str, role: str, index: int) -> Argument:
    from jax.extend.mlir import ir

    try:
        ranked = ir.RankedTensorType(kind)
    except ValueError:
        raise SignatureError(f"{name}: {role} {index} is {kind}, only tensors are supported") from None
    if not ranked.has_static_shape:
        raise SignatureError(f"{name}: {role} {index} is {kind}; export one static program per batch size")
    try:
        dtype = dtypes.by_stablehlo(str(ranked.element_type))
    except BundleError as error:
        raise SignatureError(f"{name}: {role} {index}: {error}") from None
    return Argument(dtype.token, tuple(ranked.shape))


def _make_primitive() -> Any:
    import jax
    from jax.extend.core import Primitive
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import func
    from jax.interpreters import mlir

    primitive = Primitive("nereid_stablehlo")
    primitive.multiple_results = True

    def abstract_eval(*_arguments: Any, module: Module) -> list[Any]:
        return [jax.core.ShapedArray(r.shape, dtypes.by_token(r.dtype).numpy) for r in module.results]

    def lower(context: Any, *operands: Any, module: Module) -> Any:
        parsed = _parse(module.data, context.module_context.context, "program")
        results = list(ir.FunctionType(ir.SymbolTable(parsed.operation)[ENTRY].type).results)  # merging empties it
        symbol = mlir.merge_mlir_modules(
            context.module_context.module, ENTRY, parsed, dst_symtab=context.module_context.symbol_table
        )
        return func.CallOp(results, ir.FlatSymbolRefAttr.get(symbol), operands).results

    primitive.def_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, lower)
    return primitive


def _program(compiler: Compiler, path: Path) -> Callable[..., Any]:
    """The program of an artifact, ready to be called with numpy inputs and device-resident weights."""
    data = read_artifact(path)

    def lower() -> Any:
        module, primitive = _module(data, path.name), _make_primitive()

        def nereid_program(*arguments: Any) -> Any:
            return primitive.bind(*arguments, module=module)

        return compiler.lower(nereid_program, [(a.shape, dtypes.by_token(a.dtype).numpy) for a in module.arguments])

    # Weights are arguments and always in program order here, so neither they nor their layout take part in the key.
    return compiler.program(path.name, data, lower)


class StableHloEngine:
    """One program per variant and compiled size; all share one set of device-resident weights."""

    def __init__(
        self, functions: dict[tuple[int, ...], Callable[..., Any]], weights: list[Any], axes: list[tuple[int, int]]
    ):
        """``functions`` by the sizes that the inputs have at ``axes``, pairs of input and axis."""
        self._functions = functions
        self._only = next(iter(functions.values())) if len(functions) == 1 else None
        self._weights = weights
        self._axes = axes

    @classmethod
    def check_device(cls, device: str) -> None:
        open_device("stablehlo", device)

    @classmethod
    def load(cls, spec: ModelSpec, directory: Path) -> StableHloEngine:
        jax, device = open_device("stablehlo", spec.device)
        weights: list[Any] = []
        if spec.weights is not None:
            # One shared read buffer; device_put aliases what is 64-byte aligned and copies the rest. It is never
            # written afterwards, which the aliasing demands.
            tensors = safetensors.read(directory / spec.weights.file).tensors
            weights = [jax.device_put(tensors[name], device) for name in spec.weights.argument_order]
        compiler = Compiler(jax, device)
        functions = {}
        for program in spec.programs:
            size = () if program.batch_size is None else (program.batch_size,)
            functions[program.variant + size] = _program(compiler, directory / program.file)
        batched = [(i, t.batch_axis) for i, t in enumerate(spec.inputs) if t.batch_axis is not None]
        return cls(functions, weights, [*spec.variable_axes, *batched[:1]])

    def run(self, inputs: list[Array]) -> list[Array]:
        function = self._only or self._functions[tuple([inputs[i].shape[axis] for i, axis in self._axes])]
        try:
            # numpy arguments go straight in (an explicit device_put costs 20 us each); np.asarray waits for the
            # result, after which the inputs may be reused.
            return [np.asarray(output) for output in function(*inputs, *self._weights)]
        except (ValueError, TypeError, RuntimeError) as error:
            raise EngineError(f"the StableHLO program failed: {first_line(error)}") from error

    def close(self) -> None:
        self._functions, self._only, self._weights = {}, None, []
