"""A Checkpoint call as a client sees it, without its transport: arrays to messages, messages to arrays and lines."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from native_service.client.errors import AnswerBroken, BadRequest, ProgramFailed
from native_service.proto import inference_pb2
from nereid_backend import dtypes

Array = np.ndarray[Any, np.dtype[Any]]
Given = Any  # an array, anything numpy makes one of, or a mapping of such by input name

CHUNK_BYTES = 1024 * 1024
_LAST_LINES = 20


class Contract(NamedTuple):
    """What metadata says of a model: numpy's dtype and the shape of each tensor by name, in the model's order."""

    model: str
    inputs: Mapping[str, np.dtype[Any]]
    outputs: Mapping[str, np.dtype[Any]]
    input_shapes: Mapping[str, Sequence[int]]

    @classmethod
    def of_metadata(cls, metadata: Any) -> Contract:
        """From a ModelMetadataResponse. Raises BadRequest for a model whose tensors Checkpoint cannot carry."""
        inputs, outputs = _dtypes(metadata.name, metadata.inputs), _dtypes(metadata.name, metadata.outputs)
        return cls(metadata.name, inputs, outputs, {tensor.name: tuple(tensor.shape) for tensor in metadata.inputs})

    def arrays(self, given: Given) -> dict[str, Array]:
        """``given`` as little-endian, C-contiguous arrays by input name. Raises BadRequest."""
        if given is None:
            given = {}
        elif not isinstance(given, Mapping):
            given = {self.only_input(): given}
        if given.keys() != self.inputs.keys():
            raise BadRequest(f"model {self.model!r} takes the inputs {list(self.inputs)}, got {list(given)}")
        return {name: _array(self.model, name, given[name], dtype) for name, dtype in self.inputs.items()}

    def only_input(self) -> str:
        """Raises BadRequest unless the model has exactly one input."""
        if len(self.inputs) != 1:
            raise BadRequest(f"model {self.model!r} takes the inputs {list(self.inputs)}; give a mapping of arrays")
        return next(iter(self.inputs))


def _dtypes(model: str, tensors: Any) -> dict[str, np.dtype[Any]]:
    known = {row.kserve: row for row in dtypes.TABLE if row.kserve is not None}
    for tensor in tensors:
        if tensor.datatype not in known:
            raise BadRequest(f"model {model!r}: {tensor.name!r} is {tensor.datatype}, which Checkpoint does not carry")
    return {tensor.name: known[tensor.datatype].numpy for tensor in tensors}


def _array(model: str, name: str, value: Any, dtype: np.dtype[Any]) -> Array:
    """Arrays keep their values exactly; of lists only the kind of number must fit."""
    try:
        given = np.asarray(value)
        if given.dtype == np.dtype((np.void, dtype.itemsize)) and dtype.kind == "V":
            given = value = given.view(dtype)  # a .npy file forgets the names of ml_dtypes' types
        is_array = hasattr(value, "dtype")
        fits = np.can_cast(given.dtype, dtype, "safe") if is_array else _kind(given.dtype) <= _kind(dtype)
        if fits:
            return np.ascontiguousarray(np.asarray(value, dtype)).reshape(given.shape or (1,))
        found = given.dtype.name
    except (TypeError, ValueError, OverflowError) as error:
        found = f"something else ({error})"
    raise BadRequest(f"model {model!r} input {name!r} must be {dtype.name}, got {found}; convert it with .astype()")


def _kind(dtype: np.dtype[Any]) -> int:
    # ml_dtypes' own types are of kind V.
    return {"b": 0, "u": 1, "i": 1, "f": 2, "V": 2}.get(dtype.kind, 3)


def tensor_requests(model: str, arrays: Mapping[str, Array]) -> Iterator[inference_pb2.CheckpointRequest]:
    """The messages of a call; ``arrays`` as :meth:`Contract.arrays` gives them."""
    yield _meta(model)
    for name, array in arrays.items():
        yield from _chunks(name, array.shape, array.reshape(-1).view(np.uint8).data)


def byte_requests(contract: Contract, data: bytes) -> Iterator[inference_pb2.CheckpointRequest]:
    """The messages of a call that hands over ``data`` as it is: as the declared shape, or as so many elements."""
    name = contract.only_input()
    declared = [max(1, size) for size in contract.input_shapes[name]]
    fits = math.prod(declared) * contract.inputs[name].itemsize == len(data)
    yield _meta(contract.model)
    yield from _chunks(name, declared if fits else [max(1, len(data))], memoryview(data))


def _meta(model: str) -> inference_pb2.CheckpointRequest:
    return inference_pb2.CheckpointRequest(meta=inference_pb2.CheckpointMeta(model_name=model))


def _chunks(name: str, shape: Sequence[int], data: memoryview) -> Iterator[inference_pb2.CheckpointRequest]:
    for start in range(0, max(1, len(data)), CHUNK_BYTES):
        part = bytes(data[start : start + CHUNK_BYTES])
        last = start + CHUNK_BYTES >= len(data)
        chunk = inference_pb2.TensorChunk(tensor_name=name, shape=shape, data=part, end_of_tensor=last)
        yield inference_pb2.CheckpointRequest(chunk=chunk)


class Answer:
    """Takes the messages of one answer in order; complete once ``exit_code`` is a number."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._outputs: dict[str, tuple[Array, list[int]]] = {}  # of each the bytes, and how many are there
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self.exit_code: int | None = None

    def receive(self, message: inference_pb2.CheckpointResponse) -> str | None:
        """The line that ``message`` carries; None when it is something else. Raises AnswerBroken."""
        if message.HasField("output_chunk"):
            self._append(message.output_chunk)
        elif message.done:
            self.exit_code = message.exit_code
        else:
            self._last_lines.append(message.chunk)
            return message.chunk
        return None

    def outputs(self) -> dict[str, Array]:
        """The outputs by name, in the order they came. Raises AnswerBroken, or ProgramFailed."""
        if self.exit_code is None:
            raise AnswerBroken(f"the answer of model {self._contract.model!r} has no end")
        if self.exit_code != 0:
            raise ProgramFailed(self._contract.model, self.exit_code, tuple(self._last_lines))
        for name, (data, held) in self._outputs.items():
            if held[0] != data.nbytes:
                raise self._broken(name, f"{data.nbytes} bytes for shape {list(self._shapes[name])}, got {held[0]}")
        return {
            name: data.view(self._contract.outputs[name]).reshape(self._shapes[name])
            for name, (data, _) in self._outputs.items()
        }

    def _append(self, chunk: inference_pb2.TensorChunk) -> None:
        name, shape = chunk.tensor_name, tuple(chunk.shape)
        if name not in self._outputs:
            if name not in self._contract.outputs:
                raise AnswerBroken(f"model {self._contract.model!r} answered with {name!r}, which it does not declare")
            size = math.prod(shape) * self._contract.outputs[name].itemsize
            self._outputs[name], self._shapes[name] = (np.empty(size, np.uint8), [0]), shape
        data, held = self._outputs[name]
        end = held[0] + len(chunk.data)
        if shape != self._shapes[name] or end > data.nbytes:
            raise self._broken(name, f"one shape and its bytes, got shape {list(shape)} and {end} bytes")
        data[held[0] : end] = np.frombuffer(chunk.data, np.uint8)
        held[0] = end

    def _broken(self, name: str, what: str) -> AnswerBroken:
        return AnswerBroken(f"model {self._contract.model!r} output {name!r}: expected {what}")
