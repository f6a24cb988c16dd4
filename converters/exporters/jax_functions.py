"""Export of JAX functions: any traceable function of a tree of parameters and of input arrays.

Parameters become named weights, which are arguments of the program after the inputs, one per array: an array that
stands in several places of the tree is stored once. What is no array (numbers, texts, functions, as modules of equinox
hold them) keeps its value at export.
"""

from __future__ import annotations

import gc
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from converters.artifact import positional_names
from converters.bundle import Array
from converters.exporters import comparison
from converters.exporters.bundle_writer import Layout, batch_axis, write_bundle
from converters.exporters.comparison import Trial
from converters.exporters.provenance import Provenance, collect
from converters.prepared import Prepared
from nereid_backend import dtypes
from nereid_backend.engines import import_library
from nereid_backend.engines.jax_programs import first_line
from nereid_backend.errors import BundleError, ExportError
from nereid_backend.spec import VARIABLE, TensorSpec

ENGINE = "stablehlo"
BATCH_SIZES = (1, 8)


@dataclass(frozen=True, slots=True)
class JaxModel:
    """A function ``fn(params, *inputs)`` with its parameters and examples of its inputs.

    ``example_inputs`` is one array, a tuple of positional arguments or a mapping of keyword arguments; each may be a
    tree of arrays. Names of inputs are those of the arguments, names of outputs the keys of what ``fn`` returns, unless
    given here. ``axes`` names the axes of a tensor by letters in wire order, as in ``{"image": "nhwc"}``; ``n`` is the
    batch, which without an entry is the first axis of an input and, in an output, the one that grows with it.
    """

    fn: Callable[..., Any]
    params: Any
    example_inputs: Any
    axes: Mapping[str, str] = field(default_factory=dict)
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written. ``differences``: by output, the largest one to the model, relative to its largest value."""

    directory: Path
    batch_sizes: tuple[int, ...]
    differences: Mapping[str, float]
    notes: tuple[str, ...]


def export_jax(
    fn: Callable[..., Any],
    params: Any,
    example_inputs: Any,
    directory: Path | str,
    batch_sizes: Sequence[int] | None = BATCH_SIZES,
    *,
    axes: Mapping[str, str] = MappingProxyType({}),
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    layout: Layout = "program",
    tolerance: float | None = None,
    provenance: Mapping[str, Any] | None = MappingProxyType({}),
    force: bool = False,
) -> Exported:
    """Write ``fn`` as a bundle and run it beside ``fn`` at every batch size. See JaxModel for the arguments.

    ``batch_sizes`` None makes one program of exactly the examples' shapes, without a batch axis. ``tolerance`` is for
    floating-point outputs, relative to the largest value (default: 1e-5 for f32, ``comparison.TOLERANCE``).
    Entries of ``provenance`` are added to what is collected; None writes none. Raises
    BundleError subclasses, EngineMissing, and what ``fn`` raises; then nothing is written.
    """
    model = JaxModel(fn, params, example_inputs, axes, input_names, output_names)
    return export(model, directory, batch_sizes, layout=layout, tolerance=tolerance, provenance=provenance, force=force)


def export(
    model: JaxModel,
    directory: Path | str,
    batch_sizes: Sequence[int] | None = BATCH_SIZES,
    *,
    layout: Layout = "program",
    tolerance: float | None = None,
    provenance: Mapping[str, Any] | None = MappingProxyType({}),
    force: bool = False,
) -> Exported:
    """``export_jax`` of a model that is described already."""
    jax = import_library(ENGINE)
    sizes = _sizes(batch_sizes)
    function = _Function(jax, model, batched=sizes != (None,))
    differences: dict[str, float] = {}
    origin = Provenance({})
    if provenance is not None:
        facts = {"source_framework": "jax", "converter": "nereid export_jax", "batch_sizes": list(batch_sizes or [])}
        origin = collect(model.fn, ("jax", "jaxlib", "numpy"), {**facts, **provenance})
    with _settings_kept(jax):
        outputs = function.outputs(sizes)
        modules = {size: function.module(size) for size in sizes}
        trials = [trial for size in sizes for trial in function.trials(size)]
        gc.collect()  # JAX leaves copies of the weights in cycles, and the next step makes one of its own

        def proof(prepared: Prepared) -> None:
            gc.collect()
            differences.update(comparison.prove(prepared, trials, tolerance))

        prepared = write_bundle(
            Path(directory),
            executable_inputs=function.inputs,
            executable_outputs=outputs,
            modules=modules,
            weights=function.weights,
            axes=model.axes,
            layout=layout,
            provenance=origin.fields,
            patch=origin.patch,
            force=force,
            proof=proof,
        )
    notes = (*function.notes, *prepared.notes)
    return Exported(Path(directory), tuple(size for size in sizes if size is not None), differences, notes)


def _sizes(batch_sizes: Sequence[int] | None) -> tuple[int | None, ...]:
    if not batch_sizes:
        return (None,)
    if not all(type(size) is int and size > 0 for size in batch_sizes):
        raise ExportError(f"batch sizes are {list(batch_sizes)}, expected positive integers")
    return tuple(sorted(set(batch_sizes)))


@contextmanager
def _settings_kept(jax: Any) -> Iterator[None]:
    """Undo what our engine sets for its process: the caller's stays as it was."""
    jax.devices()  # chosen now, by the caller's own settings
    # Not the attributes, which a context of the caller's may cover.
    before = {name: jax.config.values[name] for name in ("jax_enable_x64", "jax_platforms")}
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


