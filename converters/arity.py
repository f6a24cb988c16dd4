"""The arity of bundles: how many arguments each program takes, against its inputs and weights.

A device value that was lifted into the arguments (a random seed) or a weight that lowering dropped shows here first;
XLA itself would say so at the first request.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from converters import bundle, isolation
from converters.bundle import Parts
from nereid_backend.engines import stablehlo
from nereid_backend.errors import SignatureError
from nereid_backend.records import record


@dataclass(frozen=True, slots=True)
class ModuleArity:
    """A program of a bundle: the arguments of its ``main``, and whether they are as many as the bundle feeds."""

    file: str
    entry_args: int
    servable: bool


@dataclass(frozen=True, slots=True)
class ArityReport:
    """``expected`` is ``n_inputs + n_weights``, all None for a bundle that cannot be read; ``problem`` then says why.

    ``modules`` are the programs that would be served; ``servable``: each takes what the bundle feeds.
    """

    name: str
    n_inputs: int | None = None
    n_weights: int | None = None
    expected: int | None = None
    modules: tuple[ModuleArity, ...] = ()
    servable: bool = False
    problem: str | None = None


def bundle_entry_arity(file: Path) -> int:
    """The number of arguments of ``main`` in a ``.mlir`` file. Raises SignatureError, EngineMissing.

    It is read in this process, which MLIR aborts on some damaged files; ``bundle_arity_report`` survives them.
    """
    return len(stablehlo.read_module(Path(file)).arguments)


def bundle_arity_report(directory: Path) -> ArityReport:
    """Compare a bundle's programs with its manifest and the weights' header. Raises nothing, whatever the bundle.

    It is read by a process of its own, about half a second; ``nereid check`` reads many in one.
    """
    directory = Path(directory)
    # -P: a folder of bundles may hold a numpy.py, and people start Python in such folders.
    command = [sys.executable, "-P", "-m", "converters.arity", str(directory.absolute())]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        return ArityReport(directory.absolute().name, problem=isolation.ended_text(done.returncode))
    return record(ArityReport, json.loads(done.stdout))


def assert_bundle_arity(directory: Path) -> ArityReport:
    """The same report. Raises SignatureError for a bundle that cannot be read or served."""
    report = bundle_arity_report(directory)
    if report.problem is not None:
        raise SignatureError(f"{report.name}: {report.problem}")
    return report


def of(name: str, parts: Parts) -> ArityReport:
    """Count what the programs of a bundle take."""
    inputs, weights = len(parts.manifest.executable_inputs), len(parts.weights.argument_order)
    expected, problem = inputs + weights, None
    counts = [(file.path.name, len(module.arguments)) for file, module in zip(parts.files, parts.modules, strict=True)]
    try:
        for file, count in counts:
            bundle.check_arity(file, count, inputs, weights)
    except SignatureError as error:
        problem = str(error)
    modules = tuple(ModuleArity(file, count, count == expected) for file, count in counts)
    return ArityReport(name, inputs, weights, expected, modules, problem is None, problem)


def _read(directory: Path) -> ArityReport:
    try:
        manifest = bundle.read_manifest(directory)
        if manifest.kind == "meta":
            raise SignatureError("a meta model has code in place of programs, and so no arity")
        return of(directory.name, bundle.read_parts(directory, manifest))
    except Exception as error:  # noqa: BLE001 - the edge of this process
        return ArityReport(directory.name, problem=isolation.problem_of(error))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_read(Path(sys.argv[1])))))
