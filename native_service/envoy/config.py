"""Envoy's configuration, generated from what is served: one public address, a permit per call in flight.

A Lua script reads the model's name and the inputs' shapes out of every public request that Triton may answer and turns
them into the header ``nereid-cluster``, which the router follows. A request without the header (streams, listings,
unknown models, texts, a batch dimension left out, what is compressed or in shared memory, the native service) goes to
our own service. Small calls of SnoozeML's Infer become ModelInfer on the way (``envoy/snooze.py``). Each model has a
cluster of its own, all of them pointing at Triton, whose circuit breaker is the model's count of permits.

The service calls Triton through an inner listener, a Unix socket, and names the cluster itself: the permits are shared,
with KServe v2 over HTTP too, which ends in our service. Both listeners count the calls that fail, by cluster and
status. Clusters and routes are files that Envoy watches; the rest is fixed for its life. All of it is JSON, because
Envoy's YAML takes a plain ``n`` for false.
"""

from __future__ import annotations

from collections.abc import Sequence

from native_service.envoy import access as envoy_access
from native_service.envoy import limits as envoy_limits
from native_service.envoy import scripts as envoy_scripts
from native_service.envoy import snooze as envoy_snooze
from native_service.envoy.listeners import BUFFER_BYTES, HTTP_ANSWER_S, HTTP_IDLE_S, header, listeners, named_route
from native_service.envoy.scripts import CLUSTER_HEADER, CODING_HEADER, KSERVE, TRITON
from native_service.envoy.settings import (
    ADMIN_SOCKET,
    CLUSTERS_FILE,
    DYNAMIC_FOLDER,
    HTTP,
    HTTP_INFER,
    HTTP_INFER_ROUTES_FILE,
    HTTP_INFER_SOCKET,
    HTTP_ROUTES_FILE,
    HTTP_SOCKET,
    PUBLIC,
    REST,
    REST_ROUTES_FILE,
    REST_SOCKET,
    ROUTES_FILE,
    SERVICE,
    SERVICE_SOCKET,
    TOKENS_FILE,
    Admitted,
    EnvoySettings,
    Json,
    Place,
    http2_options,
    model_cluster,
)
from nereid_backend.dtypes import BYTES

_MOST_SERVICE_CALLS = 10_000
_CONNECT_TIMEOUT_S = 2
_SERVICE_WINDOW = 1024 * 1024
_UNIX = "unix:"
_TYPE = "type.googleapis.com/"


def bootstrap(settings: EnvoySettings) -> Json:
    """The start file; clusters and routes come from the watched files."""
    routes = {"rds": {"route_config_name": PUBLIC, "config_source": _watched(ROUTES_FILE)}}
    tokens = envoy_access.watched_token_filter(_watched(TOKENS_FILE))
    files = {HTTP: HTTP_ROUTES_FILE, HTTP_INFER: HTTP_INFER_ROUTES_FILE, REST: REST_ROUTES_FILE}
    http = {name: {"rds": {"route_config_name": name, "config_source": _watched(file)}} for name, file in files.items()}
    return {
        **_base(settings),
        "static_resources": {"listeners": listeners(settings, routes, http, tokens)},
        "dynamic_resources": {"cds_config": _watched(CLUSTERS_FILE)},
    }


def validation(settings: EnvoySettings, models: Sequence[Admitted]) -> Json:
    """The same without watched files, because ``--mode validate`` does not read those."""
    routes = {"route_config": route_configuration(settings, models)}
    http = {name: {"route_config": _http_routes(settings, name)} for name in (HTTP, HTTP_INFER, REST)}
    tokens = envoy_access.token_filter(settings.access.credentials, settings.token_secret_file)
    resources = {"listeners": listeners(settings, routes, http, tokens), "clusters": clusters(settings, models)}
    return {**_base(settings), "static_resources": resources}


def tokens_file(settings: EnvoySettings) -> Json:
    """How tokens are verified, on all addresses."""
    verifier = envoy_access.token_filter(settings.access.credentials, settings.token_secret_file)
    return {"resources": [{"@type": _TYPE + "envoy.config.core.v3.TypedExtensionConfig", **verifier}]}


def clusters_file(settings: EnvoySettings, models: Sequence[Admitted]) -> Json:
    kind = _TYPE + "envoy.config.cluster.v3.Cluster"
    return {"resources": [{"@type": kind, **cluster} for cluster in clusters(settings, models)]}


def routes_file(settings: EnvoySettings, models: Sequence[Admitted]) -> Json:
    kind = _TYPE + "envoy.config.route.v3.RouteConfiguration"
    return {"resources": [{"@type": kind, **route_configuration(settings, models)}]}


def http_routes_files(settings: EnvoySettings) -> dict[str, Json]:
    """By file, of the HTTP addresses that are open."""
    kind = _TYPE + "envoy.config.route.v3.RouteConfiguration"
    names = {
        HTTP_ROUTES_FILE: (HTTP, settings.http),
        HTTP_INFER_ROUTES_FILE: (HTTP_INFER, settings.http_infer),
        REST_ROUTES_FILE: (REST, settings.rest),
    }
    return {
        file: {"resources": [{"@type": kind, **_http_routes(settings, name)}]}
        for file, (name, address) in names.items()
        if address is not None
    }


