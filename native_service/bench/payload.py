"""The requests of a load, serialised once: tensors from a model's metadata, their content made up or from files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import serialize_byte_tensor

from native_service.client.errors import BadRequest
from native_service.client.messages import Contract, tensor_requests
from nereid_backend import dtypes

Array = np.ndarray[Any, np.dtype[Any]]
Request = bytes | list[bytes]
"""A serialised ModelInferRequest, or the serialised messages of a Checkpoint."""

_SEED = 0
# Different requests of a load, so that nobody's cache answers; fewer when they are large.
_MADE_UP, _OF_FILES = 16, 1024
_MOST_BYTES = 64 * 1024 * 1024
# gRPC's messages end at 2 GiB.
_LARGEST_REQUEST_BYTES = 1024 * 1024 * 1024
# Valid as bytes of an image, as token ids of any vocabulary and as counts.
_MOST_INTEGER = 100
_TEXT_CHARACTERS = 16


class Tensor(NamedTuple):
    """An input as the model's metadata has it. ``shape``: -1 where it is free, in its first place the rows."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class Inputs(NamedTuple):
    """What a model takes. ``rows_at_most``: 0 where its first axis is not for rows, None where nobody says."""

    model: str
    tensors: tuple[Tensor, ...]
    rows_at_most: int | None

    @property
    def has_rows(self) -> bool:
        return self.rows_at_most != 0


