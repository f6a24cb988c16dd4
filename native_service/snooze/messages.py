"""``snoozeml.v1`` messages read and written around their tensors, which are neither parsed nor copied once more.

What protobuf's objects would hold a second time may be tens of MiB, and a message of millions of tiny fields would keep
the interpreter for minutes: here both are bounded before anything is made of them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from native_service.edge.wire import fields, read_varint, varint
from native_service.envoy.scripts import MOST_TEXT_BYTES
from native_service.snooze.casts import DATA_TYPES, FP32, NUMBERS, Array
from nereid_backend.dtypes import DType
from nereid_backend.errors import InvalidArgument, short_repr

TYPED = "typed"
"""The parameter by which a client says that it sends and reads a model's own types."""
_BOOLEANS = {"true": True, "false": False}
_MOST_FIELDS = 10_000
_MOST_DIMENSIONS = 32  # numpy 1.26's
_LONGEST_TIMEOUT_MS = 31 * 86_400_000
# Keys: the number of a field * 8 + its kind.
_MODEL, _INPUT, _TIMEOUT, _PARAMETER = 10, 18, 24, 34
_NAME, _PACKED_SHAPE, _SIZE, _DATA_TYPE, _DATA = 10, 18, 16, 24, 34
_ENTRY_KEY, _ENTRY_VALUE = 10, 18


class _Sent(NamedTuple):
    """An input; its bytes are from ``start`` to ``end`` of the message."""

    name: str
    shape: tuple[int, ...]
    data_type: int
    start: int
    end: int


class InferRequest(NamedTuple):
    """What a message says; whether it may say so is looked at by who asks for it."""

    message: bytes
    model: str
    sent: Sequence[_Sent]
    timeout_ms: int | None
    parameters: Mapping[str, str]

    @property
    def timeout_s(self) -> float | None:
        """How long the call may take. Raises InvalidArgument."""
        if self.timeout_ms is None:
            return None
        if not self.timeout_ms:
            raise InvalidArgument("client_timeout_ms is 0; leave it out or send more")
        return min(self.timeout_ms, _LONGEST_TIMEOUT_MS) / 1000

    @property
    def typed(self) -> bool:
        """Whether the client sends and reads the model's own types. Raises InvalidArgument."""
        said = self.parameters.get(TYPED, "false")
        if said not in _BOOLEANS:
            raise InvalidArgument(f"parameter {TYPED!r} is {short_repr(said)}; expected 'true' or 'false'")
        return _BOOLEANS[said]

    def inputs(self) -> dict[str, Array]:
        """Views of the message by name. Raises InvalidArgument."""
        typed = self.typed
        found = {tensor.name: _array(self.message, tensor, typed=typed) for tensor in self.sent}
        if len(found) != len(self.sent):
            raise InvalidArgument("an input is sent twice; send each once")
        return found


def read_request(message: bytes) -> InferRequest:
    """A serialised ModelInferRequest. Raises InvalidArgument."""
    try:
        return _Reader(message).request()
    except (IndexError, KeyError, UnicodeDecodeError):
        raise InvalidArgument("the request is not a valid snoozeml.v1.ModelInferRequest") from None


def write_response(model: str, outputs: Mapping[str, Array], duration_ms: float) -> bytes:
    """A serialised ModelInferResponse; ``outputs`` are C-contiguous and of a type in ``NUMBERS``."""
    parts: list[bytes | memoryview] = [_text(_MODEL, model)]
    for name, array in outputs.items():
        shape = b"".join(map(varint, array.shape))
        number = next(number for number, element in DATA_TYPES.items() if element.numpy == array.dtype)
        head = b"".join(
            (
                _text(_NAME, name),
                varint(_PACKED_SHAPE) + varint(len(shape)) + shape,
                varint(_DATA_TYPE) + varint(number),
                varint(_DATA) + varint(array.nbytes),
            )
        )
        parts += [varint(_INPUT), varint(len(head) + array.nbytes), head, array.reshape(-1).view(np.uint8).data]
    parts.append(b"\x19" + struct.pack("<d", duration_ms))
    return b"".join(parts)


