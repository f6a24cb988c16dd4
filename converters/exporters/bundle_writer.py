"""Writer of bundles: manifest, one program per batch size, weights in either layout."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from converters import bundle, durable
from converters import manifest as manifests
from converters import weights as weights_files
from converters.bundle import Array
from converters.exporters import placement
from converters.exporters.placement import PATCH_FILE, Proof
from converters.exporters.provenance import yaml_text
from converters.manifest import BATCH_LETTERS, DEFAULT_WEIGHTS_FILE, MANIFEST_FILE
from converters.prepared import Prepared
from nereid_backend.errors import ExportError
from nereid_backend.spec import TensorSpec

Layout = Literal["program", "legacy"]
"""How axes of weights are stored: ``program`` is format 2.1; ``legacy``, the Julia order, is read by 2.0, too."""

BATCH_LETTER, LETTERS = "n", "acdefghijklmopqrstuvwxyzACDEFGHIJKLMOPQRSTUVWXYZ"
_WRITTEN = re.compile(r"manifest\.yaml|model(\.v\d+)?(\.b\d+)?\.mlir|weights(\.T)?\.safetensors|working_tree\.patch")
_NO_TEXT: Mapping[str, str] = MappingProxyType({})


def write_bundle(
    directory: Path,
    *,
    executable_inputs: Sequence[TensorSpec],
    executable_outputs: Sequence[TensorSpec],
    modules: Mapping[int | None, bytes],
    weights: Mapping[str, Array] = MappingProxyType({}),
    axes: Mapping[str, str] = _NO_TEXT,
    layout: Layout = "program",
    provenance: Mapping[str, Any] = MappingProxyType({}),
    patch: bytes = b"",
    force: bool = False,
    proof: Proof | None = None,
) -> Prepared:
    """Write a bundle, read it back as ``nereid-convert`` does, and put it at ``directory``, whose name is the model's.

    Tensors are in wire order; ``axes`` names their axes, in wire order, by one letter each ("nhwc"). ``modules`` holds
    StableHLO programs by batch size, a lone one under None: inputs first, then ``weights`` in their order, which are
    given in program order. ``patch`` makes the code of ``provenance``. ``proof`` sees the bundle before it is in place;
    when it or any check raises, ``directory`` stays as it was. ``force`` replaces a bundle. Raises BundleError
    subclasses.
    """

    def fill(fresh: Path) -> Prepared:
        text = _manifest_text(fresh.name, executable_inputs, executable_outputs, modules, axes, layout, provenance)
        durable.write_text(fresh / MANIFEST_FILE, text)
        for size, module in modules.items():
            durable.write_bytes(fresh / ("model.mlir" if size is None else f"model.b{size}.mlir"), module)
        if patch:
            durable.write_bytes(fresh / PATCH_FILE, patch)
        _write_weights(fresh / DEFAULT_WEIGHTS_FILE, weights, layout)
        return bundle.read(fresh, fresh.name, "cpu")

    return placement.put(directory, "bundle", MANIFEST_FILE, _own_files, fill, force=force, proof=proof)


def _own_files(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if _WRITTEN.fullmatch(path.name)]


def _write_weights(path: Path, weights: Mapping[str, Array], layout: Layout) -> None:
    metadata = {"argument_order": json.dumps(list(weights))}
    arrays = {name: np.asarray(array) for name, array in weights.items()}
    if "__metadata__" in arrays:
        raise ExportError("a weight is called '__metadata__', which safetensors keeps for itself; rename it")
    if layout == "legacy":
        arrays = {name: array.T for name, array in arrays.items()}
    else:
        metadata[weights_files.AXIS_ORDER] = weights_files.PROGRAM_ORDER
    weights_files.write(path, arrays, metadata)


def _manifest_text(
    name: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    modules: Mapping[int | None, bytes],
    axes: Mapping[str, str],
    layout: Layout,
    provenance: Mapping[str, Any],
) -> str:
    """manifest.yaml, checked against the format's rules. Raises ManifestError, ExportError."""
    if layout not in ("program", "legacy"):
        raise ExportError(f"layout is {layout!r}, expected 'program' or 'legacy'")
    if unknown := sorted(set(axes) - {tensor.name for tensor in (*inputs, *outputs)}):
        known = ", ".join(tensor.name for tensor in (*inputs, *outputs))
        raise ExportError(f"axes name {unknown}, which are no inputs or outputs of the model; it has {known}")
    manifest: dict[str, Any] = {
        "format_version": "2.1" if layout == "program" else "2.0",
        "name": name,
        "executable_inputs": [_entry(tensor, axes.get(tensor.name)) for tensor in inputs],
        "executable_outputs": [_entry(tensor, axes.get(tensor.name)) for tensor in outputs],
    }
    if sizes := sorted(size for size in modules if size is not None):
        manifest["batching"] = {"compiled_batch_sizes": sizes}
    if provenance:
        manifest["provenance"] = dict(provenance)
    manifests.parse(manifest, has_hook=False)
    return yaml_text(manifest)


def _entry(tensor: TensorSpec, axes: str | None) -> dict[str, Any]:
    """A tensor as the manifest has it: letters in Julia order, the fastest axis first."""
    letters = _default_letters(tensor) if axes is None else axes
    marked = batch_axis(letters)
    if len(letters) != len(tensor.shape) or marked != tensor.batch_axis:
        raise ExportError(
            f"axes of {tensor.name!r} are {letters!r}, its shape is {list(tensor.shape)} with batch axis "
            f"{tensor.batch_axis}; give one letter per axis in wire order, n for the batch"
        )
    sizes = zip(letters, tensor.shape, strict=True)
    dims = {letter: size for letter, size in sizes if letter not in BATCH_LETTERS}
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": letters[::-1],
        "dims": {letter: dims[letter] for letter in letters[::-1] if letter in dims},
    }


def batch_axis(axes: str) -> int | None:
    """The position of the batch letter among the letters of a tensor's axes, None without one."""
    return next((index for index, letter in enumerate(axes) if letter in BATCH_LETTERS), None)


def _default_letters(tensor: TensorSpec) -> str:
    if len(tensor.shape) > len(LETTERS):
        raise ExportError(f"{tensor.name!r} has {len(tensor.shape)} axes, the format has letters for {len(LETTERS)}")
    free = iter(LETTERS)
    letters = [BATCH_LETTER if axis == tensor.batch_axis else next(free) for axis in reversed(range(len(tensor.shape)))]
    return "".join(reversed(letters))
