"""The small process that starts a program's children, run as a script by the program's own interpreter.

A process of its own has no threads, which makes ``fork`` safe, is small, which makes it fast, and outlives the model's
process by a moment, in which it ends what that one left running. It talks over a SOCK_SEQPACKET socket: a message is
one call's additions to the environment as JSON, with four descriptors: stdin, stdout, stderr, and a socket for this
call. On that it answers ``pid N`` and then ``exit N`` (negative: the signal); when the other side closes it, the
child's process group is terminated.

Given modules to preload it imports them once and forks itself for every call; the fork then becomes what
``python -u main.py`` would be. One fork is made ahead (``Children``) and is already all of that which needs no call
(``Program``). A program with anything but the standard library in here would import it into every such child: this file
uses nothing else, and nothing of this project; it is one file, because a second one would be a module of theirs, too.
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
    from collections.abc import Container, Sequence
    from typing import NoReturn, TextIO

    Call = tuple[bytes, list[int]]
    """The additions to the environment as JSON, and the descriptors: stdin, stdout, stderr, control."""

_KILL_AFTER_S = 0.5
# To fork takes a millisecond, in which nobody is told that a child has ended.
_SPARE_AFTER_S = 0.02
_LARGEST_MESSAGE = 1024 * 1024
_DESCRIPTORS = 4
_INT = array.array("i")
# Their threads (OpenBLAS) are made again after a fork by handlers of their own.
_FORK_SAFE = ("numpy", "scipy")


class Children:
    """The running children of one model, by process id: the socket of their call.

    With ``fork`` they are forks of this process, and one more is kept ready as soon as there is nothing else to do: the
    spare, which takes the next call. So a call pays neither for the fork nor for the pages that are copied after it.
    """

    def __init__(self, requests: socket.socket, command: list[str], *, fork: bool) -> None:
        self._requests, self._command, self._fork = requests, command, fork
        self._controls: dict[int, socket.socket] = {}
        self._to_kill: list[tuple[float, int]] = []
        self._spare: tuple[int, socket.socket] | None = None
        self._wants_spare = fork
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, _nothing)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._selector.register(requests, selectors.EVENT_READ, None)
        self._selector.register(self._woken, selectors.EVENT_READ, None)

    def serve(self) -> socket.socket | None:
        """Until the other side is gone (None), or in a forked child: the socket from which its call comes."""
        while True:
            events = self._selector.select(self._patience_s())
            if not events and self._lacks_spare and (call := self._make_spare(())) is not None:
                return call
            for key, _ in events:
                if key.data is not None:
                    self._terminate(key.data)
                elif key.fileobj is not self._requests:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._woken, 4096)
                else:
                    received = self._receive()
                    if received is None:
                        return None
                    if (call := self._start(*received)) is not None:
                        return call
            self._reap()
            while self._to_kill and self._to_kill[0][0] <= time.monotonic():
                _kill(self._to_kill.pop(0)[1], signal.SIGKILL, self._controls)

    def end(self) -> None:
        """Kill what still runs."""
        for pid in (*self._controls, *([self._spare[0]] if self._spare else ())):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    @property
    def _lacks_spare(self) -> bool:
        return self._spare is None and self._wants_spare

    def _patience_s(self) -> float | None:
        """How long to wait for something to happen."""
        waits = [self._to_kill[0][0] - time.monotonic()] if self._to_kill else []
        if self._lacks_spare:
            waits.append(_SPARE_AFTER_S if self._controls else 0.0)
        return max(0.0, min(waits)) if waits else None

    def _receive(self) -> Call | None:
        try:
            message, descriptors = _received(self._requests)
        except ConnectionError:
            return None
        return (message, descriptors) if message else None

    def _start(self, message: bytes, descriptors: list[int]) -> socket.socket | None:
        """Start a child; in a forked child the socket from which its call comes, else None."""
        control = socket.socket(fileno=descriptors[3])
        pid, reason = None, "there is no child for the call"
        try:
            if not self._fork:
                pid = self._spawn(json.loads(message), descriptors)
            elif (pid := self._hand_over(message, descriptors[:3])) is None:
                if (call := self._make_spare(descriptors)) is not None:
                    control.detach()
                    return call
                pid = self._hand_over(message, descriptors[:3])
        except OSError as error:
            reason = error.strerror or str(error)
        for descriptor in descriptors[:3]:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            control.send(f"failed {reason}".encode() if pid is None else b"pid %d" % pid)
        if pid is None:
            control.close()
        else:
            self._controls[pid] = control
            self._selector.register(control, selectors.EVENT_READ, pid)
        return None

    def _make_spare(self, pending: Sequence[int]) -> socket.socket | None:
        """Fork a child that waits for its call; in that child the socket from which it comes, else None.

        ``pending`` are descriptors of a call that waits, which are not the child's. Raises OSError when one waits.
        """
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with contextlib.ExitStack() as unused:
                unused.enter_context(ours)
                unused.enter_context(theirs)
                pid = _fork()
                unused.pop_all()
        except OSError:
            if pending:
                raise
            self._wants_spare = False  # until the next call: the machine has no room now
            return None
        if pid == 0:
            ours.close()
            self._forget(pending)
            return theirs
        theirs.close()
        self._spare = pid, ours
        return None

    def _hand_over(self, message: bytes, descriptors: list[int]) -> int | None:
        """Give a call to the spare; its process id, None when there is none or it has died."""
        if self._spare is None:
            return None
        pid, call = self._spare
        self._spare, self._wants_spare = None, True
        try:
            with call:
                socket.send_fds(call, [message], descriptors)
        except ConnectionError:
            return None
        return pid

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

    def _forget(self, pending: Sequence[int]) -> None:
        """In a forked child: close what belongs to the parent."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for descriptor in (self._woken, self._wake, *pending):
            os.close(descriptor)
        for other in (self._requests, *self._controls.values()):
            other.close()

    def _terminate(self, pid: int) -> None:
        self._selector.unregister(self._controls[pid])
        _kill(pid, signal.SIGTERM, self._controls)
        self._to_kill.append((time.monotonic() + _KILL_AFTER_S, pid))

    def _reap(self) -> None:
        while self._controls or self._spare:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            # Before its id is free for others: whatever it left in its group ends with it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(ended.si_pid, signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            if self._spare is not None and self._spare[0] == ended.si_pid:
                self._spare[1].close()
                self._spare, self._wants_spare = None, False  # what killed it may kill the next one, too
            control = self._controls.pop(ended.si_pid, None)
            if control is not None:
                with contextlib.suppress(OSError):
                    control.send(b"exit %d" % os.waitstatus_to_exitcode(status))
                with contextlib.suppress(KeyError):
                    self._selector.unregister(control)
                control.close()


