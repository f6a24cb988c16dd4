"""The small process that starts a program's children, run as a script by the program's own interpreter.

A process of its own has no threads, which makes ``fork`` safe, is small, which makes it fast, and outlives the model's
process by a moment, in which it ends what that one left running. It talks over a SOCK_SEQPACKET socket: a message is
one call's additions to the environment as JSON, with four descriptors: stdin, stdout, stderr, and a socket for this
call. On that it answers ``pid N`` and then ``exit N`` (negative: the signal); when the other side closes it, the
child's process group is terminated.

Given modules to preload it imports them once and forks itself for every call; the fork then becomes what
``python -u main.py`` would be. A program with anything but the standard library in here would import it into
every such child: this file uses nothing else, and nothing of this project.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
import types
import warnings
from importlib.machinery import SourceFileLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container
    from typing import NoReturn, TextIO

    Call = tuple[dict[str, str], list[int]]
    """The additions to the environment, and the descriptors: stdin, stdout, stderr, control."""
    Program = tuple[types.CodeType, dict[str, object]]
    """The code of ``main.py`` and the names it starts with."""

_KILL_AFTER_S = 0.5
_LARGEST_MESSAGE = 1024 * 1024
_DESCRIPTORS = 4
_INT = array.array("i")
# Their threads (OpenBLAS) are made again after a fork by handlers of their own.
_FORK_SAFE = ("numpy", "scipy")


class Children:
    """The running children of one model, by process id: the socket of their call."""

    def __init__(self, requests: socket.socket, command: list[str]) -> None:
        self._requests, self._command = requests, command
        self._controls: dict[int, socket.socket] = {}
        self._to_kill: list[tuple[float, int]] = []
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, _nothing)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._selector.register(requests, selectors.EVENT_READ, None)
        self._selector.register(self._woken, selectors.EVENT_READ, None)

    def serve(self, fork: bool) -> Call | None:
        """Until the other side is gone (None), or in a forked child: its environment and its descriptors."""
        while True:
            timeout = None if not self._to_kill else max(0.0, self._to_kill[0][0] - time.monotonic())
            for key, _ in self._selector.select(timeout):
                if key.data is not None:
                    self._terminate(key.data)
                elif key.fileobj is not self._requests:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._woken, 4096)
                else:
                    call = self._receive()
                    if call is None:
                        return None
                    if self._start(*call, fork):
                        return call
            self._reap()
            while self._to_kill and self._to_kill[0][0] <= time.monotonic():
                _kill(self._to_kill.pop(0)[1], signal.SIGKILL, self._controls)

    def end(self) -> None:
        """Kill what still runs."""
        for pid in self._controls:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _receive(self) -> Call | None:
        try:
            # Not recv_fds, which ignores the flag: every child would inherit the descriptors of its siblings.
            message, ancillary, _, _ = self._requests.recvmsg(
                _LARGEST_MESSAGE, socket.CMSG_SPACE(_DESCRIPTORS * _INT.itemsize), socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionError:
            return None
        descriptors = array.array("i", b"".join(data for _, _, data in ancillary))
        return (json.loads(message), descriptors.tolist()) if message else None

    def _start(self, environment: dict[str, str], descriptors: list[int], fork: bool) -> bool:
        """Start a child; true in the child itself, when it is a fork."""
        control = socket.socket(fileno=descriptors[3])
        try:
            pid = _fork() if fork else self._spawn(environment, descriptors)
        except OSError as error:
            pid = None
            reason = error.strerror or str(error)
        if pid == 0:
            self._forget(control)
            return True
        for descriptor in descriptors[:3]:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            control.send(f"failed {reason}".encode() if pid is None else b"pid %d" % pid)
        if pid is None:
            control.close()
        else:
            self._controls[pid] = control
            self._selector.register(control, selectors.EVENT_READ, pid)
        return False

    def _spawn(self, environment: dict[str, str], descriptors: list[int]) -> int:
        return os.posix_spawn(
            self._command[0],
            self._command,
            {**os.environ, **environment},
            file_actions=[(os.POSIX_SPAWN_DUP2, descriptors[target], target) for target in (0, 1, 2)],
            setsid=True,
            # An interpreter ignores these, and a child would inherit that.
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )

    def _forget(self, control: socket.socket) -> None:
        """In a forked child: close what belongs to the parent."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for descriptor in (self._woken, self._wake):
            os.close(descriptor)
        for other in (control, self._requests, *self._controls.values()):
            other.close()

    def _terminate(self, pid: int) -> None:
        self._selector.unregister(self._controls[pid])
        _kill(pid, signal.SIGTERM, self._controls)
        self._to_kill.append((time.monotonic() + _KILL_AFTER_S, pid))

    def _reap(self) -> None:
        while self._controls:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            # Before its id is free for others: whatever it left in its group ends with it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(ended.si_pid, signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            control = self._controls.pop(ended.si_pid, None)
            if control is not None:
                with contextlib.suppress(OSError):
                    control.send(b"exit %d" % os.waitstatus_to_exitcode(status))
                with contextlib.suppress(KeyError):
                    self._selector.unregister(control)
                control.close()


