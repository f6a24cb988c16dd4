"""The report of a conversion: an entry per model, for people, and for the next run to go on from.

It is written anew after every model, so that a run which is stopped is taken up where it ended. A model is done when
its source, the options and what stands in the output folder are still what the entry was written for.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from converters import durable
from converters.external_data import external_data
from converters.repository import CONFIG_FILE, VERSION
from nereid_backend.errors import BundleError, RecordError, ReportError
from nereid_backend.records import record
from nereid_backend.spec import FORMAT_VERSION, SPEC_FILE

CONVERTING, CONVERTED, REFUSED = "converting", "converted", "refused"
_FORMAT = 1
_LARGEST_BYTES = 256 * 1024 * 1024
_MOST_FILES = 100_000


@dataclass(frozen=True, slots=True)
class Entry:
    """What was done with one model.

    ``output`` is its folder in the repository. ``taken_over`` and ``changed`` say what of its declaration stays and
    what does not; ``refused`` is why it was not converted. ``source_digest`` and ``output_digest`` tell whether either
    has changed since. ``owns``: what stands in ``output``, if anything, is of a run with this report.
    """

    name: str
    source: str
    output: str
    status: str
    source_digest: str
    output_digest: str = ""
    taken_over: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    refused: str = ""
    next_step: str = ""
    owns: bool = False


class Report:
    """The entries by the folder that each is about, in a file that is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        """Read the report of an earlier run, if there is one. Raises ReportError."""
        self._path = path
        self._entries = {entry.output: entry for entry in _read(path)}

    def is_done(self, entry: Entry) -> bool:
        """Whether a run before has made what ``entry`` plans, and it is still there."""
        known = self._entries.get(entry.output)
        return (
            known is not None
            and (known.status, known.source, known.source_digest) == (CONVERTED, entry.source, entry.source_digest)
            and known.output_digest == output_digest(Path(entry.output))
        )

    def is_ours(self, entry: Entry) -> bool:
        """Whether what stands in the place of ``entry`` was made of the same source by a run with this report."""
        known = self._entries.get(entry.output)
        return known is not None and known.source == entry.source and known.owns

    def begin(self, entry: Entry) -> None:
        """Note that ``entry`` is about to be made, so that a run which is killed knows its own work again."""
        owns = self.is_ours(entry) or not os.path.lexists(entry.output)
        self._entries[entry.output] = replace(entry, status=CONVERTING, owns=owns)

    def note(self, entry: Entry) -> None:
        """Note what became of a model that was begun."""
        owned = self._entries[entry.output].owns and os.path.lexists(entry.output)
        self._entries[entry.output] = replace(entry, owns=entry.status == CONVERTED or owned)

    def save(self) -> None:
        """Write the file. Raises ReportError."""
        content = {"nereid_conversion_report": _FORMAT, "models": [asdict(entry) for entry in self._entries.values()]}
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            durable.write_text(fresh, json.dumps(content, indent=2) + "\n")
            fresh.replace(self._path)
            durable.sync_directory(self._path.absolute().parent)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise ReportError(f"cannot write the report {self._path} ({error.strerror}); name another file") from error


def _read(path: Path) -> list[Entry]:
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_LARGEST_BYTES))
        if not isinstance(content, dict) or content.get("nereid_conversion_report") != _FORMAT:
            raise ValueError
        return [record(Entry, entry) for entry in content["models"]]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ReportError(f"cannot read the report {path} ({error.strerror}); name another file") from None
    except (ValueError, KeyError, TypeError, RecursionError, RecordError):
        raise ReportError(
            f"{path} is not a report that this version of nereid convert wrote; name another file, or remove it"
        ) from None


# What tells whether something has changed.


def source_digest(source: Path, options: Mapping[str, Any]) -> str:
    """Of the names, sizes and times of a source's files, and of all else that a conversion depends on."""
    digest = hashlib.sha256(json.dumps([_release(), FORMAT_VERSION, dict(options)], sort_keys=True).encode())
    for name, status in _files(source):
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def output_digest(directory: Path) -> str:
    """Of what a conversion has written; "" when there is nothing. Artifacts by name and size, the rest by content."""
    texts = (CONFIG_FILE, f"{VERSION}/{SPEC_FILE}")
    digest = hashlib.sha256()
    try:
        for name, status in _files(directory):
            digest.update(f"{name}\0{status.st_size}\0".encode(errors="surrogateescape"))
        for name in texts:
            digest.update((directory / name).read_bytes())
    except OSError:
        return ""
    return digest.hexdigest()


def _release() -> str:
    try:
        return version("nereid-triton")
    except PackageNotFoundError:
        return ""


def _files(source: Path) -> Iterator[tuple[str, os.stat_result]]:
    """The files of a model, by their names in it; those behind links, too. Broken links are left out."""
    if not source.is_dir():
        yield from _file_and_data(source)
        return
    seen: set[Path] = set()
    count = 0
    for parent, directories, names in os.walk(source, followlinks=True):
        place = Path(parent)
        if place.resolve() in seen:
            directories.clear()
            continue
        seen.add(place.resolve())
        directories.sort()
        for name in sorted(names):
            count += 1
            if count > _MOST_FILES:
                return
            path = place / name
            if path.exists():
                yield path.relative_to(source).as_posix(), path.stat()


def _file_and_data(source: Path) -> Iterator[tuple[str, os.stat_result]]:
    """A file and, of an ONNX model, the files it keeps its large tensors in."""
    if not source.is_file():
        return
    yield source.name, source.stat()
    if source.suffix == ".onnx":
        try:
            data = external_data(source)
        except BundleError:  # told when it is converted
            return
        yield from ((name, path.stat()) for name, path in sorted(data.items()))
