"""Envoy's configuration, generated from what is served: one public address, a permit per call in flight.

A Lua script reads the model's name and the inputs' shapes out of every public request that Triton may answer and turns
them into the header ``nereid-cluster``, which the router follows. A request without the header (streams, listings,
unknown models, a batch dimension left out, the native service) goes to our own service. Each model has a cluster of its
own, all of them pointing at Triton, whose circuit breaker is the model's count of permits.

The service calls Triton through a second listener, a Unix socket, and names the cluster itself: the permits are
shared. Both listeners count the calls that fail, by cluster and status. Clusters and routes are files that Envoy
watches; the rest is fixed for its life. All of it is JSON, because Envoy's YAML takes a plain ``n`` for false.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from native_service import envoy_access, envoy_limits, envoy_scripts
from native_service.envoy_access import Access
from native_service.envoy_scripts import (
    CLUSTER_HEADER,
    CODING_HEADER,
    INTERNAL,
    KSERVE,
    METADATA,
    MODEL_PREFIX,
    RESOURCE_EXHAUSTED,
    TRITON,
    UNAVAILABLE,
)
from native_service.settings import Address, Limits
from nereid_backend.dtypes import BYTES
from nereid_backend.spec import ModelSpec

Json = dict[str, Any]

# Relative to the run directory, where Envoy is started: a Unix socket's path may have 107 characters only.
ADMIN_SOCKET, INNER_SOCKET, SERVICE_SOCKET, HTTP_SOCKET = "admin.sock", "inner.sock", "service.sock", "http.sock"
CLUSTERS_FILE, ROUTES_FILE, DYNAMIC_FOLDER = "clusters.json", "routes.json", "envoy"
HTTP_INFER_SOCKET = "http-infer.sock"
HTTP_ROUTES_FILE, HTTP_INFER_ROUTES_FILE = "http-routes.json", "http-infer-routes.json"

QUEUE_FULL = "model queue full, retry later"
GONE = "the server behind this address does not answer, retry later"
RETRY_AFTER_S = 1
# failed.cluster.NAME.status.NUMBER; no number when the client went before there was a status.
FAILED_CALLS = "failed"

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

_ROUTES, _HTTP, _HTTP_INFER = "public", "http", "http_infer"
_UNIX = "unix:"
SERVICE = "service"
OWN_CLUSTERS = (SERVICE, _HTTP, _HTTP_INFER)
"""Where this process answers, which tells of what it refuses."""
_MOST_SERVICE_CALLS = 10_000
_MOST_FAILURE_COUNTERS = 100_000
# A stream without a byte in either direction for so long is given up; a running model sends none.
_IDLE_S = 24 * 3600
_CONNECT_TIMEOUT_S = 2
_MOST_HTTP_CONNECTIONS, _HTTP_ANSWER_S, _HTTP_IDLE_S, _HTTP_BUFFER_BYTES = 256, 15, 60, 1024 * 1024
# Beside the message itself a buffer holds gRPC's and HTTP/2's framing.
_FRAMING_BYTES = 64 * 1024
_BAD_REQUEST, _CONTENT_TOO_LARGE = 400, 413  # HTTP's
_MOST_FRAMES = 1_000_000
_SERVICE_WINDOW, _SMALLEST_CONNECTION_WINDOW = 1024 * 1024, 256 * 1024 * 1024
_SMALLEST_WINDOW, _LARGEST_WINDOW = 65_535, 2**31 - 1

_TYPE = "type.googleapis.com/"
_LUA_FILTER = "envoy.extensions.filters.http.lua.v3.Lua"
_HCM = _TYPE + "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"


@dataclass(frozen=True, slots=True)
class Admitted:
    """A served model and the calls it may have running and waiting together; ``away``: none can run at the moment.

    While a ``required`` one is away the server is not ready. A call may take ``time_limit_s``, waiting included.
    """

    spec: ModelSpec
    capacity: int
    away: bool = False
    required: bool = True
    time_limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class EnvoySettings:
    """What does not change while Envoy runs. ``triton`` is its gRPC's ``host:port`` or ``unix:/path``;
    ``max_message_bytes`` is ``server.limits.max_request_bytes``, ``max_buffered_bytes`` the limit of that name."""

    bind: Address
    triton: str
    max_message_bytes: int
    max_buffered_bytes: int = Limits().max_buffered_bytes
    access: Access = envoy_access.OPEN
    http: Address | None = None
    """Where health and metrics are; what answers is on ``HTTP_SOCKET``."""
    http_infer: Address | None = None
    """Where KServe v2 over HTTP is; what answers is on ``HTTP_INFER_SOCKET``."""


def model_cluster(name: str) -> str:
    """The cluster that holds the permits of model ``name``."""
    return MODEL_PREFIX + name


def model_of_cluster(cluster: str) -> str | None:
    """The model whose permits ``cluster`` holds; None for the other clusters."""
    return cluster.removeprefix(MODEL_PREFIX) if cluster.startswith(MODEL_PREFIX) else None


def bootstrap(settings: EnvoySettings) -> Json:
    """The start file; clusters and routes come from the watched files."""
    routes = {"rds": {"route_config_name": _ROUTES, "config_source": _watched(ROUTES_FILE)}}
    files = {_HTTP: HTTP_ROUTES_FILE, _HTTP_INFER: HTTP_INFER_ROUTES_FILE}
    http = {name: {"rds": {"route_config_name": name, "config_source": _watched(file)}} for name, file in files.items()}
    return {
        **_base(settings),
        "static_resources": {"listeners": _listeners(settings, routes, http)},
        "dynamic_resources": {"cds_config": _watched(CLUSTERS_FILE)},
    }


def validation(settings: EnvoySettings, models: Sequence[Admitted]) -> Json:
    """The same without watched files, because ``--mode validate`` does not read those."""
    routes = {"route_config": route_configuration(settings, models)}
    http = {name: {"route_config": _http_routes(settings, name)} for name in (_HTTP, _HTTP_INFER)}
    listeners = _listeners(settings, routes, http)
    return {**_base(settings), "static_resources": {"listeners": listeners, "clusters": clusters(settings, models)}}


def clusters_file(settings: EnvoySettings, models: Sequence[Admitted]) -> Json:
    kind = _TYPE + "envoy.config.cluster.v3.Cluster"
    return {"resources": [{"@type": kind, **cluster} for cluster in clusters(settings, models)]}


def routes_file(settings: EnvoySettings, models: Sequence[Admitted]) -> Json:
    kind = _TYPE + "envoy.config.route.v3.RouteConfiguration"
    return {"resources": [{"@type": kind, **route_configuration(settings, models)}]}


def http_routes_files(settings: EnvoySettings) -> dict[str, Json]:
    """By file, of the HTTP addresses that are open."""
    kind = _TYPE + "envoy.config.route.v3.RouteConfiguration"
    names = {HTTP_ROUTES_FILE: (_HTTP, settings.http), HTTP_INFER_ROUTES_FILE: (_HTTP_INFER, settings.http_infer)}
    return {
        file: {"resources": [{"@type": kind, **_http_routes(settings, name)}]}
        for file, (name, address) in names.items()
        if address is not None
    }


def clusters(settings: EnvoySettings, models: Sequence[Admitted]) -> list[Json]:
    """Our service, Triton without permits, and Triton once more per model with as many calls as it has permits."""
    triton = _endpoint(settings.triton)
    service = {"pipe": {"path": SERVICE_SOCKET}}
    return [
        _cluster(settings, SERVICE, service, _MOST_SERVICE_CALLS),
        _cluster(settings, TRITON, triton, _MOST_SERVICE_CALLS),
        *(_cluster(settings, model_cluster(m.spec.name), triton, m.capacity) for m in models),
        *([_http_cluster(_HTTP, HTTP_SOCKET)] if settings.http else []),
        *([_http_cluster(_HTTP_INFER, HTTP_INFER_SOCKET)] if settings.http_infer else []),
    ]


def _endpoint(address: str) -> Json:
    if address.startswith(_UNIX):
        return {"pipe": {"path": address.removeprefix(_UNIX)}}
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def route_configuration(settings: EnvoySettings, models: Sequence[Admitted]) -> Json:
    # Calls of scripts are for the service: it counts them and knows codes that Triton does not. And it refuses those of
    # models that are away, and texts that would fail a whole batch.
    native = [(model.spec, model.time_limit_s) for model in models if _is_native(model)]
    # What the script knows of the models changes with them, so it travels with the routes.
    on_request = envoy_scripts.on_request(native)
    # The header, where there is one: gRPC's library keeps its own from us, and answers are to travel in kind.
    coding = _header(CODING_HEADER, "%REQ(grpc-encoding)%")
    service = {"route": {"cluster": SERVICE, "timeout": "0s"}, "request_headers_to_add": [coding]}
    scripted = _script(on_request + envoy_scripts.on_answer_of_service(_over_limit(settings)))
    host: Json = {
        "name": _ROUTES,
        "domains": ["*"],
        "request_headers_to_remove": [CLUSTER_HEADER],
        "typed_per_filter_config": {**_script(on_request), **envoy_access.per_route(settings.access.credentials)},
        "routes": [
            _named_route(f"/{KSERVE}/"),
            {"match": {"prefix": "/"}, **service, "typed_per_filter_config": scripted},
        ],
    }
    return {"name": _ROUTES, "virtual_hosts": [host]}


def _is_native(model: Admitted) -> bool:
    texts = any(tensor.element is BYTES for tensor in model.spec.client_inputs)
    return model.spec.script is None and not model.away and not texts


def _script(source: str) -> Json:
    kind = _TYPE + "envoy.extensions.filters.http.lua.v3.LuaPerRoute"
    return {"lua": {"@type": kind, "source_code": {"inline_string": source}}}


def _over_limit(settings: EnvoySettings) -> str:
    limit = f"{settings.max_message_bytes} bytes (server.limits.max_request_bytes)"
    return f"the request is over the limit of this server, {limit}; send less at once"


def _named_route(prefix: str) -> Json:
    """Follows the header. Without a limit of time: the client's deadline is the only one."""
    match = {"prefix": prefix, "headers": [{"name": CLUSTER_HEADER, "present_match": True}]}
    return {"match": match, "route": {"cluster_header": CLUSTER_HEADER, "timeout": "0s"}}


