from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from native_service.edge.health import Health, Status


class Context:
    """gRPC's: to abort is to raise."""

    async def abort(self, code: grpc.StatusCode, text: str, _metadata: Any) -> None:
        raise grpc.aio.AbortError(code, text)


def test_a_check_of_a_model_that_has_gone_is_of_nothing_known() -> None:
    async def check(name: str) -> int:
        request = health_pb2.HealthCheckRequest(service=name).SerializeToString()
        return (await health._check(request, Context())).status

    health = Health()
    health.set("guest", Status.SERVING)
    assert asyncio.run(check("guest")) == Status.SERVING
    health.set("guest", Status.SERVICE_UNKNOWN)
    for name in ("guest", "nobody"):
        with pytest.raises(grpc.aio.AbortError) as caught:
            asyncio.run(check(name))
        assert caught.value.args[0] is grpc.StatusCode.NOT_FOUND
