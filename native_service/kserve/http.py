"""KServe v2 over HTTP behind ``server.http_infer_addr``: every request becomes the call of the gRPC service it means.

So permits, checks, words and counts are the same on both, and what a caller may do is decided by one name: the method
that :data:`ROUTES` gives for a path. Envoy stands in front and passes whatever comes to a socket in the run directory.
HTTP tells no deadline: whoever stops waiting closes the connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc
from aiohttp import web
from tritonclient.grpc import service_pb2 as pb

from native_service.edge.grpc import Told, told
from native_service.edge.http_endpoints import is_not_about_bad_bytes, listen
from native_service.kserve.body_codings import Decoder, accepted_coding, encode
from native_service.kserve.grpc import KServeService
from native_service.kserve.json import parse_object, read_infer, set_field, set_parameters, to_json, write_infer
from native_service.nereid.checkpoint import Budget
from native_service.settings import Limits
from native_service.telemetry.calls import sent_id
from native_service.telemetry.failures import ASSISTED, Failure, tell
from native_service.triton.errors import status_of
from nereid_backend.errors import InvalidArgument, NereidError, OverLimit, short_repr

_LOG = logging.getLogger("nereid.http-infer")
_LOG.addFilter(is_not_about_bad_bytes)

HEADER_LENGTH = "Inference-Header-Content-Length"
_MODEL, _REPOSITORY = "/v2/models/{model}", "/v2/repository"
_VERSIONED = (_MODEL, _MODEL + "/versions/{version}")
_STATUSES = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "CANCELLED": 499,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_FULL, _TOO_LARGE, _INTERNAL = 429, 413, 500
NO_BODY = "the body is not HTTP's; send Content-Length, or well-formed chunks"
# Bodies from this size on are worked on beside the event loop.
_LARGE_BYTES = 64 * 1024


def _routes() -> dict[tuple[str, str], str]:
    reads = {
        "/v2": "ServerMetadata",
        "/v2/health/live": "ServerLive",
        "/v2/health/ready": "ServerReady",
        "/v2/models/stats": "ModelStatistics",
        "/v2/logging": "LogSettings",
        "/v2/trace/setting": "TraceSetting",
        _MODEL + "/trace/setting": "TraceSetting",
    }
    writes = {
        f"{_REPOSITORY}/index": "RepositoryIndex",
        f"{_REPOSITORY}/models/{{model}}/load": "RepositoryModelLoad",
        f"{_REPOSITORY}/models/{{model}}/unload": "RepositoryModelUnload",
        "/v2/logging": "LogSettings",
        "/v2/trace/setting": "TraceSetting",
        _MODEL + "/trace/setting": "TraceSetting",
    }
    for path in _VERSIONED:
        reads |= {
            path: "ModelMetadata",
            path + "/config": "ModelConfig",
            path + "/ready": "ModelReady",
            path + "/stats": "ModelStatistics",
        }
        writes[path + "/infer"] = "ModelInfer"
    for kind in ("System", "Cuda"):
        path = f"/v2/{kind.lower()}sharedmemory"
        region = path + "/region/{region}"
        reads |= dict.fromkeys((path + "/status", region + "/status"), f"{kind}SharedMemoryStatus")
        writes |= dict.fromkeys((path + "/unregister", region + "/unregister"), f"{kind}SharedMemoryUnregister")
        writes[region + "/register"] = f"{kind}SharedMemoryRegister"
    return {("GET", path): name for path, name in reads.items()} | {
        ("POST", path): name for path, name in writes.items()
    }


ROUTES = _routes()
"""The method of ``inference.GRPCInferenceService`` behind each verb and path."""


class HttpContext:
    """What calls ask of gRPC's context."""

    def __init__(self, request: web.Request) -> None:
        self._request = request

    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [(name.lower(), value) for name, value in self._request.headers.items()]


