from dataclasses import replace
from pathlib import Path

import pytest

from native_service.operation import preflight
from native_service.operation.preflight import Machine
from native_service.settings import Limits
from native_service.triton.embedded import TritonInstall
from nereid_backend.errors import TritonUnavailable


@pytest.fixture
def install(tmp_path: Path) -> TritonInstall:
    stub = tmp_path / "backends-3.11" / "python" / "triton_python_backend_stub"
    stub.parent.mkdir(parents=True)
    stub.write_bytes(Path("/bin/sh").read_bytes())
    return TritonInstall(Path("/x/tritonserver"), "2.51.0", True, tmp_path / "backends-3.11", (tmp_path / "libs",))


GOOD = Machine("Linux", "x86_64", (2, 36), (3, 11), "CPython", Path("/usr/lib/libpython3.11.so.1.0"))


def check(install: TritonInstall, **change: object) -> None:
    preflight.check(install, Limits(), Path("/"), replace(GOOD, **change))  # type: ignore[arg-type]


def test_a_fitting_machine_passes(install: TritonInstall) -> None:
    check(install)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architecture": "aarch64"}, "runs on x86-64 Linux, this is aarch64 Linux"),
        ({"system": "Darwin"}, "runs on x86-64 Linux, this is x86_64 Darwin"),
        ({"glibc": (2, 31)}, "needs glibc 2.35 or newer, found 2.31"),
        ({"glibc": ()}, "needs glibc 2.35 or newer, found none"),
        ({"python": (3, 14)}, "runs models on CPython 3.11 to 3.13, this is CPython 3.14"),
        ({"implementation": "PyPy"}, "this is PyPy 3.11"),
        ({"libpython": None}, "needs a shared libpython3.11, this interpreter has none"),
    ],
)
def test_each_misfit_is_one_line_with_a_way_out(install: TritonInstall, change: dict[str, object], words: str) -> None:
    with pytest.raises(TritonUnavailable) as caught:
        check(install, **change)
    [line] = str(caught.value).splitlines()
    assert words in line
    assert "--tritonserver PATH" in line


def test_a_missing_stub_is_told(install: TritonInstall) -> None:
    with pytest.raises(TritonUnavailable, match=r"no stub for Python 3\.11"):
        check(replace(install, backend_directory=Path("/nowhere")))


def test_libraries_the_loader_cannot_find_are_named(
    install: TritonInstall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ldd = tmp_path / "bin" / "ldd"
    ldd.parent.mkdir()
    ldd.write_text("#!/bin/sh\necho '\tlibfoo.so.1 => not found'\necho '\tlibc.so.6 => /lib/libc.so.6 (0x0)'\n")
    ldd.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ldd.parent}:/usr/bin:/bin")
    with pytest.raises(TritonUnavailable) as caught:
        check(install)
    assert str(caught.value) == (
        "triton_python_backend_stub needs the shared library libfoo.so.1; install the package that has it"
    )


def test_all_misfits_are_told_at_once(install: TritonInstall) -> None:
    with pytest.raises(TritonUnavailable) as caught:
        check(install, glibc=(2, 31), libpython=None)
    assert len(str(caught.value).splitlines()) == 2


def test_a_server_that_came_with_the_machine_is_trusted(install: TritonInstall) -> None:
    check(replace(install, embedded=False), architecture="aarch64")


def test_the_user_s_library_path_stays_behind_ours(install: TritonInstall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/theirs")
    path = preflight.library_path(install).split(":")
    assert (path[0], path[-1]) == (str(install.library_paths[0]), "/theirs")
