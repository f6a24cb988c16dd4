from pathlib import Path

import pytest

from native_service.envoy import install as envoy_install
from nereid_backend.errors import EnvoyUnavailable


def program(folder: Path) -> Path:
    path = folder / "envoy"
    folder.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_named_program_comes_first(tmp_path: Path) -> None:
    assert envoy_install.find(program(tmp_path)) == tmp_path / "envoy"


def test_a_named_program_that_is_none_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(EnvoyUnavailable, match=r"--envoy .*nothing is not an executable file"):
        envoy_install.find(tmp_path / "nothing")


def test_the_wheel_s_comes_before_the_one_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(program(tmp_path / "bin").parent))
    found = envoy_install.find()
    assert found.parts[-3:] == ("envoy", "_bin", "envoy")
    monkeypatch.setattr(envoy_install.importlib.util, "find_spec", lambda name: None)
    assert envoy_install.find() == tmp_path / "bin" / "envoy"


def test_no_envoy_at_all_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(envoy_install.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvoyUnavailable, match=r"pip install 'nereid-triton\[serve\]'.*--envoy PATH"):
        envoy_install.find()
