"""Our end of the worker protocol: one process of a model, started again when it has died.

The process is a child of ``scripts/worker.py``, which outlives ours by the moment it takes to end what it started: a
model that hangs in ``predict`` goes with the process that waits for it.
"""

from __future__ import annotations

import json
import math
import os
import select
import shutil
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from nereid_backend.engines import Array
from nereid_backend.errors import BundleError, EngineError, InvalidArgument, NereidError, OverLimit
from nereid_backend.scripts import child, environment
from nereid_backend.snooze import OPTIONS_FILE, worker
from nereid_backend.spec import Worker

_ENTRY = Path(worker.__file__)
_STDERR = 2
# To end in order after SHUTDOWN, and to tell how it ended after its last byte.
_PATIENCE_S = 1.0
_LONGEST_TOLD = 500
_PARTS_A_CALL = 64  # the most buffers handed to one sendmsg


class Process:
    """Runs ``predict`` of the worker in ``folder`` on named f32 arrays. One thread calls it at a time."""

    def __init__(self, spec: Worker, folder: Path, device: str, *, trial_limit_s: float | None = None) -> None:
        """Start it and wait until the model is loaded. Raises BundleError, EngineError.

        ``trial_limit_s``: it is only tried. A ``predict`` may take so long then, and its tracebacks, which are
        expected, stay out of the log.
        """
        self._trial_limit_s = trial_limit_s
        options = {"folder": str(folder), "entrypoint": spec.entrypoint, "class_name": spec.class_name}
        told = json.dumps({**options, "device": device, "raw": spec.raw})
        python = interpreter(spec, folder)
        variables = {**environment.child_variables(os.environ, python), **spec.environment}
        command = [str(python), "-u", str(_ENTRY), told]
        self._starter = child.Worker(environment.interpreter(), command, folder, variables)
        self._data: socket.socket | None = None
        self._control: socket.socket | None = None
        self._is_ready = False
        try:
            self._start()
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def predict(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """What the model gives for ``inputs``. Raises InvalidArgument, MemoryError, EngineError, OverLimit."""
        if self._is_ready and self._is_gone():
            self._restart()
        if not self._is_ready:  # one started in the place of one that died is still loading
            if self._data is None:
                self._start()
            self._wait_until_ready()
        header: dict[str, Any] = {
            "tensors": [{"name": name, "shape": array.shape, "dtype": "f32"} for name, array in inputs.items()]
        }
        if self._trial_limit_s is not None:
            header["quiet"] = True
            self._connection().settimeout(self._trial_limit_s)
        arrays = [np.ascontiguousarray(array, "<f4") for array in inputs.values()]
        self._send(worker.INFER, header, arrays)
        kind, answer, values = self._receive()
        if kind == worker.ERROR:
            raise _error(answer)
        try:
            return _tensors(answer, values)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise self._broken(f"its answer is none of the protocol ({type(error).__name__}: {error})") from error

    def close(self) -> None:
        """End it: in order when it listens, else its whole process group."""
        if self._data is not None and self._is_ready:
            with suppress(OSError):
                self._data.settimeout(_PATIENCE_S)
                self._data.send(worker.packed(worker.SHUTDOWN, {}), socket.MSG_NOSIGNAL)
                while self._data.recv(4096):
                    pass
        self._drop()
        self._starter.close()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        control, its_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, its_control:
                self._starter.begin({}, [theirs.fileno(), theirs.fileno(), _STDERR, its_control.fileno()])
        except BaseException:
            ours.close()
            control.close()
            raise
        self._data, self._control, self._is_ready = ours, control, False

    def _wait_until_ready(self) -> None:
        kind, header, _ = self._receive()
        if kind == worker.ERROR:
            self._drop()
            short = "out of memory: " if header.get("kind") == "oom" else ""
            raise BundleError(f"the model cannot be loaded: {short}{_told(header)}")
        if kind != worker.READY or header.get("protocol") != worker.PROTOCOL:
            raise self._broken("it did not begin with READY of protocol version 1")
        self._is_ready = True

    def _send(self, kind: int, header: dict[str, Any], arrays: Sequence[Array]) -> None:
        try:
            prefix = worker.packed(kind, header, sum(array.nbytes for array in arrays))
        except worker.Refused as error:
            raise OverLimit(f"the model's process takes no such request: {error}") from None
        parts = [memoryview(prefix), *(a.reshape(-1).view(np.uint8).data for a in arrays if a.nbytes)]
        try:
            while parts:
                sent = self._connection().sendmsg(parts[:_PARTS_A_CALL], [], socket.MSG_NOSIGNAL)
                parts = _after(parts, sent)
        except TimeoutError:
            raise self._too_slow() from None
        except OSError as error:
            raise self._died() from error

    def _receive(self) -> tuple[int, dict[str, Any], memoryview]:
        """The next frame. Raises EngineError when there is none; then a new process has been started."""
        (length,) = worker.LENGTH.unpack(self._bytes(worker.LENGTH.size))
        if length > worker.LARGEST_FRAME:
            raise self._broken(f"it announced a frame of {length} bytes")
        body = self._bytes(length)
        try:
            return worker.unpacked(body)
        except ValueError as error:
            raise self._broken(f"its answer is none of the protocol ({error})") from error

    def _bytes(self, count: int) -> bytearray:
        data = bytearray(count)
        view, got = memoryview(data), 0
        while got < count:
            try:
                more = self._connection().recv_into(view[got:])
            except TimeoutError:
                raise self._too_slow() from None
            except OSError:
                more = 0
            if not more:
                raise self._died()
            got += more
        return data

    def _is_gone(self) -> bool:
        """Whether it died since the last call: an idle process sends nothing, so whatever comes is the end."""
        poll = select.poll()
        poll.register(self._connection(), select.POLLIN)
        return bool(poll.poll(0))

    def _connection(self) -> socket.socket:
        if self._data is None:
            raise EngineError("the model's process does not run")
        return self._data

    def _died(self) -> EngineError:
        how = self._ending()
        if not self._is_ready:
            self._drop()
            return EngineError(f"the model's process {how} while the model was loaded; the server's log has its output")
        self._restart()
        return EngineError(f"the model's process {how} during this call; it is started again")

    def _too_slow(self) -> EngineError:
        return self._broken(f"a trial took longer than {self._trial_limit_s:g} s")

    def _broken(self, what: str) -> EngineError:
        """What cannot be trusted any more is replaced."""
        self._restart()
        return EngineError(f"the model's process was ended: {what}; it is started again")

    def _restart(self) -> None:
        self._drop()
        with suppress(NereidError, OSError):  # then the next call tries, and tells
            self._start()

    def _ending(self) -> str:
        """How the process ended, from the one that started it."""
        if self._control is not None:
            self._control.settimeout(_PATIENCE_S)
            with suppress(OSError, ValueError):
                while word := self._control.recv(4096).decode(errors="replace"):
                    what, _, value = word.partition(" ")
                    if what == "exit":
                        return f"was killed by signal {-int(value)}" if int(value) < 0 else f"ended with code {value}"
                    if what == "failed":
                        return f"cannot be started ({value})"
        return "died"

    def _drop(self) -> None:
        for end in (self._data, self._control):
            if end is not None:
                end.close()
        self._data = self._control = None
        self._is_ready = False


def interpreter(spec: Worker, folder: Path) -> Path:
    """The Python of a worker: its own, that of its requirements' environment, or, without any, the server's.

    Builds the environment when it is not there. Raises BundleError.
    """
    if spec.python:
        named = spec.python if "/" not in spec.python else str(folder / spec.python)  # an absolute one stays as it is
        found = shutil.which(named)
        if found is None:
            raise BundleError(f"its python {spec.python!r} is no program; correct {OPTIONS_FILE}")
        return Path(found)
    return environment.prepare(folder) if environment.names_packages(folder) else environment.interpreter()


def _tensors(header: dict[str, Any], values: memoryview) -> dict[str, Array]:
    """The arrays of a RESULT frame, views of it.

    Raises KeyError, TypeError, ValueError or OverflowError for what is none.
    """
    arrays: dict[str, Array] = {}
    start = 0
    for told in header["tensors"]:
        shape = tuple(told["shape"])
        count = math.prod(shape)
        if any(size < 0 for size in shape) or 4 * count > len(values) - start:
            raise ValueError(f"a shape {list(shape)} with {len(values) - start} bytes left")
        arrays[told["name"]] = np.frombuffer(values, "<f4", count, start).reshape(shape) if count else _empty(shape)
        start += 4 * count
    if start != len(values):
        raise ValueError(f"{len(values) - start} bytes too many")
    return arrays


def _empty(shape: tuple[int, ...]) -> Array:
    return np.empty(shape, np.float32)


def _error(header: dict[str, Any]) -> Exception:
    """The exception of an ERROR frame."""
    kind, text = header.get("kind"), _told(header)
    if kind == "oom":
        return MemoryError(f"out of memory: {text}")
    if kind == "invalid_input":
        return InvalidArgument(f"the model refused the input: {text}")
    return EngineError(f"the model failed: {text}")


def _told(header: dict[str, Any]) -> str:
    """The message of an ERROR frame as one short line."""
    text = " ".join(str(header.get("message", "")).split()) or "it says nothing"
    return text if len(text) <= _LONGEST_TOLD else f"{text[:_LONGEST_TOLD]}..."


def _after(parts: list[memoryview], sent: int) -> list[memoryview]:
    """``parts`` without their first ``sent`` bytes."""
    for index, part in enumerate(parts):
        if sent < len(part):
            return [part[sent:], *parts[index + 1 :]]
        sent -= len(part)
    return []
