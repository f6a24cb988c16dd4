"""Programs that are started from a copy in memory, their code in huge pages."""

import asyncio
import os
import platform
import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from native_service.envoy import huge_pages
from native_service.envoy import install as envoy_install
from nereid_backend.spec import ModelSpec

PAGE = 4096
CODE_BYTES = 5 * 1024 * 1024
ADDRESS = 0x10_0000_0000 + 37 * PAGE  # not where its place in the file would have it


@pytest.fixture
def copy_program() -> Callable[[Path], int]:
    """The function under test; the test is skipped where the system does not allow what it does."""
    try:
        os.close(huge_pages.copy_program(envoy_install.find()))
    except OSError as error:
        pytest.skip(f"this system puts no programs into huge pages: {error}")
    return huge_pages.copy_program


def write_program(path: Path, exit_code: int, code_bytes: int = CODE_BYTES) -> Path:
    """A program that ends with ``exit_code``; the instructions are the last of its code."""
    if platform.machine() != "x86_64":
        pytest.skip(f"the program of this test is for x86_64, this machine is {platform.machine()}")
    instructions = b"\xbf" + struct.pack("<I", exit_code) + b"\xb8\x3c\x00\x00\x00\x0f\x05"  # exit(exit_code)
    entry = ADDRESS + code_bytes - len(instructions)
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 2, 62, 1, entry, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, PAGE, ADDRESS, ADDRESS, code_bytes, code_bytes, PAGE)
    path.write_bytes((header + segment).ljust(PAGE, b"\0") + instructions.rjust(code_bytes, b"\x90"))
    path.chmod(0o755)
    return path


def test_a_copy_does_what_the_program_does_and_nobody_can_change_it(
    copy_program: Callable[[Path], int], tmp_path: Path
) -> None:
    program = write_program(tmp_path / "program", 0)
    assert subprocess.run([program]).returncode == 0
    copy = copy_program(program)
    try:
        assert subprocess.run([f"/proc/{os.getpid()}/fd/{copy}"]).returncode == 0
        for change in (lambda: os.pwrite(copy, b"x", 0), lambda: os.truncate(copy, 0)):
            with pytest.raises(PermissionError):
                change()
    finally:
        os.close(copy)


def test_a_program_that_does_not_run_from_memory_is_told_before_it_is_needed(
    copy_program: Callable[[Path], int], tmp_path: Path
) -> None:
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match=r"does not run from memory.*exit status 3"):
        copy_program(write_program(tmp_path / "program", 3))
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no 64-bit program"),
        (b"#!/bin/sh\n".ljust(100), "no 64-bit program"),
        (b"\x7fELF\x02\x01".ljust(64, b"\xff"), "cannot be read"),
    ],
)
def test_what_is_no_program_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "program").write_bytes(content)
    with pytest.raises(ValueError, match=why):
        huge_pages.copy_program(tmp_path / "program")


def test_a_small_program_is_left_where_it_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no code that fills a huge page"):
        huge_pages.copy_program(write_program(tmp_path / "program", 0, code_bytes=PAGE))


def test_envoy_runs_in_huge_pages(
    copy_program: Callable[[Path], int], fronting: Callable[..., Any], spec: Callable[..., ModelSpec]
) -> None:
    async def scenario() -> None:
        async with fronting(spec()) as service:
            maps = Path(f"/proc/{service.front.envoy_pid}/smaps_rollup").read_text()
            mapped = re.search(r"ShmemPmdMapped: +(\d+) kB", maps)
            assert mapped
            assert int(mapped[1]) > 0

    asyncio.run(scenario())


def test_envoy_runs_from_its_file_where_huge_pages_are_not_to_be_had(
    fronting: Callable[..., Any], spec: Callable[..., ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_program: Path) -> int:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(huge_pages, "copy_program", refuse)

    async def scenario() -> None:
        async with fronting(spec()) as service:
            assert Path(f"/proc/{service.front.envoy_pid}/exe").samefile(envoy_install.find())

    asyncio.run(scenario())
