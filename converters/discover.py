"""Finding models under a folder, told apart by content, and the order in which they can be converted."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from converters import manifest as manifests
from converters import triton_models
from converters.contract import CONTRACT_FILE
from converters.folder import detectors, half_made
from converters.kinds import FILE_KINDS, kind_of
from converters.manifest import MANIFEST_FILE
from nereid_backend.errors import ManifestError

_LOG = logging.getLogger("nereid.convert")


def is_bundle(path: Path) -> bool:
    """Whether ``path`` is meant as a bundle."""
    return path.is_dir() and _has(path, MANIFEST_FILE)


def _has(path: Path, name: str) -> bool:
    """Whether ``path`` has an entry ``name``, be it a broken link, which is a mistake to be told."""
    return (path / name).exists() or (path / name).is_symlink()


def is_triton_model(path: Path) -> bool:
    """Whether ``path`` is a model of a Triton repository, and neither a bundle nor a nereid folder."""
    if not path.is_dir() or _has(path, MANIFEST_FILE) or _has(path, CONTRACT_FILE):
        return False
    return triton_models.is_triton_model(path)


def is_model(path: Path) -> bool:
    """Whether ``path`` is meant as a model: a bundle, a nereid folder, a Triton model, a file that stands alone.

    A folder with a contract and nothing to run counts: it is a mistake to be told, not something to pass over.
    """
    if path.is_file():
        return any(kind.stands_alone and kind.matches(path) for kind in FILE_KINDS)
    marked = _has(path, MANIFEST_FILE) or _has(path, CONTRACT_FILE)
    return marked or any(matches(path) for matches, _ in detectors().values()) or is_triton_model(path)


def find(path: Path) -> list[Path]:
    """``path`` itself when it is a model, else the models directly below it, by name.

    Hidden entries are skipped, and with a warning those that may not be looked into.
    """
    if is_model(path):
        return [path]
    if not path.is_dir():
        return []
    return sorted(entry for entry in path.iterdir() if not entry.name.startswith(".") and _is_readable_model(entry))


def _is_readable_model(entry: Path) -> bool:
    try:
        return is_model(entry)
    except PermissionError:  # the lost+found of a mounted volume, a folder of somebody else
        _LOG.warning("%s is passed over: it may not be read", entry)
        return False


def passed_over(path: Path) -> list[tuple[Path, str]]:
    """What looks like a model in the folder ``path`` and yet is not found there, and why; nothing in a model."""
    if not path.is_dir() or is_model(path):
        return []
    reasons = {}
    for entry in sorted(path.iterdir()):
        if entry.name.startswith(".") or not os.access(entry, os.R_OK) or is_model(entry):
            continue
        if entry.is_dir():
            reasons[entry] = half_made(entry)
        elif (kind := kind_of(entry)) is not None:
            reasons[entry] = f"a {kind.name} file is converted by its own name only"
    return [(entry, reason) for entry, reason in reasons.items() if reason is not None]


def calls_of(source: Path) -> tuple[str, ...] | None:
    """The models that a meta model or an ensemble of Triton calls; None for every other model, also a broken one."""
    if not (source / MANIFEST_FILE).is_file():
        return triton_models.calls_of(source) if is_triton_model(source) else None
    try:
        manifest = manifests.read(source / MANIFEST_FILE, has_hook=True)
    except ManifestError:
        return None
    return manifest.calls if manifest.kind == "meta" else None
