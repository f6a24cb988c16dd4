"""Tells what is in a folder of models, each entry as it was when it last stood still.

The folder itself is looked at, not the reports of changes: those only say when. So nothing is lost when reports are,
and a folder that gives none (a network file system, links to elsewhere) is followed too, a little later.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Iterator, Mapping
from functools import cache
from itertools import chain, islice
from pathlib import Path

_LOG = logging.getLogger("nereid.watch")

# An entry stands still when it looks the same twice, so much apart.
_SETTLE_S = 1.0
# How often the folder is looked at when nothing is reported.
_LOOK_MS = 5_000
# How long more reports are waited for after the first.
_DEBOUNCE_MS = 200
# Of one entry: no model has so many, but a link may lead to a disk full of them.
_MOST_FILES = 10_000

Fingerprint = tuple[tuple[str, int, int, int], ...]
"""Of each file: its path inside the entry, size in bytes, time of change in ns, inode."""


async def settled(folder: Path, *, as_one: bool = False) -> AsyncGenerator[Mapping[str, Fingerprint], None]:
    """The entries of ``folder`` by name, whenever they may have changed; ``as_one`` is the folder as the only entry.

    An entry in motion is given as it stood before, or not at all when it is new; one that is gone twice is left out.
    Nothing is told while the folder cannot be read.
    """
    before: Mapping[str, Fingerprint] = {}
    view: dict[str, Fingerprint] = {}
    is_readable = True
    async for _ in _ticks(folder):
        while True:
            try:
                now = await asyncio.to_thread(scan, folder, as_one=as_one)
            except OSError as error:
                if is_readable:  # once, not at every look
                    _LOG.warning("%s cannot be read (%s); what is served stays", folder, error.strerror)
                is_readable = False
                break
            is_readable = True
            still = {name for name in now if before.get(name) == now[name]}
            view = {name: view[name] for name in view if name in now or name in before}
            view |= {name: now[name] for name in still}
            moving = before.keys() != now.keys() or len(still) < len(now)
            before = now
            yield view
            if not moving:
                break
            await asyncio.sleep(_SETTLE_S)


def scan(folder: Path, *, as_one: bool = False) -> dict[str, Fingerprint]:
    """The visible entries of ``folder``, or itself. Raises OSError when it cannot be listed."""
    if as_one:
        return {folder.name: fingerprint(folder)} if folder.exists() else {}
    return {entry.name: fingerprint(Path(entry)) for entry in os.scandir(folder) if not _is_hidden(entry.name)}


def fingerprint(path: Path) -> Fingerprint:
    """What tells one state of a file or a directory from the next; empty when it is not there.

    Of a directory only the first ten thousand files and folders are looked at.
    """
    if not path.is_dir():
        return tuple(_facts(path, path.name))
    files = [*islice(_files(path), _MOST_FILES + 1)]
    if len(files) > _MOST_FILES:
        _tell_size(path)
    return tuple(
        sorted(chain.from_iterable(_facts(file, str(file.relative_to(path))) for file in files[:_MOST_FILES] if file))
    )


@cache
def _tell_size(path: Path) -> None:
    """Once for each entry."""
    _LOG.warning("%s holds more than %d files and folders; changes of others go unnoticed", path.name, _MOST_FILES)


def _files(path: Path) -> Iterator[Path | None]:
    """The visible files below ``path``; None for each folder, which takes as long to look at."""
    for root, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not _is_hidden(name))
        yield None
        yield from (Path(root, name) for name in sorted(files) if not _is_hidden(name))


def _facts(file: Path, name: str) -> list[tuple[str, int, int, int]]:
    try:
        status = file.stat()
    except OSError:  # gone meanwhile, or a link to nowhere
        return []
    return [(name, status.st_size, status.st_mtime_ns, status.st_ino)]


def _is_hidden(name: str) -> bool:
    # Hidden names are where tools put what is not finished, and caches.
    return name.startswith(".") or name == "__pycache__"


async def _ticks(folder: Path) -> AsyncGenerator[None, None]:
    """When to look: after a report of a change, and every few seconds."""
    from watchfiles import awatch  # it brings an event loop's worth of imports that only --watch needs

    try:
        async for _ in awatch(
            folder, watch_filter=None, debounce=_DEBOUNCE_MS, rust_timeout=_LOOK_MS, yield_on_timeout=True
        ):
            yield
    except (OSError, RuntimeError) as error:  # too many watches, a folder that went
        _LOG.warning("changes of %s are not reported (%s); it is looked at every %g s", folder, error, _LOOK_MS / 1e3)
    while True:
        await asyncio.sleep(_LOOK_MS / 1e3)
        yield
