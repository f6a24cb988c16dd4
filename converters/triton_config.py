"""config.pbtxt of a model that another backend of Triton serves today: what it declares, read with bounds.

Rules and defaults are Triton's (``model_config.proto`` and the backends' own documentation). Everything set in the file
is either used, or named in ``Configured.changed``, or refused: nothing is dropped in silence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from nereid_backend import dtypes
from nereid_backend.errors import BundleError, TritonConfigError, short_repr
from nereid_backend.spec import MAX_SIZE, VARIABLE

CONFIG_FILE = "config.pbtxt"
_LARGEST_BYTES = 1024 * 1024
_LARGEST_RANK = 32
"""numpy 1.26's."""
_LONGEST_NAME = 255
_MOST_INSTANCES, _MOST_THREADS = 64, 1024

BACKENDS = {
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "torch_aoti": "pytorch",
    "tensorrt_plan": "tensorrt",
    "tensorflow_savedmodel": "tensorflow",
    "tensorflow_graphdef": "tensorflow",
    "ensemble": "ensemble",
}
"""The backend that a platform stands for."""

_REFUSED = {
    "sequence_batching": "requests of a sequence share state, which no model here keeps between requests; carry the "
    "state as inputs and outputs of the model",
    "batch_input": "tensors made of how Triton put a batch together exist inside its own backends only; export the "
    "model without them",
    "batch_output": "tensors split by how Triton put a batch together exist inside its own backends only; export the "
    "model without them",
    "model_operations": "custom operators are libraries, code that is not taken over; export the model without them",
    "model_repository_agents": "an agent changes the files before they are loaded; convert what it makes of them",
}
_LEFT_OUT = {
    "optimization": "the engine's defaults hold",
    "cc_model_filenames": "one file serves every GPU",
    "metric_tags": "metrics carry the model's name and version",
    "model_warmup": "a model warms itself while it loads",
    "model_metrics": "metrics are those of Triton",
    "response_cache": "every request is run",
}
_USED = {
    "name",
    "platform",
    "backend",
    "runtime",
    "version_policy",
    "max_batch_size",
    "input",
    "output",
    "dynamic_batching",
    "instance_group",
    "default_model_filename",
    "parameters",
    "model_transaction_policy",
    "ensemble_scheduling",
}
_BATCHING = {
    "preferred_batch_size": "a batch is what waits",
    "max_queue_delay_microseconds": "nothing waits for others: a batch is what waits anyway",
    "preserve_ordering": "answers go when they are ready",
    "priority_levels": "requests are served in their order",
    "default_priority_level": "requests are served in their order",
    "default_queue_policy": "nereid serve refuses beyond queue_capacity, Triton itself with --backpressure triton",
    "priority_queue_policy": "nereid serve refuses beyond queue_capacity, Triton itself with --backpressure triton",
}
_THREADS = ("intra_op_thread_count", "INTRA_OP_THREAD_COUNT")


@dataclass(frozen=True, slots=True)
class ConfiguredTensor:
    """A declared tensor; ``dims`` (what requests carry) and ``shape`` (what the model sees) exclude the batch."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    shape: tuple[int, ...]
    label_file: str = ""
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """A call of ``model`` in an ensemble: its inputs and outputs by name, each with the tensor between the steps."""

    model: str
    takes: Mapping[str, str]
    gives: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Configured:
    """What a config.pbtxt declares, checked. ``inputs`` or ``outputs`` are empty where the file leaves them open.

    ``backend`` and ``file`` are "" where it does not say. ``dynamic_batching``: whether requests share runs.
    ``device`` and ``instances`` are None where Triton chooses. ``latest`` versions are served, or those of
    ``specific``; 0 and none are all. ``steps`` are an ensemble's. ``changed`` is what will be otherwise, in words.
    """

    backend: str = ""
    file: str = ""
    max_batch_size: int = 0
    inputs: tuple[ConfiguredTensor, ...] = ()
    outputs: tuple[ConfiguredTensor, ...] = ()
    dynamic_batching: bool = False
    device: str | None = None
    instances: int | None = None
    threads: int | None = None
    latest: int = 1
    specific: tuple[int, ...] = ()
    steps: tuple[Step, ...] = ()
    changed: tuple[str, ...] = ()

    def served(self, versions: Sequence[int]) -> list[int]:
        """Those of ``versions`` (ascending) that Triton serves."""
        if self.specific:
            return [version for version in versions if version in self.specific]
        return [*versions[-self.latest :]]


def read(path: Path, folder: str) -> Configured:
    """Read the config.pbtxt of the model in ``folder``. Raises TritonConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise TritonConfigError(f"{CONFIG_FILE} cannot be read ({error.strerror})") from None
    if len(data) > _LARGEST_BYTES:
        raise TritonConfigError(f"{CONFIG_FILE} is larger than {_LARGEST_BYTES} bytes; keep what Triton needs")
    try:
        return parse(data.decode(), folder)
    except UnicodeDecodeError:
        raise TritonConfigError(f"{CONFIG_FILE} is not UTF-8 text; save it as such") from None
    except TritonConfigError as error:
        raise TritonConfigError(f"{CONFIG_FILE}: {error}") from None


