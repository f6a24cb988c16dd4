"""What is decided about models that come and go; Triton, the front and the converter are fakes, the folder is real."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from native_service import settings
from native_service.models import watch
from native_service.models.attempt import Attempt
from native_service.models.catalogue import Catalogue
from native_service.models.control import ModelControl, Outcome
from native_service.models.conversion import Converted, Source
from native_service.models.residency import Residency
from native_service.settings import ModelOptions, ModelSettings, ResidencySettings
from nereid_backend.errors import (
    AlreadyExists,
    BundleError,
    ModelLoadError,
    NereidError,
    NotFound,
    ResourceExhausted,
    TritonUnavailable,
)
from nereid_backend.spec import ModelSpec


class FakeTriton:
    """Serves the text in a model's directory; ``bad`` cannot be loaded. ``away`` answers nothing."""

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self.serves: dict[str, str] = {}
        self.loads = 0
        self.dead: set[str] = set()
        self.away = False
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def load(self, model: str, _timeout_s: float, _behind: Sequence[str] = ()) -> None:
        self.loads += 1
        await self.may_load.wait()
        if self.away:
            raise TritonUnavailable("no such luck")
        text = (self._repository / model / "text").read_text()
        if text == "bad":
            raise ModelLoadError(f"model {model!r} could not be loaded: bad")
        self.serves[model] = text
        self.dead.discard(model)

    def find_dead(self) -> frozenset[str]:
        return frozenset(self.dead)

    def processes_of(self, _model: str) -> list[int]:
        return []

    async def unload(self, model: str) -> None:
        self.serves.pop(model, None)  # of a name it does not know nothing is said


class FakeConverter:
    """A model is a file of text; ``wrong`` cannot be converted, ``restless`` changes while it is read."""

    async def __aenter__(self) -> FakeConverter:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def sources(self, its: Any) -> tuple[list[Source], list[str]]:
        folder = its.server.folder
        listed = {model.name for model in its.models}
        found = [path.name for path in sorted(folder.iterdir())] if its.others is not None else []
        models = (*its.models, *(its.others.named(name) for name in found if name not in listed))
        return [Source(folder / m.name, m) for m in models if (folder / m.name).exists()], []

    async def convert(self, source: Source, folder: Path, *_: Any) -> Converted:
        text = source.path.read_text()
        if text == "wrong":
            raise BundleError("manifest.yaml: outputs are missing")
        if text == "restless":
            source.path.write_text("calm")
        (folder / source.name / "1").mkdir(parents=True)
        (folder / source.name / "text").write_text(text)
        return Converted(ModelSpec(source.name, "fake", "fake", (), (), ()), folder)


class Controlled:
    def __init__(self, folder: Path, front: Any, its: settings.Settings, *, lenient: bool = True) -> None:
        repository, staging = folder / "repository", folder / "staging"
        for each in (repository, staging):
            each.mkdir(parents=True)
        run: Any = SimpleNamespace(repository=repository, staging=staging)
        self.triton: Any = FakeTriton(repository)
        self.catalogue = Catalogue(run, self.triton, 1)
        converter: Any = FakeConverter
        self.residency = Residency(self.catalogue, its.server.residency)
        self.control = ModelControl(its, self.catalogue, self.residency, converter, lenient=lenient)
        self.front = front

    async def start(self) -> None:
        await self.control.load_converted(await self.control.convert())
        nothing: Any = None
        await self.catalogue.open(self.front, nothing, None)

    async def until(self, serves: dict[str, str]) -> None:
        async with asyncio.timeout(20):
            while self.triton.serves != serves or sorted(self.front.models) != sorted(serves):
                await asyncio.sleep(0.01)


