"""Health and metrics over HTTP, for probes and Prometheus; there is no inference here.

Envoy stands before it on ``server.http_addr``: it knows TLS, keys, and when to give up on a caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import ClientError, ClientSession, ClientTimeout, web
from aiohttp.http_exceptions import HttpProcessingError

from native_service.envoy.settings import Admitted, Place
from native_service.telemetry.exposition import Counted, Loads, exposition
from native_service.telemetry.triton_counters import TritonCounters
from nereid_backend.errors import EnvoyUnavailable

_LOG = logging.getLogger("nereid.http")

_METRICS_TIMEOUT_S = 5.0
_NO_ANSWER = (ClientError, asyncio.TimeoutError)
_METRICS_HEADERS = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}


def is_not_about_bad_bytes(record: logging.LogRecord) -> bool:
    """A filter of log records: aiohttp tells bytes that are no HTTP with a traceback each, and fills the log."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError)


_LOG.addFilter(is_not_about_bad_bytes)


async def listen(
    application: web.Application,
    socket: str,
    log: logging.Logger,
    *,
    ends_calls: bool = False,
    last_answers_s: float = 60.0,
) -> web.AppRunner:
    """Serve ``application`` on the Unix socket ``socket`` until the runner is cleaned up. Raises OSError.

    Bodies are as they were sent: aiohttp's own unpacking has no bound. With ``ends_calls`` a client that goes ends its
    call: its permit is free and the model may skip it.
    """
    runner = web.AppRunner(
        application,
        access_log=None,
        logger=log,
        handler_cancellation=ends_calls,
        auto_decompress=False,
        shutdown_timeout=last_answers_s,
    )
    await runner.setup()
    await web.UnixSite(runner, socket).start()
    return runner


class Metrics:
    """Answers ``/metrics``, wherever that is asked for: Triton's series, completed, and ours."""

    def __init__(
        self,
        triton: str,
        *,
        models: Mapping[str, Admitted],
        counted: Callable[[], Awaitable[Counted]],
        loads: Callable[[], Loads],
        more: Callable[[str], str] = lambda _triton: "",
    ) -> None:
        """``triton`` is its metrics' ``host:port``; ``models`` may change meanwhile; ``counted`` and ``loads`` are what
        is shown beside Triton's, ``more`` makes the text of further series from its, which never fall."""
        self._url, self._models = f"http://{triton}/metrics", models
        self._counted, self._loads, self._more = counted, loads, more
        self._session: ClientSession | None = None
        self._triton = TritonCounters()
        self._looking = asyncio.Lock()

    async def start(self) -> None:
        self._session = ClientSession(timeout=ClientTimeout(total=_METRICS_TIMEOUT_S))

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def look(self) -> None:
        """Keep what Triton has counted so far, before it forgets a model; no harm is done when it does not answer."""
        with contextlib.suppress(*_NO_ANSWER):
            await self._look()

    async def _look(self) -> str | None:
        """Triton's series, its counters kept over unloads; None when it has none."""
        if self._session is None:
            return None
        async with self._looking:  # an older look that comes later would read like counters that fell
            async with self._session.get(self._url) as answer:
                if answer.status != 200:
                    return None
                text, life = await answer.text(), self._loads().server_restarts.get("tritonserver", 0)
            return await asyncio.to_thread(self._triton.complete, text, life, set(self._models))

    async def answer(self, _request: web.Request) -> web.Response:
        """The answer in Prometheus' format."""
        try:
            triton = await self._look()
            if triton is None:
                return web.Response(status=503, text="Triton has no metrics\n")
            counted = await self._counted()
            # With a hundred models it takes a tenth of a second, which calls need not wait for.
            text = await asyncio.to_thread(exposition, triton, dict(self._models), counted, self._loads())
        except _NO_ANSWER:
            return web.Response(status=503, text="Triton does not answer\n")
        except EnvoyUnavailable as error:
            return web.Response(status=503, text=f"{error}\n")
        return web.Response(body=(text + self._more(triton)).encode(), headers=_METRICS_HEADERS)


class HttpEndpoints:
    """The HTTP server behind ``server.http_addr``, on a Unix socket."""

    def __init__(
        self,
        socket: str,
        *,
        models: Mapping[str, Admitted],
        is_answering: Callable[[], Awaitable[bool]],
        metrics: Metrics,
    ) -> None:
        """``models`` may change meanwhile; ``is_answering`` tells whether calls get to Triton now."""
        self._socket = socket
        self._models = models
        self._is_answering = is_answering
        self._metrics = metrics
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen. Raises OSError."""
        application = web.Application()
        application.add_routes(
            [
                web.get("/v2/health/live", self._live),
                web.get("/v2/health/ready", self._ready),
                web.get("/v2/models/{model}/ready", self._model_ready),
                web.get("/v2/models/{model}/versions/{version}/ready", self._model_ready),
                web.get("/metrics", self._metrics.answer),
            ]
        )
        self._runner = await listen(application, self._socket, _LOG)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _live(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _ready(self, _request: web.Request) -> web.Response:
        lacks = any(model.away and model.required for model in self._models.values())
        return web.Response(status=200 if not lacks and await self._is_answering() else 400)

    async def _model_ready(self, request: web.Request) -> web.Response:
        model = self._models.get(request.match_info["model"])
        there = (
            model is not None
            and not model.away
            and model.place is not Place.IDLE
            and request.match_info.get("version", "1") == "1"
        )
        return web.Response(status=200 if there and await self._is_answering() else 400)