class HttpInference:
    """The HTTP server. ``start`` once, ``stop`` at the end."""

    def __init__(self, service: KServeService, limits: Limits, budget: Budget) -> None:
        """``budget`` bounds what all requests together hold, those of Checkpoint included."""
        self._service, self._limits, self._budget = service, limits, budget
        self._runner: web.AppRunner | None = None

    def set_limits(self, limits: Limits) -> None:
        """What calls that begin from now on may send."""
        self._limits = limits

    async def start(self, socket: str) -> None:
        """Listen on the Unix socket ``socket``."""
        application = web.Application(middlewares=[_errors_told])
        for (verb, path), method in ROUTES.items():
            answer = self._infer if method == "ModelInfer" else self._simple(method)
            application.router.add_route(verb, path, answer)
        self._runner = await listen(application, socket, _LOG, ends_calls=True, last_answers_s=0)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def _simple(self, method: str) -> Callable[[web.Request], Awaitable[web.Response]]:
        """The handler of a call whose messages are small."""
        request_type = getattr(pb, f"{method}Request")

        async def answer(request: web.Request) -> web.Response:
            with _failure_told(method, request):
                body = bytearray()
                async for chunk in request.content.iter_any():
                    body += chunk
                    self._check_json(len(body))
                message = request_type()
                _fill(message, request.match_info, parse_object(bytes(body)))
            return _shown(method, await self._service.call(method, message, HttpContext(request)))

        return answer

    async def _infer(self, request: web.Request) -> web.Response:
        model, version = request.match_info["model"], request.match_info.get("version", "")
        held = Held(self._budget)
        try:
            with _failure_told(ASSISTED, request), self._service.refused(model):
                body = memoryview(await self._body(request, held))
                text, tensors = _cut(body, request.headers.get(HEADER_LENGTH))
                self._check_json(len(text))
                asked = await beside(len(body), read_infer, model, version, text, tensors)
            del body, text, tensors
            response = await self._service.call("ModelInfer", asked.message, HttpContext(request))
            size, most = response.ByteSize(), self._limits.max_message_bytes
            with _failure_told(ASSISTED, request):
                held.take(sum(map(len, response.raw_output_contents)))
                text, tensors = await beside(size, write_infer, response, asked, most)
            coding = accepted_coding(request.headers.get("Accept-Encoding", ""))
            headers = {"Content-Type": "application/json"}
            if tensors:
                headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(text))}
            body = text + tensors
            if coding:
                headers["Content-Encoding"] = coding
                body = await beside(size, encode, coding, body)
            answer = web.Response(body=body, headers=headers)
            # Here and not by aiohttp, so that what a slow client has not read counts.
            await answer.prepare(request)
            await answer.write_eof()
            return answer
        finally:
            held.give_back()

    async def _body(self, request: web.Request, held: Held) -> bytearray:
        limit = self._limits.max_request_bytes
        decoder = Decoder(request.headers.get("Content-Encoding", ""))
        body = bytearray()
        if (request.content_length or 0) > limit:
            raise _over(limit)
        async for chunk in self._service.half_sent.messages(aiter(request.content.iter_any()), lambda: held.count):
            for part in decoder.parts(chunk):
                if len(body) + len(part) > limit:
                    raise _over(limit)
                held.take(len(part))
                body += part
                if part is not chunk:
                    await asyncio.sleep(0)  # a little input may become much: others have their turn
        decoder.finish()
        return body

    def _check_json(self, size: int) -> None:
        # Parsing it stops everything else for as long as it takes.
        limit = self._limits.max_message_bytes
        if size > limit:
            raise OverLimit(
                f"the JSON of a request is over the limit of this server, {limit} bytes"
                " (server.limits.max_message_bytes); send tensors as binary data"
            )


@contextmanager
def _failure_told(surface: str, request: web.Request) -> Iterator[None]:
    """Writes the line of a call that fails inside, which is before or after our service has it."""
    begun = time.monotonic()
    try:
        yield
    except NereidError as error:
        model, request_id = request.match_info.get("model", ""), sent_id(HttpContext(request))
        tell(Failure(model, surface, *status_of(error), request_id, time.monotonic() - begun))
        raise


