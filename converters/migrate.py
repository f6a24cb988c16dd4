"""Migration of a bundle's weights from the legacy layout to program order, inside the bundle.

``copy`` writes ``weights.T.safetensors`` and names it in the manifest; servers that do not know ``weights_file`` go on
reading the original. ``replace`` then sets format_version 2.1, puts the copy in the original's place and removes the
extra name. After every single step the bundle loads with the same numbers; a migration that was killed is taken up
where it ended. Every tensor is proved equal by two readers that share no code.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from converters import durable, manifest_text, weights
from converters import manifest as manifests
from converters.manifest import DEFAULT_WEIGHTS_FILE, MANIFEST_FILE
from converters.weights import Origin
from nereid_backend import locks, safetensors
from nereid_backend.errors import ManifestError, WeightsError

MIGRATED_VERSION = "2.1"
CACHE_FOLDER, LOCK = ".cache", "migrate.lock"
_UNFINISHED = ".nereid-migrate-"

Array = np.ndarray[Any, Any]


def migrate(directory: Path, *, replace: bool) -> str:
    """Migrate one bundle and say what was done. Raises BundleError subclasses; then the bundle loads as before."""
    try:
        manifest = manifests.read(directory / MANIFEST_FILE, has_hook=True)
        if manifest.kind == "meta":
            return "a meta model has no weights"
        (directory / CACHE_FOLDER).mkdir(exist_ok=True)
        with locks.locked(directory / CACHE_FOLDER / LOCK):
            for unfinished in directory.glob(f"{_UNFINISHED}*"):
                unfinished.unlink()
            return _migrate_locked(directory, replace)
    except OSError as error:
        raise WeightsError(
            f"{directory.name}: cannot be migrated ({error.strerror or error}); it loads as before"
        ) from error


def _migrate_locked(directory: Path, replace: bool) -> str:
    # Read again: another process may have held the lock until now.
    named = manifests.read(directory / MANIFEST_FILE, has_hook=True).weights_file
    found = weights.read(directory / named)
    origin = found.origin
    if not found.legacy and (origin is None or origin.file == named):
        _remove_extra_name(directory, named, origin)
        return f"{named} is in program order already"
    original, copy = (named, _copy_name(named)) if origin is None else (origin.file, named)
    is_there = (directory / original).exists()
    if is_there and weights.read(directory / original).legacy:
        _write_copy(directory, original, copy)
        _set_in_manifest(directory, "weights_file", copy)
        is_there = False  # in program order
    if not is_there:
        if not replace:
            return f"{copy} holds the weights of {original} in program order, and the manifest names it"
        _set_in_manifest(directory, "format_version", MIGRATED_VERSION)
        _put_in_place(directory, original, copy)
    _set_in_manifest(directory, "format_version", MIGRATED_VERSION)
    _set_in_manifest(directory, "weights_file", None if original == DEFAULT_WEIGHTS_FILE else original)
    (directory / copy).unlink()
    durable.sync_directory(directory)
    return f"{original} is now in program order"


def _copy_name(original: str) -> str:
    path = Path(original)
    return f"{path.stem}.T{path.suffix}"


def _write_copy(directory: Path, original: str, copy: str) -> None:
    """Make ``copy`` a proved copy of ``original``, unless it is one already."""
    target = directory / copy
    with safetensors.opened(directory / original) as source:
        origin = _origin(original, source)
        if target.exists():
            if (known := weights.read(target).origin) is None or known.file != original:
                raise WeightsError(f"{copy} is there but is no copy of {original}; rename or remove it first")
            if known.sha256 == origin.sha256:
                with contextlib.suppress(WeightsError):  # a copy that is not right is written again
                    prove(source, target)
                    return
        with _unfinished(directory, copy) as fresh:
            metadata = {**source.header.metadata, weights.ORIGIN_KEY: origin.to_json()}
            weights.write_reversed(fresh, source, metadata)
            _like(fresh, source.descriptor)
            prove(source, fresh)
            if not origin.is_as_recorded((directory / original).stat()):
                raise WeightsError(f"{original} changed while it was migrated; try again")
            fresh.replace(target)
    durable.sync_directory(directory)


def _put_in_place(directory: Path, original: str, copy: str) -> None:
    """Give the file of ``copy`` the name of ``original`` as well, proving it before and after."""
    with contextlib.ExitStack() as stack:
        source = before = None
        if (directory / original).exists():
            # Open to the end: its content outlives its name.
            source = stack.enter_context(safetensors.opened(directory / original))
            before = _state(os.fstat(source.descriptor))
            prove(source, directory / copy)
        fresh = stack.enter_context(_unfinished(directory, original))
        try:
            os.link(directory / copy, fresh)
        except OSError:  # a file system without hard links
            shutil.copyfile(directory / copy, fresh)
            with fresh.open("rb") as file:
                _like(fresh, file.fileno())
                os.fsync(file.fileno())
        if before is not None and before != _state((directory / original).stat()):
            raise WeightsError(f"{original} changed while it was migrated; try again")
        fresh.replace(directory / original)
        durable.sync_directory(directory)
        if source is not None:
            try:
                prove(source, directory / original)
            except WeightsError:
                _put_back(directory, original, source)
                raise


def _state(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _put_back(directory: Path, original: str, source: safetensors.OpenFile) -> None:
    with _unfinished(directory, original) as fresh:
        shutil.copyfile(_by_descriptor(source), fresh)
        with fresh.open("rb") as file:
            _like(fresh, source.descriptor)
            os.fsync(file.fileno())
        fresh.replace(directory / original)
    _set_in_manifest(directory, "weights_file", None if original == DEFAULT_WEIGHTS_FILE else original)


def _remove_extra_name(directory: Path, named: str, origin: Origin | None) -> None:
    """What a replacement that was killed at its very end left: the copy's own name."""
    extra = directory / _copy_name(named)
    if origin is not None and extra.exists() and weights.read(extra).origin == origin:
        extra.unlink()
        durable.sync_directory(directory)


