"""SnoozeML's REST behind ``server.rest_addr``: models and their states, uploads, inference, health and metrics.

Envoy stands in front and knows TLS, keys and roles (``access/roles.py`` has the role of each path here). Everything
ends in what the gRPC service and the commands use as well: one count of permits, one catalogue, one lifecycle.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import grpc
from aiohttp import web

from native_service.edge.http_endpoints import is_not_about_bad_bytes, listen
from native_service.envoy.snooze import RETRY_AFTER_S
from native_service.front import Front
from native_service.kserve.body_codings import Decoder
from native_service.kserve.http import NO_BODY, Held, HttpContext, beside
from native_service.models.catalogue import Catalogue
from native_service.models.control import ModelControl
from native_service.models.residency import Residency
from native_service.settings import ServerSettings
from native_service.snooze import uploaded
from native_service.snooze.errors import in_snooze_words, no_such_model
from native_service.snooze.inference import Deadline
from native_service.snooze.rest_json import model_info, read_inputs, write_outputs
from native_service.snooze.upload import Upload, received
from native_service.telemetry.exposition import own_version
from native_service.triton.errors import without_paths
from nereid_backend.errors import (
    BundleError,
    DeadlineExceeded,
    DeviceMissing,
    EngineMissing,
    InvalidArgument,
    NereidError,
    NotOffered,
    OverLimit,
    RepositoryError,
    ResourceExhausted,
)

_LOG = logging.getLogger("nereid.rest")
_LOG.addFilter(is_not_about_bad_bytes)

SURFACE = "rest"
_MODEL = "/v1/models/{model}"
_STATUSES = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "CANCELLED": 499,
    "UNIMPLEMENTED": 501,
    "RESOURCE_EXHAUSTED": 503,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_TOO_LARGE, _INTERNAL = 413, 500
# Of the JSON of a request, which is a few MiB at most.
_BODY_S = 60.0
_MOST_UPLOADS = 2
# An answer that comes while its upload is still being sent is lost on many clients.
_REST_OF_UPLOAD_S = 10.0


class RestServer:
    """The HTTP server. ``start`` once, ``stop`` at the end."""

    def __init__(
        self,
        server: ServerSettings,
        *,
        catalogue: Catalogue,
        control: ModelControl,
        residency: Residency,
        front: Front,
        metrics: Callable[[web.Request], Awaitable[web.Response]],
    ) -> None:
        """``front`` has been started when the first request comes; ``metrics`` answers ``/metrics``."""
        self._server, self._front, self._metrics = server, front, metrics
        self._catalogue, self._control, self._residency = catalogue, control, residency
        self._uploads = 0
        self._remembering = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    async def start(self, socket: str) -> None:
        """Listen on the Unix socket ``socket``."""
        application = web.Application(middlewares=[_errors_told])
        application.add_routes(
            [
                web.get("/", self._service_info),
                web.get("/health/live", self._live),
                web.get("/health/ready", self._ready),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.post("/v1/models/refresh", self._refresh),
                web.post("/v1/models/upload", self._upload),
                web.post(_MODEL + "/infer", self._infer),
                web.post(_MODEL + "/load", self._order(self._residency.load, {"status": "loaded"})),
                web.post(_MODEL + "/unload", self._order(self._residency.unload, {"status": "unloaded"})),
                web.post(_MODEL + "/pin", self._order(self._pin, {"status": "pinned", "pinned": True})),
                web.post(_MODEL + "/unpin", self._order(self._unpin, {"status": "unpinned", "pinned": False})),
            ]
        )
        self._runner = await listen(application, socket, _LOG, ends_calls=True, last_answers_s=0)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _service_info(self, _request: web.Request) -> web.Response:
        return web.json_response({"name": self._server.name, "version": own_version(), "api": "v1"})

    async def _live(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "live"})

    async def _ready(self, _request: web.Request) -> web.Response:
        if await self._front.is_ready():
            return web.json_response({"status": "ready"})
        return web.json_response({"status": "not ready"}, status=503)

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response(self._infos())

    def _infos(self) -> list[dict[str, Any]]:
        states, served = self._residency.states(), self._catalogue.served
        return [
            model_info(served[name], residence)
            for name, residence in sorted(states.items())
            if name in served and not residence.hidden
        ]

    def _order(
        self, do: Callable[[str], Awaitable[None]], told: Mapping[str, Any]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """The handler of what is done to a model, ``told`` when that went well."""

        async def answer(request: web.Request) -> web.Response:
            model = request.match_info["model"]
            with self._front.inference.calls.watched(SURFACE, HttpContext(request)) as call:
                call.model = model
                self._check_control()
                if model not in self._catalogue.models:
                    raise no_such_model(model)
                await do(model)
            return web.json_response({"model_id": model, **told})

        return answer

    async def _pin(self, name: str) -> None:
        await _to_its_end(self._pinning(self._residency.pin, name, pinned=True))

    async def _unpin(self, name: str) -> None:
        await _to_its_end(self._pinning(self._residency.unpin, name, pinned=False))

    async def _pinning(self, do: Callable[[str], Awaitable[None]], name: str, *, pinned: bool) -> None:
        await do(name)
        try:
            async with self._remembering:
                await asyncio.to_thread(uploaded.remember_pin, self._server.folder, name, pinned=pinned)
        except RepositoryError as error:
            _LOG.warning("%s; after a restart it is pinned or not as before", error)

    async def _refresh(self, request: web.Request) -> web.Response:
        with self._front.inference.calls.watched(SURFACE, HttpContext(request)):
            self._check_control()
            await self._control.refresh()
        return web.json_response({"models": self._infos()})

    async def _upload(self, request: web.Request) -> web.Response:
        try:
            with self._front.inference.calls.watched(SURFACE, HttpContext(request)) as call:
                self._check_control()
                if self._uploads >= _MOST_UPLOADS:
                    raise ResourceExhausted(f"{_MOST_UPLOADS} uploads are being received; send this one later")
                self._uploads += 1
                try:
                    folder, most_bytes = self._server.folder, self._front.limits.max_upload_bytes
                    async with received(request, folder, most_bytes) as upload:
                        call.model = upload.model_id
                        await _to_its_end(self._take(upload))
                finally:
                    self._uploads -= 1
        except NereidError:
            await _read_rest(request, self._front.limits.max_upload_bytes)
            raise
        residence = self._residency.states()[upload.model_id]
        return web.json_response(model_info(self._catalogue.served[upload.model_id], residence))

    async def _take(self, upload: Upload) -> None:
        """Serve what was uploaded. Raises NereidError; then everything is as it was.

        From where it is served on nothing fails any more: what cannot be remembered or pinned is logged, and the
        answer says how it is.
        """
        name, keys = upload.model_id, upload.keys
        if without := keys.without_effect:
            _LOG.warning("the uploaded model %r: %s has no effect here", name, ", ".join(without))
        base = self._control.settings_for(name)
        if base is None:
            raise NotOffered("this server serves the models that its settings list, and no uploaded ones")
        changes = keys.options
        if upload.description is not None:
            changes["description"] = upload.description
        if (residence := self._residency.states().get(name)) is not None:
            changes.setdefault("pinned", residence.pinned)
        options = base.options.model_validate({**base.options.model_dump(), **changes})
        model = base.model_copy(update={"options": options, "device": keys.own_device or base.device})
        try:
            kept = await self._control.adopt(model, upload.file, overwrite=upload.overwrite)
        except RepositoryError:
            raise  # the disk's fault
        except (BundleError, EngineMissing, DeviceMissing) as error:
            raise InvalidArgument(f"the file cannot be served: {without_paths(str(error))}") from None
        try:
            async with self._remembering:
                await asyncio.to_thread(uploaded.remember, self._server.folder, kept)
        except RepositoryError as error:
            _LOG.warning("%s; after a restart it has the default ones", error)
        if keys.pinned:
            try:
                await self._residency.pin(name)
            except (NereidError, grpc.aio.AioRpcError) as error:
                _LOG.warning("the uploaded model %r is served but cannot be pinned now: %s", name, error)

    def _check_control(self) -> None:
        if not self._server.allow_model_control:
            raise NotOffered("models are not changed by callers of this server (server.allow_model_control)")

    async def _infer(self, request: web.Request) -> web.Response:
        model, context = request.match_info["model"], HttpContext(request)
        held, most_bytes = Held(self._front.budget), self._front.limits.max_message_bytes
        try:
            with self._front.snooze.counted(SURFACE, context) as call:
                call.model = model
                body = await self._body(request, held, most_bytes)
                inputs = await beside(len(body), read_inputs, body)
                answer = await self._front.snooze.infer(call, model, inputs, Deadline(context))
                size = sum(array.nbytes for array in answer.outputs.values())
                held.take(size)
                text = await beside(size, write_outputs, model, answer.outputs, answer.duration_ms, most_bytes)
            response = web.Response(body=text, content_type="application/json")
            # Here and not by aiohttp, so that what a slow client has not read counts.
            await response.prepare(request)
            await response.write_eof()
            return response
        finally:
            held.give_back()

    async def _body(self, request: web.Request, held: Held, most_bytes: int) -> bytes:
        decoder = Decoder(request.headers.get("Content-Encoding", ""))
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                chunks = self._front.inference.half_sent.messages(aiter(request.content.iter_any()), lambda: held.count)
                async for chunk in chunks:
                    for part in decoder.parts(chunk):
                        if len(body) + len(part) > most_bytes:
                            raise OverLimit(
                                f"the JSON of a request is over the limit of this server, {most_bytes} bytes "
                                "(server.limits.max_message_bytes); call over gRPC"
                            )
                        held.take(len(part))
                        body += part
        except TimeoutError:
            raise DeadlineExceeded(f"the request was not sent within {_BODY_S:g} s") from None
        decoder.finish()
        return bytes(body)


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Do ``work``; when the client goes meanwhile, what it uses is there until it is done."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise


async def _read_rest(request: web.Request, most_bytes: int) -> None:
    try:
        async with asyncio.timeout(_REST_OF_UPLOAD_S):
            async for chunk in request.content.iter_any():
                most_bytes -= len(chunk)
                if most_bytes < 0:
                    return
    except (TimeoutError, ConnectionError, web.HTTPException, web.RequestPayloadError, ValueError):
        return


@web.middleware
async def _errors_told(request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
    """Ends every request that fails with the status and the JSON that SnoozeML's clients expect."""
    try:
        return await handler(request)
    except NereidError as error:
        return _failed(error)
    except grpc.aio.AioRpcError as error:
        return _failed(in_snooze_words(error, request.match_info.get("model", "")))
    except web.HTTPException as error:  # aiohttp's own: no such path, another verb
        return _refused(error.status, error.reason, {k: v for k, v in error.headers.items() if k == "Allow"})
    except web.RequestPayloadError:
        return _refused(400, NO_BODY)
    except (ConnectionError, asyncio.IncompleteReadError):
        raise  # the client has gone
    except Exception:  # noqa: BLE001 - the edge of this process towards its clients
        _LOG.exception("a request failed in a way nobody planned for")
        return _refused(_INTERNAL, "internal error; the server's log has the details")


def _failed(error: NereidError) -> web.Response:
    if isinstance(error, OverLimit):
        return _refused(_TOO_LARGE, str(error))
    headers = None
    if isinstance(error, ResourceExhausted):
        headers = {"Retry-After": str(error.retry_after_s or RETRY_AFTER_S)}
    return _refused(_STATUSES.get(error.code, _INTERNAL), str(error), headers)


def _refused(status: int, text: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        status=status, text=json.dumps({"error": text}), content_type="application/json", headers=headers
    )