def parse(text: str, folder: str) -> Configured:
    """Parse the text of a config.pbtxt. Raises TritonConfigError."""
    from tritonclient.grpc import model_config_pb2 as pb

    try:
        message = text_format.Parse(text, pb.ModelConfig())
    except (text_format.ParseError, RecursionError) as error:
        raise TritonConfigError(f"is not what Triton reads ({str(error)[:200]}); correct it") from None
    if message.name not in ("", folder):
        raise TritonConfigError(
            f"the name is {short_repr(message.name)} and the folder {short_repr(folder)}; Triton wants them equal"
        )
    _refuse(message)
    inputs = tuple(_tensor(pb, tensor, "input") for tensor in message.input)
    outputs = tuple(_tensor(pb, tensor, "output") for tensor in message.output)
    for role, tensors in (("input", inputs), ("output", outputs)):
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise TritonConfigError(f"an {role} is declared twice; keep one of that name")
    if not 0 <= message.max_batch_size <= MAX_SIZE:
        raise TritonConfigError(f"max_batch_size must be >= 0, got {message.max_batch_size}")
    device, instances, groups = _instances(pb, message.instance_group)
    threads, parameters = _parameters(message.parameters)
    latest, specific = _versions(message.version_policy)
    return Configured(
        backend=message.backend or BACKENDS.get(message.platform, message.platform),
        file=_file_name("default_model_filename", message.default_model_filename, folders=False),
        max_batch_size=message.max_batch_size,
        inputs=inputs,
        outputs=outputs,
        dynamic_batching=message.HasField("dynamic_batching"),
        device=device,
        instances=instances,
        threads=threads,
        latest=latest,
        specific=specific,
        steps=tuple(_step(step) for step in message.ensemble_scheduling.step),
        changed=(*_left_out(message), *groups, *parameters),
    )


def _refuse(message: Any) -> None:
    """Raise TritonConfigError for what would answer otherwise without it."""
    for field, _ in message.ListFields():
        if (why := _REFUSED.get(field.name)) is not None:
            raise TritonConfigError(f"{field.name} is not taken over: {why}")
    if message.model_transaction_policy.decoupled:
        raise TritonConfigError(
            "a decoupled model gives any number of answers to a request, these models give one; let it stay with its "
            "own backend"
        )


def _left_out(message: Any) -> Iterator[str]:
    for field, _ in message.ListFields():
        if field.name not in _USED:
            yield f"{field.name} is left out: {_LEFT_OUT.get(field.name, 'it is not known here')}"
    for field, _ in message.dynamic_batching.ListFields():
        yield f"dynamic_batching.{field.name} is left out: {_BATCHING.get(field.name, 'it is not known here')}"


# Tensors.


