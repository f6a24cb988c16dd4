"""What every call of our gRPC server has in common: its way to Triton, its errors, its time."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from native_service.envoy_config import CLUSTER_HEADER, model_cluster
from native_service.triton_errors import canonical
from nereid_backend.errors import DeadlineExceeded, NereidError

_LOG = logging.getLogger("nereid.service")

_RETRY_AFTER = "retry-after"
# Triton 2.51 answers INTERNAL with these words for ever once a model's process is gone.
_STUB_IS_DEAD = "is not healthy"
# Triton 2.51 can crash on a deadline that passes while the request is being set up.
_SHORTEST_DEADLINE_S = 0.010


class Inference:
    """Runs models through Envoy's inner listener, which takes a permit of the model or refuses at once."""

    def __init__(self, channel: Any) -> None:
        """``channel`` is a grpc.aio channel to the inner listener."""
        self._infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )

    async def run(self, request: Any, context: Any) -> Any:
        """The answer to a ModelInferRequest, within what is left of the deadline of ``context``.

        Raises grpc.aio.AioRpcError with Triton's own code and words, or RESOURCE_EXHAUSTED without a permit.
        """
        metadata = ((CLUSTER_HEADER, model_cluster(request.model_name)),)
        return await self._infer(request, timeout=_time_left(context), metadata=metadata)


@asynccontextmanager
async def errors_told(context: Any) -> AsyncIterator[None]:
    """Ends the call of ``context`` with the code and words of what is raised inside."""
    try:
        yield
    except NereidError as error:
        await context.abort(grpc.StatusCode[error.code], str(error))
    except grpc.aio.AioRpcError as error:
        # Triton's own code and words: the runtime inside has made them fit for a client.
        if _STUB_IS_DEAD in (error.details() or ""):
            _LOG.error("%s; its process has died, restart the server", error.details())
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model's process has died; try later")
        hints = tuple(pair for pair in _metadata_of(error) if pair[0] == _RETRY_AFTER)
        code, text = canonical(error.code().name, error.details() or "Triton gave no reason")
        await context.abort(grpc.StatusCode[code], text, hints)
    except grpc.aio.AbortError:
        raise
    except Exception:  # noqa: BLE001 - the edge of this process towards its clients
        _LOG.exception("a call failed in a way nobody planned for")
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")


def _metadata_of(error: grpc.aio.AioRpcError) -> tuple[tuple[str, Any], ...]:
    # Envoy's refusals are trailers-only answers: which of the two holds them is the library's choice.
    return (*(error.initial_metadata() or ()), *(error.trailing_metadata() or ()))


def _time_left(context: Any) -> float | None:
    """Seconds the client still waits, None when it waits for ever."""
    left: float | None = context.time_remaining()
    if left is not None and left < _SHORTEST_DEADLINE_S:
        raise DeadlineExceeded("the deadline leaves no time to run the model")
    return left