def _base(settings: EnvoySettings) -> Json:
    return {
        "node": {"id": "nereid", "cluster": "nereid"},
        "stats_flush_interval": "1s",
        "layered_runtime": {"layers": [{"name": "nereid", "static_layer": envoy_limits.RUNTIME}]},
        "admin": {"address": {"pipe": {"path": ADMIN_SOCKET, "mode": 0o600}}, "ignore_global_conn_limit": True},
        "overload_manager": envoy_limits.overload_manager(settings.max_message_bytes, settings.max_buffered_bytes),
    }


def _watched(file: str) -> Json:
    # Relative to Envoy's working directory, as the sockets are.
    path = f"./{DYNAMIC_FOLDER}"
    return {
        "resource_api_version": "V3",
        "path_config_source": {"path": f"{path}/{file}", "watched_directory": {"path": path}},
    }


def _public(settings: EnvoySettings, routes: Json) -> Json:
    address = {"address": settings.bind.host, "port_value": settings.bind.port}
    filters = [*envoy_access.filters(settings.access.credentials), _filter("lua", _LUA_FILTER), _dead_stub()]
    more = {**envoy_limits.PUBLIC, "access_log": [_failure_count(), _failure_line()]}
    listener = _listener(settings, "public", {"socket_address": address}, routes, filters, more)
    if (tls := settings.access.tls) is not None:
        [chain] = listener["filter_chains"]
        chain["transport_socket"] = envoy_access.transport_socket(tls, "h2", ask_clients=True)
        chain["transport_socket_connect_timeout"] = f"{envoy_limits.HEADERS_S}s"
    # Without this a second program on the same port would silently take a part of the calls.
    return {**listener, "enable_reuse_port": False}