def clusters(settings: EnvoySettings, models: Sequence[Admitted]) -> list[Json]:
    """Our service, Triton without permits, and Triton once more per model with as many calls as it has permits.

    The cluster of an idle model is our service: a call chooses its route when it begins and takes it when its body is
    here, which may be long after the model has gone.
    """
    triton = _endpoint(settings.triton)
    service = {"pipe": {"path": SERVICE_SOCKET}}
    return [
        _cluster(settings, SERVICE, service, _MOST_SERVICE_CALLS),
        _cluster(settings, TRITON, triton, _MOST_SERVICE_CALLS),
        *(
            _cluster(settings, model_cluster(m.spec.name), service if m.place is Place.IDLE else triton, m.capacity)
            for m in models
        ),
        *([_http_cluster(HTTP, HTTP_SOCKET)] if settings.http else []),
        *([_http_cluster(HTTP_INFER, HTTP_INFER_SOCKET)] if settings.http_infer else []),
        *([_http_cluster(REST, REST_SOCKET)] if settings.rest else []),
    ]


def _endpoint(address: str) -> Json:
    if address.startswith(_UNIX):
        return {"pipe": {"path": address.removeprefix(_UNIX)}}
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def route_configuration(settings: EnvoySettings, models: Sequence[Admitted]) -> Json:
    # Calls of scripts are for the service: it counts them and knows codes that Triton does not. And it refuses those of
    # models that are away, has those loaded that are idle, and checks texts that would fail a whole batch.
    native = [(model.spec, model.time_limit_s) for model in models if _is_native(model)]
    # What the script knows of the models changes with them, so it travels with the routes.
    on_request = envoy_scripts.on_request(native, envoy_snooze.on_infer(spec for spec, _ in native))
    # The header, where there is one: gRPC's library keeps its own from us, and answers are to travel in kind.
    coding = header(CODING_HEADER, "%REQ(grpc-encoding)%")
    service = {"route": {"cluster": SERVICE, "timeout": "0s"}, "request_headers_to_add": [coding]}
    scripted = _script(on_request + envoy_scripts.on_answer_of_service(settings.over_limit))
    host: Json = {
        "name": PUBLIC,
        "domains": ["*"],
        "request_headers_to_remove": [CLUSTER_HEADER],
        "typed_per_filter_config": {**_script(on_request), **envoy_access.per_route(settings.access.credentials)},
        "routes": [
            named_route(f"/{KSERVE}/"),
            _snooze_route(on_request),
            {"match": {"prefix": "/"}, **service, "typed_per_filter_config": scripted},
        ],
    }
    return {"name": PUBLIC, "virtual_hosts": [host]}


def _snooze_route(on_request: str) -> Json:
    """Of calls of SnoozeML's that the script has turned into ModelInfer."""
    route = named_route(envoy_snooze.INFER)
    rewritten = {**route["route"], "prefix_rewrite": envoy_snooze.MODEL_INFER}
    return {**route, "route": rewritten, "typed_per_filter_config": _script(on_request + envoy_snooze.on_answer())}


def _is_native(model: Admitted) -> bool:
    texts = any(tensor.element is BYTES for tensor in model.spec.client_inputs)
    return model.spec.script is None and not model.away and model.place is Place.TRITON and not texts


def _script(source: str) -> Json:
    kind = _TYPE + "envoy.extensions.filters.http.lua.v3.LuaPerRoute"
    return {"lua": {"@type": kind, "source_code": {"inline_string": source}}}


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


def _http_routes(settings: EnvoySettings, name: str) -> Json:
    """Of the listener ``name``, to the cluster of that name."""
    answer_s = HTTP_ANSWER_S if name == HTTP else 0  # a model may take any time
    host = {
        "name": name,
        "domains": ["*"],
        "typed_per_filter_config": envoy_access.per_route(settings.access.credentials),
        "routes": [{"match": {"prefix": "/"}, "route": {"cluster": name, "timeout": f"{answer_s}s"}}],
    }
    # Clusters come from a file that is read later.
    return {"name": name, "virtual_hosts": [host], "validate_clusters": False}


def _http_cluster(name: str, socket: str) -> Json:
    endpoint = {"endpoint": {"address": {"pipe": {"path": socket}}}}
    kind = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    options = {
        "@type": _TYPE + kind,
        "explicit_http_config": {"http_protocol_options": {}},
        # aiohttp ends connections that nobody uses after 75 s; one that it has just ended must not be used again.
        "common_http_protocol_options": {"idle_timeout": f"{HTTP_IDLE_S}s"},
    }
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": f"{_CONNECT_TIMEOUT_S}s",
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "circuit_breakers": {"thresholds": [dict.fromkeys(("max_requests", "max_connections"), _MOST_SERVICE_CALLS)]},
        "typed_extension_protocol_options": {kind: options},
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
    }


def _cluster(settings: EnvoySettings, name: str, address: Json, most_calls: int) -> Json:
    unlimited = 2**32 - 1
    threshold = {
        "max_requests": most_calls,
        "max_connections": unlimited,
        "max_pending_requests": unlimited,
        "max_retries": 0,
    }
    # What our service streams may wait there: all its streams share one connection.
    window = _SERVICE_WINDOW if name == SERVICE else settings.window_bytes
    http = _TYPE + "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    options = {"@type": http, "explicit_http_config": {"http2_protocol_options": http2_options(window)}}
    endpoint = {"endpoint": {"address": address}}
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": f"{_CONNECT_TIMEOUT_S}s",
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "circuit_breakers": {"thresholds": [threshold]},
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options},
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
    }
