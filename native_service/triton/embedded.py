"""Where tritonserver comes from: named, installed on this machine, or the embedded one.

The embedded one is the server inside the wheel ``nvidia-pytriton`` 0.7.0: tritonserver 2.51 with the python
backend, Apache-2.0 and BSD-3-Clause. Only its files are used, from a folder of the cache: the package itself would
pin numpy below 2 for everybody. Version and hash are pinned; it is fetched once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from native_service.children import launch
from nereid_backend import locks, progress
from nereid_backend.cache import PRIVATE, cache_folder
from nereid_backend.errors import TritonUnavailable

_LOG = logging.getLogger("nereid.triton")

WHEEL = "nvidia-pytriton"
WHEEL_VERSION = "0.7.0"
WHEEL_SHA256 = "21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df"
TRITON_VERSION = "2.51.0"

_WANTED = ("pytriton/tritonserver/", "nvidia_pytriton.libs/")
_PROGRAMS = ("tritonserver", "triton_python_backend_stub")
_CONTAINER_ROOT = Path("/opt/tritonserver")
_LOCK_POLL_S = 0.2
# The time-out is pip's per connection, in seconds: without an index the user should know soon.
_PIP_OPTIONS = (
    *("--no-deps", "--require-hashes", "--only-binary=:all:"),
    *("--disable-pip-version-check", "--no-input", "--quiet", "--timeout", "20", "--retries", "1"),
)


@dataclass(frozen=True, slots=True)
class TritonInstall:
    """A tritonserver that can be started. ``version`` is "unknown" for one we did not bring."""

    server: Path
    version: str
    embedded: bool
    backend_directory: Path | None = None
    """Holds ``python/``; None leaves the server's own default."""
    library_paths: tuple[Path, ...] = ()
    cache_directory: Path | None = None
    """Holds ``local/libtritoncache_local.so``; None leaves the server's own default."""

    @property
    def stub(self) -> Path | None:
        """The stub of this interpreter's minor version, for the embedded server."""
        return None if self.backend_directory is None else self.backend_directory / "python" / _PROGRAMS[1]


async def find(explicit: Path | None = None) -> TritonInstall:
    """The server to use; fetches the embedded one when nothing else is there. Raises TritonUnavailable."""
    return locate(explicit) or describe(await _fetched())


def locate(explicit: Path | None = None) -> TritonInstall | None:
    """The server to use if it is on this machine. Raises TritonUnavailable."""
    if explicit is not None:
        if not (explicit.is_file() and os.access(explicit, os.X_OK)):
            raise TritonUnavailable(f"--tritonserver {explicit} is not an executable file")
        return _installed(explicit)
    on_path = shutil.which("tritonserver")
    in_container = _CONTAINER_ROOT / "bin" / "tritonserver"
    if on_path is not None:
        return _installed(Path(on_path))
    if os.access(in_container, os.X_OK):
        return _installed(in_container)
    fetched = _folder()
    return describe(fetched) if fetched.is_dir() else None


def _installed(server: Path) -> TritonInstall:
    root = server.resolve().parent.parent
    if root.name == "tritonserver" and root.parent.name == "pytriton":
        # Somebody named the server of an unpacked wheel: it needs the same care as ours.
        return describe(root.parent.parent)
    backends, caches = root / "backends", root / "caches"
    told = root / "TRITON_VERSION"  # in NVIDIA's containers
    return TritonInstall(
        server=server,
        version=told.read_text().strip() if told.is_file() else "unknown",
        embedded=False,
        backend_directory=backends if (backends / "python").is_dir() else None,
        cache_directory=caches if caches.is_dir() else None,
    )


def describe(unpacked: Path) -> TritonInstall:
    """The embedded server whose wheel files lie in ``unpacked``, with a backend folder for this interpreter."""
    root = unpacked / "pytriton" / "tritonserver"
    return TritonInstall(
        server=root / "bin" / "tritonserver",
        version=TRITON_VERSION,
        embedded=True,
        backend_directory=_backend_directory(root),
        library_paths=(unpacked / "nvidia_pytriton.libs",),
        cache_directory=root / "caches",
    )


