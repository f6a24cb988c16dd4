"""Envoy's configuration, generated from what is served: one public address, a permit per call in flight.

Every public call passes three filters. ``grpc_field_extraction`` reads the model's name and the inputs' shapes out of
the first message; a Lua script turns them into the header ``nereid-cluster``; the router follows that header. A
request without the header (streams, listings, unknown models, a batch dimension left out, the native service) goes to
our own service. Each model has a cluster of its own, all of them pointing at Triton, whose circuit breaker is the
model's count of permits.

The service calls Triton through a second listener, a Unix socket, and names the cluster itself: the permits are
shared. Both listeners count the calls that fail, by cluster and status. Clusters and routes are files that Envoy
watches; the rest is fixed for its life. All of it is JSON, because Envoy's YAML takes a plain ``n`` for false.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pb2
from tritonclient.grpc import model_config_pb2, service_pb2

from native_service.settings import Address
from nereid_backend.spec import ModelSpec

Json = dict[str, Any]

CLUSTER_HEADER = "nereid-cluster"
# Relative to the run directory, where Envoy is started: a Unix socket's path may have 107 characters only.
ADMIN_SOCKET, INNER_SOCKET, SERVICE_SOCKET = "admin.sock", "inner.sock", "service.sock"
CLUSTERS_FILE, ROUTES_FILE, DYNAMIC_FOLDER = "clusters.json", "routes.json", "envoy"

KSERVE = "inference.GRPCInferenceService"
# Of one dimension, and of all inputs of a request together (our service allows each as many). Both are far beyond what
# a request can carry; a Lua number counts no further.
MOST_SIZE, MOST_ELEMENTS = 2**31 - 1, 2**53
# Of all names, shapes, ids and parameters of a request together: what fits into an error that repeats them.
MOST_TEXT_BYTES = 16 * 1024
_MOST_PARTS = 10_000
QUEUE_FULL = "model queue full, retry later"
RETRY_AFTER_S = 1
# Triton 2.51 answers INTERNAL with these words for ever once a model's process is gone.
STUB_IS_DEAD = "is not healthy"
PROCESS_DIED = "the model's process has died, retry later"
# failed.cluster.NAME.status.NUMBER; no number when the client went before there was a status.
FAILED_CALLS = "failed"

_ROUTES = "public"
_UNIX = "unix:"
_TRITON, _SERVICE, _MODEL_PREFIX = "triton", "service", "model_"
_EXTRACTION = "envoy.filters.http.grpc_field_extraction"
_RESOURCE_EXHAUSTED, _INTERNAL, _UNAVAILABLE = 8, 13, 14
_MOST_CONNECTIONS = 10_000
_MOST_SERVICE_CALLS = 10_000
_MOST_FAILURE_COUNTERS = 100_000
# A stream without a byte in either direction for so long is given up; a running model sends none.
_IDLE_S = 24 * 3600
_CONNECT_TIMEOUT_S = 2
# Beside the message itself a buffer holds gRPC's and HTTP/2's framing.
_FRAMING_BYTES = 64 * 1024
_MOST_FRAMES = 1_000_000
_SERVICE_WINDOW, _SMALLEST_CONNECTION_WINDOW = 1024 * 1024, 256 * 1024 * 1024
_SMALLEST_WINDOW, _LARGEST_WINDOW = 65_535, 2**31 - 1

_TYPE = "type.googleapis.com/"
_LUA_FILTER = "envoy.extensions.filters.http.lua.v3.Lua"
_HCM = _TYPE + "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"


@dataclass(frozen=True, slots=True)
class Admitted:
    """A served model and the calls it may have running and waiting together; ``away``: none can run at the moment."""

    spec: ModelSpec
    capacity: int
    away: bool = False


@dataclass(frozen=True, slots=True)
class EnvoySettings:
    """What does not change while Envoy runs. ``triton`` is its gRPC's ``host:port`` or ``unix:/path``;
    ``max_message_bytes`` is ``server.limits.max_request_bytes``."""

    bind: Address
    triton: str
    max_message_bytes: int


def model_cluster(name: str) -> str:
    """The cluster that holds the permits of model ``name``."""
    return _MODEL_PREFIX + name


def model_of_cluster(cluster: str) -> str | None:
    """The model whose permits ``cluster`` holds; None for the other clusters."""
    return cluster.removeprefix(_MODEL_PREFIX) if cluster.startswith(_MODEL_PREFIX) else None


def bootstrap(settings: EnvoySettings) -> Json:
    """The start file; clusters and routes come from the watched files."""
    routes = {"rds": {"route_config_name": _ROUTES, "config_source": _watched(ROUTES_FILE)}}
    return {
        **_base(),
        "static_resources": {"listeners": [_public(settings, routes), _inner(settings)]},
        "dynamic_resources": {"cds_config": _watched(CLUSTERS_FILE)},
    }


def validation(settings: EnvoySettings, models: Sequence[Admitted]) -> Json:
    """The same without watched files, because ``--mode validate`` does not read those."""
    routes = {"route_config": route_configuration(settings, models)}
    listeners = [_public(settings, routes), _inner(settings)]
    return {**_base(), "static_resources": {"listeners": listeners, "clusters": clusters(settings, models)}}


def clusters_file(settings: EnvoySettings, models: Sequence[Admitted]) -> Json:
    kind = _TYPE + "envoy.config.cluster.v3.Cluster"
    return {"resources": [{"@type": kind, **cluster} for cluster in clusters(settings, models)]}


def routes_file(settings: EnvoySettings, models: Sequence[Admitted]) -> Json:
    kind = _TYPE + "envoy.config.route.v3.RouteConfiguration"
    return {"resources": [{"@type": kind, **route_configuration(settings, models)}]}


def clusters(settings: EnvoySettings, models: Sequence[Admitted]) -> list[Json]:
    """Our service, Triton without permits, and Triton once more per model with as many calls as it has permits."""
    triton = _endpoint(settings.triton)
    service = {"pipe": {"path": SERVICE_SOCKET}}
    return [
        _cluster(settings, _SERVICE, service, _MOST_SERVICE_CALLS),
        _cluster(settings, _TRITON, triton, _MOST_SERVICE_CALLS),
        *(_cluster(settings, model_cluster(m.spec.name), triton, m.capacity) for m in models),
    ]


def _endpoint(address: str) -> Json:
    if address.startswith(_UNIX):
        return {"pipe": {"path": address.removeprefix(_UNIX)}}
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def route_configuration(settings: EnvoySettings, models: Sequence[Admitted]) -> Json:
    # What the script knows of the models changes with them, so it travels with the routes.
    on_request = _lua(models)
    service = {"route": {"cluster": _SERVICE, "timeout": "0s"}}
    scripted = _script(on_request + _over_limit_lua(settings))
    # Compressed messages are for the service: the extraction cannot read them and would refuse the call.
    encoded = {"name": "grpc-encoding", "string_match": {"safe_regex": {"regex": "gzip|deflate"}}}
    unread = {_EXTRACTION: {"@type": _TYPE + "envoy.config.route.v3.FilterConfig", "disabled": True}}
    host: Json = {
        "name": _ROUTES,
        "domains": ["*"],
        "request_headers_to_remove": [CLUSTER_HEADER],
        "typed_per_filter_config": _script(on_request),
        "routes": [
            {
                "match": {"prefix": "/", "headers": [encoded]},
                **service,
                "typed_per_filter_config": {**scripted, **unread},
            },
            _named_route(f"/{KSERVE}/"),
            {"match": {"prefix": "/"}, **service, "typed_per_filter_config": scripted},
        ],
    }
    return {"name": _ROUTES, "virtual_hosts": [host]}


def _script(source: str) -> Json:
    kind = _TYPE + "envoy.extensions.filters.http.lua.v3.LuaPerRoute"
    return {"lua": {"@type": kind, "source_code": {"inline_string": source}}}


def _over_limit(settings: EnvoySettings) -> str:
    limit = f"{settings.max_message_bytes} bytes (server.limits.max_request_bytes)"
    return f"the request is over the limit of this server, {limit}; send less at once"


def _over_limit_lua(settings: EnvoySettings) -> str:
    """gRPC refuses what is too large for our service before the service sees it, in words of its own.

    Only answers of our service pass here: a script costs a small call to Triton 5 to 8 % of Envoy's time.
    """
    return f"""
