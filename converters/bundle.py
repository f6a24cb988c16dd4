"""Reader of bundles: a directory with manifest.yaml, StableHLO modules and weights.

The manifest, the weights' header and every module's own ``main`` signature are compared by name before anything is
written: XLA itself checks only the number and the byte sizes of arguments.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path

from converters import manifest as manifests
from converters import rows
from converters import weights as bundle_weights
from converters.manifest import DEFAULT_WEIGHTS_FILE, MANIFEST_FILE, Manifest
from converters.prepared import Prepared, Source, place
from converters.weights import BundleWeights
from nereid_backend.engines import engine_class, stablehlo
from nereid_backend.engines.stablehlo import Argument, Module
from nereid_backend.errors import BundleError, SignatureError
from nereid_backend.spec import VARIABLE, ModelSpec, Program, TensorSpec, Weights

PLAIN_MODULE = "model.mlir"
JULIA_HOOKS, PYTHON_HOOKS = "model.jl", "hooks.py"
PLATFORM = "stablehlo"


def read(directory: Path, name: str, device: str) -> Prepared:
    """Read and check a bundle. Raises a BundleError subclass, or EngineMissing without jax."""
    hooks = [file for file in (JULIA_HOOKS, PYTHON_HOOKS) if (directory / file).exists()]
    manifest = manifests.read(directory / MANIFEST_FILE, has_hook=bool(hooks))
    _refuse_unsupported(manifest, hooks)
    files = find_modules(directory, manifest)
    weights, notes = bundle_weights.in_use(directory, manifest.weights_file)
    modules = {size: stablehlo.read_module(path) for size, path in files.items()}
    inputs = tuple(tensor.spec() for tensor in manifest.executable_inputs)
    outputs = tuple(tensor.spec() for tensor in manifest.executable_outputs)
    for size, module in modules.items():
        _check_signature(files[size].name, module, size, inputs, outputs, weights)
    if None in modules:
        inputs = _as_compiled(inputs, modules[None].arguments)
        outputs = _as_compiled(outputs, modules[None].results)
    coalesce = None not in modules and bool(inputs) and all(tensor.batch_axis == 0 for tensor in (*inputs, *outputs))
    spec = ModelSpec(
        name=name,
        engine="stablehlo",
        platform=PLATFORM,
        inputs=inputs,
        outputs=outputs,
        programs=tuple(Program(files[size].name, size) for size in files),
        weights=Weights(DEFAULT_WEIGHTS_FILE, weights.argument_order),
        max_batch_size=max(size for size in files if size is not None) if coalesce else 0,
        coalesce=coalesce,
        device=device,
    )
    sources: dict[str, Source] = {path.name: path for path in files.values()}
    sources[DEFAULT_WEIGHTS_FILE] = weights.writer() if weights.needs_transpose else weights.path
    prepared = Prepared(spec, sources, notes)
    return _with_rows_checked(prepared) if coalesce else prepared


def _with_rows_checked(prepared: Prepared) -> Prepared:
    """Run a batched bundle on made-up rows: a program whose rows depend on each other must not be padded or shared.

    The bundle format takes independence for granted; such a program then runs one request per call at an exact size.
    """
    spec = prepared.spec
    size = next((size for size in spec.batch_sizes if size > 1), None)
    if size is None:
        return prepared
    with tempfile.TemporaryDirectory() as scratch:
        for name, source in prepared.files.items():
            place(source, Path(scratch) / name, link=True)
        # On the CPU: a bundle may be converted on another machine than it is served on.
        tried = tuple(program for program in spec.programs if program.batch_size in (1, size))
        engine = engine_class(spec.engine).load(replace(spec, device="cpu", programs=tried), Path(scratch))
        try:
            problem = rows.dependence(engine, spec, size, spec.outputs)
        finally:
            engine.close()
    if problem is None:
        return prepared
    spec = replace(spec, coalesce=False, max_batch_size=0)
    note = f"requests run one by one, without padding, at exactly {list(spec.batch_sizes)} rows: {problem}"
    return Prepared(spec, prepared.files, (*prepared.notes, note))


def _refuse_unsupported(manifest: Manifest, hooks: list[str]) -> None:
    if JULIA_HOOKS in hooks:
        raise BundleError(
            "the bundle has Julia hooks (model.jl), which Python cannot run; remove model.jl and the client specs if "
            "the executable can be served as it is"
        )
    if PYTHON_HOOKS in hooks:
        raise BundleError("the bundle has hooks.py; hooks are not supported by this version")
    if manifest.kind == "meta":
        raise BundleError("the bundle is a meta model; those are not supported by this version")
    if manifest.input_shapes:
        raise BundleError("the bundle has shape variants (input_shapes); those are not supported by this version")


def find_modules(directory: Path, manifest: Manifest) -> dict[int | None, Path]:
    """Module files by compiled batch size, ascending; ``{None: model.mlir}`` for a size-less bundle.

    The files present decide what is compiled; ``model.mlir`` counts only when there is no ``model.b{N}.mlir``.
    """
    sized = {
        int(match[1]): path
        for path in directory.iterdir()
        if (match := re.fullmatch(r"model\.b([1-9]\d*)\.mlir", path.name))
    }
    if sized:
        if missing := sorted(set(manifest.compiled_batch_sizes) - set(sized)):
            raise BundleError(
                f"manifest declares compiled batch sizes {missing} but there is no model.b{missing[0]}.mlir; export "
                "the bundle again or correct 'compiled_batch_sizes'"
            )
        if not any(tensor.batch_axis is not None for tensor in manifest.executable_inputs):
            raise BundleError("there are model.b{N}.mlir files but no executable input has a batch axis")
        return {size: sized[size] for size in sorted(sized)}
    if (directory / PLAIN_MODULE).exists():
        return {None: directory / PLAIN_MODULE}
    raise BundleError("there is neither model.mlir nor model.b{N}.mlir; a bundle needs a compiled program")


def _check_signature(
    file: str,
    module: Module,
    size: int | None,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    weights: BundleWeights,
) -> None:
    """Compare ``main`` with the manifest and the weights. Raises SignatureError naming the argument."""
    expected = len(inputs) + len(weights.argument_order)
    if len(module.arguments) != expected:
        raise SignatureError(
            f"{file}: main takes {len(module.arguments)} arguments, the manifest's {len(inputs)} inputs and "
            f"{len(weights.argument_order)} weights make {expected}; export the bundle again (a surplus is often a "
            "random seed lifted into the arguments, a shortfall an unused weight)"
        )
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
                f"{file}: weight {name!r} is {_text(dtype, shape)} in {weights.path.name} "
                f"({'legacy' if weights.legacy else 'program'} axis order), main expects "
                f"{_text(argument.dtype, argument.shape)}; the weights belong to another program or layout"
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


def _as_compiled(tensors: tuple[TensorSpec, ...], arguments: tuple[Argument, ...]) -> tuple[TensorSpec, ...]:
    """A size-less module runs at exactly the sizes it was compiled for: serve those, with no batch axis."""
    return tuple(
        replace(tensor, shape=argument.shape, batch_axis=None)
        for tensor, argument in zip(tensors, arguments, strict=False)
    )


def _text(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"
