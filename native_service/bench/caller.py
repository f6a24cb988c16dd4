"""The process that makes the calls: as little work for each as Python allows, and an account of its own time.

It does what its pipe says and ends with it. Requests are bytes that were serialised before, answers are not parsed (of
a Checkpoint only the last message, which says how it went).
"""

from __future__ import annotations

import asyncio
import gc
import re
import selectors
import signal
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from native_service.bench import arrivals
from native_service.bench.endpoint import KSERVE, METHODS, NATIVE, Endpoint
from native_service.bench.payload import Request
from native_service.bench.windows import MOST_ERROR_CLASSES, Failure, Spent, Window
from native_service.proto import inference_pb2

# Makes one call; how it failed when that shows in the answer.
Make = Callable[[Request, float | None], Awaitable[tuple[str, str] | None]]

# A client whose call failed waits, so that refusals are not all that a server does.
PAUSE_AFTER_FAILURE_S = 0.01
# How long calls that are still open at the end of a load may take.
DRAIN_S = 10
_LONGEST_TEXT = 200
_NUMBERS = re.compile(r"\d+")
_OTHER = Failure("OTHER", f"more than {MOST_ERROR_CLASSES} kinds of failures")
# Due calls that are sent before answers are looked at again.
_SENT_AT_ONCE = 16
# Durations held before they become counts.
_HELD = 65536


@dataclass(frozen=True, slots=True)
class Manner:
    """How calls are made. ``outstanding_at_most``: open calls of an open loop, all processes together."""

    arrival: str
    outstanding_at_most: int
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class Assignment:
    """What process number ``share`` of ``shares`` does: its part of so many clients, or of ``rate`` calls a second."""

    requests: list[Request]
    share: int
    shares: int
    clients: int
    rate: float
    manner: Manner
    begin_s: float
    """On the clock of ``time.monotonic``, which all processes of a host share."""
    warm_up_s: float
    window_s: float


class _Thread:
    """This thread's time since the last look."""

    def __init__(self) -> None:
        self._before = self._now()

    def spent(self) -> Spent:
        before, self._before = self._before, self._now()
        return Spent(*(b - a for a, b in zip(before, self._before, strict=True)))

    @staticmethod
    def _now() -> Spent:
        try:
            ran_ns, waited_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
        except (OSError, ValueError):  # a kernel without it
            ran_ns, waited_ns = str(time.thread_time_ns()), "0"
        return Spent(int(ran_ns) / 1e9, int(waited_ns) / 1e9, time.monotonic(), time.process_time())


class _Recorder:
    """Collects what happens into the window that is open."""

    def __init__(self, share: int) -> None:
        self._share = share
        self._thread = _Thread()
        self._window = Window()
        self._taken, self._late = array("d"), array("d")

    def answered(self, seconds: float) -> None:
        self._taken.append(seconds)
        if len(self._taken) >= _HELD:
            self._count()

    def sent(self, late_s: float | None) -> None:
        """A call of an open loop went; ``late_s`` is None for one that was held."""
        if late_s is None:
            self._window.held += 1
        else:
            self._late.append(late_s)

    def failed(self, code: str, text: str) -> None:
        failures, examples = self._window.failures, self._window.examples
        failure = Failure(code, _NUMBERS.sub("#", text[:_LONGEST_TEXT]))
        if failure not in failures and len(failures) >= MOST_ERROR_CLASSES:
            failure, text = _OTHER, _OTHER.text
        failures[failure] += 1
        examples.setdefault(failure, text[:_LONGEST_TEXT])

    def close(self, waiting: int = 0) -> Window:
        """The window that was open until now; the next one begins."""
        self._count()
        window, self._window = self._window, Window()
        window.spent = {self._share: self._thread.spent()}
        window.waiting = waiting
        return window

    def _count(self) -> None:
        for durations, into in ((self._taken, self._window.latencies), (self._late, self._window.late)):
            into.add(np.asarray(durations))
        self._taken, self._late = array("d"), array("d")