Run = Callable[..., None]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@pytest.fixture
def run(tmp_path: Path, models: Path, front: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a scenario on a started control that follows the folder."""
    monkeypatch.setattr(watch, "_SETTLE_S", 0.2)
    monkeypatch.setattr(watch, "_LOOK_MS", 200)

    def run(scenario: Callable[[Controlled], Awaitable[None]], reread: Any = None) -> None:
        async def inside() -> None:
            its = reread() if reread else settings.for_folder(models)
            controlled = Controlled(tmp_path, front, its)
            await controlled.start()
            following = asyncio.create_task(controlled.control.follow(reread))
            try:
                await scenario(controlled)
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                await controlled.control.stop()

        asyncio.run(inside())

    return run


def test_what_is_unloaded_by_name_stays_away_until_it_is_loaded_by_name(models: Path, run: Run) -> None:
    (models / "a").write_text("1")
    (models / "b").write_text("1")

    async def scenario(controlled: Controlled) -> None:
        await controlled.until({"a": "1", "b": "1"})
        await controlled.control.unload("a")
        (models / "a").write_text("2")
        (models / "b").write_text("2")
        await controlled.until({"b": "2"})
        await controlled.control.load("a")
        await controlled.until({"a": "2", "b": "2"})
        await controlled.control.unload("a")
        (models / "a").unlink()
        await asyncio.sleep(1)
        (models / "a").write_text("3")
        await controlled.until({"a": "3", "b": "2"})
        for name in ("nobody", "../models/a", ""):
            with pytest.raises(NotFound):
                await controlled.control.load(name)
            with pytest.raises(NotFound):
                await controlled.control.unload(name)

    run(scenario)


@pytest.mark.parametrize("bad", ["wrong", "bad"])
def test_a_bad_version_is_told_once_and_the_one_before_serves(
    models: Path, run: Run, caplog: pytest.LogCaptureFixture, bad: str
) -> None:
    (models / "a").write_text("1")

    async def scenario(controlled: Controlled) -> None:
        (models / "a").write_text(bad)
        (models / "new").write_text(bad)
        async with asyncio.timeout(20):
            while len(complaints(caplog)) < 2:
                await asyncio.sleep(0.01)
        loads = controlled.triton.loads
        await asyncio.sleep(1)
        assert (controlled.triton.serves, controlled.triton.loads) == ({"a": "1"}, loads)
        assert [line.rpartition("; ")[2] for line in complaints(caplog)] == [
            "the version before goes on serving", "it is not served",
        ]  # fmt: skip
        for name in ("a", "new"):
            (models / name).write_text("2")
        await controlled.until({"a": "2", "new": "2"})

    run(scenario)


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


async def change_while_away(controlled: Controlled, model: Path) -> None:
    """Change ``model``, and let it be tried twice with a Triton that does not answer."""
    controlled.triton.away, loads = True, controlled.triton.loads
    model.write_text("2")
    async with asyncio.timeout(20):
        while controlled.triton.loads < loads + 2:
            await asyncio.sleep(0.01)


def test_a_change_that_no_model_is_to_blame_for_is_tried_again(models: Path, run: Run) -> None:
    (models / "a").write_text("1")

    async def scenario(controlled: Controlled) -> None:
        await change_while_away(controlled, models / "a")
        controlled.triton.away = False
        await controlled.until({"a": "2"})
        controlled.front.refuses = True
        (models / "a").unlink()
        await asyncio.sleep(1)
        assert controlled.triton.serves == {"a": "2"}
        controlled.front.refuses = False
        await controlled.until({})

    run(scenario)


def test_a_model_goes_whose_last_change_met_a_server_that_was_away(models: Path, run: Run) -> None:
    (models / "a").write_text("1")
    (models / "b").write_text("1")

    async def scenario(controlled: Controlled) -> None:
        await change_while_away(controlled, models / "a")
        (models / "a").unlink()
        async with asyncio.timeout(20):
            while "a" in controlled.front.models:
                await asyncio.sleep(0.01)
        controlled.triton.away = False
        await controlled.until({"b": "1"})

    run(scenario)


def test_a_model_that_changes_while_it_is_read_is_read_again(models: Path, run: Run) -> None:
    async def scenario(controlled: Controlled) -> None:
        (models / "a").write_text("restless")
        await controlled.until({"a": "calm"})

    run(scenario)


def test_the_list_of_the_settings_is_followed(models: Path, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "nereid.yaml"

    def write(**capacities: int) -> None:
        rows = "".join(f"  - {{name: {n}, device: cpu, queue_capacity: {c}}}\n" for n, c in capacities.items())
        file.write_text(f"server: {{bind_addr: '127.0.0.1:0', ml_backends_path: models}}\nmodels:\n{rows}")

    for name in ("a", "b", "unlisted"):
        (models / name).write_text("1")
    write(a=1, later=1)

    async def scenario(controlled: Controlled) -> None:
        await controlled.until({"a": "1"})
        (models / "later").write_text("1")
        await controlled.until({"a": "1", "later": "1"})
        file.write_text("models: [")
        await asyncio.sleep(0.5)
        assert controlled.triton.serves == {"a": "1", "later": "1"}
        write(b=1, later=7)
        await controlled.until({"b": "1", "later": "1"})
        async with asyncio.timeout(20):
            while controlled.front.models["later"] != 7:
                await asyncio.sleep(0.01)

    run(scenario, lambda: settings.load(file))


def test_only_so_many_changes_may_wait(models: Path, run: Run) -> None:
    (models / "a").write_text("1")

    async def scenario(controlled: Controlled) -> None:
        controlled.triton.may_load.clear()
        loads = [asyncio.create_task(controlled.control.load("a")) for _ in range(30)]
        await asyncio.sleep(0.2)
        refused = [load.exception() for load in loads if load.done()]
        assert 10 <= len(refused) < 30
        assert {error.code for error in refused if isinstance(error, NereidError)} == {"RESOURCE_EXHAUSTED"}
        loads[0].cancel()  # whoever asked has gone; what was begun goes on
        controlled.triton.may_load.set()
        outcomes = await asyncio.gather(*loads, return_exceptions=True)
        assert isinstance(outcomes[0], asyncio.CancelledError)
        assert outcomes.count(None) == 30 - len(refused) - 1

    run(scenario)


def test_the_end_does_not_wait_for_a_change(models: Path, run: Run) -> None:
    (models / "a").write_text("1")

    async def scenario(controlled: Controlled) -> None:
        controlled.triton.may_load.clear()
        load = asyncio.create_task(controlled.control.load("a"))
        await asyncio.sleep(0.1)
        await asyncio.wait_for(controlled.control.stop(), 5)
        with pytest.raises(asyncio.CancelledError):
            await load

    run(scenario)


def arrived(models: Path, name: str, text: str) -> Path:
    """A file that has been uploaded: beside the models, under its last name."""
    place = models.parent / "uploads"
    place.mkdir(exist_ok=True)
    (place / name).write_text(text)
    return place / name


def test_a_file_that_is_adopted_takes_its_place_or_changes_nothing(models: Path, run: Run) -> None:
    (models / "a").write_text("1")

    async def scenario(controlled: Controlled) -> None:
        control = controlled.control
        await controlled.until({"a": "1"})

        async def adopt(name: str, text: str, *, overwrite: bool = False) -> str:
            """The class of the error, or what is in the folder then."""
            its = control.settings_for(name)
            assert its is not None
            try:
                kept = await control.adopt(its, arrived(models, name, text), overwrite=overwrite)
            except NereidError as error:
                return type(error).__name__
            assert kept.options.path == name
            return (models / name).read_text()

        assert await adopt("a", "2") == AlreadyExists.__name__
        assert await adopt("new", "wrong") == BundleError.__name__
        assert await adopt("new", "bad") == ModelLoadError.__name__
        for broken, kind in (("wrong", BundleError), ("bad", ModelLoadError)):
            assert await adopt("a", broken, overwrite=True) == kind.__name__
        assert {path.name: path.read_text() for path in models.iterdir()} == {"a": "1"}
        await controlled.until({"a": "1"})

        assert await adopt("a", "2", overwrite=True) == "2"
        assert await adopt("new", "1") == "1"
        await controlled.until({"a": "2", "new": "1"})
        # Whoever follows the folder has nothing to do for them.
        loads = controlled.triton.loads
        await control.refresh()
        assert controlled.triton.loads == loads

    run(scenario)


def test_where_room_is_bounded_pinned_models_come_first_and_none_passes_the_bound(
    models: Path, tmp_path: Path, front: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = settings.for_folder(models).server.model_copy(update={"residency": ResidencySettings(max_loaded_models=1)})
    pinned = ModelOptions(pinned=True)
    rows = tuple(
        ModelSettings(name=name, device="cpu", queue_capacity=1, options=options)
        for name, options in (("a", ModelOptions()), ("b", pinned), ("c", pinned))
    )
    its = settings.for_folder(models).model_copy(update={"server": server, "models": rows})
    for name in "abc":
        (models / name).write_text("1")

    async def scenario() -> None:
        controlled = Controlled(tmp_path, front, its)
        await controlled.start()
        control = controlled.control
        assert controlled.triton.serves == {"b": "1"}
        assert sorted(controlled.catalogue.models) == ["a", "b", "c"]
        (line,) = [text for text in caplog.messages if "all active models are busy" in text]
        assert (
            line == "model 'c' has to wait: all active models are busy (max_loaded_models is 1); its next call loads it"
        )
        new = rows[1].model_copy(update={"name": "new"})
        with pytest.raises(ResourceExhausted, match="model 'new' has to wait: all active models are busy"):
            await control.adopt(new, arrived(models, "new", "1"), overwrite=False)
        assert "new" not in controlled.catalogue.models
        assert not (models / "new").exists()
        await control.adopt(
            new.model_copy(update={"options": ModelOptions()}), arrived(models, "new", "1"), overwrite=False
        )
        assert controlled.triton.serves == {"b": "1"}
        await control.stop()

    asyncio.run(scenario())


def test_an_adopted_file_is_served_until_the_settings_say_something_else(
    models: Path, run: Run, tmp_path: Path
) -> None:
    """They tell of it a moment later, when it is remembered."""
    (models / "a").write_text("1")
    rows = [ModelSettings(name="a", device="cpu", queue_capacity=1)]
    its = settings.for_folder(models).model_copy(update={"models": tuple(rows), "others": None})
    reads = 0

    def reread() -> settings.Settings:
        nonlocal reads
        reads += 1
        return its.model_copy(update={"models": tuple(rows)})

    async def read_again() -> None:
        before = reads
        async with asyncio.timeout(20):
            while reads < before + 2:
                (models / ".touched").write_text(str(reads))
                await asyncio.sleep(0.01)

    async def scenario(controlled: Controlled) -> None:
        await controlled.until({"a": "1"})
        new = ModelSettings(name="new", device="cpu", queue_capacity=7)
        kept = await controlled.control.adopt(new, arrived(models, "new", "1"), overwrite=False)
        loads = controlled.triton.loads
        await read_again()
        await controlled.until({"a": "1", "new": "1"})
        rows.append(kept)
        await read_again()
        await controlled.until({"a": "1", "new": "1"})
        assert controlled.triton.loads == loads
        rows.pop(0)
        await controlled.until({"new": "1"})

    run(scenario, reread)


def test_a_file_that_came_while_another_was_converted_stays(models: Path, run: Run, tmp_path: Path) -> None:
    async def scenario(controlled: Controlled) -> None:
        control, convert = controlled.control, FakeConverter.convert

        async def with_a_neighbour(*args: Any) -> Converted:
            (models / "new").write_text("somebody's")
            return await convert(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeConverter, "convert", with_a_neighbour)
            new = ModelSettings(name="new", device="cpu", queue_capacity=1)
            with pytest.raises(AlreadyExists, match="new is there now"):
                await control.adopt(new, arrived(models, "new", "1"), overwrite=False)
        assert (models / "new").read_text() == "somebody's"
        await controlled.until({"new": "somebody's"})

    run(scenario)


def test_what_is_no_single_file_in_the_folder_is_not_replaced_by_one(models: Path, tmp_path: Path, front: Any) -> None:
    (tmp_path / "elsewhere").write_text("1")
    (models / "plain").write_text("1")
    options = ModelOptions(path=str(tmp_path / "elsewhere"))
    rows = (ModelSettings(name="a", device="cpu", queue_capacity=1, options=options),)
    its = settings.for_folder(models).model_copy(update={"models": rows})

    async def scenario() -> None:
        controlled = Controlled(tmp_path, front, its)
        control = controlled.control
        control._tried["a"] = Attempt(Source(tmp_path / "elsewhere", rows[0]), (), {})
        (models / "folder").mkdir()
        for name in ("a", "folder"):
            with pytest.raises(AlreadyExists, match="cannot replace"):
                await control.adopt(
                    rows[0].model_copy(update={"name": name}), arrived(models, name, "2"), overwrite=True
                )
        assert (tmp_path / "elsewhere").read_text() == "1"
        control._tried["other"] = Attempt(Source(models / "plain", rows[0]), (), {})
        with pytest.raises(AlreadyExists, match="another model is read from plain"):
            await control.adopt(
                rows[0].model_copy(update={"name": "plain"}), arrived(models, "plain", "2"), overwrite=True
            )
        assert (models / "plain").read_text() == "1"

    asyncio.run(scenario())


def listed(models: Path, **capacities: int) -> settings.Settings:
    rows = tuple(ModelSettings(name=n, device="cpu", queue_capacity=c) for n, c in capacities.items())
    return settings.for_folder(models).model_copy(update={"models": rows, "others": None})


@pytest.fixture
def reloading(tmp_path: Path, models: Path, front: Any) -> Run:
    """Runs a scenario on a started control that follows nothing and whose settings list what is in the folder."""

    def run(scenario: Callable[[Controlled, Callable[..., Awaitable[Outcome]]], Awaitable[None]]) -> None:
        async def inside() -> None:
            names = dict.fromkeys(sorted(path.name for path in models.iterdir()), 1)
            controlled = Controlled(tmp_path, front, listed(models, **names), lenient=False)
            await controlled.start()

            async def reload(**capacities: int) -> Outcome:
                outcome = Outcome()

                async def nothing_more() -> None:
                    pass

                await controlled.control.reload(listed(models, **capacities), outcome, before=nothing_more)
                return outcome

            await scenario(controlled, reload)

        asyncio.run(inside())

    return run


def test_a_reload_serves_what_the_settings_list_and_touches_nothing_else(models: Path, reloading: Run) -> None:
    for name in ("same", "goes", "changes", "grows"):
        (models / name).write_text("1")

    async def scenario(controlled: Controlled, reload: Any) -> None:
        loads = controlled.triton.loads
        (models / "changes").write_text("2")
        (models / "new").write_text("1")
        outcome = await reload(same=1, changes=1, grows=7, new=1)
        assert outcome == Outcome(
            [
                "model 'changes' changed",
                "model 'new' added",
                "model 'grows': queue_capacity is 7 now, was 1",
                "model 'goes' removed",
            ]
        )
        assert controlled.triton.serves == {"same": "1", "changes": "2", "grows": "1", "new": "1"}
        assert controlled.front.models == {"same": 1, "changes": 1, "grows": 7, "new": 1}
        assert controlled.triton.loads == loads + 2  # another capacity loads nothing
        assert await reload(same=1, changes=1, grows=7, new=1) == Outcome()

    reloading(scenario)


def test_a_reload_with_a_model_that_cannot_be_converted_changes_nothing(models: Path, reloading: Run) -> None:
    for name in ("good", "bad"):
        (models / name).write_text("1")

    async def scenario(controlled: Controlled, reload: Any) -> None:
        (models / "good").write_text("2")
        (models / "bad").write_text("wrong")
        with pytest.raises(BundleError, match=r"^model 'bad': manifest\.yaml: outputs are missing$"):
            await reload(good=9, bad=1)
        assert controlled.triton.serves == {"good": "1", "bad": "1"}
        assert controlled.front.models == {"good": 1, "bad": 1}
        assert list((controlled.triton._repository.parent / "staging").iterdir()) == []
        (models / "bad").write_text("3")
        assert (await reload(good=9, bad=1)).failed == []
        assert controlled.triton.serves == {"good": "2", "bad": "3"}

    reloading(scenario)


def test_a_load_that_fails_in_a_reload_is_told_and_tried_again_by_the_next(models: Path, reloading: Run) -> None:
    for name in ("a", "b"):
        (models / name).write_text("1")

    async def scenario(controlled: Controlled, reload: Any) -> None:
        (models / "a").write_text("bad")
        (models / "b").write_text("2")
        outcome = await reload(a=1, b=1)
        assert outcome == Outcome(["model 'b' changed"], ["model 'a' could not be loaded: bad"])
        assert controlled.triton.serves == {"a": "1", "b": "2"}
        assert controlled.control.records["a"].failure == "model 'a' could not be loaded: bad"
        assert (await reload(a=1, b=1)).failed == outcome.failed
        (models / "a").write_text("3")
        assert await reload(a=1, b=1) == Outcome(["model 'a' changed"])
        assert controlled.control.records["a"].failure is None

    reloading(scenario)


def test_what_a_caller_has_unloaded_stays_away_after_a_reload(models: Path, reloading: Run) -> None:
    (models / "a").write_text("1")

    async def scenario(controlled: Controlled, reload: Any) -> None:
        await controlled.control.unload("a")
        (models / "a").write_text("2")
        assert await reload(a=1) == Outcome()
        assert controlled.triton.serves == {}

    reloading(scenario)


def test_a_broken_file_that_nobody_asked_for_does_not_stop_the_start(
    tmp_path: Path, models: Path, front: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for name, text in (("good", "1"), ("listed", "1"), ("broken", "wrong")):
        (models / name).write_text(text)
    on_call = ModelOptions(load="first_request")
    listed = ModelSettings(name="listed", device="cpu", queue_capacity=1, options=on_call)
    others = settings.OtherModels(options=on_call)
    its = settings.for_folder(models).model_copy(update={"models": (listed,), "others": others})

    async def scenario() -> None:
        controlled = Controlled(tmp_path, front, its, lenient=False)
        await controlled.start()
        assert sorted(controlled.front.models) == ["good", "listed"]
        (models / "listed").write_text("wrong")
        with pytest.raises(BundleError, match=r"model .listed.: manifest\.yaml: outputs are missing"):
            await Controlled(tmp_path / "again", front, its, lenient=False).control.convert()

    asyncio.run(scenario())
    assert "model 'broken': manifest.yaml: outputs are missing; it is left out" in caplog.messages
