"""Changes of what is served on a real tritonserver, with a front that can be told to refuse them."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from serving import alive, input_tensor, write_adder
from tritonclient.utils import InferenceServerException

from converters.convert import convert
from native_service.models import catalogue
from native_service.models.catalogue import Catalogue
from native_service.models.conversion import Converted, Source
from native_service.settings import ModelSettings
from native_service.triton import process
from nereid_backend.errors import EnvoyUnavailable, ModelLoadError, RepositoryError

pytestmark = pytest.mark.triton

ROW = np.zeros((1, 4), np.float32)


class Shelf:
    """A catalogue on the session's tritonserver; ``put`` takes what each Triton model behind the public one adds."""

    def __init__(self, triton: Any, client: Any, front: Any, folder: Path) -> None:
        self._triton, self._client, self._folder = triton, client, folder
        (folder / "staging").mkdir()
        run: Any = SimpleNamespace(repository=triton.repository, staging=folder / "staging")
        self.front = front
        self.catalogue = Catalogue(run, triton._server, 60)
        settings: Any = None
        triton._do(self.catalogue.open(self.front, settings, None))

    def put(self, name: str, amount: float, *, capacity: int = 1, **hidden: float) -> None:
        source = self._folder / f"{name}.onnx"
        staged = self._folder / "staging" / "fresh"
        for model, its in {**hidden, name: amount}.items():
            write_adder(source, its)
            spec = convert(source, staged, name=model, max_batch_size=4).spec
            if np.isnan(its):
                (artifact,) = (staged / model / "1").glob("*.onnx")
                artifact.write_bytes(b"no model")
        settings = ModelSettings(name=name, device="cpu", queue_capacity=capacity)
        self._triton._do(self.catalogue.put(Source(source, settings), Converted(spec, staged)))
        assert list((self._folder / "staging").iterdir()) == []

    def remove(self, name: str) -> None:
        self._triton._do(self.catalogue.remove(name))

    def amount(self, model: str) -> float:
        return float(self._client.infer(model, [input_tensor("input", ROW)]).as_numpy("output")[0, 0])

    def is_gone(self, *models: str) -> bool:
        for model in models:
            with pytest.raises(InferenceServerException):
                self.amount(model)
        return not any((self._triton.repository / model).exists() for model in models)


@pytest.fixture
def shelf(triton: Any, client: Any, front: Any, tmp_path: Path) -> Shelf:
    return Shelf(triton, client, front, tmp_path)


def test_a_model_and_the_hidden_one_behind_it_come_change_and_go_together(shelf: Shelf) -> None:
    shelf.put("pair", 1, pair_twin=10)
    assert (shelf.front.models, shelf.amount("pair"), shelf.amount("pair_twin")) == ({"pair": 1}, 1, 10)
    shelf.put("pair", 2, pair_twin=20)
    assert (shelf.amount("pair"), shelf.amount("pair_twin")) == (2, 20)
    shelf.put("pair", 3)
    assert (shelf.amount("pair"), shelf.is_gone("pair_twin")) == (3, True)
    shelf.remove("pair")
    assert (shelf.front.models, dict(shelf.catalogue.models), shelf.is_gone("pair")) == ({}, {}, True)


def test_a_version_that_does_not_load_leaves_the_one_before(shelf: Shelf) -> None:
    shelf.put("half", 1, half_twin=10)
    before = dict(shelf.catalogue.models)
    with pytest.raises(ModelLoadError, match="model 'half' could not be loaded"):
        shelf.put("half", np.nan, half_twin=20)
    assert (shelf.amount("half"), shelf.amount("half_twin"), dict(shelf.catalogue.models)) == (1, 10, before)
    shelf.put("half", 3, half_twin=30)
    assert (shelf.amount("half"), shelf.amount("half_twin")) == (3, 30)
    shelf.remove("half")


def test_a_new_model_that_does_not_load_leaves_nothing(shelf: Shelf) -> None:
    with pytest.raises(ModelLoadError):
        shelf.put("fresh", np.nan, fresh_twin=1)
    assert (dict(shelf.catalogue.models), shelf.is_gone("fresh", "fresh_twin")) == ({}, True)
    shelf.put("fresh", 1)
    assert shelf.amount("fresh") == 1
    shelf.remove("fresh")


