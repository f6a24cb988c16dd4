"""Children of a program, cold (an interpreter each) and warm (a fork each): what they can observe is the same."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from serving import alive

from nereid_backend.errors import Cancelled, EngineError, TimeLimitExceeded
from nereid_backend.scripts import child
from nereid_backend.scripts.link import EXIT, FRAME, STDERR, STDOUT, Header, Link

INTERRUPTIBLE = signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""Not where the tests run in a shell's background; every child inherits that."""
PRELOAD = {"cold": (), "warm": ("json", "random", "decimal")}


@contextmanager
def worker_of(folder: Path, preload: tuple[str, ...], **environment: str) -> Iterator[child.Worker]:
    outputs = folder / "outputs"
    outputs.mkdir(exist_ok=True)
    variables = {"PATH": os.environ["PATH"], **environment}
    command = [sys.executable, "-u", "main.py"]
    worker = child.Worker(Path(sys.executable), command, folder, variables, outputs, preload)
    try:
        yield worker
    finally:
        worker.close()


class Program:
    """A main.py and its worker; ``run`` is one call."""

    def __init__(self, folder: Path, worker: child.Worker) -> None:
        self.folder, self.worker = folder, worker

    def write(self, text: str) -> None:
        (self.folder / "main.py").write_text(text)

    def run(self, *, data: bytes = b"", cancelled: Any = None, limit_s: float = 30, **environment: str) -> Result:
        ours, theirs = socket.socketpair()
        link = Link(theirs, Header((), None, live=True), b"")
        link.start()
        received = bytearray()
        reader = threading.Thread(
            target=lambda: [received.extend(part) for part in iter(lambda: ours.recv(65536), b"")]
        )
        reader.start()
        stdin = os.memfd_create("input")
        os.write(stdin, data)
        os.lseek(stdin, 0, os.SEEK_SET)
        try:
            ended = child.run(
                self.worker,
                environment,
                stdin,
                link=link,
                is_cancelled=cancelled or (lambda: False),
                time_limit_s=limit_s,
            )
        finally:
            link.close()
            reader.join()
            ours.close()
            os.close(stdin)
        streams = {STDOUT: b"", STDERR: b"", EXIT: b""}
        while received:
            kind, length = FRAME.unpack_from(received)
            streams[kind] += received[FRAME.size : FRAME.size + length]
            del received[: FRAME.size + length]
        assert int(streams[EXIT]) == ended.code
        assert ended.stderr == streams[STDERR][-child.LOG_BYTES :]
        return Result(ended.code, streams[STDOUT].decode(), streams[STDERR].decode())


class Result(tuple[int, str, str]):
    def __new__(cls, code: int, out: str, err: str) -> Result:
        return super().__new__(cls, (code, out, err))

    code = property(lambda self: self[0])
    out = property(lambda self: self[1])
    err = property(lambda self: self[2])


