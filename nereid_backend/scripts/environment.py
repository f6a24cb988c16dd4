"""The virtual environments of script folders: built once, outside the folder, found again by content.

``<cache>/environments/<key>/`` is an ordinary venv. The key is a hash over what decides its content: this Python and
the text of ``requirements.txt`` with the files it names. A file ``complete`` is written last, so that a killed build is
begun again and never used; a lock beside it lets one process build while others wait. A process that uses an
environment shares a lock on ``complete`` until it ends; what nobody has used for a month is removed by the next build.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from nereid_backend import locks, progress
from nereid_backend.cache import PRIVATE, cache_folder
from nereid_backend.errors import BundleError

REQUIREMENTS_FILE = "requirements.txt"

_LOG = logging.getLogger("nereid.environments")
_COMPLETE = "complete"
_KEPT_UNUSED_S = 30 * 24 * 3600.0
_LAST_LINES = 40
_NAMES_A_FILE = re.compile(r"^(?:-r|-c|--requirement|--constraint)(?:\s+|=)?(.+)")
_COMMENT = re.compile(r"(?:^|\s)#.*")  # a # within a name belongs to it
_LARGEST_FILE = 1024 * 1024
# What a program may know of the server's environment. Anything else may be a secret; who wants more passed on names it.
_PASSED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("NEREID_RUN", "NEREID_SCRATCH_DIR"),
)
_PASSED_PREFIXES = ("LC_", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "CUDA_", "NVIDIA_")
PASS_VARIABLE = "NEREID_PASS_ENVIRONMENT"  # noqa: S105 - the name of a variable


# The locks of the environments this process uses, held until it ends.
_in_use: dict[Path, int] = {}


def interpreter() -> Path:
    """The Python of this process; inside Triton's stub ``sys.executable`` cannot be relied on."""
    path = Path(sys.prefix) / "bin" / "python3"
    return path if path.exists() else Path(sys.executable)


def child_variables(server: Mapping[str, str], python: Path | None) -> dict[str, str]:
    """The environment of a program: what is harmless of the server's, with ``python``'s folder first in PATH."""
    named = {name.strip() for name in server.get(PASS_VARIABLE, "").split(",")}
    passed = {
        name: value
        for name, value in server.items()
        if name in _PASSED or name in named or name.startswith(_PASSED_PREFIXES)
    }
    if python is not None:
        passed["PATH"] = f"{python.parent}:{passed.get('PATH', os.defpath)}"
    return passed


def check(folder: Path) -> None:
    """Raise BundleError unless the requirements of ``folder`` can be read; nothing is built."""
    _requirements(folder, REQUIREMENTS_FILE, set())


def names_packages(folder: Path) -> bool:
    """Whether ``folder`` has requirements that name anything. Raises BundleError when they cannot be read."""
    return (folder / REQUIREMENTS_FILE).exists() and _are_any(_requirements(folder, REQUIREMENTS_FILE, set()))


def prepare(folder: Path) -> Path:
    """The interpreter of the environment that ``folder`` asks for, after building it when it is not there.

    The environment stays for as long as this process lives.

    Progress goes to the log ``nereid.environments``. Raises BundleError with pip's reason.
    """
    content = _requirements(folder, REQUIREMENTS_FILE, set())
    environments = cache_folder() / "environments"
    environments.mkdir(mode=PRIVATE, exist_ok=True)
    path = environments / _key(content)
    python = path / "bin" / "python"
    if _use(path):
        return python
    lock_file = path.with_suffix(".lock")
    lock = locks.try_lock(lock_file)
    if lock is None:
        _LOG.info("waiting for another process that builds the environment %s", path.name)
        lock = locks.wait_lock(lock_file)
    try:
        if not _use(path):
            _build(path, python, folder, content)
            _use(path)
    finally:
        os.close(lock)
    _remove_unused(environments)
    return python


def _use(path: Path) -> bool:
    """Whether the environment is complete; then it counts as used now, and stays until this process ends."""
    complete = path / _COMPLETE
    lock = locks.try_share(complete)
    if lock is None:
        return False
    if (earlier := _in_use.pop(path, None)) is not None:  # of one that was removed by hand, perhaps
        os.close(earlier)
    _in_use[path] = lock
    with suppress(OSError):  # a folder that can only be read
        os.utime(complete)
    return True


