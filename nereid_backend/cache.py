"""Where this installation keeps what it can make again: the embedded Triton, run directories, compiled programs."""

from __future__ import annotations

import os
from pathlib import Path

from nereid_backend.errors import SettingsError

PRIVATE = 0o700


def cache_folder(*, writable: bool = True) -> Path:
    """``$NEREID_CACHE_DIR``, else ``$XDG_CACHE_HOME/nereid``, else ``~/.cache/nereid``; made with mode 0700.

    ``writable=False``: one that can only be read will do. Raises SettingsError when it cannot be made, belongs to
    another user or can be written by everyone.
    """
    if chosen := os.environ.get("NEREID_CACHE_DIR"):
        folder = Path(chosen).absolute()
    elif base := os.environ.get("XDG_CACHE_HOME"):
        folder = Path(base).absolute() / "nereid"
    else:
        folder = Path.home() / ".cache" / "nereid"
    try:
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise SettingsError(
            f"cache folder {folder} cannot be made ({error.strerror}); set NEREID_CACHE_DIR to a writable folder"
        ) from None
    # Programs are run from here: a folder others can write to would be other people's code.
    if status.st_uid != os.getuid():
        raise SettingsError(f"cache folder {folder} belongs to another user; set NEREID_CACHE_DIR to one of your own")
    if writable and not os.access(folder, os.W_OK | os.X_OK):
        raise SettingsError(f"cache folder {folder} is not writable; set NEREID_CACHE_DIR to a writable folder")
    if status.st_mode & 0o002:
        raise SettingsError(f"cache folder {folder} can be written by everyone; chmod o-w it or set NEREID_CACHE_DIR")
    return folder
