"""A client of the native service: arrays in, arrays out, and the lines of programs while they run.

    with Client("127.0.0.1:50051") as client:
        outputs = client.infer("digits", images)
        with client.run("job", b"...") as job:
            for line in job:
                print(line)
            result = job.outputs()

:class:`AsyncClient` is the same for asyncio. Neither needs an extra.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from tritonclient.grpc import service_pb2

from native_service.client.errors import (
    AnswerBroken,
    BadRequest,
    CallCancelled,
    CallFailed,
    ModelFailed,
    NotAllowed,
    ProgramFailed,
    ServerFull,
    TimedOut,
    TooLarge,
    Unavailable,
    UnknownModel,
    from_grpc,
)
from native_service.client.messages import Answer, Array, Contract, Given, byte_requests, tensor_requests
from native_service.proto import inference_pb2

__all__ = [
    "AnswerBroken",
    "AsyncClient",
    "AsyncRun",
    "BadRequest",
    "CallCancelled",
    "CallFailed",
    "Client",
    "ModelFailed",
    "NotAllowed",
    "ProgramFailed",
    "Run",
    "ServerFull",
    "TimedOut",
    "TooLarge",
    "Unavailable",
    "UnknownModel",
]

T = TypeVar("T")

DEFAULT_ADDRESS = "127.0.0.1:50051"
_NATIVE, _KSERVE = "inference.Nereid", "inference.GRPCInferenceService"
_ATTEMPTS = 5
# A server that refuses many at once says the same time to all of them.
_JITTER = 0.5
_ASYNC_CALLS_AT_ONCE = 256
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, also beside others to the same server
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 20_000),  # how long an attempt may take, gRPC's own default
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class _Stop:
    """Ends a call, or the pause before the next attempt, from another thread."""

    def __init__(self) -> None:
        self._event, self._lock = threading.Event(), threading.Lock()
        self._call: Any = None

    def watch(self, call: Any) -> None:
        with self._lock:
            self._call = call
        if self._event.is_set():
            call.cancel()

    def set(self) -> None:
        self._event.set()
        with self._lock:
            if self._call is not None:
                self._call.cancel()

    def pause(self, seconds: float) -> None:
        """Raises CallCancelled when it was ended."""
        if self._event.wait(seconds):
            raise CallCancelled("the call was cancelled before the server had room for it")


class Run:
    """A call in progress: an iterator of the lines its program prints, then ``outputs`` and ``exit_code``.

    Leaving its ``with`` block, or ``close``, cancels it when it is not over.
    """

    def __init__(self, responses: Iterator[Any], answer: Answer, stop: _Stop) -> None:
        self._responses, self._answer, self._stop = responses, answer, stop

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        for message in self._responses:
            if (line := self._answer.receive(message)) is not None:
                return line
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stop.set()

    @property
    def exit_code(self) -> int | None:
        """The program's, -1 when a signal ended it; None before its end."""
        return self._answer.exit_code

    def outputs(self) -> dict[str, Array]:
        """The outputs by name, after the lines that nobody took. Raises ProgramFailed for an exit code other than 0."""
        for _ in self:
            pass
        return self._answer.outputs()


