"""What the embedded tritonserver needs from this machine, checked before anything is started.

A stub that cannot start hangs a model load for ever on 2.51, so every reason known for that is found here and
told with its fix. Servers that came with the machine are trusted to fit it.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from native_service.embedded_triton import TritonInstall
from nereid_backend.errors import TritonUnavailable

_OLDEST_GLIBC = (2, 35)
_PYTHONS = ((3, 11), (3, 13))
_INSTEAD = "or name another server with --tritonserver PATH"


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


def check(install: TritonInstall, machine: Machine | None = None) -> None:
    """Raises TritonUnavailable with one line per reason why ``install`` cannot run here."""
    if not install.embedded:
        return
    problems = _problems(install, this_machine() if machine is None else machine)
    if problems:
        raise TritonUnavailable("\n".join(problems))


def _problems(install: TritonInstall, machine: Machine) -> list[str]:
    what = f"the embedded tritonserver {install.version}"
    if machine.system != "Linux" or machine.architecture != "x86_64":
        here = f"{machine.architecture} {machine.system}"
        return [f"{what} runs on x86-64 Linux, this is {here}; use a container, {_INSTEAD}"]
    problems = []
    if machine.glibc < _OLDEST_GLIBC:
        found = ".".join(map(str, machine.glibc)) or "none"
        problems.append(f"{what} needs glibc 2.35 or newer, found {found}; use a newer distribution, {_INSTEAD}")
    version = ".".join(map(str, machine.python))
    stub = install.stub
    if machine.implementation != "CPython" or not _PYTHONS[0] <= machine.python <= _PYTHONS[1]:
        problems.append(
            f"{what} runs models on CPython 3.11 to 3.13, this is {machine.implementation} {version};"
            f" use one of those, {_INSTEAD}"
        )
    elif stub is None or not stub.is_file():
        problems.append(f"{what} has no stub for Python {version}; use Python 3.11 to 3.13, {_INSTEAD}")
    elif machine.libpython is None:
        problems.append(
            f"{what} needs a shared libpython{version}, this interpreter has none; use a Python built with"
            f" --enable-shared (the distribution's own, or uv's and conda's), {_INSTEAD}"
        )
    else:
        problems.extend(_missing_libraries(stub, {**os.environ, "LD_LIBRARY_PATH": library_path(install)}))
    return problems


def _missing_libraries(program: Path, environment: Mapping[str, str]) -> list[str]:
    """One line per shared library that the dynamic loader cannot find for ``program``."""
    try:
        listing = subprocess.run(
            ["ldd", str(program)], env=environment, capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return []  # a machine without ldd: the load deadline remains
    missing = sorted({line.split()[0] for line in listing.stdout.splitlines() if line.strip().endswith("not found")})
    return [f"{program.name} needs the shared library {name}; install the package that has it" for name in missing]