class Held:
    """What one request has taken of the budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget, self.count = budget, 0

    def take(self, count: int) -> None:
        self._budget.take(count)
        self.count += count

    def give_back(self) -> None:
        self._budget.give_back(self.count)


def _over(limit: int) -> OverLimit:
    text = f"{limit} bytes (server.limits.max_request_bytes)"
    return OverLimit(f"the request is over the limit of this server, {text}; send less at once")


def _cut(body: memoryview, header: str | None) -> tuple[memoryview, memoryview]:
    """JSON and tensors of a body. Raises InvalidArgument."""
    if header is None:
        return body, body[:0]
    if not (header.isascii() and header.isdigit() and len(header) < 20 and int(header) <= len(body)):
        raise InvalidArgument(f"{HEADER_LENGTH} is {short_repr(header)}, the body has {len(body)} bytes")
    return body[: int(header)], body[int(header) :]


async def beside(size: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """The result of ``work``, off the event loop when it is about many bytes."""
    return await asyncio.to_thread(work, *arguments) if size > _LARGE_BYTES else work(*arguments)


def _fill(message: Any, path: Mapping[str, str], body: dict[str, Any]) -> None:
    """The request ``message`` from what the path names and what the JSON says. Raises InvalidArgument."""
    known = message.DESCRIPTOR.fields_by_name
    named = {"model": "model_name" if "model_name" in known else "name", "version": "version", "region": "name"}
    for part, text in path.items():
        if named[part] in known:
            set_field(message, {named[part]: text}, named[part])
    for name in ("ready", "key", "offset", "byte_size"):
        if name in known:
            set_field(message, body, name)
    if "parameters" in known:
        set_parameters(message, body)


def _shown(method: str, answer: Any) -> web.Response:
    """An answer as Triton gives it over HTTP."""
    if method in ("ServerLive", "ServerReady", "ModelReady"):
        well = answer.live if method == "ServerLive" else answer.ready
        return web.Response(status=200 if well else 400)
    if method.startswith("Repository") and method != "RepositoryIndex":
        return web.Response()
    if "Shared" in method and not method.endswith("Status"):
        return web.Response()
    shown: Any = to_json(answer)
    if method == "RepositoryIndex":
        shown = [{name: text for name, text in model.items() if text} for model in shown["models"]]
    elif method == "ModelConfig":
        shown = shown.get("config", {})
    elif method.endswith("MemoryStatus"):
        shown = [*shown["regions"].values()]
    return web.json_response(shown)


@web.middleware
async def _errors_told(request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
    """Ends every request that fails with Triton's JSON for errors."""
    try:
        return await handler(request)
    except (NereidError, grpc.aio.AioRpcError) as error:
        return _failed(told(error))
    except web.HTTPException as error:  # aiohttp's own: no such path, another verb
        return _refused(error.status, error.reason, {k: v for k, v in error.headers.items() if k == "Allow"})
    except web.RequestPayloadError:
        return _refused(400, NO_BODY)
    except (ConnectionError, asyncio.IncompleteReadError):
        raise  # the client has gone
    except Exception:  # noqa: BLE001 - the edge of this process towards its clients
        _LOG.exception("a request failed in a way nobody planned for")
        return _refused(_INTERNAL, "internal error; the server's log has the details")


def _failed(error: Told) -> web.Response:
    if error.code == "RESOURCE_EXHAUSTED":
        if error.retry_after is None:
            return _refused(_TOO_LARGE, error.text)
        return _refused(_FULL, error.text, {"Retry-After": error.retry_after})
    return _refused(_STATUSES.get(error.code, _INTERNAL), error.text)


def _refused(status: int, text: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        status=status, text=json.dumps({"error": text}), content_type="application/json", headers=headers
    )