@pytest.fixture(scope="module", params=["cold", "warm"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    folder = tmp_path_factory.mktemp(request.param)
    with worker_of(folder, PRELOAD[request.param]) as worker:
        yield Program(folder, worker)


@pytest.fixture
def program(shared: Program) -> Program:
    """A program of either kind, in a folder with nothing of the tests before it."""
    for path in shared.folder.iterdir():
        if path.is_file():
            path.unlink()
    return shared


SPAWNING = """
import multiprocessing
def add_one(x):
    return x + 1
if __name__ == "__main__":
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(pool.map(add_one, [1]))
"""
STREAMS = """
import sys
print(sys.stdout.encoding, sys.stdout.line_buffering, sys.stdout.write_through, sys.stderr.errors, sys.stdout.name)
"""
AT_EXIT = """
import atexit, threading, time
class Last:
    def __del__(self):
        print("deleted")
last = Last()
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(.2), print("thread"))).start()
print("end")
"""
UNCLOSED = """
file = open("left", "w")
file.write("all of it")
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("print('hello')", (0, "hello\n", "")),
        ("import sys; sys.exit()", (0, "", "")),
        ("import sys; sys.exit(3)", (3, "", "")),
        ("import sys; sys.exit(-1)", (255, "", "")),
        ("import sys; sys.exit('the text')", (1, "", "the text\n")),
        ("import os; os._exit(7)", (7, "", "")),
        ("import os; os.abort()", (-6, "", "")),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", (-11, "", "")),
        ("raise KeyboardInterrupt", (-2, "", None)),
        ("this is no Python", (1, "", None)),
        (AT_EXIT, (0, "end\nthread\nat exit\ndeleted\n", "")),
        (UNCLOSED, (0, "", "")),
        ("import sys; print(sys.argv, __name__, __spec__, __doc__)", (0, "['main.py'] __main__ None None\n", "")),
        ("print(__builtins__.__name__, sorted(n for n in globals() if n[0] != '_'))", (0, "builtins []\n", "")),
        ("import os; print(os.listdir('/proc/self/fd'))", (0, "['0', '1', '2', '3']\n", "")),
        ("import signal as s; print([str(s.getsignal(n)) for n in (13, 17)])", (0, "['1', '0']\n", "")),
        ("import signal as s; print(s.getsignal(2) is s.default_int_handler)", (0, f"{INTERRUPTIBLE}\n", "")),
        ("import os; print(os.getpgrp() == os.getpid() == os.getsid(0))", (0, "True\n", "")),
        ("import sys; print(sys.stdin.read(), sys.stdin.isatty())", (0, "the input False\n", "")),
        (STREAMS, (0, "utf-8 False True backslashreplace <stdout>\n", "")),
        (SPAWNING, (0, "[2]\n[2]\n", "")),
        ("import pickle\nclass C: pass\nprint(type(pickle.loads(pickle.dumps(C()))) is C)", (0, "True\n", "")),
        (
            "import subprocess as s, sys; print(s.check_output([sys.executable, '-c', 'print(5)']))",
            (0, "b'5\\n'\n", ""),
        ),
        ("from __future__ import annotations\nx: Missing = 1\nprint(x)", (0, "1\n", "")),
    ],
)
def test_a_program_cannot_tell_how_it_was_started(program: Program, text: str, expected: tuple[Any, ...]) -> None:
    program.write(text)
    result = program.run(data=b"the input")
    assert result[:2] == expected[:2], result
    assert expected[2] is None or result.err == expected[2]
    assert {p.name: p.read_text() for p in program.folder.iterdir() if p.is_file() and p.suffix != ".py"} == (
        {"left": "all of it"} if text == UNCLOSED else {}
    )


def test_its_place_is_its_folder(program: Program) -> None:
    (program.folder / "neighbour.py").write_text("value = 5\n")
    program.write("import os, sys, neighbour; print(os.getcwd(), __file__, sys.path[0], neighbour.value)")
    folder = program.folder
    assert program.run().out == f"{folder} {folder / 'main.py'} {folder} 5\n"


def test_a_traceback_starts_in_the_program(program: Program) -> None:
    program.write("def f():\n    1 / 0\nf()\n")
    code, _, err = program.run()
    lines = [line.strip() for line in err.splitlines() if "^" not in line and "~" not in line]
    file = program.folder / "main.py"
    assert code == 1
    assert lines == [
        "Traceback (most recent call last):",
        f'File "{file}", line 3, in <module>',
        "f()",
        f'File "{file}", line 2, in f',
        "1 / 0",
        "ZeroDivisionError: division by zero",
    ]


def test_calls_share_no_state(program: Program) -> None:
    program.write(
        "import json, os, random, decimal\n"
        "print(hasattr(json, 'mark'), os.environ.get('SET'), os.environ['GIVEN'], decimal.getcontext().prec)\n"
        "json.mark = 1; os.environ['SET'] = 'x'; decimal.getcontext().prec = 3; print(random.random())\n"
    )
    first, second = (program.run(GIVEN=given).out.splitlines() for given in ("a", "b"))
    assert (first[0], second[0]) == ("False None a 28", "False None b 28")
    assert first[1] != second[1]


def test_many_run_at_the_same_time(program: Program) -> None:
    # Each waits for all the others: a queue would never end.
    program.write(
        "import os, sys, time\nopen('here' + os.environ['N'], 'w')\n"
        "while sum(n.startswith('here') for n in os.listdir()) < 6: time.sleep(.01)\n"
    )
    results: list[int] = []
    threads = [threading.Thread(target=lambda n=n: results.append(program.run(N=str(n)).code)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [0] * 6


def pids_in(file: Path) -> set[int]:
    deadline = time.monotonic() + 60
    while not file.exists() or not file.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return {int(word) for word in file.read_text().split()}


def until_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + 30
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert alive(pids) == set()


FAMILY = (
    "import os, signal, subprocess, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "other = subprocess.Popen(['sleep', '600'])\nprint(os.getpid(), other.pid, file=open('pids', 'w'))\n"
    "time.sleep(600)\n"
)


def test_a_cancelled_call_ends_the_group_also_when_it_does_not_listen(program: Program) -> None:
    program.write(FAMILY)
    file = program.folder / "pids"
    with pytest.raises(Cancelled):
        program.run(cancelled=file.exists)
    until_gone(pids_in(file))


def test_the_time_limit_ends_a_call(program: Program) -> None:
    program.write("import time; time.sleep(600)")
    with pytest.raises(TimeLimitExceeded, match=r"0\.3 s"):
        program.run(limit_s=0.3)


def test_what_a_program_leaves_behind_in_its_group_ends_with_it(program: Program) -> None:
    program.write("import subprocess\nprint(subprocess.Popen(['sleep', '600']).pid)\n")
    result = program.run()
    assert result.code == 0
    until_gone({int(result.out)})


def test_output_that_a_stranger_holds_open_does_not_hold_the_call(program: Program) -> None:
    program.write(
        "import subprocess\np = subprocess.Popen(['sleep', '600'], start_new_session=True)\nprint(p.pid, flush=True)\n"
    )
    result = program.run()
    os.kill(int(result.out), signal.SIGKILL)
    assert result.code == 0


def test_a_killed_worker_fails_its_calls_and_the_next_gets_a_new_one(program: Program) -> None:
    program.write(FAMILY)
    failed: list[Exception] = []

    def call() -> None:
        try:
            program.run()
        except EngineError as error:
            failed.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    family = pids_in(program.folder / "pids")
    process = program.worker._process
    assert process is not None
    process.kill()
    thread.join(timeout=20)
    assert [str(error) for error in failed] == ["the process that started the program has died; try again"]
    until_gone(family)
    program.write("print('again')")
    assert program.run().out == "again\n"


def test_the_end_of_the_model_s_process_ends_its_children(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(FAMILY)
    text = (
        "import sys, os; sys.path[:0] = sys.argv[2:]\nfrom pathlib import Path\n"
        "from nereid_backend.scripts import child\nfolder = Path(sys.argv[1])\n"
        "w = child.Worker(Path(sys.executable), [sys.executable, '-u', 'main.py'], folder, {}, folder / 'outputs')\n"
        "child.run(w, {}, os.open('/dev/null', os.O_RDONLY), link=None, is_cancelled=bool, time_limit_s=60)\n"
    )
    import subprocess

    (tmp_path / "outputs").mkdir()
    owner = subprocess.Popen([sys.executable, "-c", text, str(tmp_path), str(Path(child.__file__).parents[2])])
    family = pids_in(tmp_path / "pids")
    owner.kill()
    owner.wait()
    until_gone(family)
    deadline = time.monotonic() + 60
    while (tmp_path / "outputs").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not (tmp_path / "outputs").exists()


def waiting_child(worker: child.Worker) -> int:
    """The process id of the fork that waits for the next call of a warm worker where nothing runs."""
    assert worker._process is not None
    deadline = time.monotonic() + 30
    while not (found := children_of(worker._process.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (pid,) = found
    return pid


def children_of(parent: int) -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.add(int(entry.name))
    return found


def test_a_child_waits_for_the_next_call_and_costs_none_when_it_is_killed(tmp_path: Path) -> None:
    with worker_of(tmp_path, PRELOAD["warm"]) as worker:
        program = Program(tmp_path, worker)
        program.write("import os; print(os.getpid())")
        program.run()
        first = waiting_child(worker)
        assert program.run() == (0, f"{first}\n", "")
        second = waiting_child(worker)
        os.kill(second, signal.SIGKILL)
        until_gone({second})
        code, _, told = program.run()
        assert (code, told) == (0, "")
        third = waiting_child(worker)
        assert program.run() == (0, f"{third}\n", "")
        last = waiting_child(worker)
        assert worker._process is not None
        worker._process.kill()
        until_gone({last})


def test_a_waiting_child_runs_the_program_as_it_is_when_the_call_comes(tmp_path: Path) -> None:
    with worker_of(tmp_path, PRELOAD["warm"]) as worker:
        program = Program(tmp_path, worker)
        for text, expected in [
            ("print(1)", (0, "1\n", "")),
            ("print(2)", (0, "2\n", "")),
            ("no Python", (1, "", "SyntaxError")),
            ("print(3 is 3)", (0, "True\n", "SyntaxWarning")),
            ("print(3 is 3)", (0, "True\n", "SyntaxWarning")),
        ]:
            program.write(text)
            code, out, err = program.run()
            assert (code, out) == expected[:2]
            assert expected[2] in err
            waiting_child(worker)


def test_a_program_that_cannot_be_started_says_so(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    worker = child.Worker(Path(sys.executable), [str(tmp_path / "model")], tmp_path, {}, outputs)
    try:
        with pytest.raises(EngineError, match=r"cannot be started .*No such file"):
            Program(tmp_path, worker).run()
    finally:
        worker.close()


def test_a_local_module_with_the_name_of_a_loaded_one_switches_warmth_off(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("value = 'mine'\n")
    with worker_of(tmp_path, ("decimal",)) as worker:
        program = Program(tmp_path, worker)
        program.write("import json; print(json.value)")
        assert program.run().out == "mine\n"


def test_a_module_that_starts_threads_is_left_to_the_calls(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    with worker_of(folder, ("threaded", "decimal"), PYTHONPATH=str(elsewhere)) as worker:
        program = Program(folder, worker)
        program.write("import sys; print('threaded' in sys.modules, 'decimal' in sys.modules)")
        assert program.run().out == "False True\n"


def test_a_reader_that_stops_slows_the_program_and_loses_nothing(program: Program) -> None:
    program.write("import sys\nfor i in range(100_000): print(i, 'x' * 50)\nprint('end', file=sys.stderr)")
    ours, theirs = socket.socketpair()
    link = Link(theirs, Header((), None, live=True), b"")
    link.start()
    ended: list[child.Ended] = []

    def call() -> None:
        with Path(os.devnull).open("rb") as nothing:
            ended.append(
                child.run(program.worker, {}, nothing.fileno(), link=link, is_cancelled=lambda: False, time_limit_s=60)
            )
        link.close()

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(1)
    assert thread.is_alive()
    assert len(link._pending) < 512 * 1024
    received = bytearray()
    while part := ours.recv(1 << 20):
        received += part
    thread.join()
    ours.close()
    out = b""
    while received:
        kind, length = FRAME.unpack_from(received)
        out += received[FRAME.size : FRAME.size + length] if kind == STDOUT else b""
        del received[: FRAME.size + length]
    assert out.decode().split("\n")[:-1] == [f"{i} {'x' * 50}" for i in range(100_000)]
    assert ended[0].stderr == b"end\n"
