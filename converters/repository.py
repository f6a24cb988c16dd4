"""Writer of Triton model repositories: NAME/{config.pbtxt, 1/model.py, 1/nereid.json, 1/<artifacts>}.

config.pbtxt is complete, built from Triton's own message and parsed back, so that the server runs without
auto-complete (which would start a second stub per model). A model is written beside its place and renamed into it:
an interrupted conversion leaves the old model or nothing.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from google.protobuf import text_format

from converters import durable
from converters.prepared import MODEL_FILE, Prepared, place
from nereid_backend import locks
from nereid_backend.engines import parse_device
from nereid_backend.errors import BundleError, RepositoryError, SpecError
from nereid_backend.spec import SPEC_FILE, ModelSpec, TensorSpec

CONFIG_FILE, VERSION = "config.pbtxt", "1"
MODEL_PY = "from nereid_backend.model import TritonPythonModel as TritonPythonModel\n"
META_MODEL_PY = "from nereid_backend.meta import TritonPythonModel as TritonPythonModel\n"
SCRIPT_MODEL_PY = "from nereid_backend.scripts.model import TritonPythonModel as TritonPythonModel\n"

# Triton refuses other characters from 26.03 on, and a name becomes a directory.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def is_name(name: str) -> bool:
    """Whether a model may be called ``name``."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str) -> None:
    """Raise BundleError unless a model may be called ``name``."""
    if not is_name(name):
        raise BundleError(
            f"model name {name!r} has characters outside letters, digits and _.-; rename it or use --name"
        )


def config(
    spec: ModelSpec,
    most_waiting: int | None = None,
    labels: Mapping[str, str] = MappingProxyType({}),
    batch_delay_ms: int = 0,
) -> Any:
    """The ``inference.ModelConfig`` message of a model.

    ``most_waiting`` bounds Triton's queue (``backpressure``); ``labels`` are files with labels, by output;
    ``batch_delay_ms``: how long a request waits for others to share its run.
    """
    from tritonclient.grpc import model_config_pb2 as pb

    message = pb.ModelConfig(name=spec.name, backend="python", platform=spec.platform)
    message.max_batch_size = spec.max_batch_size
    for tensors, field in ((spec.client_inputs, message.input), (spec.client_outputs, message.output)):
        for tensor in tensors:
            field.add(name=tensor.name, data_type=_data_type(pb, tensor), dims=spec.dims(tensor))
    for field in message.output:
        if field.name in labels:
            field.label_filename = f"{VERSION}/{labels[field.name]}"
    if spec.stages:
        message.platform, message.backend = "ensemble", ""
        _schedule(message.ensemble_scheduling, spec)
        return message
    kind, index = parse_device(spec.device)
    group = message.instance_group.add(count=spec.instances, kind=pb.ModelInstanceGroup.KIND_CPU)
    if kind == "cuda":
        group.kind = pb.ModelInstanceGroup.KIND_GPU
        group.gpus.append(index)
    if spec.coalesce and spec.max_batch_size > 1:
        # No delay by default (500 us of it makes a lone client 2.4x slower and gains nothing under load) and no queue
        # policy (on one instance each of them makes requests wait for a 500 ms tick).
        message.dynamic_batching.SetInParent()
        if batch_delay_ms:
            message.dynamic_batching.max_queue_delay_microseconds = 1000 * batch_delay_ms
        # Else Triton ends a batch where the shape changes; the runtime sorts variants into runs itself, and hooks make
        # one shape of many.
        for field in message.input:
            field.allow_ragged_batch = spec.variants != ((),) or spec.hooks is not None
    if most_waiting is not None:
        message.dynamic_batching.default_queue_policy.max_queue_size = most_waiting
    return message


def _schedule(scheduling: Any, spec: ModelSpec) -> None:
    """The steps of an ensemble: each takes what the one before it gives; the first and the last face the client."""
    last = len(spec.stages)
    for number, stage in enumerate(spec.stages):
        step = scheduling.step.add(model_name=stage.name, model_version=-1)
        for tensor in stage.inputs:
            step.input_map[tensor.name] = _between(number, last, tensor)
        for tensor in stage.outputs:
            step.output_map[tensor.name] = _between(number + 1, last, tensor)


def _between(number: int, last: int, tensor: TensorSpec) -> str:
    # On the two sides of a step, and to the client, one name may mean different tensors.
    return f"{number} {tensor.name}" if 0 < number < last else tensor.name


def config_text(
    spec: ModelSpec,
    most_waiting: int | None = None,
    labels: Mapping[str, str] = MappingProxyType({}),
    batch_delay_ms: int = 0,
) -> str:
    """config.pbtxt of a model, parsed back and compared. Raises RepositoryError."""
    message = config(spec, most_waiting, labels, batch_delay_ms)
    text = text_format.MessageToString(message)
    if text_format.Parse(text, type(message)()) != message:
        raise RepositoryError(f"config.pbtxt of {spec.name!r} does not read back as written; please report this model")
    return text


def check(prepared: Prepared) -> None:
    """Raise RepositoryError for a model that Triton's configuration cannot describe; nothing is written."""
    for part in (*prepared.stages, prepared):
        config_text(part.spec, part.most_waiting, part.labels, part.batch_delay_ms)


