"""KServe v2 over HTTP: JSON, with tensors in it or as bytes behind it, to the messages of the gRPC service and back.

A body is JSON, or JSON of so many bytes as the header ``Inference-Header-Content-Length`` says and behind it the
tensors that name their ``binary_data_size``, in order, little-endian and C-contiguous.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from google.protobuf.message import Message
from tritonclient.grpc import service_pb2 as pb

from native_service.envoy.scripts import MOST_ELEMENTS, REGION
from nereid_backend import dtypes
from nereid_backend.errors import BundleError, InvalidArgument, OverLimit, short_repr

BINARY_SIZE = "binary_data_size"
_BINARY, _ALL_BINARY = "binary_data", "binary_data_output"
# Numbers that are written to JSON at a time: other calls get their turn in between.
_SLICE = 8192
# Before each text of a BYTES tensor.
_LENGTH_BYTES = 4
# By numpy's kind, the types of JSON values that stand for it.
_KINDS: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}}
_INT64 = range(-(2**63), 2**63)


class InferRequest:
    """A ModelInferRequest, and which of its outputs the client wants as bytes behind the JSON."""

    def __init__(self, message: Any, binary: Mapping[str, bool], otherwise: bool) -> None:
        self.message = message
        self.regions = {o.name: _parameters(o.parameters) for o in message.outputs if REGION in o.parameters}
        """The parameters of the outputs that go to shared memory."""
        self._binary, self._otherwise = binary, otherwise

    def is_binary(self, output: str) -> bool:
        return self._binary.get(output, self._otherwise)


def read_infer(model: str, version: str, text: memoryview, tensors: memoryview) -> InferRequest:
    """The request for ``model`` in a body cut into JSON and bytes. Raises InvalidArgument."""
    raw = parse_object(text)
    message = pb.ModelInferRequest(model_name=model, model_version=version)
    _set(message, "id", raw.get("id", ""))
    parameters = _mapping(raw, "parameters")
    otherwise = parameters.pop(_ALL_BINARY, False) is True
    _set_parameters(message.parameters, parameters)
    taken = 0
    for entry in _mappings(raw, "inputs"):
        taken += _read_input(message, entry, tensors[taken:])
    if taken != len(tensors):
        raise InvalidArgument(f"{len(tensors)} bytes follow the JSON, its inputs claim {taken} as {BINARY_SIZE}")
    binary = {}
    for entry in _mappings(raw, "outputs"):
        output, wanted = message.outputs.add(), _mapping(entry, "parameters")
        _set(output, "name", entry.get("name"))
        if _BINARY in wanted:
            binary[output.name] = wanted.pop(_BINARY) is True
        _set_parameters(output.parameters, wanted)
    return InferRequest(message, binary, otherwise)


def parse_object(text: memoryview | bytes) -> dict[str, Any]:
    """The JSON object in ``text``, empty for no text. Raises InvalidArgument."""
    try:
        raw = json.loads(bytes(text).decode()) if text else {}
    except (ValueError, RecursionError) as error:  # also bytes that are no UTF-8 and numbers of thousands of digits
        reason = getattr(error, "msg", None) or type(error).__name__
        where = f" at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InvalidArgument(f"the request is not JSON ({reason}{where})") from None
    if not isinstance(raw, dict):
        raise InvalidArgument(f"the request must be a JSON object, got {short_repr(raw)}")
    return raw


def set_field(message: Any, raw: Mapping[str, Any], name: str) -> None:
    """Copy ``raw[name]``, if it is there, to the field of ``message``. Raises InvalidArgument."""
    if name in raw:
        _set(message, name, raw[name])


def set_parameters(message: Any, raw: Mapping[str, Any]) -> None:
    """The ``parameters`` of ``raw`` as those of ``message``. Raises InvalidArgument."""
    _set_parameters(message.parameters, _mapping(raw, "parameters"))


def _read_input(message: Any, entry: Mapping[str, Any], tensors: memoryview) -> int:
    """Add the input that ``entry`` describes; how many of ``tensors`` are its bytes."""
    tensor = message.inputs.add()
    _set(tensor, "name", entry.get("name"))
    _set(tensor, "datatype", entry.get("datatype"))
    where, shape = f"input {short_repr(tensor.name)}", entry.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and size in _INT64 for size in shape):
        raise InvalidArgument(f"{where}: shape must be a list of whole numbers, got {short_repr(shape)}")
    tensor.shape.extend(shape)
    parameters = _mapping(entry, "parameters")
    size = parameters.pop(BINARY_SIZE, None)
    _set_parameters(tensor.parameters, parameters)
    ways = [name for name, there in (("data", "data" in entry), (BINARY_SIZE, size is not None)) if there]
    if len(ways) + (REGION in parameters) != 1:
        raise InvalidArgument(f"{where} needs its values in exactly one of data, {BINARY_SIZE} and {REGION}")
    if size is None:
        if "data" in entry:
            message.raw_input_contents.append(encode(entry["data"], tensor.datatype, shape, where))
        return 0
    if type(size) is not int or not 0 <= size <= len(tensors):
        raise InvalidArgument(f"{where}: {BINARY_SIZE} is {short_repr(size)}, {len(tensors)} bytes are left")
    message.raw_input_contents.append(bytes(tensors[:size]))
    return size


def encode(data: Any, datatype: str, shape: Sequence[int], where: str) -> bytes:
    """The tensor of nested or flat lists ``data`` as bytes. Raises InvalidArgument."""
    flat = _flat(data, where)
    if len(flat) != _elements(shape):
        wanted = short_repr(list(shape))
        raise InvalidArgument(f"{where} has {len(flat)} values, its shape {wanted} takes another number")
    if datatype == dtypes.BYTES.kserve:
        return _encode_texts(flat, where)
    dtype = _dtype(datatype, where)
    kind = dtype.kind
    if wrong := set(map(type, flat)) - _KINDS.get(kind, {int, float}):
        names = sorted(each.__name__ for each in wrong)
        raise InvalidArgument(f"{where}: {datatype} does not take values of the kinds {names}")
    if kind in "iu" and flat and not (np.iinfo(dtype).min <= min(flat) and max(flat) <= np.iinfo(dtype).max):
        raise InvalidArgument(f"{where} has values that {datatype} cannot hold")
    try:
        if kind in "biu":
            return np.array(flat, dtype).tobytes()
        with np.errstate(over="ignore"):  # beyond its range a float is infinite, as in Triton
            return np.array(flat, np.float64).astype(dtype).tobytes()
    except OverflowError:
        raise InvalidArgument(f"{where} has values that {datatype} cannot hold") from None


def _encode_texts(texts: list[Any], where: str) -> bytes:
    try:
        encoded = [text.encode() for text in texts]
    except (AttributeError, UnicodeEncodeError):
        raise InvalidArgument(f"{where}: BYTES takes texts only; send other bytes as binary data") from None
    return b"".join(part for text in encoded for part in (len(text).to_bytes(_LENGTH_BYTES, "little"), text))


def _decode_texts(data: bytes, name: str) -> list[str]:
    texts, at = [], 0
    while at < len(data):
        start = at + _LENGTH_BYTES
        at = start + int.from_bytes(data[at:start], "little")
        try:
            texts.append(data[start:at].decode())
        except UnicodeDecodeError:
            raise InvalidArgument(f"output {name!r} is not text; ask for it with the parameter {_BINARY}") from None
    return texts


def _dtype(datatype: str, where: str) -> np.dtype[Any]:
    try:
        return dtypes.by_kserve(datatype).numpy
    except BundleError as error:
        raise InvalidArgument(f"{where}: {error}") from None


def _flat(data: Any, where: str) -> list[Any]:
    if not isinstance(data, list):
        raise InvalidArgument(f"{where}: data must be a list, got {short_repr(data)}")
    flat = data
    while flat and isinstance(flat[0], list):
        if not all(isinstance(part, list) for part in flat):
            raise InvalidArgument(f"{where}: data mixes lists and values")
        flat = list(chain.from_iterable(flat))
    return flat


def _elements(shape: Sequence[int]) -> int:
    """The product of ``shape``, or -1 for what no tensor has; it stops early, a shape may be a million sizes."""
    count = 1
    for size in shape:
        count *= size
        if not 0 <= count <= MOST_ELEMENTS:
            return -1
    return count


def _mapping(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key, {})
    if not isinstance(value, dict):
        raise InvalidArgument(f"{key} must be a JSON object, got {short_repr(value)}")
    return dict(value)


def _mappings(raw: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    value = raw.get(key, [])
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise InvalidArgument(f"{key} must be a list of JSON objects, got {short_repr(value)}")
    return value


def _set(message: Any, name: str, value: Any) -> None:
    try:
        setattr(message, name, value)
    except (TypeError, ValueError):  # another type, a number too large, a lone surrogate
        raise InvalidArgument(f"{name} is missing or of a wrong type, got {short_repr(value)}") from None


def _set_parameters(target: Any, raw: Mapping[str, Any]) -> None:
    fields = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for name, value in raw.items():
        try:
            setattr(target[name], fields[type(value)], value)
        except (KeyError, AttributeError, TypeError, ValueError):  # not every message takes every type
            raise InvalidArgument(
                f"parameter {short_repr(name)} has a value that cannot be sent, {short_repr(value)}"
            ) from None


def write_infer(response: Any, request: InferRequest, most_json_bytes: int) -> tuple[bytes, bytes]:
    """The JSON and the bytes behind it of ``response``. Raises OverLimit for tensors too large for JSON."""
    head: dict[str, Any] = {"id": response.id} if response.id else {}
    head |= {"model_name": response.model_name, "model_version": response.model_version}
    if response.parameters:
        head["parameters"] = _parameters(response.parameters)
    contents = iter(response.raw_output_contents)
    outputs, binary, json_bytes = [], [], 0
    for output in response.outputs:
        shown: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": [*output.shape]}
        parameters, values = _parameters(output.parameters), ""
        data = next(contents, b"")
        if output.name in request.regions:
            parameters |= request.regions[output.name]
        else:
            if request.is_binary(output.name):
                parameters[BINARY_SIZE] = len(data)
                binary.append(data)
            else:
                json_bytes += len(data)
                if json_bytes > most_json_bytes:
                    raise OverLimit(
                        f"output {output.name!r} is too large for JSON, {most_json_bytes} bytes of tensors at most; "
                        f"ask for it with the parameter {_BINARY}"
                    )
                values = f',"data":[{",".join(_values(data, output.datatype, output.name))}]'
        if parameters:
            shown["parameters"] = parameters
        outputs.append(json.dumps(shown)[:-1] + values + "}")
    text = f'{json.dumps(head)[:-1]},"outputs":[{",".join(outputs)}]}}'
    return text.encode(), b"".join(binary)


def _values(data: bytes, datatype: str, name: str) -> Iterator[str]:
    if datatype == dtypes.BYTES.kserve:
        yield json.dumps(_decode_texts(data, name))[1:-1]
        return
    array = np.frombuffer(data, _dtype(datatype, f"output {name!r}"))
    if array.dtype.kind == "V":  # bfloat16
        array = array.astype(np.float32)
    for start in range(0, len(array), _SLICE):
        yield json.dumps(array[start : start + _SLICE].tolist())[1:-1]


def _parameters(parameters: Any) -> dict[str, Any]:
    return {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in parameters.items()}


def to_json(message: Message) -> dict[str, Any]:
    """A message as Triton writes it over HTTP: every field under its own name, and 64-bit numbers as numbers."""
    fields = message.DESCRIPTOR.fields
    there = [f for f in fields if f.is_repeated or not f.has_presence or message.HasField(f.name)]
    return {field.name: _field_to_json(field, getattr(message, field.name)) for field in there}


def _field_to_json(field: Any, value: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name["value"]
        return {key: _value_to_json(entry, value[key]) for key in value}
    return [_value_to_json(field, each) for each in value] if field.is_repeated else _value_to_json(field, value)


def _value_to_json(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return to_json(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value.decode(errors="replace") if isinstance(value, bytes) else value
