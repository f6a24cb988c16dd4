"""What ``nereid doctor`` finds; machines that lack something are described or imitated, one run is real."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from serving import write_adder

from native_service import cli, settings
from native_service.operation import doctor, preflight
from native_service.operation.doctor import Subject
from native_service.operation.preflight import OK, PROBLEM, WARNING, Finding
from native_service.run_directory import RunDirectory, leftovers
from native_service.settings import Limits
from native_service.triton import embedded as embedded_triton

GIB = 1 << 30


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("NEREID_CACHE_DIR", str(folder))
    return folder


def one(findings: Iterator[Finding], check: str | None = None) -> Finding:
    (finding,) = [finding for finding in findings if check in (None, finding.check)]
    return finding


def settings_of(folder: Path, *, server: str = "", device: str = "cpu", names: tuple[str, ...] = ("adder",)) -> Path:
    rows = "".join(
        f"  - {{name: {name}, device: {device}, queue_capacity: 1, options: {{max_batch_size: 4}}}}\n" for name in names
    )
    (folder / "models").mkdir(exist_ok=True)
    file = folder / "nereid.yaml"
    file.write_text(f"server: {{bind_addr: '127.0.0.1:0', ml_backends_path: models{server}}}\nmodels:\n{rows}")
    return file


def subject(cache: Path, file: Path | None = None, **more: Any) -> Subject:
    return Subject(cache, None if file is None else settings.load(file), **more)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Callable[..., dict[str, Finding]]:
    """The findings about a host with so much free."""

    def look(shared: int = GIB, disk: int = 10 * GIB, files: int = 65_536) -> dict[str, Finding]:
        free = {preflight.SHARED_MEMORY: shared, cache: disk}
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))
        monkeypatch.setattr(resource, "getrlimit", lambda _: (files, 65_536))
        return {finding.check: finding for finding in preflight.of_host(Limits(), cache)}

    return look


def test_a_host_with_room_for_everything_is_well(host: Callable[..., dict[str, Finding]]) -> None:
    assert {finding.level for finding in host().values()} == {OK}


@pytest.mark.parametrize(
    ("lacks", "check", "level", "words"),
    [
        (
            {"shared": 64 << 20},
            "shared memory",
            WARNING,
            "/dev/shm has 64 MiB free; a request .* needs 384 MiB; .*--shm-size",
        ),
        ({"disk": GIB}, "disk", WARNING, "1024 MiB free; make room, or set NEREID_CACHE_DIR"),
        ({"disk": 1 << 20}, "disk", PROBLEM, "1 MiB free"),
        ({"files": 256}, "file descriptors", WARNING, "may open 256 files.*; ulimit -n 4096"),
    ],
)
def test_what_a_host_lacks_is_told_with_a_fix(
    host: Callable[..., dict[str, Finding]], lacks: dict[str, int], check: str, level: str, words: str
) -> None:
    findings = host(**lacks)
    found = findings.pop(check)
    assert (found.level, re.search(words, str(found)) is not None) == (level, True)
    assert {finding.level for finding in findings.values()} == {OK}


def test_a_port_somebody_has_is_a_problem(cache: Path, tmp_path: Path) -> None:
    file = settings_of(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        file.write_text(file.read_text().replace("127.0.0.1:0", address))
        found = one(doctor._ports(subject(cache, file)))
    assert (found.level, address in found.text, "ss -ltnp" in found.fix) == (PROBLEM, True, True)
    assert one(doctor._ports(subject(cache, file))).level == OK


def test_a_server_that_is_not_there_yet_will_be_fetched(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_triton, "locate", lambda _: None)
    found = one(doctor._interpreter(subject(cache)), "tritonserver")
    assert (found.level, "nereid serve" in found.fix) == (WARNING, True)
    assert not (cache / "triton").exists()


def test_numpy_2_on_the_embedded_server_is_a_warning_and_on_a_newer_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "np", SimpleNamespace(__version__="2.4.0"))
    assert (one(doctor._numpy(None)).level, "BYTES" in one(doctor._numpy(None)).text) == (WARNING, True)
    newer = embedded_triton.TritonInstall(Path("/x"), "2.60.0", embedded=False)
    assert one(doctor._numpy(newer)).level == OK


def test_another_envoy_than_the_tested_one_is_a_warning_and_a_broken_one_a_problem(cache: Path, tmp_path: Path) -> None:
    program = tmp_path / "envoy"
    program.write_text('#!/bin/sh\necho "$0  version: 12ab/1.39.2/Clean/RELEASE/BoringSSL"\n')
    program.chmod(0o755)
    found = one(doctor._envoy(subject(cache, envoy=program)))
    assert (found.level, "is 1.39.2, tested is 1.40" in found.text) == (WARNING, True)
    program.write_text("#!/bin/sh\nexit 3\n")
    assert one(doctor._envoy(subject(cache, envoy=program))).level == PROBLEM
    assert one(doctor._envoy(subject(cache, envoy=tmp_path / "none"))).level == PROBLEM


def test_engines_that_clash_or_cannot_be_imported_are_told(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library, code in {"jax": "raise ImportError('jaxlib is too old')", "torch": "__version__ = '9'"}.items():
        (tmp_path / f"{library}.py").write_text(code)
    (tmp_path / "onnxruntime.py").write_text("raise ModuleNotFoundError(\"No module named 'onnxruntime'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "_is_installed", lambda name: name.startswith("onnxruntime"))
    clash, jax, torch, onnxruntime = doctor._engines(subject(cache))
    assert (clash.level, clash.text) == (PROBLEM, "onnxruntime and onnxruntime-gpu are both installed and share files")
    assert (jax.level, "jaxlib is too old" in jax.text) == (PROBLEM, True)
    assert (torch.level, torch.text) == (OK, "torch 9")
    assert (onnxruntime.level, "nereid-triton[onnx]" in onnxruntime.text) == (OK, True)


def test_gpus_are_looked_for_only_when_they_are_asked_for(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = tmp_path / "dev"
    devices.mkdir()
    monkeypatch.setattr(doctor, "_DEVICES", devices)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert list(doctor._gpus(subject(cache, settings_of(tmp_path)))) == []
    file = settings_of(tmp_path, device="cuda:1")
    assert one(doctor._gpus(subject(cache, file))).level == PROBLEM
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (devices / name).touch()
    assert one(doctor._gpus(subject(cache, file))).level == OK
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = one(doctor._gpus(subject(cache, file)))
    assert (found.level, "1 GPUs are visible (CUDA_VISIBLE_DEVICES=1)" in found.text) == (PROBLEM, True)


def test_a_clock_before_the_installation_or_off_the_disk_s_is_told(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert one(doctor._clock(subject(cache))).level == OK
    now = doctor.time.time()
    for off_s, words in ((-(10**9), "before nereid was installed"), (60, "-60 s off")):
        monkeypatch.setattr(doctor.time, "time", lambda off_s=off_s: now + off_s)
        found = one(doctor._clock(subject(cache)))
        assert (found.level, words in found.text) == (WARNING, True)


def test_a_folder_that_everyone_may_write_to_is_a_warning(cache: Path, tmp_path: Path) -> None:
    file = settings_of(tmp_path)
    assert one(doctor._folder(subject(cache, file))).level == OK
    (tmp_path / "models").chmod(0o777)
    assert one(doctor._folder(subject(cache, file))).level == WARNING


def test_keys_that_cannot_be_read_are_a_problem(cache: Path, tmp_path: Path) -> None:
    assert list(doctor._access(subject(cache, settings_of(tmp_path)))) == []
    keys = ", auth: {keys: [{name: lab, role: admin, key_file: key}]}"
    file = settings_of(tmp_path, server=keys)
    found = one(doctor._access(subject(cache, file)))
    assert (found.level, "key 'lab' cannot be read" in found.text) == (PROBLEM, True)
    (tmp_path / "key").write_text("0123456789abcdef")
    assert one(doctor._access(subject(cache, file))).level == OK


def test_certificates_and_keys_that_cannot_be_read_are_told_all_at_once(cache: Path, tmp_path: Path) -> None:
    access = "tls: {cert: c, key: k}, auth: {keys: [{name: lab, role: admin, key_file: key}], jwt: {secret_file: s}}"
    file = settings_of(tmp_path, server=f", {access}")
    texts = [found.text for found in doctor._access(subject(cache, file))]
    beginnings = ("server.tls.cert", "server.tls.key", "server.auth.keys: key 'lab'", "server.auth.jwt: the secret")
    assert [text.startswith(each) for text, each in zip(texts, beginnings, strict=True)] == [True] * 4


def test_what_a_dead_run_left_is_told_and_a_living_one_is_left_alone(cache: Path) -> None:
    living, dead = RunDirectory.open(cache), RunDirectory.open(cache)
    regions = [Path("/dev/shm", f"{run.shared_memory_prefix}test") for run in (living, dead)]
    for region in regions:
        region.touch()
    try:
        assert leftovers(cache) == ([], [])
        dead._afterwards.kill()  # or it would clear what is left
        dead._afterwards.wait()
        os.close(dead._lease)  # as the kernel does when its process ends
        dead._lease = None
        assert leftovers(cache) == ([dead.path.name], [regions[1].name])
        assert one(doctor._leftovers(subject(cache))).level == WARNING
        assert dead.path.exists()
    finally:
        for region in regions:
            region.unlink()
        living.close()


@pytest.mark.triton
def test_a_machine_that_runs_these_tests_is_well_and_each_bad_model_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = settings_of(tmp_path, names=("adder", "broken", "nowhere"))
    write_adder(tmp_path / "models" / "adder.onnx")
    (tmp_path / "models" / "broken.onnx").write_bytes(b"no model")
    done = CliRunner().invoke(cli.nereid, ["doctor", "--config", str(file), "--json"])
    findings = json.loads(done.stdout)
    problems = [finding for finding in findings if finding["level"] == PROBLEM]
    assert done.exit_code == 1
    assert [finding["check"] for finding in problems] == ["model", "model"]
    assert ["'nowhere'" in problems[0]["text"], "'broken': broken.onnx" in problems[1]["text"]] == [True, True]
    told = {finding["check"]: finding["text"] for finding in findings if finding["level"] == OK}
    assert told["model"] == "'adder': onnx on cpu"
    assert {"machine", "glibc", "python", "libpython", "envoy", "shared memory", "disk", "port"} <= told.keys()
    shutil.rmtree(tmp_path / "models")
    done = CliRunner().invoke(cli.nereid, ["doctor", "--config", str(file)])
    assert (done.exit_code, "problem  settings: " in done.stdout) == (1, True)
