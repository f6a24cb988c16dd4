"""One child of a program: fed from a file, its output pumped, killed when its caller goes or its time is up."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from nereid_backend.errors import Cancelled, EngineError, TimeLimitExceeded
from nereid_backend.scripts.link import STDERR, STDOUT, Link

LOG_BYTES = 64 * 1024
"""Most of a child's stderr that is kept."""
_READ_BYTES = 64 * 1024
# How soon a cancelled call is noticed; each look is a round trip to the server process.
_POLL_S = 0.1
_PAUSE_S = 0.003
# Output that is still in the pipes when the child has ended, or that something outside its group holds open.
_DRAIN_S = 1.0
_WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, slots=True)
class Ended:
    """``code`` is negative for a signal; ``stderr`` holds its last 64 KiB."""

    code: int
    stderr: bytes


class Worker:
    """The process that starts a model's children (see ``worker.py``); started again when it has died.

    ``outputs`` is a folder that it removes when it ends.
    """

    def __init__(
        self,
        interpreter: Path,
        command: list[str],
        folder: Path,
        environment: Mapping[str, str],
        outputs: Path | None = None,
        preload: tuple[str, ...] = (),
    ) -> None:
        self._interpreter, self._folder, self._environment = interpreter, folder, dict(environment)
        self._options = json.dumps({"command": command, "preload": preload, "outputs": outputs and str(outputs)})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Start it now rather than at the first call."""
        with self._lock:
            self._connected()

    def begin(self, environment: Mapping[str, str], descriptors: list[int]) -> None:
        """Start a child with ``environment`` added to the model's; ``descriptors`` are its stdin, stdout and stderr and
        the socket for its call. Raises EngineError."""
        message = json.dumps(environment).encode()
        with self._lock:
            for _ in range(2):
                try:
                    socket.send_fds(self._connected(), [message], descriptors)
                except OSError:
                    self._end()  # it was killed; a new one takes its place
                else:
                    return
        raise EngineError("the process that starts the program's children does not live")

    def close(self) -> None:
        with self._lock:
            self._end()

    def _connected(self) -> socket.socket:
        if self._socket is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [str(self._interpreter), "-u", str(_WORKER), str(theirs.fileno()), self._options],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    cwd=self._folder,
                    env=self._environment,
                    start_new_session=True,
                )
            self._socket = ours
        return self._socket

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            try:
                self._process.wait(timeout=_DRAIN_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def run(
    worker: Worker,
    environment: Mapping[str, str],
    stdin: int,
    *,
    link: Link | None,
    is_cancelled: Callable[[], bool],
    time_limit_s: float,
) -> Ended:
    """Run a child to its end. ``stdin`` is an open file, read from its beginning; the caller keeps it.

    ``is_cancelled`` is asked from this thread only. Raises Cancelled or TimeLimitExceeded after the child's process
    group was told to end, EngineError when there is no child.
    """
    with ExitStack() as held:
        out_read, out_write = _pipe(held)
        err_read, err_write = _pipe(held)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        held.enter_context(ours)
        with theirs:
            worker.begin(environment, [stdin, out_write, err_write, theirs.fileno()])
        for descriptor in (out_write, err_write):
            os.close(descriptor)
        held.pop_all()
        pump = _Pump({out_read: STDOUT, err_read: STDERR}, ours, link)
        try:
            return pump.run(is_cancelled, time.monotonic() + time_limit_s, time_limit_s)
        finally:
            pump.close()


def _pipe(held: ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for descriptor in ends:
        held.callback(os.close, descriptor)
    return ends


def _check_time(deadline: float, time_limit_s: float) -> None:
    if time.monotonic() >= deadline:
        raise TimeLimitExceeded(f"it ran longer than its time limit of {time_limit_s:g} s and was ended")


class _Pump:
    """The loop of one call. Closing ``control`` ends the child's group."""

    def __init__(self, outputs: dict[int, bytes], control: socket.socket, link: Link | None) -> None:
        self._outputs, self._control, self._link = outputs, control, link
        self._stderr = bytearray()
        self._pid: int | None = None
        self._code: int | None = None
        self._read_at = self._next_read_at = 0.0

    def run(self, is_cancelled: Callable[[], bool], deadline: float, time_limit_s: float) -> Ended:
        asked = time.monotonic()
        drained_until = deadline
        while self._code is None or (self._outputs and time.monotonic() < drained_until):
            running = self._code is None
            progressed = self._wait()
            now = time.monotonic()
            if self._code is not None and (running or progressed or self._is_blocked()):
                drained_until = now + _DRAIN_S
            _check_time(deadline, time_limit_s)
            if now - asked >= _POLL_S:
                asked = now
                if is_cancelled():
                    raise Cancelled("the request was cancelled")
        if self._link is not None:
            self._link.end(self._code)
            while self._link.is_pending:
                self._wait()
                _check_time(deadline, time_limit_s)
        return Ended(self._code, bytes(self._stderr))

    def close(self) -> None:
        for descriptor in self._outputs:
            os.close(descriptor)
        self._control.close()

    def _is_blocked(self) -> bool:
        return self._link is not None and self._link.is_full

    def _wait(self) -> bool:
        """Wait a moment for anything to happen and handle it; whether output came."""
        poll = select.poll()
        # A child that writes without a pause fills its pipe for a moment: one read then takes many lines.
        pause_s = 0.0 if self._code is not None else self._next_read_at - time.monotonic()
        # A client that reads slowly slows the child, as a pipe would: nothing is lost and nothing piles up.
        if not self._is_blocked() and pause_s <= 0:
            for descriptor in self._outputs:
                poll.register(descriptor, select.POLLIN)
        if self._code is None:
            poll.register(self._control, select.POLLIN)
        if self._link is not None:
            poll.register(self._link.fileno(), select.POLLOUT if self._link.is_pending else 0)
        progressed = False
        for descriptor, events in poll.poll(1000 * (pause_s if pause_s > 0 else _POLL_S)):
            if descriptor in self._outputs:
                progressed = True
                self._read(descriptor)
            elif descriptor == self._control.fileno():
                self._hear()
            elif events & (select.POLLHUP | select.POLLERR):
                raise Cancelled("the caller is gone")
        if self._link is not None:
            self._link.flush()
        return progressed

    def _read(self, descriptor: int) -> None:
        data = os.read(descriptor, _READ_BYTES)
        now = time.monotonic()
        if now - self._read_at < _PAUSE_S:
            self._next_read_at = now + _PAUSE_S
        self._read_at = now
        if not data:
            os.close(descriptor)
            del self._outputs[descriptor]
            return
        stream = self._outputs[descriptor]
        if stream == STDERR:
            self._stderr += data
            del self._stderr[:-LOG_BYTES]
        if self._link is not None:
            self._link.give(stream, data)

    def _hear(self) -> None:
        word, _, value = self._control.recv(4096).decode(errors="replace").partition(" ")
        if word == "pid":
            self._pid = int(value)
        elif word == "exit":
            self._code = int(value)
        elif word == "failed":
            raise EngineError(f"the program cannot be started ({value})")
        else:
            # The worker has died. Its children are nobody's now, so their ids cannot have been given to others yet.
            if self._pid is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._pid, signal.SIGKILL)
            raise EngineError("the process that started the program has died; try again")