function envoy_on_response(response)
  local headers = response:headers()
  if headers:get("grpc-status") == nil then headers = response:trailers() end
  if headers == nil or headers:get("grpc-status") ~= "{_RESOURCE_EXHAUSTED}" then return end
  local text = headers:get("grpc-message")
  if text ~= nil and text:find("larger than max", 1, true) then
    headers:replace("grpc-message", "{_over_limit(settings)}")
  end
end
"""


def _lua(models: Sequence[Admitted]) -> str:
    """Names the cluster of a call that Triton can answer as it is.

    ``ranks`` is the number of dimensions of all inputs together when none is left out; -1 for models that do not
    batch, whose requests need no help. Names hold letters, digits, '_', '.' and '-' only (settings).
    """
    # Calls of scripts are for the service: it counts them and knows codes that Triton does not. And it refuses those of
    # models that are away.
    native = [model.spec for model in models if model.spec.script is None and not model.away]
    ranks = ", ".join(f'["{spec.name}"] = {_total_rank(spec)}' for spec in native)
    return (
        f"local ranks = {{{ranks}}}\n"
        f'local header, prefix, triton = "{CLUSTER_HEADER}", "{_MODEL_PREFIX}", "{_TRITON}"\n'
        f'local filter, most_size, most_elements = "{_EXTRACTION}", {MOST_SIZE}, {MOST_ELEMENTS}\n'
        f"local most_text, most_parts = {MOST_TEXT_BYTES}, {_MOST_PARTS}\n" + _LUA
    )


_LUA = """
local window_bytes = 4096

