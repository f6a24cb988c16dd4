"""The gRPC server beside Triton: ``inference.Nereid`` and ``grpc.health.v1``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import grpc

from native_service.edge.grpc import Inference, answer_in_kind, errors_told, parsed, unary
from native_service.edge.health import Health, Status
from native_service.edge.infer_messages import Tensor, read_outputs
from native_service.edge.regions import SHARED_FROM_BYTES, Region, Regions
from native_service.envoy.scripts import KSERVE, SNOOZE
from native_service.nereid.checkpoint import Budget, CheckpointReader, largest_output_bytes, output_messages, serialised
from native_service.nereid.script_calls import ScriptCalls
from native_service.proto import inference_pb2
from native_service.settings import Limits
from native_service.telemetry.calls import Call
from native_service.telemetry.failures import CHECKPOINT
from nereid_backend.errors import EngineError, NereidError, OverLimit
from nereid_backend.spec import ModelSpec

SERVICE = "inference.Nereid"

_CANCELLATION_LAG_S = 0.005


class NereidService:
    """The three calls of ``inference.Nereid`` for the models of one Triton."""

    def __init__(
        self,
        models: Sequence[ModelSpec],
        inference: Inference,
        limits: Limits,
        scripts: ScriptCalls | None = None,
        regions: Regions | None = None,
    ) -> None:
        """The order of ``models`` is the order of ViewModels; ``regions`` where large tensors go."""
        self._scripts = scripts
        self._regions = regions
        self.set_models(models)
        self._inference = inference
        self._limits = limits
        self.budget = Budget(limits.max_buffered_bytes)

    def set_limits(self, limits: Limits) -> None:
        """What calls that begin from now on may send, and what all of them may hold."""
        self._limits = limits
        self.budget.total_bytes = limits.max_buffered_bytes

    def set_models(self, models: Sequence[ModelSpec]) -> None:
        """What is served from now on."""
        self._specs: Mapping[str, ModelSpec] = {spec.name: spec for spec in models}

    @property
    def handler(self) -> Any:
        """The generic handler for ``grpc.aio.Server.add_generic_rpc_handlers``."""
        pb, calls = inference_pb2, self._inference.calls
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "HealthCheck": unary(
                    calls, "HealthCheck", self.health_check, pb.HealthCheckRequest, pb.HealthCheckResponse
                ),
                "ViewModels": unary(calls, "ViewModels", self.view_models, pb.ViewModelsRequest, pb.ViewModelsResponse),
                "Checkpoint": grpc.stream_stream_rpc_method_handler(self.checkpoint, response_serializer=serialised),
            },
        )

    async def health_check(self, _request: inference_pb2.HealthCheckRequest, _context: Any) -> Any:
        return inference_pb2.HealthCheckResponse(status="ok")

    async def view_models(self, _request: inference_pb2.ViewModelsRequest, _context: Any) -> Any:
        return inference_pb2.ViewModelsResponse(model_names=self._specs)

    async def checkpoint(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """The inputs in, all outputs back; nothing runs before the client has closed its side."""
        async with errors_told(context):
            await answer_in_kind(context)
            with self._inference.calls.watched(CHECKPOINT, context) as call:
                await self._answer(requests, context, call)

    async def _answer(self, requests: AsyncIterator[bytes], context: Any, call: Call) -> None:
        reader = CheckpointReader(self._specs, self._limits, self.budget, self._regions)
        try:
            model = await self._read(reader, requests)
            call.input_bytes = reader.held_bytes
            # Only now a permit is taken: a client that uploads slowly must not keep others from running.
            if model.script is not None and self._scripts is not None:
                data = reader.take_bytes()
                call.output_bytes = await self._scripts.checkpoint(model, *data, context, self.budget)
                return
            async with self._places(model, reader.rows) as places:
                call.output_bytes = await self._run(model, reader, places, context, call.request_id)
        finally:
            call.model = reader.model.name if reader.model is not None else ""
            reader.close()

    async def _run(
        self,
        model: ModelSpec,
        reader: CheckpointReader,
        places: Mapping[str, Region | None],
        context: Any,
        request_id: str,
    ) -> int:
        """Run ``model`` on what ``reader`` holds, its outputs to go to their ``places``, and answer the call.

        Gives the bytes of the outputs.
        """
        shared = [*reader.regions, *filter(None, places.values())]
        if self._regions is not None:
            await self._regions.share(shared)
        answer = await self._inference.run_serialised(model.name, reader.take_request(places, request_id), context)
        for region in shared:
            region.is_answered = True
        reader.close()
        # Also what a client is slow to read is held for it.
        self.budget.take(len(answer))
        try:
            return await self._stream(read_outputs(answer, places), model, context)
        finally:
            self.budget.give_back(len(answer))

    @asynccontextmanager
    async def _places(self, model: ModelSpec, rows: int) -> AsyncIterator[dict[str, Region | None]]:
        """A region for each large output of ``rows`` rows whose size is known, None for the others; empty for none."""
        sizes = {t.name: largest_output_bytes(model, t, rows) or 0 for t in model.client_outputs}
        regions, places = self._regions, dict[str, Region | None]()
        if regions is None or max(sizes.values(), default=0) < SHARED_FROM_BYTES:
            yield places
            return
        with ExitStack() as held:
            for name, size in sizes.items():
                places[name] = None
                if size >= SHARED_FROM_BYTES:
                    self.budget.take(size)
                    given_back = held.enter_context(ExitStack())
                    given_back.callback(self.budget.give_back, size)
                    region = places[name] = regions.create(size)
                    if region is None:
                        given_back.close()
                        continue
                    held.callback(regions.release, region, given_back.pop_all().close)
                    await region.allocate()
            yield places

    async def _read(self, reader: CheckpointReader, requests: AsyncIterator[bytes]) -> ModelSpec:
        try:
            async for message in self._inference.half_sent.messages(requests, lambda: reader.held_bytes):
                self._check_size(message)
                reader.receive(parsed(inference_pb2.CheckpointRequest, message))
                if not reader.needs_input:
                    break
            if not reader.has_ended:
                # To gRPC a client that went looks like one that closed its side, until the cancellation follows.
                await asyncio.sleep(_CANCELLATION_LAG_S)
            return reader.finish()
        except (NereidError, asyncio.CancelledError) as error:
            if reader.model is not None:
                self._inference.refusals.add(reader.model.name, error)
            raise

    def _check_size(self, message: bytes) -> None:
        # The server itself takes larger messages, for ModelInfer.
        if len(message) > self._limits.max_message_bytes:
            raise OverLimit(
                f"a Checkpoint message of {len(message)} bytes is over the limit of this server,"
                f" {self._limits.max_message_bytes} (server.limits.max_message_bytes); send smaller chunks"
            )

    async def _stream(self, answered: Sequence[Tensor], spec: ModelSpec, context: Any) -> int:
        """The log line, every output in the order of the specification, the end. Gives the bytes of the outputs."""
        outputs = {tensor.name: tensor for tensor in answered}
        missing = [tensor.name for tensor in spec.client_outputs if tensor.name not in outputs]
        if missing:
            raise EngineError(f"model {spec.name!r} answered without its outputs {missing}")
        text = f"inference completed for model '{spec.name}'"
        await context.write(inference_pb2.CheckpointResponse(chunk=text))
        for tensor in spec.client_outputs:
            for message in output_messages(outputs[tensor.name]):
                await context.write(message)
        await context.write(inference_pb2.CheckpointResponse(done=True, exit_code=0))
        return sum(outputs[tensor.name].size_bytes for tensor in spec.client_outputs)


class NativeServer:
    """Our gRPC server behind Envoy. ``start`` once, ``set_serving`` as Triton comes and goes, ``stop`` at the end."""

    def __init__(self, handlers: Sequence[Any], models: Sequence[str], max_message_bytes: int) -> None:
        self._models = tuple(models)
        self._away: Collection[str] = ()
        self._complete = True
        self._status: int = Status.NOT_SERVING
        self._health = Health()
        self._server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", -1),
                # Without this a second server on the same port would silently take half of the calls.
                ("grpc.so_reuseport", 0),
            )
        )
        self._server.add_generic_rpc_handlers(tuple(handlers))
        self._server.add_generic_rpc_handlers((self._health.handler,))

    async def start(self, target: str) -> int:
        """Listen on ``target`` (``unix:/path`` or ``127.0.0.1:0``); the port, 1 for a socket of the file system."""
        port: int = self._server.add_insecure_port(target)
        await self._server.start()
        return port

    def set_serving(self, serving: bool) -> None:
        """What grpc.health.v1 says for the server, the services and every model."""
        self._status = Status.SERVING if serving else Status.NOT_SERVING
        self._tell(("", SERVICE, KSERVE, SNOOZE, *self._models))

    def set_models(self, models: Sequence[str], away: Collection[str], *, complete: bool) -> None:
        """The models health is told for, ``away`` those that cannot answer at the moment.

        The server as a whole, health's empty name, serves while it is ``complete``. A model that went is
        SERVICE_UNKNOWN to those who watch it.
        """
        for name in set(self._models) - set(models):
            self._health.set(name, Status.SERVICE_UNKNOWN)
        self._models, self._away, self._complete = tuple(models), away, complete
        self._tell(("", *models))

    def _tell(self, names: Sequence[str]) -> None:
        for name in names:
            away = name in self._away if name else not self._complete
            self._health.set(name, Status.NOT_SERVING if away else self._status)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones finish within ``grace_s``, cut the rest."""
        self._health.end()
        await self._server.stop(grace_s)
