"""The calls that our service answers: how long they take, how large Checkpoint's are, and what is said when one fails.

Calls that Envoy hands straight to Triton are measured by Envoy itself (:mod:`native_service.envoy.admin`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from prometheus_client import Histogram

from native_service.telemetry.failures import SURFACES, Failure, tell
from native_service.triton.errors import status_of
from nereid_backend.errors import Cancelled, NereidError, Unplanned

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
_BYTES = tuple(float(4**power) for power in range(5, 16))  # 1 KiB to 1 GiB
_LABELS = ("model", "surface")
_NO_ID, _LONGEST_ID = "-", 100
_REQUEST_ID = "x-request-id"
_REFUSED = "RESOURCE_EXHAUSTED"


@dataclass(slots=True)
class Call:
    """One call in progress. ``model`` is what the caller named, served or not; the bytes are those of a Checkpoint."""

    surface: str
    request_id: str
    begun_ns: int
    model: str = ""
    input_bytes: int | None = None
    output_bytes: int | None = None


class Calls:
    """Watches the calls of one server."""

    def __init__(self) -> None:
        # No registry: what is shown, and for which models, is decided at each look (exposition).
        self._seconds = Histogram(
            "nereid_request_duration_seconds",
            "Time from a request to its answer, good or bad, without refused ones",
            _LABELS,
            buckets=SECONDS,
            registry=None,
        )
        self._sizes = [
            Histogram(f"nereid_checkpoint_{way}_bytes", text, ("model",), buckets=_BYTES, registry=None)
            for way, text in (
                ("input", "Tensor bytes a Checkpoint call sent"),
                ("output", "Tensor bytes a Checkpoint call got"),
            )
        ]
        self._served: set[str] = set()

    @property
    def histograms(self) -> tuple[Histogram, ...]:
        """Durations by model and surface, all but ``UNARY``; sizes of input and output by model."""
        return (self._seconds, *self._sizes)

    def set_models(self, models: Sequence[str]) -> None:
        """What is measured from now on: each series begins at zero, and those of other models end."""
        for name in self._served - set(models):
            for surface in SURFACES[1:]:
                self._seconds.remove(name, surface)
            for sizes in self._sizes:
                sizes.remove(name)
        self._served = set(models)
        for name in models:
            for surface in SURFACES[1:]:
                self._seconds.labels(name, surface)
            for sizes in self._sizes:
                sizes.labels(name)

    @contextmanager
    def watched(self, surface: str, context: Any) -> Iterator[Call]:
        """The call of ``context``, or one request of its stream, is what happens inside; raises what that raises.

        A cancelled call is neither measured nor told. Any other exception is told with its traceback and becomes an
        Unplanned, fit for the caller.
        """
        call = Call(surface, sent_id(context), time.monotonic_ns())
        try:
            yield call
        except (NereidError, grpc.aio.AioRpcError, grpc.aio.AbortError) as error:
            code, text = _ended(error, context)
            seconds = _seconds_since(call.begun_ns)
            if code != _REFUSED:
                self._measure(call, seconds)
            tell(Failure(call.model, surface, code, text, call.request_id, seconds))
            raise
        except grpc.aio.InternalError:
            # The library's word for a client that went while it was being written to.
            raise Cancelled("the client has gone") from None
        except Exception as error:
            what = f"{type(error).__name__}, which nobody planned for"
            tell(Failure(call.model, surface, "INTERNAL", what, call.request_id, _seconds_since(call.begun_ns)), error)
            raise Unplanned("internal error; the server's log has the details") from error
        self._measure(call, _seconds_since(call.begun_ns))

    def _measure(self, call: Call, seconds: float) -> None:
        if call.model not in self._served or call.surface not in SURFACES:
            return
        self._seconds.labels(call.model, call.surface).observe(seconds)
        for sizes, count in zip(self._sizes, (call.input_bytes, call.output_bytes), strict=True):
            if count is not None:
                sizes.labels(call.model).observe(count)


def sent_id(context: Any) -> str:
    """The id that Envoy has given the call of ``context``, or its caller."""
    return next((short_id(str(value)) for key, value in context.invocation_metadata() if key == _REQUEST_ID), _NO_ID)


def short_id(text: str) -> str:
    """The id ``text`` of a request as it is shown: ids may have any length."""
    return text[:_LONGEST_ID]


def _ended(error: BaseException, context: Any) -> tuple[str, str]:
    if not isinstance(error, grpc.aio.AbortError):
        return status_of(error)
    code = context.code()  # a number on some versions
    name = next((status.name for status in grpc.StatusCode if code in (status, status.value[0])), "UNKNOWN")
    return name, str(context.details())


def _seconds_since(begun_ns: int) -> float:
    return (time.monotonic_ns() - begun_ns) / 1e9
