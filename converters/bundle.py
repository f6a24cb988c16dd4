"""Reader of bundles: a directory with manifest.yaml, StableHLO modules and weights.

The manifest, the weights' header and every module's own ``main`` signature are compared by name before anything is
written: XLA itself checks only the number and the byte sizes of arguments.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from converters import hooks, meta, rows
from converters import manifest as manifests
from converters import weights as bundle_weights
from converters.manifest import DEFAULT_WEIGHTS_FILE, MANIFEST_FILE, Manifest
from converters.prepared import Once, Prepared, Source, place
from converters.weights import BundleWeights
from nereid_backend import safetensors
from nereid_backend.engines import engine_class, stablehlo
from nereid_backend.engines.stablehlo import Argument, Module
from nereid_backend.errors import BundleError, SignatureError
from nereid_backend.spec import VARIABLE, ModelSpec, Program, TensorSpec, Variant, Weights
from nereid_backend.user_code import USER_CODE

Array = np.ndarray[Any, Any]

BatchSizes = Literal["all", "largest"]
"""Which of the compiled batch sizes to serve; the largest alone loads faster and pads more."""

JULIA_HOOKS, PYTHON_HOOKS = "model.jl", USER_CODE
PLATFORM = "stablehlo"

_NO_JULIA = (
    "the bundle has Julia hooks (model.jl), which Python cannot run; write a hooks.py beside it that calls "
    "register_model(preprocess=..., postprocess=...) of nereid_backend.hooks, or declare built-ins under "
    "nereid.preprocess and nereid.postprocess in the manifest"
)


@dataclass(frozen=True, slots=True)
class ModuleFile:
    """A compiled program. ``size`` is the batch size in its name, ``sizes`` its entry of ``input_shapes``."""

    path: Path
    size: int | None
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Parts:
    """A bundle's files, each read by itself: ``modules`` are the signatures of ``files``, ``weights`` is a header."""

    manifest: Manifest
    files: tuple[ModuleFile, ...]
    modules: tuple[Module, ...]
    weights: BundleWeights
    notes: tuple[str, ...]


