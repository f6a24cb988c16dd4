import asyncio
import os
import sys
import zipfile
from pathlib import Path

import pytest

from native_service.triton import embedded as embedded_triton
from nereid_backend.errors import TritonUnavailable

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
SERVER = "pytriton/tritonserver/bin/tritonserver"
FILES = (
    SERVER,
    "pytriton/tritonserver/backends/python/libtriton_python.so",
    "pytriton/tritonserver/backends/python/triton_python_backend_utils.py",
    f"pytriton/tritonserver/python_backend_stubs/{MINOR}/triton_python_backend_stub",
    "pytriton/tritonserver/caches/local/libtritoncache_local.so",
    "nvidia_pytriton.libs/libtritonserver.so",
    "pytriton/__init__.py",
)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without tritonserver, with an empty cache."""
    monkeypatch.setenv("NEREID_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(embedded_triton, "_CONTAINER_ROOT", tmp_path / "none")
    return tmp_path


def fake_pip(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> Path:
    """``python -m pip`` runs ``code``; each call leaves one line in the returned file."""
    calls = folder / "calls"
    package = folder / "fake" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(f"import sys\nopen({str(calls)!r}, 'a').write('call\\n')\n{code}")
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}:{os.environ.get('PYTHONPATH', '')}")
    return calls


def copying_pip(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    wheel = folder / "nvidia_pytriton-0.7.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in FILES:
            archive.writestr(name, "#!/bin/sh\n")
    return fake_pip(
        folder, monkeypatch,
        f"import shutil\nshutil.copy({str(wheel)!r}, sys.argv[sys.argv.index('--dest') + 1])\n",
    )  # fmt: skip


def test_the_wheel_is_fetched_once_and_laid_out_for_this_interpreter(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = copying_pip(machine, monkeypatch)

    async def both() -> list[embedded_triton.TritonInstall]:
        return list(await asyncio.gather(embedded_triton.find(), embedded_triton.find()))

    first, second = asyncio.run(both())
    assert first == second == asyncio.run(embedded_triton.find())
    assert calls.read_text() == "call\n"
    assert first.embedded
    assert os.access(first.server, os.X_OK)
    assert first.backend_directory is not None
    python = first.backend_directory / "python"
    assert first.backend_directory.name == f"backends-{MINOR}"
    assert sorted(path.name for path in python.iterdir()) == [
        "libtriton_python.so", "triton_python_backend_stub", "triton_python_backend_utils.py",
    ]  # fmt: skip
    assert first.stub is not None
    assert os.access(first.stub, os.X_OK)
    assert [path.name for path in first.library_paths] == ["nvidia_pytriton.libs"]
    folder = machine / "cache" / "triton"
    assert not (folder / next(folder.glob("nvidia*")) / "pytriton" / "__init__.py").exists()
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == []
    assert (machine / "cache").stat().st_mode & 0o777 == 0o700


def test_being_offline_is_one_message_and_leaves_nothing(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(machine, monkeypatch, "sys.exit('ERROR: No matching distribution found')")
    with pytest.raises(TritonUnavailable) as caught:
        asyncio.run(embedded_triton.find())
    message = str(caught.value)
    assert "\n" not in message
    assert "(No matching distribution found)" in message
    assert "--tritonserver PATH" in message
    assert [path.name for path in (machine / "cache" / "triton").iterdir()] == ["fetch.lock"]


def test_an_interrupted_fetch_leaves_nothing_and_kills_pip(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_pip(machine, monkeypatch, "import time\ntime.sleep(60)")

    async def interrupted() -> None:
        task = asyncio.create_task(embedded_triton.find())
        async with asyncio.timeout(60):
            while not calls.exists():
                await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(interrupted())
    assert [path.name for path in (machine / "cache" / "triton").iterdir()] == ["fetch.lock"]


def test_a_server_on_path_comes_before_the_embedded_one(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine / "opt"
    server = root / "bin" / "tritonserver"
    server.parent.mkdir(parents=True)
    (root / "backends" / "python").mkdir(parents=True)
    server.touch(0o755)
    monkeypatch.setenv("PATH", f"{server.parent}:/usr/bin:/bin")
    found = asyncio.run(embedded_triton.find())
    assert (found.server, found.embedded, found.backend_directory) == (server, False, root / "backends")


def test_a_named_server_must_be_there(machine: Path) -> None:
    with pytest.raises(TritonUnavailable, match="is not an executable file"):
        asyncio.run(embedded_triton.find(machine / "nope"))


def test_the_requirement_carries_the_pinned_hash(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(machine, monkeypatch, "sys.exit('ERROR: ' + open(sys.argv[-1]).read())")
    with pytest.raises(TritonUnavailable) as caught:
        asyncio.run(embedded_triton.find())
    assert f"nvidia-pytriton==0.7.0 --hash=sha256:{embedded_triton.WHEEL_SHA256}" in str(caught.value)
