"""What a process tells about itself, and what is made of it; the processes are real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from native_service.triton import stubs
from native_service.triton.stubs import StubRecord
from nereid_backend import pulse

# A model's process in a few lines: a run sleeps for what stands on a line of stdin, without the interpreter's lock or,
# for "hold" and "spin", with it.
MODEL = """
import ctypes, sys, time
from nereid_backend import pulse
pulse.BEAT_S = 0.05

def execute(requests):
    verb, seconds = requests[0].split()
    if verb == "hold":
        ctypes.PyDLL(None).usleep(int(1e6 * float(seconds)))
    elif verb == "spin":
        sys.setswitchinterval(60)
        end = time.monotonic() + float(seconds)
        while time.monotonic() < end:
            pass
    elif verb == "fail":
        raise ZeroDivisionError
    else:
        time.sleep(float(seconds))
    return requests

execute = pulse.told(execute)
print("ready", flush=True)
for line in sys.stdin:
    try:
        print(execute([line]), flush=True)
    except ZeroDivisionError:
        print("failed", flush=True)
"""
SILENT_S, GRACE_S, LIMIT_S = 1.0, 0.2, 0.5


class Model:
    """A process that runs ``m``, and the record of it that a server with this id keeps."""

    def __init__(self, folder: Path) -> None:
        script = folder / "repository" / "m" / "1" / "model.py"
        script.parent.mkdir(parents=True)
        script.write_text(MODEL)
        self.folder = folder / pulse.PULSE_FOLDER
        self.folder.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, "NEREID_RUN": str(folder), "PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.heard()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def pulse(self) -> pulse.Pulse:
        found = pulse.read(self.folder / str(self.process.pid))
        assert found is not None
        return found

    def record(self) -> StubRecord:
        record = StubRecord(self.folder.with_name("repository"), "nereid-test-none-", self.folder)
        record.take_note(os.getpid(), "m", set())
        return record

    def hung(self, limit_s: float | None = None) -> list[str]:
        limits, record = {} if limit_s is None else {"m": limit_s}, self.record()
        found = record.find_hung(limits)
        assert set(found) <= {self.process.pid}
        assert record.find_hung(limits) == {}, "told twice"
        return [*found.values()]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    monkeypatch.setattr(stubs, "_SILENT_S", SILENT_S)
    monkeypatch.setattr(stubs, "_GRACE_S", GRACE_S)
    made = Model(tmp_path)
    yield made
    made.process.kill()
    made.process.communicate()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "not reached"
        time.sleep(0.02)


def test_an_idle_process_beats_and_is_never_taken_for_one_that_hangs(model: Model) -> None:
    first = model.pulse()
    until(lambda: model.pulse().beat_ns > first.beat_ns + SILENT_S * 1.5e9)
    assert (model.pulse().busy_since_ns, model.hung(LIMIT_S), model.hung()) == (0, [], [])


@pytest.mark.parametrize("way", ["sleep", "hold", "fail"])
def test_a_run_is_told_from_its_begin_to_its_end_however_it_ends(model: Model, way: str) -> None:
    before = time.monotonic_ns()
    model.say(f"{way} 0.3")
    if way != "fail":
        until(lambda: model.pulse().busy_since_ns > before)
    assert model.heard()
    assert model.pulse().busy_since_ns == 0
    assert model.pulse().beat_ns > before


@pytest.mark.parametrize("way", ["sleep", "hold"])
def test_a_run_past_its_limit_hangs_and_one_without_a_limit_may_take_for_ever(model: Model, way: str) -> None:
    model.say(f"{way} 3")
    until(lambda: model.hung(LIMIT_S))
    assert model.hung(LIMIT_S) == ["model 'm': a run goes on past its time limit of 0.5 s; its process is killed"]
    assert (model.hung(), model.hung(60)) == ([], [])
    model.heard()
    assert model.hung(LIMIT_S) == []  # also right after a run in which nothing could beat


def test_a_process_that_stands_still_is_noticed_while_it_runs_nothing_and_only_then(model: Model) -> None:
    model.process.send_signal(signal.SIGSTOP)
    until(model.hung)
    assert model.hung() == ["model 'm': it gave no sign of life for 1 s; its process is killed"]
    model.process.send_signal(signal.SIGCONT)
    until(lambda: not model.hung())
    time.sleep(1.5 * pulse._LATE_S)  # a call that came meanwhile would be here by now
    model.say("sleep 60")
    until(lambda: model.pulse().busy_since_ns)
    model.process.send_signal(signal.SIGSTOP)
    time.sleep(1.5 * SILENT_S)
    assert model.hung() == []


@pytest.mark.parametrize("running", [True, False], ids=["in a run", "before one"])
def test_a_process_that_stood_still_ends_before_it_goes_on_with_a_call_that_may_be_lost(
    model: Model, running: bool
) -> None:
    if running:
        model.say("sleep 1")
        until(lambda: model.pulse().busy_since_ns)
    model.process.send_signal(signal.SIGSTOP)
    if not running:
        model.say("sleep 0")
    time.sleep(1.5 * pulse._STOOD_STILL_S)
    model.process.send_signal(signal.SIGCONT)
    assert model.heard() == ""
    assert model.process.wait(20) == -signal.SIGKILL


@pytest.mark.parametrize("way", ["hold", "spin"])
def test_a_run_that_holds_the_interpreter_has_not_stood_still(model: Model, way: str) -> None:
    for _ in range(2):
        model.say(f"{way} {1.5 * pulse._STOOD_STILL_S}")
        assert model.heard() == f"['{way} {1.5 * pulse._STOOD_STILL_S}\\n']"


def test_time_in_which_the_supervisor_stood_still_as_well_does_not_count(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stubs, "_STOOD_STILL_S", SILENT_S)
    record = model.record()
    model.process.send_signal(signal.SIGSTOP)
    time.sleep(1.5 * SILENT_S)
    assert record.find_hung({}) == {}
    until(lambda: record.find_hung({}))


def test_nobody_is_told_anything_outside_of_nereid_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def execute(requests: list[object]) -> list[object]:
        return requests

    monkeypatch.delenv("NEREID_RUN", raising=False)
    assert pulse.told(execute) is execute
    monkeypatch.setenv("NEREID_RUN", str(tmp_path))  # a supervisor of an older version
    assert pulse.told(execute) is execute


def test_a_file_that_tells_nothing_is_no_sign_of_anything(model: Model) -> None:
    (model.folder / str(model.process.pid)).write_bytes(b"")
    assert model.hung(LIMIT_S) == []
    (model.folder / str(model.process.pid)).unlink()
    assert model.hung(LIMIT_S) == []


def test_a_process_that_cannot_tell_how_it_is_serves_unwatched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / pulse.PULSE_FOLDER).mkdir()
    (folder / str(os.getpid())).symlink_to("/dev/full")
    monkeypatch.setenv("NEREID_RUN", str(tmp_path))
    assert pulse.told(lambda requests: requests)(["a"]) == ["a"]
    assert "No space left" in capsys.readouterr().err