class _Load:
    """One assignment, until it is told to stop."""

    def __init__(self, assignment: Assignment, make: Sequence[Make], pipe: Connection) -> None:
        self._assignment, self._make, self._pipe = assignment, make, pipe
        self._recorder = _Recorder(assignment.share)
        self._over = asyncio.Event()
        self._open: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()
        self._warm = False
        self._next_due_s: float | None = None

    def stop(self, told: asyncio.Task[Any]) -> None:
        """``told`` has ended; what it raised is looked at here, as nobody else may come to that."""
        if not told.cancelled():
            told.exception()
        self._over.set()

    async def run(self) -> None:
        """Ends when it was stopped and the open calls have ended, or have been given up."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            windows = group.create_task(self._windows())
            for number in range(self._assignment.share, self._assignment.clients, self._assignment.shares):
                self._track(group.create_task(self._client(number)))
            sender = group.create_task(self._send(group))
            await self._over.wait()
            windows.cancel()
            sender.cancel()
            last = self._recorder.close(self._waiting())
            self._pipe.send(last if self._warm else Window())
            giving_up = loop.call_later(DRAIN_S, self._give_up)
        giving_up.cancel()

    def _track(self, task: asyncio.Task[None]) -> None:
        self._open.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        self._room.set()

    def _give_up(self) -> None:
        for task in self._open:
            task.cancel()

    async def _windows(self) -> None:
        edge_s = self._assignment.begin_s + self._assignment.warm_up_s
        await _until(edge_s)
        self._recorder.close()
        self._warm = True
        while True:
            edge_s += self._assignment.window_s
            await _until(edge_s)
            self._pipe.send(self._recorder.close(self._waiting()))

    def _waiting(self) -> int:
        """About how many calls are due and not sent."""
        if self._next_due_s is None or self._next_due_s > (now_s := time.monotonic()):
            return 0
        return 1 + int((now_s - self._next_due_s) * self._assignment.rate / self._assignment.shares)

    async def _client(self, number: int) -> None:
        make = self._make[number % len(self._make)]
        requests = cycle(self._assignment.requests[number % len(self._assignment.requests) :])
        await _until(self._assignment.begin_s)
        while not self._over.is_set():
            begun_s = time.monotonic()
            if await self._succeeds(make, next(requests)):
                self._recorder.answered(time.monotonic() - begun_s)
            else:
                await asyncio.sleep(PAUSE_AFTER_FAILURE_S)

    async def _send(self, group: asyncio.TaskGroup) -> None:
        """Every call when it is due. One that finds too many open waits, and what it waits counts as its latency."""
        work = self._assignment
        if not work.rate:
            return
        outstanding_at_most = max(1, work.manner.outstanding_at_most // work.shares)
        requests, makes = cycle(work.requests), cycle(self._make)
        at_once, full_until_s = 0, 0.0
        for offset_s in arrivals.due_s(work.manner.arrival, work.rate, work.share, work.shares):
            self._next_due_s = due_s = work.begin_s + offset_s
            if due_s > time.monotonic():
                await _until(due_s)
                at_once = 0
            elif at_once >= _SENT_AT_ONCE:
                await asyncio.sleep(0)
                at_once = 0
            while len(self._open) >= outstanding_at_most:
                self._room.clear()
                await self._room.wait()
                full_until_s = time.monotonic()
            at_once += 1
            self._recorder.sent(time.monotonic() - due_s if due_s > full_until_s else None)
            self._track(group.create_task(self._timed(next(makes), next(requests), due_s)))

    async def _timed(self, make: Make, request: Request, due_s: float) -> None:
        if await self._succeeds(make, request):
            self._recorder.answered(time.monotonic() - due_s)

    async def _succeeds(self, make: Make, request: Request) -> bool:
        try:
            failure = await make(request, self._assignment.manner.deadline_s)
        except grpc.aio.AioRpcError as error:
            failure = error.code().name, error.details() or ""
        if failure is not None:
            self._recorder.failed(*failure)
        return failure is None


async def _until(moment_s: float) -> None:
    await asyncio.sleep(max(0.0, moment_s - time.monotonic()))


def _infer(channel: Any, metadata: Any) -> Make:
    call = channel.unary_unary(METHODS[KSERVE])

    async def make(request: Request, deadline_s: float | None) -> tuple[str, str] | None:
        await call(request, timeout=deadline_s, metadata=metadata)
        return None

    return make


def _checkpoint(channel: Any, metadata: Any) -> Make:
    call = channel.stream_stream(METHODS[NATIVE])

    async def make(request: Request, deadline_s: float | None) -> tuple[str, str] | None:
        last = b""
        async for message in call(request, timeout=deadline_s, metadata=metadata):
            last = message
        end = inference_pb2.CheckpointResponse.FromString(last)
        if not end.done:
            return "INTERNAL", "the answer has no end"
        return None if end.exit_code == 0 else ("FAILED", f"the program ended with exit code {end.exit_code}")

    return make


_MAKERS = {KSERVE: _infer, NATIVE: _checkpoint}


def run(pipe: Connection, endpoint: Endpoint, protocol: str, connections: int) -> None:
    """Entry point of the process.

    Says None when it is ready. Takes an Assignment, gives a Window for each window until anything else comes, then one
    for the rest, and None when the open calls have ended.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; whoever started us tells us
    gc.freeze()
    # Not epoll: it counts in milliseconds, and the calls of an open loop would go up to one too late.
    runner = asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector()))
    try:
        with runner:
            runner.run(_serve(pipe, endpoint, protocol, connections))
    except* (EOFError, ConnectionError):
        pass  # whoever started us has gone


async def _serve(pipe: Connection, endpoint: Endpoint, protocol: str, connections: int) -> None:
    metadata = grpc.aio.Metadata(*endpoint.metadata) if endpoint.metadata else None
    channels = [endpoint.channel(grpc.aio) for _ in range(connections)]
    make = [_MAKERS[protocol](channel, metadata) for channel in channels]
    pipe.send(None)
    try:
        while True:
            load = _Load(await _received(pipe), make, pipe)
            stopping = asyncio.create_task(_received(pipe))
            stopping.add_done_callback(load.stop)
            await load.run()
            await stopping
            pipe.send(None)
    finally:
        for channel in channels:
            await channel.close()


async def _received(pipe: Connection) -> Any:
    """Raises EOFError when whoever started this process has gone."""
    readable = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pipe.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(pipe.fileno())
    return pipe.recv()