-- What a ModelInferRequest of the buffer holds beside its tensors, in bytes; huge when it is malformed or made of very
-- many parts. Field numbers as in KServe's messages: 5 inputs, of these 5 contents; 7 raw_input_contents.
local function text_bytes(buffer, length)
  local window, first, parts = "", 0, 0
  local function byte(at)
    if at < first or at >= first + #window then
      if at >= length then return nil end
      first, window = at, buffer:getBytes(at, math.min(window_bytes, length - at))
    end
    return window:byte(at - first + 1)
  end
  local function number(at)
    local value, scale = 0, 1
    for _ = 1, 10 do
      local part = byte(at)
      if part == nil then return nil end
      at = at + 1
      if part < 128 then return value + part * scale, at end
      value, scale = value + (part - 128) * scale, scale * 128
    end
    return nil
  end
  local function scan(at, stop, inside)
    local bytes = 0
    while at < stop do
      parts = parts + 1
      local key, size
      key, at = number(at)
      if key == nil or parts > most_parts then return math.huge end
      local field, kind = math.floor(key / 8), key % 8
      if kind == 2 then
        size, at = number(at)
        if size == nil or at + size > stop then return math.huge end
        if field == 5 and not inside then
          bytes = bytes + scan(at, at + size, true)
        elseif field ~= (inside and 5 or 7) then
          bytes = bytes + size
        end
        at = at + size
      elseif kind == 0 then
        size, at = number(at)
        if size == nil then return math.huge end
        bytes = bytes + 10
      else
        return math.huge
      end
    end
    return bytes
  end
  return scan(5, length, false)
end

