import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from native_service.proto import inference_pb2 as pb

TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(int(sys.argv[1]), termios.TIOCSCTTY, 0)
os.execv(sys.argv[2], sys.argv[2:])
"""

# Conversion needs real bundles; here a model is an empty file and converting it is a name.
CONVERT = """
from types import SimpleNamespace
from nereid_backend.errors import ManifestError
from nereid_backend.spec import ModelSpec
import time

def model_name(path):
    return path.name

def convert(source, target, *, name, **_):
    (target / name / "1").mkdir(parents=True)
    if name.startswith("wrong"):
        raise ManifestError("manifest.yaml: outputs are missing")
    if name.startswith("slow"):
        time.sleep(60)
    return SimpleNamespace(spec=ModelSpec(name, "fake", "fake", (), (), ()), notes=())

def check_device(spec):
    pass
"""


class Nereid:
    """``nereid serve`` on a folder, with the fake tritonserver."""

    def __init__(self, tmp_path: Path, tritonserver: Path) -> None:
        self.cache = tmp_path / "cache"
        self.state = tmp_path / "state.json"
        self.models = tmp_path / "models"
        self.models.mkdir()
        package = tmp_path / "fake" / "converters"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "convert.py").write_text(CONVERT)
        (package / "discover.py").write_text(
            "def find(path):\n    return sorted(path.iterdir())\n\ndef calls_of(path):\n    return None\n"
        )
        self._environment = {
            **os.environ,
            "NEREID_CACHE_DIR": str(self.cache),
            "PYTHONPATH": f"{package.parent}:{Path(__file__).parents[2]}",
        }
        self._command = [
            *(sys.executable, "-P", "-m", "native_service.cli", "serve", str(self.models), "--state", str(self.state)),
            *("--bind", "127.0.0.1:0", "--http", "127.0.0.1:0", "--tritonserver", str(tritonserver)),
        ]
        self.process: subprocess.Popen[str]

    def options(self, *more: str) -> None:
        self._command += more

    def start(self, *models: str, terminal: int | None = None) -> None:
        """``terminal``: the descriptor of the one that the process is to be started in."""
        for name in models:
            (self.models / name).touch()

        # Not in a fork of this process, in which other tests have started threads.
        taking = [sys.executable, "-c", TAKE_TERMINAL, str(terminal)] if terminal is not None else []
        self.process = subprocess.Popen(
            [*taking, *self._command],
            env=self._environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=terminal is not None,
            pass_fds=() if terminal is None else (terminal,),
        )

    @staticmethod
    def command(name: str) -> list[str]:
        return [sys.executable, "-m", "native_service.cli", name]

    def ask(self, command: list[str]) -> str:
        return subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False).stdout

    def ready(self) -> dict[str, object]:
        self.until(self.state.exists)
        state: dict[str, object] = json.loads(self.state.read_text())
        return state

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60  # many processes start, on cores that may be shared
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                pytest.fail(f"not reached: {self.process.communicate()}")
            time.sleep(0.02)

    def end(self, timeout_s: float = 20) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def of_triton(self, address: str) -> list[int]:
        """The processes of the tritonserver whose port of metrics is that of ``address``."""
        port = f"--metrics-port={address.rpartition(':')[2]}"
        found = []
        for pid in filter(str.isdigit, self.left()):
            with suppress(OSError):
                if port in (Path("/proc") / pid / "cmdline").read_text().split("\0"):
                    found.append(int(pid))
        return found

    def left(self) -> list[str]:
        """What is still there of any run: marked processes, run folders, the state file."""
        mark = f"NEREID_RUN={self.cache}".encode()
        processes = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                    processes.append(entry.name)
            except OSError:
                continue
        runs = [path.name for path in (self.cache / "run").iterdir()] if (self.cache / "run").is_dir() else []
        return processes + runs + ([self.state.name] if self.state.exists() else [])


@pytest.fixture
def nereid(tmp_path: Path, tritonserver: Path) -> Iterator[Nereid]:
    made = Nereid(tmp_path, tritonserver)
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_running_service_with_0_and_nothing_is_left(nereid: Nereid, number: signal.Signals) -> None:
    nereid.start("b", "a")
    state = nereid.ready()
    assert state["pid"] == nereid.process.pid
    assert state["models"] == ["a", "b"]
    with grpc.insecure_channel(str(state["address"])) as channel:
        view = channel.unary_unary(
            "/inference.Nereid/ViewModels", pb.ViewModelsRequest.SerializeToString, pb.ViewModelsResponse.FromString
        )
        assert list(view(pb.ViewModelsRequest(), timeout=5).model_names) == ["a", "b"]
    nereid.process.send_signal(number)
    code, out, _ = nereid.end()
    assert code == 0
    assert out.startswith(f"nereid is ready on {state['address']} with a, b")
    assert nereid.left() == []


def test_sighup_adds_what_is_new_in_the_folder_and_ends_nothing(nereid: Nereid) -> None:
    nereid.start("a")
    nereid.ready()
    (nereid.models / "b").touch()
    nereid.process.send_signal(signal.SIGHUP)
    asked = [*nereid.command("models"), "--json"]

    def names() -> list[str]:
        return [model["name"] for model in json.loads(nereid.ask(asked))]

    nereid.until(lambda: names() == ["a", "b"])
    nereid.ask(nereid.command("reload"))  # one after the other: now the first has said what it did
    nereid.process.send_signal(signal.SIGTERM)
    code, _, err = nereid.end()
    assert (code, "model 'b' added" in err) == (0, True)


def test_a_slow_start_can_be_watched(nereid: Nereid) -> None:
    nereid.start("slow")

    def models() -> list[tuple[str, str, str]]:
        told = json.loads(nereid.ask([*nereid.command("models"), "--json"]) or "[]")
        return [(model["name"], model["state"], model["reason"]) for model in told]

    nereid.until(lambda: models() == [("slow", "loading", "converting")])
    assert "starting" in nereid.ask(nereid.command("status"))
    nereid.process.send_signal(signal.SIGHUP)  # waits until it is ready
    time.sleep(0.2)
    assert nereid.process.poll() is None
    nereid.process.send_signal(signal.SIGTERM)
    assert nereid.end()[0] == 0
    assert nereid.left() == []


def test_the_end_of_its_terminal_ends_the_service_in_order(nereid: Nereid) -> None:
    master, terminal = os.openpty()
    nereid.start("a", terminal=terminal)
    os.close(terminal)
    nereid.ready()
    os.close(master)
    assert nereid.end()[0] == 0
    assert nereid.left() == []


def test_a_signal_while_converting_ends_with_0(nereid: Nereid) -> None:
    nereid.start("slow")
    nereid.until(lambda: any(name.isdigit() for name in nereid.left()))
    nereid.process.send_signal(signal.SIGTERM)
    assert nereid.end()[0] == 0
    assert nereid.left() == []


def test_a_signal_while_a_load_hangs_ends_with_0(nereid: Nereid) -> None:
    nereid.start("hangs")
    nereid.until(lambda: any("-" in name for name in nereid.left()))
    time.sleep(2)
    nereid.process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    assert nereid.end()[0] == 0
    assert time.monotonic() - started < 5
    assert nereid.left() == []


def test_every_model_that_cannot_be_converted_is_told(nereid: Nereid) -> None:
    nereid.start("fine", "wrong1", "wrong2")
    code, out, err = nereid.end()
    assert (code, out) == (1, "")
    assert [line for line in err.splitlines() if line.startswith("error:")] == [
        "error: model 'wrong1': manifest.yaml: outputs are missing",
        "error: model 'wrong2': manifest.yaml: outputs are missing",
    ]
    assert nereid.left() == []


def test_a_model_that_cannot_be_loaded_stops_the_start(nereid: Nereid) -> None:
    nereid.start("fine", "broken")
    code, _, err = nereid.end()
    assert code == 1
    assert err.splitlines()[-1] == "error: model 'broken' could not be loaded: EngineMissing: jax is not installed"
    assert nereid.left() == []


def test_a_triton_that_ends_is_started_again_and_one_that_cannot_be_is_the_end_with_1(
    nereid: Nereid, tritonserver: Path
) -> None:
    nereid.start("a")
    address = str(nereid.ready()["triton_metrics"])
    (first,) = nereid.of_triton(address)
    os.kill(first, signal.SIGKILL)
    nereid.until(lambda: nereid.of_triton(address) not in ([], [first]))
    tritonserver.write_text(f"#!{sys.executable}\nraise SystemExit('no such luck')\n")
    for pid in nereid.of_triton(address):
        os.kill(pid, signal.SIGKILL)
    code, _, err = nereid.end(timeout_s=60)  # the pauses alone are 15 s
    assert code == 1
    assert "tritonserver ended with code -9 while serving; it is started again now, with all its models" in err
    assert "tritonserver ended with code 1 while starting, for the 6th time within 600 s; stopping" in err
    assert nereid.left() == []


def test_what_a_killed_service_leaves_is_cleared_by_the_next(nereid: Nereid) -> None:
    nereid.start("a")
    nereid.ready()
    nereid.process.kill()
    nereid.process.communicate()
    nereid.state.unlink()
    nereid.start()
    nereid.ready()
    nereid.process.send_signal(signal.SIGTERM)
    assert nereid.end()[0] == 0
    assert nereid.left() == []


def test_an_envoy_that_cannot_start_is_one_message(nereid: Nereid, tmp_path: Path) -> None:
    broken = tmp_path / "envoy"
    broken.write_text("#!/bin/sh\necho no such luck\nexit 3\n")
    broken.chmod(0o755)
    nereid.options("--envoy", str(broken))
    nereid.start("a")
    code, out, err = nereid.end()
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == "error: envoy refuses the generated configuration: no such luck"
    assert nereid.left() == []
