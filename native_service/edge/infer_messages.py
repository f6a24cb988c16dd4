"""ModelInfer messages written and read around their tensors, whose bytes are copied once and never parsed.

Protobuf's own objects would hold every tensor a second and a third time; a Checkpoint call may carry tens of MiB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from mmap import mmap
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from native_service.edge.regions import Region
from native_service.edge.wire import LENGTH, fields, varint
from nereid_backend import dtypes
from nereid_backend.errors import EngineError
from nereid_backend.spec import TensorSpec

_RAW_INPUT_KEY = varint(service_pb2.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER << 3 | LENGTH)
_RAW_OUTPUT_KEY = service_pb2.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER << 3 | LENGTH


class Tensor(NamedTuple):
    """A tensor on the wire: little-endian, C order."""

    name: str
    shape: Sequence[int]
    data: bytes | memoryview | mmap | Region

    @property
    def size_bytes(self) -> int:
        return self.data.used_bytes if isinstance(self.data, Region) else len(self.data)

    def part(self, start: int, stop: int) -> bytes:
        """A copy of these bytes, fewer beyond the end."""
        return self.data.read(start, stop) if isinstance(self.data, Region) else bytes(self.data[start:stop])


def write_request(
    model: str,
    inputs: Sequence[tuple[TensorSpec, Tensor]],
    outputs: Mapping[str, Region | None] | None = None,
    request_id: str = "",
) -> bytes:
    """A serialised ModelInferRequest. Tensors are copied into it, but for those in regions, which Triton must know.

    ``outputs``: what to answer with, and where to put it; None for all, in the answer.
    """
    head = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    parts: list[bytes | memoryview | mmap] = []
    for spec, tensor in inputs:
        described = head.inputs.add(name=tensor.name, datatype=spec.element.kserve, shape=tensor.shape)
        if isinstance(tensor.data, Region):
            _place(described, tensor.data, tensor.data.used_bytes)
        else:
            parts += [_RAW_INPUT_KEY, varint(len(tensor.data)), tensor.data]
    for name, region in (outputs or {}).items():
        asked = head.outputs.add(name=name)
        if region is not None:
            _place(asked, region, region.size_bytes)
    return b"".join([head.SerializeToString(), *parts])


def _place(described: Any, region: Region, size_bytes: int) -> None:
    described.parameters["shared_memory_region"].string_param = region.name
    described.parameters["shared_memory_byte_size"].int64_param = size_bytes


def read_outputs(message: bytes, regions: Mapping[str, Region | None] | None = None) -> list[Tensor]:
    """The outputs of a serialised ModelInferResponse. Raises EngineError.

    ``data`` are views of ``message``, or the regions that the request asked for, whose ``used_bytes`` are set.
    """
    rest, contents = [], []
    view, begin = memoryview(message), 0
    try:
        for key, start, end in fields(view):
            if key == _RAW_OUTPUT_KEY:
                contents.append(view[start:end])
            else:
                rest.append(view[begin:end])
            begin = end
        outputs = service_pb2.ModelInferResponse.FromString(b"".join(rest)).outputs
    except (DecodeError, IndexError, KeyError):
        raise EngineError("Triton's answer is not a ModelInferResponse") from None
    placed = {name: region for name, region in (regions or {}).items() if region is not None}
    if len(contents) == len(outputs):  # Triton leaves an empty place for each that is elsewhere, but for the last
        carried = [data for t, data in zip(outputs, contents, strict=True) if t.name not in placed]
    else:
        carried = contents
    if len(carried) != sum(t.name not in placed for t in outputs):
        raise EngineError("Triton's answer has outputs that carry no bytes")
    rest_of = iter(carried)
    return [
        _filled(t, placed[t.name]) if t.name in placed else Tensor(t.name, tuple(t.shape), next(rest_of))
        for t in outputs
    ]


def _filled(output: Any, region: Region) -> Tensor:
    region.used_bytes = math.prod(output.shape) * dtypes.by_kserve(output.datatype).size_bytes
    return Tensor(output.name, tuple(output.shape), region)
