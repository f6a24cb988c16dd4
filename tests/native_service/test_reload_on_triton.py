"""A running ``nereid serve`` that is told to read its settings again, and the commands that ask it how it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import jwt
import pytest
import tritonclient.grpc as tritonclient
from live import ROW, code_of, listing, live
from serving import Served, checkpoint, chunk, input_tensor, meta, write_adder
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.triton


def nereid(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "native_service.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def asked(command: str, served: Served) -> Any:
    return json.loads(nereid(command, str(served.process.pid), "--json").stdout)


def test_a_reload_under_load_changes_models_and_limits_without_a_failed_call(tmp_path: Path) -> None:
    file = tmp_path / "nereid.yaml"
    with live(tmp_path, settings=listing("stays", "goes"), models=("stays", "goes", "comes")) as serving:
        served = serving.served
        (before, _) = asked("models", served)
        with serving.load("stays") as failures:
            write_adder(serving.models / "fresh.onnx", 5)
            (serving.models / "fresh.onnx").replace(serving.models / "stays.onnx")
            server = ", http_addr: '127.0.0.1:0', limits: {max_chunks: 1}"
            file.write_text(listing("stays", "comes", server=server).replace("capacity: 4", "capacity: 9"))
            done = nereid("reload", str(file))
            assert done.stdout.splitlines() == [
                "server.limits.max_chunks is 1 now, was 65536",
                "model 'stays' changed",
                "model 'comes' added",
                "model 'goes' removed",
            ]
            why = "takes a restart: connections that are open would be closed"
            assert done.stderr.splitlines()[-1] == f"error: server.http_addr {why}"
            assert done.returncode == 1
            assert (serving.amount("stays"), serving.amount("comes"), serving.names()) == (5, 1, ["stays", "comes"])
            assert code_of(lambda: serving.amount("goes"))[0] == "NOT_FOUND"

            file.write_text("server: {bind_addr: nowhere}")
            done = nereid("reload", str(served.state_file))
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr.splitlines()[-1] == "error: nothing has changed"
            (serving.models / "comes.onnx").write_bytes(b"no model")
            file.write_text(listing("stays", "comes"))
            done = nereid("reload", served.state["address"])
            assert (done.returncode, "model 'comes': comes.onnx" in done.stderr) == (1, True)
            assert (serving.amount("comes"), asked("models", served)[0]["queue_capacity"]) == (1, 9)

            write_adder(serving.models / "comes.onnx", 2)
            served.process.send_signal(signal.SIGHUP)
            serving.until(lambda: serving.amount("comes") == 2)
            serving.until(lambda: asked("models", served)[0]["queue_capacity"] == 4)
        assert failures == []
        after, _ = asked("models", served)
        assert (before["name"], before["state"], before["queue_capacity"]) == ("stays", "ready", 4)
        assert before["processes"] != after["processes"]


def test_a_lowered_limit_holds_for_the_next_call(tmp_path: Path) -> None:
    with live(tmp_path, settings=listing("adder"), models=("adder",)) as serving:
        parts = [chunk([1, 4], bytes(8), end=False), chunk([1, 4], bytes(8))]
        assert checkpoint(serving.served, [meta("adder"), *parts])[-1].done
        (tmp_path / "nereid.yaml").write_text(listing("adder", server=", limits: {max_chunks: 1}"))
        assert nereid("reload", str(serving.served.process.pid)).returncode == 0
        (tmp_path / "nereid.yaml").write_text(
            listing("adder", server=", limits: {max_chunks: 1, max_buffered_bytes: 500000000}")
        )
        for applied in (["server.limits.max_buffered_bytes is 500000000 now, was 1073741824"], []):
            done = nereid("reload", str(serving.served.process.pid))
            assert (done.returncode, done.stdout.splitlines()) == (1, applied)
            assert "Envoy's share of 500000000 takes a restart" in done.stderr
        with pytest.raises(Exception, match="max_chunks"):
            checkpoint(serving.served, [meta("adder"), *parts])


def test_status_tells_addresses_versions_processes_and_failures(tmp_path: Path) -> None:
    with live(tmp_path, settings=listing("adder"), models=("adder",)) as serving:
        served = serving.served
        done = nereid("status", str(tmp_path / "nereid.yaml"))
        assert (done.returncode, f"address        {served.state['address']}" in done.stdout) == (0, True)
        status = asked("status", served)
        assert (status["state"], status["models"], status["permits"]) == (
            "ready",
            {"ready": 1},
            {"in_use": 0, "total": 4},
        )
        assert status["addresses"]["address"] == served.state["address"]
        assert status["versions"]["tritonserver"] == "2.51.0"
        assert status["versions"]["envoy"].count(".") == 2
        assert {process["pid"] for process in status["processes"].values()} - {
            served.process.pid
        } <= served.descendants()
        (model,) = asked("models", served)
        assert (model["engine"], model["max_batch_size"], model["state"]) == ("onnx", 8, "ready")
        assert model["memory_bytes"] > 10 << 20
        assert set(model["processes"]) <= served.descendants()
        assert status["failures"] == []
        (process,) = model["processes"]
        os.kill(process, signal.SIGKILL)
        serving.until(lambda: asked("models", served)[0]["restarts"] == 1 and serving.amount() == 1)
        (again,) = asked("models", served)
        assert (again["state"], process in again["processes"]) == ("ready", False)
        assert again["loaded_at"] > model["loaded_at"]
        status = asked("status", served)
        assert status["restarts"] == {"tritonserver": 0, "envoy": 0, "models": 1}
        assert "its process has died" in status["failures"][-1]["text"]
        (tmp_path / "nereid.yaml").write_text("models: 1")
        nereid("reload", str(served.process.pid))
        assert asked("status", served)["failures"][-1]["text"] == "nothing has changed"


def test_keys_and_the_secret_of_tokens_change_on_both_addresses_while_calls_go_on(tmp_path: Path) -> None:
    keys = {name: name * 8 for name in ("old", "stays", "fresh", "filed")}
    (tmp_path / "key").write_text("the-first-content")

    def settings(*names: str) -> str:
        rows = [f"{{name: {n}, role: inference, sha256: {sha256(keys[n].encode()).hexdigest()}}}" for n in names]
        rows.append("{name: file, role: inference, key_file: key}")
        auth = f"auth: {{keys: [{', '.join(rows)}], jwt: {{secret_file: secret}}}}"
        return listing("adder", server=f", http_addr: '127.0.0.1:0', {auth}")

    secrets = ("the-first-secret" * 2, "the-next-secret" * 3)
    first_token, next_token = (jwt.encode({"exp": 2**31, "role": "inference"}, secret) for secret in secrets)
    (tmp_path / "secret").write_text(secrets[0])
    with live(tmp_path, settings=settings("old", "stays"), models=("adder",)) as serving:
        client = serving.client
        metrics = f"http://{serving.served.state['http']}/metrics"

        def may(key: str) -> tuple[str, int]:
            """What the key gets at the address of the service, and at that of the metrics."""
            header = {"authorization": f"Bearer {key}"}
            code, status = "OK", 200
            try:
                client.infer("adder", [input_tensor("input", ROW)], headers=header)
            except InferenceServerException as error:
                code = str(error.status()).removeprefix("StatusCode.")
            try:
                urllib.request.urlopen(urllib.request.Request(metrics, headers=header), timeout=10).close()
            except urllib.error.HTTPError as error:
                status = error.code
            return code, status

        failures = []
        over = threading.Event()

        def ask() -> None:
            with tritonclient.InferenceServerClient(serving.served.state["address"]) as other:
                header = {"authorization": f"Bearer {keys['stays']}"}
                while not over.is_set():
                    try:
                        other.infer("adder", [input_tensor("input", ROW)], headers=header)
                    except InferenceServerException as error:
                        failures.append(error)

        both, neither = ("OK", 200), ("UNAUTHENTICATED", 401)
        assert [may(keys["old"]), may(keys["fresh"]), may("the-first-content")] == [both, neither, both]
        assert [may(first_token), may(next_token)] == [both, neither]
        with ThreadPoolExecutor(1) as pool:
            pool.submit(ask)
            try:
                (tmp_path / "nereid.yaml").write_text(settings("stays", "fresh"))
                (tmp_path / "key").write_text("the-next-content")
                (tmp_path / "secret").write_text(secrets[1])
                done = nereid("reload", str(serving.served.process.pid))
                assert done.stdout.splitlines() == [
                    "server.auth.keys changed",
                    "server.auth: tokens are verified anew",
                    "server.auth: 3 keys are let in now",
                ]
                serving.until(lambda: may(first_token) == neither)  # Envoy's workers take it one after the other
                assert [may(first_token), may(next_token)] == [neither, both]
                assert [may(keys["old"]), may(keys["fresh"]), may("the-first-content")] == [neither, both, neither]
                assert may("the-next-content") == both
                (tmp_path / "key").unlink()
                done = nereid("reload", str(serving.served.process.pid))
                assert "cannot be read" in done.stderr
                assert may("the-next-content") == both
            finally:
                over.set()
        assert failures == []
        (tmp_path / "key").write_text("the-next-content")
        without = settings("stays", "fresh").replace(", jwt: {secret_file: secret}", "")
        (tmp_path / "nereid.yaml").write_text(without)
        done = nereid("reload", str(serving.served.process.pid))
        assert done.stdout.splitlines() == ["server.auth.jwt changed", "server.auth: no tokens are let in now"]
        serving.until(lambda: may(next_token) == neither)
        assert may(keys["fresh"]) == both
        (tmp_path / "nereid.yaml").write_text(listing("adder", server=", http_addr: '127.0.0.1:0'"))
        assert "server.auth takes a restart" in nereid("reload", str(serving.served.process.pid)).stderr
        assert may("") == neither
