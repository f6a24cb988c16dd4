"""What strangers may take of Envoy: memory, connections, streams, time.

A message is held in Envoy until it is complete, so a window as large as a message lets a few half-sent ones take
gigabytes. Near the bound the streams that hold most are ended; small calls go on.
"""

from __future__ import annotations

import resource
from typing import Any

Json = dict[str, Any]

MOST_STREAMS = 1024
"""At once on one connection, as many as Envoy allows by itself."""
HEADERS_S = 10
"""How long headers, and a TLS handshake, may take to arrive."""
OVERLOADED = "the server is out of memory for requests, retry later"

_TYPE = "type.googleapis.com/"
_MESSAGES_AT_ONCE = 4
_MOST_CONNECTIONS, _SPARE_DESCRIPTORS = 4096, 256
_HEAP = "envoy.resource_monitors.fixed_heap"
_CONNECTIONS = "envoy.resource_monitors.global_downstream_max_connections"
_IDLE_CONNECTION_S, _UNREAD_S = 600, 300
_SHORTEST_STREAM_IDLE_S, _SHORTEST_CONNECTION_IDLE_S = 30, 2
# Envoy knows eight classes of streams by what they hold, each of twice as much as the one before.
_CLASSES, _FEWEST_BITS = 8, 10

PUBLIC: Json = {
    "request_headers_timeout": f"{HEADERS_S}s",
    # Of a connection without a call; clients of gRPC connect again by themselves.
    "common_http_protocol_options": {"idle_timeout": f"{_IDLE_CONNECTION_S}s"},
    # Of an answer that is complete and not read.
    "stream_flush_timeout": f"{_UNREAD_S}s",
}
"""For the connection manager of the public address."""
RUNTIME: Json = {
    # By itself Envoy closes a connection of which most calls were cut within a second, with all others on it: short
    # deadlines look like that, or many callers behind one proxy.
    "overload.premature_reset_total_stream_count": 2**31,
    # Of one connection, before the others have their turn.
    "http.max_requests_per_io_cycle": 16,
}
"""Envoy's own settings."""


def overload_manager(max_message_bytes: int, max_buffered_bytes: int) -> Json:
    """Room for ``max_buffered_bytes``, and for four of the largest messages in any case.

    From half of that on, calls that hold a quarter of the largest message and more are ended, and smaller and smaller
    ones up to twice of it, where no more are taken. Envoy ends calls only while the share changes, a hundred at a look:
    at a share that is full it would end no more of them.
    """
    # Of the lowest class; no stream below it is ever ended.
    bits = max(_FEWEST_BITS, max_message_bytes.bit_length() - 2 - _CLASSES)
    kinds = "envoy.extensions.resource_monitors."
    heap = {
        "@type": f"{_TYPE}{kinds}fixed_heap.v3.FixedHeapConfig",
        "max_heap_size_bytes": 2 * max(max_buffered_bytes, _MESSAGES_AT_ONCE * max_message_bytes),
    }
    connections = {
        "@type": f"{_TYPE}{kinds}downstream_connections.v3.DownstreamConnectionsConfig",
        "max_active_downstream_connections": _most_connections(),
    }
    # Calls of which nothing has been heard for long, and connections without one, make room first.
    timeouts = {
        "@type": f"{_TYPE}envoy.config.overload.v3.ScaleTimersOverloadActionConfig",
        "timer_scale_factors": [
            {"timer": "HTTP_DOWNSTREAM_STREAM_IDLE", "min_timeout": f"{_SHORTEST_STREAM_IDLE_S}s"},
            {"timer": "HTTP_DOWNSTREAM_CONNECTION_IDLE", "min_timeout": f"{_SHORTEST_CONNECTION_IDLE_S}s"},
        ],
    }
    ended = {"scaled": {"scaling_threshold": 0.25, "saturation_threshold": 1.0}}
    return {
        "refresh_interval": "0.05s",
        "buffer_factory_config": {"minimum_account_to_track_power_of_two": bits},
        "resource_monitors": [
            {"name": _HEAP, "typed_config": heap},
            {"name": _CONNECTIONS, "typed_config": connections},
        ],
        "actions": [
            _action("shrink_heap", {"threshold": {"value": 0.25}}),
            _action("reset_high_memory_stream", ended),
            {**_action("reduce_timeouts", ended), "typed_config": timeouts},
            _action("stop_accepting_requests", {"threshold": {"value": 0.95}}),
            _action("stop_accepting_connections", {"threshold": {"value": 0.98}}),
        ],
    }


def _action(name: str, trigger: Json) -> Json:
    return {"name": f"envoy.overload_actions.{name}", "triggers": [{"name": _HEAP, **trigger}]}


def _most_connections() -> int:
    # Envoy takes connections until it has no descriptor left, and then cannot reach Triton either.
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_SPARE_DESCRIPTORS, min(_MOST_CONNECTIONS, descriptors - _SPARE_DESCRIPTORS))