def read(
    directory: Path,
    name: str,
    device: str,
    batch_sizes: BatchSizes = "all",
    callees: Mapping[str, ModelSpec] = MappingProxyType({}),
) -> Prepared:
    """Read and check a bundle. Raises a BundleError subclass, or EngineMissing without jax.

    ``callees`` holds, by name, the models that a meta model may call.
    """
    manifest = read_manifest(directory)
    if manifest.kind == "meta":
        return meta.read(directory, name, manifest, callees)
    prepared = compare(read_parts(directory, manifest, batch_sizes), name, device)
    return hooks.attach(_with_rows_checked(prepared) if prepared.spec.coalesce else prepared, manifest, directory)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a bundle. Raises ManifestError, or BundleError for hooks that Python cannot run."""
    code = [file for file in (JULIA_HOOKS, PYTHON_HOOKS) if (directory / file).exists()]
    manifest = manifests.read(directory / MANIFEST_FILE, has_hook=bool(code))
    if manifest.kind != "meta" and code == [JULIA_HOOKS] and not manifest.has_builtins:
        raise BundleError(_NO_JULIA)
    return manifest


def read_parts(directory: Path, manifest: Manifest, batch_sizes: BatchSizes = "all") -> Parts:
    """Read the weights' header and the modules' signatures. Raises a BundleError subclass, EngineMissing."""
    files = tuple(find_modules(directory, manifest, batch_sizes))
    weights, notes = bundle_weights.in_use(directory, manifest.weights_file)
    modules = tuple(stablehlo.read_module(file.path) for file in files)
    return Parts(manifest, files, modules, weights, notes)


def compare(parts: Parts, name: str, device: str) -> Prepared:
    """The model that the parts of a bundle make, its hooks left out. Raises SignatureError where they do not agree."""
    manifest, files, modules, weights = parts.manifest, parts.files, parts.modules, parts.weights
    outputs = tuple(tensor.spec() for tensor in manifest.executable_outputs)
    for file, module in zip(files, modules, strict=True):
        _check_signature(file, module, _inputs(manifest, file.sizes), outputs, weights)
    inputs = _inputs(manifest, {})
    static = any(file.size is None for file in files)
    if static:
        inputs = _as_compiled(inputs, [module.arguments for module in modules])
        outputs = _as_compiled(outputs, [module.results for module in modules])
    batched = not static and bool(inputs) and all(t.batch_axis is not None for t in (*inputs, *outputs))
    first = all(tensor.batch_axis == 0 for tensor in (*inputs, *outputs))
    spec = ModelSpec(
        name=name,
        engine="stablehlo",
        platform=PLATFORM,
        inputs=inputs,
        outputs=outputs,
        programs=(),
        weights=Weights(DEFAULT_WEIGHTS_FILE, weights.argument_order),
        max_batch_size=max(file.size or 0 for file in files) if batched and first else 0,
        coalesce=batched,
        device=device,
    )
    variants = [tuple(m.arguments[index].shape[axis] for index, axis in spec.variable_axes) for m in modules]
    programs = (
        Program(file.path.name, None if static else file.size, variant)
        for file, variant in zip(files, variants, strict=True)
    )
    spec = replace(spec, programs=tuple(programs))
    sources: dict[str, Source] = {file.path.name: file.path for file in files}
    sources[DEFAULT_WEIGHTS_FILE] = weights.writer() if weights.needs_transpose else weights.path
    notes = (*parts.notes, _SIDEWAYS) if batched and not first else parts.notes
    return Prepared(spec, sources, notes)


_SIDEWAYS = "requests run one by one: Triton batches along the first axis, which is not where this bundle has its rows"


def _inputs(manifest: Manifest, sizes: Mapping[str, int]) -> tuple[TensorSpec, ...]:
    """The executable inputs in wire order, variable axes set to ``sizes`` where it has them."""
    return tuple(tensor.at(sizes).spec() for tensor in manifest.executable_inputs)


def _with_rows_checked(prepared: Prepared) -> Prepared:
    """Run a batched bundle on made-up rows: a program whose rows depend on each other must not be padded or shared.

    The bundle format takes independence for granted; such a program then runs one request per call at an exact size.
    """
    if max(prepared.spec.batch_sizes) == 1:  # no two rows ever meet
        return prepared
    # Weights that are brought to program order for the trial are what is written afterwards.
    files = {name: source if isinstance(source, Path) else Once(source) for name, source in prepared.files.items()}
    prepared = replace(prepared, files=files)
    with tempfile.TemporaryDirectory() as scratch:
        for name, source in files.items():
            place(source, Path(scratch) / name, link=True)
        problem = _dependence(prepared.spec, Path(scratch))
    if problem is None:
        return prepared
    spec = replace(prepared.spec, coalesce=False, max_batch_size=0)
    others = [note for note in prepared.notes if note != _SIDEWAYS]
    return Prepared(spec, prepared.files, (*others, rows.kept_apart(spec, problem)))


def _dependence(spec: ModelSpec, directory: Path) -> str | None:
    """Why rows must not share a run, None when nothing does; every variant is tried, on one set of weights.

    Of each variant the smallest program that takes several rows is compiled; a row alone is tried in the first only.
    """
    tried: dict[Variant, tuple[Program, ...]] = {}
    for variant in spec.variants:
        programs = spec.at_variant(variant).programs
        size = min((p.batch_size for p in programs if p.batch_size is not None and p.batch_size > 1), default=None)
        if size is not None:
            wanted = (size,) if tried else (1, size)
            tried[variant] = tuple(program for program in programs if program.batch_size in wanted)
    chosen = tuple(replace(p, variant=variant) for variant, programs in tried.items() for p in programs)
    # On the CPU: a bundle may be converted on another machine than it is served on.
    engine = engine_class(spec.engine).load(replace(spec, device="cpu", programs=chosen), directory)
    try:
        for variant, programs in tried.items():
            one = replace(spec.at_variant(variant), programs=programs)
            if (problem := rows.dependence(engine, one, max(one.batch_sizes), spec.outputs)) is not None:
                return f"variant {list(variant)}: {problem}" if variant else problem
    finally:
        engine.close()
    return None


def read_bundle_weights(directory: Path) -> dict[str, Array]:
    """The weights of a bundle by name, in argument order and in program order, whatever its layout.

    C-contiguous arrays of the caller's own. Raises BundleError subclasses.
    """
    hooked = any((directory / file).exists() for file in (JULIA_HOOKS, PYTHON_HOOKS))
    manifest = manifests.read(directory / MANIFEST_FILE, has_hook=hooked)
    weights, _ = bundle_weights.in_use(directory, manifest.weights_file)
    tensors = safetensors.read(weights.path).tensors
    # Not ascontiguousarray, which makes one axis of none.
    return {name: tensors[name].T.copy() if weights.legacy else tensors[name] for name in weights.argument_order}


def find_modules(directory: Path, manifest: Manifest, batch_sizes: BatchSizes = "all") -> list[ModuleFile]:
    """The modules of a bundle by variant and ascending batch size.

    The files present decide what is compiled; the size-less module of a variant counts only when it has no ``.b{N}``.
    """
    files: list[ModuleFile] = []
    for index, sizes in enumerate(manifest.input_shapes or ({},)):
        prefix = f"model.v{index}" if manifest.input_shapes else "model"
        files += _modules_of(directory, prefix, sizes, manifest.compiled_batch_sizes, batch_sizes)
    if any(file.size for file in files) and not any(t.batch_axis is not None for t in manifest.executable_inputs):
        raise BundleError("there are model.b{N}.mlir files but no executable input has a batch axis")
    if batch_sizes == "largest" and any(file.size is None for file in files):
        raise BundleError("batch sizes cannot be chosen: the bundle has a module without a batch size in its name")
    return files


def _modules_of(
    directory: Path, prefix: str, sizes: Mapping[str, int], declared: Sequence[int], batch_sizes: BatchSizes
) -> list[ModuleFile]:
    sized = {
        int(match[1]): path
        for path in directory.iterdir()
        if (match := re.fullmatch(re.escape(prefix) + r"\.b([1-9]\d*)\.mlir", path.name))
    }
    if not sized:
        plain = directory / f"{prefix}.mlir"
        if not plain.exists():
            raise BundleError(
                f"there is neither {prefix}.mlir nor {prefix}.b{{N}}.mlir; a bundle needs a compiled program"
                + (", one for each entry of input_shapes" if sizes else "")
            )
        return [ModuleFile(plain, None, sizes)]
    if missing := sorted(set(declared) - set(sized)):
        raise BundleError(
            f"manifest declares compiled batch sizes {missing} but there is no {prefix}.b{missing[0]}.mlir; export "
            "the bundle again or correct 'compiled_batch_sizes'"
        )
    served = sorted(sized)[-1:] if batch_sizes == "largest" else sorted(sized)
    return [ModuleFile(sized[size], size, sizes) for size in served]


def _check_signature(
    module_file: ModuleFile,
    module: Module,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    weights: BundleWeights,
) -> None:
    """Compare ``main`` with the manifest and the weights. Raises SignatureError naming the argument."""
    file, size = module_file.path.name, module_file.size
    check_arity(file, len(module.arguments), len(inputs), len(weights.argument_order))
    if len(module.results) != len(outputs):
        raise SignatureError(
            f"{file}: main gives {len(module.results)} results, the manifest declares {len(outputs)} outputs"
        )
    _check_tensors(file, "input", inputs, module.arguments, size)
    _check_tensors(file, "output", outputs, module.results, size)
    rows = zip(weights.argument_order, weights.dtypes, weights.shapes, module.arguments[len(inputs) :], strict=True)
    for name, dtype, shape, argument in rows:
        if (dtype, shape) != (argument.dtype, argument.shape):
            raise SignatureError(
                f"{file}: weight {name!r} is {_text(dtype, shape)} in {weights.path.name} ({weights.layout}), main "
                f"expects {_text(argument.dtype, argument.shape)}; the weights belong to another program or layout"
            )


def check_arity(file: str, arguments: int, inputs: int, weights: int) -> None:
    """Raise SignatureError unless ``main`` takes the manifest's inputs and the weights, by their number."""
    if arguments != inputs + weights:
        raise SignatureError(
            f"{file}: main takes {arguments} arguments, the manifest's {inputs} inputs and {weights} weights make "
            f"{inputs + weights}; export the bundle again (a surplus is often a random seed lifted into the "
            "arguments, a shortfall an unused weight)"
        )


