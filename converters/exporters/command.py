"""The command ``nereid export``.

Exit codes: 0 the bundle was written, 1 it was not, 2 wrong usage.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from converters.exporters.description import Description
from nereid_backend.errors import ExportError, NereidError
from nereid_backend.spec import MAX_SIZE

DEFAULT_OUTPUT = Path("bundles")
NO_SIZES = "none"


def _sizes(_context: click.Context, _option: click.Parameter, text: str | None) -> list[int] | None:
    if text is None:
        return None
    sizes = [] if text == NO_SIZES else text.split(",")
    if not all(size.isascii() and size.isdecimal() and 0 < int(size[:10]) <= MAX_SIZE for size in sizes):
        raise click.BadParameter(f"{text!r} is no list like 1,8 and not {NO_SIZES!r}")
    return [int(size) for size in sizes]


@click.command(name="export")
@click.argument("source", metavar="FILE.py:NAME")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=DEFAULT_OUTPUT, show_default=True,
              help="The folder of bundles to write into.")  # fmt: skip
@click.option("--name", help="Of the model and its folder (default: NAME).")
@click.option("--batch-sizes", callback=_sizes, metavar="N,...",
              help="A program for each (default: 1,8); none: the shapes of the examples.")  # fmt: skip
@click.option("--layout", type=click.Choice(["program", "legacy"]),
              help="Axis order of the weights (default: program); legacy is for readers of format 2.0.")  # fmt: skip
@click.option("--tolerance", type=click.FloatRange(min=0), help="Relative difference allowed (default: by the type).")
@click.option("--provenance/--no-provenance", default=True, help="Record versions, the git commit and what differs.")
@click.option("--force", is_flag=True, help="Replace a bundle that is already there.")
def export(
    source: str,
    output: Path,
    name: str | None,
    batch_sizes: list[int] | None,
    layout: str | None,
    tolerance: float | None,
    provenance: bool,
    force: bool,
) -> None:
    """Run FILE.py and write the model that it calls NAME: a JaxModel or another description, or a function giving one.

    What is written is run beside the model before it is put in its place.
    """
    file, _, attribute = source.rpartition(":")
    if not file or not attribute.isidentifier():
        raise click.UsageError(f"{source!r} is not FILE.py:NAME")
    asked = {"batch_sizes": batch_sizes, "layout": layout, "tolerance": tolerance}
    options: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if not provenance:
        options["provenance"] = None
    if force:
        options["force"] = True
    try:
        model = _model(Path(file), attribute)
        if not isinstance(model, Description):
            raise ExportError(
                f"{source} is of type {type(model).__name__}; make it a description such as JaxModel of "
                "converters.exporters, or a function without arguments that returns one"
            )
        _check_options(model, options)
        done = model.export(output / (name or attribute), **options)
    except NereidError as error:
        click.echo(f"error: {source}: {error}", err=True)
        sys.exit(1)
    except Exception:  # noqa: BLE001 - the edge of the command, around code that is not ours
        click.echo(f"{traceback.format_exc()}error: {source}: failed as shown above", err=True)
        sys.exit(1)
    sizes = ", ".join(map(str, done.batch_sizes)) or NO_SIZES
    differences = ", ".join(f"{output} {difference:.1e}" for output, difference in done.differences.items())
    click.echo(f"{source} -> {done.directory} (batch sizes: {sizes}; largest difference: {differences})")
    for note in done.notes:
        click.echo(f"note: {source}: {note}", err=True)


def _check_options(model: Description, options: Mapping[str, Any]) -> None:
    known = inspect.signature(model.export).parameters
    if unknown := sorted("--" + name.replace("_", "-") for name in options if name not in known):
        raise ExportError(f"a {type(model).__name__} has no {' and no '.join(unknown)}; leave it out")


def _model(file: Path, attribute: str) -> Any:
    """What ``file``, run as a module, calls ``attribute``; what it returns, when it is a function."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ExportError(f"{file} is not there or no Python file; give FILE.py:NAME")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))  # as `python FILE.py` does
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    if not hasattr(module, attribute):
        raise ExportError(f"{file} has no {attribute!r}")
    found = getattr(module, attribute)
    return found() if inspect.isroutine(found) else found