def _remove_unused(environments: Path) -> None:
    """Remove what has not been used for a month, and what a killed build left; never what a process uses."""
    for path in environments.iterdir():
        if not path.is_dir():
            continue
        try:
            unfinished = not (path / _COMPLETE).exists()
            last_use = (path if unfinished else path / _COMPLETE).stat().st_mtime
            if time.time() - last_use < _KEPT_UNUSED_S:
                continue
            builder = locks.try_lock(path.with_suffix(".lock"))
            if builder is None:
                continue
            try:
                _remove(path, unfinished=unfinished)
            finally:
                os.close(builder)
        except OSError as error:
            _LOG.warning("the environment %s, unused for a month, cannot be removed (%s)", path.name, error.strerror)


def _remove(path: Path, *, unfinished: bool) -> None:
    user = None if unfinished else locks.try_lock(path / _COMPLETE)
    if user is None and not unfinished:
        return
    try:
        # First what makes it an environment: a removal that is interrupted leaves an unfinished one.
        (path / _COMPLETE).unlink(missing_ok=True)
    finally:
        if user is not None:
            os.close(user)
    shutil.rmtree(path)
    _LOG.info("removed the environment %s, unused for a month", path.name)


def _build(path: Path, python: Path, folder: Path, content: Sequence[str]) -> None:
    shutil.rmtree(path, ignore_errors=True)
    needed = _are_any(content)
    bare = () if needed else ("--without-pip",)
    with progress.told(_LOG, f"building the environment {path.name}"):
        _run([str(interpreter()), "-m", "venv", *bare, str(path)], folder, "a virtual environment cannot be made")
        if needed:
            pip = [str(python), "-m", "pip", "install", "--no-input", "--progress-bar=off"]
            pip += ["--disable-pip-version-check", "-r", REQUIREMENTS_FILE]
            _run(pip, folder, f"{REQUIREMENTS_FILE} cannot be installed")
    with (path / _COMPLETE).open("w") as file:
        os.fsync(file.fileno())
    _LOG.info("the environment %s is ready", path.name)


def _run(command: Sequence[str], folder: Path, problem: str) -> None:
    """Run a step of the build, its lines to the log. Raises BundleError with the last that tells something."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    last: deque[str] = deque(maxlen=_LAST_LINES)
    with subprocess.Popen(
        command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        if process.stdout is not None:
            for raw in process.stdout:
                line = raw.decode(errors="replace").rstrip()
                last.append(line)
                _LOG.info("%s", line)
        code = process.wait()
    if code:
        told = [line for line in last if line.startswith("ERROR:")] or [line for line in last if line] or ["no reason"]
        raise BundleError(
            f"{problem} (exit code {code}): {told[0].removeprefix('ERROR:').strip()}; correct {REQUIREMENTS_FILE}, or, "
            "where no package index can be reached, set PIP_NO_INDEX=1 and PIP_FIND_LINKS to a folder of wheels"
        )


def _are_any(content: Sequence[str]) -> bool:
    return any(line and not line.startswith("#") for line in content)


def _key(content: Sequence[str]) -> str:
    python = (sys.implementation.cache_tag, sysconfig.get_platform(), os.path.realpath(sys.base_prefix))
    return hashlib.sha256(repr((python, list(content))).encode()).hexdigest()[:32]


def _first_word(words: str, line: str, name: str) -> str:
    try:
        return next(iter(shlex.split(_COMMENT.sub("", words))), "")
    except ValueError as error:
        raise BundleError(f"{name}: {line!r} cannot be read ({error}); correct the quotes") from None


def _requirements(folder: Path, name: str, seen: set[Path]) -> list[str]:
    """The lines of a requirements file, those of the files it names in their place. Raises BundleError."""
    path = (folder / name).resolve()
    if path in seen:
        return []
    seen.add(path)
    lines: list[str] = []
    for line in _text(path, name).splitlines():
        line = line.strip()
        lines.append(line)
        if named := _NAMES_A_FILE.match(line):
            other = _first_word(named[1], line, name)
            if "://" not in other:
                lines += _requirements(folder, str(Path(name).parent / other), seen)
        elif line.startswith(("-e", "--editable", ".", "/", "file:")):
            raise BundleError(
                f"{name}: {line!r} is a project on this machine, whose changes nobody would notice; put its modules "
                "beside main.py, or name a wheel by its version and its folder with --find-links"
            )
    return lines


def _text(path: Path, name: str) -> str:
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise BundleError(f"{name} has more than {_LARGEST_FILE} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BundleError(
            f"{name} cannot be read ({error.strerror}); a script folder needs one, empty when main.py needs nothing"
        ) from None
    except UnicodeDecodeError:
        raise BundleError(f"{name} is not UTF-8 text") from None
