"""The commands ``nereid-convert`` (and ``nereid convert``), ``nereid check`` and ``nereid migrate``.

Exit codes: 0 every model was done, 1 at least one was not (the others are), 2 wrong usage.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converters import isolation
from converters.backpressure import DEFAULT_CAPACITY
from nereid_backend import progress
from nereid_backend.errors import BundleError, NereidError, ReportError

if TYPE_CHECKING:
    from converters.conversions import Conversions

_LOG = logging.getLogger("nereid.convert")

DEFAULT_OUTPUT = Path("triton_models")
DEFAULT_SIGNATURE = "serving_default"
ISOLATED = "isolated"
"""As click's ``obj``: nothing but the command runs in this process, and a child of its own may do the work."""


@contextmanager
def _tidy_on_sigterm() -> Iterator[None]:
    """SIGTERM meanwhile raises, so that what was begun is removed."""

    def leave(_number: int, _frame: Any) -> None:
        raise SystemExit(1)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@click.command(name="convert")
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="SOURCE...")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=DEFAULT_OUTPUT, show_default=True,
              help="The Triton model repository to write into.")  # fmt: skip
@click.option("--name", help="Serve the model under this name (one SOURCE only).")
@click.option("--device", help="cpu, cuda or cuda:<index> (default: what a Triton model declares, or cpu).")
@click.option("--backend", help="Kind of a nereid folder that matches several: torch, onnx, ...")
@click.option("--max-batch-size", type=click.IntRange(min=0), help="For a bare file with a symbolic first axis.")
@click.option("--batch-sizes", type=click.Choice(["all", "largest"]), default="all", show_default=True,
              help="Which compiled batch sizes of a bundle to serve.")  # fmt: skip
@click.option("--signature", default=DEFAULT_SIGNATURE, show_default=True, help="Of a TensorFlow SavedModel.")
@click.option("--allow-code", is_flag=True, help="Open files that run code while read: .pt2, pickles, SavedModels.")
@click.option("--backpressure", type=click.Choice(["front", "triton"]), default="front", show_default=True,
              help="What refuses requests beyond the capacity: nereid serve, or Triton itself.")  # fmt: skip
@click.option("--queue-capacity", type=click.IntRange(min=1), metavar="N",
              help=f"Requests running and waiting, if Triton refuses (default: {DEFAULT_CAPACITY}).")  # fmt: skip
@click.option("--link/--copy", default=False, help="Link the artifacts instead of copying them (default: copy).")
@click.option("--force", is_flag=True, help="Replace models that are already in the repository.")
@click.option("--dry-run", is_flag=True, help="Say what would be done and write nothing into the repository.")
@click.option("--report", "report_file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write what became of each model; a second run does what is missing or changed.")  # fmt: skip
@_tidy_on_sigterm()
def command(
    sources: tuple[Path, ...],
    output: Path,
    name: str | None,
    device: str | None,
    backend: str | None,
    max_batch_size: int | None,
    batch_sizes: str,
    signature: str,
    allow_code: bool,
    backpressure: str,
    queue_capacity: int | None,
    link: bool,
    force: bool,
    dry_run: bool,
    report_file: Path | None,
) -> None:
    """Turn bundles, nereid folders, model files and Triton's own models into a Triton model repository.

    A SOURCE that is none of these itself stands for the models directly below it.
    """
    from converters.conversions import Conversions

    if backpressure == "triton":
        queue_capacity = queue_capacity or DEFAULT_CAPACITY
    elif queue_capacity is not None:
        raise click.UsageError(
            "--queue-capacity goes with --backpressure triton; nereid serve takes it from nereid.yaml"
        )
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    for log in (_LOG, logging.getLogger("nereid.environments")):  # a build takes minutes
        log.setLevel(logging.INFO)
    found = _models(sources, name)
    options = {
        "name": name,
        "device": device,
        "backend": backend,
        "max_batch_size": max_batch_size,
        "batch_sizes": batch_sizes,
        "signature": signature,
        "allow_code": allow_code,
        "queue_capacity": queue_capacity,
        "link": link,
    }
    try:
        accepted = _convert_all(
            found, Conversions(output, options, report_file, force=force, dry_run=dry_run), dry_run=dry_run
        )
    except ReportError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    if not accepted:
        sys.exit(1)


def _convert_all(found: Sequence[Path], conversions: Conversions, *, dry_run: bool) -> bool:
    """Convert what is not done yet, also after the first that fails; whether all was accepted. Raises ReportError."""
    from converters.conversions import Outcome

    undone = conversions.undone(found)
    for source in found:
        if source not in undone:
            click.echo(f"{source}: unchanged since it was converted to {conversions.target(source)}")
    accepted = True
    work = partial(_convert, conversions=conversions, dry_run=dry_run)
    outcomes = isolation.each(undone, work, _refused, in_child=_isolated())
    for source, raw in zip(undone, outcomes, strict=True):
        outcome = Outcome(**raw)
        conversions.note(source, outcome)
        accepted &= not outcome.refused
    return accepted