def _set_in_manifest(directory: Path, key: str, value: str | None) -> None:
    path = directory / MANIFEST_FILE
    try:
        before = path.read_bytes().decode()
    except UnicodeDecodeError:
        raise ManifestError(f"{MANIFEST_FILE}: is not UTF-8 text; save it as such") from None
    text = manifest_text.with_value(before, key, value)
    if text == before:
        return
    with _unfinished(directory, MANIFEST_FILE) as fresh:
        durable.write_text(fresh, text)
        fresh.chmod(stat.S_IMODE(path.stat().st_mode))
        manifests.read(fresh, has_hook=True)
        fresh.replace(path)
    durable.sync_directory(directory)


@contextlib.contextmanager
def _unfinished(directory: Path, name: str) -> Iterator[Path]:
    """A temporary name in ``directory``; what still has it at the end is removed. The lock makes it ours alone."""
    path = directory / f"{_UNFINISHED}{name}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _like(path: Path, descriptor: int) -> None:
    path.chmod(stat.S_IMODE(os.fstat(descriptor).st_mode))


def _origin(name: str, source: safetensors.OpenFile) -> Origin:
    status = os.fstat(source.descriptor)
    return Origin(name, status.st_size, status.st_mtime_ns, weights.digest(Path(_by_descriptor(source))))


def _by_descriptor(source: safetensors.OpenFile) -> str:
    """A path to an open file, also when its name is gone."""
    return f"/proc/self/fd/{source.descriptor}"


# The proof.


def prove(source: safetensors.OpenFile, copy: Path) -> None:
    """Raise WeightsError unless ``copy``, read from disk, is the legacy ``source`` in program order, bit by bit."""
    with safetensors.opened(copy) as file:
        os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        _compare_headers(source.header, file.header, copy.name)
        for name in source.header.entries:
            _compare(copy.name, name, source.tensor(name).T, file.tensor(name))
        ours, theirs = _Plain(_by_descriptor(source), legacy=True), _Plain(_by_descriptor(file), legacy=False)
        if sorted(ours.entries) != sorted(theirs.entries):
            raise WeightsError(f"{copy.name}: holds other tensors than the original; it is not used")
        for name in ours.entries:
            _compare(copy.name, name, ours.tensor(name), theirs.tensor(name))


def _compare_headers(original: safetensors.Header, copy: safetensors.Header, name: str) -> None:
    metadata = {key: text for key, text in copy.metadata.items() if key not in (weights.AXIS_ORDER, weights.ORIGIN_KEY)}
    if metadata != original.metadata or copy.metadata.get(weights.AXIS_ORDER) != weights.PROGRAM_ORDER:
        raise WeightsError(f"{name}: has other metadata than the original; it is not used")
    wanted = {tensor: (e.dtype, e.end - e.start, e.shape[::-1]) for tensor, e in original.entries.items()}
    found = {tensor: (e.dtype, e.end - e.start, e.shape) for tensor, e in copy.entries.items()}
    if wanted != found:
        raise WeightsError(f"{name}: has other tensors than the original; it is not used")


def _compare(file: str, name: str, wanted: Array, found: Array) -> None:
    bits = np.dtype(f"u{wanted.itemsize}")  # NaNs are equal to themselves, and 0 is not -0
    if wanted.shape != found.shape or not np.array_equal(wanted.view(bits), found.view(bits)):
        raise WeightsError(f"{file}: tensor {name!r} is not the original's; it is not used")


class _Plain:
    """The second reader: knows no dtypes, only widths, and transposes by counting legacy axes the other way round."""

    def __init__(self, path: str, *, legacy: bool) -> None:
        self._path, self._legacy = path, legacy
        with Path(path).open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            self.entries: dict[str, Any] = json.loads(file.read(length))
        self._data_start = 8 + length
        self.entries.pop("__metadata__", None)

    def tensor(self, name: str) -> Array:
        start, end = self.entries[name]["data_offsets"]
        shape = self.entries[name]["shape"]
        count = int(np.prod(shape, dtype=np.int64))
        bits = np.dtype(f"u{(end - start) // count if count else 1}")
        flat = np.fromfile(self._path, bits, count, offset=self._data_start + start)
        # The bytes of a Julia array, slowest legacy axis last, are its program-order elements in Fortran order.
        return flat.reshape(shape[::-1], order="F") if self._legacy else flat.reshape(shape)
