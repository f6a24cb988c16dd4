"""``snoozeml.v1.InferenceService``: Infer, and StreamInfer, which SnoozeML documents and its package lacks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import nullcontext
from typing import Any

import grpc

from native_service.edge.grpc import answer_in_kind, errors_told
from native_service.edge.half_sent import HalfSent
from native_service.envoy.scripts import SNOOZE
from native_service.nereid.checkpoint import Budget
from native_service.snooze.errors import in_snooze_words
from native_service.snooze.inference import Deadline, SnoozeInference
from native_service.snooze.messages import read_request, write_response
from native_service.telemetry.failures import ASSISTED, STREAM
from nereid_backend.errors import ResourceExhausted

Work = Callable[[bytes], Awaitable[bytes]]

# Of one stream, running or not written yet: beyond these it is not read, and its client has to wait.
_MOST_FRAMES, _MOST_BYTES = 16, 64 * 1024 * 1024


class SnoozeService:
    """The two calls."""

    def __init__(self, inference: SnoozeInference, half_sent: HalfSent, budget: Budget) -> None:
        """``half_sent`` bounds streams that are still coming in, ``budget`` what calls in progress hold."""
        self._inference, self._half_sent, self._budget = inference, half_sent, budget

    @property
    def handler(self) -> Any:
        """The generic handler for ``grpc.aio.Server.add_generic_rpc_handlers``."""
        return grpc.method_handlers_generic_handler(
            SNOOZE,
            {
                "Infer": grpc.unary_unary_rpc_method_handler(self._infer),
                "StreamInfer": grpc.stream_stream_rpc_method_handler(self._stream_infer),
            },
        )

    async def _infer(self, data: bytes, context: Any) -> bytes:
        async with errors_told(context):
            await answer_in_kind(context)
            _take(self._budget, len(data))
            try:
                return await self._answer(ASSISTED, data, context, {})
            finally:
                self._budget.give_back(len(data))
        raise AssertionError("errors_told ends the call")

    async def _answer(self, surface: str, data: bytes, context: Any, turns: Mapping[str, asyncio.Semaphore]) -> bytes:
        """The answer to one message; ``turns`` are those that the frames of a stream take at each model."""
        with self._inference.counted(surface, context) as call:
            request = read_request(data)
            call.model = request.model
            # A name that nobody serves is told before what else is wrong.
            with self._inference.refused(self._inference.served(request.model)):
                inputs, typed, deadline = request.inputs(), request.typed, Deadline(context, request.timeout_s)
            async with turns.get(request.model) or nullcontext():
                answer = await self._inference.infer(call, request.model, inputs, deadline, typed=typed)
            return write_response(request.model, answer.outputs, answer.duration_ms)

    async def _stream_infer(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Answers in the order of the requests, several of which run at a time; the first that fails is the end."""
        async with errors_told(context):
            await answer_in_kind(context)
            frames = _Frames(self._budget)
            reading = asyncio.create_task(self._read(requests, context, frames))
            try:
                while (answer := await frames.first()) is not None:
                    await context.write(answer)
                    frames.written()
                await reading
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                await frames.drop()

    async def _read(self, requests: AsyncIterator[bytes], context: Any, frames: _Frames) -> None:
        # Half of a model's permits: a stream does not keep other callers out, and is not refused for its own frames.
        turns = {model: asyncio.Semaphore(max(1, count // 2)) for model, count in self._inference.capacities.items()}
        try:
            async for data in self._half_sent.messages(requests, lambda: frames.held_bytes):
                frames.add(data, lambda sent: self._answer(STREAM, sent, context, turns))
                await frames.has_room()
        finally:
            frames.end()


class _Frame:
    """A request in progress; ``size_bytes`` are its own, or its answer's once there is one."""

    task: asyncio.Task[bytes]

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes


class _Frames:
    """The requests of a stream that wait for their answers or to be written, in their order."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._frames: deque[_Frame] = deque()
        self._changed = asyncio.Event()
        self._has_ended = False

    @property
    def held_bytes(self) -> int:
        return sum(frame.size_bytes for frame in self._frames)

    def add(self, data: bytes, work: Work) -> None:
        """Start ``work`` on the request ``data``. Raises ResourceExhausted."""
        _take(self._budget, len(data))
        frame = _Frame(len(data))
        frame.task = asyncio.create_task(self._run(frame, data, work))
        self._frames.append(frame)
        self._changed.set()

    async def _run(self, frame: _Frame, data: bytes, work: Work) -> bytes:
        answer = await work(data)
        # What a client is slow to read is held for it.
        self._give_back(frame)
        _take(self._budget, len(answer))
        frame.size_bytes = len(answer)
        return answer

    def end(self) -> None:
        """No more will come."""
        self._has_ended = True
        self._changed.set()

    async def has_room(self) -> None:
        """Wait until another request may be read."""
        while len(self._frames) >= _MOST_FRAMES or self.held_bytes > _MOST_BYTES:
            await self._change()

    async def first(self) -> bytes | None:
        """The answer to the oldest request, None after the last one. Raises what it ended with."""
        while not self._frames:
            if self._has_ended:
                return None
            await self._change()
        return await self._frames[0].task

    def written(self) -> None:
        """The answer to the oldest has been written."""
        self._give_back(self._frames.popleft())
        self._changed.set()

    async def drop(self) -> None:
        """End all of them."""
        for frame in self._frames:
            frame.task.cancel()
        await asyncio.gather(*(frame.task for frame in self._frames), return_exceptions=True)
        for frame in self._frames:
            self._give_back(frame)

    def _give_back(self, frame: _Frame) -> None:
        self._budget.give_back(frame.size_bytes)
        frame.size_bytes = 0

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def _take(budget: Budget, count: int) -> None:
    """Raises ResourceExhausted in SnoozeML's words."""
    try:
        budget.take(count)
    except ResourceExhausted as error:
        raise in_snooze_words(error, "") from None
