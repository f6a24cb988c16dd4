"""A converted repository is an ordinary one: a bare tritonserver serves it, and the golden example stays as it is."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as tritonclient

from converters import repository
from nereid_backend.spec import ModelSpec

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "triton_models" / "affine"


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.mark.triton
def test_a_bare_tritonserver_serves_the_golden_example(tmp_path: Path) -> None:
    from native_service.triton import command as triton_command
    from native_service.triton import embedded as embedded_triton

    install = asyncio.run(embedded_triton.find())
    repo = tmp_path / "triton_models"
    repo.mkdir()
    (repo / "affine").symlink_to(GOLDEN)
    (repo / "README.md").write_text("a file beside the models")
    grpc_port, http_port, metrics_port = free_ports(3)
    command = [install.server, f"--model-repository={repo}", f"--grpc-port={grpc_port}", f"--http-port={http_port}"]
    command += [f"--metrics-port={metrics_port}", "--disable-auto-complete-config"]
    command += [f"--{kind}-address=127.0.0.1" for kind in ("grpc", "http", "metrics")]
    if install.backend_directory is not None:
        command.append(f"--backend-directory={install.backend_directory}")
    environment = {**triton_command.environment(install), "HOME": str(tmp_path)}
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        with tritonclient.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
            wait_until_ready(client, server)
            x = np.array([[1, 2, 3, 4]], np.float32)
            tensor = tritonclient.InferInput("x", [1, 4], "FP32")
            tensor.set_data_from_numpy(x)
            assert client.infer("affine", [tensor]).as_numpy("y").tolist() == EXPECTED
    finally:
        os.kill(server.pid, signal.SIGTERM)
        server.wait(30)
    assert server.returncode == 0


EXPECTED = [[[10.0, 20.5], [31.0, 41.5], [52.0, 62.5]]]


def wait_until_ready(client: tritonclient.InferenceServerClient, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.poll() is None, "tritonserver ended"
        try:
            if client.is_server_ready():
                return
        except tritonclient.InferenceServerException:
            pass
        time.sleep(0.1)
    raise AssertionError("not ready in time")


def test_the_golden_example_is_what_this_version_writes() -> None:
    spec = ModelSpec.read(GOLDEN / "1")
    assert (GOLDEN / "config.pbtxt").read_text() == repository.config_text(spec)
    assert (GOLDEN / "1" / "model.py").read_text() == repository.MODEL_PY
    assert (GOLDEN / "1" / "nereid.json").read_text() == spec.to_json()
