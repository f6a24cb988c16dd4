"""Putting an export in its place: written beside it, read back as ``nereid-convert`` does, proved, then swapped in."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

from converters import durable
from converters.prepared import Prepared
from converters.repository import check_name
from nereid_backend.errors import ExportError

PATCH_FILE = "working_tree.patch"

Proof = Callable[[Prepared], None]


def put(
    directory: Path,
    kind: str,
    marker: str,
    own_files: Callable[[Path], Collection[str]],
    fill: Callable[[Path], Prepared],
    *,
    force: bool,
    proof: Proof | None,
) -> Prepared:
    """Make ``directory``, whose name is the model's, of what ``fill`` writes into a fresh one and reads back from it.

    ``proof`` sees that before it is in place; when it or ``fill`` raises, ``directory`` stays as it was. ``force``
    replaces one of the same ``kind``, which holds ``marker`` and nothing but its ``own_files``. Raises BundleError
    subclasses.
    """
    # Not resolve(), which would follow a link at ``directory`` itself.
    directory = Path(os.path.abspath(directory))  # noqa: PTH100
    check_name(directory.name)
    try:
        _check_replaceable(directory, kind, marker, own_files, force=force)
        directory.parent.mkdir(parents=True, exist_ok=True)
        with durable.scratch(directory.parent, f".{directory.name}-export-") as scratch:
            fresh = Path(scratch) / directory.name
            fresh.mkdir()
            prepared = fill(fresh)
            if proof is not None:
                proof(prepared)
            durable.sync_directory(fresh)
            durable.swap_in(fresh, directory, replace=force)
            durable.sync_directory(directory.parent)
    except OSError as error:
        raise ExportError(
            f"cannot write {directory}: {error.strerror or error}; check space, permissions and the folder"
        ) from error
    return prepared


def _check_replaceable(
    directory: Path, kind: str, marker: str, own_files: Callable[[Path], Collection[str]], *, force: bool
) -> None:
    if not os.path.lexists(directory):
        return
    if not (directory / marker).is_file() or directory.is_symlink():
        raise ExportError(f"{directory} is not a {kind}; remove it yourself or choose another folder")
    if kept := sorted({path.name for path in directory.iterdir()} - set(own_files(directory))):
        raise ExportError(
            f"{directory} holds {', '.join(kept)}, which no export writes and a replacement would remove; move it away"
        )
    if not force:
        raise ExportError(f"{directory} exists; replace it with force=True (--force) or choose another folder")
