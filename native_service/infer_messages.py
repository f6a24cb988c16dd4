"""ModelInfer messages written and read around their tensors, whose bytes are copied once and never parsed.

Protobuf's own objects would hold every tensor a second and a third time; a Checkpoint call may carry tens of MiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from mmap import mmap
from typing import NamedTuple

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from nereid_backend.errors import EngineError
from nereid_backend.spec import TensorSpec

_RAW_INPUT = service_pb2.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
_RAW_OUTPUT = service_pb2.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER
# Protobuf's wire types: the size of what follows a tag, None where it says so itself.
_VARINT, _LENGTH = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}


class Tensor(NamedTuple):
    """A tensor on the wire: little-endian, C order."""

    name: str
    shape: Sequence[int]
    data: bytes | memoryview | mmap


def write_request(model: str, inputs: Sequence[tuple[TensorSpec, Tensor]], request_id: str = "") -> bytes:
    """A serialised ModelInferRequest; the tensors are copied into it."""
    head = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    parts: list[bytes | memoryview | mmap] = []
    for spec, tensor in inputs:
        head.inputs.add(name=tensor.name, datatype=spec.element.kserve, shape=tensor.shape)
        parts += [_varint(_RAW_INPUT << 3 | _LENGTH), _varint(len(tensor.data)), tensor.data]
    return b"".join([head.SerializeToString(), *parts])


def read_outputs(message: bytes) -> list[Tensor]:
    """The outputs of a serialised ModelInferResponse; ``data`` are views of ``message``. Raises EngineError."""
    rest, contents = [], []
    try:
        for field, whole, value in _fields(memoryview(message)):
            if field == _RAW_OUTPUT:
                contents.append(value)
            else:
                rest.append(whole)
        outputs = service_pb2.ModelInferResponse.FromString(b"".join(rest)).outputs
    except (DecodeError, IndexError, KeyError):
        raise EngineError("Triton's answer is not a ModelInferResponse") from None
    if len(outputs) != len(contents):
        raise EngineError("Triton's answer has outputs that carry no bytes")
    return [Tensor(t.name, tuple(t.shape), data) for t, data in zip(outputs, contents, strict=True)]


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview, memoryview]]:
    """Number, whole and value of every field. Raises IndexError or KeyError for what is none."""
    start = 0
    while start < len(message):
        tag, at = _read_varint(message, start)
        kind = tag & 7
        if kind == _VARINT:
            _, end = _read_varint(message, at)
        elif kind == _LENGTH:
            size, at = _read_varint(message, at)
            end = at + size
        else:
            end = at + _FIXED_BYTES[kind]
        if end > len(message):
            raise IndexError(end)
        yield tag >> 3, message[start:end], message[at:end]
        start = end


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    """The number at ``at`` and where it ends. Raises IndexError beyond the end."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
