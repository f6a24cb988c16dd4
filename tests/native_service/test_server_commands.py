"""The commands that ask a server, against real control sockets of servers that are none."""

from __future__ import annotations

import asyncio
import json
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from native_service import cli
from native_service.operation.control_channel import ControlChannel
from native_service.run_directory import CONTROL_SOCKET, RunDirectory
from nereid_backend.errors import NereidError, ServerUnavailable

MODEL = {
    "name": "adder", "state": "ready", "reason": None, "engine": "onnx", "platform": "onnxruntime_onnx",
    "device": "cpu", "hidden": False, "queue_capacity": 4, "in_use": 1, "max_batch_size": 8, "batch_sizes": [1, 8],
    "restarts": 2, "processes": [7], "memory_bytes": 3 << 20, "version": "1", "loaded_at": "2026-11-30T12:00:00Z",
    "pinned": False, "cold_starts": 0, "cold_start_last_s": 0.0,
}  # fmt: skip
FAILED = {
    **MODEL, "name": "later", "state": "failed", "reason": "later.onnx: is empty", "engine": None, "device": None,
    "queue_capacity": None, "in_use": None, "max_batch_size": None, "batch_sizes": [], "memory_bytes": 0,
    "loaded_at": None,
}  # fmt: skip


class FakeServers:
    """Control sockets in run folders of their own, served by a thread."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._running: list[tuple[RunDirectory, ControlChannel]] = []
        self.models: list[dict[str, Any]] = [MODEL]
        self.outcome: dict[str, list[str]] | NereidError = {"applied": [], "failed": [], "refused": []}

    def add(self, address: str | None = "127.0.0.1:1", *, state: str = "ready", settings: Path | None = None) -> Path:
        run = RunDirectory.open(self._cache)
        status = {
            "pid": 4242, "state": state, "settings": settings and str(settings), "folder": "/m", "state_file": None,
            "addresses": {"address": address} if address else {}, "started_at": f"{len(self._running)}", "uptime_s": 61,
            "versions": {"nereid": "1"}, "processes": {"envoy": {"pid": 5, "memory_bytes": 1 << 20}},
            "memory_bytes": 1 << 21, "restarts": {"envoy": 0}, "permits": {"in_use": 1, "total": 4},
            "models": {"ready": 1}, "failures": [{"at": "noon", "text": "Envoy fell"}],
        }  # fmt: skip

        async def answer_status() -> Any:
            return status

        async def answer_models() -> Any:
            return self.models

        async def reload() -> Any:
            if isinstance(self.outcome, NereidError):
                raise self.outcome
            return self.outcome

        questions = {"/status": answer_status, "/models": answer_models}
        channel = ControlChannel(run, questions=questions, orders={"/reload": reload})
        self._do(channel.start())
        self._running.append((run, channel))
        return run.path

    def end(self) -> None:
        for run, channel in self._running:
            self._do(channel.stop())
            run.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServers]:
    # A folder whose sockets have paths that are too long for a socket.
    cache = tmp_path / ("long" * 30)
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("NEREID_CACHE_DIR", str(cache))
    made = FakeServers(cache)
    yield made
    made.end()


@pytest.fixture
def nereid(servers: FakeServers) -> Callable[..., Result]:
    return lambda *arguments: CliRunner().invoke(cli.nereid, arguments)


@pytest.mark.parametrize("command", ["status", "models", "reload"])
def test_without_a_server_there_is_a_clear_error(nereid: Callable[..., Result], command: str) -> None:
    error = nereid(command).exception
    assert isinstance(error, ServerUnavailable)
    assert str(error).startswith("no server runs here")


def test_only_its_user_reaches_the_socket(servers: FakeServers) -> None:
    run = servers.add()
    assert stat.S_IMODE((run / CONTROL_SOCKET).stat().st_mode) == 0o600
    assert stat.S_IMODE(run.stat().st_mode) == 0o700


@pytest.mark.parametrize(("state", "code"), [("ready", 0), ("starting", 3), ("not ready", 3)])
def test_the_exit_code_of_status_is_the_readiness(
    servers: FakeServers, nereid: Callable[..., Result], state: str, code: int
) -> None:
    servers.add(state=state)
    shown = nereid("status")
    assert (shown.exit_code, state in shown.stdout) == (code, True)
    assert "0:01:01" in shown.stdout
    assert "Envoy fell" in shown.stdout
    as_json = nereid("status", "--json")
    assert (as_json.exit_code, json.loads(as_json.stdout)["state"]) == (code, state)


def test_models_are_a_table_and_one_that_failed_is_told_with_its_reason(
    servers: FakeServers, nereid: Callable[..., Result]
) -> None:
    servers.add()
    assert nereid("models").exit_code == 0
    servers.models = [MODEL, FAILED]
    shown = nereid("models")
    assert shown.exit_code == 3
    head, adder, later, reason = shown.stdout.splitlines()
    assert head.split()[:5] == ["NAME", "ENGINE", "DEVICE", "STATE", "CALLS"]
    assert " ".join(adder.split()) == "adder onnx cpu ready 1/4 1,8 2 3 MiB - 2026-11-30T12:00:00Z"
    assert later.split()[:4] == ["later", "-", "-", "failed"]
    assert reason == "later: later.onnx: is empty"
    assert json.loads(nereid("models", "--json").stdout) == [MODEL, FAILED]


def test_an_idle_model_is_well_and_a_pinned_one_is_told(servers: FakeServers, nereid: Callable[..., Result]) -> None:
    servers.add()
    pinned = {**MODEL, "pinned": True, "cold_starts": 3, "cold_start_last_s": 1.26}
    servers.models = [{**MODEL, "state": "idle", "memory_bytes": 0, "loaded_at": None}, pinned]
    shown = nereid("models")
    assert shown.exit_code == 0
    _, idle, kept = shown.stdout.splitlines()
    assert " ".join(idle.split()) == "adder onnx cpu idle 1/4 1,8 2 - - -"
    assert " ".join(kept.split()) == "adder onnx cpu ready, pinned 1/4 1,8 2 3 MiB 3 (1.3 s) 2026-11-30T12:00:00Z"


def test_one_of_several_servers_goes_by_its_address_or_its_settings_file(
    servers: FakeServers, nereid: Callable[..., Result], tmp_path: Path
) -> None:
    servers.add("127.0.0.1:1")
    servers.add("127.0.0.1:2", settings=tmp_path / "two.yaml")
    assert str(nereid("status").exception).startswith("2 servers run: 127.0.0.1:1, 127.0.0.1:2; name one")
    for name in ("127.0.0.1:2", str(tmp_path / "two.yaml"), str(tmp_path / "x" / ".." / "two.yaml")):
        assert "127.0.0.1:2" in nereid("status", name).stdout
    assert str(nereid("status", "nobody").exception) == (
        "no running server goes by 'nobody'; there is 127.0.0.1:1, 127.0.0.1:2"
    )


def test_a_reload_prints_a_line_per_change_and_fails_when_something_is_left(
    servers: FakeServers, nereid: Callable[..., Result]
) -> None:
    servers.add()
    assert (nereid("reload").stdout, nereid("reload").exit_code) == ("nothing has changed\n", 0)
    servers.outcome = {"applied": ["model 'a' added"], "failed": [], "refused": []}
    assert (nereid("reload").stdout, nereid("reload").exit_code) == ("model 'a' added\n", 0)
    servers.outcome = {"applied": ["model 'a' added"], "failed": ["x"], "refused": ["server.bind_addr takes a restart"]}
    done = nereid("reload")
    assert (done.exit_code, done.stdout) == (1, "model 'a' added\n")
    assert done.stderr.splitlines()[-2:] == ["error: x", "error: server.bind_addr takes a restart"]
    servers.outcome = ServerUnavailable("the server is still starting")
    assert str(nereid("reload").exception) == "the server is still starting"
