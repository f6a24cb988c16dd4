"""One load after another on a server, each measured until its windows agree."""

from __future__ import annotations

import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from threading import Event
from typing import Any, NamedTuple, Self

from native_service.bench import caller
from native_service.bench.caller import DRAIN_S, Assignment, Manner
from native_service.bench.endpoint import Endpoint
from native_service.bench.payload import Request
from native_service.bench.server_times import Counters, ServerTimes
from native_service.bench.windows import AGREEING, Window, agree, in_a_row, of_processes, spread
from nereid_backend.errors import NereidError

# From here on the process that makes the calls has nothing left to give.
BUSY = 0.85
# Part of the rate that an open loop has to get answers for.
KEEPING_UP = 0.95
SILENCE_S = 60
_HEAD_START_S = 0.1
_TICK_S = 0.2
_GRACE_S = 5
_START_S = 120


class CallerDied(NereidError):
    """A process that makes calls ended by itself."""


class Point(NamedTuple):
    """A load: so many clients who wait for each answer, or so many calls a second, whatever comes back."""

    rows: int
    clients: int = 0
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How long each load lasts. ``duration_s``: measure so long, whether the windows agree or not."""

    warm_up_s: float
    window_s: float
    within: float
    windows_at_most: int
    duration_s: float | None = None

    @property
    def windows_at_least(self) -> int:
        return AGREEING if self.duration_s is None else max(1, math.ceil(self.duration_s / self.window_s))

    def is_enough(self, windows: list[Window]) -> bool:
        if len(windows) < self.windows_at_least:
            return False
        return self.duration_s is not None or agree(windows, self.within) or len(windows) >= self.windows_at_most


@dataclass(slots=True)
class Measurement:
    """What a load showed. ``windows`` are those that count; ``stopped``: why it ended early."""

    point: Point
    windows: list[Window]
    settled: bool
    server: ServerTimes | None
    stopped: str = ""
    interrupted: bool = False
    whole: Window = field(init=False)

    def __post_init__(self) -> None:
        self.whole = in_a_row(self.windows)

    @property
    def spread(self) -> float:
        """How far the rates of the windows lie from their mean, as a part of it."""
        return spread([window.per_second for window in self.windows])

    @property
    def client_is_limit(self) -> bool:
        return self.whole.busiest >= BUSY

    @property
    def keeps_up(self) -> bool:
        """Whether the server answered what an open loop sent."""
        return not self.point.rate or self.whole.per_second >= KEEPING_UP * self.point.rate


Tick = Callable[[float], None]
"""Called now and then while a load runs, with the seconds of it that have passed."""


class Callers:
    """The processes that make the calls; leaving the ``with`` block ends them."""

    def __init__(self, endpoint: Endpoint, protocol: str, processes: int, connections: int) -> None:
        """``connections``: of each process."""
        context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            arguments = (theirs, endpoint, protocol, connections)
            process = context.Process(target=caller.run, args=arguments, name="nereid bench", daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for share in range(processes):
            self._received(share, _START_S)  # it is ready

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def measure(
        self,
        point: Point,
        requests: list[Request],
        plan: Plan,
        manner: Manner,
        counters: Callable[[], Counters | None],
        tick: Tick,
    ) -> Measurement:
        """Ctrl-C and SIGTERM end it early, with what there is until then."""
        shares = len(self._pipes)
        begin_s = time.monotonic() + _HEAD_START_S
        for share, pipe in enumerate(self._pipes):
            times = begin_s, plan.warm_up_s, plan.window_s
            pipe.send(Assignment(requests, share, shares, point.clients, point.rate, manner, *times))
        windows: list[Window] = []
        counted: list[Counters | None] = []
        stopped = ""
        with _interruption() as interrupted:
            while (left_s := begin_s + plan.warm_up_s - time.monotonic()) > 0 and not interrupted.is_set():
                time.sleep(min(_TICK_S, left_s))
                tick(time.monotonic() - begin_s)
            counted.append(counters())
            while not (stopped or plan.is_enough(windows)):
                parts = self._windows(interrupted, lambda: tick(time.monotonic() - begin_s))
                if interrupted.is_set():
                    windows += [window for window in [self._stop(parts)] if window.passed_s]
                    break
                windows.append(of_processes(parts.values()))
                counted.append(counters())
                stopped = _why_stop(windows, plan.window_s)
        if interrupted.is_set():
            counted.append(counters())
        else:
            self._drain()
        settled = agree(windows, plan.within) and not interrupted.is_set()
        if settled and plan.duration_s is None:
            windows, counted = windows[-AGREEING:], counted[-AGREEING - 1 :]
        server = ServerTimes.between(counted[0], counted[-1])
        return Measurement(point, windows, settled, server, stopped, interrupted.is_set())

    def _windows(self, interrupted: Event, tick: Callable[[], None]) -> dict[int, Window]:
        """The next window of every process; of some only, when it is interrupted."""
        got: dict[int, Window] = {}
        while len(got) < len(self._pipes) and not interrupted.is_set():
            missing = {pipe: share for share, pipe in enumerate(self._pipes) if share not in got}
            for pipe in wait(list(missing), _TICK_S):
                share = missing[pipe]  # type: ignore[index]
                got[share] = self._received(share)
            tick()
        return got

    def _stop(self, parts: dict[int, Window]) -> Window:
        """``parts`` and what the processes have done since. They are of no use any more."""
        rests = []
        for share, pipe in enumerate(self._pipes):
            pipe.send(None)
            rests.append(in_a_row([*([parts[share]] if share in parts else []), self._received(share)]))
        return of_processes(rests)

    def _drain(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for share in range(len(self._pipes)):
            while self._received(share) is not None:
                pass

    def _received(self, share: int, within_s: float = DRAIN_S + _GRACE_S) -> Any:
        pipe, process = self._pipes[share], self._processes[share]
        try:
            if not pipe.poll(within_s):
                raise CallerDied("a process that makes the calls does not answer any more; please report it")
            return pipe.recv()
        except (EOFError, OSError):
            process.join(_GRACE_S)
            raise CallerDied(f"a process that makes the calls ended by itself (exit code {process.exitcode})") from None


@contextmanager
def _interruption() -> Iterator[Event]:
    """Set by the first SIGINT or SIGTERM, so that nothing is torn; the second raises KeyboardInterrupt.

    A signal that whoever started this process wants ignored stays so.
    """
    came = Event()

    def note(number: int, frame: Any) -> None:
        if came.is_set():
            signal.default_int_handler(number, frame)
        came.set()

    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _why_stop(windows: list[Window], window_s: float) -> str:
    """Why no more can be learnt from this server; empty while there is hope."""
    last = windows[-1]
    if last.latencies.count:
        return ""
    if last.failures:
        ((failure, _),) = last.failures.most_common(1)
        return f"no call succeeded for {last.passed_s:.0f} s: {failure.code} {last.examples[failure]}"
    silent = 0
    for window in reversed(windows):
        if window.latencies.count or window.failures:
            break
        silent += 1
    return f"no call was answered for {silent * window_s:.0f} s" if silent * window_s >= SILENCE_S else ""