class _Tree:
    """Arrays of a tree as plain tensors. Typed random keys travel as their data.

    ``once``: an array that stands in several places is one tensor.
    """

    def __init__(self, jax: Any, tree: Any, *, once: bool) -> None:
        self._jax = jax
        self.paths, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        self._keys: dict[int, Any] = {}
        self._places: list[int | None] = []
        self.arrays: list[Array] = []
        self.array_paths: list[Any] = []
        self.narrowed: list[tuple[int, str]] = []
        seen: dict[int, int] = {}
        for path, leaf in self.paths:
            if not isinstance(leaf, np.ndarray | np.generic | jax.Array):
                self._places.append(None)
                continue
            if id(leaf) not in seen or not once:
                seen[id(leaf)] = len(self.arrays)
                self._add(path, leaf)
            self._places.append(seen[id(leaf)])

    def _add(self, path: Any, leaf: Any) -> None:
        jax = self._jax
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            self._keys[len(self.arrays)] = jax.random.key_impl(leaf)
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        kept = jax.dtypes.canonicalize_dtype(array.dtype)
        if kept != array.dtype:
            self.narrowed.append((len(self.arrays), f"{array.dtype} is {kept}"))
        self.arrays.append(array.astype(kept, copy=False))
        self.array_paths.append(path)

    def restored(self, arrays: Sequence[Any]) -> Any:
        """The tree with ``arrays``, traced ones too, in the places of its own."""
        plain = [
            self._jax.random.wrap_key_data(array, impl=self._keys[index]) if index in self._keys else array
            for index, array in enumerate(arrays)
        ]
        leaves = [
            leaf if place is None else plain[place] for place, (_, leaf) in zip(self._places, self.paths, strict=True)
        ]
        return self._jax.tree_util.tree_unflatten(self._structure, leaves)


