"""Reader of folders whose model is a program: ``main.py`` with ``requirements.txt``, or C++.

The whole folder goes into the repository, because the program runs in it. The environment of a ``main.py`` is built
here, so that a start fails early and with pip's reason; a C++ program is compiled here.
"""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from converters.contract import CONTRACT_FILE, Contract, ContractTensor
from converters.prepared import Prepared, Source
from nereid_backend import locks
from nereid_backend.cache import PRIVATE, cache_folder
from nereid_backend.errors import BundleError
from nereid_backend.scripts import MAIN_FILE, PROGRAM_FILE, PYTHON, SCRIPT_FOLDER, environment
from nereid_backend.spec import VARIABLE, ModelSpec, Script, TensorSpec

DEFAULT_CHILDREN = 16
_PLATFORMS = {"python": "python", "cpp": "cpp_subprocess"}
# As long as the front keeps a call without a byte.
_DEFAULT_TIME_LIMIT_S = 24 * 3600
_LEFT_OUT = ("venv", ".venv", "__pycache__", ".git")
_MOST_FILES = 10_000
_BUILD_FILE, _SOURCE_FILE = "build.sh", "main.cpp"
_COMPILER = ("c++", "-O2", "-std=c++17", _SOURCE_FILE, "-o", PROGRAM_FILE)
_TOLD_LINES = 5


def read(folder: Path, name: str, device: str, kind: str, contract: Contract, children: int) -> Prepared:
    """Read a script folder of ``kind`` python or cpp. Raises BundleError."""
    spec, files = inspect(folder, name, device, kind, contract, children)
    if kind == PYTHON:
        environment.prepare(folder)
    else:
        files[PROGRAM_FILE] = _built(folder, files)
    program = MAIN_FILE if kind == PYTHON else PROGRAM_FILE
    note = f"{program} runs as a program of this user for every request; serve only folders you trust"
    sources: dict[str, Source] = {f"{SCRIPT_FOLDER}/{relative}": path for relative, path in files.items()}
    return Prepared(spec, sources, (note,))


def inspect(
    folder: Path, name: str, device: str, kind: str, contract: Contract, children: int = DEFAULT_CHILDREN
) -> tuple[ModelSpec, dict[str, Path]]:
    """What a script folder serves, and its files by their paths in it; nothing is built. Raises BundleError."""
    files = files_of(folder)
    preload: tuple[str, ...] = ()
    if kind == PYTHON:
        tree = _parsed(folder / MAIN_FILE)
        environment.check(folder)
        preload = _imports(tree, folder) if contract.warm else ()
    elif contract.warm:
        raise BundleError(f"{CONTRACT_FILE}: warm is for main.py; a C++ program starts in a millisecond")
    script = Script(children, contract.time_limit_s or _DEFAULT_TIME_LIMIT_S, contract.flat, preload)
    return _spec(name, device, kind, contract, script), files


def _spec(name: str, device: str, kind: str, contract: Contract, script: Script) -> ModelSpec:
    if len(contract.inputs) > 1 or len(contract.outputs) != 1:
        raise BundleError(
            f"{CONTRACT_FILE}: a program has at most one input and one output, this declares "
            f"{len(contract.inputs)} and {len(contract.outputs)}"
        )
    if contract.outputs[0].dims is None:
        raise BundleError(f"{CONTRACT_FILE}: a program needs a declared output; add output_shape")
    # Without an input there are no rows to batch.
    limit = contract.max_batch_size if contract.inputs else 0
    return ModelSpec(
        name=name,
        engine=kind,
        platform=_PLATFORMS[kind],
        inputs=tuple(_tensor(tensor, limit) for tensor in contract.inputs),
        outputs=(_tensor(contract.outputs[0], limit),),
        programs=(),
        max_batch_size=limit,
        batch_may_be_omitted=limit > 0,
        device=device,
        script=script,
    )


def _tensor(tensor: ContractTensor, limit: int) -> TensorSpec:
    dims = tensor.dims or ()
    return TensorSpec(tensor.name, tensor.dtype, (VARIABLE, *dims) if limit else dims, 0 if limit else None)


