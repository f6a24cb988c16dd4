import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from native_service import cli


def nereid(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "native_service.cli", *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_help_names_every_command_and_imports_none(tmp_path: Path) -> None:
    code = (
        "import sys; from native_service import cli\n"
        "try: cli.nereid(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'grpc', 'converters', 'aiohttp', 'pydantic', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "convert" in done.stdout
    assert "serve" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_missing_settings_file_is_one_line_and_exit_1(tmp_path: Path) -> None:
    done = nereid("serve", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        "error: nereid.yaml: cannot be read (No such file or directory);"
        " name a file with --config, or a folder of bundles\n"
    )


def test_watching_without_its_library_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # the handlers are for a process of its own
    result = CliRunner().invoke(cli.nereid, ["serve", str(tmp_path), "--watch"])
    assert str(result.exception) == "serving needs watchfiles; pip install 'nereid-triton[serve]'"


def test_wrong_usage_exits_2() -> None:
    runner = CliRunner()
    assert runner.invoke(cli.nereid, ["serve", "x", "--config", "y"]).exit_code == 2
    assert runner.invoke(cli.nereid, ["serve", "--config", "y", "--allow-code"]).exit_code == 2
    assert runner.invoke(cli.nereid, ["nonsense"]).exit_code == 2


@pytest.mark.parametrize("name", ["bind_addr", "http_addr"])
def test_a_port_somebody_has_stops_the_start_before_any_work(tmp_path: Path, name: str) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        options = {"bind_addr": ["--bind", address], "http_addr": ["--bind", "127.0.0.1:0", "--http", address]}
        done = nereid("serve", str(tmp_path), *options[name], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        1, f"error: server.{name} {address} cannot be bound (Address already in use)\n",
    )  # fmt: skip


def test_what_nobody_planned_for_is_told_with_its_traceback_and_ends_in_one_line(tmp_path: Path) -> None:
    code = (
        "import click\n"
        "from native_service import cli\n"
        "@click.command()\n"
        "def broken(): raise KeyError('x')\n"
        "cli.run_command(broken, 'broken')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    *before, last = done.stderr.splitlines()
    assert done.returncode == 1
    assert last == "error: KeyError: 'x' (please report it with the lines above)"
    assert "Traceback (most recent call last):" in before
    assert "KeyError: 'x'" in before
