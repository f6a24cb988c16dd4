from __future__ import annotations

import errno
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from nereid_backend.program_cache import ProgramCache, processor_features


def held(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_written_is_read_by_the_next_process(tmp_path: Path) -> None:
    ProgramCache(tmp_path).write("k", b"content")
    assert (ProgramCache(tmp_path).read("k"), ProgramCache(tmp_path).read("other")) == (b"content", None)
    assert held(tmp_path) == ["k"]


def test_an_entry_under_another_key_is_not_taken(tmp_path: Path) -> None:
    ProgramCache(tmp_path).write("k", b"content")
    (tmp_path / "k").rename(tmp_path / "other")
    assert ProgramCache(tmp_path).read("other") is None


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    cache = ProgramCache(tmp_path, max_bytes=3 * 132)  # 100 bytes and a digest each
    for age, key in enumerate("cba"):
        cache.write(key, bytes(100))
        os.utime(tmp_path / key, (1000 - age, 1000 - age))
    assert cache.read("a") == bytes(100)  # the oldest, used just now
    cache.write("d", bytes(100))
    assert held(tmp_path) == ["a", "c", "d"]


def test_content_larger_than_the_cache_drives_nothing_out(tmp_path: Path) -> None:
    cache = ProgramCache(tmp_path, max_bytes=200)
    cache.write("k", bytes(100))
    cache.write("large", bytes(201))
    assert held(tmp_path) == ["k"]


def test_what_a_killed_writer_left_is_removed_once_nobody_can_be_writing_it(tmp_path: Path) -> None:
    for name, age_s in ((".writing-old", 7200), (".writing-new", 10)):
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    ProgramCache(tmp_path).write("k", b"content")
    assert held(tmp_path) == [".writing-new", "k"]


def test_a_full_disk_is_told_and_leaves_nothing_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # the kernel itself ends the write half-way
    try:
        ProgramCache(tmp_path).write("k", bytes(4 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert held(tmp_path) == []
    assert ["File too large" in record.message for record in caplog.records] == [True]


def test_a_disk_that_can_only_be_read_still_gives_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ProgramCache(tmp_path).write("k", b"content")

    def read_only(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkstemp", read_only)
    monkeypatch.setattr(os, "utime", read_only)
    cache = ProgramCache(tmp_path)
    cache.write("other", b"content")
    assert (cache.read("k"), held(tmp_path)) == (b"content", ["k"])
    assert ["Read-only file system" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("setting", ["NEREID_CACHE_DIR", "XDG_CACHE_HOME"])
def test_the_folder_is_made_for_this_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.delenv("NEREID_CACHE_DIR", raising=False)
    monkeypatch.setenv(setting, str(tmp_path / "cache"))
    root = tmp_path / ("cache" if setting == "NEREID_CACHE_DIR" else "cache/nereid")
    ProgramCache.open().write("k", b"content")
    assert held(root / "programs") == ["k"]
    assert [path.stat().st_mode & 0o777 for path in (root, root / "programs", root / "programs" / "k")] == [
        0o700,
        0o700,
        0o600,
    ]


@pytest.mark.parametrize(
    ("where", "mode"), [("cache", 0o777), ("cache/programs", 0o770), ("cache/programs", 0o702)], ids=str
)
def test_programs_that_others_may_replace_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str, mode: int
) -> None:
    monkeypatch.setenv("NEREID_CACHE_DIR", str(tmp_path / "cache"))
    ProgramCache.open().write("k", b"content")
    (tmp_path / where).chmod(mode)
    assert ProgramCache.open().read("k") is None
    assert ["compiled programs are not cached" in record.message for record in caplog.records] == [True]


def test_a_folder_of_another_user_or_behind_a_link_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NEREID_CACHE_DIR", str(tmp_path / "cache"))
    ProgramCache.open().write("k", b"content")
    (tmp_path / "cache" / "programs").rename(tmp_path / "theirs")
    (tmp_path / "cache" / "programs").symlink_to(tmp_path / "theirs")
    assert ProgramCache.open().read("k") is None
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert ProgramCache.open().read("k") is None
    assert ["compiled programs are not cached" in record.message for record in caplog.records] == [True, True]


def test_a_folder_that_cannot_be_made_is_told_and_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEREID_CACHE_DIR", str(tmp_path / "file"))
    cache = ProgramCache.open()
    cache.write("k", b"content")
    assert cache.read("k") is None
    assert ["compiled programs are not cached" in record.message for record in caplog.records] == [True]


def test_the_processor_is_described_by_what_stays_the_same() -> None:
    assert processor_features() == processor_features() != []
    assert not any("MHz" in line for line in processor_features())