def files_of(folder: Path) -> dict[str, Path]:
    """The files of a folder but those of environments and caches, by their paths in it. Raises BundleError."""
    return {path.relative_to(folder).as_posix(): path for path in _files(folder)}


def _files(folder: Path) -> Iterator[Path]:
    """Every file of a folder but those of environments and caches. Raises BundleError."""
    count = 0
    seen = set()
    for parent, directories, names in os.walk(folder, followlinks=True):
        place = Path(parent)
        if place.resolve() in seen:
            raise BundleError(f"{place.relative_to(folder)} links back into the folder; remove it")
        seen.add(place.resolve())
        directories[:] = sorted(set(directories) - set(_LEFT_OUT))
        for name in sorted(names):
            path = place / name
            if not path.is_file():
                raise BundleError(
                    f"{path.relative_to(folder)} is neither a file nor a folder (a broken link?); remove it"
                )
            count += 1
            if count > _MOST_FILES:
                raise BundleError(f"the folder holds more than {_MOST_FILES} files; keep only what the program needs")
            yield path


# Python.


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), MAIN_FILE)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BundleError(f"{MAIN_FILE} is not Python that this interpreter reads: {error}") from None
    except OSError as error:
        raise BundleError(f"{MAIN_FILE} cannot be read ({error.strerror})") from None


def _imports(tree: ast.Module, folder: Path) -> tuple[str, ...]:
    """What ``main.py`` imports outside functions and classes, in order, without modules of the folder."""
    names: list[str] = []
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        statement = pending.pop(0)
        if isinstance(statement, ast.Import):
            names += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            names.append(statement.module)
        elif isinstance(statement, ast.If | ast.Try | ast.With):
            pending[:0] = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
    own = {path.stem if path.suffix == ".py" else path.name for path in folder.iterdir()}
    return tuple(dict.fromkeys(n for n in names if n.partition(".")[0] not in own and n != "__future__"))


# C++.


def _built(folder: Path, files: dict[str, Path]) -> Path:
    """The program of a C++ folder: the one that is there, or the one built from this content, now or earlier."""
    if PROGRAM_FILE in files:
        if not os.access(files[PROGRAM_FILE], os.X_OK):
            raise BundleError(f"{PROGRAM_FILE} is not executable; chmod +x it, or remove it to have it built")
        return files[PROGRAM_FILE]
    programs = cache_folder() / "programs"
    programs.mkdir(mode=PRIVATE, exist_ok=True)
    key = _content_key(files)
    program = programs / key
    lock = locks.wait_lock(programs / f"{key}.lock")
    try:
        if not program.exists():
            _build(folder, files, program)
    finally:
        os.close(lock)
    return program


def _build(folder: Path, files: dict[str, Path], program: Path) -> None:
    # In a copy: the folder may be read-only, and a build leaves things behind.
    with tempfile.TemporaryDirectory(dir=program.parent, ignore_cleanup_errors=True) as scratch:
        copy = Path(scratch) / folder.name
        for relative, path in files.items():
            target = copy / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        command = ("bash", _BUILD_FILE) if _BUILD_FILE in files else _COMPILER
        try:
            done = subprocess.run(command, cwd=copy, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        except FileNotFoundError:
            raise BundleError(
                f"{command[0]} is not installed; install it, or put a built {PROGRAM_FILE} there"
            ) from None
        built = copy / PROGRAM_FILE
        if done.returncode or not built.is_file() or not os.access(built, os.X_OK):
            output = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
            told = " | ".join(output[:_TOLD_LINES]) or f"it made no executable file {PROGRAM_FILE!r}"
            raise BundleError(f"{' '.join(command[:2])} failed with exit code {done.returncode}: {told}")
        built.replace(program)


def _content_key(files: dict[str, Path]) -> str:
    digest = hashlib.sha256(os.uname().machine.encode())
    for relative, path in sorted(files.items()):
        with path.open("rb") as file:
            digest.update(f"{relative}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\0".encode())
    return digest.hexdigest()[:32]
