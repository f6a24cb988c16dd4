"""The command ``nereid-convert`` (and ``nereid convert``).

Exit codes: 0 every model was written, 1 at least one was not (the others are), 2 wrong usage.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from nereid_backend.errors import NereidError

DEFAULT_OUTPUT = Path("triton_models")


@click.command(name="convert")
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="SOURCE...")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=DEFAULT_OUTPUT, show_default=True,
              help="The Triton model repository to write into.")  # fmt: skip
@click.option("--name", help="Serve the model under this name (one SOURCE only).")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:<index>.")
@click.option("--backend", help="Kind of a nereid folder that matches several: torch, onnx, ...")
@click.option("--max-batch-size", type=click.IntRange(min=0), help="For a bare .onnx with a symbolic first axis.")
@click.option("--link/--copy", default=False, help="Link the artifacts instead of copying them (default: copy).")
@click.option("--force", is_flag=True, help="Replace models that are already in the repository.")
def command(
    sources: tuple[Path, ...],
    output: Path,
    name: str | None,
    device: str,
    backend: str | None,
    max_batch_size: int | None,
    link: bool,
    force: bool,
) -> None:
    """Turn bundles, nereid folders and .onnx files into a Triton model repository.

    A SOURCE that is none of these itself stands for the models directly below it.
    """
    from converters.convert import convert
    from converters.discover import find

    found = [model for source in sources for model in (find(source) or [source])]
    if name is not None and len(found) != 1:
        raise click.UsageError(f"--name needs exactly one model, found {len(found)}")
    failed = False
    for source in found:
        try:
            prepared = convert(
                source, output, name=name, device=device, backend=backend, max_batch_size=max_batch_size,
                link=link, force=force,
            )  # fmt: skip
        except NereidError as error:
            failed = True
            click.echo(f"error: {source}: {error}", err=True)
            continue
        spec = prepared.spec
        sizes = ", ".join(map(str, spec.batch_sizes)) or (
            f"up to {spec.max_batch_size}" if spec.max_batch_size else "none"
        )
        click.echo(f"{source} -> {output / spec.name} (engine {spec.engine}, batch sizes: {sizes})")
        for note in prepared.notes:
            click.echo(f"note: {source}: {note}", err=True)
    if failed:
        sys.exit(1)


def main() -> None:
    """Entry point of ``nereid-convert``."""
    command.main(prog_name="nereid-convert")