function envoy_on_request(request)
  local headers = request:headers()
  if headers:get(header) then
    -- Not the caller's to choose: it would get around the permits, or to calls that are switched off.
    headers:remove(header)
    request:clearRouteCache()
  end
  local timeout = headers:get("grpc-timeout")
  if timeout and (timeout:match("^%d+[nu]$") or timeout:match("^%dm$")) then
    -- Triton 2.51 can crash on a deadline that passes while it sets the request up; the client ends the call itself.
    headers:remove("grpc-timeout")
  end
  local fields = request:streamInfo():dynamicMetadata():get(filter)
  if fields == nil then return end
  local version = fields["model_version"] or fields["version"]
  if version ~= nil and version[1] ~= nil and version[1] ~= "" and version[1] ~= "1" then return end
  local names = fields["model_name"]
  if names == nil then
    names = fields["name"]
    if names ~= nil and names[1] ~= nil and ranks[names[1]] ~= nil then
      headers:add(header, triton)
      request:clearRouteCache()
    end
    return
  end
  local name = names[1]
  local rank = name ~= nil and ranks[name] or nil
  if rank == nil then return end
  -- Triton 2.51 multiplies sizes without looking: past 32 bits of rows or 64 of bytes, or with no rows, they break the
  -- model's process or the requests that share its batch. Our service refuses those.
  local total, elements = 0, 1
  for _, text in ipairs(fields["inputs.shape"] or {}) do
    local size = tonumber(text)
    if size < 0 or size > most_size or (size == 0 and rank >= 0) then return end
    if size > 0 then elements = elements * size end
    total = total + 1
  end
  if elements > most_elements or (rank >= 0 and total ~= rank) then return end
  -- Triton repeats names, ids and parameters in its errors. An error of more than 64 KiB breaks the connection with all
  -- calls on it, and calls that are cut off at once can crash Triton 2.51.
  local buffer = request:body()
  if buffer == nil then return end
  local length = buffer:length()
  if length > most_text and text_bytes(buffer, length) > most_text then return end
  -- Waiting for the body has ended the life of the objects from before it.
  request:headers():add(header, prefix .. name)
  request:clearRouteCache()
end
"""


_DEAD_STUB = f"""
function envoy_on_response(response)
  local headers = response:headers()
  local text = headers:get("grpc-message")
  if text ~= nil and text:find("{STUB_IS_DEAD}", 1, true) then
    headers:replace("grpc-status", "{_UNAVAILABLE}")
    headers:replace("grpc-message", "{PROCESS_DIED}")
  end
end
"""


def _total_rank(spec: ModelSpec) -> int:
    return sum(len(spec.dims(tensor)) + 1 for tensor in spec.client_inputs) if spec.max_batch_size else -1


def _named_route(prefix: str) -> Json:
    """Follows the header. Without a limit of time: the client's deadline is the only one."""
    match = {"prefix": prefix, "headers": [{"name": CLUSTER_HEADER, "present_match": True}]}
    return {"match": match, "route": {"cluster_header": CLUSTER_HEADER, "timeout": "0s"}}


