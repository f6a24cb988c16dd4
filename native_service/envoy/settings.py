"""What Envoy is told of the server: addresses, models, and the names of sockets and files in the run directory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from native_service.envoy import access as envoy_access
from native_service.envoy.access import Access
from native_service.envoy.scripts import MODEL_PREFIX
from native_service.settings import Address, Limits
from nereid_backend.spec import ModelSpec

Json = dict[str, Any]

# Relative to the run directory, where Envoy is started: a Unix socket's path may have 107 characters only.
ADMIN_SOCKET, INNER_SOCKET, SERVICE_SOCKET = "admin.sock", "inner.sock", "service.sock"
HTTP_SOCKET, HTTP_INFER_SOCKET, REST_SOCKET = "http.sock", "http-infer.sock", "rest.sock"
CLUSTERS_FILE, ROUTES_FILE, DYNAMIC_FOLDER = "clusters.json", "routes.json", "envoy"
HTTP_ROUTES_FILE, HTTP_INFER_ROUTES_FILE = "http-routes.json", "http-infer-routes.json"
REST_ROUTES_FILE, TOKENS_FILE = "rest-routes.json", "tokens.json"

PUBLIC, HTTP, HTTP_INFER, REST = "public", "http", "http_infer", "rest"
"""Names of listeners and of their routes; of those for HTTP also of their clusters."""
SERVICE = "service"
"""The cluster of our own gRPC service."""
OWN_CLUSTERS = (SERVICE, HTTP, HTTP_INFER, REST)
"""Where this process answers, which tells of what it refuses."""

# Beside the message itself a buffer holds gRPC's and HTTP/2's framing.
_FRAMING_BYTES = 64 * 1024
_SMALLEST_WINDOW, _LARGEST_WINDOW = 65_535, 2**31 - 1
_SMALLEST_CONNECTION_WINDOW = 256 * 1024 * 1024


class Place(Enum):
    """Where the calls of a model go. Nothing of an idle one gets to Triton, however long ago it was sent."""

    TRITON = "triton"
    LEAVING = "leaving"
    """To our service, whose own calls and those under way still get to Triton."""
    IDLE = "idle"
    """To our service, which has the model loaded."""


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
    place: Place = Place.TRITON


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
    rest: Address | None = None
    """Where SnoozeML's REST is; what answers is on ``REST_SOCKET``."""
    token_secret_file: str = envoy_access.TOKEN_SECRET_FILE

    @property
    def window_bytes(self) -> int:
        """The script waits for a whole message in the stream's buffer: the window is the largest message."""
        return max(_SMALLEST_WINDOW, min(self.max_message_bytes + _FRAMING_BYTES, _LARGEST_WINDOW))

    @property
    def over_limit(self) -> str:
        """What callers of larger messages are told."""
        limit = f"{self.max_message_bytes} bytes (server.limits.max_request_bytes)"
        return f"the request is over the limit of this server, {limit}; send less at once"


def model_cluster(name: str) -> str:
    """The cluster that holds the permits of model ``name``."""
    return MODEL_PREFIX + name


def model_of_cluster(cluster: str) -> str | None:
    """The model whose permits ``cluster`` holds; None for the other clusters."""
    return cluster.removeprefix(MODEL_PREFIX) if cluster.startswith(MODEL_PREFIX) else None


def http2_options(window: int) -> Json:
    """Of listeners and clusters: ``window`` bytes may be on their way in a stream."""
    return {
        "initial_stream_window_size": window,
        "initial_connection_window_size": max(min(2 * window, _LARGEST_WINDOW), _SMALLEST_CONNECTION_WINDOW),
    }