def _tensor(pb: Any, tensor: Any, role: str) -> ConfiguredTensor:
    name = tensor.name
    if not name or not name.isprintable():
        raise TritonConfigError(f"an {role} has the name {short_repr(name)}; give it one that can be printed")
    where = f"{role} {short_repr(name)}"
    for flag in ("is_shape_tensor", "is_non_linear_format_io", "allow_ragged_batch"):
        if getattr(tensor, flag, False):
            raise TritonConfigError(f"{where}: {flag} is not taken over; export the model with plain tensors")
    try:
        dtype = dtypes.by_triton(pb.DataType.Name(tensor.data_type))
    except (ValueError, BundleError):  # a number that no name belongs to, or none given
        raise TritonConfigError(f"{where}: data_type {tensor.data_type} is no type of tensors; correct it") from None
    dims = _dims(tensor.dims, f"{where}: dims")
    if not dims:
        raise TritonConfigError(f"{where} has no dims; list them, without the batch")
    shape = dims
    if tensor.HasField("reshape"):
        shape = _dims(tensor.reshape.shape, f"{where}: reshape")
        fixed = [[size for size in sizes if size != VARIABLE] for sizes in (dims, shape)]
        if dims.count(VARIABLE) != shape.count(VARIABLE) or math.prod(fixed[0]) != math.prod(fixed[1]):
            raise TritonConfigError(f"{where}: reshape {list(shape)} holds other elements than dims {list(dims)}")
    label_file = _file_name(f"{where}: label_filename", getattr(tensor, "label_filename", ""), folders=True)
    return ConfiguredTensor(name, dtype.token, dims, shape, label_file, getattr(tensor, "optional", False))


def _dims(values: Sequence[int], where: str) -> tuple[int, ...]:
    if len(values) > _LARGEST_RANK:
        raise TritonConfigError(f"{where} lists {len(values)} dimensions; {_LARGEST_RANK} are possible")
    if wrong := [value for value in values if value != VARIABLE and not 1 <= value <= MAX_SIZE]:
        raise TritonConfigError(f"{where} has {wrong[0]}; dimensions are -1 or from 1 to {MAX_SIZE}")
    return tuple(values)


def _file_name(where: str, name: str, *, folders: bool) -> str:
    """The name of a file, which cannot lead out of its folder, or ""."""
    parts = name.split("/")
    if name and (not name.isprintable() or len(name) > _LONGEST_NAME or {"", ".", ".."} & {*parts}):
        raise TritonConfigError(f"{where} {short_repr(name)} is no name of a file in the model's folder; correct it")
    if len(parts) > 1 and not folders:
        raise TritonConfigError(f"{where} {short_repr(name)} names a folder; give the file in the version's folder")
    return name


def _step(step: Any) -> Step:
    if step.model_namespace:
        raise TritonConfigError(f"the step {short_repr(step.model_name)} names a namespace; there is one here")
    return Step(step.model_name, dict(step.input_map), dict(step.output_map))


# How it runs.


def _instances(pb: Any, groups: Sequence[Any]) -> tuple[str | None, int | None, list[str]]:
    """Device, number of instances and what is left out of the groups."""
    kinds = pb.ModelInstanceGroup.Kind
    active = [group for group in groups if not group.passive]
    if not active:
        return None, None, []
    first, *others = active
    changed = [
        f"instance_group {short_repr(group.name or index + 2)} is left out" for index, group in enumerate(others)
    ]
    for field, _ in first.ListFields():
        if field.name not in ("name", "kind", "count", "gpus"):
            changed.append(f"instance_group.{field.name} is left out: instances share nothing to be arbitrated")
    if not 0 <= first.count <= _MOST_INSTANCES:
        raise TritonConfigError(f"instance_group.count must be <= {_MOST_INSTANCES}, got {first.count}; lower it")
    device = None
    if first.kind == kinds.KIND_CPU:
        device = "cpu"
    elif first.kind == kinds.KIND_GPU or first.gpus:
        index = first.gpus[0] if first.gpus else 0
        device = f"cuda:{index}"
        if len(first.gpus) > 1:
            left = ", ".join(str(gpu) for gpu in first.gpus[1:9])
            changed.append(f"instances on other GPUs ({left}) are left out: a model has one device")
    return device, first.count or 1, changed


def _parameters(parameters: Any) -> tuple[int | None, list[str]]:
    """The number of threads, and what is left out."""
    threads, changed = None, []
    for key in sorted(parameters):
        value = parameters[key].string_value
        if key in _THREADS and re.fullmatch(r"[0-9]{1,4}", value) and int(value) <= _MOST_THREADS:
            threads = int(value) or None
            continue
        changed.append(f"parameter {short_repr(key)} is left out: it is for Triton's own backend")
    return threads, changed


def _versions(policy: Any) -> tuple[int, tuple[int, ...]]:
    which = policy.WhichOneof("policy_choice")
    if which == "specific":
        if not policy.specific.versions:
            raise TritonConfigError("version_policy names no version; list one")
        return 0, tuple(policy.specific.versions)
    if which == "all":
        return 0, ()
    return policy.latest.num_versions or 1, ()
