import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from serving import alive

from native_service import run_directory
from native_service.run_directory import RunDirectory


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(run_directory, "SHARED_MEMORY", folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    return folder


def abandon(cache: Path, *, entirely: bool = True) -> tuple[Path, str]:
    """A run whose supervisor was killed: its folder and its prefix; ``entirely``: what clears afterwards was, too."""
    code = f"""
import os, pathlib, signal
from native_service.run_directory import RunDirectory
run = RunDirectory.open(pathlib.Path({str(cache)!r}))
if {entirely}:
    os.kill(run._afterwards.pid, signal.SIGKILL)
print(run.path, run.shared_memory_prefix, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    path, prefix = done.stdout.split()
    return Path(path), prefix


def test_a_run_has_a_private_folder_with_a_repository_and_marks(cache: Path, shared_memory: Path) -> None:
    run = RunDirectory.open(cache)
    assert run.path.parent == cache / "run"
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert run.repository.is_dir()
    assert run.environment == {"NEREID_RUN": str(run.path)}
    assert run.shared_memory_prefix.startswith("nereid-")
    assert f"-{os.getpid()}-" in run.shared_memory_prefix
    run.close()
    run.close()
    assert list((cache / "run").iterdir()) == []


@pytest.mark.parametrize("depth", [0, 3])
def test_a_socket_has_a_path_that_fits_and_reaches_every_process(cache: Path, shared_memory: Path, depth: int) -> None:
    for _ in range(depth):
        cache /= "a-long-name-" * 5
    cache.mkdir(parents=True, exist_ok=True)
    run = RunDirectory.open(cache)
    path = run.socket_path("some.sock")
    assert len(path) <= 107
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        assert (run.path / "some.sock").is_socket()
        code = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
        subprocess.run([sys.executable, "-c", code, path], check=True)
    run.close()


def test_closing_removes_our_regions_and_kills_our_processes_only(cache: Path, shared_memory: Path) -> None:
    run = RunDirectory.open(cache)
    ours = shared_memory / f"{run.shared_memory_prefix}1234"
    foreign = shared_memory / "triton_python_backend_shm_region_1"
    for region in (ours, foreign):
        region.touch()
    marked = subprocess.Popen(["sleep", "60"], env={**os.environ, **run.environment})
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, "NEREID_RUN": f"{run.path}x"})
    try:
        run.close()
        assert marked.wait(5) == -9
        assert other.poll() is None
        assert (ours.exists(), foreign.exists()) == (False, True)
    finally:
        for process in (marked, other):
            process.kill()
            process.wait()


def test_the_next_start_clears_a_killed_run(cache: Path, shared_memory: Path) -> None:
    path, prefix = abandon(cache)
    (path / "triton_models" / "m").mkdir()
    leftover = subprocess.Popen(["sleep", "60"], env={**os.environ, "NEREID_RUN": str(path)})
    (shared_memory / f"{prefix}region").touch()
    try:
        run = RunDirectory.open(cache)
        assert leftover.wait(5) == -9
        assert not path.exists()
        assert list(shared_memory.iterdir()) == []
        run.close()
    finally:
        leftover.kill()
        leftover.wait()


def test_a_killed_run_is_cleared_without_a_next_start(cache: Path) -> None:
    code = f"""
import os, pathlib, signal, subprocess
from native_service.run_directory import RunDirectory
run = RunDirectory.open(pathlib.Path({str(cache)!r}))
region = pathlib.Path("/dev/shm", run.shared_memory_prefix + "region")
region.touch()
child = subprocess.Popen(["sleep", "600"], env=os.environ | run.environment, start_new_session=True,
                         stdout=subprocess.DEVNULL)
print(run.path, region, child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    path, region, pid = done.stdout.split()
    deadline = time.monotonic() + 60
    while (left := [Path(path).exists(), Path(region).exists(), alive({int(pid)})]) != [False, False, set()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_what_clears_a_run_afterwards_ends_with_it_and_outlives_signals_to_all(cache: Path) -> None:
    run = RunDirectory.open(cache)
    afterwards = run._afterwards
    ignored = f"/proc/{afterwards.pid}/status"
    deadline = time.monotonic() + 60
    while int(re.search(r"SigIgn:\s*(\w+)", Path(ignored).read_text())[1], 16) & 1 << signal.SIGTERM - 1 == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(afterwards.pid, number)
    assert afterwards.poll() is None
    run.close()
    assert afterwards.poll() == 0


def test_a_living_run_is_left_alone(cache: Path, shared_memory: Path) -> None:
    first = RunDirectory.open(cache)
    region = shared_memory / f"{first.shared_memory_prefix}x"
    region.touch()
    second = RunDirectory.open(cache)
    assert first.path.is_dir()
    assert region.exists()
    second.close()
    assert region.exists()
    first.close()
    assert not region.exists()


def test_two_caches_never_share_a_prefix(tmp_path: Path, shared_memory: Path) -> None:
    runs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        runs.append(RunDirectory.open(tmp_path / name))
    assert len({run.shared_memory_prefix.split("-")[1] for run in runs}) == 2
    for run in runs:
        run.close()


@pytest.mark.parametrize("looks", ["sweep", "leftovers"])
def test_a_run_that_ends_while_others_are_looked_at_is_passed_over(
    cache: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch, looks: str
) -> None:
    """It removes its folder by itself, between our look into the folder of runs and the one at its lease."""
    ended, _ = abandon(cache)
    try_lock = run_directory.locks.try_lock

    def ends_first(path: Path) -> int | None:
        if path.parent == ended and ended.exists():
            shutil.rmtree(ended)
        return try_lock(path)

    monkeypatch.setattr(run_directory.locks, "try_lock", ends_first)
    if looks == "sweep":
        run_directory.sweep(cache / "run")
    else:
        assert run_directory.leftovers(cache) == ([], [])
    assert not ended.exists()