def _text(key: int, text: str) -> bytes:
    data = text.encode()
    return varint(key) + varint(len(data)) + data


class _Reader:
    """Reads one message, with what is left of the fields and the bytes beside tensors that it may have."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._fields_left, self._text_bytes_left = _MOST_FIELDS, MOST_TEXT_BYTES

    def request(self) -> InferRequest:
        """Of a field that comes twice the last counts, as in every reader of protobuf."""
        model, timeout_ms, sent, parameters = "", None, list[_Sent](), dict[str, str]()
        for key, start, end in self._fields(0, len(self._message)):
            if key == _MODEL:
                model = self._read_text(start, end)
            elif key == _INPUT:
                sent.append(self._input(start, end))
            elif key == _TIMEOUT:
                timeout_ms = read_varint(self._message, start)[0]
            elif key == _PARAMETER:
                name, value = self._parameter(start, end)
                parameters[name] = value
        return InferRequest(self._message, model, sent, timeout_ms, parameters)

    def _fields(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        for field in fields(self._message, start, end):
            self._spend_field()
            yield field

    def _spend_field(self) -> None:
        self._fields_left -= 1
        if self._fields_left < 0:
            raise InvalidArgument(f"the request has more than {_MOST_FIELDS} fields")

    def _read_text(self, start: int, end: int) -> str:
        self._text_bytes_left -= end - start
        if self._text_bytes_left < 0:
            raise InvalidArgument(f"the request has more than {MOST_TEXT_BYTES} bytes of names and parameters")
        return self._message[start:end].decode()

    def _parameter(self, start: int, end: int) -> tuple[str, str]:
        name = value = ""
        for key, first, last in self._fields(start, end):
            if key == _ENTRY_KEY:
                name = self._read_text(first, last)
            elif key == _ENTRY_VALUE:
                value = self._read_text(first, last)
        return name, value

    def _input(self, start: int, end: int) -> _Sent:
        name, shape, data_type, place = "", list[int](), 0, (end, end)
        for key, first, last in self._fields(start, end):
            if key == _NAME:
                name = self._read_text(first, last)
            elif key == _PACKED_SHAPE:
                while first < last:
                    self._spend_field()
                    size, first = read_varint(self._message, first)
                    shape.append(size)
                if first > last:
                    raise IndexError(first)
            elif key == _SIZE:
                shape.append(read_varint(self._message, first)[0])
            elif key == _DATA_TYPE:
                data_type = read_varint(self._message, first)[0]
            elif key == _DATA:
                place = first, last
        return _Sent(name, tuple(shape), data_type, *place)


def _array(message: bytes, sent: _Sent, *, typed: bool) -> Array:
    where = f"input {short_repr(sent.name)}"
    element = _element(sent.data_type, where, typed=typed)
    # Negative ones are the largest here.
    if not sent.shape or not all(0 < size < 2**63 for size in sent.shape):
        raise InvalidArgument(f"{where} needs one dimension at least and sizes of 1 at least")
    if len(sent.shape) > _MOST_DIMENSIONS:
        raise InvalidArgument(f"{where} has {len(sent.shape)}; at most {_MOST_DIMENSIONS} dimensions are taken")
    count, size_bytes = math.prod(sent.shape), sent.end - sent.start
    if count * element.size_bytes != size_bytes:
        expected = f"{short_repr(list(sent.shape))} of {element.kserve} takes {short_repr(count * element.size_bytes)}"
        raise InvalidArgument(f"{where} has {size_bytes} bytes of raw_data; {expected}")
    return np.frombuffer(message, element.numpy, count, sent.start).reshape(sent.shape)


def _element(data_type: int, where: str, *, typed: bool) -> DType:
    element = DATA_TYPES.get(data_type or NUMBERS[FP32])
    if element is None:
        raise InvalidArgument(f"{where} has an unsupported data type, number {data_type}")
    if element is not FP32 and not typed:
        raise InvalidArgument(
            f"{where} has the unsupported data type {element.kserve}; send FP32, or the parameter {TYPED!r} with 'true'"
        )
    return element
