"""Reader of nereid folders: one model file and model_inference.textproto, told apart by content.

Detection follows nereid-server: a folder matches a backend when it holds that backend's files; ``backend`` in
nereid.yaml picks one when several match.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from converters import contract as contracts
from converters import kinds, saved_model, script, snooze
from converters.artifact import serve_under
from converters.contract import CONTRACT_FILE, Contract
from converters.kinds import FileKind, Opening, file_kinds
from converters.prepared import Prepared
from converters.script import DEFAULT_CHILDREN
from nereid_backend.errors import BundleError
from nereid_backend.scripts import CPP, PYTHON
from nereid_backend.snooze import ENGINE as SNOOZE
from nereid_backend.snooze import MODEL_FILE, OPTIONS_FILE

ALIASES = {"rust": "torch"}


@dataclass(frozen=True, slots=True)
class Recognized:
    """A nereid folder before its model is opened; ``kind`` and ``file`` are None for programs and SavedModels."""

    backend: str
    contract: Contract
    kind: FileKind | None = None
    file: Path | None = None


def _has(*names: str) -> Callable[[Path], bool]:
    return lambda folder: all((folder / name).exists() for name in names)


def _has_one(kind: FileKind) -> Callable[[Path], bool]:
    return lambda folder: (folder / CONTRACT_FILE).exists() and any(map(kind.matches, folder.iterdir()))


def _has_cpp(folder: Path) -> bool:
    return (folder / CONTRACT_FILE).exists() and any(
        (folder / name).exists() for name in ("main.cpp", "build.sh", "model")
    )


def detectors() -> dict[str, tuple[Callable[[Path], bool], str]]:
    """Whether a folder matches a backend, and what such a folder holds, by the backend's name."""
    files = {kind.name: (_has_one(kind), f"{CONTRACT_FILE} and one {kind.suffix_text}") for kind in file_kinds()}
    return {
        **files,
        "python": (_has("main.py", "requirements.txt"), "main.py and requirements.txt"),
        "tensorflow": (
            _has(CONTRACT_FILE, saved_model.FILE, "variables"),
            f"{CONTRACT_FILE}, saved_model.pb and variables/",
        ),
        SNOOZE: (snooze.is_worker, f"{MODEL_FILE} or {OPTIONS_FILE}"),
        "cpp": (_has_cpp, f"{CONTRACT_FILE} and main.cpp, build.sh or model"),
        "cxx": (lambda _: False, "nothing: it must be named by backend"),
    }


def detect(folder: Path, backend: str | None = None) -> str:
    """The backend of a folder. Raises BundleError when none or several match, or the named one does not fit."""
    known = detectors()
    if backend is not None:
        name = ALIASES.get(backend, backend)
        if name not in known:
            raise BundleError(f"unknown backend {backend!r}; known: {', '.join((*known, *ALIASES))}")
        matches, wants = known[name]
        if name != "cxx" and not matches(folder):
            raise BundleError(f"backend {backend!r} was asked for, but the folder does not hold {wants}")
        return name
    found = [name for name, (matches, _) in known.items() if matches(folder)]
    if "python" in found:
        # A script may keep model files of its own beside it; those nereid-server knows, too, ask which is meant.
        ours = {kind.name for kind in file_kinds()} - {"torch", "onnx"}
        found = [name for name in found if name not in ours]
    if SNOOZE in found:
        found = [name for name in found if name in (SNOOZE, PYTHON)]
    if not found:
        raise BundleError(f"the folder is neither a bundle (manifest.yaml) nor a nereid folder: {_missing(folder)}")
    if len(found) > 1:
        raise BundleError(f"the folder matches several backends ({', '.join(found)}); set backend to one of them")
    return found[0]


def half_made(folder: Path) -> str | None:
    """What a folder lacks that holds files of a model and yet is none; None for one that holds no such file."""
    holds = (folder / "main.py").exists() or any(
        kind.matches(path) for path in folder.iterdir() for kind in file_kinds()
    )
    return _missing(folder) if holds else None


def _missing(folder: Path) -> str:
    """What would make the folder one of ours, as near as its files tell."""
    if (folder / "main.py").exists():
        return "main.py needs requirements.txt beside it (it may be empty)"
    if (folder / CONTRACT_FILE).exists():
        suffixes = ", ".join(kind.suffix_text for kind in file_kinds())
        return (
            f"{CONTRACT_FILE} needs one model file beside it ({suffixes}), saved_model.pb with variables/, main.cpp, "
            "build.sh, model, or main.py with requirements.txt"
        )
    models = sorted(path.name for path in folder.iterdir() if any(kind.matches(path) for kind in file_kinds()))
    if models:
        bundle = " (or manifest.yaml, as a bundle)" if models[0].endswith(".mlir") else ""
        return f"{models[0]} needs {CONTRACT_FILE} beside it{bundle}"
    return f"it holds no model file and no {CONTRACT_FILE}"


def read(
    folder: Path, name: str, opening: Opening, backend: str | None, *, children: int = DEFAULT_CHILDREN
) -> Prepared:
    """Read a nereid folder; ``children`` of a script may run at a time.

    Raises BundleError subclasses, EngineMissing.
    """
    found = recognize(folder, backend)
    contract = found.contract
    if found.backend in (PYTHON, CPP):
        return script.read(folder, name, opening.device, found.backend, contract, children)
    if found.backend == SNOOZE:
        kinds.ask_for_code(name, snooze.RUNS_CODE, opening)
        return snooze.read(folder, name, opening.device, contract)
    if found.kind is None or found.file is None:
        kinds.ask_for_code(saved_model.FILE, saved_model.RUNS_CODE, opening)
        artifact = saved_model.read(folder, opening.signature)
    else:
        artifact = kinds.read(found.kind, found.file, opening)
    return serve_under(artifact, name, opening.device, contract)


def recognize(folder: Path, backend: str | None = None) -> Recognized:
    """What a nereid folder is and declares, without opening its model. Raises BundleError subclasses."""
    found = detect(folder, backend)
    kind = next((kind for kind in file_kinds() if kind.name == found), None)
    if found == SNOOZE:
        declared = (folder / CONTRACT_FILE).exists()
        return Recognized(found, contracts.read(folder / CONTRACT_FILE) if declared else snooze.UNDECLARED)
    if kind is None and found not in ("tensorflow", PYTHON, CPP):
        raise BundleError(f"{found} folders are not supported; export the model as .onnx or as a StableHLO bundle")
    contract = contracts.read(folder / CONTRACT_FILE)
    if found in (PYTHON, CPP):
        return Recognized(found, contract)
    if contract.script_keys:
        raise BundleError(f"{CONTRACT_FILE}: {contract.script_keys[0]} is for script folders, this is a {found} folder")
    if not contract.inputs:
        raise BundleError(f"{CONTRACT_FILE}: a {found} model needs a declared input")
    return Recognized(found, contract, kind, None if kind is None else _only_file(folder, kind))


def _only_file(folder: Path, kind: FileKind) -> Path:
    files = sorted(path for path in folder.iterdir() if kind.matches(path))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise BundleError(f"the folder must hold exactly one {kind.suffix_text} file, found {names}")
    return files[0]
