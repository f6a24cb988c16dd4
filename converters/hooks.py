"""Hooks of a bundle: client specs, declared built-ins and the Python file, checked against the executable.

Built-ins are declared in the manifest, in the order they run::

    nereid:
      preprocess: [{bert_text: {vocab: vocab.txt}}]
      postprocess: [{softmax: {input: logits, output: probs}}]

Each says which tensors it needs or makes, so that what clients see follows from the executable, and client specs that
do not fit are found here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from converters import stages, weights
from converters.manifest import CLIENT_AXIS_ORDER, DEFAULT_WEIGHTS_FILE, HOOK_PROCESSES, Manifest, ManifestTensor
from converters.meta import CODE_NOTE, check_code, files_for_code
from converters.prepared import Prepared, Source
from nereid_backend import builtins
from nereid_backend.builtins import Builtin
from nereid_backend.errors import BundleError, ManifestError, RecordError, short_repr
from nereid_backend.spec import POSTPROCESS, PREPROCESS, VARIABLE, BuiltinSpec, Hooks, TensorSpec
from nereid_backend.user_code import USER_CODE

WIRE_ORDER = (
    "client tensor {!r} has its batch letter first, where executables have it last; if its letters are in wire order, "
    "set nereid.client_axis_order: wire"
)


def attach(prepared: Prepared, manifest: Manifest, directory: Path) -> Prepared:
    """``prepared`` with the hooks of its bundle, itself when there are none. Raises BundleError subclasses."""
    code = (directory / USER_CODE).is_file()
    if not (code or manifest.has_builtins):
        return prepared
    spec = prepared.spec
    letters = {t.name: t.letters for t in (*manifest.executable_inputs, *manifest.executable_outputs)}
    before = _declared(manifest, PREPROCESS, letters)
    after = _declared(manifest, POSTPROCESS, letters)
    inputs = [spec.inputs, *(spec.at_variant(variant).inputs for variant in spec.variants)]
    outputs = spec.outputs
    for index, builtin in reversed(list(enumerate(before))):
        before[index] = builtin.fitted(inputs[1:])
        inputs = [before[index].tensors(tensors) for tensors in inputs]
    for index, builtin in enumerate(after):
        after[index] = builtin.fitted([outputs])
        outputs = after[index].tensors(outputs)
    hooks = Hooks(
        client_inputs=_client_tensors(manifest.client_inputs, inputs[0], "input", code=code),
        client_outputs=_client_tensors(manifest.client_outputs, outputs, "output", code=code),
        preprocess=tuple(map(_spec_of, before)),
        postprocess=tuple(map(_spec_of, after)),
        code=(PREPROCESS, POSTPROCESS) if code else (),
    )
    files = {**_files(directory, [*before, *after]), **prepared.files}
    if code:
        files = {**_own_files(directory, manifest.weights_file), **files}
    notes = [*prepared.notes, *_notes(manifest)]
    if code:
        check_code(directory / USER_CODE)
        notes.append(CODE_NOTE)
    prepared = Prepared(replace(spec, hooks=hooks), files, tuple(notes))
    batched = all(tensor.batch_axis == 0 for tensor in (*hooks.client_inputs, *hooks.client_outputs))
    processes = manifest.options.get(HOOK_PROCESSES)
    if processes is None and (batched or not spec.max_batch_size):
        return prepared
    return stages.split(prepared, processes or stages.DEFAULT_PROCESSES)


def _declared(manifest: Manifest, stage: str, letters: Mapping[str, str]) -> list[Builtin]:
    found = []
    for index, entry in enumerate(manifest.options.get(stage, ())):
        where = f"manifest 'nereid.{stage}[{index}]'"
        ((name, options),) = entry.items()
        options = _with_axes_counted({} if options is None else options, letters, where)
        try:
            builtin = builtins.builtin(BuiltinSpec(name, options))
        except RecordError as error:
            raise ManifestError(f"{where} {name}: {error}") from None
        except BundleError as error:
            raise ManifestError(f"{where}: {error}") from None
        if builtin.stage != stage:
            raise ManifestError(f"{where}: {name} belongs under {builtin.stage}")
        found.append(builtin)
    return found


def _with_axes_counted(options: Any, letters: Mapping[str, str], where: str) -> Any:
    """``options`` with a letter as ``axis`` replaced by where it is on the wire, counted from the slowest axis."""
    if not isinstance(options, Mapping) or not isinstance(axis := options.get("axis"), str):
        return options
    tensor = options.get("input", options.get("output"))
    wire = letters.get(tensor, "")[::-1] if isinstance(tensor, str) else ""
    if len(axis) != 1 or axis not in wire:
        raise ManifestError(
            f"{where}: axis {short_repr(axis)} is no letter of an executable tensor {short_repr(tensor)}; use one, or "
            "count on the wire"
        )
    return {**options, "axis": wire.index(axis)}


def _spec_of(builtin: Builtin) -> BuiltinSpec:
    options: dict[str, Any] = asdict(builtin)  # type: ignore[call-overload]
    return BuiltinSpec(builtin.name, {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()})


def _client_tensors(
    declared: Sequence[ManifestTensor], made: Sequence[TensorSpec], role: str, *, code: bool
) -> tuple[TensorSpec, ...]:
    """What clients see on one side: as declared, checked against what the built-ins need or make."""
    if not declared:
        return tuple(made)
    specs = tuple(tensor.spec() for tensor in declared)
    if code:  # what the functions of the Python file take and give shows when they run
        return specs
    known = {tensor.name: tensor for tensor in made}
    for tensor in specs:
        if tensor.name not in known:
            raise BundleError(
                f"client_{role}s has {tensor.name!r}, which no hook {'takes' if role == 'input' else 'makes'}; there "
                f"are {[*known]}"
            )
        _check_fits(tensor, known[tensor.name], role)
    if role == "input" and (missing := [name for name in known if name not in {t.name for t in specs}]):
        raise BundleError(f"client_inputs lacks {missing}, which the executable or a hook needs")
    return specs


def _check_fits(declared: TensorSpec, made: TensorSpec, role: str) -> None:
    same_rank = len(declared.shape) == len(made.shape)
    sizes = zip(declared.shape, made.shape, strict=False)
    fits = same_rank and all(VARIABLE in (want, got) or want == got for want, got in sizes)
    if declared.dtype != made.dtype or declared.batch_axis != made.batch_axis or not fits:
        raise BundleError(
            f"client_{role}s {declared.name!r} is {_text(declared)} (wire order), the executable and its hooks make it "
            f"{_text(made)}; correct the client spec or the hook's options"
        )


def _text(tensor: TensorSpec) -> str:
    batch = "" if tensor.batch_axis is None else f" with the batch at axis {tensor.batch_axis}"
    return f"{tensor.dtype}{list(tensor.shape)}{batch}"


def _files(directory: Path, used: Sequence[Builtin]) -> dict[str, Source]:
    """The files that built-ins read."""
    files: dict[str, Source] = {}
    for builtin in used:
        for name in builtin.files():
            if not name or Path(name).name != name or not (directory / name).is_file():
                raise BundleError(
                    f"{builtin.name}: {short_repr(name)} is no file of the bundle; put it beside the manifest"
                )
            files[name] = directory / name
        builtin.check(directory)
    return files


def _own_files(directory: Path, weights_file: str) -> dict[str, Source]:
    """What the Python file may read beside itself: all that is not the executable's."""
    origin = weights.read(directory / weights_file).origin
    taken = {weights_file, DEFAULT_WEIGHTS_FILE, *(() if origin is None else (origin.file,))}
    found = files_for_code(directory).items()
    return {name: source for name, source in found if name not in taken and not re.fullmatch(r"model\..*mlir", name)}


def _notes(manifest: Manifest) -> list[str]:
    if manifest.options.get(CLIENT_AXIS_ORDER) == "wire":
        return []
    executable = (*manifest.executable_inputs, *manifest.executable_outputs)
    if not any(t.batch_axis == 0 and len(t.letters) > 1 for t in executable):
        return []
    clients = (*manifest.client_inputs, *manifest.client_outputs)
    odd = [t.name for t in clients if len(t.letters) > 1 and t.batch_axis == len(t.letters) - 1]
    return [WIRE_ORDER.format(name) for name in odd]
