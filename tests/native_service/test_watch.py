import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from native_service.models import watch
from native_service.models.watch import fingerprint, scan, settled


class Views:
    """The latest view of a folder and how many there have been."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.all: list[dict[str, Any]] = []

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)


def run(folder: Path, scenario: Callable[[Views], Awaitable[None]]) -> None:
    async def inside() -> None:
        views = Views()

        async def follow() -> None:
            async with aclosing(settled(folder)) as looks:
                async for view in looks:
                    views.names = set(view)
                    views.all.append(dict(view))

        following = asyncio.create_task(follow())
        try:
            await scenario(views)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    asyncio.run(inside())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(watch, "_SETTLE_S", 0.5)
    monkeypatch.setattr(watch, "_LOOK_MS", 500)
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def write(model: Path, text: str = "text") -> None:
    model.mkdir(exist_ok=True, parents=True)
    (model / "manifest.yaml").write_text(text)


def test_models_are_told_as_they_come_and_go(folder: Path) -> None:
    write(folder / "first")

    async def scenario(views: Views) -> None:
        await views.until(lambda: views.names == {"first"})
        write(folder / "second")
        await views.until(lambda: views.names == {"first", "second"})
        (folder / "second").rename(folder / "third")
        await views.until(lambda: views.names == {"first", "third"})
        shutil.rmtree(folder / "first")
        await views.until(lambda: views.names == {"third"})

    run(folder, scenario)


def test_what_is_being_written_is_told_as_it_was_until_it_stands_still(folder: Path) -> None:
    write(folder / "model")

    async def scenario(views: Views) -> None:
        await views.until(lambda: views.names == {"model"})
        before = views.all[-1]["model"]
        for number in range(50):
            write(folder / "model", "x" * number)
            (folder / "new").mkdir(exist_ok=True)
            (folder / "new" / "weights").write_bytes(bytes(number))
            await asyncio.sleep(0.03)
            assert views.all[-1] == {"model": before}
        await views.until(lambda: views.names == {"model", "new"} and views.all[-1]["model"] != before)
        assert views.all[-1] == scan(folder)

    run(folder, scenario)


def test_a_model_replaced_in_two_steps_is_never_told_as_gone(folder: Path) -> None:
    write(folder / "model", "old")

    async def scenario(views: Views) -> None:
        await views.until(lambda: views.names == {"model"})
        before, count = views.all[-1]["model"], len(views.all)
        shutil.rmtree(folder / "model")
        await asyncio.sleep(0.05)
        write(folder / "model", "new")
        await views.until(lambda: views.all[-1].get("model") not in (None, before))
        assert all("model" in view for view in views.all[count:])

    run(folder, scenario)


def test_a_folder_that_cannot_be_read_tells_nothing_and_is_followed_again_when_it_is_back(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder / "model")

    async def scenario(views: Views) -> None:
        await views.until(lambda: views.names == {"model"})
        count = len(views.all)
        folder.rename(folder.with_name("elsewhere"))
        await asyncio.sleep(1.5)
        assert views.all[count:] in ([], [views.all[-1]] * (len(views.all) - count))
        assert views.names == {"model"}
        assert caplog.text.count("cannot be read") == 1
        folder.with_name("elsewhere").rename(folder)
        write(folder / "second")
        await views.until(lambda: views.names == {"model", "second"})

    run(folder, scenario)


def test_a_change_behind_a_link_is_seen_though_nothing_reports_it(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "real", "old")
    (folder / "model").symlink_to(tmp_path / "real")

    async def scenario(views: Views) -> None:
        await views.until(lambda: views.names == {"model"})
        before = views.all[-1]["model"]
        write(tmp_path / "real", "changed")
        await views.until(lambda: views.all[-1]["model"] != before)

    run(folder, scenario)


def test_a_folder_whose_changes_cannot_be_reported_is_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_many(*_: Any, **__: Any) -> Any:
        raise OSError(28, "inotify watch limit reached")

    monkeypatch.setattr("watchfiles.awatch", too_many)

    async def scenario(views: Views) -> None:
        write(folder / "model")
        await views.until(lambda: views.names == {"model"})

    run(folder, scenario)


def test_a_fingerprint_tells_content_and_not_hidden_files_or_the_name(folder: Path) -> None:
    write(folder / "model")
    first = fingerprint(folder / "model")
    (folder / "model" / ".cache").mkdir()
    (folder / "model" / ".cache" / "program").touch()
    (folder / "model" / "__pycache__").mkdir()
    (folder / "model" / "__pycache__" / "hooks.pyc").touch()
    assert fingerprint(folder / "model") == first
    (folder / "model").rename(folder / "renamed")
    assert fingerprint(folder / "renamed") == first
    assert fingerprint(folder / "model") == ()
    (folder / "renamed" / "deeper").mkdir()
    (folder / "renamed" / "deeper" / "weights").touch()
    assert fingerprint(folder / "renamed") != first
    (folder / "link").symlink_to("nowhere")
    assert scan(folder)["link"] == ()
    assert scan(folder / "renamed", as_one=True) == {"renamed": fingerprint(folder / "renamed")}
    assert scan(folder / "model", as_one=True) == {}


def test_of_a_link_to_a_whole_disk_only_a_part_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "_MOST_FILES", 50)
    for number in range(30):
        write(tmp_path / "disk" / f"{number:02}")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "linked").symlink_to(tmp_path / "disk")
    looked_at = []
    monkeypatch.setattr(watch, "_facts", lambda file, name: looked_at.append(file) or [(name, 0, 0, 0)])
    first, again = fingerprint(tmp_path / "models" / "linked"), fingerprint(tmp_path / "models" / "linked")
    assert first == again
    assert 10 < len(first) < 50
    assert len(looked_at) == 2 * len(first)
    assert caplog.text.count("linked holds more than 50 files and folders") == 1
