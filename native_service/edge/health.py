"""``grpc.health.v1``: how the server, its services and its models are.

Not the library's own: there whoever stops watching a name ends what all others hear of it, and bytes that are no
message, which anybody may send, are a traceback each in the log.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from native_service.edge.grpc import errors_told, parsed
from nereid_backend.errors import NotFound, short_repr

Status = health_pb2.HealthCheckResponse

_SERVICE = "grpc.health.v1.Health"


class Health:
    """The status of each name. ``end`` is the last change."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._has_ended = False

    @property
    def handler(self) -> Any:
        """The generic handler for ``grpc.aio.Server.add_generic_rpc_handlers``."""
        serializer = Status.SerializeToString
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, response_serializer=serializer),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, response_serializer=serializer),
        }
        return grpc.method_handlers_generic_handler(_SERVICE, methods)

    def set(self, name: str, status: int) -> None:
        """Tell ``status`` of ``name`` from now on, also to those who watch it."""
        if self._has_ended:
            return
        self._statuses[name] = status
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def end(self) -> None:
        """Nothing serves any more, whatever is set from now on."""
        for name in list(self._statuses):
            self.set(name, Status.NOT_SERVING)
        self._has_ended = True

    async def _check(self, data: bytes, context: Any) -> Any:
        async with errors_told(context):
            name = parsed(health_pb2.HealthCheckRequest, data).service
            if self._statuses.get(name, Status.SERVICE_UNKNOWN) == Status.SERVICE_UNKNOWN:
                raise NotFound(f"nothing named {short_repr(name)} is served here")
            return Status(status=self._statuses[name])
        raise AssertionError("errors_told ends the call")

    async def _watch(self, data: bytes, context: Any) -> None:
        async with errors_told(context):
            name, told = parsed(health_pb2.HealthCheckRequest, data).service, None
            while True:
                changed, status = self._changed, self._statuses.get(name, Status.SERVICE_UNKNOWN)
                if status != told:
                    await context.write(Status(status=status))
                    told = status
                await changed.wait()
