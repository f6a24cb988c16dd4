"""Running a model on named arrays as SnoozeML means it; every protocol of SnoozeML's ends here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from native_service.edge.grpc import Inference
from native_service.edge.infer_messages import Tensor, read_outputs, write_request
from native_service.nereid.script_calls import ScriptCalls
from native_service.snooze.casts import FP32, NUMBERS, Array, from_fp32, to_fp32
from native_service.snooze.errors import in_snooze_words, no_such_model, shape_mismatch
from native_service.telemetry.calls import Call
from nereid_backend.dtypes import BYTES, by_numpy
from nereid_backend.errors import EngineError, InvalidArgument, NereidError, NotOffered, short_repr
from nereid_backend.spec import VARIABLE, ModelSpec, TensorSpec

# Casts from this size on are done beside the event loop.
_LARGE_BYTES = 256 * 1024


class Answer(NamedTuple):
    """``outputs`` in the order of the model's specification, C-contiguous; the time from the call's arrival."""

    outputs: dict[str, Array]
    duration_ms: float


@dataclass(frozen=True, slots=True)
class Counts:
    """Calls since the start, and the time that the good ones took together."""

    succeeded: int = 0
    failed: int = 0
    seconds: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        more = self.succeeded + other.succeeded, self.failed + other.failed, self.seconds + other.seconds
        return Counts(*more)


class Deadline:
    """What is left of a call: of the client's own deadline, and of the time it gave the model from now on."""

    def __init__(self, context: Any, timeout_s: float | None = None) -> None:
        """``context`` is gRPC's, or has its ``time_remaining`` and ``invocation_metadata``."""
        self._context = context
        self._end = None if timeout_s is None else time.monotonic() + timeout_s

    def time_remaining(self) -> float | None:
        left: float | None = self._context.time_remaining()
        if self._end is None:
            return left
        own = self._end - time.monotonic()
        return own if left is None else min(left, own)

    def invocation_metadata(self) -> Any:
        return self._context.invocation_metadata()


