"""What serving needs from this machine, checked before anything is started; `nereid doctor` runs the same checks.

A stub that cannot start hangs a model load for ever on 2.51, so every reason known for that is found here and
told with its fix. Servers that came with the machine are trusted to fit it.
"""

from __future__ import annotations

import logging
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from native_service.settings import Address, Limits
from native_service.triton.embedded import TRITON_VERSION, TritonInstall
from native_service.triton.stubs import SHARED_MEMORY
from nereid_backend.errors import SettingsError, TritonUnavailable

_LOG = logging.getLogger("nereid.preflight")

OK, WARNING, PROBLEM = "ok", "warning", "problem"

_OLDEST_GLIBC = (2, 35)
_PYTHONS = ((3, 11), (3, 13))
_INSTEAD = "or name another server with --tritonserver PATH"
# A request and its answer lie in the shared memory of the model's process, which grows in steps.
_COPIES_OF_A_REQUEST = 3
_FEWEST_DESCRIPTORS = 4096
_LEAST_DISK_BYTES, _ENOUGH_DISK_BYTES = 256 << 20, 2 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. ``level``: OK; WARNING, it works but for what ``text`` says; PROBLEM, it does not."""

    check: str
    level: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.text}; {self.fix}" if self.fix else self.text


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts the checks look at; separate from them so that tests can describe other machines."""

    system: str
    architecture: str
    glibc: tuple[int, ...]
    python: tuple[int, int]
    implementation: str
    libpython: Path | None
    """The shared library of this interpreter; None when it was built without one or the file is not there."""


def this_machine() -> Machine:
    """The facts about the running interpreter."""
    name, version = platform.libc_ver()
    parts = version.split(".") if name == "glibc" else []
    return Machine(
        system=platform.system(),
        architecture=platform.machine(),
        glibc=tuple(int(part) for part in parts if part.isdigit()),
        python=(sys.version_info.major, sys.version_info.minor),
        implementation=platform.python_implementation(),
        libpython=libpython(),
    )


def libpython() -> Path | None:
    """The shared libpython of this interpreter, by its soname (``libpython3.11.so.1.0``)."""
    soname, folder = sysconfig.get_config_var("INSTSONAME"), sysconfig.get_config_var("LIBDIR")
    if not sysconfig.get_config_var("Py_ENABLE_SHARED") or not soname or not folder:
        return None
    # Distributions put it below the multiarch folder; relocated interpreters beside their own prefix.
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    candidates = (Path(folder), Path(folder, multiarch), Path(sys.base_prefix, "lib"))
    return next((found / soname for found in candidates if (found / soname).is_file()), None)


def library_path(install: TritonInstall) -> str:
    """LD_LIBRARY_PATH for the server and its stubs; what the user had set stays behind ours."""
    shared = libpython()
    folders = [str(path) for path in install.library_paths]
    if install.embedded and shared is not None:
        folders.append(str(shared.parent))
    inherited = os.environ.get("LD_LIBRARY_PATH")
    return ":".join([*folders, inherited] if inherited else folders)


def check(install: TritonInstall, limits: Limits, cache: Path, machine: Machine | None = None) -> None:
    """Log what is only half right here. Raises TritonUnavailable with one line per reason why it cannot serve."""
    problems = []
    for finding in (*of_interpreter(install, machine), *of_host(limits, cache)):
        if finding.level == PROBLEM:
            problems.append(str(finding))
        elif finding.level == WARNING:
            _LOG.warning("%s", finding)
    if problems:
        raise TritonUnavailable("\n".join(problems))


def of_interpreter(install: TritonInstall | None, machine: Machine | None = None) -> Iterator[Finding]:
    """Whether ``install`` runs on this machine, with this Python. None: the embedded one, once it is fetched."""
    if install is not None and not install.embedded:
        return
    machine = this_machine() if machine is None else machine
    what = f"the embedded tritonserver {TRITON_VERSION}"
    here = f"{machine.architecture} {machine.system}"
    if machine.system != "Linux" or machine.architecture != "x86_64":
        yield Finding(
            "machine", PROBLEM, f"{what} runs on x86-64 Linux, this is {here}", f"use a container, {_INSTEAD}"
        )
        return
    yield Finding("machine", OK, here)
    glibc = ".".join(map(str, machine.glibc)) or "none"
    if machine.glibc < _OLDEST_GLIBC:
        fix = f"use a newer distribution, {_INSTEAD}"
        yield Finding("glibc", PROBLEM, f"{what} needs glibc 2.35 or newer, found {glibc}", fix)
    else:
        yield Finding("glibc", OK, glibc)
    yield from _of_python(what, install, machine)