class _Function:
    """A JaxModel as one function of plain tensors: the inputs, then the weights."""

    def __init__(self, jax: Any, model: JaxModel, *, batched: bool) -> None:
        self._jax, self._model = jax, model
        examples = model.example_inputs
        if not isinstance(examples, tuple | list | Mapping):
            examples = (examples,)
        self._by_name = isinstance(examples, Mapping)
        examples = dict(examples) if self._by_name else tuple(examples)
        # A number is an input like an array.
        examples = jax.tree_util.tree_map(lambda a: a if isinstance(a, jax.Array) else np.asarray(a), examples)
        self._examples = _Tree(jax, examples, once=False)
        self._params = _Tree(jax, model.params, once=True)
        names = self._input_names()
        tensors = zip(names, self._examples.arrays, strict=True)
        self.inputs = tuple(self._input(name, array, batched=batched) for name, array in tensors)
        self.weights = dict(zip(self._weight_names(), self._params.arrays, strict=True))
        for name, weight in self.weights.items():
            _token(f"weight {name!r}", weight.dtype)
        narrowed = [
            f"{name!r} of {change}"
            for tree, names in ((self._examples, names), (self._params, list(self.weights)))
            for name, change in ((names[index], change) for index, change in tree.narrowed)
        ]
        self.notes = (f"jax_enable_x64 is off, so {', '.join(narrowed)}",) if narrowed else ()

    def _path(self, path: Any) -> str:
        return str(self._jax.tree_util.keystr(path, simple=True, separator="/"))

    def _weight_names(self) -> list[str]:
        paths = self._params.array_paths
        names = [self._path(path) or "weight" for path in paths]
        if len(set(names)) == len(names):
            return names
        return [str(self._jax.tree_util.keystr(path)) for path in paths]

    def _input_names(self) -> list[str]:
        paths = self._examples.array_paths
        if self._model.input_names is not None:
            return _given("input", self._model.input_names, len(paths))
        if self._by_name:
            return [self._path(path) for path in paths]
        try:
            arguments = [p for p in inspect.signature(self._model.fn).parameters.values() if p.kind in _POSITIONAL][1:]
        except (TypeError, ValueError):  # no Python function
            arguments = []
        if len(arguments) <= max((path[0].idx for path in paths), default=-1):
            return positional_names("input", len(paths))
        return ["/".join(filter(None, (arguments[p[0].idx].name, self._path(p[1:])))) for p in paths]

    def _input(self, name: str, array: Array, *, batched: bool) -> TensorSpec:
        dtype = _token(f"input {name!r}", array.dtype)
        letters = self._model.axes.get(name)
        axis = (0 if batched else None) if letters is None else batch_axis(letters)
        if axis is not None and not batched:
            raise ExportError(
                f"input {name!r} has a batch axis in axes, but there are no batch sizes; give both or none"
            )
        if axis is not None and axis >= array.ndim:
            raise ExportError(
                f"input {name!r} has shape {list(array.shape)} and no axis {axis} for the batch; give its axes or "
                "batch_sizes=None"
            )
        shape = tuple(VARIABLE if index == axis else size for index, size in enumerate(array.shape))
        return TensorSpec(name, dtype, shape, axis)

    def _call(self, *arrays: Any) -> Any:
        inputs = self._examples.restored(arrays[: len(self.inputs)])
        params = self._params.restored(arrays[len(self.inputs) :])
        result = self._model.fn(params, **inputs) if self._by_name else self._model.fn(params, *inputs)
        return self._jax.tree_util.tree_map(self._plain, result)

    def _plain(self, leaf: Any) -> Any:
        jax = self._jax
        array = jax.numpy.asarray(leaf)
        return jax.random.key_data(array) if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) else array

    def _flat(self, *arrays: Any) -> list[Any]:
        leaves: list[Any] = self._jax.tree_util.tree_leaves(self._call(*arrays))
        return leaves

    def _structs(self, size: int | None) -> list[Any]:
        struct = self._jax.ShapeDtypeStruct
        pairs = zip(self.inputs, self._examples.arrays, strict=True)
        inputs = [struct(a.shape if size is None else tensor.at_batch(size), a.dtype) for tensor, a in pairs]
        return inputs + [struct(array.shape, array.dtype) for array in self._params.arrays]

    def outputs(self, sizes: Sequence[int | None]) -> tuple[TensorSpec, ...]:
        """The results of the function; the batch axis of each is the one that grows with the batch."""
        tree = self._jax.eval_shape(self._call, *self._structs(sizes[0]))
        paths, _ = self._jax.tree_util.tree_flatten_with_path(tree)
        if not paths:
            raise ExportError("the function returns no array; return an array, or a tuple or dict of arrays")
        names = self._output_names([self._path(path) for path, _ in paths])
        shapes = [leaf.shape for _, leaf in paths]
        if sizes[0] is None:
            others = shapes
        else:
            other = sizes[-1] if len(sizes) > 1 else 2 * sizes[0]
            others = [leaf.shape for leaf in self._jax.eval_shape(self._flat, *self._structs(other))]
        return tuple(
            self._output(name, leaf, other) for name, (_, leaf), other in zip(names, paths, others, strict=True)
        )

    def _output_names(self, paths: Sequence[str]) -> list[str]:
        if self._model.output_names is not None:
            return _given("output", self._model.output_names, len(paths))
        if any(not path or path[0].isdigit() for path in paths):
            return positional_names("output", len(paths))
        return list(paths)

    def _output(self, name: str, leaf: Any, other: tuple[int, ...]) -> TensorSpec:
        dtype = _token(f"output {name!r}", leaf.dtype)
        if len(leaf.shape) != len(other):
            raise ExportError(f"output {name!r} has another number of axes at another batch size")
        grown = [axis for axis, (a, b) in enumerate(zip(leaf.shape, other, strict=True)) if a != b]
        if len(grown) > 1:
            raise ExportError(
                f"output {name!r} grows with the batch along the axes {grown}, one can be the batch; return rows "
                "that do not depend on each other"
            )
        axis = grown[0] if grown else None
        shape = tuple(VARIABLE if index == axis else size for index, size in enumerate(leaf.shape))
        return TensorSpec(name, dtype, shape, axis)

    def module(self, size: int | None) -> bytes:
        """The program of a batch size, written so that readers twelve weeks older than this jax take it."""
        export = importlib.import_module("jax.export")
        # Without keep_unused what the function does not use leaves the signature.
        jitted = self._jax.jit(self._flat, keep_unused=True)
        try:
            exported = export.export(jitted, platforms=["cpu"])(*self._structs(size))
        except NotImplementedError as error:
            raise ExportError(
                f"the function cannot be exported ({first_line(error)}); leave out printing and other calls of the host"
            ) from error
        return _for_older_readers(exported.mlir_module_serialized)

    def trials(self, size: int | None) -> list[Trial]:
        """Inputs of a batch size with what the function gives for them, on the CPU."""
        jax = self._jax

        # Traced anew, not from the cache of what was exported: what changes from trace to trace must show.
        def source(*arrays: Any) -> list[Any]:
            return self._flat(*arrays)

        run = jax.jit(source)
        trials = []
        cpu = jax.devices("cpu")[0]
        with jax.default_device(cpu):
            weights = [jax.device_put(array, cpu) for array in self._params.arrays]  # else every run copies them
            for what, inputs in comparison.inputs_to_try(self.inputs, self._examples.arrays, size):
                expected = [np.asarray(result) for result in run(*inputs, *weights)]
                trials.append(Trial(what, inputs, expected))
        return trials


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _given(role: str, names: Sequence[str], count: int) -> list[str]:
    if len(names) != count:
        raise ExportError(f"{role}_names are {list(names)}, the function has {count} {role}s; name each")
    return list(names)


def _token(what: str, dtype: Any) -> str:
    try:
        return dtypes.by_numpy(np.dtype(dtype)).token
    except (BundleError, TypeError):
        raise ExportError(f"{what} is {dtype}, which bundles have no type for; convert it first") from None


def _for_older_readers(module: bytes) -> bytes:
    from jax.extend.mlir.dialects import stablehlo
    from jax.interpreters import mlir

    target = stablehlo.get_version_from_compatibility_requirement(stablehlo.StablehloCompatibilityRequirement.WEEK_12)
    with mlir.make_ir_context() as context:
        parsed = stablehlo.deserialize_portable_artifact(context, module)
        written: bytes = stablehlo.serialize_portable_artifact(parsed, target)
    return written
