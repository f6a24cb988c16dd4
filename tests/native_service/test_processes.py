import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from serving import alive

from native_service.children import processes


def until_dead(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while alive({pid}) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive({pid})


def test_a_process_whose_first_thread_has_ended_is_alive_while_another_runs() -> None:
    code = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=[600]).start(); "
    process = subprocess.Popen([sys.executable, "-c", f"{code}ctypes.CDLL(None).pthread_exit(None)"])
    first = Path(f"/proc/{process.pid}/stat")
    try:
        deadline = time.monotonic() + 60
        while " Z " not in first.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert alive({process.pid}) == {process.pid}
    finally:
        process.kill()
    process.wait()
    assert alive({process.pid}) == set()


def test_a_child_dies_with_its_parent_even_when_that_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    parent = subprocess.Popen(
        [sys.executable, "-c", f"""
import asyncio, os, pathlib
from native_service.children import processes
async def main():
    child = await processes.start(["sleep", "60"], os.environ)
    pathlib.Path({str(note)!r}).write_text(str(child.process.pid))
    await child.process.wait()
asyncio.run(main())
"""])  # fmt: skip
    deadline = time.monotonic() + 60
    while not (note.exists() and note.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    pid = int(note.read_text())
    while b"sleep" not in (Path("/proc") / str(pid) / "cmdline").read_bytes() and time.monotonic() < deadline:
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    assert until_dead(pid)


def test_the_end_of_a_child_is_seen_while_a_grandchild_holds_its_pipes() -> None:
    async def scenario() -> None:
        child = await processes.start(["sh", "-c", "sleep 60 & echo $!; exit 3"], os.environ)
        grandchild = int(await child.stdout.readline())
        assert await asyncio.wait_for(child.process.wait(), 5) == 3
        assert alive({grandchild})
        await child.stop(grace_s=0)
        assert until_dead(grandchild)

    asyncio.run(scenario())


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    async def scenario() -> None:
        child = await processes.start(["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done"], os.environ)
        await child.stdout.readline()
        started = time.monotonic()
        assert await child.stop(grace_s=0.3) == -signal.SIGKILL
        assert 0.3 <= time.monotonic() - started < 3

    asyncio.run(scenario())


def test_a_program_that_is_not_there_ends_with_127() -> None:
    async def scenario() -> None:
        child = await processes.start(["/nonexistent/program"], os.environ)
        assert await child.process.wait() == 127
        assert b"cannot start /nonexistent/program: No such file" in await child.stderr.read()

    asyncio.run(scenario())


def test_lines_are_split_and_endless_ones_cut() -> None:
    async def scenario() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(b"one\r\n\ntwo\xff\n" + b"x" * 100_000)
        reader.feed_data(b"\nlast")
        reader.feed_eof()
        got = [line async for line in processes.lines(reader)]
        assert got[:3] == ["one", "", "two\ufffd"]
        assert "".join(got[3:-1]) == "x" * 100_000
        assert got[-1] == "last"

    asyncio.run(scenario())


def test_a_start_for_want_of_descriptors_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made, pipe = 0, os.pipe

    def one_pipe_only() -> tuple[int, int]:
        nonlocal made
        made += 1
        if made > 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return pipe()

    async def scenario() -> tuple[int, int]:
        before = len(list(Path("/proc/self/fd").iterdir()))
        monkeypatch.setattr(os, "pipe", one_pipe_only)
        with pytest.raises(OSError, match="Too many open files"):
            await processes.start(["true"], os.environ)
        await asyncio.sleep(0)  # transports close a turn later
        return before, len(list(Path("/proc/self/fd").iterdir()))

    before, after = asyncio.run(scenario())
    assert after == before
