"""The kinds of model files: how each is named, and who reads it.

A kind's name is also what ``backend`` in nereid.yaml may say, to pick one of several in a nereid folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from converters import graph, jax_files, sklearn_files, torch_files, xgboost_files
from converters.artifact import Artifact
from converters.saved_model import DEFAULT_SIGNATURE
from nereid_backend.engines import installed_engines
from nereid_backend.errors import BundleError


@dataclass(frozen=True, slots=True)
class Opening:
    """How a file is opened: for which device, whether code in it may run, and which signature of a SavedModel."""

    device: str
    allow_code: bool = False
    signature: str = DEFAULT_SIGNATURE


@dataclass(frozen=True, slots=True)
class FileKind:
    """``read`` opens a file of this kind.

    ``runs_code``: what in the file runs when it is opened, None for data. ``stands_alone``: a bare file is a model that
    is found in a folder of models; any file may be named on the command line. ``holds``: what else must be true of a
    file whose ending has other uses. ``no_weights``: all that opening it reads is its program.
    """

    name: str
    suffixes: tuple[str, ...]
    read: Callable[[Path, Opening], Artifact]
    stands_alone: bool = True
    runs_code: str | None = None
    holds: Callable[[Path], bool] | None = None
    no_weights: bool = False

    def matches(self, path: Path) -> bool:
        named = path.name.endswith(self.suffixes) and path.name not in self.suffixes
        return named and (self.holds is None or self.holds(path))

    @property
    def suffix_text(self) -> str:
        return " or ".join(self.suffixes)


FILE_KINDS: tuple[FileKind, ...] = (
    FileKind(
        "torch",
        (".pt",),
        lambda path, opening: torch_files.read_script(path, allow_code=opening.allow_code),
        stands_alone=False,
    ),
    FileKind("onnx", (".onnx",), lambda path, _: graph.read(path)),
    FileKind(
        "pt2",
        (".pt2",),
        lambda path, opening: torch_files.read_archive(path, opening.device),
        runs_code="torch's reader runs code from it",
    ),
    FileKind("jax", (".jax",), lambda path, opening: jax_files.read_export(path, opening.device)),
    FileKind(
        "xgboost",
        (".xgb.json", ".json", ".ubj"),
        lambda path, _: xgboost_files.read(path),
        holds=xgboost_files.is_model,
    ),
    FileKind("skops", (".skops",), lambda path, opening: sklearn_files.read_skops(path, allow_code=opening.allow_code)),
    FileKind(
        "sklearn",
        (".joblib", ".pkl"),
        lambda path, _: sklearn_files.read_pickle(path),
        stands_alone=False,
        runs_code="a pickle runs whatever its author wrote while it is read",
    ),
    FileKind("stablehlo", (".mlir",), lambda path, _: jax_files.read_module(path), no_weights=True),
)


def file_kinds() -> tuple[FileKind, ...]:
    """The kinds of this installation: an installed engine opens the files that end in its name."""
    installed = [
        FileKind(name, (f".{name}",), lambda path, _, name=name: _of_engine(path, name), stands_alone=False)  # type: ignore[misc]
        for name in installed_engines()
    ]
    return (*FILE_KINDS, *installed)


def kind_of(path: Path) -> FileKind | None:
    """The kind of a file by its name, None when it is no model."""
    return next((kind for kind in file_kinds() if kind.matches(path)), None)


def stem(path: Path) -> str:
    """A model file's name without its suffix."""
    kind = kind_of(path)
    ending = "" if kind is None else next(suffix for suffix in kind.suffixes if path.name.endswith(suffix))
    return path.name.removesuffix(ending)


def read(kind: FileKind, path: Path, opening: Opening) -> Artifact:
    """Read a file of a kind. Raises BundleError when it would run code that nobody has allowed."""
    if kind.runs_code is not None:
        ask_for_code(path.name, kind.runs_code, opening)
    return kind.read(path, opening)


def ask_for_code(name: str, what: str, opening: Opening) -> None:
    """Raise BundleError unless code in the model may run."""
    if not opening.allow_code:
        raise BundleError(needs_consent(name, what))


def needs_consent(name: str, what: str) -> str:
    """How to allow code in the model to run."""
    return (
        f"{name}: {what}; if you trust it, allow it with --allow-code (in nereid.yaml: options: {{allow_code: true}})"
    )


def _of_engine(path: Path, name: str) -> Artifact:
    return Artifact(path.name, name, name, path.parent, {path.name: path})
