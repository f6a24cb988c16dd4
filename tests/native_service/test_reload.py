"""What of a changed settings file is applied, refused or told; the models are a fake's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from native_service import settings
from native_service.models.control import Outcome
from native_service.operation.reload import Part, Reload
from native_service.settings import ServerSettings
from nereid_backend.errors import BundleError, SettingsError

MODELS = "models: [{name: a, device: cpu, queue_capacity: 1}]"


class FakeControl:
    """Serves any list of models, unless ``refuses``."""

    def __init__(self) -> None:
        self.refuses = False
        self.models: tuple[str, ...] = ()

    async def reload(
        self, fresh: settings.Settings, outcome: Outcome, *, before: Callable[[], Awaitable[None]]
    ) -> None:
        if self.refuses:
            raise BundleError("model 'a': no weights\nmodel 'b': no manifest")
        await before()
        self.models = tuple(model.name for model in fresh.models)
        self.folder = fresh.server.folder
        outcome.applied.append("models")


class Chunks:
    """A part of the server that holds ``max_chunks``; it cannot have 13."""

    def __init__(self) -> None:
        self.most = 0
        self.part = Part(("limits.max_chunks",), self.prepare)

    async def prepare(self, server: ServerSettings) -> Callable[[Outcome], Awaitable[None]]:
        if server.limits.max_chunks == 13:
            raise SettingsError("server.limits.max_chunks cannot be 13")

        async def commit(outcome: Outcome) -> None:
            self.most = server.limits.max_chunks
            if self.most == 99:
                outcome.applied.append("a file changed")

        return commit


class File:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "nereid.yaml"
        self.write()
        self.control: Any = FakeControl()
        self.chunks = Chunks()
        self.reload = Reload(
            settings.load(self._path), lambda: settings.load(self._path), self.control, [self.chunks.part]
        )

    def write(self, server: str = "", bind: str = "127.0.0.1:1", models: str = MODELS) -> None:
        self._path.write_text(f"server: {{bind_addr: '{bind}', ml_backends_path: .{server}}}\n{models}\n")

    def run(self) -> Outcome:
        return asyncio.run(self.reload.run())


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path)


def test_what_can_change_does_and_each_other_key_takes_a_restart(file: File) -> None:
    file.write(", http_addr: '127.0.0.1:2', limits: {max_chunks: 5, max_request_bytes: 100}", bind="127.0.0.1:3")
    refused = [
        "server.bind_addr takes a restart: connections that are open would be closed",
        "server.http_addr takes a restart: connections that are open would be closed",
        "server.limits.max_request_bytes takes a restart: open connections have windows of that size",
    ]
    outcome = file.run()
    assert outcome == Outcome(["server.limits.max_chunks is 5 now, was 65536", "models"], [], refused)
    assert file.chunks.most == 5
    assert file.run() == Outcome(["models"], [], refused)  # what was refused still differs


def test_encryption_is_not_turned_on_under_open_connections(file: File) -> None:
    file.write(", tls: {cert: cert.pem, key: key.pem}")
    assert file.run().refused == ["server.tls takes a restart: connections that are open would be closed"]


def test_models_are_not_looked_for_in_a_folder_that_takes_a_restart(file: File, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    file.write()
    path = tmp_path / "nereid.yaml"
    path.write_text(path.read_text().replace("ml_backends_path: .", "ml_backends_path: elsewhere"))
    assert file.run().refused == ["server.ml_backends_path takes a restart: every model would be another one"]
    assert file.control.folder == tmp_path


def test_a_file_with_a_mistake_changes_nothing_and_says_why(file: File) -> None:
    file.write(", limits: {max_chunks: -1}, secret_key: x")
    outcome = file.run()
    assert (outcome.applied, outcome.refused, outcome.failed[-1]) == ([], [], "nothing has changed")
    assert ["server.limits.max_chunks must be greater than 0" in outcome.failed[0], len(outcome.failed)] == [True, 3]
    assert (file.chunks.most, file.control.models) == (0, ())


def test_a_part_that_refuses_or_a_model_that_cannot_be_made_keeps_everything_as_it_was(file: File) -> None:
    file.write(", limits: {max_chunks: 13}")
    assert file.run() == Outcome([], ["server.limits.max_chunks cannot be 13", "nothing has changed"])
    assert file.control.models == ()
    file.write(", limits: {max_chunks: 12}")
    file.control.refuses = True
    assert file.run().failed == ["model 'a': no weights", "model 'b': no manifest", "nothing has changed"]
    assert file.chunks.most == 0
    file.control.refuses = False
    assert file.run().applied == ["server.limits.max_chunks is 12 now, was 65536", "models"]


def test_a_part_tells_what_the_keys_do_not_show(file: File) -> None:
    file.write(", limits: {max_chunks: 99}")
    assert file.run().applied[:2] == ["server.limits.max_chunks is 99 now, was 65536", "a file changed"]


def test_texts_are_not_told_because_they_may_be_secrets(file: File, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    file.write(bind="127.0.0.1:4567")
    [refused] = file.run().refused
    assert refused.startswith("server.bind_addr takes a restart: ")
    assert "takes a restart" in caplog.text
    assert "4567" not in caplog.text


def test_a_part_of_a_section_stands_for_all_below_it() -> None:
    part = Part(("auth",), Chunks().prepare)
    assert [part.covers(key) for key in ("auth", "auth.keys", "authority")] == [True, True, False]