def _of_python(what: str, install: TritonInstall | None, machine: Machine) -> Iterator[Finding]:
    version = ".".join(map(str, machine.python))
    python = f"{machine.implementation} {version}"
    stub = None if install is None else install.stub
    if machine.implementation != "CPython" or not _PYTHONS[0] <= machine.python <= _PYTHONS[1]:
        text = f"{what} runs models on CPython 3.11 to 3.13, this is {python}"
        yield Finding("python", PROBLEM, text, f"use one of those, {_INSTEAD}")
        return
    if install is not None and (stub is None or not stub.is_file()):
        text = f"{what} has no stub for Python {version}"
        yield Finding("python", PROBLEM, text, f"use Python 3.11 to 3.13, {_INSTEAD}")
        return
    yield Finding("python", OK, python)
    if machine.libpython is None:
        fix = f"use a Python built with --enable-shared (the distribution's own, or uv's and conda's), {_INSTEAD}"
        text = f"{what} needs a shared libpython{version}, this interpreter has none"
        yield Finding("libpython", PROBLEM, text, fix)
        return
    yield Finding("libpython", OK, str(machine.libpython))
    if install is not None and stub is not None:
        for line in _missing_libraries(stub, {**os.environ, "LD_LIBRARY_PATH": library_path(install)}):
            yield Finding("libraries", PROBLEM, line, "install the package that has it")


def of_host(limits: Limits, cache: Path) -> Iterator[Finding]:
    """Whether there is room for what is served: shared memory, disk, file descriptors."""
    free = shutil.disk_usage(SHARED_MEMORY).free
    needed = _COPIES_OF_A_REQUEST * limits.max_request_bytes
    if free < needed:
        text = (
            f"{SHARED_MEMORY} has {_mib(free)} free; a request of server.limits.max_request_bytes needs {_mib(needed)}"
        )
        fix = "give a container --shm-size=1g, enlarge the file system, or lower that limit"
        yield Finding("shared memory", WARNING, text, fix)
    else:
        yield Finding("shared memory", OK, f"{_mib(free)} free")
    free = shutil.disk_usage(cache).free
    if free < _ENOUGH_DISK_BYTES:
        level = PROBLEM if free < _LEAST_DISK_BYTES else WARNING
        fix = "make room, or set NEREID_CACHE_DIR to a folder with more"
        yield Finding("disk", level, f"the disk of the cache folder {cache} has {_mib(free)} free", fix)
    else:
        yield Finding("disk", OK, f"{_mib(free)} free in {cache}")
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most < _FEWEST_DESCRIPTORS:
        fix = f"ulimit -n {_FEWEST_DESCRIPTORS}" + ("" if hard < 0 or hard >= _FEWEST_DESCRIPTORS else " (as root)")
        text = f"a process may open {most} files, and each connection takes two of Envoy's"
        yield Finding("file descriptors", WARNING, text, fix)
    else:
        yield Finding("file descriptors", OK, "unlimited" if most < 0 else str(most))


def check_free(key: str, address: Address) -> None:
    """Find a taken port before minutes of converting and loading. Raises SettingsError."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
            probe.listen(1)
        except OSError as error:
            raise SettingsError(f"server.{key} {address} cannot be bound ({error.strerror})") from None


def _mib(count: int) -> str:
    return f"{count >> 20} MiB"


def _missing_libraries(program: Path, environment: Mapping[str, str]) -> list[str]:
    """One line per shared library that the dynamic loader cannot find for ``program``."""
    try:
        listing = subprocess.run(
            ["ldd", str(program)], env=environment, capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return []  # a machine without ldd: the load deadline remains
    missing = sorted({line.split()[0] for line in listing.stdout.splitlines() if line.strip().endswith("not found")})
    return [f"{program.name} needs the shared library {name}" for name in missing]
