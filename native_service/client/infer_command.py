"""``nereid infer``: run a model of a running server on arrays from files, or a program on bytes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
import numpy as np

from native_service.client.errors import CallFailed, ProgramFailed, UnknownModel
from native_service.client.files import DEFAULT_ADDRESS, FileProblem, address_of, certificate_option, given, read

if TYPE_CHECKING:
    from native_service.client import Client

_MOST_SHOWN = 1000
_FAILED, _INTERRUPTED = 1, 130


@click.command()
@click.argument("name")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="[TENSOR=]FILE",
    help="A .npy or .npz file, or any other as bytes for a program; - is stdin. May be given once for each input.",
)
@click.option("--output", type=click.Path(path_type=Path), help="Where to write the result: .npy or .npz.")
@click.option("--address", metavar="HOST:PORT", help=f"The server (default: {DEFAULT_ADDRESS}).")
@click.option("--state", type=click.Path(path_type=Path), help="The state file of the server, instead of --address.")
@click.option("--key-file", type=click.Path(path_type=Path), help="A file that holds an API key or a token.")
@click.option("--ca", type=click.Path(path_type=Path), help="Certificates to trust (PEM); the connection is TLS.")
@certificate_option
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), help="Seconds to wait at most.")
def infer(
    name: str,
    inputs: tuple[str, ...],
    output: Path | None,
    address: str | None,
    state: Path | None,
    key_file: Path | None,
    ca: Path | None,
    certificate: tuple[Path, Path] | None,
    timeout_s: float | None,
) -> None:
    """Run the model NAME of a running server.

    Results are printed unless --output names a file. What a program prints goes to stderr while it runs. Exit codes: 0
    done, 1 an error or a program that failed, 2 wrong usage, 130 interrupted.
    """
    if address is not None and state is not None:
        raise click.UsageError("--address and --state exclude each other")
    if output is not None and output.suffix not in (".npy", ".npz"):
        raise click.UsageError(f"--output must end in .npy or .npz, got {output.name}")
    from native_service.client import Client

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    arrays = given(inputs)
    key = None if key_file is None else read(key_file).decode(errors="replace").strip()
    if ca is not None:
        read(ca)  # told like any other file that is not there
    try:
        with Client(address or address_of(state), key=key, ca=ca, certificate=certificate) as client:
            outputs = _run(client, name, arrays, timeout_s)
    except KeyboardInterrupt:
        click.echo("interrupted; the call was cancelled", err=True)
        sys.exit(_INTERRUPTED)
    except ProgramFailed as error:
        # What it said is on stderr already.
        click.echo(f"error: the program ended with exit code {error.exit_code}", err=True)
        sys.exit(_FAILED)
    _give(outputs, output)


def _run(client: Client, name: str, given: Any, timeout_s: float | None) -> dict[str, np.ndarray[Any, Any]]:
    try:
        with client.run(name, given, timeout_s=timeout_s) as run:
            for line in run:
                click.echo(line, err=True)
            return run.outputs()
    except UnknownModel as error:
        try:
            names = ", ".join(client.models(timeout_s=timeout_s)) or "none"
        except CallFailed:
            raise error from None
        raise UnknownModel(f"the server has no model {name!r}; it has: {names}") from None


def _give(outputs: Mapping[str, np.ndarray[Any, Any]], file: Path | None) -> None:
    """Write the outputs to ``file``, or print them."""
    if file is None:
        for line in _shown(outputs):
            click.echo(line)
        return
    if file.suffix == ".npy" and len(outputs) != 1:
        raise FileProblem(f"{file}: the result has the outputs {list(outputs)}; --output must be an .npz file")
    try:
        with file.open("wb") as opened:
            _save(opened, outputs, file.suffix)
    except OSError as error:
        raise FileProblem(f"{file}: cannot be written ({error.strerror})") from None


def _save(file: IO[bytes], outputs: Mapping[str, np.ndarray[Any, Any]], suffix: str) -> None:
    if suffix == ".npz":
        np.savez(file, **outputs)
    else:
        np.save(file, next(iter(outputs.values())))


def _shown(outputs: Mapping[str, np.ndarray[Any, Any]]) -> Iterator[str]:
    for name, array in outputs.items():
        yield f"{name}: {array.dtype.name} {list(array.shape)}"
        yield np.array2string(array, threshold=_MOST_SHOWN, separator=", ")