def _base() -> Json:
    monitor = "envoy.resource_monitors.global_downstream_max_connections"
    kind = "envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig"
    limit = {"@type": _TYPE + kind, "max_active_downstream_connections": _MOST_CONNECTIONS}
    return {
        "node": {"id": "nereid", "cluster": "nereid"},
        "admin": {"address": {"pipe": {"path": ADMIN_SOCKET, "mode": 0o600}}},
        "overload_manager": {"resource_monitors": [{"name": monitor, "typed_config": limit}]},
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
    filters = [_extraction(), _filter("lua", _LUA_FILTER), _dead_stub()]
    listener = _listener(settings, "public", {"socket_address": address}, routes, filters)
    # Without this a second program on the same port would silently take a part of the calls.
    return {**listener, "enable_reuse_port": False}


def _inner(settings: EnvoySettings) -> Json:
    """For our service, which names the cluster: anybody may name any here, so it is a socket in a private folder."""
    host = {"name": "inner", "domains": ["*"], "routes": [_named_route("/")]}
    routes = {"route_config": {"name": "inner", "virtual_hosts": [host]}}
    return _listener(settings, "inner", {"pipe": {"path": INNER_SOCKET, "mode": 0o600}}, routes, [])


def _listener(settings: EnvoySettings, name: str, address: Json, routes: Json, filters: Sequence[Json]) -> Json:
    manager = {
        "@type": _HCM,
        "stat_prefix": name,
        "codec_type": "HTTP2",
        # Envoy takes 10,000 waiting frames for an attack, and each line of a script is one; their bytes are bounded.
        "http2_protocol_options": {**_http2(_window(settings)), "max_outbound_frames": _MOST_FRAMES},
        "stream_idle_timeout": f"{_IDLE_S}s",
        "request_timeout": "0s",
        "local_reply_config": {"mappers": _refusals(settings)},
        "access_log": [_failure_count()],
        "http_filters": [*filters, _filter("router", "envoy.extensions.filters.http.router.v3.Router")],
        **routes,
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    return {
        "name": name,
        "address": address,
        "per_connection_buffer_limit_bytes": _window(settings),
        "filter_chains": [chain],
    }


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
            "value_match": {"exact": str(_INTERNAL)},
        }
    }
    skip = {"@type": _TYPE + "envoy.extensions.filters.common.matcher.action.v3.SkipFilter"}
    passed = {
        "predicate": {"not_matcher": internal},
        "on_match": {"action": {"name": "skip", "typed_config": skip}},
    }
    script = {"@type": _TYPE + _LUA_FILTER, "default_source_code": {"inline_string": _DEAD_STUB}}
    matching = {
        "@type": _TYPE + "envoy.extensions.common.matching.v3.ExtensionWithMatcher",
        "xds_matcher": {"matcher_list": {"matchers": [passed]}},
        "extension_config": {"name": "dead-stub", "typed_config": script},
    }
    return {"name": "dead-stub", "typed_config": matching}


def _extraction() -> Json:
    """What the script needs to know of the first message of a call."""
    fields = {
        "ModelInfer": ("model_name", "model_version", "inputs.shape"),
        **dict.fromkeys(("ModelMetadata", "ModelConfig", "ModelReady"), ("name", "version")),
    }
    files = descriptor_pb2.FileDescriptorSet()
    for module in (model_config_pb2, service_pb2):
        files.file.add().ParseFromString(module.DESCRIPTOR.serialized_pb)
    kind = _TYPE + "envoy.extensions.filters.http.grpc_field_extraction.v3.GrpcFieldExtractionConfig"
    config = {
        "@type": kind,
        "descriptor_set": {"inline_bytes": base64.b64encode(files.SerializeToString()).decode()},
        "extractions_by_method": {
            f"{KSERVE}.{method}": {"request_field_extractions": {name: {} for name in names}}
            for method, names in fields.items()
        },
    }
    return {"name": _EXTRACTION, "typed_config": config}


def _refusals(settings: EnvoySettings) -> list[Json]:
    """Envoy's own answers in gRPC's words. UO: no permit left. UF, UC, UH: Triton or our service is not there."""
    exhausted = _header("grpc-status", _RESOURCE_EXHAUSTED)
    gone = "the server behind this address does not answer, retry later"
    cel = _TYPE + "envoy.extensions.access_loggers.filters.cel.v3.ExpressionFilter"
    # The extraction says this when a message does not fit into the buffer; it has no flag of its own.
    expression = "response.code_details.contains('FAILED_PRECONDITION{REQUEST_BUFFER_CONVERSION_FAIL}')"
    too_large = {"extension_filter": {"name": "cel", "typed_config": {"@type": cel, "expression": expression}}}
    return [
        _refusal(_flags("UO"), QUEUE_FULL, [exhausted, _header("retry-after", RETRY_AFTER_S)]),
        _refusal(_flags("UF", "UC", "UH"), gone, [_header("grpc-status", _UNAVAILABLE)]),
        _refusal(too_large, _over_limit(settings), [exhausted]),
    ]


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


def _header(name: str, value: int) -> Json:
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
    window = _SERVICE_WINDOW if name == _SERVICE else _window(settings)
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
    """The extraction holds a whole message in the stream's buffer: the window is the largest message."""
    return max(_SMALLEST_WINDOW, min(settings.max_message_bytes + _FRAMING_BYTES, _LARGEST_WINDOW))
