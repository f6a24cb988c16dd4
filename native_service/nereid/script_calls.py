"""Calls of script models: live lines, exit codes, the bytes of any length, and a count of how they ended.

Both surfaces end as a ModelInfer through Envoy's inner listener, so they share the model's permits. A Checkpoint adds a
token to it; the model's process answers on a Unix socket in the run directory (:mod:`nereid_backend.scripts.link`) and
sends the child's output there while it runs. Triton counts a script's calls wrongly (they are answered after
``execute`` has returned), so they are counted here.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from native_service.edge.grpc import Inference
from native_service.edge.infer_messages import Tensor
from native_service.envoy.scripts import PROCESS_DIED
from native_service.nereid.checkpoint import Budget, output_messages
from native_service.proto import inference_pb2
from native_service.telemetry.calls import sent_id
from native_service.telemetry.metrics import BACKEND, CANCELED, OTHER
from nereid_backend.errors import (
    CODE_IN_TEXT,
    DeadlineExceeded,
    InvalidArgument,
    ModelUnavailable,
    OutputRefused,
    TritonUnavailable,
)
from nereid_backend.scripts.link import EXIT, FRAME, LINK_SOCKET, PARAMETER, STDERR, STDOUT, TOKEN_BYTES, Header
from nereid_backend.spec import VARIABLE, ModelSpec

_CONNECT_S = 10.0
# From the end of the link to the answer: the tensor still has to travel, an error does not.
_TENSOR_S, _ERROR_S = 60.0, 5.0
_LONGEST_LINE = 1024 * 1024


@dataclass(slots=True)
class Counts:
    """How the calls of one model ended; durations are of successes only. ``failures`` are those that Envoy, which
    sees Triton's answers, takes for something else."""

    success: int = 0
    rows: int = 0
    duration_us: int = 0
    failures: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Peer:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class _LinkedCall:
    """A call in progress, with the link its model's process has opened; without one it has been answered already."""

    def __init__(self, answer: asyncio.Future[Any], peer: _Peer | None) -> None:
        self._answer, self._peer = answer, peer
        self.exit_code: int | None = None

    async def frames(self, header: Header, data: bytes | bytearray) -> AsyncIterator[tuple[bytes, bytes]]:
        """Send ``header`` and the input; then what the child writes, until its end, which sets ``exit_code``.

        Who does not take the next frame stops us, then the socket, then the child: nothing piles up.
        """
        if self._peer is None:
            return
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            self._peer.writer.write(header.to_line())
            self._peer.writer.write(data)
            await self._peer.writer.drain()
            while True:
                kind, length = FRAME.unpack(await self._peer.reader.readexactly(FRAME.size))
                content = await self._peer.reader.readexactly(length)
                if kind == EXIT:
                    self.exit_code = int(content)
                    return
                yield kind, content

    async def answer(self) -> Any:
        """The ModelInferResponse. Raises TritonUnavailable when the model's process has died without one.

        Triton never answers such a call (2.51), which would hold its permit for ever.
        """
        if self._peer is not None:
            await asyncio.wait((self._answer,), timeout=_ERROR_S if self.exit_code is None else _TENSOR_S)
            if not self._answer.done():
                raise TritonUnavailable(PROCESS_DIED)
        return await self._answer