def _received(requests: socket.socket) -> Call:
    """A message and its descriptors; both empty when the other side is gone."""
    # Not recv_fds, which ignores the flag: every child would inherit the descriptors of its siblings.
    message, ancillary, _, _ = requests.recvmsg(
        _LARGEST_MESSAGE, socket.CMSG_SPACE(_DESCRIPTORS * _INT.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    descriptors = array.array("i", b"".join(data for _, _, data in ancillary))
    return message, descriptors.tolist()


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


class Program:
    """A forked copy of this process on its way to what ``python -u main.py`` is before its first line.

    What is made here is made ahead of the call; ``begin`` does the rest. Whatever this touches is copied now, not then.
    """

    def __init__(self, path: str) -> None:
        os.setsid()
        # A stream asks once whether it can seek: until the call's descriptors come these are of the same kind.
        read, write = os.pipe()
        for number in (1, 2):
            os.dup2(write, number)
        os.close(read)
        os.close(write)
        self._take_streams()
        for name in ("random", "numpy.random"):
            if name in sys.modules:
                sys.modules[name].seed()
        self.path = os.path.abspath(path)
        self.names = self._take_main(path)
        self._code, self._seen = self._compiled_ahead()
        json.loads("{}")
        os.environ.update({"NEREID_OUTPUT_PATH": ""})
        del os.environ["NEREID_OUTPUT_PATH"]
        self._last_module = next(reversed(sys.modules.values()))
        gc.collect()
        gc.freeze()

    def begin(self, message: bytes, descriptors: list[int]) -> types.CodeType:
        """Take the call's environment and descriptors; the code to run. Raises what compiling it does."""
        for target, descriptor in enumerate(descriptors):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.environ.update(json.loads(message))
        if self._code is not None and self._seen == _identity(self.path):
            return self._code
        return self._compiled()

    def own_namespaces(self) -> list[dict[str, object]]:
        """The names of the program and of the modules it has imported itself, the latest first.

        Not by name: to look at each that was preloaded would copy its page.
        """
        own = [self.names]
        for module in reversed(sys.modules.values()):
            if module is self._last_module:
                break
            if isinstance(module, types.ModuleType):
                own.append(vars(module))
        return own

    def _take_streams(self) -> None:
        old = sys.stdin, sys.stdout, sys.stderr
        fresh = (
            open(0, encoding=old[0].encoding, errors=old[0].errors, closefd=False),
            *(_unbuffered(number, stream) for number, stream in ((1, old[1]), (2, old[2]))),
        )
        for name, text in zip(("stdin", "stdout", "stderr"), fresh, strict=True):
            setattr(sys, name, text)
            setattr(sys, f"__{name}__", text)

    def _take_main(self, path: str) -> dict[str, object]:
        module = types.ModuleType("__main__")
        module.__file__ = self.path
        module.__dict__["__builtins__"] = sys.modules["builtins"]
        module.__dict__["__cached__"] = None
        module.__loader__ = SourceFileLoader("__main__", self.path)
        sys.argv = [path]
        sys.path.insert(0, os.path.dirname(self.path))
        sys.modules["__main__"] = module
        return module.__dict__

    def _compiled_ahead(self) -> tuple[types.CodeType | None, object]:
        """The code and the file it is of; no code where compiling it says something, which belongs to the call."""
        seen = _identity(self.path)
        with warnings.catch_warnings(record=True) as said:
            try:
                code = self._compiled()
            except Exception:  # noqa: BLE001 - it is raised again in the call
                return None, seen
        return (None if said else code), seen

    def _compiled(self) -> types.CodeType:
        with open(self.path, "rb") as source:
            return compile(source.read(), self.path, "exec", dont_inherit=True)


def _identity(path: str) -> object:
    """What changes with the content of a file; None when it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


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


def _finish(code: int, program: Program) -> NoReturn:
    """End as an interpreter does, but leave alone what was preloaded: to tear that down takes ten times the fork."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    for namespace in program.own_namespaces():
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
    children = Children(requests, options["command"], fork=fork)
    try:
        call = children.serve()
    except BaseException:
        children.end()
        raise
    if call is None:
        children.end()
        if options["outputs"]:
            shutil.rmtree(options["outputs"], ignore_errors=True)
        return
    program = Program(options["command"][-1])
    with call:
        message, descriptors = _received(call)
    if not message:  # the parent has ended
        os._exit(0)
    try:
        code = program.begin(message, descriptors)
    except BaseException as error:  # noqa: BLE001 - not even a program: say so as an interpreter would
        sys.excepthook(type(error), error, None)
        os._exit(1)
    _finish(_run(code, program.names), program)


if __name__ == "__main__":
    _main()
