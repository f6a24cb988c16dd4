"""The unmodified SnoozeML SDK, synchronous and asynchronous: what a test asks of one, it asks of the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from snoozing import Snoozing


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which of the SDK's two clients."""
    return str(request.param)


@pytest.fixture
def sdk(snooze: Snoozing, kind: str) -> Iterator[Any]:
    """``sdk(key, **options)`` opens a client of the file's server, the fixture ``snooze``, which the file makes."""
    yield lambda *key, **options: snooze.client(*key, kind=kind, **options)
    snooze.close_clients()


@pytest.fixture(params=["grpc", "rest"])
def caller(sdk: Any, request: pytest.FixtureRequest) -> Any:
    """``sdk`` with clients that run models over gRPC, and with those that do so over REST."""
    return lambda *key, **options: sdk(*key, use_grpc=request.param == "grpc", **options)
