"""The Checkpoint call without its transport: what a client may send, and how an answer is cut into messages.

The order of the checks is upstream's; a client sees the same first complaint. Two checks are ours: the bytes must
be as many as shape and dtype say (upstream reads past the end of a short payload), and every limit is enforced
before the bytes are kept.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from native_service.edge.infer_messages import Tensor, write_request
from native_service.edge.regions import SHARED_FROM_BYTES, Region, Regions
from native_service.edge.wire import LENGTH, varint
from native_service.proto import inference_pb2
from native_service.settings import Limits
from nereid_backend.dtypes import BYTES
from nereid_backend.errors import InvalidArgument, NotFound, OverLimit, ResourceExhausted, short_repr
from nereid_backend.spec import VARIABLE, ModelSpec, TensorSpec

CHUNK_BYTES = 65_536
_DATA_KEY = varint(inference_pb2.TensorChunk.DATA_FIELD_NUMBER << 3 | LENGTH)
_OUTPUT_CHUNK_KEY = varint(inference_pb2.CheckpointResponse.OUTPUT_CHUNK_FIELD_NUMBER << 3 | LENGTH)


class Budget:
    """Bytes that all calls together may hold; asking for more than is left is refused at once."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0

    @property
    def is_crowded(self) -> bool:
        """Whether more than half of it is taken."""
        return 2 * self.used_bytes > self.total_bytes

    def take(self, count: int) -> None:
        """Raises ResourceExhausted, and then takes nothing."""
        if self.used_bytes + count > self.total_bytes:
            raise ResourceExhausted(
                f"this server holds at most {self.total_bytes} bytes of tensors at once, retry later"
                " (server.limits.max_buffered_bytes)"
            )
        self.used_bytes += count

    def give_back(self, count: int) -> None:
        self.used_bytes -= count


class _Upload:
    """One input tensor of one call. ``shape`` is as Triton wants it, ``sent`` as the client gave it."""

    def __init__(
        self,
        spec: TensorSpec,
        sent: tuple[int, ...],
        shape: tuple[int, ...],
        size_bytes: int,
        region: Region | None,
    ) -> None:
        self.spec, self.sent, self.shape, self.size_bytes = spec, sent, shape, size_bytes
        # Pages that nothing was written to cost nothing, and all of them go back to the system at the end; a growing
        # bytearray leaves as much behind in the allocator's heap.
        self.data = mmap.mmap(-1, size_bytes) if region is None else region
        self.held_bytes = 0
        self.ended = False

    def append(self, data: bytes) -> None:
        if isinstance(self.data, Region):
            self.data.append(data)
        else:
            self.data[self.held_bytes : self.held_bytes + len(data)] = data
        self.held_bytes += len(data)


