"""The Checkpoint call without its transport: what a client may send, and how an answer is cut into messages.

The order of the checks is upstream's; a client sees the same first complaint. Two checks are ours: the bytes must
be as many as shape and dtype say (upstream reads past the end of a short payload), and every limit is enforced
before the bytes are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from native_service.proto import inference_pb2
from native_service.settings import Limits
from nereid_backend.errors import InvalidArgument, NotFound, ResourceExhausted
from nereid_backend.spec import VARIABLE, ModelSpec, TensorSpec

CHUNK_BYTES = 65_536


class Budget:
    """Bytes that all calls together may hold; asking for more than is left is refused at once."""

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self.used_bytes = 0

    def take(self, count: int) -> None:
        """Raises ResourceExhausted, and then takes nothing."""
        if self.used_bytes + count > self._total:
            raise ResourceExhausted(
                f"the server buffers at most {self._total} bytes of unfinished Checkpoint inputs, retry later"
            )
        self.used_bytes += count

    def give_back(self, count: int) -> None:
        self.used_bytes -= count


@dataclass(frozen=True, slots=True)
class CheckpointInput:
    """What one call asks for. ``tensor`` is None for a model without input; ``shape`` is as Triton wants it."""

    model: ModelSpec
    tensor: TensorSpec | None
    shape: tuple[int, ...]
    data: bytes | bytearray


class CheckpointReader:
    """Takes the messages of one call in order. ``close`` it on every ending: it holds bytes of the budget."""

    def __init__(self, models: Mapping[str, ModelSpec], limits: Limits, budget: Budget) -> None:
        self._models = models
        self._limits = limits
        self._budget = budget
        self._model: ModelSpec | None = None
        self._data = bytearray()
        self._chunks = 0
        self._sent_shape: tuple[int, ...] | None = None
        self._shape: tuple[int, ...] = ()
        self._expected_bytes = 0
        self._ended = False

    @property
    def needs_input(self) -> bool:
        """Whether more messages matter: not once the model turns out to take no input."""
        return self._model is None or bool(self._model.client_inputs)

    def receive(self, message: inference_pb2.CheckpointRequest) -> None:
        """Check and keep one message. Raises InvalidArgument, NotFound or ResourceExhausted."""
        kind = message.WhichOneof("payload")
        if self._model is None:
            self._model = self._begin(kind, message)
            return
        if kind is None:
            raise InvalidArgument("Checkpoint message has no payload; send a chunk")
        if kind == "meta":
            raise InvalidArgument("Checkpoint metadata is allowed only as the first message")
        self._append(self._model, message.chunk)

    def finish(self) -> CheckpointInput:
        """The whole input, once the client has closed its side. Raises InvalidArgument."""
        if self._model is None:
            raise InvalidArgument("Checkpoint stream is empty; the first message must be metadata")
        if not self._model.client_inputs:
            return CheckpointInput(self._model, None, (), b"")
        if self._sent_shape is None:
            raise InvalidArgument(f"no tensor chunks were sent for model {self._model.name!r}")
        if len(self._data) < self._expected_bytes:
            raise InvalidArgument(
                f"model {self._model.name!r}: shape {list(self._sent_shape)} needs {self._expected_bytes} bytes,"
                f" got {len(self._data)}"
            )
        return CheckpointInput(self._model, self._model.client_inputs[0], self._shape, self._data)

    def close(self) -> None:
        """Forget the bytes and give them back to the budget."""
        self._budget.give_back(len(self._data))
        self._data = bytearray()

    def _begin(self, kind: str | None, message: inference_pb2.CheckpointRequest) -> ModelSpec:
        if kind is None:
            raise InvalidArgument("the first Checkpoint message has no payload; it must be metadata")
        if kind != "meta":
            raise InvalidArgument("the first Checkpoint message must be metadata, got a chunk")
        name = message.meta.model_name.strip()
        if not name:
            raise InvalidArgument("model_name is required in the Checkpoint metadata")
        if name not in self._models:
            raise NotFound(f"model {name!r} is not served here (not in nereid.yaml); ViewModels lists what is")
        model = self._models[name]
        if len(model.client_inputs) > 1:
            raise InvalidArgument(
                f"model {name!r} has {len(model.client_inputs)} inputs and Checkpoint carries one;"
                " call inference.GRPCInferenceService/ModelInfer (KServe v2) instead"
            )
        return model

    def _append(self, model: ModelSpec, chunk: inference_pb2.TensorChunk) -> None:
        if self._ended:
            raise InvalidArgument("a chunk came after end_of_tensor=true")
        sent = tuple(chunk.shape)
        shape = batched_shape(model, model.client_inputs[0], sent)
        if self._sent_shape is None:
            self._begin_tensor(model, sent, shape)
        elif sent != self._sent_shape:
            raise InvalidArgument(
                f"the shape changed within the request: first {list(self._sent_shape)}, now {list(sent)}"
            )
        self._chunks += 1
        if self._chunks > self._limits.max_chunks:
            raise InvalidArgument(f"a Checkpoint call may send {self._limits.max_chunks} chunks; send larger ones")
        if len(self._data) + len(chunk.data) > self._expected_bytes:
            raise InvalidArgument(
                f"model {model.name!r}: shape {list(sent)} needs {self._expected_bytes} bytes,"
                f" got at least {len(self._data) + len(chunk.data)}"
            )
        self._budget.take(len(chunk.data))
        self._data += chunk.data
        self._ended = chunk.end_of_tensor

    def _begin_tensor(self, model: ModelSpec, sent: tuple[int, ...], shape: tuple[int, ...]) -> None:
        needed = math.prod(shape) * model.client_inputs[0].element.size_bytes
        if needed > self._limits.max_tensor_bytes:
            raise InvalidArgument(
                f"model {model.name!r}: shape {list(sent)} is {needed} bytes,"
                f" the limit of this server is {self._limits.max_tensor_bytes} (server.limits.max_tensor_bytes)"
            )
        self._sent_shape, self._shape, self._expected_bytes = sent, shape, needed


def batched_shape(model: ModelSpec, tensor: TensorSpec, shape: Sequence[int]) -> tuple[int, ...]:
    """``shape`` as Triton wants it: with a leading 1 when the client left the batch dimension out.

    Raises InvalidArgument when it breaks the model's contract.
    """
    sent = tuple(shape)
    if not sent:
        raise InvalidArgument(f"model {model.name!r}: every chunk must carry the tensor's shape")
    for index, size in enumerate(sent):
        if size <= 0:
            raise InvalidArgument(
                f"model {model.name!r}: dimensions must be positive, got {size} at index {index} of {list(sent)}"
            )
    declared, full = model.dims(tensor), sent
    if model.max_batch_size > 0:
        if len(sent) == len(declared):
            full = (1, *sent)
        elif len(sent) == len(declared) + 1 and sent[0] > model.max_batch_size:
            raise InvalidArgument(f"model {model.name!r}: batch {sent[0]} is over the limit of {model.max_batch_size}")
    with_batch = len(declared) + (1 if model.max_batch_size > 0 else 0)
    if len(full) != with_batch:
        without = f" (or {len(declared)} without the batch dimension)" if model.max_batch_size > 0 else ""
        raise InvalidArgument(f"model {model.name!r}: expected rank {with_batch}{without}, got {list(sent)}")
    offset = len(sent) - len(declared)
    for index, (want, got) in enumerate(zip(declared, sent[offset:], strict=True), start=offset):
        if want not in (VARIABLE, got):
            raise InvalidArgument(f"model {model.name!r}: dimension {index} must be {want}, got {got} in {list(sent)}")
    return full


def output_chunks(name: str, shape: Sequence[int], data: bytes) -> Iterator[inference_pb2.TensorChunk]:
    """``data`` in chunks of 64 KiB, each with the full shape; a tensor of no bytes is one empty chunk."""
    count = max(1, -(-len(data) // CHUNK_BYTES))
    for index in range(count):
        yield inference_pb2.TensorChunk(
            tensor_name=name,
            shape=shape,
            data=data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES],
            chunk_index=index,
            end_of_tensor=index == count - 1,
        )
