"""Export of StableHLO programs: all that does not depend on the framework which makes them.

A framework says what its model is by a ``ProgramSource``. ``export_programs`` finds which axes are the batch, makes a
program per batch size, writes the bundle, and runs it beside the model before it is put in its place.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from converters.bundle import Array
from converters.exporters import comparison
from converters.exporters.bundle_writer import write_bundle
from converters.exporters.client_side import PLAIN, ClientSide
from converters.exporters.comparison import Trial
from converters.exporters.description import Exported
from converters.exporters.manifest_writer import Layout, batch_axis
from converters.exporters.provenance import Provenance, collect
from converters.prepared import Prepared
from nereid_backend import dtypes
from nereid_backend.engines import import_library
from nereid_backend.errors import BundleError, ExportError
from nereid_backend.spec import VARIABLE, TensorSpec, Variant, variable_axes

ENGINE = "stablehlo"
BATCH_SIZES = (1, 8)

Run = Callable[[list[Array]], list[Array]]


class ProgramSource(Protocol):
    """A model as a function of plain tensors, of which programs can be made.

    A program's arguments are the inputs and then the weights, all of them, used or not, in the order given here; its
    results are the outputs. ``inputs`` come from ``input_tensor``: the batch axis is marked and has size VARIABLE.
    ``examples`` are their values, with the same number of rows in each. ``weights`` are in program order; an array that
    stands in several places of the model is one weight. ``notes`` are remarks for the user.
    """

    @property
    def inputs(self) -> Sequence[TensorSpec]: ...

    @property
    def examples(self) -> Sequence[Array]: ...

    @property
    def weights(self) -> Mapping[str, Array]: ...

    @property
    def notes(self) -> Sequence[str]: ...

    def outputs(self, size: int | None) -> Sequence[TensorSpec]:
        """The results of a run of ``size`` rows, without a batch axis: their shapes at that size.

        None: the examples' own shapes. Asked for at two sizes, which tells the batch axes.
        """
        ...

    def module(self, size: int | None) -> bytes:
        """The StableHLO program of a batch size, for one CPU: an artifact, bytecode or text."""
        ...

    def original(self) -> Run:
        """The model itself, not a copy of what was exported: from inputs to outputs, on the CPU.

        It may hold the weights once more; it is dropped before the bundle is written.
        """
        ...


@dataclass(frozen=True, slots=True)
class Origin:
    """What the provenance says of the framework. ``code`` tells the work tree; ``packages`` have versions."""

    framework: str
    converter: str
    packages: tuple[str, ...]
    code: Callable[..., Any]


def export_programs(
    sources: Sequence[ProgramSource],
    directory: Path | str,
    batch_sizes: Sequence[int] | None,
    *,
    origin: Origin,
    axes: Mapping[str, str] = MappingProxyType({}),
    client: ClientSide = PLAIN,
    layout: Layout = "program",
    tolerance: float | None = None,
    provenance: Mapping[str, Any] | None = MappingProxyType({}),
    force: bool = False,
) -> Exported:
    """Write a model as a bundle and run it beside the original, in every variant at every batch size.

    ``sources`` are one for each variant: the same model on examples of other shapes, with the same weights. Without
    ``batch_sizes`` programs have the examples' shapes; the inputs have no batch axis then. Raises BundleError
    subclasses, EngineMissing, and what the sources raise; then nothing is written.
    """
    directory, sizes = Path(directory), compiled_sizes(batch_sizes)
    _check_weights(sources)
    inputs = _joined("input", [source.inputs for source in sources])
    variants = _variants(sources, inputs)
    known = _provenance(origin, batch_sizes, provenance)
    differences: dict[str, float] = {}
    with settings_kept():
        outputs = _joined("output", [_outputs(source, sizes) for source in sources])
        modules = {variant: {size: source.module(size) for size in sizes} for variant, source in variants.items()}
        trials = [trial for variant, source in variants.items() for trial in _trials(source, sizes, variant)]
        gc.collect()  # JAX leaves copies of the weights in cycles, and the next step makes one of its own

        def proof(prepared: Prepared) -> None:
            gc.collect()
            differences.update(comparison.prove(prepared, trials, tolerance))
            if client.has_hooks:
                for name, found in client.prove(prepared, tolerance).items():
                    differences[name] = max(found, differences.get(name, 0.0))

        prepared = write_bundle(
            directory,
            executable_inputs=inputs,
            executable_outputs=outputs,
            modules=modules if len(sources) > 1 else modules[()],
            weights=sources[0].weights,
            axes=axes,
            layout=layout,
            client=client,
            provenance=known.fields,
            patch=known.patch,
            force=force,
            proof=proof,
        )
    notes = dict.fromkeys((*(note for source in sources for note in source.notes), *prepared.notes))
    return Exported(directory, tuple(size for size in sizes if size is not None), differences, tuple(notes))


def compiled_sizes(batch_sizes: Sequence[int] | None) -> tuple[int | None, ...]:
    """What programs are made for, ascending; None alone stands for the examples' shapes. Raises ExportError."""
    if not batch_sizes:
        return (None,)
    if not all(type(size) is int and size > 0 for size in batch_sizes):
        raise ExportError(f"batch sizes are {list(batch_sizes)}, expected positive integers")
    return tuple(sorted(set(batch_sizes)))