class Client:
    """A connection to one server, for any number of threads; opened by the first call, closed by ``close``."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        key: str | None = None,
        ca: Path | None = None,
        certificate: tuple[Path, Path] | None = None,
        tls: bool = False,
        attempts: int = _ATTEMPTS,
    ) -> None:
        """``key``: an API key or a token, sent with every call.

        ``ca``: the authority's certificates (PEM) to trust; ``certificate``: this client's own and its key, for
        servers that ask for one. Either means TLS, as does ``tls`` with the authorities that gRPC trusts. ``attempts``:
        how often a call is made at most while the server is full; nothing else is tried again.
        """
        self._address, self._attempts = address, attempts
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        if tls or ca or certificate:
            own, secret = certificate or (None, None)
            credentials = grpc.ssl_channel_credentials(*(path and path.read_bytes() for path in (ca, secret, own)))
            self._channel = grpc.secure_channel(address, credentials, options=_OPTIONS)
        else:
            self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        checkpoint = inference_pb2.CheckpointRequest.SerializeToString, inference_pb2.CheckpointResponse.FromString
        self._checkpoint = self._channel.stream_stream(f"/{_NATIVE}/Checkpoint", *checkpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; calls in progress end with CallCancelled."""
        self._channel.close()

    def infer(self, model: str, inputs: Given = None, *, timeout_s: float | None = None) -> dict[str, Array]:
        """The outputs of ``model`` by name, in its order.

        ``inputs``: an array by input name, or the array of its only input; program order, the batch dimension may be
        left out. Arrays must have the model's dtype, or one that converts to it without loss; lists are converted.
        ``timeout_s`` bounds all attempts together. Raises CallFailed subclasses.
        """
        return self._infer(model, inputs, _Time(timeout_s), _Stop())

    def run(self, model: str, data: bytes | Given = None, *, timeout_s: float | None = None) -> Run:
        """Start ``model`` and follow it. ``data``: bytes for a program as they are, or what ``infer`` takes."""
        return self._run(model, data, _Time(timeout_s), _Stop())

    def models(self, *, timeout_s: float | None = None) -> list[str]:
        """The names of what is served."""
        return self._models(_Time(timeout_s), _Stop())

    def health(self, model: str | None = None, *, timeout_s: float | None = None) -> bool:
        """Whether ``model``, or without one the server, would answer now; False for a model that it does not have."""
        return self._health(model, _Time(timeout_s), _Stop())

    def metadata(self, model: str, *, timeout_s: float | None = None) -> Any:
        """Names, datatypes and shapes of the tensors of ``model``: KServe's ModelMetadataResponse."""
        return self._metadata_of(model, _Time(timeout_s), _Stop())

    def _models(self, time_: _Time, stop: _Stop) -> list[str]:
        request = inference_pb2.ViewModelsRequest()
        return list(self._unary(_NATIVE, "ViewModels", inference_pb2, request, time_, stop).model_names)

    def _health(self, model: str | None, time_: _Time, stop: _Stop) -> bool:
        if model is None:
            request, method = service_pb2.ServerReadyRequest(), "ServerReady"
        else:
            request, method = service_pb2.ModelReadyRequest(name=model), "ModelReady"
        return bool(self._unary(_KSERVE, method, service_pb2, request, time_, stop).ready)

    def _infer(self, model: str, inputs: Given, time_: _Time, stop: _Stop) -> dict[str, Array]:
        with self._run(model, inputs, time_, stop) as run:
            return run.outputs()

    def _run(self, model: str, data: bytes | Given, time_: _Time, stop: _Stop) -> Run:
        contract = Contract.of_metadata(self._metadata_of(model, time_, stop))
        if isinstance(data, bytes | bytearray | memoryview):
            requests = partial(byte_requests, contract, bytes(data))
        else:
            requests = partial(tensor_requests, model, contract.arrays(data))

        def start() -> Any:
            call = self._checkpoint(requests(), timeout=time_.left_s(), metadata=self._metadata)
            stop.watch(call)
            return call

        return Run(self._responses(start(), start, time_, stop), Answer(contract), stop)

    def _responses(self, call: Any, again: Callable[[], Any], time_: _Time, stop: _Stop) -> Iterator[Any]:
        """What the server answers to ``call``, or to those that are made ``again`` while it is full."""
        for attempts_left in reversed(range(self._attempts)):
            answered = False
            try:
                for message in call:
                    answered = True
                    yield message
                return
            except grpc.RpcError as error:
                failed = from_grpc(error, self._address)
                if answered or not attempts_left or not isinstance(failed, ServerFull):
                    raise failed from None
                pause_s = failed.retry_after_s * (1 + random.uniform(0, _JITTER))  # noqa: S311 - no secret
                left_s = time_.left_s()
                if left_s is not None and pause_s >= left_s:
                    raise failed from None
            finally:
                call.cancel()
            stop.pause(pause_s)
            call = again()

    def _metadata_of(self, model: str, time_: _Time, stop: _Stop) -> Any:
        request = service_pb2.ModelMetadataRequest(name=model)
        return self._unary(_KSERVE, "ModelMetadata", service_pb2, request, time_, stop)

    def _unary(self, service: str, method: str, messages: Any, request: Any, time_: _Time, stop: _Stop) -> Any:
        call = self._channel.unary_unary(
            f"/{service}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=getattr(messages, f"{method}Response").FromString,
        )
        answer = call.future(request, timeout=time_.left_s(), metadata=self._metadata)
        stop.watch(answer)
        try:
            return answer.result()
        except grpc.FutureCancelledError:
            raise CallCancelled("the call was cancelled") from None
        except grpc.RpcError as error:
            raise from_grpc(error, self._address) from None
        finally:
            answer.cancel()


