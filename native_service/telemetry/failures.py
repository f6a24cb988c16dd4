"""One line of the log for each call that failed, wherever it ended: in our service, or between Envoy and Triton.

Envoy prints a line of JSON about the latter (:data:`native_service.envoy.listeners.FAILURE_FIELDS`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import unquote

import grpc

from native_service.envoy.scripts import PROCESS_DIED
from native_service.envoy.settings import OWN_CLUSTERS, model_of_cluster
from nereid_backend.errors import short_repr

_LOG = logging.getLogger("nereid.calls")

UNARY, ASSISTED, STREAM, CHECKPOINT = SURFACES = "unary", "assisted", "stream", "checkpoint"
"""How a call came. ModelInfer that Envoy hands to Triton, and that our service does; a request in a stream."""

# What may be the server's fault; everything else is the caller's.
_ERRORS = frozenset({"INTERNAL", "UNKNOWN", "UNAVAILABLE", "DATA_LOSS"})
_LONGEST_TEXT = 500
_FROM_SERVICE = "via_upstream"
_CLIENT_WENT = ("downstream_remote_disconnect", "http2.remote_reset")
_NAMES = {status.value[0]: status.name for status in grpc.StatusCode}
# What Envoy itself answers over HTTP; its other words are about the request, or about who is behind it.
_HTTP_NAMES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    408: "DEADLINE_EXCEEDED",
    413: "RESOURCE_EXHAUSTED",
    431: "RESOURCE_EXHAUSTED",
    504: "DEADLINE_EXCEEDED",
}
_BAD_REQUEST, _SERVER_ERROR = 400, 500


class Failure(NamedTuple):
    """``model`` is what the caller named, served or not; ``surface`` may be another method."""

    model: str
    surface: str
    code: str
    text: str
    request_id: str
    seconds: float


def tell(failure: Failure, error: BaseException | None = None) -> None:
    """Write it, with the traceback of ``error``: an error where it may be the server's fault, else a warning."""
    model, duration_ms = (
        f" of model {short_repr(failure.model)}" if failure.model else "",
        round(failure.seconds * 1000, 1),
    )
    text = failure.text if len(failure.text) <= _LONGEST_TEXT else failure.text[: _LONGEST_TEXT - 3] + "..."
    fields = {
        "model": failure.model[:_LONGEST_TEXT],
        "surface": failure.surface,
        "code": failure.code,
        "request_id": failure.request_id,
        "duration_ms": duration_ms,
    }
    _LOG.log(
        logging.ERROR if failure.code in _ERRORS else logging.WARNING,
        "%s on %s%s, request %s, after %s ms: %s",
        failure.code,
        failure.surface,
        model,
        failure.request_id,
        duration_ms,
        text,
        exc_info=error,
        extra={"fields": fields, "kind": f"{failure.code} on {failure.surface}", "failure": failure},
    )


class LostProcesses(logging.Handler):
    """Tells ``lost`` at once of each model of which Triton has said that a process of it does not answer, and how long
    the call took, in seconds, that it said so of."""

    def __init__(self, lost: Callable[[str, float], None]) -> None:
        super().__init__(logging.ERROR)
        self._lost = lost

    def __enter__(self) -> LostProcesses:
        _LOG.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        _LOG.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        failure: Failure | None = getattr(record, "failure", None)
        if failure is not None and failure.text == PROCESS_DIED:
            self._lost(failure.model, failure.seconds)


def of_envoy(line: str) -> Failure | None:
    """What Envoy says in ``line``; None when our service has told of that call itself, or when it is no such line."""
    try:
        said: dict[str, Any] = json.loads(line)
        cluster, status, http_status = str(said["cluster"] or ""), said["status"], int(said["http_status"] or 0)
        if cluster in OWN_CLUSTERS and said["details"] == _FROM_SERVICE:
            return None
        if (status is None and http_status < _BAD_REQUEST) or str(said["details"]).startswith(_CLIENT_WENT):
            return None  # the client went first
        return Failure(
            model_of_cluster(cluster) or "",
            _surface(str(said["path"])),
            _of_http(http_status) if status is None else _NAMES.get(status, "UNKNOWN"),
            unquote(str(said["header"] or said["trailer"] or said["details"] or "")),
            _text(said["id"]) or str(said["request_id"] or "-"),
            float(said["ms"]) / 1000,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _of_http(status: int) -> str:
    return _HTTP_NAMES.get(status, "INVALID_ARGUMENT" if status < _SERVER_ERROR else "UNAVAILABLE")


def _text(metadata: str) -> str:
    """What Envoy writes for a value of its metadata, which it may have cut; empty for none."""
    text = metadata.strip()
    return "" if text == "-" else text.strip('"')


def _surface(path: str) -> str:
    # Anything else is the caller's word, and not to be counted by.
    method = path.rpartition("/")[2]
    return {"ModelInfer": UNARY, "infer": ASSISTED, "ModelStreamInfer": STREAM, "Checkpoint": CHECKPOINT}.get(
        method, "another call"
    )
