"""From a model on disk to a directory of a Triton model repository: the whole offline path in one call."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from converters import backpressure, bundle, discover, folder, kinds, meta, repository, saved_model, triton_models
from converters.artifact import DEFAULT_MAX_BATCH_SIZE, serve_as_is
from converters.bundle import BatchSizes
from converters.kinds import FileKind
from converters.prepared import Prepared
from converters.saved_model import DEFAULT_SIGNATURE
from converters.script import DEFAULT_CHILDREN
from nereid_backend.engines import engine_class, parse_device
from nereid_backend.errors import BundleError
from nereid_backend.spec import ModelSpec

_FILES = f"a model file ({', '.join(kind.suffix_text for kind in kinds.FILE_KINDS)})"


def model_name(source: Path) -> str:
    """The name a model is served under: the directory's, or a model file's without its suffix."""
    source = Path(os.path.abspath(source))  # noqa: PTH100 - resolve() would name a link by its target
    return source.name if source.is_dir() else kinds.stem(source)


def prepare(
    source: Path,
    *,
    name: str | None = None,
    device: str | None = None,
    backend: str | None = None,
    max_batch_size: int | None = None,
    default_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
    batch_sizes: BatchSizes = "all",
    signature: str = DEFAULT_SIGNATURE,
    allow_code: bool = False,
    callees: Mapping[str, ModelSpec] = MappingProxyType({}),
    children: int = DEFAULT_CHILDREN,
) -> Prepared:
    """Read and check a model without writing anything. Raises NereidError subclasses.

    ``callees`` holds, by name, the models that a meta model may call. Without ``device`` it is the one that a Triton
    model declares, and the CPU for every other. ``default_batch_size``: the limit of a bare file that can be batched
    when there is no ``max_batch_size``.
    """
    asked = device
    device = triton_models.DEFAULT_DEVICE if device is None else device
    parse_device(device)
    name = model_name(source) if name is None else name
    check_source(source, name)
    is_bundle = discover.is_bundle(source) and backend is None
    if max_batch_size is not None and source.is_dir():
        raise BundleError("--max-batch-size applies to a bare file; a bundle or folder declares its own")
    if batch_sizes != "all" and not is_bundle:
        raise BundleError("batch sizes can be chosen for bundles only; this model is none")
    if is_bundle:
        return bundle.read(source, name, device, batch_sizes, callees)
    if signature != DEFAULT_SIGNATURE and not (source / saved_model.FILE).exists():
        raise BundleError(
            f"signature {signature!r} belongs to a TensorFlow SavedModel, this model is none; leave it out"
        )
    opening = kinds.Opening(device, allow_code, signature)
    if backend is None and discover.is_triton_model(source):
        return triton_models.read(source, name, asked, opening, callees)
    if source.is_dir():
        return folder.read(source, name, opening, backend, children=children)
    artifact = kinds.read(file_kind(source), source, opening)
    return serve_as_is(artifact, name, device, max_batch_size, default_batch_size)


def check_source(source: Path, name: str) -> None:
    """Raise BundleError where ``source`` is not there or cannot be opened, or a model cannot be called ``name``."""
    repository.check_name(name)
    if not source.exists():
        raise BundleError(f"{source} does not exist; give a bundle, a nereid folder or {_FILES}")
    _refuse_special_files(source)


def file_kind(source: Path) -> FileKind:
    """The kind of a bare model file. Raises BundleError."""
    if (kind := kinds.kind_of(source)) is None:
        raise BundleError(f"{source.name} is a file; give a bundle, a nereid folder or {_FILES}")
    return kind


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
    device: str | None = None,
    backend: str | None = None,
    max_batch_size: int | None = None,
    default_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
    batch_delay_ms: int = 0,
    batch_sizes: BatchSizes = "all",
    signature: str = DEFAULT_SIGNATURE,
    allow_code: bool = False,
    callees: Mapping[str, ModelSpec] = MappingProxyType({}),
    children: int = DEFAULT_CHILDREN,
    queue_capacity: int | None = None,
    link: bool = False,
    force: bool = False,
    dry_run: bool = False,
) -> Prepared:
    """Convert ``source`` into the repository ``target``. Raises NereidError subclasses; then nothing is written.

    The callees of a meta model are those in ``target`` and in ``callees``. ``queue_capacity`` lets Triton itself refuse
    requests (``backpressure``); None leaves that to ``nereid serve``. ``batch_delay_ms``: how long a request waits for
    others to share its run. ``dry_run``: everything but the writing.
    """
    calls = discover.calls_of(source) or ()
    callees = {**meta.callees_in(target, [name for name in calls if name not in callees]), **callees}
    prepared = prepare(
        source,
        name=name,
        device=device,
        backend=backend,
        max_batch_size=max_batch_size,
        default_batch_size=default_batch_size,
        batch_sizes=batch_sizes,
        signature=signature,
        allow_code=allow_code,
        callees=callees,
        children=children,
    )
    prepared = replace(prepared, batch_delay_ms=batch_delay_ms)
    if queue_capacity is not None:
        prepared = backpressure.bounded(prepared, queue_capacity)
    if dry_run:
        repository.check(prepared)
        repository.check_places(prepared, target, force=force)
    else:
        repository.write(prepared, target, link=link, force=force)
    return prepared


def check_device(spec: ModelSpec) -> None:
    """Raise EngineMissing or DeviceMissing unless this interpreter can run ``spec`` on its device."""
    if spec.calls is None and spec.script is None:  # a program chooses its device itself
        engine_class(spec.engine).check_device(spec.device)