class _Time:
    """What is left of ``timeout_s`` seconds from now; None for no bound."""

    def __init__(self, timeout_s: float | None) -> None:
        self._end = None if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())


class AsyncRun:
    """:class:`Run` for asyncio: ``async with``, ``async for``, ``await outputs()``."""

    def __init__(self, run: Run, work: Callable[..., Any]) -> None:
        self._run, self._work = run, work

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        line: str | None = await self._work(self._run._stop, next, self._run, None)
        if line is None:
            raise StopAsyncIteration
        return line

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._run.close()

    @property
    def exit_code(self) -> int | None:
        return self._run.exit_code

    async def outputs(self) -> dict[str, Array]:
        """As :meth:`Run.outputs`."""
        outputs: dict[str, Array] = await self._work(self._run._stop, self._run.outputs)
        return outputs


class AsyncClient:
    """:class:`Client` for asyncio: the same calls, each in a thread of its own; cancelling a task cancels its call.

    Not by grpc.aio: when the server refuses while a message is being sent, that loses the reason (grpcio 1.7x).
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """As for :class:`Client`."""
        self._client = Client(*arguments, **options)
        self._threads = ThreadPoolExecutor(_ASYNC_CALLS_AT_ONCE, thread_name_prefix="nereid-client")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """As :meth:`Client.close`."""
        self._client.close()
        self._threads.shutdown(wait=False)

    async def infer(self, model: str, inputs: Given = None, *, timeout_s: float | None = None) -> dict[str, Array]:
        """As :meth:`Client.infer`."""
        return await self._call(self._client._infer, timeout_s, model, inputs)

    async def run(self, model: str, data: bytes | Given = None, *, timeout_s: float | None = None) -> AsyncRun:
        """As :meth:`Client.run`."""
        return AsyncRun(await self._call(self._client._run, timeout_s, model, data), self._work)

    async def models(self, *, timeout_s: float | None = None) -> list[str]:
        """As :meth:`Client.models`."""
        return await self._call(self._client._models, timeout_s)

    async def health(self, model: str | None = None, *, timeout_s: float | None = None) -> bool:
        """As :meth:`Client.health`."""
        return await self._call(self._client._health, timeout_s, model)

    async def metadata(self, model: str, *, timeout_s: float | None = None) -> Any:
        """As :meth:`Client.metadata`."""
        return await self._call(self._client._metadata_of, timeout_s, model)

    async def _call(self, work: Callable[..., T], timeout_s: float | None, *arguments: Any) -> T:
        stop = _Stop()
        return await self._work(stop, work, *arguments, _Time(timeout_s), stop)

    async def _work(self, stop: _Stop, work: Callable[..., T], *arguments: Any) -> T:
        result = asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            stop.set()
            with suppress(CallFailed):
                await result
            raise
