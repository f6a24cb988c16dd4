"""The addresses that Envoy opens, and what it says there by itself: refusals, counts and lines of failed calls.

The public one is for gRPC; a script on it names the cluster of a call (``envoy/config.py``). ``inner`` is a Unix socket
for our own service. Those for HTTP pass everything to sockets of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from native_service.envoy import access as envoy_access
from native_service.envoy import limits as envoy_limits
from native_service.envoy import scripts as envoy_scripts
from native_service.envoy.scripts import (
    CLUSTER_HEADER,
    INTERNAL,
    METADATA,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
)
from native_service.envoy.settings import (
    HTTP,
    HTTP_INFER,
    INNER_SOCKET,
    PUBLIC,
    REST,
    EnvoySettings,
    Json,
    http2_options,
)
from native_service.envoy.snooze import BEGUN
from native_service.settings import Address

QUEUE_FULL = "model queue full, retry later"
GONE = "the server behind this address does not answer, retry later"
RETRY_AFTER_S = 1
# failed.cluster.NAME.status.NUMBER; no number when the client went before there was a status.
FAILED_CALLS = "failed"
# And TURNED_CALLS.status.NUMBER, TURNED_MS.status.NUMBER.
TURNED_CALLS, TURNED_MS = "snooze_calls", "snooze_ms"

# Callers choose the lengths of what is cut here. Metadata is cut only in the middle of other text: hence the space.
FAILURE_FIELDS = {
    "cluster": "%UPSTREAM_CLUSTER%",
    "status": "%GRPC_STATUS_NUMBER%",
    "http_status": "%RESPONSE_CODE%",
    "header": "%RESP(grpc-message):600%",
    "trailer": "%TRAILER(grpc-message):600%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "path": "%REQ(:path):100%",
    "id": f" %DYNAMIC_METADATA({METADATA}:id):100%",
    "request_id": "%REQ(x-request-id):100%",
    "ms": "%DURATION%",
}

HTTP_ANSWER_S = 15
"""For an answer about health or metrics."""
HTTP_IDLE_S = 60
"""How long nobody may use a connection over HTTP."""
BUFFER_BYTES = 1024 * 1024
"""What a connection of our own or over HTTP may buffer."""

# So much of one connection over HTTP/2 is read before the others have their turn; its streams hold up to their windows.
# A worker that first read 16 MiB of each of 200 connections looked at nothing else for seconds, its share of memory
# included, and kept what was left of 30,000 calls that were reset at once.
_READ_BYTES = 64 * 1024

_MOST_FAILURE_COUNTERS = 100_000
# A stream without a byte in either direction for so long is given up; a running model sends none.
_IDLE_S = 24 * 3600
_MOST_HTTP_CONNECTIONS = 256
_BAD_REQUEST, _CONTENT_TOO_LARGE = 400, 413  # HTTP's
_MOST_FRAMES = 1_000_000

_TYPE = "type.googleapis.com/"
_LUA_FILTER = "envoy.extensions.filters.http.lua.v3.Lua"
_HCM = _TYPE + "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"


def listeners(settings: EnvoySettings, routes: Json, http_routes: Mapping[str, Json], tokens: Json) -> list[Json]:
    """All of them; ``routes`` of the public one, ``http_routes`` by the name of those for HTTP.

    ``tokens`` as in ``envoy.access.filters``.
    """
    guards = envoy_access.filters(settings.access.credentials, tokens)
    health = [_http(settings, settings.http, http_routes[HTTP], guards)] if settings.http else []
    calls = [
        _http_calls(settings, name, address, http_routes[name], guards)
        for name, address in ((HTTP_INFER, settings.http_infer), (REST, settings.rest))
        if address is not None
    ]
    return [_public(settings, routes, guards), _inner(settings), *health, *calls]


def _public(settings: EnvoySettings, routes: Json, guards: Sequence[Json]) -> Json:
    address = {"address": settings.bind.host, "port_value": settings.bind.port}
    filters = [*guards, _filter("lua", _LUA_FILTER), _dead_stub()]
    more = {**envoy_limits.PUBLIC, "access_log": [_failure_count(), _failure_line(), _turned_count()]}
    listener = _listener(settings, PUBLIC, {"socket_address": address}, routes, filters, more)
    if (tls := settings.access.tls) is not None:
        [chain] = listener["filter_chains"]
        chain["transport_socket"] = envoy_access.transport_socket(tls, "h2", ask_clients=True)
        chain["transport_socket_connect_timeout"] = f"{envoy_limits.HEADERS_S}s"
    # Without this a second program on the same port would silently take a part of the calls.
    return {**listener, "enable_reuse_port": False}


def _http(settings: EnvoySettings, bind: Address, routes: Json, guards: Sequence[Json]) -> Json:
    """Health and metrics, for probes and Prometheus: small requests by few callers, each done within seconds."""
    limit = {
        "@type": _TYPE + "envoy.extensions.filters.network.connection_limit.v3.ConnectionLimit",
        "stat_prefix": "http",
        "max_connections": _MOST_HTTP_CONNECTIONS,
    }
    before = [{"name": "envoy.filters.network.connection_limit", "typed_config": limit}]
    times = {"request_timeout": f"{envoy_limits.HEADERS_S}s", "stream_idle_timeout": f"{HTTP_ANSWER_S}s"}
    # Probes have no certificates; what is not for everybody asks for a key.
    more = {"http_filters": [*guards, _router()], **times, **routes}
    listener = _http_listener(settings, HTTP, bind, before, more, ask_clients=False)
    # Callers of models must not keep probes out.
    return {**listener, "ignore_global_conn_limit": True}


def _http_calls(settings: EnvoySettings, name: str, bind: Address, routes: Json, guards: Sequence[Json]) -> Json:
    """Calls of models over HTTP: everything is for our service, which calls Triton through the inner listener."""
    refusals = {
        "mappers": [_refusal(_flags("UF", "UC", "UH", "UO"), GONE, [])],
        "body_format": {"json_format": {"error": "%LOCAL_REPLY_BODY%"}},
    }
    filters = [*guards, _router()]
    more = {"stream_idle_timeout": f"{_IDLE_S}s", "local_reply_config": refusals, "http_filters": filters}
    return _http_listener(settings, name, bind, [], {**more, **routes}, ask_clients=True)


def _http_listener(
    settings: EnvoySettings, name: str, bind: Address, before: Sequence[Json], more: Json, *, ask_clients: bool
) -> Json:
    """HTTP/1.1; ``before`` are filters of connections, ``more`` what its connection manager has beside the usual."""
    manager = {
        "@type": _HCM,
        "stat_prefix": name,
        "codec_type": "HTTP1",
        "common_http_protocol_options": {"idle_timeout": f"{HTTP_IDLE_S}s"},
        "request_headers_timeout": f"{envoy_limits.HEADERS_S}s",
        "access_log": [_http_failure_line()],
        **more,
    }
    connections = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    chain: Json = {"filters": [*before, connections]}
    if (tls := settings.access.tls) is not None:
        chain["transport_socket"] = envoy_access.transport_socket(tls, "http/1.1", ask_clients=ask_clients)
        chain["transport_socket_connect_timeout"] = f"{envoy_limits.HEADERS_S}s"
    return {
        "name": name,
        "address": {"socket_address": {"address": bind.host, "port_value": bind.port}},
        "enable_reuse_port": False,
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "filter_chains": [chain],
    }


def _inner(settings: EnvoySettings) -> Json:
    """For our service, which names the cluster: anybody may name any here, so it is a socket in a private folder."""
    host = {"name": "inner", "domains": ["*"], "routes": [named_route("/")]}
    # What comes over it is internal in the statistics of a cluster: the times of clients' own calls stand alone there.
    internal = {"use_remote_address": True, "internal_address_config": {"unix_sockets": True}}
    routes: Json = {"route_config": {"name": "inner", "virtual_hosts": [host]}}
    listener = _listener(settings, "inner", {"pipe": {"path": INNER_SOCKET, "mode": 0o600}}, routes, [], internal)
    return {**listener, "ignore_global_conn_limit": True}


def _listener(
    settings: EnvoySettings, name: str, address: Json, routes: Json, filters: Sequence[Json], more: Json
) -> Json:
    manager = {
        "@type": _HCM,
        "stat_prefix": name,
        "codec_type": "HTTP2",
        # Envoy takes 10,000 waiting frames for an attack, and each line of a script is one; their bytes are bounded.
        "http2_protocol_options": {
            **http2_options(settings.window_bytes),
            "max_outbound_frames": _MOST_FRAMES,
            "max_concurrent_streams": envoy_limits.MOST_STREAMS,
        },
        "stream_idle_timeout": f"{_IDLE_S}s",
        "request_timeout": "0s",
        "local_reply_config": {"mappers": _refusals(settings)},
        "access_log": [_failure_count()],
        "http_filters": [*filters, _router()],
        **routes,
        **more,
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    return {
        "name": name,
        "address": address,
        "per_connection_buffer_limit_bytes": _READ_BYTES,
        "filter_chains": [chain],
    }


def named_route(prefix: str) -> Json:
    """Follows the header. Without a limit of time: the client's deadline is the only one."""
    match = {"prefix": prefix, "headers": [{"name": CLUSTER_HEADER, "present_match": True}]}
    return {"match": match, "route": {"cluster_header": CLUSTER_HEADER, "timeout": "0s"}}


