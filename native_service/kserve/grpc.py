"""The part of KServe v2 (``inference.GRPCInferenceService``) that Triton cannot answer as clients expect.

Envoy sends complete ModelInfer calls, and metadata, configuration and readiness of served models, straight to Triton.
Here is the rest: a batch dimension left out, streams with a permit per request, unknown names and versions, lists that
show only what is served.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import grpc
from tritonclient.grpc import service_pb2 as pb

from native_service.edge.grpc import Inference, answer_in_kind, errors_told, parsed, shown, triton_call, unary
from native_service.edge.half_sent import HalfSent
from native_service.envoy.scripts import KSERVE, MOST_ELEMENTS, MOST_SIZE, MOST_TEXT_BYTES, REGION
from native_service.kserve.descriptions import VERSION, configuration, metadata
from native_service.kserve.shared_memory import SharedMemory, uses_region
from native_service.models.residence import LOADING
from native_service.nereid.script_calls import ScriptCalls
from native_service.telemetry.calls import Call, short_id
from native_service.telemetry.exposition import own_version
from native_service.telemetry.failures import ASSISTED, STREAM
from native_service.triton.errors import status_of
from nereid_backend.dtypes import BYTES
from nereid_backend.errors import InvalidArgument, NereidError, NotFound, NotOffered, short_repr
from nereid_backend.spec import ModelSpec

Method = Callable[[Any, Any], Awaitable[Any]]
"""What answers a request, given gRPC's context of it or what has its ``time_remaining`` and ``invocation_metadata``."""

_VERSIONS = ("", VERSION)
# Switched off in Triton: they change or reveal more than a caller of a model should.
_OFF = ("TraceSetting", "LogSettings", *(f"CudaSharedMemory{verb}" for verb in ("Status", "Register", "Unregister")))
_OFF_EXTENSIONS = ("cuda_shared_memory", "trace", "logging")
_MEMORY = tuple(f"SystemSharedMemory{verb}" for verb in ("Status", "Register", "Unregister"))
_MEMORY_EXTENSION = "system_shared_memory"
_MEMORY_IS_OFF = "shared memory is switched off on this server (server.allow_shared_memory)"
# Texts of so many bytes are looked at beside the event loop.
_LARGE_BYTES = 64 * 1024
_CONTROL = ("RepositoryModelLoad", "RepositoryModelUnload")
_CONTROL_EXTENSION = "model_repository"
# Stock clients always send it; nothing here depends on another public model.
_DEPENDENTS = "unload_dependents"
_HINT = "RepositoryIndex lists what is served"


class ModelControl(Protocol):
    """Loads and unloads what the settings allow. Both raise NereidError, and then nothing has changed."""

    async def load(self, name: str) -> None: ...

    async def unload(self, name: str) -> None: ...