class ScriptCalls:
    """``start`` before the first call, ``stop`` at the end."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._waiting: dict[bytes, asyncio.Future[_Peer]] = {}
        self._server: asyncio.Server | None = None
        self.counts: dict[str, Counts] = {}

    async def start(self, run_directory: str) -> None:
        """Listen in ``run_directory``, a short name of it: a socket's path may have 107 characters."""
        self._server = await asyncio.start_unix_server(self._accept, f"{run_directory}/{LINK_SOCKET}")

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def infer(self, request: Any, spec: ModelSpec, context: Any) -> Any:
        """The answer to a ModelInferRequest. Raises NereidError subclasses and grpc.aio.AioRpcError."""
        with self._counted(spec, request.inputs[0].shape if request.inputs else ()):
            count = len(request.raw_input_contents)
            if count not in (0, len(request.inputs)):
                raise InvalidArgument(f"model {spec.name!r}: {count} raw contents for {len(request.inputs)} inputs")
            async with self._linked(request, context) as call:
                async for _ in call.frames(Header((), None, live=False), b""):
                    pass
                return await call.answer()

    async def checkpoint(
        self, spec: ModelSpec, shape: Sequence[int], data: bytes | bytearray, context: Any, budget: Budget
    ) -> int:
        """Answer a Checkpoint call: lines as they come, the tensor, the exit code. Gives the bytes of the tensor.

        ``data`` may have any length: a program gets the bytes as they are. ``budget`` bounds what clients that are slow
        to read make the service hold.
        """
        request, header = _request(spec, shape, data)
        request.id = sent_id(context)
        with self._counted(spec, shape) as ended:
            async with self._linked(request, context) as call:
                streams = {STDOUT: _Lines(""), STDERR: _Lines("stderr: ")}
                async for kind, content in call.frames(header, b"" if header.input_bytes is None else data):
                    for line in streams[kind].split(content):
                        await context.write(inference_pb2.CheckpointResponse(chunk=line))
                for stream in streams.values():
                    for line in stream.rest():
                        await context.write(inference_pb2.CheckpointResponse(chunk=line))
                if call.exit_code:
                    with contextlib.suppress(grpc.aio.AioRpcError, TritonUnavailable):
                        await call.answer()  # an error, which Envoy counts
                    ended.append(None)
                    done = inference_pb2.CheckpointResponse(done=True, exit_code=max(call.exit_code, -1))
                    await context.write(done)
                    return 0
                return await _write_output(await call.answer(), context, budget)

    @contextlib.asynccontextmanager
    async def _linked(self, request: Any, context: Any) -> AsyncIterator[_LinkedCall]:
        """``request`` on its way, once its model's process has opened the link or the call has ended."""
        token = secrets.token_hex(TOKEN_BYTES // 2)
        request.parameters[PARAMETER].string_param = token
        request.parameters[CODE_IN_TEXT].bool_param = True
        connected: asyncio.Future[_Peer] = asyncio.get_running_loop().create_future()
        self._waiting[token.encode()] = connected
        answer = asyncio.ensure_future(self._inference.run(request, context))
        try:
            await asyncio.wait((answer, connected), return_when=asyncio.FIRST_COMPLETED)
            yield _LinkedCall(answer, connected.result() if connected.done() else None)
        finally:
            self._waiting.pop(token.encode(), None)
            if connected.done():
                connected.result().writer.close()
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected = None
        with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            async with asyncio.timeout(_CONNECT_S):
                connected = self._waiting.pop(await reader.readexactly(TOKEN_BYTES), None)
        if connected is None:
            writer.close()
        else:
            connected.set_result(_Peer(reader, writer))

    @contextlib.contextmanager
    def _counted(self, spec: ModelSpec, shape: Sequence[int]) -> Iterator[list[str | None]]:
        """Counts the call inside; anything put into the list makes it a failure."""
        counts = self.counts.setdefault(spec.name, Counts())
        begun = time.monotonic_ns()
        ended: list[str | None] = []
        try:
            yield ended
        except BaseException as error:
            ended.append(_reason(error))
            raise
        finally:
            for reason in filter(None, ended):
                counts.failures[reason] = counts.failures.get(reason, 0) + 1
            if not ended:
                counts.success += 1
                counts.rows += shape[0] if spec.max_batch_size and shape else 1
                counts.duration_us += (time.monotonic_ns() - begun) // 1000


def _request(spec: ModelSpec, shape: Sequence[int], data: bytes | bytearray) -> tuple[Any, Header]:
    """The ModelInferRequest of a Checkpoint and what goes beside it.

    Bytes that are as many as the contract says travel as the tensor they are. Triton would refuse any others: those go
    over the link, and the tensor is the smallest the contract allows.
    """
    request = service_pb2.ModelInferRequest(model_name=spec.name)
    if not spec.inputs:
        return request, Header((), None, live=True)
    tensor = spec.inputs[0]
    fits = len(data) == math.prod(shape) * tensor.element.size_bytes
    placeholder = [1 if size == VARIABLE else size for size in tensor.at_batch(1)]
    sent = list(shape) if fits else placeholder
    request.inputs.add(name=tensor.name, datatype=tensor.element.kserve, shape=sent)
    request.raw_input_contents.append(bytes(data) if fits else bytes(math.prod(sent) * tensor.element.size_bytes))
    return request, Header(tuple(shape), None if fits else len(data), live=True)


async def _write_output(response: Any, context: Any, budget: Budget) -> int:
    size = sum(map(len, response.raw_output_contents))
    budget.take(size)
    try:
        await _write_tensors(response, context)
    finally:
        budget.give_back(size)
    await context.write(inference_pb2.CheckpointResponse(done=True, exit_code=0))
    return size


async def _write_tensors(response: Any, context: Any) -> None:
    for tensor, data in zip(response.outputs, response.raw_output_contents, strict=True):
        if tensor.datatype != "FP32":
            raise OutputRefused(
                f"the output is {tensor.datatype} and Checkpoint carries FP32 only; call ModelInfer (KServe v2)"
            )
        for message in output_messages(Tensor(tensor.name, tensor.shape, data)):
            await context.write(message)


class _Lines:
    """Cuts one stream into lines; one over 1 MiB comes in pieces."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._rest = prefix, b""

    def split(self, data: bytes) -> Iterator[str]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            yield self._text(line.removesuffix(b"\r"))
        while len(self._rest) > _LONGEST_LINE:
            yield self._text(self._rest[:_LONGEST_LINE])
            self._rest = self._rest[_LONGEST_LINE:]

    def rest(self) -> Iterator[str]:
        if self._rest:
            yield self._text(self._rest)

    def _text(self, line: bytes) -> str:
        return self._prefix + line.decode(errors="replace")


def _reason(error: BaseException) -> str | None:
    """Which of Triton's reasons of failure it is; None when it is counted elsewhere."""
    if isinstance(error, asyncio.CancelledError):
        return CANCELED
    if isinstance(error, grpc.aio.AioRpcError):
        gone = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
        return CANCELED if error.code() in gone else None
    if isinstance(error, (DeadlineExceeded, ModelUnavailable)):
        return None  # counted where it was noticed
    return OTHER if isinstance(error, InvalidArgument) else BACKEND


def with_script_counts(text: str, counts: Mapping[str, Counts]) -> str:
    """Triton's metrics ``text`` in Prometheus' format with the series of script models replaced by what was counted."""
    lines = []
    for line in text.split("\n"):
        name, brace, rest = line.partition("{")
        model = _label(rest, "model")
        if brace and model in counts and (value := _counted_value(name, rest, counts[model])) is not None:
            line = f"{line.rpartition(' ')[0]} {value}"
        lines.append(line)
    return "\n".join(lines)


def _counted_value(name: str, labels: str, counts: Counts) -> int | None:
    if name == "nv_inference_request_failure":
        return counts.failures.get(_label(labels, "reason"), 0)
    return {
        "nv_inference_request_success": counts.success,
        "nv_inference_exec_count": counts.success,
        "nv_inference_count": counts.rows,
        "nv_inference_request_duration_us": counts.duration_us,
        "nv_inference_compute_infer_duration_us": counts.duration_us,
    }.get(name)


def _label(labels: str, name: str) -> str:
    return labels.partition(f'{name}="')[2].partition('"')[0]