def _router() -> Json:
    return _filter("router", "envoy.extensions.filters.http.router.v3.Router")


def _filter(name: str, kind: str) -> Json:
    return {"name": name, "typed_config": {"@type": _TYPE + kind}}


def _dead_stub() -> Json:
    """Says UNAVAILABLE where Triton says INTERNAL because a model's process is gone.

    The matcher keeps the script from all other answers: on each it would cost a small call 5 to 8 % of Envoy's time.
    """
    status = {"@type": _TYPE + "envoy.type.matcher.v3.HttpResponseHeaderMatchInput", "header_name": "grpc-status"}
    internal = {
        "single_predicate": {
            "input": {"name": "grpc-status", "typed_config": status},
            "value_match": {"exact": str(INTERNAL)},
        }
    }
    skip = {"@type": _TYPE + "envoy.extensions.filters.common.matcher.action.v3.SkipFilter"}
    passed = {
        "predicate": {"not_matcher": internal},
        "on_match": {"action": {"name": "skip", "typed_config": skip}},
    }
    script = {"@type": _TYPE + _LUA_FILTER, "default_source_code": {"inline_string": envoy_scripts.ON_INTERNAL_ANSWER}}
    matching = {
        "@type": _TYPE + "envoy.extensions.common.matching.v3.ExtensionWithMatcher",
        "xds_matcher": {"matcher_list": {"matchers": [passed]}},
        "extension_config": {"name": "dead-stub", "typed_config": script},
    }
    return {"name": "dead-stub", "typed_config": matching}