class KServeService:
    """KServe v2 for the models of one Triton."""

    def __init__(
        self,
        models: Sequence[ModelSpec],
        inference: Inference,
        triton: Any,
        is_ready: Callable[[], Awaitable[bool]],
        control: ModelControl | None = None,
        scripts: ScriptCalls | None = None,
        memory: SharedMemory | None = None,
        name: str = "nereid",
        repository: Path | None = None,
    ) -> None:
        """``triton`` is a grpc.aio channel to Triton itself, for questions that take no permit.

        ``control`` None: callers may not load or unload; ``memory`` None: nor register shared memory. ``name`` is what
        the server calls itself. ``repository`` is Triton's, None where no model is ever idle.
        """
        self._repository = repository
        self.set_models(models)
        self._inference = inference
        self._triton = triton
        self._scripts = scripts
        self._is_ready = is_ready
        self._control = control
        self._memory = memory
        self._name = name
        self._methods: dict[str, Method] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._asked_of_triton("ModelMetadata"),
            "ModelConfig": self._asked_of_triton("ModelConfig"),
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
            **self._control_calls(),
            **self._memory_calls(),
            **dict.fromkeys(_OFF, _switched_off),
        }

    @property
    def half_sent(self) -> HalfSent:
        """What bounds requests that are still coming in."""
        return self._inference.half_sent

    def set_models(self, models: Sequence[ModelSpec]) -> None:
        """What is served from now on."""
        self._specs = {spec.name: spec for spec in models}

    @property
    def handler(self) -> Any:
        """The generic handler for ``grpc.aio.Server.add_generic_rpc_handlers``."""
        methods: dict[str, Any] = {
            name: unary(
                self._inference.calls, name, call, getattr(pb, f"{name}Request"), getattr(pb, f"{name}Response")
            )
            for name, call in self._methods.items()
        }
        methods["ModelInfer"] = grpc.unary_unary_rpc_method_handler(
            self._unary_infer, response_serializer=pb.ModelInferResponse.SerializeToString
        )
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._model_stream_infer, response_serializer=pb.ModelStreamInferResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler(KSERVE, methods)

    async def call(self, method: str, request: Any, context: Any) -> Any:
        """The answer of the unary ``method`` to its ``request``; of ``context`` its deadline and its metadata matter.

        Raises NereidError and grpc.aio.AioRpcError.
        """
        if method == "ModelInfer":
            with self._inference.calls.watched(ASSISTED, context) as call:
                return await self._told(call, request, context)
        with self._inference.calls.watched(method, context) as call:
            call.model = getattr(request, "model_name", "") or getattr(request, "name", "")
            return await self._methods[method](request, context)

    @contextmanager
    def refused(self, model: str) -> Iterator[None]:
        """Counts a call for ``model`` that is refused inside, before it is one."""
        try:
            yield
        except (NereidError, asyncio.CancelledError) as error:
            if model in self._specs:
                self._inference.refusals.add(model, error)
            raise

    async def _server_live(self, _request: Any, _context: Any) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def _server_ready(self, _request: Any, _context: Any) -> Any:
        return pb.ServerReadyResponse(ready=await self._is_ready())

    async def _server_metadata(self, request: Any, _context: Any) -> Any:
        theirs = await self._ask("ServerMetadata", request)
        off = {*_OFF_EXTENSIONS}
        off |= set() if self._control else {_CONTROL_EXTENSION}
        off |= set() if self._memory else {_MEMORY_EXTENSION}
        extensions = [name for name in theirs.extensions if name.partition("(")[0] not in off]
        return pb.ServerMetadataResponse(name=self._name, version=own_version(), extensions=extensions)

    async def _model_ready(self, request: Any, _context: Any) -> Any:
        inference = self._inference
        there = (
            request.name in self._specs and request.name not in inference.away and request.name not in inference.idle
        )
        if not there or request.version not in _VERSIONS:
            return pb.ModelReadyResponse(ready=False)
        return await self._ask("ModelReady", request)

    def _asked_of_triton(self, method: str) -> Method:
        async def ask(request: Any, _context: Any) -> Any:
            spec = self._served(request.name, request.version)
            if spec.name not in self._inference.idle:
                try:
                    return await self._ask(method, request)
                except grpc.aio.AioRpcError:
                    if spec.name not in self._inference.idle:  # it has not gone meanwhile
                        raise
            if method == "ModelConfig" and self._repository is not None:
                return configuration(self._repository / spec.name)
            return metadata(spec)

        return ask

    async def _model_statistics(self, request: Any, _context: Any) -> Any:
        names = [self._served(request.name, request.version).name] if request.name else list(self._specs)
        answer = pb.ModelStatisticsResponse()
        for name in names:
            if name in self._inference.idle:
                answer.model_stats.add(name=name, version=VERSION)
                continue
            found = await self._ask("ModelStatistics", pb.ModelStatisticsRequest(name=name, version=request.version))
            answer.model_stats.extend(found.model_stats)
        return answer

    async def _repository_index(self, request: Any, _context: Any) -> Any:
        _check_repository(request.repository_name)
        answer = pb.RepositoryIndexResponse()
        for name in self._specs:
            ready = (await self._model_ready(pb.ModelReadyRequest(name=name), None)).ready
            if ready or not request.ready:
                state, reason = ("READY", "") if ready else self._why_not_ready(name)
                answer.models.add(name=name, version=VERSION, state=state, reason=reason)
        return answer

    def _why_not_ready(self, name: str) -> tuple[str, str]:
        """The state of the index, and in a word what it means."""
        if name not in self._inference.idle or self._inference.residency is None:
            return "UNAVAILABLE", ""
        state = self._inference.residency.state(name)
        return ("LOADING", "") if state == LOADING else ("UNAVAILABLE", state)

    def _control_calls(self) -> dict[str, Method]:
        load, unload = _CONTROL
        if self._control is None:
            return dict.fromkeys(_CONTROL, _control_is_off)
        return {
            load: _controlling(self._control.load, pb.RepositoryModelLoadResponse),
            unload: _controlling(self._control.unload, pb.RepositoryModelUnloadResponse),
        }

    def _memory_calls(self) -> dict[str, Method]:
        if self._memory is None:
            return dict.fromkeys(_MEMORY, _memory_is_off)
        return dict(zip(_MEMORY, (self._memory.status, self._memory.register, self._memory.unregister), strict=True))

    async def _unary_infer(self, data: bytes, context: Any) -> Any:
        async with errors_told(context):
            await answer_in_kind(context)
            with self._inference.calls.watched(ASSISTED, context) as call:
                return await self._told(call, parsed(pb.ModelInferRequest, data), context)
        raise AssertionError("errors_told ends the call")

    async def _told(self, call: Call, request: Any, context: Any) -> Any:
        """The answer, after ``call`` has learned what it is about. What runs the model gets its id to log it by."""
        call.model = request.model_name
        if request.id:
            call.request_id = short_id(request.id)
            return await self._model_infer(request, context)
        request.id = call.request_id
        answer = await self._model_infer(request, context)
        answer.id = ""  # as Triton answers a request without one
        return answer

    async def _model_infer(self, request: Any, context: Any) -> Any:
        spec = self._served(request.model_name, request.model_version)
        complete_batch(request, spec)
        try:
            check_texts(request)  # first: it bounds how many sizes a shape has
            check_shapes(request, spec)
            self._check_memory(request, spec)
            await check_bytes(request, spec)
        except NereidError as error:
            self._inference.refusals.add(spec.name, error)
            raise
        if spec.script is not None and self._scripts is not None:
            return await self._scripts.infer(request, spec, context)
        return await self._inference.run(request, context)

    def _check_memory(self, request: Any, spec: ModelSpec) -> None:
        if not uses_region(request):
            return
        if self._memory is None:
            raise NotOffered(_MEMORY_IS_OFF)
        if spec.script is not None:
            raise InvalidArgument(f"model {spec.name!r} is a script, which takes no shared memory; send its input")
        self._memory.check(request, spec)

    async def _model_stream_infer(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """One request after the other; a bad one, or one without a permit, costs only its own answer."""
        async with errors_told(context):
            await answer_in_kind(context)
            async for request in self._inference.half_sent.messages(requests):
                try:
                    with self._inference.calls.watched(STREAM, context) as call:
                        response = await self._told(call, parsed(pb.ModelInferRequest, request), context)
                except NereidError as error:
                    answer = pb.ModelStreamInferResponse(error_message=shown(error))
                except grpc.aio.AioRpcError as error:
                    _, text = status_of(error)
                    answer = pb.ModelStreamInferResponse(error_message=text)
                else:
                    answer = pb.ModelStreamInferResponse(infer_response=response)
                await context.write(answer)

    def _served(self, name: str, model_version: str) -> ModelSpec:
        if not name.strip():
            raise InvalidArgument("model_name is required")
        if model_version not in _VERSIONS:
            raise NotFound(f"model {name!r} has no version {model_version!r}; every model has the version {VERSION!r}")
        if name not in self._specs:
            raise NotFound(f"model {name!r} is not served here; {_HINT}")
        return self._specs[name]

    async def _ask(self, method: str, request: Any) -> Any:
        return await triton_call(self._triton, method, type(request))(request)


def complete_batch(request: Any, spec: ModelSpec) -> None:
    """Insert a leading 1 into the shape of each input of ``request`` whose batch dimension was left out."""
    if not spec.max_batch_size:
        return
    ranks = {tensor.name: len(spec.dims(tensor)) for tensor in spec.client_inputs}
    for tensor in request.inputs:
        if ranks.get(tensor.name) == len(tensor.shape):
            tensor.shape.insert(0, 1)


def _controlling(change: Callable[[str], Awaitable[None]], answer: Callable[[], Any]) -> Callable[[Any, Any], Any]:
    async def call(request: Any, _context: Any) -> Any:
        _check_repository(request.repository_name)
        if refused := sorted(set(request.parameters) - {_DEPENDENTS}):
            # They replace a model's configuration or files: code of the caller's.
            raise InvalidArgument(f"parameters {refused} are not taken; the model is loaded as the server has it")
        await change(request.model_name)
        return answer()

    return call


def _check_repository(name: str) -> None:
    if name:
        raise NotFound(f"no repository {name!r}; leave the name empty")


async def _control_is_off(_request: Any, _context: Any) -> Any:
    raise NotOffered("model control is switched off on this server (server.allow_model_control)")


async def _memory_is_off(_request: Any, _context: Any) -> Any:
    raise NotOffered(_MEMORY_IS_OFF)


def check_shapes(request: Any, spec: ModelSpec) -> None:
    """Raise InvalidArgument for shapes that Triton 2.51 takes and comes to harm by.

    2**62 elements wrap round to no bytes at all and the model's process reads beyond its input; 2**32 + 1 rows count
    as one; a request of no rows fails the whole batch it gets into.
    """
    for tensor in request.inputs:
        where = f"model {spec.name!r} input {short_repr(tensor.name)}"
        if any(size < 0 for size in tensor.shape):
            raise InvalidArgument(f"{where} has a negative size in its shape {short_repr([*tensor.shape])}")
        if spec.max_batch_size and tensor.shape and tensor.shape[0] == 0:
            raise InvalidArgument(f"{where} has no rows; send at least one")
        sizes = [size for size in tensor.shape if size]
        if max(sizes, default=0) > MOST_SIZE or math.prod(sizes) > MOST_ELEMENTS:
            raise InvalidArgument(f"{where} is larger than any tensor can be, shape {short_repr([*tensor.shape])}")


def check_texts(request: Any) -> None:
    """Raise InvalidArgument for names, ids and parameters that would break the connection when Triton repeats them."""
    tensors = sum(map(len, request.raw_input_contents)) + sum(t.contents.ByteSize() for t in request.inputs)
    if request.ByteSize() - tensors > MOST_TEXT_BYTES:
        raise InvalidArgument(
            f"the request has {request.ByteSize() - tensors} bytes of names, shapes, ids and parameters; at most "
            f"{MOST_TEXT_BYTES} are taken"
        )


async def check_bytes(request: Any, spec: ModelSpec) -> None:
    """Raise InvalidArgument for texts whose lengths lead past the end: Triton 2.51 fails the whole batch for one."""
    contents = iter(request.raw_input_contents)
    for tensor in request.inputs:
        if REGION in tensor.parameters:
            continue
        data = next(contents, b"")
        if tensor.datatype == BYTES.kserve and data:
            whole = await asyncio.to_thread(is_whole, data) if len(data) > _LARGE_BYTES else is_whole(data)
            if not whole:
                where = f"model {spec.name!r} input {short_repr(tensor.name)}"
                raise InvalidArgument(f"{where} is no BYTES tensor: a length leads past its end")


def is_whole(data: bytes) -> bool:
    """Whether texts, each behind its length in 4 bytes, fill ``data``."""
    at, end = 0, len(data)
    while at + 4 <= end:
        at += 4 + int.from_bytes(data[at : at + 4], "little")
    return at == end


async def _switched_off(_request: Any, _context: Any) -> Any:
    raise NotOffered("this call is switched off on this server")