def _model_py(spec: ModelSpec) -> str:
    if spec.script is not None:
        return SCRIPT_MODEL_PY
    return MODEL_PY if spec.calls is None else META_MODEL_PY


def write(prepared: Prepared, repository: Path, *, link: bool, force: bool) -> Path:
    """Write a model into ``repository`` and return its directory. Raises RepositoryError.

    The stages of an ensemble are directories beside it; all are written out before the first is put in its place.
    ``link``: artifacts are hard links (symbolic ones across file systems) instead of copies; they then change when
    their source is changed in place. ``force``: replace a model of that name.
    """
    target = repository / prepared.spec.name
    try:
        repository.mkdir(parents=True, exist_ok=True)
        # The stages of an ensemble are several directories: those of two conversions at once must not mix.
        with locks.locked_folder(repository):
            _write(prepared, repository, link=link, force=force)
    except OSError as error:
        raise RepositoryError(
            f"cannot write {target}: {error.strerror or error}; check space, permissions and the source"
        ) from error
    return target


def check_places(prepared: Prepared, repository: Path, *, force: bool) -> set[str]:
    """Raise RepositoryError where ``prepared`` may not be written; the names of the parts it would replace."""
    target = repository / prepared.spec.name
    owner = target.name.rpartition("__")[0]
    if owner and target.name in _stages(repository / owner):
        raise RepositoryError(
            f"{target} is a part of the model {owner!r}; choose another name with --name, or another output folder"
        )
    _check_replaceable(target, prepared, force=force)
    own = _stages(target)
    for stage in prepared.stages:
        path = repository / stage.spec.name
        if os.path.lexists(path) and stage.spec.name not in own:
            raise RepositoryError(
                f"{path} is another model, or left by an interrupted conversion, and {target.name!r} needs that "
                "name for a part of it; rename or remove it"
            )
        _check_replaceable(path, stage, force=True)
    return own


def _write(prepared: Prepared, repository: Path, *, link: bool, force: bool) -> None:
    target = repository / prepared.spec.name
    own = check_places(prepared, repository, force=force)
    with _scratch(repository) as scratch:
        for part in (*prepared.stages, prepared):
            _fill(Path(scratch) / part.spec.name, part, link=link)
        for stage in prepared.stages:
            durable.swap_in(Path(scratch) / stage.spec.name, repository / stage.spec.name, replace=True)
        durable.swap_in(Path(scratch) / target.name, target, replace=force)
        for name in own - {stage.spec.name for stage in prepared.stages}:  # what was replaced had its hooks apart
            (repository / name).rename(Path(scratch) / name)
        durable.sync_directory(repository)


def _fill(directory: Path, prepared: Prepared, *, link: bool) -> None:
    """Write one model's directory, synced to disk."""
    spec = prepared.spec
    version = directory / VERSION
    version.mkdir(parents=True)
    text = config_text(spec, prepared.most_waiting, prepared.labels, prepared.batch_delay_ms)
    durable.write_text(directory / CONFIG_FILE, text)
    if not spec.stages:
        durable.write_text(version / MODEL_FILE, _model_py(spec))
    durable.write_text(version / SPEC_FILE, spec.to_json())
    for name, source in prepared.files.items():
        place(source, version / name, link=link)
    for folder in (version, directory):
        durable.sync_directory(folder)


def _stages(target: Path) -> set[str]:
    """The other models that the ensemble in ``target`` runs; none when there is no ensemble."""
    if not (target / VERSION / SPEC_FILE).is_file():
        return set()
    try:
        stages = ModelSpec.read(target / VERSION).stages
    except SpecError:  # of another version; its stages are left to the user
        return set()
    names = {stage.name for stage in stages if is_name(stage.name)}
    return {name for name in names if (target.parent / name / VERSION / SPEC_FILE).is_file()}


def _check_replaceable(target: Path, prepared: Prepared, *, force: bool) -> None:
    """Only a converted model may be replaced, and never the folder the model comes from."""
    if not os.path.lexists(target):
        return
    sources = [source.resolve() for source in prepared.files.values() if isinstance(source, Path)]
    if any(target.resolve() in source.parents for source in sources):
        raise RepositoryError(f"{target} is where the model comes from; choose another output folder with -o")
    if not (target / VERSION / SPEC_FILE).is_file():
        raise RepositoryError(f"{target} is not a converted model; remove it yourself or choose another output folder")
    if not force:
        raise RepositoryError(f"{target} exists; use --force to replace it")


def _scratch(repository: Path) -> tempfile.TemporaryDirectory[str]:
    """A temporary directory on the repository's file system.

    It lies beside the repository: Triton takes even a hidden directory inside for a model and refuses to start.
    """
    repository = repository.resolve()
    parent = repository.parent
    if parent.stat().st_dev != repository.stat().st_dev or not os.access(parent, os.W_OK):
        parent = repository
    return durable.scratch(parent, f".{repository.name}-convert-")


def _data_type(pb: Any, tensor: TensorSpec) -> int:
    if tensor.element.triton is None:
        raise RepositoryError(f"tensor {tensor.name!r} is {tensor.dtype}, which Triton has no type for")
    value: int = pb.DataType.Value(tensor.element.triton)
    return value
