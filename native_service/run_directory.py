"""The folder of one run of ``nereid serve``, and the cleaning up after runs that could not do it themselves.

``<cache>/run/<id>/`` holds ``lease`` (locked by the supervisor for its whole life), ``triton_models/`` and
``staging/``. Every process of the run carries ``NEREID_RUN=<that folder>`` in its environment, and every shared-memory
region starts with the run's prefix. A free lease therefore proves that the supervisor is gone, whatever way it went,
and both marks say what is left of it. A small process waits for that and clears (remains.py); when it was killed, too,
the next start does.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import subprocess
from pathlib import Path

from native_service import remains
from native_service.remains import LEASE, MARK
from native_service.triton.stubs import SHARED_MEMORY
from nereid_backend import locks
from nereid_backend.cache import PRIVATE
from nereid_backend.pulse import PULSE_FOLDER

_LOG = logging.getLogger("nereid.run")

CONTROL_SOCKET = "control.sock"
"""Where the commands of the same user reach the supervisor; see control_channel.py."""
_LONGEST_SOCKET_PATH = 107  # sun_path holds 108 with the terminating zero
_CLEARED_S = 5.0


class RunDirectory:
    """One run's folder, leased to this process from ``open`` until ``close``."""

    def __init__(self, path: Path, lease: int) -> None:
        self.path = path
        self._lease: int | None = lease
        self._folder = os.open(path, os.O_PATH | os.O_DIRECTORY)
        self._afterwards = remains.clear_afterwards(path, SHARED_MEMORY / self.shared_memory_prefix)

    @classmethod
    def open(cls, cache_folder: Path) -> RunDirectory:
        """Sweep what dead runs left, then make a new folder below ``cache_folder``."""
        runs = cache_folder / "run"
        runs.mkdir(mode=PRIVATE, exist_ok=True)
        # Under one lock, or a sweep could take a folder whose owner has not locked its lease yet.
        with locks.locked(cache_folder / "run.lock"):
            sweep(runs)
            path = runs / f"{os.getpid()}-{secrets.token_hex(4)}"
            path.mkdir(mode=PRIVATE)
            lease = locks.try_lock(path / LEASE)
            if lease is None:
                raise RuntimeError(f"the lease of the new folder {path} is taken")
        for name in ("triton_models", "staging", PULSE_FOLDER):
            (path / name).mkdir()
        return cls(path, lease)

    @property
    def repository(self) -> Path:
        """Triton's model repository of this run."""
        return self.path / "triton_models"

    @property
    def staging(self) -> Path:
        """Where models are converted before they take their place in the repository."""
        return self.path / "staging"

    @property
    def pulses(self) -> Path:
        """Where the models' processes tell how they are."""
        return self.path / PULSE_FOLDER

    @property
    def short_path(self) -> str:
        """The folder by a name of a few characters, for this user's processes: a socket's path may have 107."""
        return f"/proc/{os.getpid()}/fd/{self._folder}"

    def socket_path(self, name: str) -> str:
        """Where to put a Unix socket: ``name`` in the folder, by the short path when the long one would not fit."""
        path = str(self.path / name)
        return path if len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH else f"{self.short_path}/{name}"

    @property
    def shared_memory_prefix(self) -> str:
        return _prefix(self.path)

    @property
    def environment(self) -> dict[str, str]:
        """What marks a process as one of this run."""
        return {MARK: str(self.path)}

    def close(self) -> None:
        """Kill what is left of the run, remove its shared memory and its folder. A second call does nothing."""
        if self._lease is None:
            return
        _clear(self.path)
        os.close(self._folder)
        os.close(self._lease)
        self._lease = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._afterwards.wait(_CLEARED_S)


def runs_below(cache_folder: Path) -> list[Path]:
    """The folders of all runs, dead ones too."""
    runs = cache_folder / "run"
    return sorted(path for path in runs.iterdir() if path.is_dir()) if runs.is_dir() else []


def leftovers(cache_folder: Path) -> tuple[list[str], list[str]]:
    """The names of dead runs below ``cache_folder``, and of regions of shared memory whose run is dead or gone."""
    with locks.locked(cache_folder / "run.lock"):  # nobody is just about to take a lease
        dead: list[Path] = []
        living: list[Path] = []
        for run in runs_below(cache_folder):
            try:
                lease = locks.try_lock(run / LEASE)
            except FileNotFoundError:  # it has just ended
                continue
            (living if lease is None else dead).append(run)
            if lease is not None:
                os.close(lease)
    ours = SHARED_MEMORY.glob(f"nereid-{_of_cache(cache_folder)}-*")
    prefixes = tuple(map(_prefix, living))
    return [run.name for run in dead], [region.name for region in ours if not region.name.startswith(prefixes)]


def sweep(runs: Path) -> None:
    """Clear every run below ``runs`` whose lease nobody holds."""
    for path in sorted(runs.iterdir()):
        if not path.is_dir():
            continue
        try:
            lease = locks.try_lock(path / LEASE)
        except FileNotFoundError:  # a run that ends removes its folder by itself, without our lock
            continue
        if lease is None:
            continue
        try:
            _LOG.info("clearing what run %s left", path.name)
            _clear(path)
        finally:
            os.close(lease)


def _prefix(run: Path) -> str:
    # The folder of the cache is part of the name because several caches may share one /dev/shm.
    return f"nereid-{_of_cache(run.parent.parent)}-{run.name}-"


def _of_cache(folder: Path) -> str:
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]


def _clear(run: Path) -> None:
    if staying := remains.clear(run, SHARED_MEMORY / _prefix(run)):
        _LOG.warning("processes %s of run %s do not die", staying, run.name)
