"""What every call of our gRPC server has in common: its way to Triton, its errors, its time."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple, Protocol

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from native_service.edge.half_sent import HalfSent
from native_service.envoy.listeners import RETRY_AFTER_S
from native_service.envoy.scripts import CLUSTER_HEADER, CODING_HEADER, KSERVE
from native_service.envoy.settings import model_cluster
from native_service.telemetry.calls import Calls
from native_service.telemetry.metrics import Refusals
from native_service.triton.errors import status_of
from nereid_backend.errors import (
    DeadlineExceeded,
    InvalidArgument,
    ModelUnavailable,
    NereidError,
    ResourceExhausted,
    TimeLimitExceeded,
)

_LOG = logging.getLogger("nereid.service")

_RETRY_AFTER = "retry-after"
_CODINGS = {"gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}
# A status travels in HTTP/2 headers, whose size every client limits; requests may hold names of any length.
_LONGEST_TEXT = 500
# Triton 2.51 can crash on a deadline that passes while the request is being set up.
_SHORTEST_DEADLINE_S = 0.010
# Of the time a call has.
_FOR_THE_ANSWER = 0.1


class Residency(Protocol):
    """Which models are in Triton."""

    def using(self, name: str, budget_s: float | None) -> AbstractAsyncContextManager[None]:
        """While inside, the model ``name`` is in Triton: loaded first where it is not, and not unloaded.

        Raises NereidError when it cannot be within ``budget_s`` seconds.
        """

    def state(self, name: str) -> str:
        """One of idle, loading, ready, busy."""


class Inference:
    """Runs models through Envoy's inner listener, which takes a permit of the model or refuses at once."""

    def __init__(self, channel: Any, refusals: Refusals) -> None:
        """``channel`` is a grpc.aio channel to the inner listener; ``refusals`` counts what is not handed to it."""
        self.refusals = refusals
        self.calls = Calls()
        self.half_sent = HalfSent()
        self.away: Collection[str] = ()
        """The models whose calls cannot run at the moment."""
        self.idle: Collection[str] = ()
        """The models whose calls have them loaded first."""
        self.residency: Residency | None = None
        self.time_limits_s: Mapping[str, float] = {}
        """Longest call of the models that have a limit."""
        method = "/inference.GRPCInferenceService/ModelInfer"
        self._infer = channel.unary_unary(
            method,
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )
        self._infer_serialised = channel.unary_unary(method)

    async def run(self, request: Any, context: Any) -> Any:
        """The answer to a ModelInferRequest, within what is left of the deadline of ``context`` and the model's limit.

        Raises TimeLimitExceeded, or grpc.aio.AioRpcError with Triton's own code and words or RESOURCE_EXHAUSTED.
        """
        return await self._within_time(request.model_name, self._infer, request, context)

    async def run_serialised(self, model: str, request: bytes, context: Any) -> bytes:
        """The same for a serialised request and answer, which protobuf's objects would hold once more."""
        answer: bytes = await self._within_time(model, self._infer_serialised, request, context)
        return answer

    async def _within_time(self, model: str, infer: Any, request: Any, context: Any) -> Any:
        if self.residency is None:
            return await self._infer_within(model, infer, request, context, waited_s=0)
        begun = time.monotonic()
        async with AsyncExitStack() as using:
            try:
                await using.enter_async_context(self.residency.using(model, self._patience_s(model, context)))
            except NereidError as error:
                self.refusals.add(model, error)
                raise
            return await self._infer_within(model, infer, request, context, waited_s=time.monotonic() - begun)

    def _patience_s(self, model: str, context: Any) -> float | None:
        """How long a call may wait for its model; its answer still has to get to the client in time."""
        left, limit = self._time_left(model, context), self.time_limits_s.get(model)
        bounds = [bound for bound in (limit, left) if bound is not None]
        return min(bounds) * (1 - _FOR_THE_ANSWER) if bounds else None

    async def _infer_within(self, model: str, infer: Any, request: Any, context: Any, waited_s: float) -> Any:
        left, limit = self._time_left(model, context), self.time_limits_s.get(model)
        limit = None if limit is None else max(limit - waited_s, _SHORTEST_DEADLINE_S)
        if limit is None or (left is not None and left <= limit):
            return await infer(request, timeout=left, metadata=_permit_of(model))
        try:
            return await infer(request, timeout=limit, metadata=_permit_of(model))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                limit = self.time_limits_s.get(model, limit)
                raise TimeLimitExceeded(f"model {model!r} took longer than its time limit of {limit:g} s") from None
            raise

    def _time_left(self, model: str, context: Any) -> float | None:
        """Seconds the client still waits, None when it waits for ever. Raises ModelUnavailable, DeadlineExceeded."""
        if model in self.away:
            gone = ModelUnavailable(f"model {model!r} is being started again after its process died, retry later")
            self.refusals.add(model, gone)
            raise gone
        left: float | None = context.time_remaining()
        if left is not None and left < _SHORTEST_DEADLINE_S:
            error = DeadlineExceeded("the deadline leaves no time to run the model")
            self.refusals.add(model, error)
            raise error
        return left


