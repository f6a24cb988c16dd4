"""The role that each call needs: the one table of all protocols.

``read_only`` < ``inference`` < ``admin``, as SnoozeML names them. Envoy holds calls to it (``envoy/access.py``); a test
compares it with the methods of all our protocols. What is not in the table is for ``admin``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple


class Role(IntEnum):
    """Who may call; PUBLIC needs no credentials."""

    PUBLIC = 0
    READ_ONLY = 1
    INFERENCE = 2
    ADMIN = 3


class HttpCall(NamedTuple):
    """An HTTP call; ``NAME`` in ``path`` stands for a model or a version."""

    method: str
    path: str


NAMES: Mapping[str, Role] = {"read_only": Role.READ_ONLY, "inference": Role.INFERENCE, "admin": Role.ADMIN}
"""The names of roles in settings."""
CLAIMS: Mapping[str, Role] = {
    **NAMES,
    "administrator": Role.ADMIN,
    **dict.fromkeys(("read", "readonly", "ro"), Role.READ_ONLY),
    **dict.fromkeys(("infer", "user"), Role.INFERENCE),
}
"""The names of roles in tokens, SnoozeML's aliases included."""

_SERVICES: Mapping[str, Mapping[str, Role]] = {
    "grpc.health.v1.Health": {"Check": Role.PUBLIC, "Watch": Role.PUBLIC, "List": Role.READ_ONLY},
    "inference.Nereid": {
        "HealthCheck": Role.PUBLIC,
        "ViewModels": Role.READ_ONLY,
        "Checkpoint": Role.INFERENCE,
    },
    "inference.GRPCInferenceService": {
        **dict.fromkeys(("ServerLive", "ServerReady"), Role.PUBLIC),
        **dict.fromkeys(
            ("ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex"),
            Role.READ_ONLY,
        ),
        **dict.fromkeys(("ModelInfer", "ModelStreamInfer"), Role.INFERENCE),
        **dict.fromkeys(
            (
                *("RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings"),
                *("SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister"),
                *("CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister"),
            ),
            Role.ADMIN,
        ),
    },
    "snoozeml.v1.InferenceService": dict.fromkeys(("Infer", "StreamInfer"), Role.INFERENCE),
}
RPCS: Mapping[str, Role] = {
    f"/{service}/{method}": role for service, methods in _SERVICES.items() for method, role in methods.items()
}
"""By gRPC path."""
METRICS = HttpCall("GET", "/metrics")
HTTP: Mapping[HttpCall, Role] = {
    HttpCall("GET", "/v2/health/live"): Role.PUBLIC,
    HttpCall("GET", "/v2/health/ready"): Role.PUBLIC,
    METRICS: Role.READ_ONLY,
    HttpCall("GET", "/v2"): Role.READ_ONLY,
    HttpCall("POST", "/v2/repository/index"): Role.READ_ONLY,
    **{
        HttpCall(method, f"/v2/models/NAME{version}/{call}"): role
        for version in ("", "/versions/NAME")
        for method, call, role in (
            *(("GET", read, Role.READ_ONLY) for read in ("ready", "config", "stats")),
            *(("POST", run, Role.INFERENCE) for run in ("infer", "generate", "generate_stream")),
        )
    },
    HttpCall("GET", "/v2/models/NAME"): Role.READ_ONLY,
    HttpCall("GET", "/v2/models/NAME/versions/NAME"): Role.READ_ONLY,
    HttpCall("GET", "/v2/models/stats"): Role.READ_ONLY,
    # SnoozeML's REST.
    HttpCall("GET", "/"): Role.PUBLIC,
    HttpCall("GET", "/health/live"): Role.PUBLIC,
    HttpCall("GET", "/health/ready"): Role.PUBLIC,
    HttpCall("GET", "/v1/models"): Role.READ_ONLY,
    HttpCall("POST", "/v1/models/NAME/infer"): Role.INFERENCE,
    **{
        HttpCall("POST", f"/v1/models/{call}"): Role.ADMIN
        for call in ("NAME/load", "NAME/unload", "NAME/pin", "NAME/unpin", "upload", "refresh")
    },
}
"""KServe v2 over HTTP, SnoozeML's REST, health and metrics; HEAD is as GET."""
