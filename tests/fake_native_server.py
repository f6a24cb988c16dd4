"""A server of the native service that answers, refuses and breaks as it is told; no model behind it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent import futures
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from native_service.proto import inference_pb2 as pb

Behaviour = Callable[[list[pb.CheckpointRequest], Any], Iterator[pb.CheckpointResponse]]
WAIT_S = 60
INDEX = [service_pb2.RepositoryIndexResponse.ModelIndex(name=name) for name in ("m", "other")]


class Faked:
    """A server of one model, ``m``: FP32 ``x`` [-1, 16] to FP32 ``y``. Each call takes the next of ``behaviours``."""

    def __init__(self, only: Collection[str] = ()) -> None:
        """``only``: the KServe calls that it knows; all when empty."""
        self.behaviours: list[Behaviour] = []
        self.metadata: list[dict[str, str]] = []
        self.messages: list[list[pb.CheckpointRequest]] = []
        self.over = threading.Event()
        self.infer: Callable[[Any, Any], None] = lambda request, context: None
        """What a ModelInfer does before it is answered; it may abort."""
        self.requests: deque[Any] = deque(maxlen=1000)
        self.statistics = service_pb2.ModelStatisticsResponse()
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        native = {
            "Checkpoint": grpc.stream_stream_rpc_method_handler(
                self._checkpoint, pb.CheckpointRequest.FromString, pb.CheckpointResponse.SerializeToString
            ),
            "ViewModels": grpc.unary_unary_rpc_method_handler(
                lambda request, context: pb.ViewModelsResponse(model_names=["m", "other"]),
                pb.ViewModelsRequest.FromString,
                pb.ViewModelsResponse.SerializeToString,
            ),
        }
        answers = {
            "ModelMetadata": self._describe,
            "ModelConfig": self._configure,
            "ModelInfer": self._infer,
            "ModelStatistics": self._count,
            "RepositoryIndex": lambda request, context: service_pb2.RepositoryIndexResponse(models=INDEX),
            "ServerMetadata": lambda request, context: service_pb2.ServerMetadataResponse(name="fake", version="1"),
        }
        kserve = {
            name: grpc.unary_unary_rpc_method_handler(
                answer,
                getattr(service_pb2, f"{name}Request").FromString,
                getattr(service_pb2, f"{name}Response").SerializeToString,
            )
            for name, answer in answers.items()
            if not only or name in only
        }
        for service, calls in (("inference.Nereid", native), ("inference.GRPCInferenceService", kserve)):
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, calls),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self.over.set()
        self._server.stop(0).wait()

    def _describe(self, request: Any, context: Any) -> Any:
        if request.name != "m":
            context.abort(grpc.StatusCode.NOT_FOUND, "no such model")
        description = service_pb2.ModelMetadataResponse(name="m")
        description.inputs.add(name="x", datatype="FP32", shape=[-1, 16])
        description.outputs.add(name="y", datatype="FP32", shape=[-1, 16])
        return description

    def _configure(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelConfigResponse(config={"name": "m", "max_batch_size": 8})

    def _infer(self, request: Any, context: Any) -> Any:
        self.metadata.append(dict(context.invocation_metadata()))
        self.requests.append(request)
        self.infer(request, context)
        answer = service_pb2.ModelInferResponse(model_name="m", raw_output_contents=request.raw_input_contents)
        answer.outputs.add(name="y", datatype="FP32", shape=request.inputs[0].shape)
        return answer

    def _count(self, request: Any, context: Any) -> Any:
        return self.statistics

    def _checkpoint(self, requests: Iterator[pb.CheckpointRequest], context: Any) -> Iterator[pb.CheckpointResponse]:
        self.metadata.append(dict(context.invocation_metadata()))
        self.messages.append(list(requests))
        yield from self.behaviours.pop(0)(self.messages[-1], context)

    def forever(self, _messages: Any, context: Any) -> Iterator[pb.CheckpointResponse]:
        context.add_callback(self.over.set)
        yield pb.CheckpointResponse(chunk="begun")
        self.over.wait(WAIT_S)


def refuse(code: grpc.StatusCode, text: str = "no", **metadata: str) -> Behaviour:
    def behave(_messages: Any, context: Any) -> Iterator[pb.CheckpointResponse]:
        context.set_trailing_metadata(tuple((key.replace("_", "-"), value) for key, value in metadata.items()))
        context.abort(code, text)
        yield pb.CheckpointResponse()

    return behave


FULL = refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after="0")


def echo(messages: list[pb.CheckpointRequest], _context: Any) -> Iterator[pb.CheckpointResponse]:
    yield pb.CheckpointResponse(chunk="inference completed")
    data = b"".join(message.chunk.data for message in messages[1:])
    for start in range(0, len(data), 50):
        chunk = pb.TensorChunk(tensor_name="y", shape=messages[1].chunk.shape, data=data[start : start + 50])
        yield pb.CheckpointResponse(output_chunk=chunk)
    yield pb.CheckpointResponse(done=True)


def answers(*responses: pb.CheckpointResponse) -> Behaviour:
    return lambda _messages, _context: iter(responses)
