"""A server under load: how it is reached, and what it says of itself and of its models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from tritonclient.grpc import service_pb2

from native_service.bench.server_times import Counters
from native_service.client.errors import AnswerBroken, CallFailed, UnknownModel, from_grpc
from native_service.client.messages import Answer, Contract
from native_service.proto import inference_pb2

KSERVE, NATIVE = "kserve", "native"
PROTOCOLS = (KSERVE, NATIVE)
_SERVICE = "/inference.GRPCInferenceService"
METHODS = {KSERVE: f"{_SERVICE}/ModelInfer", NATIVE: "/inference.Nereid/Checkpoint"}
_ASK_TIMEOUT_S = 30
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # every channel is a connection
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Not the least one: that is also the time that an attempt may take, and a busy server needs more than 100 ms.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where calls go to, and what they carry.

    ``ca``: PEM to trust; ``certificate``: PEM of the caller's own and of its key. Either means TLS.
    """

    address: str
    key: str | None = field(default=None, repr=False)
    ca: bytes | None = field(default=None, repr=False)
    certificate: tuple[bytes, bytes] | None = field(default=None, repr=False)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self.key is None else (("authorization", f"Bearer {self.key}"),)

    def channel(self, library: Any = grpc) -> Any:
        """A connection, of gRPC's synchronous library or of ``grpc.aio``; opened by its first call."""
        if self.ca is None and self.certificate is None:
            return library.insecure_channel(self.address, options=_OPTIONS)
        own, secret = self.certificate or (None, None)
        credentials = grpc.ssl_channel_credentials(self.ca, secret, own)
        return library.secure_channel(self.address, credentials, options=_OPTIONS)


class Connection:
    """Questions to a server, one at a time. Raises CallFailed subclasses."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._channel = endpoint.channel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def server(self) -> str:
        """Its name and version, as far as it tells."""
        try:
            answer = self._ask("ServerMetadata", service_pb2.ServerMetadataRequest())
        except CallFailed:
            return "unknown"
        return f"{answer.name} {answer.version}".strip()

    def describe(self, model: str) -> tuple[Any, Any | None]:
        """The ModelMetadataResponse of ``model``, and its ModelConfig where the server tells it."""
        try:
            metadata = self._ask("ModelMetadata", service_pb2.ModelMetadataRequest(name=model))
        except UnknownModel as error:
            raise self._unknown(model, error) from None
        try:
            config = self._ask("ModelConfig", service_pb2.ModelConfigRequest(name=model)).config
        except CallFailed:
            config = None  # an extension of Triton's, which other servers do not have
        return metadata, config

    def counters(self, model: str) -> Counters | None:
        """Triton's own counts and times of ``model`` so far; None from a server that has none, or does not answer."""
        try:
            return Counters.of(self._ask("ModelStatistics", service_pb2.ModelStatisticsRequest(name=model)))
        except CallFailed:
            return None

    def try_infer(self, request: bytes, timeout_s: float) -> None:
        """Make one ModelInfer call and look at its whole answer."""
        answer = self._unary("ModelInfer", request, lambda message: message, timeout_s)
        if not answer.outputs:
            raise AnswerBroken(f"the model {answer.model_name!r} answered without any output")

    def try_checkpoint(self, request: list[bytes], contract: Contract, timeout_s: float) -> None:
        """Make one Checkpoint call and look at its whole answer."""
        read = inference_pb2.CheckpointResponse.FromString
        call = self._channel.stream_stream(METHODS[NATIVE], response_deserializer=read)
        answer = Answer(contract)
        try:
            for message in call(iter(request), timeout=timeout_s, metadata=self._endpoint.metadata):
                answer.receive(message)
        except grpc.RpcError as error:
            raise from_grpc(error, self._endpoint.address) from None
        answer.outputs()

    def _unknown(self, model: str, error: UnknownModel) -> UnknownModel:
        try:
            index = self._ask("RepositoryIndex", service_pb2.RepositoryIndexRequest(ready=True))
        except CallFailed:
            return error
        names = ", ".join(sorted({entry.name for entry in index.models})) or "none"
        return UnknownModel(f"the server has no model {model!r}; it has: {names}")

    def _ask(self, method: str, request: Any) -> Any:
        return self._unary(method, request, type(request).SerializeToString, _ASK_TIMEOUT_S)

    def _unary(self, method: str, request: Any, serialize: Any, timeout_s: float) -> Any:
        read = getattr(service_pb2, f"{method}Response").FromString
        call = self._channel.unary_unary(f"{_SERVICE}/{method}", serialize, read)
        try:
            return call(request, timeout=timeout_s, metadata=self._endpoint.metadata)
        except grpc.RpcError as error:
            raise from_grpc(error, self._endpoint.address) from None