def _permit_of(model: str) -> tuple[tuple[str, str], ...]:
    return ((CLUSTER_HEADER, model_cluster(model)),)


@asynccontextmanager
async def errors_told(context: Any) -> AsyncIterator[None]:
    """Ends the call of ``context`` with the code and words of what is raised inside."""
    try:
        yield
    except (NereidError, grpc.aio.AioRpcError) as error:
        code, text, retry_after = told(error)
        hints = () if retry_after is None else ((_RETRY_AFTER, retry_after),)
        await context.abort(grpc.StatusCode[code], text, hints)
    except grpc.aio.AbortError:
        raise
    except grpc.aio.InternalError:
        # The library's word for a client that went while it was being written to.
        await context.abort(grpc.StatusCode.CANCELLED, "the client has gone")
    except Exception:  # noqa: BLE001 - the edge of this process towards its clients
        _LOG.exception("a call failed in a way nobody planned for")
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")


class Told(NamedTuple):
    """How a client gets an error: the name of a gRPC code, the text, and for a full server when to come back (s).

    The last is what tells a full server from a request that is too large.
    """

    code: str
    text: str
    retry_after: str | None = None


def told(error: NereidError | grpc.aio.AioRpcError) -> Told:
    """What a client gets of ``error``, ours or Triton's."""
    if isinstance(error, NereidError):
        if isinstance(error, ResourceExhausted):
            return Told(error.code, shown(error), str(error.retry_after_s or RETRY_AFTER_S))
        return Told(error.code, shown(error))
    return Told(*status_of(error), next((value for key, value in _metadata_of(error) if key == _RETRY_AFTER), None))


async def answer_in_kind(context: Any) -> None:
    """Compress the answers of a call as its requests were."""
    coding = dict(context.invocation_metadata() or ()).get(CODING_HEADER)
    if coding in _CODINGS:
        context.set_compression(_CODINGS[coding])
        # The library forgets it for the answer of a unary call that sends this by itself.
        await context.send_initial_metadata(())


def shown(error: NereidError) -> str:
    """The text of ``error`` as a client gets it."""
    text = str(error)
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 3] + "..."


def parsed(kind: Any, data: bytes) -> Any:
    """The message of type ``kind`` in ``data``. Raises InvalidArgument."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InvalidArgument(f"the request is not a valid {kind.DESCRIPTOR.full_name}") from None


def unary(calls: Calls, name: str, call: Callable[[Any, Any], Awaitable[Any]], request: Any, response: Any) -> Any:
    """A gRPC handler for ``call``, the method ``name``; ``request`` and ``response`` are the types of its messages."""

    async def answer(data: bytes, context: Any) -> Any:
        async with errors_told(context):
            await answer_in_kind(context)
            with calls.watched(name, context) as watched:
                message = parsed(request, data)
                watched.model = getattr(message, "model_name", "") or getattr(message, "name", "")
                return await call(message, context)
        raise AssertionError("errors_told ends the call")

    return grpc.unary_unary_rpc_method_handler(answer, response_serializer=response.SerializeToString)


def triton_call(channel: Any, method: str, request: Any) -> Any:
    """The unary ``method`` of KServe v2 over ``channel``; ``request`` is the type of its message."""
    return channel.unary_unary(
        f"/{KSERVE}/{method}",
        request_serializer=request.SerializeToString,
        response_deserializer=getattr(service_pb2, f"{method}Response").FromString,
    )


def _metadata_of(error: grpc.aio.AioRpcError) -> tuple[tuple[str, Any], ...]:
    # Envoy's refusals are trailers-only answers: which of the two holds them is the library's choice.
    return (*(error.initial_metadata() or ()), *(error.trailing_metadata() or ()))