def of_metadata(metadata: Any, config: Any | None) -> Inputs:
    """From a ModelMetadataResponse, and the ModelConfig where the server gives one."""
    tensors = tuple(Tensor(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in metadata.inputs)
    free = bool(tensors) and all(tensor.shape[:1] == (-1,) for tensor in tensors)
    at_most: int | None = 0 if config is None else config.max_batch_size
    if not at_most and free:
        at_most = None
    return Inputs(metadata.name, tensors, at_most)


def requests(
    inputs: Inputs, rows: int, shapes: Mapping[str, Sequence[int]], given: Mapping[str, Any], native: bool
) -> list[Request]:
    """Requests of ``rows`` rows each. ``shapes``: without the rows; ``given``: arrays by name, any number of rows.

    Raises BadRequest for what does not fit the model.
    """
    for name in (*shapes, *given):
        if name not in (tensor.name for tensor in inputs.tensors):
            raise BadRequest(
                f"model {inputs.model!r} has no input {name!r}; it has: {', '.join(t.name for t in inputs.tensors)}"
            )
    if inputs.rows_at_most is not None and rows > max(1, inputs.rows_at_most):
        takes = f"up to {inputs.rows_at_most} rows" if inputs.has_rows else "no rows"
        raise BadRequest(f"model {inputs.model!r} takes {takes} in a request, got --batch {rows}")
    sources = [
        _source(inputs, tensor, rows, shapes.get(tensor.name), given.get(tensor.name)) for tensor in inputs.tensors
    ]
    size_bytes = sum(source.size_bytes for source in sources)
    if size_bytes > _LARGEST_REQUEST_BYTES:
        raise BadRequest(f"a request would hold {size_bytes} bytes; at most {_LARGEST_REQUEST_BYTES} can be sent")
    different = max((source.different for source in sources), default=1)
    number = max(1, min(different, _MOST_BYTES // max(1, size_bytes)))
    write = _checkpoint if native else _infer
    return [write(inputs, [next(source.arrays) for source in sources]) for _ in range(number)]


class _Source(NamedTuple):
    """Arrays for one input, without an end; ``different`` of them before they repeat."""

    arrays: Iterator[Array]
    size_bytes: int
    different: int


def _source(inputs: Inputs, tensor: Tensor, rows: int, shape: Sequence[int] | None, given: Any) -> _Source:
    if given is not None:
        return _of_file(inputs, tensor, rows, given)
    declared = tensor.shape[1:] if inputs.has_rows else tensor.shape
    dims = tuple(declared if shape is None else shape)
    if -1 in dims:
        example = ",".join("N" if size == -1 else str(size) for size in dims)
        raise BadRequest(
            f"model {inputs.model!r} input {tensor.name!r} has the shape {list(tensor.shape)}; "
            f"say what its free sizes are: --shape {tensor.name}:{example}"
        )
    _check(inputs, tensor, dims, declared)
    whole = (rows, *dims) if inputs.has_rows else dims
    row = dtypes.BYTES if tensor.datatype == dtypes.BYTES.kserve else dtypes.by_kserve(tensor.datatype)
    element_bytes = 4 + _TEXT_CHARACTERS if row is dtypes.BYTES else row.size_bytes
    return _Source(_made_up(row, whole), math.prod(whole) * element_bytes, _MADE_UP)


def _check(inputs: Inputs, tensor: Tensor, dims: Sequence[int], declared: Sequence[int]) -> None:
    if len(dims) != len(declared) or any(want not in (-1, got) for got, want in zip(dims, declared, strict=True)):
        without = " (without the rows)" if inputs.has_rows else ""
        raise BadRequest(
            f"model {inputs.model!r} input {tensor.name!r} takes the shape {list(declared)}{without}, got {list(dims)}"
        )


def _made_up(row: dtypes.DType, shape: Sequence[int]) -> Iterator[Array]:
    chance = np.random.default_rng(_SEED)
    while True:
        if row is dtypes.BYTES:
            letters = chance.integers(ord("a"), ord("z") + 1, (math.prod(shape), _TEXT_CHARACTERS), np.uint8)
            texts = np.empty(len(letters), object)
            texts[:] = [text.tobytes() for text in letters]
            yield texts.reshape(shape)
        elif row.numpy.kind == "b":
            yield chance.integers(0, 2, shape).astype(bool)
        elif row.numpy.kind in "iu":
            yield chance.integers(0, _MOST_INTEGER, shape).astype(row.numpy)
        else:
            yield chance.standard_normal(shape, np.float32).astype(row.numpy)


def _of_file(inputs: Inputs, tensor: Tensor, rows: int, given: Any) -> _Source:
    """Rows in turn, from the first again after the last."""
    array = _typed(inputs, tensor, np.asarray(given))
    if not inputs.has_rows:
        _check(inputs, tensor, array.shape, tensor.shape)
        return _Source(_again(array), array.nbytes, 1)
    if array.ndim == len(tensor.shape) - 1:
        array = array[np.newaxis]
    _check(inputs, tensor, array.shape[1:], tensor.shape[1:])
    if not len(array):
        raise BadRequest(f"the array for the input {tensor.name!r} has no rows")
    number = max(1, min(len(array) // math.gcd(len(array), rows), _OF_FILES))
    return _Source(_turns(array, rows), array.nbytes // len(array) * rows, number)


def _again(array: Array) -> Iterator[Array]:
    while True:
        yield array


def _turns(array: Array, rows: int) -> Iterator[Array]:
    start = 0
    while True:
        yield np.take(array, range(start, start + rows), axis=0, mode="wrap")
        start = (start + rows) % len(array)


def _typed(inputs: Inputs, tensor: Tensor, array: Array) -> Array:
    if tensor.datatype != dtypes.BYTES.kserve:
        dtype = dtypes.by_kserve(tensor.datatype).numpy
        return Contract(inputs.model, {tensor.name: dtype}, {}, {}).arrays({tensor.name: array})[tensor.name]
    if array.dtype.kind == "U":
        array = np.char.encode(array)
    if array.dtype.kind != "S":
        raise BadRequest(f"the input {tensor.name!r} takes texts, got an array of {array.dtype.name}")
    return array.astype(object)


def _infer(inputs: Inputs, arrays: Sequence[Array]) -> bytes:
    message = service_pb2.ModelInferRequest(model_name=inputs.model)
    for tensor, array in zip(inputs.tensors, arrays, strict=True):
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=array.shape)
        packed = serialize_byte_tensor(array) if array.dtype == object else array
        message.raw_input_contents.append(packed.item() if packed.dtype == object else packed.tobytes())
    return bytes(message.SerializeToString())


def _checkpoint(inputs: Inputs, arrays: Sequence[Array]) -> list[bytes]:
    by_name = {tensor.name: np.ascontiguousarray(array) for tensor, array in zip(inputs.tensors, arrays, strict=True)}
    return [message.SerializeToString() for message in tensor_requests(inputs.model, by_name)]
