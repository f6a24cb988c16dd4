"""gRPC's channel to a process beside this one, which may end and come back."""

from __future__ import annotations

from typing import Any

import grpc

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A new Envoy answers within a fraction of a second, a new Triton within seconds; gRPC's own back-off begins at one
    # second and grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Whatever its name: how long an attempt may take. On busy processors the first frame takes a while.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 500),
)


def open_channel(target: str) -> Any:
    """To ``target``, ``host:port`` or ``unix:/path``; the other side sees to what is too large. ``close`` it."""
    return grpc.aio.insecure_channel(target, options=_OPTIONS)
