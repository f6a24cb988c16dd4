"""The files that a command line names: arrays, a server's state, secrets."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np

from nereid_backend.errors import NereidError

DEFAULT_ADDRESS = "127.0.0.1:50051"
_STDIN = "-"
_Command = TypeVar("_Command", bound=Callable[..., Any])


class FileProblem(NereidError):
    """A file of the command line cannot be used."""

    code = "INVALID_ARGUMENT"


def address_of(state: Path | None) -> str:
    if state is None:
        return DEFAULT_ADDRESS
    try:
        return str(json.loads(read(state))["address"])
    except (ValueError, KeyError, TypeError):
        raise FileProblem(f"{state}: is not the state file of a server") from None


def certificate_option(command: _Command) -> _Command:
    """The option ``--certificate CERT KEY``, whose files are there."""
    return click.option(
        "--certificate",
        type=(click.Path(path_type=Path, exists=True), click.Path(path_type=Path, exists=True)),
        metavar="CERT KEY",
        help="This client's own certificate and its key (PEM), for servers that ask for one.",
    )(command)


def given(inputs: Sequence[str]) -> Any:
    """What the files hold, as ``Client.run`` takes it."""
    named: dict[str, Any] = {}
    alone = []
    for text in inputs:
        tensor, equals, file = text.partition("=")
        if not equals:
            alone.append(_content(text))
        elif named.setdefault(tensor, content := _content(file)) is not content:
            raise click.UsageError(f"--input names the tensor {tensor!r} twice")
    for content in alone:
        if isinstance(content, Mapping):
            named |= content
    alone = [content for content in alone if not isinstance(content, Mapping)]
    if len(alone) > 1 or (alone and named):
        raise click.UsageError("with several inputs each needs its tensor: --input TENSOR=FILE")
    if any(isinstance(content, bytes) for content in named.values()):
        raise click.UsageError("a tensor by name needs an .npy file")
    return alone[0] if alone else named or None


def _content(file: str) -> Any:
    """An array of .npy, a mapping of .npz, the bytes of anything else."""
    if file == _STDIN:
        return sys.stdin.buffer.read()
    path = Path(file)
    if path.suffix not in (".npy", ".npz"):
        return read(path)
    try:
        # Pickles in it would run code.
        loaded = np.load(path, allow_pickle=False)
        return dict(loaded) if path.suffix == ".npz" else loaded
    except OSError as error:
        raise FileProblem(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, EOFError) as error:
        raise FileProblem(f"{path}: is not a {path.suffix} file ({error})") from None


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileProblem(f"{path}: cannot be read ({error.strerror})") from None
