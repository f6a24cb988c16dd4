"""Errors as SnoozeML's clients know them: they pick their exception by the code and by words of the text.

``out of memory`` and ``currently loading`` are tried again, ``Shape mismatch`` is a class of its own, UNAVAILABLE
without those words means that there is no server.
"""

from __future__ import annotations

import re

import grpc

from native_service.edge.grpc import told
from native_service.envoy.snooze import RETRY_AFTER_S
from native_service.triton.errors import LOADED_AGAIN
from nereid_backend.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineError,
    InvalidArgument,
    ModelLoading,
    ModelUnavailable,
    NereidError,
    NotFound,
    NotOffered,
    OverLimit,
    ResourceExhausted,
)

_OUT_OF_MEMORY = re.compile(r"out of memory|bad_alloc|cuda failure 2\b|memory allocation failed", re.IGNORECASE)
# Words of Triton 2.51, of a model's own queue policy; a test compares them with the real one.
_QUEUE_IS_FULL, _QUEUE_TIMED_OUT = "Exceeds maximum queue size", "Request timeout expired"
_ABOUT_A_SHAPE = re.compile(r"\bshapes?\b|\bbatch[- ]size\b|\bdimensions?\b", re.IGNORECASE)
_CLASSES: dict[str, type[NereidError]] = {
    error.code: error
    for error in (InvalidArgument, NotFound, DeadlineExceeded, NotOffered, Cancelled, ModelUnavailable)
}


def shape_mismatch(text: str) -> InvalidArgument:
    return InvalidArgument(f"Shape mismatch: {text}")


def no_such_model(name: str) -> NotFound:
    return NotFound(f"Model not found: {name}")


def in_snooze_words(error: NereidError | grpc.aio.AioRpcError, model: str) -> NereidError:
    """What ended a call of ``model``, ours or Triton's, as one of the errors that a SnoozeML client tells apart."""
    code, text, retry_after = told(error)
    if code in ("INTERNAL", "UNKNOWN", "UNAVAILABLE", "RESOURCE_EXHAUSTED") and _OUT_OF_MEMORY.search(text):
        known = "out of memory" in text.lower()
        return _full(text if known else f"out of memory: {text}")
    if _QUEUE_IS_FULL in text and code == "UNAVAILABLE":
        return _full(f"the queue of model {model!r} is full, retry later")
    if _QUEUE_TIMED_OUT in text and code == "UNAVAILABLE":
        return DeadlineExceeded(f"model {model!r} did not come to this call in time")
    if code == "RESOURCE_EXHAUSTED":
        return OverLimit(text) if retry_after is None else _full(text)
    if code == "INVALID_ARGUMENT" and isinstance(error, grpc.aio.AioRpcError) and _ABOUT_A_SHAPE.search(text):
        return shape_mismatch(text)
    if isinstance(error, ModelUnavailable) or text == LOADED_AGAIN:
        return ModelLoading(f"Model {model!r} is currently loading")
    if isinstance(error, NereidError) and code in _CLASSES:
        return error
    return _CLASSES.get(code, EngineError)(text)


def _full(text: str) -> ResourceExhausted:
    return ResourceExhausted(text, RETRY_AFTER_S)
