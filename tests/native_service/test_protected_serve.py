"""``nereid serve`` with keys, tokens and certificates, on the real Triton: nothing goes around them, nothing leaks."""

import hashlib
import os
import ssl
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import jwt
import numpy as np
import pytest
import tritonclient.grpc as tritonclient
import trustme
from live import code_of
from serving import Served, input_tensor, write_adder
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.triton

ROW = np.arange(4, dtype=np.float32)[None]
READER, CALLER, OPERATOR, SECRET = (f"{name}-{'7' * 40}" for name in ("reader", "caller", "operator", "tokens"))


def listening() -> set[tuple[str, int]]:
    """Inode and port of every TCP socket that listens."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found.add((fields[9], int(fields[1].rpartition(":")[2], 16)))
    return found


def ports_of(pids: set[int]) -> set[int]:
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    return {port for inode, port in listening() if inode in inodes}


def test_every_way_in_asks_who_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    (tmp_path / "cert.pem").write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))
    (tmp_path / "key.pem").write_bytes(made.private_key_pem.bytes())
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    own = authority.issue_cert("caller")
    own.cert_chain_pems[0].write_to_path(str(tmp_path / "own.pem"))
    own.private_key_pem.write_to_path(str(tmp_path / "own-key.pem"))
    (tmp_path / "caller").write_text(CALLER)
    (tmp_path / "models").mkdir()
    write_adder(tmp_path / "models" / "adder.onnx")
    monkeypatch.setenv("READER_KEY", READER)
    monkeypatch.setenv("TOKEN_SECRET", SECRET)
    (tmp_path / "nereid.yaml").write_text(
        "server:\n"
        "  bind_addr: '0.0.0.0:0'\n  http_addr: '127.0.0.1:0'\n  ml_backends_path: models\n"
        "  allow_model_control: true\n"
        "  tls: {cert: cert.pem, key: key.pem, client_ca: ca.pem}\n"
        "  auth:\n    keys:\n"
        "      - {name: reader, role: read_only, key_env: READER_KEY}\n"
        "      - {name: caller, role: inference, key_file: caller}\n"
        f"      - {{name: operator, role: admin, sha256: {hashlib.sha256(OPERATOR.encode()).hexdigest()}}}\n"
        "    jwt: {secret_env: TOKEN_SECRET}\n"
        "models:\n  - {name: adder, device: cpu, queue_capacity: 4}\n"
    )
    served = Served(tmp_path, "--config", str(tmp_path / "nereid.yaml"), "--verbose")
    address = served.state["address"].replace("0.0.0.0", "127.0.0.1")
    credentials = grpc.ssl_channel_credentials(
        authority.cert_pem.bytes(), own.private_key_pem.bytes(), own.cert_chain_pems[0].bytes()
    )
    options = {"ssl": True, "creds": credentials}
    token = jwt.encode({"role": "infer", "exp": int(time.time()) + 60}, SECRET, "HS256")

    with tritonclient.InferenceServerClient(address, **options) as client:

        def infer(key: str | None) -> str:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            try:
                answer = client.infer("adder", [input_tensor("input", ROW)], headers=headers).as_numpy("output")
            except InferenceServerException as error:
                return str(error.status()).removeprefix("StatusCode.")
            assert (answer == ROW + 1).all()
            return "OK"

        assert [infer(key) for key in (None, "nobody-s", READER, CALLER, OPERATOR, token)] == [
            *("UNAUTHENTICATED", "UNAUTHENTICATED", "PERMISSION_DENIED"),
            *("OK", "OK", "OK"),
        ]
        assert client.is_server_live()
        assert code_of(lambda: client.load_model("adder", headers={"x-api-key": CALLER}))[0] == "PERMISSION_DENIED"
        client.load_model("adder", headers={"x-api-key": OPERATOR})

    def http(path: str, key: str | None = None) -> int:
        request = urllib.request.Request(f"https://{served.state['http']}{path}")
        if key is not None:
            request.add_header("Authorization", f"Bearer {key}")
        trusting = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
        try:
            with urllib.request.urlopen(request, context=trusting, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert [http("/v2/health/ready"), http("/metrics"), http("/metrics", READER)] == [200, 401, 200]

    (tmp_path / "reader").write_text(READER)
    np.save(tmp_path / "row.npy", ROW)

    def command(name: str, key: str, *more: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "native_service.cli", name, "adder", "--address", address, "--ca", "ca.pem"]
        return subprocess.run([*line, "--key-file", key, *more], cwd=tmp_path, capture_output=True, text=True)

    certificate = ("--certificate", "own.pem", "own-key.pem")
    quickly = ("--concurrency", "2", "--duration", "0.5", "--window", "0.5", "--warm-up", "0", *certificate)
    under_load = [command("bench", key, *quickly) for key in ("caller", "reader")]
    assert [done.returncode for done in under_load] == [0, 1], under_load
    assert "role" in under_load[1].stderr
    once = [command("infer", "caller", "--input", "row.npy", *more) for more in (certificate, ("--timeout", "5"))]
    assert [done.returncode for done in once] == [0, 1], once
    assert "[[1., 2., 3., 4.]]" in once[0].stdout

    # Another certificate, of another authority, in other files.
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    (tmp_path / "next.pem").write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))
    (tmp_path / "next-key.pem").write_bytes(made.private_key_pem.bytes())
    settings = tmp_path / "nereid.yaml"
    settings.write_text(
        settings.read_text().replace("cert: cert.pem, key: key.pem", "cert: next.pem, key: next-key.pem")
    )
    reload = [sys.executable, "-m", "native_service.cli", "reload", str(served.process.pid)]
    done = subprocess.run(reload, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        ["server.tls.cert changed", "server.tls.key changed"],
    ), done
    deadline = time.monotonic() + 30
    while True:  # Envoy reads them a moment later
        try:
            assert http("/v2/health/ready") == 200
        except urllib.error.URLError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        else:
            break

    children = served.descendants()
    metrics = served.state["triton_metrics"]
    open_ports = ports_of({served.process.pid, *children})
    assert open_ports == {int(where.rpartition(":")[2]) for where in (address, served.state["http"], metrics)}
    socket = Path(served.state["triton_grpc"].removeprefix("unix:"))
    assert stat.S_IMODE(socket.parent.stat().st_mode) & 0o077 == 0
    secrets = [text.encode() for text in (READER, CALLER, OPERATOR, SECRET)]
    for pid in (served.process.pid, *children):
        shown = Path(f"/proc/{pid}/cmdline").read_bytes()
        if pid != served.process.pid:  # what it was started with itself
            shown += Path(f"/proc/{pid}/environ").read_bytes()
        assert not [secret for secret in secrets if secret in shown], pid
        assert b"restricted" not in shown
    state = served.state_file.read_bytes()
    code, output = served.end()
    assert code == 0
    assert not [secret for secret in secrets if secret in output.encode() + state]
    assert token not in output
    assert os.environ["READER_KEY"] == READER  # of the caller, untouched