class CheckpointReader:
    """Takes the messages of one call in order. ``close`` it on every ending: it holds bytes of the budget."""

    def __init__(
        self, models: Mapping[str, ModelSpec], limits: Limits, budget: Budget, regions: Regions | None = None
    ) -> None:
        """``regions``: where large tensors go; None when Triton cannot share memory with this process."""
        self._regions = regions
        self._models = models
        self._limits = limits
        self._budget = budget
        self._uploads: dict[str, _Upload] = {}
        self._chunks = 0
        self.model: ModelSpec | None = None
        """What the first message named."""

    @property
    def needs_input(self) -> bool:
        """Whether more messages matter: not once the model turns out to take no input."""
        return self.model is None or bool(self.model.client_inputs)

    @property
    def has_ended(self) -> bool:
        """Whether every input came with its end mark, which upstream lets clients leave out."""
        inputs = () if self.model is None else self.model.client_inputs
        return all(tensor.name in self._uploads and self._uploads[tensor.name].ended for tensor in inputs)

    def receive(self, message: inference_pb2.CheckpointRequest) -> None:
        """Check and keep one message. Raises InvalidArgument, NotFound, OverLimit or ResourceExhausted."""
        kind = message.WhichOneof("payload")
        if self.model is None:
            self.model = self._begin(kind, message)
            _check_numbers(self.model)
            return
        if kind is None:
            raise InvalidArgument("Checkpoint message has no payload; send a chunk")
        if kind == "meta":
            raise InvalidArgument("Checkpoint metadata is allowed only as the first message")
        self._append(self.model, message.chunk)

    def finish(self) -> ModelSpec:
        """The model, once the client has closed its side and its input is whole. Raises InvalidArgument."""
        model = self.model
        if model is None:
            raise InvalidArgument("Checkpoint stream is empty; the first message must be metadata")
        if model.client_inputs and not self._uploads:
            raise InvalidArgument(f"no tensor chunks were sent for model {model.name!r}")
        missing = [tensor.name for tensor in model.client_inputs if tensor.name not in self._uploads]
        if missing:
            raise InvalidArgument(f"model {model.name!r} needs the inputs {_names(model)}; not sent: {missing}")
        for upload in self._uploads.values():
            if upload.held_bytes < upload.size_bytes and model.script is None:
                raise InvalidArgument(
                    f"{_input(model, upload.spec)}: shape {list(upload.sent)} needs {upload.size_bytes} bytes,"
                    f" got {upload.held_bytes}"
                )
        rows = {name: upload.shape[0] for name, upload in self._uploads.items() if model.max_batch_size}
        if len(set(rows.values())) > 1:
            raise InvalidArgument(f"model {model.name!r}: all inputs must have as many rows, got {rows}")
        return model

    @property
    def held_bytes(self) -> int:
        """Bytes of all inputs that have come and were not taken."""
        return sum(upload.held_bytes for upload in self._uploads.values())

    @property
    def regions(self) -> list[Region]:
        """Those that hold input, which Triton must know before it gets the request."""
        return [upload.data for upload in self._uploads.values() if isinstance(upload.data, Region)]

    @property
    def rows(self) -> int:
        """How many rows the inputs have; 1 for a model that takes no batches."""
        batched = self.model is not None and self.model.max_batch_size > 0
        return next((upload.shape[0] for upload in self._uploads.values() if batched), 1)

    def take_request(self, outputs: Mapping[str, Region | None] | None = None, request_id: str = "") -> bytes:
        """The whole input as a serialised ModelInferRequest of that id; ``outputs`` as in ``write_request``.

        The reader forgets what the message carries: large tensors are kept once.
        """
        if self.model is None:
            raise InvalidArgument("Checkpoint stream is empty; the first message must be metadata")
        uploads = [self._uploads[tensor.name] for tensor in self.model.client_inputs]
        tensors = [(upload.spec, Tensor(upload.spec.name, upload.shape, upload.data)) for upload in uploads]
        message = write_request(self.model.name, tensors, outputs, request_id)
        for upload in uploads:
            if not isinstance(upload.data, Region):
                self._forget(upload)
        return message

    def take_bytes(self) -> tuple[tuple[int, ...], bytes]:
        """The shape and the bytes for a program, however many; both empty when it takes none."""
        for upload in self._uploads.values():
            if not isinstance(upload.data, Region):
                return upload.shape, upload.data[: upload.held_bytes]
        return (), b""

    def close(self) -> None:
        """Forget the bytes and give them back to the budget."""
        for upload in tuple(self._uploads.values()):
            self._forget(upload)

    def _forget(self, upload: _Upload) -> None:
        del self._uploads[upload.spec.name]
        give_back = partial(self._budget.give_back, upload.held_bytes)
        if isinstance(upload.data, Region) and self._regions is not None:
            self._regions.release(upload.data, give_back)
        else:
            upload.data.close()
            give_back()

    def _begin(self, kind: str | None, message: inference_pb2.CheckpointRequest) -> ModelSpec:
        if kind is None:
            raise InvalidArgument("the first Checkpoint message has no payload; it must be metadata")
        if kind != "meta":
            raise InvalidArgument("the first Checkpoint message must be metadata, got a chunk")
        name = message.meta.model_name.strip()
        if not name:
            raise InvalidArgument("model_name is required in the Checkpoint metadata")
        if name not in self._models:
            raise NotFound(
                f"model {short_repr(name)} is not served here (not in nereid.yaml); ViewModels lists what is"
            )
        return self._models[name]

    def _append(self, model: ModelSpec, chunk: inference_pb2.TensorChunk) -> None:
        spec = _addressed(model, chunk.tensor_name)
        upload = self._uploads.get(spec.name)
        if upload is not None and upload.ended:
            raise InvalidArgument(f"{_input(model, spec)}: a chunk came after end_of_tensor=true")
        sent = tuple(chunk.shape)
        if upload is None:
            shape = batched_shape(model, spec, sent)
            upload = self._uploads[spec.name] = self._begin_tensor(model, spec, sent, shape)
        elif sent != upload.sent:
            batched_shape(model, spec, sent)  # what breaks the contract is told first
            raise InvalidArgument(
                f"{_input(model, spec)}: the shape changed within the request:"
                f" first {list(upload.sent)}, now {list(sent)}"
            )
        self._chunks += 1
        if self._chunks > self._limits.max_chunks:
            raise OverLimit(
                f"a Checkpoint call may send {self._limits.max_chunks} chunks (server.limits.max_chunks);"
                " send larger ones"
            )
        if upload.held_bytes + len(chunk.data) > upload.size_bytes:
            if model.script is not None:
                raise OverLimit(
                    f"model {model.name!r}: the limit of this server is {upload.size_bytes} bytes"
                    " (server.limits.max_tensor_bytes, max_request_bytes)"
                )
            raise InvalidArgument(
                f"{_input(model, spec)}: shape {list(sent)} needs {upload.size_bytes} bytes,"
                f" got at least {upload.held_bytes + len(chunk.data)}"
            )
        self._budget.take(len(chunk.data))
        try:
            upload.append(chunk.data)
        except ResourceExhausted:
            self._budget.give_back(len(chunk.data))
            raise
        upload.ended = chunk.end_of_tensor

    def _begin_tensor(
        self, model: ModelSpec, spec: TensorSpec, sent: tuple[int, ...], shape: tuple[int, ...]
    ) -> _Upload:
        size, limits = math.prod(shape) * spec.element.size_bytes, self._limits
        if model.script is not None:  # a program gets as many bytes as come
            size = min(limits.max_tensor_bytes, limits.max_request_bytes)
        if size > limits.max_tensor_bytes:
            raise OverLimit(
                f"{_input(model, spec)}: shape {short_repr(list(sent))} is {short_repr(size)} bytes,"
                f" the limit of this server is {limits.max_tensor_bytes} (server.limits.max_tensor_bytes)"
            )
        total = size + sum(upload.size_bytes for upload in self._uploads.values())
        if total > limits.max_request_bytes:
            raise OverLimit(
                f"model {model.name!r}: the inputs of this call are {total} bytes or more,"
                f" the limit of this server is {limits.max_request_bytes} (server.limits.max_request_bytes)"
            )
        shared = self._regions is not None and model.script is None and size >= SHARED_FROM_BYTES
        return _Upload(spec, sent, shape, size, self._regions.create(size) if self._regions and shared else None)


