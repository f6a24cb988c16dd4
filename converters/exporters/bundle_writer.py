"""Writer of bundles: manifest, one program per batch size, weights in either layout."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from converters import bundle, durable
from converters import manifest as manifests
from converters import weights as weights_files
from converters.bundle import Array
from converters.exporters import placement
from converters.exporters.client_side import PLAIN, ClientSide, digests
from converters.exporters.manifest_writer import Layout, manifest_text
from converters.exporters.placement import PATCH_FILE, Proof
from converters.exporters.portable_artifact import NEWER, for_older_readers
from converters.manifest import DEFAULT_WEIGHTS_FILE, MANIFEST_FILE
from converters.prepared import Prepared
from nereid_backend.errors import ExportError, ManifestError
from nereid_backend.spec import TensorSpec, Variant

_WRITTEN = re.compile(r"manifest\.yaml|model(\.v\d+)?(\.b\d+)?\.mlir|weights(\.T)?\.safetensors|working_tree\.patch")
_NO_TEXT: Mapping[str, str] = MappingProxyType({})

Modules = Mapping[int | None, bytes]
"""StableHLO programs by batch size, a lone one under None."""


def write_bundle(
    directory: Path,
    *,
    executable_inputs: Sequence[TensorSpec],
    executable_outputs: Sequence[TensorSpec],
    modules: Modules | Mapping[Variant, Modules],
    weights: Mapping[str, Array] = MappingProxyType({}),
    axes: Mapping[str, str] = _NO_TEXT,
    layout: Layout = "program",
    client: ClientSide = PLAIN,
    provenance: Mapping[str, Any] = MappingProxyType({}),
    patch: bytes = b"",
    force: bool = False,
    proof: Proof | None = None,
) -> Prepared:
    """Write a bundle, read it back as ``nereid-convert`` does, and put it at ``directory``, whose name is the model's.

    Tensors are in wire order; ``axes`` names their axes, in wire order, by one letter each ("nhwc"). Programs take the
    inputs, then ``weights`` in their order, which are given in program order. ``client`` is what its clients see
    instead. With variable input axes ``modules`` are
    those of each variant, by the sizes of these axes in input and wire order. ``patch`` makes the code of
    ``provenance``. ``proof`` sees the bundle before it is in place; when it or any check raises, ``directory`` stays as
    it was. ``force`` replaces a bundle. Raises BundleError subclasses.
    """
    client.check(_WRITTEN)
    programs = _by_variant(modules)
    sizes = next(iter(programs.values()))

    def fill(fresh: Path) -> Prepared:
        notes: set[str] = set()
        files = client.write_files(fresh)
        text = manifest_text(
            fresh.name,
            executable_inputs,
            executable_outputs,
            batch_sizes=[size for size in sizes if size is not None],
            variants=[variant for variant in programs if variant],
            axes=axes,
            layout=layout,
            client=client,
            files=files,
            provenance=provenance,
        )
        durable.write_text(fresh / MANIFEST_FILE, text)
        for number, (variant, of_variant) in enumerate(programs.items()):
            stem = f"model.v{number}" if variant else "model"
            for size, module in of_variant.items():
                file = f"{stem}.mlir" if size is None else f"{stem}.b{size}.mlir"
                older = for_older_readers(module)
                durable.write_bytes(fresh / file, module if older is None else older)
                if older is None:
                    notes.add(NEWER)
        if patch:
            durable.write_bytes(fresh / PATCH_FILE, patch)
        _write_weights(fresh / DEFAULT_WEIGHTS_FILE, weights, layout)
        prepared = bundle.read(fresh, fresh.name, "cpu")
        return replace(prepared, notes=(*prepared.notes, *notes))

    return placement.put(directory, "bundle", MANIFEST_FILE, _own_files, fill, force=force, proof=proof)


def _by_variant(modules: Modules | Mapping[Variant, Modules]) -> dict[Variant, Modules]:
    found = {
        key: programs for key, programs in modules.items() if isinstance(key, tuple) and not isinstance(programs, bytes)
    }
    lone = {key: module for key, module in modules.items() if not isinstance(key, tuple) and isinstance(module, bytes)}
    if len({frozenset(programs) for programs in found.values()}) > 1 or (found and lone):
        raise ExportError(f"modules are for {[*modules]} with other batch sizes in each; give every variant the same")
    return found or {(): lone}


def _own_files(directory: Path) -> list[str]:
    written = [path.name for path in directory.iterdir() if _WRITTEN.fullmatch(path.name)]
    try:
        recorded = manifests.read(directory / MANIFEST_FILE, has_hook=True).options.get(manifests.EXPORTED_FILES, {})
    except ManifestError:  # damaged since; then nothing beside it is known to be ours
        recorded = {}
    return [*written, *(name for name, digest in digests(directory, recorded).items() if digest == recorded[name])]


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