def _backend_directory(root: Path) -> Path:
    """``backends-3.X/python`` with this interpreter's stub beside the backend's library.

    Triton looks for the stub next to ``libtriton_python.so``, so each minor version gets a folder of its own. The
    library finds its own ones relative to where it lies: the new folder is a sibling of the original.
    """
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    target = root / f"backends-{minor}"
    stub = root / "python_backend_stubs" / minor / _PROGRAMS[1]
    if (target / "python" / _PROGRAMS[1]).exists() or not stub.exists():
        return target  # without a stub the preflight says what to do
    with tempfile.TemporaryDirectory(prefix=f".backends-{minor}-", dir=root) as temporary:
        python = Path(temporary) / "python"
        shutil.copytree(root / "backends" / "python", python, copy_function=_link)
        _link(str(stub), str(python / _PROGRAMS[1]))
        staged = Path(temporary) / "ready"
        staged.mkdir()
        python.rename(staged / "python")
        try:
            staged.rename(target)
        except OSError:
            if not (target / "python" / _PROGRAMS[1]).exists():  # another process made the same folder first
                raise
    return target


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def _folder() -> Path:
    """Where the wheel's files are once they have been fetched."""
    return cache_folder() / "triton" / f"{WHEEL}-{WHEEL_VERSION}-{WHEEL_SHA256[:12]}"


async def _fetched() -> Path:
    """The folder with the wheel's files, downloaded and unpacked once for all processes of this user."""
    folder = cache_folder() / "triton"
    try:
        folder.mkdir(mode=PRIVATE, exist_ok=True)
    except OSError as error:
        raise TritonUnavailable(
            f"{folder} cannot be made ({error.strerror}); remove it or set NEREID_CACHE_DIR"
        ) from None
    target = _folder()
    if target.is_dir():
        return target
    descriptor = await _wait_for_lock(folder / "fetch.lock")
    try:
        if not target.is_dir():
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary:
                wheel = await _download(Path(temporary))
                staged = Path(temporary) / "staged"
                await asyncio.to_thread(_unpack, wheel, staged)
                staged.rename(target)
    finally:
        os.close(descriptor)
    return target


async def _wait_for_lock(path: Path) -> int:
    told = False
    while (descriptor := locks.try_lock(path)) is None:
        if not told:
            _LOG.info("another process is fetching tritonserver; waiting for it")
            told = True
        await asyncio.sleep(_LOCK_POLL_S)
    return descriptor


async def _download(folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{WHEEL}=={WHEEL_VERSION} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    pip = await asyncio.create_subprocess_exec(
        *launch.tied([sys.executable, "-P", "-m", "pip", "download", *_PIP_OPTIONS]),
        *("--dest", str(folder), "-r", str(requirements)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        what = f"fetching tritonserver {TRITON_VERSION} (55 MB, once) from the package index"
        with progress.told(_LOG, what):
            output, _ = await pip.communicate()
    finally:
        if pip.returncode is None:
            pip.kill()
            await pip.wait()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise TritonUnavailable(
            f"tritonserver is not on this machine and pip could not fetch {WHEEL}=={WHEEL_VERSION}"
            f" ({_reason(output.decode(errors='replace'))}); connect to a package index once, install pip, or name a"
            " server with --tritonserver PATH"
        )
    return wheels[0]


def _reason(output: str) -> str:
    """The last line of pip's output that states an error, without its prefix."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no output"])[-1][:200]


def _unpack(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.filename.startswith(_WANTED) and not member.is_dir():
                path = Path(archive.extract(member, target))
                # zipfile drops the mode bits; pip would have restored them.
                path.chmod(0o755 if path.name in _PROGRAMS else 0o644)
    if not (target / "pytriton" / "tritonserver" / "bin" / "tritonserver").is_file():
        raise TritonUnavailable(f"{WHEEL}=={WHEEL_VERSION} holds no tritonserver; name one with --tritonserver PATH")