def _models(sources: Sequence[Path], name: str | None) -> list[Path]:
    """Each model of ``sources``, meta models last: they need their callees in the repository. Raises UsageError."""
    from converters.convert import model_name
    from converters.discover import calls_of

    found = [model for source in sources for model in _found(source)]
    found.sort(key=lambda model: calls_of(model) is not None)
    if name is not None and len(found) != 1:
        raise click.UsageError(f"--name needs exactly one model, found {len(found)}")
    names = [model_name(model) for model in found]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise click.UsageError(f"several models would be called {min(repeated)!r}; convert them apart with --name")
    return found


@click.command(name="check")
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="SOURCE...")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, with tensors, weights and arity.")
@_tidy_on_sigterm()
def check(sources: tuple[Path, ...], as_json: bool) -> None:
    """Say what conversion would refuse, one line a model, without reading weights or running anything.

    A SOURCE that is no model itself stands for the models directly below it. Exit code 1: at least one is refused.
    """
    from converters.check import check_all, one_line
    from converters.discover import passed_over

    found = [model for source in sources for model in _found(source)]
    accepted = True
    for report in check_all(found, in_child=_isolated()):
        accepted &= report.problem is None
        click.echo(json.dumps(report.to_json()) if as_json else report.line)
        for note in report.notes if not as_json else ():
            click.echo(one_line(f"note: {report.path}: {note}"), err=True)
    for source in sources:
        for path, why in passed_over(source):
            click.echo(one_line(f"note: {path}: is passed over: {why}"), err=True)
    if not accepted:
        sys.exit(1)


@click.command(name="migrate")
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="BUNDLE...")
@click.option("--copy/--replace", "copy", default=None,
              help="Keep the original weights beside the new ones, or put the new ones in their place.")  # fmt: skip
@_tidy_on_sigterm()
def migrate(sources: tuple[Path, ...], copy: bool | None) -> None:
    """Bring the weights of bundles from the legacy layout to program order.

    A folder stands for the bundles directly below it. Every tensor is compared before a file is given up, and a bundle
    loads at every moment, also after a kill; run the command again to finish.
    """
    if copy is None:
        raise click.UsageError("choose --copy or --replace")
    migrated = [_migrate(source, copy=copy) for given in sources for source in _found(given)]
    if not all(migrated):
        sys.exit(1)


def _migrate(source: Path, *, copy: bool) -> bool:
    """Migrate one bundle and say so in one line; whether it worked."""
    from converters import migrate as migration

    try:
        done = migration.migrate(source, replace=not copy)
    except NereidError as error:
        return _refuse(source, str(error))
    click.echo(f"{source}: {done}")
    return True


def _convert(source: Path, conversions: Conversions, *, dry_run: bool) -> dict[str, Any]:
    """Convert one model and say so in one line; an ``Outcome`` as JSON can carry it."""
    try:
        with progress.told(_LOG, f"converting {source}", at_start=False):
            prepared = conversions.convert(source)
    except Exception as error:  # noqa: BLE001 - the edge of the command: one model, one line, the others go on
        return _refused(source, isolation.problem_of(error))
    spec = prepared.spec
    dynamic = f"up to {spec.max_batch_size}" if spec.max_batch_size else "none"
    sizes = ", ".join(map(str, spec.batch_sizes)) or dynamic
    variants = f", variants: {len(spec.variants)}" if spec.variants != ((),) else ""
    arrow = "would become" if dry_run else "->"
    click.echo(f"{source} {arrow} {conversions.target(source)} (engine {spec.engine}, batch sizes: {sizes}{variants})")
    for kept in prepared.taken_over if dry_run else ():
        click.echo(f"  as before: {kept}")
    for note in prepared.notes:
        click.echo(f"note: {source}: {note}", err=True)
    return {"taken_over": prepared.taken_over, "changed": prepared.notes}


def _refused(source: Path, problem: str) -> dict[str, Any]:
    _refuse(source, problem)
    return {"refused": problem}


def _refuse(source: Path, problem: str) -> bool:
    click.echo(f"error: {source}: {problem}", err=True)
    return False


def _isolated() -> bool:
    return click.get_current_context().find_root().obj == ISOLATED  # type: ignore[no-any-return]


def _found(source: Path) -> list[Path]:
    """The models at or below ``source``; ``source`` itself when there are none, so that converting it says why."""
    from converters.discover import find
    from nereid_backend.engines import installed_engines

    try:
        # An engine that is installed wrongly would be met again for each model.
        installed_engines()
        return find(source) or [source]
    except BundleError as error:
        click.echo(f"error: {source}: {error}", err=True)
        sys.exit(1)
    except OSError:
        return [source]


def main() -> None:
    """Entry point of ``nereid-convert``."""
    command.main(prog_name="nereid-convert", obj=ISOLATED)