def _listeners(settings: EnvoySettings, routes: Json, http_routes: Mapping[str, Json]) -> list[Json]:
    health = [_http(settings, settings.http, http_routes[_HTTP])] if settings.http else []
    inference = (
        [_http_inference(settings, settings.http_infer, http_routes[_HTTP_INFER])] if settings.http_infer else []
    )
    return [_public(settings, routes), _inner(settings), *health, *inference]


def _http_routes(settings: EnvoySettings, name: str) -> Json:
    """Of the listener ``name``, to the cluster of that name."""
    answer_s = _HTTP_ANSWER_S if name == _HTTP else 0  # a model may take any time
    host = {
        "name": name,
        "domains": ["*"],
        "typed_per_filter_config": envoy_access.per_route(settings.access.credentials),
        "routes": [{"match": {"prefix": "/"}, "route": {"cluster": name, "timeout": f"{answer_s}s"}}],
    }
    # Clusters come from a file that is read later.
    return {"name": name, "virtual_hosts": [host], "validate_clusters": False}


def _http(settings: EnvoySettings, bind: Address, routes: Json) -> Json:
    """Health and metrics, for probes and Prometheus: small requests by few callers, each done within seconds."""
    limit = {
        "@type": _TYPE + "envoy.extensions.filters.network.connection_limit.v3.ConnectionLimit",
        "stat_prefix": "http",
        "max_connections": _MOST_HTTP_CONNECTIONS,
    }
    filters = [{"name": "envoy.filters.network.connection_limit", "typed_config": limit}]
    times = {"request_timeout": f"{envoy_limits.HEADERS_S}s", "stream_idle_timeout": f"{_HTTP_ANSWER_S}s"}
    # Probes have no certificates; what is not for everybody asks for a key.
    listener = _http_listener(settings, _HTTP, bind, filters, {**times, **routes}, ask_clients=False)
    # Callers of models must not keep probes out.
    return {**listener, "ignore_global_conn_limit": True}


