"""Writer of manifest.yaml: tensors in wire order become letters in Julia order, sizes of variants ``input_shapes``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from converters import manifest as manifests
from converters.exporters.client_side import ClientSide
from converters.exporters.provenance import yaml_text
from converters.manifest import BATCH_LETTERS
from nereid_backend.errors import ExportError
from nereid_backend.spec import POSTPROCESS, PREPROCESS, TensorSpec, Variant, variable_axes

Layout = Literal["program", "legacy"]
"""How axes of weights are stored: ``program`` is format 2.1; ``legacy``, the Julia order, is read by 2.0, too."""

BATCH_LETTER = "n"
_LETTERS = "acdefghijklmopqrstuvwxyzACDEFGHIJKLMOPQRSTUVWXYZ"
_VARIABLE_LETTERS = _LETTERS[_LETTERS.index("s") :] + _LETTERS[: _LETTERS.index("s")]


def manifest_text(
    name: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    batch_sizes: Sequence[int],
    variants: Sequence[Variant],
    axes: Mapping[str, str],
    layout: Layout,
    client: ClientSide,
    files: Mapping[str, str],
    provenance: Mapping[str, Any],
) -> str:
    """manifest.yaml, checked against the format's rules. Raises ManifestError, ExportError.

    ``axes`` are letters in wire order. ``variants`` hold the sizes of the variable input axes, in input and wire order.
    ``files`` are the digests of the client's files.
    """
    if layout not in ("program", "legacy"):
        raise ExportError(f"layout is {layout!r}, expected 'program' or 'legacy'")
    tensors = (*inputs, *outputs, *client.inputs, *client.outputs)
    if unknown := sorted(set(axes) - {tensor.name for tensor in tensors}):
        known = ", ".join(tensor.name for tensor in tensors)
        raise ExportError(f"axes name {unknown}, which are no inputs or outputs of the model; it has {known}")
    letters, shapes = _with_variable_axes(inputs, axes, variants)
    manifest: dict[str, Any] = {
        "format_version": "2.1" if layout == "program" else "2.0",
        "name": name,
        "executable_inputs": [_entry(tensor, letters[tensor.name]) for tensor in inputs],
    }
    for key, others in {
        "executable_outputs": outputs,
        "client_inputs": client.inputs,
        "client_outputs": client.outputs,
    }.items():
        if others or key == "executable_outputs":
            manifest[key] = [_entry(tensor, axes.get(tensor.name) or _letters(tensor, {})) for tensor in others]
    if shapes:
        manifest["input_shapes"] = shapes
    if batch_sizes:
        manifest["batching"] = {"compiled_batch_sizes": sorted(batch_sizes)}
    stages = {PREPROCESS: client.preprocess, POSTPROCESS: client.postprocess}
    ours: dict[str, Any] = {stage: [dict(each) for each in declared] for stage, declared in stages.items() if declared}
    if client.hook_processes is not None:
        ours[manifests.HOOK_PROCESSES] = client.hook_processes
    if files:
        ours[manifests.EXPORTED_FILES] = dict(files)
    if ours:
        manifest["nereid"] = ours
    if provenance:
        manifest["provenance"] = dict(provenance)
    manifests.parse(manifest, has_hook=client.has_hooks)
    return yaml_text(manifest)


def batch_axis(axes: str) -> int | None:
    """The position of the batch letter among the letters of a tensor's axes, None without one."""
    return next((index for index, letter in enumerate(axes) if letter in BATCH_LETTERS), None)


def _with_variable_axes(
    inputs: Sequence[TensorSpec], axes: Mapping[str, str], variants: Sequence[Variant]
) -> tuple[dict[str, str], list[dict[str, int]]]:
    """The letters of every input in wire order, and ``input_shapes``: the size of each variable letter by variant.

    Axes that have the same sizes in every variant share a letter, unless ``axes`` says otherwise.
    """
    places = variable_axes(inputs)
    if not all(len(variant) == len(places) for variant in variants):
        raise ExportError(
            f"variants are {list(variants)}, the inputs have {len(places)} variable axes; give each a size"
        )
    sizes = dict(zip(places, zip(*variants, strict=True), strict=True)) if variants else {}
    columns: dict[str, tuple[int, ...]] = {}
    letters: dict[str, str] = {}
    for given in (True, False):  # what the user named first, so that the rest can share it
        for index, tensor in enumerate(inputs):
            own = {axis: column for (place, axis), column in sizes.items() if place == index}
            if (tensor.name in axes) != given:
                continue
            if given:
                letters[tensor.name] = axes[tensor.name]
                _check_letters(tensor, axes[tensor.name])
                chosen = {axis: axes[tensor.name][axis] for axis in own}
            else:
                chosen = _shared(own, columns)
                letters[tensor.name] = _letters(tensor, chosen)
            for axis, letter in chosen.items():
                if columns.setdefault(letter, own[axis]) != own[axis]:
                    raise ExportError(
                        f"axes call two variable axes {letter!r} whose sizes differ, {list(columns[letter])} and "
                        f"{list(own[axis])} by variant; use two letters"
                    )
    return letters, [{letter: column[number] for letter, column in columns.items()} for number in range(len(variants))]


def _shared(own: Mapping[int, tuple[int, ...]], columns: Mapping[str, tuple[int, ...]]) -> dict[int, str]:
    """A letter for each variable axis of one tensor: that of another tensor's axis of these sizes, or a new one."""
    chosen: dict[int, str] = {}
    for axis, column in own.items():
        known = [letter for letter, other in columns.items() if other == column]
        free = [letter for letter in _VARIABLE_LETTERS if letter not in columns]
        chosen[axis] = next(letter for letter in (*known, *free) if letter not in chosen.values())
    return chosen


def _letters(tensor: TensorSpec, variable: Mapping[int, str]) -> str:
    """A letter for each axis in wire order, by the alphabet from the fastest one; ``variable`` has some already."""
    if len(tensor.shape) > len(_LETTERS):
        raise ExportError(f"{tensor.name!r} has {len(tensor.shape)} axes, the format has letters for {len(_LETTERS)}")
    free = (letter for letter in _LETTERS if letter not in variable.values())
    letters = [
        BATCH_LETTER if axis == tensor.batch_axis else variable.get(axis) or next(free)
        for axis in reversed(range(len(tensor.shape)))
    ]
    return "".join(reversed(letters))


def _check_letters(tensor: TensorSpec, letters: str) -> None:
    if len(letters) != len(tensor.shape) or batch_axis(letters) != tensor.batch_axis:
        raise ExportError(
            f"axes of {tensor.name!r} are {letters!r}, its shape is {list(tensor.shape)} with batch axis "
            f"{tensor.batch_axis}; give one letter per axis in wire order, n for the batch"
        )


def _entry(tensor: TensorSpec, letters: str) -> dict[str, Any]:
    """A tensor as the manifest has it: letters in Julia order, the fastest axis first."""
    _check_letters(tensor, letters)
    dims = {letter: size for letter, size in zip(letters, tensor.shape, strict=True) if letter not in BATCH_LETTERS}
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": letters[::-1],
        "dims": {letter: dims[letter] for letter in letters[::-1] if letter in dims},
    }
