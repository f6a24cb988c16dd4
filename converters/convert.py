"""From a model on disk to a directory of a Triton model repository: the whole offline path in one call."""

from __future__ import annotations

import os
import re
from pathlib import Path

from converters import bundle, folder, kinds, repository
from converters.artifact import serve_as_is
from converters.manifest import MANIFEST_FILE
from converters.prepared import Prepared
from nereid_backend.engines import engine_class, parse_device
from nereid_backend.errors import BundleError
from nereid_backend.spec import ModelSpec

_FILES = f"a model file ({', '.join(kind.suffix_text for kind in kinds.FILE_KINDS)})"
# Triton refuses other characters from 26.03 on, and a name becomes a directory.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def model_name(source: Path) -> str:
    """The name a model is served under: the directory's, or a model file's without its suffix."""
    source = Path(os.path.abspath(source))  # noqa: PTH100 - resolve() would name a link by its target
    return source.name if source.is_dir() else kinds.stem(source)


def prepare(
    source: Path,
    *,
    name: str | None = None,
    device: str = "cpu",
    backend: str | None = None,
    max_batch_size: int | None = None,
    allow_code: bool = False,
) -> Prepared:
    """Read and check a model without writing anything. Raises NereidError subclasses."""
    parse_device(device)
    name = model_name(source) if name is None else name
    if not _NAME.fullmatch(name):
        raise BundleError(
            f"model name {name!r} has characters outside letters, digits and _.-; rename it or use --name"
        )
    if not source.exists():
        raise BundleError(f"{source} does not exist; give a bundle, a nereid folder or {_FILES}")
    _refuse_special_files(source)
    if source.is_file():
        if (kind := kinds.kind_of(source)) is None:
            raise BundleError(f"{source.name} is a file; give a bundle, a nereid folder or {_FILES}")
        artifact = kinds.read(kind, source, kinds.Opening(device, allow_code))
        return serve_as_is(artifact, name, device, max_batch_size)
    if max_batch_size is not None:
        raise BundleError("--max-batch-size applies to a bare file; a bundle or folder declares its own")
    if (source / MANIFEST_FILE).exists() and backend is None:
        return bundle.read(source, name, device)
    return folder.read(source, name, device, backend, allow_code=allow_code)


def _refuse_special_files(source: Path) -> None:
    """Opening a pipe would wait for ever, and a broken link is a mistake to be told."""
    for path in (source, *(source.iterdir() if source.is_dir() else ())):
        if not path.is_file() and not path.is_dir():
            raise BundleError(f"{path.name} is neither a file nor a folder (a broken link, or a pipe); remove it")


def convert(
    source: Path,
    target: Path,
    *,
    name: str | None = None,
    device: str = "cpu",
    backend: str | None = None,
    max_batch_size: int | None = None,
    allow_code: bool = False,
    link: bool = False,
    force: bool = False,
) -> Prepared:
    """Convert ``source`` into the repository ``target``. Raises NereidError subclasses; then nothing is written."""
    prepared = prepare(
        source, name=name, device=device, backend=backend, max_batch_size=max_batch_size, allow_code=allow_code
    )
    repository.write(prepared, target, link=link, force=force)
    return prepared


def check_device(spec: ModelSpec) -> None:
    """Raise EngineMissing or DeviceMissing unless this interpreter can run ``spec`` on its device."""
    engine_class(spec.engine).check_device(spec.device)