def _fork() -> int:
    with warnings.catch_warnings():
        # The threads Python warns of are those of a library that is known to make them again.
        warnings.simplefilter("ignore")
        return os.fork()


def _kill(pid: int, number: int, running: Container[int]) -> None:
    if pid not in running:
        return
    try:
        os.killpg(pid, number)
    except ProcessLookupError:  # a fork that has not made its group yet
        os.kill(pid, number)
    except PermissionError:
        pass  # it has become another user's


def _nothing(_number: int, _frame: object) -> None:
    """Python calls no wakeup descriptor for a signal without a handler."""


def _preload(modules: list[str], refused: list[str]) -> None:
    """Import ``modules``; when one starts threads, begin again without it, because a fork would break it."""
    for module in ["numpy", *modules] if modules else []:
        if module in refused:
            continue
        before = len(os.listdir("/proc/self/task"))
        # The program itself will fail on it, and say why.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
        if len(os.listdir("/proc/self/task")) > before and module.partition(".")[0] not in _FORK_SAFE:
            sys.stderr.write(f"{module} starts threads when it is imported, so every call imports it anew\n")
            os.execv(sys.executable, [sys.executable, "-u", *sys.argv[:3], *refused, module])


def _shadowed(folder: str) -> str | None:
    """A module of the folder that has the name of one that is loaded already; None when there is none."""
    names = {name.removesuffix(".py") for name in os.listdir(folder)}
    return min(names & {name.partition(".")[0] for name in sys.modules} - {"__main__", "main"}, default=None)


def _become(environment: dict[str, str], descriptors: list[int], path: str) -> Program:
    """Turn a forked copy of this process into what ``python -u main.py`` is before its first line."""
    os.setsid()
    for target in (0, 1, 2):
        os.dup2(descriptors[target], target)
        os.close(descriptors[target])
    os.environ.update(environment)
    old = sys.stdin, sys.stdout, sys.stderr
    fresh = (
        open(0, encoding=old[0].encoding, errors=old[0].errors, closefd=False),
        *(_unbuffered(number, stream) for number, stream in ((1, old[1]), (2, old[2]))),
    )
    for name, text in zip(("stdin", "stdout", "stderr"), fresh, strict=True):
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    for name in ("random", "numpy.random"):
        if name in sys.modules:
            sys.modules[name].seed()
    module = types.ModuleType("__main__")
    module.__file__ = file = os.path.abspath(path)
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    module.__dict__["__cached__"] = None
    module.__loader__ = SourceFileLoader("__main__", file)
    sys.argv = [path]
    sys.path.insert(0, os.path.dirname(file))
    sys.modules["__main__"] = module
    with open(file, "rb") as source:
        return compile(source.read(), file, "exec", dont_inherit=True), module.__dict__


def _unbuffered(number: int, like: TextIO) -> TextIO:
    raw = open(number, "wb", buffering=0, closefd=False)
    raw.name = like.name
    return io.TextIOWrapper(raw, encoding=like.encoding, errors=like.errors, write_through=True)


def _run(code: types.CodeType, names: dict[str, object]) -> int:
    """Run the program; its exit code, with what it did not catch told on stderr. -2: interrupted."""
    try:
        exec(code, names)  # noqa: S102 - the user's program is what this process is for
    except SystemExit as error:
        return _exit_code(error.code)
    except BaseException as error:  # noqa: BLE001 - the edge of a user's program
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this frame
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _exit_code(given: object) -> int:
    if given is None:
        return 0
    if isinstance(given, int):
        return given & 0xFF if -(2**63) <= given < 2**63 else 0xFF
    sys.stderr.write(f"{given}\n")
    return 1


def _finish(code: int, names: dict[str, object], borrowed: set[str]) -> NoReturn:
    """End as an interpreter does, but leave alone what was preloaded: to tear that down takes ten times the fork."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    own = [vars(module) for name, module in sys.modules.items() if name not in borrowed]
    for namespace in (names, *own):
        # An open file is flushed when it goes; what goes together is left to the collector.
        for name in list(namespace):
            if name != "__builtins__":
                namespace[name] = None
    gc.collect()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except OSError:
        code = 120  # as CPython does
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.set_inheritable(True)
    options = json.loads(sys.argv[2])
    folder, modules = os.getcwd(), options["preload"]
    sys.path.pop(0)  # this file's folder
    _preload(modules, sys.argv[3:])
    fork = bool(modules)
    if fork and (name := _shadowed(folder)):
        sys.stderr.write(f"{name} in the folder has the name of a loaded module: every call starts an interpreter\n")
        fork = False
    requests.set_inheritable(False)
    gc.collect()
    gc.freeze()
    children = Children(requests, options["command"])
    try:
        call = children.serve(fork)
    except BaseException:
        children.end()
        raise
    if call is None:
        children.end()
        if options["outputs"]:
            shutil.rmtree(options["outputs"], ignore_errors=True)
        return
    borrowed = set(sys.modules)
    try:
        code, names = _become(*call, options["command"][-1])
    except BaseException as error:  # noqa: BLE001 - not even a program: say so as an interpreter would
        sys.excepthook(type(error), error, None)
        os._exit(1)
    _finish(_run(code, names), names, borrowed)


if __name__ == "__main__":
    _main()
