"""The gRPC server beside Triton: ``inference.Nereid`` and ``grpc.health.v1``."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2

from native_service.checkpoint import Budget, CheckpointInput, CheckpointReader, output_chunks
from native_service.permits import Permits
from native_service.proto import inference_pb2
from native_service.settings import Address, Limits
from nereid_backend.errors import DeadlineExceeded, EngineError, NereidError, SettingsError
from nereid_backend.spec import ModelSpec

_LOG = logging.getLogger("nereid.service")

SERVICE = "inference.Nereid"
# Triton 2.51 answers INTERNAL with these words for ever once a model's process is gone.
_STUB_IS_DEAD = "is not healthy"
# Triton 2.51 can crash on a deadline that passes while the request is being set up.
_SHORTEST_DEADLINE_S = 0.010


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model and how many calls it takes at once."""

    spec: ModelSpec
    permits: Permits


class NereidService:
    """The three calls of ``inference.Nereid`` for the models of one Triton."""

    def __init__(self, models: Sequence[ServedModel], channel: Any, limits: Limits) -> None:
        """``channel`` is a grpc.aio channel to Triton; the order of ``models`` is the order of ViewModels."""
        self._permits = {model.spec.name: model.permits for model in models}
        self._specs: Mapping[str, ModelSpec] = {model.spec.name: model.spec for model in models}
        self._limits = limits
        self._budget = Budget(limits.max_buffered_bytes)
        self._infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )

    @property
    def handler(self) -> Any:
        """The generic handler for ``grpc.aio.Server.add_generic_rpc_handlers``."""
        pb = inference_pb2
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "HealthCheck": grpc.unary_unary_rpc_method_handler(
                    self.health_check, pb.HealthCheckRequest.FromString, pb.HealthCheckResponse.SerializeToString
                ),
                "ViewModels": grpc.unary_unary_rpc_method_handler(
                    self.view_models, pb.ViewModelsRequest.FromString, pb.ViewModelsResponse.SerializeToString
                ),
                "Checkpoint": grpc.stream_stream_rpc_method_handler(
                    self.checkpoint, pb.CheckpointRequest.FromString, pb.CheckpointResponse.SerializeToString
                ),
            },
        )

    async def health_check(self, _request: inference_pb2.HealthCheckRequest, _context: Any) -> Any:
        return inference_pb2.HealthCheckResponse(status="ok")

    async def view_models(self, _request: inference_pb2.ViewModelsRequest, _context: Any) -> Any:
        return inference_pb2.ViewModelsResponse(model_names=self._specs)

    async def checkpoint(self, requests: AsyncIterator[inference_pb2.CheckpointRequest], context: Any) -> None:
        """One tensor in, all outputs back; nothing runs before the client has closed its side."""
        try:
            response, spec = await self._answer(requests, context)
            await self._stream(response, spec, context)
        except NereidError as error:
            await context.abort(grpc.StatusCode[error.code], str(error))
        except grpc.aio.AioRpcError as error:
            # Triton's own code and words: the runtime inside has made them fit for a client.
            details = error.details() or "Triton gave no reason"
            if _STUB_IS_DEAD in details:
                _LOG.error("%s; its process has died, restart the server", details)
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the model's process has died; try later")
            await context.abort(error.code(), details)
        except Exception:  # noqa: BLE001 - the edge of this process towards its clients
            _LOG.exception("a Checkpoint call failed in a way nobody planned for")
            await context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")

    async def _answer(self, requests: AsyncIterator[Any], context: Any) -> tuple[Any, ModelSpec]:
        reader = CheckpointReader(self._specs, self._limits, self._budget)
        try:
            async for message in requests:
                reader.receive(message)
                if not reader.needs_input:
                    break
            request = reader.finish()
            # Only now: a client that uploads slowly must not keep others from running.
            with self._permits[request.model.name].hold():
                return await self._infer(_infer_request(request), timeout=_time_left(context)), request.model
        finally:
            reader.close()

    async def _stream(self, response: Any, spec: ModelSpec, context: Any) -> None:
        """The log line, every output in the order of the specification, the end."""
        if len(response.outputs) != len(response.raw_output_contents):
            raise EngineError(f"model {spec.name!r} answered with outputs that carry no bytes")
        outputs = {
            tensor.name: (tensor.shape, data)
            for tensor, data in zip(response.outputs, response.raw_output_contents, strict=True)
        }
        missing = [tensor.name for tensor in spec.outputs if tensor.name not in outputs]
        if missing:
            raise EngineError(f"model {spec.name!r} answered without its outputs {missing}")
        text = f"inference completed for model '{spec.name}'"
        await context.write(inference_pb2.CheckpointResponse(chunk=text))
        for tensor in spec.outputs:
            shape, data = outputs[tensor.name]
            for chunk in output_chunks(tensor.name, shape, data):
                await context.write(inference_pb2.CheckpointResponse(output_chunk=chunk))
        await context.write(inference_pb2.CheckpointResponse(done=True, exit_code=0))


def _infer_request(request: CheckpointInput) -> Any:
    message = service_pb2.ModelInferRequest(model_name=request.model.name)
    if request.tensor is not None:
        tensor = message.inputs.add(name=request.tensor.name, datatype=request.tensor.element.kserve)
        tensor.shape.extend(request.shape)
        message.raw_input_contents.append(bytes(request.data))
    return message


def _time_left(context: Any) -> float | None:
    """Seconds the client still waits, None when it waits for ever."""
    left: float | None = context.time_remaining()
    if left is not None and left < _SHORTEST_DEADLINE_S:
        raise DeadlineExceeded("the deadline leaves no time to run the model")
    return left


class NativeServer:
    """The listening server. ``start`` once, ``set_serving`` as Triton comes and goes, ``stop`` at the end."""

    def __init__(self, service: NereidService, names: Sequence[str], bind: Address, limits: Limits) -> None:
        self._bind = bind
        self._names = ("", SERVICE, *names)
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", limits.max_message_bytes),
                ("grpc.max_send_message_length", -1),
                # Without this a second server on the same port would silently take half of the calls.
                ("grpc.so_reuseport", 0),
            )
        )
        self._server.add_generic_rpc_handlers((service.handler,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    async def start(self) -> Address:
        """Listen; the address with its real port. Raises SettingsError when the port cannot be had."""
        try:
            port = self._server.add_insecure_port(str(self._bind))
        except RuntimeError:
            port = 0
        if port == 0:
            raise SettingsError(f"server.bind_addr {self._bind} cannot be bound: is another program listening there?")
        await self._server.start()
        return self._bind._replace(port=port)

    async def set_serving(self, serving: bool) -> None:
        """What grpc.health.v1 says for the server, the service and every model."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones finish within ``grace_s``, cut the rest."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