def _check_tensors(
    file: str, role: str, tensors: tuple[TensorSpec, ...], arguments: tuple[Argument, ...], size: int | None
) -> None:
    for tensor, argument in zip(tensors, arguments, strict=False):
        want = tensor.shape if size is None else tensor.at_batch(size)
        fits = len(want) == len(argument.shape) and all(
            w in (VARIABLE, got) for w, got in zip(want, argument.shape, strict=True)
        )
        if tensor.dtype != argument.dtype or not fits:
            raise SignatureError(
                f"{file}: {role} {tensor.name!r} is {_text(tensor.dtype, want)} by the manifest (wire order), main has "
                f"{_text(argument.dtype, argument.shape)}; correct the manifest or export the bundle again"
            )


def _as_compiled(tensors: tuple[TensorSpec, ...], modules: Sequence[tuple[Argument, ...]]) -> tuple[TensorSpec, ...]:
    """A size-less module runs at exactly the sizes it was compiled for: serve those, with no batch axis.

    An axis that differs between the modules of a bundle is variable.
    """
    served = []
    for index, tensor in enumerate(tensors):
        shapes = zip(*(arguments[index].shape for arguments in modules), strict=True)
        shape = tuple(sizes[0] if len(set(sizes)) == 1 else VARIABLE for sizes in shapes)
        served.append(replace(tensor, shape=shape, batch_axis=None))
    return tuple(served)


def _text(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"
