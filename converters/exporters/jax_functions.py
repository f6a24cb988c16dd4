"""Export of JAX functions: any traceable function of a tree of parameters and of input arrays.

Parameters become named weights, which are arguments of the program after the inputs, one per array: an array that
stands in several places of the tree is stored once. What is no array (numbers, texts, functions, as modules of equinox
hold them) keeps its value at export.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from converters.artifact import positional_names
from converters.bundle import Array
from converters.exporters.client_side import PLAIN, ClientSide
from converters.exporters.description import Exported
from converters.exporters.manifest_writer import Layout
from converters.exporters.programs import (
    BATCH_SIZES,
    ENGINE,
    Origin,
    Run,
    dtype_token,
    export_programs,
    given_names,
    input_tensor,
)
from nereid_backend.engines import import_library
from nereid_backend.engines.jax_programs import first_line
from nereid_backend.errors import ExportError
from nereid_backend.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class JaxModel:
    """A function ``fn(params, *inputs)`` with its parameters and examples of its inputs.

    ``example_inputs`` is one array, a tuple of positional arguments or a mapping of keyword arguments; each may be a
    tree of arrays. Names of inputs are those of the arguments, names of outputs the keys of what ``fn`` returns, unless
    given here. ``axes`` names the axes of a tensor by letters in wire order, as in ``{"image": "nhwc"}``; ``n`` is the
    batch, which without an entry is the first axis of an input and, in an output, the one that grows with it.
    ``variants`` are further examples of other shapes, each like ``example_inputs``: programs are made for each.
    ``client`` is what clients see instead, and the hooks between.
    """

    fn: Callable[..., Any]
    params: Any
    example_inputs: Any
    axes: Mapping[str, str] = field(default_factory=dict)
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    variants: Sequence[Any] = ()
    client: ClientSide = PLAIN

    def export(
        self,
        directory: Path | str,
        batch_sizes: Sequence[int] | None = BATCH_SIZES,
        *,
        layout: Layout = "program",
        tolerance: float | None = None,
        provenance: Mapping[str, Any] | None = MappingProxyType({}),
        force: bool = False,
    ) -> Exported:
        """Write this model as a bundle and run it beside its function: see ``export_jax``."""
        jax = import_library(ENGINE)
        params = _Tree(jax, self.params, once=True)
        examples = (self.example_inputs, *self.variants)
        functions = [_Function(jax, self, each, params, batched=bool(batch_sizes)) for each in examples]
        origin = Origin("jax", "nereid export_jax", ("jax", "jaxlib", "numpy"), self.fn)
        return export_programs(
            functions,
            directory,
            batch_sizes,
            origin=origin,
            axes=self.axes,
            client=self.client,
            layout=layout,
            tolerance=tolerance,
            provenance=provenance,
            force=force,
        )


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
    variants: Sequence[Any] = (),
    client: ClientSide = PLAIN,
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
    model = JaxModel(fn, params, example_inputs, axes, input_names, output_names, variants, client)
    return model.export(directory, batch_sizes, layout=layout, tolerance=tolerance, provenance=provenance, force=force)


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

    def __init__(self, jax: Any, model: JaxModel, examples: Any, params: _Tree, *, batched: bool) -> None:
        self._jax, self._model, self._params = jax, model, params
        if not isinstance(examples, tuple | list | Mapping):
            examples = (examples,)
        self._by_name = isinstance(examples, Mapping)
        examples = dict(examples) if self._by_name else tuple(examples)
        # A number is an input like an array.
        examples = jax.tree_util.tree_map(lambda a: a if isinstance(a, jax.Array) else np.asarray(a), examples)
        self._examples = _Tree(jax, examples, once=False)
        names = self._input_names()
        self.examples = self._examples.arrays
        self.inputs = tuple(
            input_tensor(name, array, model.axes.get(name), batched=batched)
            for name, array in zip(names, self.examples, strict=True)
        )
        self.weights = dict(zip(self._weight_names(), self._params.arrays, strict=True))
        for name, weight in self.weights.items():
            dtype_token(f"weight {name!r}", weight.dtype)
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
            return given_names("input", self._model.input_names, len(paths))
        if self._by_name:
            return [self._path(path) for path in paths]
        try:
            arguments = [p for p in inspect.signature(self._model.fn).parameters.values() if p.kind in _POSITIONAL][1:]
        except (TypeError, ValueError):  # no Python function
            arguments = []
        if len(arguments) <= max((path[0].idx for path in paths), default=-1):
            return positional_names("input", len(paths))
        return ["/".join(filter(None, (arguments[p[0].idx].name, self._path(p[1:])))) for p in paths]

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

    def outputs(self, size: int | None) -> list[TensorSpec]:
        errors = self._jax.errors
        try:
            tree = self._jax.eval_shape(self._call, *self._structs(size))
        except (errors.JAXTypeError, errors.JAXIndexError) as error:
            raise ExportError(
                f"the function cannot be traced ({first_line(error)}); use jax.numpy instead of numpy, and "
                "jnp.where or jax.lax.cond instead of branches on values"
            ) from error
        paths, _ = self._jax.tree_util.tree_flatten_with_path(tree)
        if not paths:
            raise ExportError("the function returns no array; return an array, or a tuple or dict of arrays")
        names = self._output_names([self._path(path) for path, _ in paths])
        return [
            TensorSpec(name, dtype_token(f"output {name!r}", leaf.dtype), leaf.shape)
            for name, (_, leaf) in zip(names, paths, strict=True)
        ]

    def _output_names(self, paths: Sequence[str]) -> list[str]:
        if self._model.output_names is not None:
            return given_names("output", self._model.output_names, len(paths))
        if any(not path or path[0].isdigit() for path in paths):
            return positional_names("output", len(paths))
        return list(paths)

    def module(self, size: int | None) -> bytes:
        export = importlib.import_module("jax.export")
        # Without keep_unused what the function does not use leaves the signature.
        jitted = self._jax.jit(self._flat, keep_unused=True)
        try:
            exported = export.export(jitted, platforms=["cpu"])(*self._structs(size))
        except NotImplementedError as error:
            raise ExportError(
                f"the function cannot be exported ({first_line(error)}); leave out printing and other calls of the host"
            ) from error
        module: bytes = exported.mlir_module_serialized
        return module

    def original(self) -> Run:
        jax = self._jax
        cpu = jax.devices("cpu")[0]

        # Traced anew, not from the cache of what was exported: what changes from trace to trace must show.
        def source(*arrays: Any) -> list[Any]:
            return self._flat(*arrays)

        traced = jax.jit(source)
        with jax.default_device(cpu):
            weights = [jax.device_put(array, cpu) for array in self._params.arrays]  # else every run copies them

        def run(inputs: list[Array]) -> list[Array]:
            with jax.default_device(cpu):
                return [np.asarray(result) for result in traced(*inputs, *weights)]

        return run


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