def _refusals(settings: EnvoySettings) -> list[Json]:
    """Envoy's own answers in gRPC's words.

    UO: no permit left. UF, UC, UH: Triton or our service is not there.
    """
    exhausted = header("grpc-status", RESOURCE_EXHAUSTED)
    # The script waits for the whole message, and this one does not fit into the buffer.
    status = {"op": "EQ", "value": {"default_value": _CONTENT_TOO_LARGE, "runtime_key": "unused"}}
    too_large = {"status_code_filter": {"comparison": status}}
    overloaded = _details("startsWith('overload')")
    return [
        _refusal(_flags("UO"), QUEUE_FULL, [exhausted, header("retry-after", RETRY_AFTER_S)]),
        _refusal(overloaded, envoy_limits.OVERLOADED, [exhausted, header("retry-after", RETRY_AFTER_S)]),
        _refusal(_flags("UF", "UC", "UH"), GONE, [header("grpc-status", UNAVAILABLE)]),
        _refusal(too_large, settings.over_limit, [exhausted]),
    ]


def _details(condition: str) -> Json:
    cel = _TYPE + "envoy.extensions.access_loggers.filters.cel.v3.ExpressionFilter"
    expression = f"response.code_details.{condition}"
    return {"extension_filter": {"name": "cel", "typed_config": {"@type": cel, "expression": expression}}}


def _flags(*flags: str) -> Json:
    return {"response_flag_filter": {"flags": list(flags)}}


def _refusal(condition: Json, text: str, headers: Sequence[Json]) -> Json:
    return {"filter": condition, "body": {"inline_string": text}, "headers_to_add": list(headers)}


def _failure_count() -> Json:
    """Counts the calls that do not end with OK; the others pay nothing for it."""
    tags = {"cluster": "%UPSTREAM_CLUSTER%", "status": "%GRPC_STATUS_NUMBER%"}
    stat = {"name": FAILED_CALLS, "tags": [{"name": name, "value_format": value} for name, value in tags.items()]}
    config = {
        "@type": _TYPE + "envoy.extensions.access_loggers.stats.v3.Config",
        "stats_scope": {"max_counters": _MOST_FAILURE_COUNTERS},
        "counters": [{"stat": stat, "value_fixed": 1}],
    }
    failed = {"grpc_status_filter": {"statuses": ["OK"], "exclude": True}}
    return {"name": "envoy.access_loggers.stats", "filter": failed, "typed_config": config}


def _turned_count() -> Json:
    """Counts the calls of SnoozeML's that a script has turned, which our service does not see, and their time in ms."""
    status = [{"name": "status", "value_format": "%GRPC_STATUS_NUMBER%"}]
    config = {
        "@type": _TYPE + "envoy.extensions.access_loggers.stats.v3.Config",
        "stats_scope": {"max_counters": _MOST_FAILURE_COUNTERS},
        "counters": [
            {"stat": {"name": TURNED_CALLS, "tags": status}, "value_fixed": 1},
            {"stat": {"name": TURNED_MS, "tags": status}, "value_format": "%DURATION%"},
        ],
    }
    turned = {"filter": METADATA, "path": [{"key": BEGUN}], "value": {"present_match": True}}
    only = {"metadata_filter": {"matcher": turned, "match_if_key_not_found": False}}
    return {"name": "envoy.access_loggers.stats", "filter": only, "typed_config": config}


def _failure_line() -> Json:
    """Prints what :mod:`native_service.telemetry.failures` reads: each call that did not end with OK, no other."""
    return _line({"grpc_status_filter": {"statuses": ["OK", "CANCELED"], "exclude": True}})


def _http_failure_line() -> Json:
    """The same of a request over HTTP."""
    comparison = {"op": "GE", "value": {"default_value": _BAD_REQUEST, "runtime_key": "unused"}}
    return _line({"status_code_filter": {"comparison": comparison}})


def _line(failed: Json) -> Json:
    text = _TYPE + "envoy.extensions.access_loggers.stream.v3.StdoutAccessLog"
    config = {"@type": text, "log_format": {"json_format": FAILURE_FIELDS}}
    return {"name": "envoy.access_loggers.stdout", "filter": failed, "typed_config": config}


def header(name: str, value: int | str) -> Json:
    return {"header": {"key": name, "value": str(value)}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
