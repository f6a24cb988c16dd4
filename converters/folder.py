"""Reader of nereid folders: one model file and model_inference.textproto, told apart by content.

Detection follows nereid-server: a folder matches a backend when it holds that backend's files; ``backend`` in
nereid.yaml picks one when several match.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from converters import contract as contracts
from converters import graph, script, trial
from converters.contract import CONTRACT_FILE
from converters.prepared import Prepared
from converters.script import DEFAULT_CHILDREN
from converters.trial import OpenOutput
from nereid_backend.errors import BundleError
from nereid_backend.scripts import CPP, PYTHON
from nereid_backend.spec import ModelSpec, Program

TORCH_PLATFORM = "pytorch_libtorch"
ALIASES = {"rust": "torch"}


def _has(*names: str) -> Callable[[Path], bool]:
    return lambda folder: all((folder / name).exists() for name in names)


def _has_suffix(suffix: str) -> Callable[[Path], bool]:
    return lambda folder: (folder / CONTRACT_FILE).exists() and any(folder.glob(f"*{suffix}"))


def _has_cpp(folder: Path) -> bool:
    return (folder / CONTRACT_FILE).exists() and any(
        (folder / name).exists() for name in ("main.cpp", "build.sh", "model")
    )


DETECTORS: dict[str, tuple[Callable[[Path], bool], str]] = {
    "torch": (_has_suffix(".pt"), f"{CONTRACT_FILE} and one .pt"),
    "onnx": (_has_suffix(".onnx"), f"{CONTRACT_FILE} and one .onnx"),
    "python": (_has("main.py", "requirements.txt"), "main.py and requirements.txt"),
    "tensorflow": (
        _has(CONTRACT_FILE, "saved_model.pb", "variables"),
        f"{CONTRACT_FILE}, saved_model.pb and variables/",
    ),
    "cpp": (_has_cpp, f"{CONTRACT_FILE} and main.cpp, build.sh or model"),
    "cxx": (lambda _: False, "nothing: it must be named by backend"),
}


def detect(folder: Path, backend: str | None = None) -> str:
    """The backend of a folder. Raises BundleError when none or several match, or the named one does not fit."""
    if backend is not None:
        name = ALIASES.get(backend, backend)
        if name not in DETECTORS:
            raise BundleError(f"unknown backend {backend!r}; known: {', '.join((*DETECTORS, *ALIASES))}")
        matches, wants = DETECTORS[name]
        if name != "cxx" and not matches(folder):
            raise BundleError(f"backend {backend!r} was asked for, but the folder does not hold {wants}")
        return name
    found = [name for name, (matches, _) in DETECTORS.items() if matches(folder)]
    if not found:
        shapes = "; ".join(f"{name}: {wants}" for name, (_, wants) in DETECTORS.items())
        raise BundleError(f"the folder is neither a bundle (manifest.yaml) nor a nereid folder ({shapes})")
    if len(found) > 1:
        raise BundleError(f"the folder matches several backends ({', '.join(found)}); set backend to one of them")
    return found[0]


def read(folder: Path, name: str, device: str, backend: str | None, *, children: int = DEFAULT_CHILDREN) -> Prepared:
    """Read a nereid folder; ``children`` of a script may run at a time.

    Raises BundleError subclasses, EngineMissing.
    """
    kind = detect(folder, backend)
    if kind not in ("torch", "onnx", PYTHON, CPP):
        raise BundleError(f"{kind} folders are not supported; export the model as .onnx or as a StableHLO bundle")
    contract = contracts.read(folder / CONTRACT_FILE)
    if kind in (PYTHON, CPP):
        return script.read(folder, name, device, kind, contract, children)
    if contract.script_keys:
        raise BundleError(f"{CONTRACT_FILE}: {contract.script_keys[0]} is for script folders, this is a {kind} folder")
    if not contract.inputs:
        raise BundleError(f"{CONTRACT_FILE}: a {kind} model needs a declared input")
    if kind == "onnx":
        return graph.read_folder(_only_file(folder, ".onnx"), name, device, contract)
    return _read_torch(_only_file(folder, ".pt"), name, device, contract)


def _only_file(folder: Path, suffix: str) -> Path:
    files = sorted(folder.glob(f"*{suffix}"))
    if len(files) != 1:
        raise BundleError(
            f"the folder must hold exactly one {suffix} file, found {', '.join(f.name for f in files) or 'none'}"
        )
    return files[0]


def _read_torch(path: Path, name: str, device: str, contract: contracts.Contract) -> Prepared:
    limit = contract.max_batch_size
    spec = ModelSpec(
        name=name,
        engine="torchscript",
        platform=TORCH_PLATFORM,
        inputs=tuple(graph.input_spec(t, limit) for t in contract.inputs),
        outputs=(),
        programs=(Program(path.name),),
        max_batch_size=limit,
        batch_may_be_omitted=limit > 0,
        device=device,
    )
    # A flat contract's data_type does not bind the output (nereid-server: "whatever the model made").
    open_outputs = [OpenOutput(t.name, None if contract.flat else t.dtype, t.dims) for t in contract.outputs]
    learned = trial.learn(spec, path.parent, open_outputs)
    return Prepared(learned.complete(spec), {path.name: path}, learned.notes)
