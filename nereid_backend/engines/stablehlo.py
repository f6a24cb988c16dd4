"""StableHLO programs in JAX: an own primitive under ``jax.jit``.

The primitive's lowering merges the artifact's module into the one JAX builds and calls its ``main``, so no
model code is traced and the whole jit machinery (fast dispatch, numpy arguments, compilation cache) applies.
Only ``jax.extend`` and ``jax.interpreters.mlir`` are used: the same lines run on jax 0.7.1 to 0.12.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nereid_backend import dtypes, safetensors
from nereid_backend.engines import Array, import_library, parse_device
from nereid_backend.errors import BundleError, DeviceMissing, EngineError, SignatureError
from nereid_backend.program_cache import ProgramCache, processor_features
from nereid_backend.spec import ModelSpec

_LOG = logging.getLogger("nereid.stablehlo")

ENTRY = "main"
COMPILATION = 1
"""Part of every cached program's key: raised when this file makes something else of the same artifact."""


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

    Raises SignatureError for a file that is no StableHLO, has no ``main``, is dynamic, sharded or multi-platform;
    EngineMissing without jax.
    """
    import_library("stablehlo")
    from jax.interpreters import mlir

    try:
        data = path.read_bytes()
    except OSError as error:
        raise SignatureError(f"{path.name}: cannot be read ({error.strerror})") from None
    with mlir.make_ir_context() as context:
        module = _parse(data, context, path.name)
        try:
            return _signature(module, data, path.name)
        except (AttributeError, TypeError, ValueError) as error:  # attributes or symbols of an unexpected kind
            raise SignatureError(f"{path.name}: is not a model ({error}); export it again") from None


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


class _Compiler:
    """Compiles artifacts for one device, or takes them from the cache of compiled programs."""

    def __init__(self, jax: Any, device: Any) -> None:
        self._jax, self._device = jax, device
        self._sharding = jax.sharding.SingleDeviceSharding(device)
        self._cache = ProgramCache.open()
        self._target = _target(jax, device)

    def program(self, path: Path) -> Callable[..., Any]:
        """The program of an artifact, ready to be called with numpy inputs and device-resident weights."""
        try:
            key = hashlib.sha256(self._target + path.read_bytes()).hexdigest()
        except OSError as error:
            raise SignatureError(f"{path.name}: cannot be read ({error.strerror})") from None
        return self._cached(path.name, key) or self._compiled(path, key)

    def _cached(self, name: str, key: str) -> Callable[..., Any] | None:
        from jax.experimental import serialize_executable

        if (entry := self._cache.read(key)) is None:
            return None
        try:
            # The cache's folder is private to this user, which makes its pickles as trustworthy as this code.
            executable, in_tree, out_tree = pickle.loads(entry)  # noqa: S301
            program: Callable[..., Any] = serialize_executable.deserialize_and_load(
                executable, in_tree, out_tree, self._device.client, [self._device]
            )
        except Exception as error:  # noqa: BLE001 - whatever an entry does, the artifact can be compiled again
            _LOG.warning("%s: its cached program cannot be loaded (%s); compiling it again", name, first_line(error))
            return None
        return program

    def _compiled(self, path: Path, key: str) -> Callable[..., Any]:
        from jax.experimental import serialize_executable

        module, primitive = read_module(path), _make_primitive()

        def nereid_program(*arguments: Any) -> Any:
            return primitive.bind(*arguments, module=module)

        shapes = [
            self._jax.ShapeDtypeStruct(a.shape, dtypes.by_token(a.dtype).numpy, sharding=self._sharding)
            for a in module.arguments
        ]
        try:
            program: Callable[..., Any] = self._jax.jit(nereid_program).lower(*shapes).compile()
        except (ValueError, TypeError, RuntimeError) as error:
            raise EngineError(f"{path.name}: does not compile: {first_line(error)}") from error
        try:
            entry = pickle.dumps(serialize_executable.serialize(program))
        except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
            _LOG.info("%s: its compiled program cannot be cached (%s)", path.name, first_line(error))
        else:
            self._cache.write(key, entry)
        return program


def _target(jax: Any, device: Any) -> bytes:
    """What besides the artifact decides a compiled program: code generators, device, and for the CPU its own kind.

    Weights are arguments and always in program order here, so neither they nor their layout take part.
    """
    import jaxlib

    facts = [COMPILATION, jax.__version__, jaxlib.__version__, np.__version__, sys.version_info[:2]]
    facts += [device.platform, device.device_kind, device.id, device.client.platform_version]
    facts += [os.environ.get("XLA_FLAGS")]
    if device.platform == "cpu":
        # XLA generates code for the features of this processor and splits loops for this number of threads.
        facts += [*processor_features(), os.environ.get("NPROC"), len(os.sched_getaffinity(0))]
    return repr(facts).encode()


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
        jax = import_library("stablehlo")
        configure(jax, device)
        find_device(jax, device)

    @classmethod
    def load(cls, spec: ModelSpec, directory: Path) -> StableHloEngine:
        jax = import_library("stablehlo")
        configure(jax, spec.device)
        device = find_device(jax, spec.device)
        weights: list[Any] = []
        if spec.weights is not None:
            # One shared read buffer; device_put aliases what is 64-byte aligned and copies the rest. It is never
            # written afterwards, which the aliasing demands.
            tensors = safetensors.read(directory / spec.weights.file).tensors
            weights = [jax.device_put(tensors[name], device) for name in spec.weights.argument_order]
        compiler = _Compiler(jax, device)
        functions = {}
        for program in spec.programs:
            size = () if program.batch_size is None else (program.batch_size,)
            functions[program.variant + size] = compiler.program(directory / program.file)
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


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its class."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def configure(jax: Any, device: str) -> None:
    """What must be set before jax is first used for a model on ``device``."""
    # Without 64-bit mode JAX narrows i64 and f64 arguments silently.
    jax.config.update("jax_enable_x64", True)
    # A CUDA build of jax would otherwise take the first GPU for a model that asks for the CPU.
    jax.config.update("jax_platforms", "cpu" if parse_device(device)[0] == "cpu" else "cuda,cpu")


def find_device(jax: Any, device: str) -> Any:
    """The jax device of a device's name. Raises DeviceMissing, BundleError."""
    kind, index = parse_device(device)
    try:
        found = jax.devices(kind)
    except RuntimeError:
        found = []
    if index >= len(found):
        raise DeviceMissing(
            f"device {device!r} is not there: jax sees {len(found)} {kind} device(s); use another device, or install "
            "a jax built for it"
        )
    return found[index]