@contextmanager
def settings_kept() -> Iterator[None]:
    """Undo what our engine sets in JAX for its process: the caller's stays as it was."""
    jax = import_library(ENGINE)
    jax.devices()  # chosen now, by the caller's own settings
    # Not the attributes, which a context of the caller's may cover.
    before = {name: jax.config.values[name] for name in ("jax_enable_x64", "jax_platforms")}
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def _provenance(origin: Origin, batch_sizes: Sequence[int] | None, added: Mapping[str, Any] | None) -> Provenance:
    if added is None:
        return Provenance({})
    facts = {
        "source_framework": origin.framework,
        "converter": origin.converter,
        "batch_sizes": list(batch_sizes or []),
    }
    return collect(origin.code, origin.packages, {**facts, **added})


def _trials(source: ProgramSource, sizes: Sequence[int | None], variant: Variant) -> list[Trial]:
    trials = comparison.trials_of(source.original(), source.inputs, source.examples, sizes)
    if not variant:
        return trials
    return [replace(trial, what=f"{trial.what} of variant {list(variant)}") for trial in trials]


def _check_weights(sources: Sequence[ProgramSource]) -> None:
    first = sources[0].weights
    for source in sources[1:]:
        if source.weights is first:
            continue
        same = list(first) == list(source.weights) and all(
            a is b or (a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))
            for a, b in zip(first.values(), source.weights.values(), strict=True)
        )
        if not same:
            raise ExportError("the weights are not the same in every variant; export one model with one set of them")


def _joined(role: str, variants: Sequence[Sequence[TensorSpec]]) -> tuple[TensorSpec, ...]:
    """The tensors of all variants: an axis whose size differs is variable."""
    counts = {len(tensors) for tensors in variants}
    if len(counts) > 1:
        raise ExportError(f"the variants have {sorted(counts)} {role}s; give each the same number")
    return tuple(_one(role, same) for same in zip(*variants, strict=True))


def _one(role: str, same: Sequence[TensorSpec]) -> TensorSpec:
    first = same[0]
    for other in same[1:]:
        if replace(other, shape=()) != replace(first, shape=()) or len(other.shape) != len(first.shape):
            raise ExportError(
                f"{role} {first.name!r} is {first.dtype}{list(first.shape)} in one variant and {other.name!r}, "
                f"{other.dtype}{list(other.shape)} in another; only sizes may differ"
            )
    sizes = zip(*(tensor.shape for tensor in same), strict=True)
    return replace(first, shape=tuple(each[0] if len(set(each)) == 1 else VARIABLE for each in sizes))


def _variants(sources: Sequence[ProgramSource], inputs: Sequence[TensorSpec]) -> dict[Variant, ProgramSource]:
    places = variable_axes(inputs)
    found = {tuple(source.inputs[index].shape[axis] for index, axis in places): source for source in sources}
    if len(found) < len(sources):
        raise ExportError("two variants have inputs of the same shapes; give each other ones")
    return found


def input_tensor(name: str, example: Array, letters: str | None, *, batched: bool) -> TensorSpec:
    """The input that ``example`` is one of; its axes are named by ``letters`` or, with None, the first is the batch."""
    dtype = dtype_token(f"input {name!r}", example.dtype)
    axis = (0 if batched else None) if letters is None else batch_axis(letters)
    if axis is not None and not batched:
        raise ExportError(f"input {name!r} has a batch axis in axes, but there are no batch sizes; give both or none")
    if axis is not None and axis >= example.ndim:
        raise ExportError(
            f"input {name!r} has shape {list(example.shape)} and no axis {axis} for the batch; give its axes or "
            "batch_sizes=None"
        )
    return _with_batch(TensorSpec(name, dtype, example.shape), axis)


def _outputs(source: ProgramSource, sizes: Sequence[int | None]) -> tuple[TensorSpec, ...]:
    """The results of the programs; the batch axis of each is the one that grows with the batch."""
    outputs = source.outputs(sizes[0])
    if sizes[0] is None:
        return tuple(outputs)
    others = source.outputs(sizes[-1] if len(sizes) > 1 else 2 * sizes[0])
    return tuple(_output(tensor, other) for tensor, other in zip(outputs, others, strict=True))


def _output(tensor: TensorSpec, other: TensorSpec) -> TensorSpec:
    if len(tensor.shape) != len(other.shape):
        raise ExportError(f"output {tensor.name!r} has another number of axes at another batch size")
    grown = [axis for axis, (a, b) in enumerate(zip(tensor.shape, other.shape, strict=True)) if a != b]
    if len(grown) > 1:
        raise ExportError(
            f"output {tensor.name!r} grows with the batch along the axes {grown}, one can be the batch; return rows "
            "that do not depend on each other"
        )
    return _with_batch(tensor, grown[0] if grown else None)


def _with_batch(tensor: TensorSpec, axis: int | None) -> TensorSpec:
    shape = tuple(VARIABLE if index == axis else size for index, size in enumerate(tensor.shape))
    return replace(tensor, shape=shape, batch_axis=axis)


def given_names(role: str, names: Sequence[str], count: int) -> list[str]:
    """``names`` of the user's for ``count`` tensors. Raises ExportError when there are more or fewer."""
    if len(names) != count:
        raise ExportError(f"{role}_names are {list(names)}, the function has {count} {role}s; name each")
    return list(names)


def dtype_token(what: str, dtype: Any) -> str:
    """The format's name of a numpy dtype. Raises ExportError naming ``what``."""
    try:
        return dtypes.by_numpy(np.dtype(dtype)).token
    except (BundleError, TypeError):
        raise ExportError(f"{what} is {dtype}, which bundles have no type for; convert it first") from None