def test_what_the_front_refuses_is_undone(shelf: Shelf) -> None:
    shelf.put("refused", 1)
    shelf.front.refuses = True
    with pytest.raises(EnvoyUnavailable):
        shelf.put("refused", 2, capacity=2)
    assert shelf.amount("refused") == 1
    with pytest.raises(EnvoyUnavailable):
        shelf.put("unrouted", 1)
    assert shelf.is_gone("unrouted")
    with pytest.raises(EnvoyUnavailable):
        shelf.remove("refused")
    assert (shelf.amount("refused"), list(shelf.catalogue.models)) == (1, ["refused"])
    shelf.front.refuses = False
    shelf.remove("refused")


def test_a_front_that_refused_is_told_again_what_holds(shelf: Shelf, triton: Any) -> None:
    shelf.put("told", 1)
    shelf.front.refuses = True
    with pytest.raises(EnvoyUnavailable):
        shelf.put("told", 1, capacity=2)
    shelf.front.refuses = False
    triton._do(shelf.catalogue.route_dead())
    assert shelf.front.asked == {"told": 1}
    shelf.remove("told")


def test_what_triton_does_not_unload_holds_nothing_and_can_be_loaded_again(
    shelf: Shelf, triton: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_over() -> bool:
        return True

    shelf.put("stuck", 1)
    processes = shelf.catalogue.processes_of("stuck")
    with monkeypatch.context() as patch:
        patch.setattr(process, "_UNLOAD_TIMEOUT_S", 1e-9)
        assert triton._do(shelf.catalogue.leave("stuck", is_over))
    deadline = time.monotonic() + 60
    while processes and alive(set(processes)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert triton._do(shelf.catalogue.enter("stuck"))
    assert (len(processes), shelf.amount("stuck")) == (1, 1)
    shelf.remove("stuck")


def test_a_swap_that_memory_has_no_room_for_is_refused(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       16000000 kB\nMemAvailable:          0 kB\nHugePages_Total: 0\n")
    monkeypatch.setattr(catalogue, "_MEMORY", tmp_path / "meminfo")
    shelf.put("large", 1)
    with pytest.raises(RepositoryError, match="0 MiB are free; unload it first, or restart the server"):
        shelf.put("large", 2)
    assert shelf.amount("large") == 1
    shelf.remove("large")


def test_a_disk_that_fails_half_way_leaves_the_version_before(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, triton: Any
) -> None:
    shelf.put("disk", 1, disk_twin=10)
    rename = Path.rename

    def no_space(path: Path, target: Path) -> Path:
        if target == triton.repository / "disk" and "before" not in str(path):
            raise OSError(28, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", no_space)
    with pytest.raises(RepositoryError, match=r"model 'disk' cannot take its place \(No space left on device\)"):
        shelf.put("disk", 2, disk_twin=20)
    assert (shelf.amount("disk"), shelf.amount("disk_twin")) == (1, 10)
    shelf.remove("disk")


def test_a_hidden_model_never_takes_the_place_of_another(shelf: Shelf) -> None:
    shelf.put("owner", 1)
    with pytest.raises(RepositoryError, match="model 'thief' needs the name 'owner', which is served; rename one"):
        shelf.put("thief", 2, owner=3)
    assert (shelf.amount("owner"), shelf.is_gone("thief")) == (1, True)
    shelf.remove("owner")


def test_the_same_files_again_change_nothing(shelf: Shelf, triton: Any) -> None:
    shelf.put("same", 1)
    place = triton.repository / "same" / "1"
    before = place.stat().st_ino
    shelf.put("same", 1, capacity=7)
    assert (place.stat().st_ino, shelf.front.models["same"]) == (before, 7)
    shelf.put("same", 2)
    assert place.stat().st_ino != before
    shelf.remove("same")


def test_a_disk_without_room_to_convert_is_told(shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(**_: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    source, converter = Source(tmp_path / "new.onnx", ModelSettings(name="new", device="cpu", queue_capacity=1)), None
    with pytest.raises(RepositoryError, match=r"'new' cannot be converted \(No space left on device"):
        asyncio.run(shelf.catalogue.stage(source, converter, {}))  # type: ignore[arg-type]
