"""Compiled programs on disk, found by content: an engine's key names everything a program depends on, never a model.

A renamed model or a restart therefore finds its programs, and deleting the folder costs no more than compiling again.
Whatever is wrong with the disk is logged and done without.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
import time
from pathlib import Path

from nereid_backend.cache import PRIVATE, cache_folder
from nereid_backend.errors import SettingsError

_LOG = logging.getLogger("nereid.cache")

FOLDER = "programs"
SWITCH = "NEREID_PROGRAM_CACHE"
MAX_BYTES = 1 << 30
"""A program takes 10 to 300 kB for the CPU and some MB for a GPU."""

_DIGEST_BYTES = hashlib.sha256().digest_size
_UNFINISHED = ".writing-"
_UNFINISHED_AGE_S = 3600.0
_X86_FACTS = ("vendor_id", "cpu family", "model", "model name", "flags")
_ARM_FACTS = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features")


class ProgramCache:
    """A private folder of entries, each one file: the SHA-256 of key and content, then the content."""

    def __init__(self, folder: Path | None, max_bytes: int = MAX_BYTES) -> None:
        """``folder`` None: nothing is found and nothing kept."""
        self._folder, self._max_bytes = folder, max_bytes

    @classmethod
    def open(cls) -> ProgramCache:
        """The cache of this user, without effect where there is no folder that only this user can write to.

        ``NEREID_PROGRAM_CACHE=off`` turns it off.
        """
        if os.environ.get(SWITCH) == "off":
            return cls(None)
        try:
            folder = cache_folder(writable=False) / FOLDER
            folder.mkdir(mode=PRIVATE, exist_ok=True)
            status = folder.lstat()
        except (SettingsError, OSError) as error:
            _LOG.warning("compiled programs are not cached: %s", error)
            return cls(None)
        # Loading a program is running it: nobody else may have put it there.
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            _LOG.warning(
                "compiled programs are not cached: %s must be a folder that belongs to this user and that no one else "
                "can write to; chmod 700 or remove it",
                folder,
            )
            return cls(None)
        return cls(folder)

    def read(self, key: str) -> bytes | None:
        """The content under ``key``; None when there is none or it is damaged (then it is removed)."""
        if self._folder is None:
            return None
        path = self._folder / key
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _LOG.warning("a cached program cannot be read (%s); compiling it again", error)
            return None
        digest, content = raw[:_DIGEST_BYTES], raw[_DIGEST_BYTES:]
        if digest != _digest(key, content):
            _LOG.warning("the cached program %s is damaged; compiling it again", path)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the oldest used go first
        return content

    def write(self, key: str, content: bytes) -> None:
        """Keep ``content``, atomically; what cannot be kept is logged. The least recently used make room."""
        if self._folder is None or len(content) > self._max_bytes:
            return
        unfinished = None
        try:
            descriptor, unfinished = tempfile.mkstemp(prefix=_UNFINISHED, dir=self._folder)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_digest(key, content))
                file.write(content)
            Path(unfinished).replace(self._folder / key)
            self._make_room()
        except OSError as error:
            _LOG.warning("a compiled program is not cached (%s); the next start compiles it again", error)
            if unfinished is not None:
                with contextlib.suppress(OSError):
                    Path(unfinished).unlink()

    def _make_room(self) -> None:
        if self._folder is None:
            return
        entries = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process makes room, too
                status = path.stat()
                if path.name.startswith(_UNFINISHED) and time.time() - status.st_mtime > _UNFINISHED_AGE_S:
                    path.unlink()  # its writer was killed
                else:
                    entries.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()


def processor_features() -> list[str]:
    """What tells kinds of processors apart: the lines of /proc/cpuinfo that name the first one's model and features."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return []
    return [line for line in first.splitlines() if line.partition(":")[0].strip() in (*_X86_FACTS, *_ARM_FACTS)]