class SnoozeInference:
    """The models of one Triton."""

    def __init__(self, models: Sequence[ModelSpec], inference: Inference, scripts: ScriptCalls | None = None) -> None:
        self.set_models(models)
        self._inference, self._scripts = inference, scripts
        self._own = Counts()
        self.turned = Counts()
        """The calls that Envoy has turned into ModelInfer, at its last look at them."""
        self.capacities: Mapping[str, int] = {}
        """How many calls each model takes at once."""

    @property
    def counts(self) -> Counts:
        """All of them."""
        return self._own + self.turned

    def set_models(self, models: Sequence[ModelSpec]) -> None:
        """What is served from now on."""
        self._specs = {spec.name: spec for spec in models}

    @contextmanager
    def counted(self, surface: str, context: Any) -> Iterator[Call]:
        """The call of ``context``, or a request of its stream, is what happens inside; raises what that raises."""
        try:
            with self._inference.calls.watched(surface, context) as call:
                yield call
        except (NereidError, grpc.aio.AioRpcError):
            self._own += Counts(failed=1)
            raise
        self._own += Counts(succeeded=1, seconds=_ms_since(call) / 1000)

    def served(self, model: str) -> ModelSpec:
        """Raises InvalidArgument for no name, NotFound."""
        if not model.strip():
            raise InvalidArgument("model_id is required")
        if model not in self._specs:
            raise no_such_model(model)
        return self._specs[model]

    @contextmanager
    def refused(self, spec: ModelSpec) -> Iterator[None]:
        """Counts a call of ``spec`` that is refused inside, before it is one."""
        try:
            yield
        except (NereidError, asyncio.CancelledError) as error:
            self._inference.refusals.add(spec.name, error)
            raise

    async def infer(
        self, call: Call, model: str, inputs: Mapping[str, Array], deadline: Deadline, *, typed: bool = False
    ) -> Answer:
        """The outputs of ``model`` for ``inputs``, C-contiguous and little-endian.

        Inputs are FP32 or of the model's own types, outputs FP32; with ``typed`` outputs whose type SnoozeML has are of
        the model's own. A batch axis may be left out; more rows than the model takes at once become several runs when
        its rows are independent. Raises NereidError in SnoozeML's words.
        """
        call.model = model
        spec = self.served(model)
        with self.refused(spec):
            tensors = [(tensor, await _cast_in(spec, tensor, array)) for tensor, array in fitted(spec, inputs)]
        try:
            outputs = await self._run(spec, tensors, deadline, call.request_id)
        except (NereidError, grpc.aio.AioRpcError) as error:
            raise in_snooze_words(error, model) from None
        return Answer({name: await _cast_out(array, typed=typed) for name, array in outputs.items()}, _ms_since(call))

    async def _run(
        self, spec: ModelSpec, tensors: Sequence[tuple[TensorSpec, Array]], deadline: Deadline, request_id: str
    ) -> dict[str, Array]:
        """One run, or one after the other for more rows than go into one."""
        most, rows = spec.max_batch_size, len(tensors[0][1]) if tensors else 0
        if not most or rows <= most:
            return await self._run_once(spec, tensors, deadline, request_id)
        parts = [
            await self._run_once(spec, [(t, array[at : at + most]) for t, array in tensors], deadline, request_id)
            for at in range(0, rows, most)
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    async def _run_once(
        self, spec: ModelSpec, tensors: Sequence[tuple[TensorSpec, Array]], deadline: Deadline, request_id: str
    ) -> dict[str, Array]:
        sent = [(tensor, Tensor(tensor.name, array.shape, _bytes_of(array))) for tensor, array in tensors]
        request = write_request(spec.name, sent, request_id=request_id)
        if spec.script is not None and self._scripts is not None:
            message = service_pb2.ModelInferRequest.FromString(request)
            answer = (await self._scripts.infer(message, spec, deadline)).SerializeToString()
        else:
            answer = await self._inference.run_serialised(spec.name, request, deadline)
        answered = {tensor.name: tensor for tensor in read_outputs(answer)}
        if missing := [tensor.name for tensor in spec.client_outputs if tensor.name not in answered]:
            raise EngineError(f"model {spec.name!r} answered without its outputs {missing}")
        return {tensor.name: _array_of(tensor, answered[tensor.name]) for tensor in spec.client_outputs}


def fitted(spec: ModelSpec, inputs: Mapping[str, Array]) -> list[tuple[TensorSpec, Array]]:
    """The inputs of ``spec`` among ``inputs``, a batch axis that was left out put in. Raises InvalidArgument."""
    names = [tensor.name for tensor in spec.client_inputs]
    if strangers := [name for name in inputs if name not in names]:
        raise InvalidArgument(f"model {spec.name!r} has no input {short_repr(strangers[0])}; its inputs are {names}")
    if missing := [name for name in names if name not in inputs]:
        raise InvalidArgument(f"model {spec.name!r} needs the input {missing[0]!r} as well; its inputs are {names}")
    tensors = [(tensor, _with_batch(spec, tensor, inputs[tensor.name])) for tensor in spec.client_inputs]
    if spec.max_batch_size:
        rows = sorted({len(array) for _, array in tensors})
        if len(rows) > 1:
            raise shape_mismatch(
                f"the inputs of model {spec.name!r} have {rows[0]} and {rows[-1]} rows; send as many of each"
            )
        if rows and rows[0] > spec.max_batch_size and not spec.coalesce:
            raise shape_mismatch(f"model {spec.name!r} takes at most {spec.max_batch_size} rows at once, got {rows[0]}")
    return tensors


def _with_batch(spec: ModelSpec, tensor: TensorSpec, array: Array) -> Array:
    dims, shape = spec.dims(tensor), array.shape
    if spec.max_batch_size and len(shape) == len(dims):
        shape = (1, *shape)
    expected = (VARIABLE, *dims) if spec.max_batch_size else dims
    if len(shape) != len(expected) or not all(
        size in (VARIABLE, sent) for size, sent in zip(expected, shape, strict=True)
    ):
        where = f"model {spec.name!r} input {tensor.name!r}"
        raise shape_mismatch(f"{where} takes {list(expected)}, where -1 is any, got {short_repr(list(array.shape))}")
    return array.reshape(shape)


async def _cast_in(spec: ModelSpec, tensor: TensorSpec, array: Array) -> Array:
    """What of the client's ``array`` goes to the model. Raises InvalidArgument, NotOffered."""
    element, where = tensor.element, f"model {spec.name!r} input {tensor.name!r}"
    if element is BYTES:
        raise NotOffered(f"{where} takes texts, which SnoozeML's calls do not carry; use ModelInfer of KServe v2")
    if array.dtype == element.numpy:
        return array
    sent = by_numpy(array.dtype)
    if sent is not FP32:
        raise InvalidArgument(f"{where} takes {element.kserve} or FP32, got {sent.kserve}")
    if array.nbytes < _LARGE_BYTES:
        return from_fp32(array, element, where)
    return await asyncio.to_thread(from_fp32, array, element, where)


async def _cast_out(array: Array, *, typed: bool) -> Array:
    if array.dtype == FP32.numpy or (typed and by_numpy(array.dtype) in NUMBERS):
        return array
    return to_fp32(array) if array.nbytes < _LARGE_BYTES else await asyncio.to_thread(to_fp32, array)


def _bytes_of(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _array_of(spec: TensorSpec, tensor: Tensor) -> Array:
    """A view of what Triton answered."""
    if spec.element is BYTES:
        raise NotOffered(f"output {spec.name!r} holds texts, which SnoozeML's calls do not carry; use KServe v2")
    return np.frombuffer(tensor.data, spec.element.numpy).reshape(tensor.shape)  # type: ignore[arg-type]


def _ms_since(call: Call) -> float:
    return (time.monotonic_ns() - call.begun_ns) / 1e6