def _http_inference(settings: EnvoySettings, bind: Address, routes: Json) -> Json:
    """KServe v2 over HTTP: everything is for our service, which calls Triton through the inner listener."""
    refusals = {
        "mappers": [_refusal(_flags("UF", "UC", "UH", "UO"), GONE, [])],
        "body_format": {"json_format": {"error": "%LOCAL_REPLY_BODY%"}},
    }
    more = {"stream_idle_timeout": f"{_IDLE_S}s", "local_reply_config": refusals}
    return _http_listener(settings, _HTTP_INFER, bind, [], {**more, **routes}, ask_clients=True)


def _http_listener(
    settings: EnvoySettings, name: str, bind: Address, before: Sequence[Json], more: Json, *, ask_clients: bool
) -> Json:
    """HTTP/1.1; ``before`` are filters of connections, ``more`` what its connection manager has beside the usual."""
    manager = {
        "@type": _HCM,
        "stat_prefix": name,
        "codec_type": "HTTP1",
        "common_http_protocol_options": {"idle_timeout": f"{_HTTP_IDLE_S}s"},
        "request_headers_timeout": f"{envoy_limits.HEADERS_S}s",
        "access_log": [_http_failure_line()],
        "http_filters": [*envoy_access.filters(settings.access.credentials), _router()],
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
        "per_connection_buffer_limit_bytes": _HTTP_BUFFER_BYTES,
        "filter_chains": [chain],
    }