def _addressed(model: ModelSpec, name: str) -> TensorSpec:
    """The input a chunk is for. A model's only input needs no name, and upstream's clients send any."""
    if len(model.client_inputs) == 1:
        return model.client_inputs[0]
    for tensor in model.client_inputs:
        if tensor.name == name:
            return tensor
    raise InvalidArgument(
        f"model {model.name!r} has no input {short_repr(name)}; tensor_name must be one of {_names(model)}"
    )


def _names(model: ModelSpec) -> list[str]:
    return [tensor.name for tensor in model.client_inputs]


def _input(model: ModelSpec, tensor: TensorSpec) -> str:
    """How a message names the tensor it is about."""
    return f"model {model.name!r}" + (f" input {tensor.name!r}" if len(model.client_inputs) > 1 else "")


def batched_shape(model: ModelSpec, tensor: TensorSpec, shape: Sequence[int]) -> tuple[int, ...]:
    """``shape`` as Triton wants it: with a leading 1 when the client left the batch dimension out.

    Raises InvalidArgument when it breaks the model's contract.
    """
    sent, where = tuple(shape), _input(model, tensor)
    if not sent:
        raise InvalidArgument(f"{where}: every chunk must carry the tensor's shape")
    for index, size in enumerate(sent):
        if size <= 0:
            raise InvalidArgument(
                f"{where}: dimensions must be positive, got {size} at index {index} of {short_repr(list(sent))}"
            )
    declared, full = model.dims(tensor), sent
    if model.max_batch_size > 0:
        if len(sent) == len(declared):
            full = (1, *sent)
        elif len(sent) == len(declared) + 1 and sent[0] > model.max_batch_size:
            raise InvalidArgument(f"{where}: batch {sent[0]} is over the limit of {model.max_batch_size}")
    with_batch = len(declared) + (1 if model.max_batch_size > 0 else 0)
    if len(full) != with_batch:
        without = f" (or {len(declared)} without the batch dimension)" if model.max_batch_size > 0 else ""
        raise InvalidArgument(f"{where}: expected rank {with_batch}{without}, got {short_repr(list(sent))}")
    offset = len(sent) - len(declared)
    for index, (want, got) in enumerate(zip(declared, sent[offset:], strict=True), start=offset):
        if want not in (VARIABLE, got):
            raise InvalidArgument(f"{where}: dimension {index} must be {want}, got {got} in {short_repr(list(sent))}")
    return full


def largest_output_bytes(model: ModelSpec, tensor: TensorSpec, rows: int) -> int | None:
    """What output ``tensor`` takes for so many rows at most; None when only the model knows."""
    dims = model.dims(tensor)
    return None if VARIABLE in dims else rows * math.prod(dims) * tensor.element.size_bytes


def _check_numbers(model: ModelSpec) -> None:
    """Raises InvalidArgument for a model of texts: Checkpoint tells lengths by shapes."""
    if any(tensor.element is BYTES for tensor in (*model.client_inputs, *model.client_outputs)):
        raise InvalidArgument(f"model {model.name!r} has tensors of texts (BYTES); call ModelInfer (KServe v2)")


def output_messages(tensor: Tensor) -> Iterator[bytes]:
    """``tensor`` as serialised CheckpointResponses of 64 KiB, all with the full shape; one for a tensor of no bytes.

    Its bytes are copied into the message and nowhere else: protobuf's objects would hold them three more times.
    """
    count = max(1, -(-tensor.size_bytes // CHUNK_BYTES))
    head = inference_pb2.TensorChunk(tensor_name=tensor.name, shape=tensor.shape).SerializeToString()
    for index in range(count):
        data = tensor.part(index * CHUNK_BYTES, (index + 1) * CHUNK_BYTES)
        tail = inference_pb2.TensorChunk(chunk_index=index, end_of_tensor=index == count - 1).SerializeToString()
        start = head + _DATA_KEY + varint(len(data)) if data else head
        size = len(start) + len(data) + len(tail)
        yield b"".join((_OUTPUT_CHUNK_KEY, varint(size), start, data, tail))


def serialised(message: inference_pb2.CheckpointResponse | bytes) -> bytes:
    """The bytes of a message, or those it is already."""
    return message if isinstance(message, bytes) else message.SerializeToString()
