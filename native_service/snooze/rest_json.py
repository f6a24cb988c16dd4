"""The JSON of SnoozeML's REST: tensors are flat lists of numbers, and all numbers of a model's record are whole."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from native_service.kserve.json import encode, parse_object
from native_service.models.residence import Residence
from native_service.models.served import ServedModel
from native_service.snooze.casts import FP32, Array
from nereid_backend.errors import InvalidArgument, OverLimit, short_repr

_MOST_INPUTS = 256
_MOST_DIMENSIONS = 32


def read_inputs(text: bytes | memoryview) -> dict[str, Array]:
    """The inputs of a request, FP32 and C-contiguous, by name. Raises InvalidArgument."""
    listed = parse_object(text).get("inputs")
    if not isinstance(listed, list) or not 0 < len(listed) <= _MOST_INPUTS:
        raise InvalidArgument(f"inputs must be a list of 1 to {_MOST_INPUTS} objects with name, shape and data")
    arrays: dict[str, Array] = {}
    for entry in listed:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise InvalidArgument(f"each of inputs needs a name that is text, got {short_repr(entry)}")
        name, where = entry["name"], f"input {short_repr(entry['name'])}"
        if name in arrays:
            raise InvalidArgument(f"{where} is sent twice; send it once")
        shape = entry.get("shape")
        if (
            not isinstance(shape, list)
            or not 0 < len(shape) <= _MOST_DIMENSIONS
            or not all(type(size) is int and size > 0 for size in shape)
        ):
            raise InvalidArgument(f"{where} needs a shape, a list of sizes of 1 at least, got {short_repr(shape)}")
        values = encode(entry.get("data"), str(FP32.kserve), shape, where)
        arrays[name] = np.frombuffer(values, FP32.numpy).reshape(shape)
    return arrays


def write_outputs(model: str, outputs: Mapping[str, Array], duration_ms: float, most_bytes: int) -> bytes:
    """The answer; what is not finite becomes null. Raises OverLimit for tensors of more than ``most_bytes``."""
    if sum(array.nbytes for array in outputs.values()) > most_bytes:
        raise OverLimit(
            f"the outputs of model {model!r} are too large for JSON, {most_bytes} bytes at most "
            "(server.limits.max_message_bytes); call over gRPC"
        )
    shown = [
        {"name": name, "shape": [*array.shape], "data": _values(array.reshape(-1))} for name, array in outputs.items()
    ]
    return json.dumps({"model_id": model, "outputs": shown, "duration_ms": duration_ms}).encode()


def _values(array: Array) -> list[Any]:
    finite = np.isfinite(array)
    values: list[Any] = array.tolist()
    return values if finite.all() else [value if its else None for value, its in zip(values, finite, strict=True)]


def model_info(model: ServedModel, residence: Residence) -> dict[str, Any]:
    """A model as SnoozeML's clients know it."""
    options = model.source.settings.options
    ago_s = 0.0 if residence.last_used_s is None else time.time() - residence.last_used_s
    return {
        "id": model.source.name,
        "state": residence.state,
        "onnx_path": model.source.path.name,
        "idle_timeout_secs": math.ceil(residence.idle_timeout_s or 0),
        "max_batch_size": max(1, model.spec.max_batch_size),
        "max_batch_delay_ms": options.batch_delay_ms,
        "last_accessed_secs_ago": max(0, int(ago_s)),
        "description": options.description,
        "pinned": residence.pinned,
        "memory_bytes": residence.memory_bytes,
    }