def _http_cluster(name: str, socket: str) -> Json:
    endpoint = {"endpoint": {"address": {"pipe": {"path": socket}}}}
    kind = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    options = {
        "@type": _TYPE + kind,
        "explicit_http_config": {"http_protocol_options": {}},
        # aiohttp ends connections that nobody uses after 75 s; one that it has just ended must not be used again.
        "common_http_protocol_options": {"idle_timeout": f"{_HTTP_IDLE_S}s"},
    }
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": f"{_CONNECT_TIMEOUT_S}s",
        "per_connection_buffer_limit_bytes": _HTTP_BUFFER_BYTES,
        "circuit_breakers": {"thresholds": [dict.fromkeys(("max_requests", "max_connections"), _MOST_SERVICE_CALLS)]},
        "typed_extension_protocol_options": {kind: options},
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
    }


def _inner(settings: EnvoySettings) -> Json:
    """For our service, which names the cluster: anybody may name any here, so it is a socket in a private folder."""
    host = {"name": "inner", "domains": ["*"], "routes": [_named_route("/")]}
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
            **_http2(_window(settings)),
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
        "per_connection_buffer_limit_bytes": _window(settings),
        "filter_chains": [chain],
    }


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
    exhausted = _header("grpc-status", RESOURCE_EXHAUSTED)
    # The script waits for the whole message, and this one does not fit into the buffer.
    status = {"op": "EQ", "value": {"default_value": _CONTENT_TOO_LARGE, "runtime_key": "unused"}}
    too_large = {"status_code_filter": {"comparison": status}}
    overloaded = _details("startsWith('overload')")
    return [
        _refusal(_flags("UO"), QUEUE_FULL, [exhausted, _header("retry-after", RETRY_AFTER_S)]),
        _refusal(overloaded, envoy_limits.OVERLOADED, [exhausted, _header("retry-after", RETRY_AFTER_S)]),
        _refusal(_flags("UF", "UC", "UH"), GONE, [_header("grpc-status", UNAVAILABLE)]),
        _refusal(too_large, _over_limit(settings), [exhausted]),
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


def _failure_line() -> Json:
    """Prints what ``native_service.failures`` reads of each call that did not end with OK; nothing of the others."""
    return _line({"grpc_status_filter": {"statuses": ["OK", "CANCELED"], "exclude": True}})


def _http_failure_line() -> Json:
    """The same of a request over HTTP."""
    comparison = {"op": "GE", "value": {"default_value": _BAD_REQUEST, "runtime_key": "unused"}}
    return _line({"status_code_filter": {"comparison": comparison}})


def _line(failed: Json) -> Json:
    text = _TYPE + "envoy.extensions.access_loggers.stream.v3.StdoutAccessLog"
    config = {"@type": text, "log_format": {"json_format": FAILURE_FIELDS}}
    return {"name": "envoy.access_loggers.stdout", "filter": failed, "typed_config": config}


def _header(name: str, value: int | str) -> Json:
    return {"header": {"key": name, "value": str(value)}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def _cluster(settings: EnvoySettings, name: str, address: Json, most_calls: int) -> Json:
    unlimited = 2**32 - 1
    threshold = {
        "max_requests": most_calls,
        "max_connections": unlimited,
        "max_pending_requests": unlimited,
        "max_retries": 0,
    }
    # What our service streams may wait there: all its streams share one connection.
    window = _SERVICE_WINDOW if name == SERVICE else _window(settings)
    http = _TYPE + "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    options = {"@type": http, "explicit_http_config": {"http2_protocol_options": _http2(window)}}
    endpoint = {"endpoint": {"address": address}}
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": f"{_CONNECT_TIMEOUT_S}s",
        "per_connection_buffer_limit_bytes": _window(settings),
        "circuit_breakers": {"thresholds": [threshold]},
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options},
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
    }


def _http2(window: int) -> Json:
    return {
        "initial_stream_window_size": window,
        "initial_connection_window_size": max(min(2 * window, _LARGEST_WINDOW), _SMALLEST_CONNECTION_WINDOW),
    }


def _window(settings: EnvoySettings) -> int:
    """The script waits for a whole message in the stream's buffer: the window is the largest message."""
    return max(_SMALLEST_WINDOW, min(settings.max_message_bytes + _FRAMING_BYTES, _LARGEST_WINDOW))
