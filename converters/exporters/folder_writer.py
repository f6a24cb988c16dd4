"""Writer of nereid folders: a model file of any kind, its contract, and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from converters import contract as contracts
from converters import durable, folder
from converters.contract import CONTRACT_FILE, Contract
from converters.exporters import placement
from converters.exporters.placement import PATCH_FILE, Proof
from converters.exporters.provenance import yaml_text
from converters.external_data import external_data
from converters.kinds import Opening
from converters.prepared import Prepared, Source, place
from nereid_backend.errors import SignatureError

PROVENANCE_FILE = "provenance.yaml"
MODEL_STEM = "model"


def write_folder(
    directory: Path,
    contract: Contract,
    files: Mapping[str, Source],
    *,
    allow_code: bool = False,
    provenance: Mapping[str, Any] = MappingProxyType({}),
    patch: bytes = b"",
    force: bool = False,
    proof: Proof | None = None,
) -> Prepared:
    """Write a nereid folder, read it back as ``nereid-convert`` does, and put it at ``directory``, named as the model.

    ``files`` are the model file, called ``model`` with the suffix of its kind, and what it needs beside it, by their
    names in the folder. ``allow_code``: the file is of a kind whose reader runs code from it. ``patch`` makes the code
    of ``provenance``. ``proof`` sees the folder before it is in place; when it or any check raises, ``directory`` stays
    as it was. ``force`` replaces a folder. Raises BundleError subclasses, EngineMissing.
    """

    def fill(fresh: Path) -> Prepared:
        durable.write_text(fresh / CONTRACT_FILE, contracts.text_of(contract))
        for name, source in files.items():
            place(source, fresh / name, link=False)
        if provenance:
            durable.write_text(fresh / PROVENANCE_FILE, yaml_text(provenance))
        if patch:
            durable.write_bytes(fresh / PATCH_FILE, patch)
        return folder.read(fresh, fresh.name, Opening("cpu", allow_code), None)

    return placement.put(directory, "nereid folder", CONTRACT_FILE, _own_files, fill, force=force, proof=proof)


def _own_files(directory: Path) -> set[str]:
    """What an export has written there, by name."""
    own = {CONTRACT_FILE, PROVENANCE_FILE, PATCH_FILE}
    for path in directory.iterdir():
        if path.is_file() and path.name.startswith(f"{MODEL_STEM}."):
            own.add(path.name)
            if path.suffix == ".onnx":
                own |= _beside(path)
    return own


def _beside(model: Path) -> set[str]:
    try:
        return {Path(name).parts[0] for name in external_data(model)}
    except SignatureError:  # damaged since; then nothing beside it is known to be ours
        return set()
