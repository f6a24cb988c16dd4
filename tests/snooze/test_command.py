"""The command ``snooze``, started by the SDK's own ``SnoozeDaemon``: case 31 of the specification."""

from __future__ import annotations

import re
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import snoozeml
from click.testing import CliRunner
from serving import Served, alive, write_adder
from snoozing import ADM, INF, JWT_SECRET

from native_service.snooze import models_file
from native_service.snooze.command import snooze

PAGE = Path(__file__).resolve().parents[2] / "native_service" / "SNOOZEML.md"
ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def readme(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """What the installed script is, with this interpreter."""
    path = tmp_path / "snooze"
    path.write_text(f"#!{sys.executable}\nfrom native_service.snooze.command import main\nmain()\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def ports() -> tuple[int, int]:
    """Two that are free a moment before the test takes them."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        found = [each.getsockname()[1] for each in taken]
    return found[0], found[1]


@pytest.mark.triton
def test_the_daemon_of_the_sdk_runs_our_server(script: Path, tmp_path: Path, ports: tuple[int, int]) -> None:
    models = tmp_path / "models"
    models.mkdir()
    write_adder(models / "adder.onnx")
    config = snoozeml.SnoozeConfig().add_model("mine", "adder.onnx").add_api_key("inference", key=INF)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SNOOZE_BIN", str(script))
        daemon = snoozeml.SnoozeDaemon(
            config=config, models_dir=models, port=ports[0], grpc_port=ports[1], api_key=ADM, jwt_secret=JWT_SECRET,
            demo=True, startup_timeout=120,
        )  # fmt: skip
        daemon.start()
    process = daemon._process
    try:
        with daemon.client() as client:
            assert {model.id: model.state.value for model in client.models.list()} == {"mine": "idle", "demo": "idle"}
            np.testing.assert_array_equal(client.infer("mine", {"input": ROWS}).get_numpy("output"), ROWS + 1)
        (lines,) = [block for block in readme("python") if "http_endpoint" in block]
        write_adder(tmp_path / "forest.onnx", amount=5.0)
        names = {"KEY": ADM, "rows": ROWS}
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            exec(lines.replace("http://127.0.0.1:8080", daemon.http_endpoint), names)
        np.testing.assert_array_equal(names["answer"], ROWS + 5)
        token = snoozeml.create_jwt_token(JWT_SECRET, role="inference")
        with snoozeml.SnoozeClient(grpc_endpoint=daemon.grpc_endpoint, use_grpc=True, token=token) as client:
            np.testing.assert_array_equal(client.infer("demo", {"input": ROWS}).get_numpy("output"), ROWS * 2)
        descendants = _descendants(process)
        assert len(descendants) > 3
        # The SDK gives it 5 s; here it may take its time, on however busy a machine.
        process.send_signal(signal.SIGTERM)
        output, log = process.communicate(timeout=60)
    finally:
        daemon.stop()
    assert (process.returncode, alive(descendants)) == (0, set())
    text = output.decode() + log.decode()
    assert "nereid is ready" in text
    assert not [secret for secret in (ADM, INF, JWT_SECRET, token) if secret in text]


def test_the_settings_in_the_readme_are_accepted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (text,) = readme("toml")
    (tmp_path / "models.toml").write_text(text)
    read = models_file.load(tmp_path / "models.toml", tmp_path, models_file.CommandLine())
    assert [(model.name, model.options.path, model.options.pinned) for model in read.models] == [
        ("iris", "iris_v2.onnx", True)
    ]
    assert caplog.records == []


def _descendants(process: Any) -> set[int]:
    served = Served.__new__(Served)
    served.process = process
    return served.descendants()


def test_what_keeps_it_from_starting_is_in_the_error_of_the_sdk(script: Path, tmp_path: Path) -> None:
    config = snoozeml.SnoozeConfig().add_model("a", "a.onnx").add_stream("s", broker="redis")
    daemon = snoozeml.SnoozeDaemon(config=config, models_dir=tmp_path / "m", binary_path=script, startup_timeout=120)
    with pytest.raises(snoozeml.SnoozeConnectionError, match=r"\[\[streams\]\] is not supported"):
        daemon.start()
    daemon._process.communicate()  # which the SDK does not close


@pytest.mark.parametrize("value", ["sk-key-without-a-role", "boss:sk-key-of-nobody", "admin:", "admin: "])
def test_a_key_that_is_said_wrongly_is_not_repeated(value: str) -> None:
    done = CliRunner().invoke(snooze, ["serve", "--api-key", value])
    assert done.exit_code == 2
    assert "--api-key must be ROLE:KEY with one of the roles read_only, inference, admin" in done.output
    assert "sk-key" not in done.output
