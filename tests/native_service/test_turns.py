"""Changes of models side by side, on a Triton that is told when its loads end."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from native_service.models.catalogue import Catalogue
from native_service.models.conversion import Converted, Source
from native_service.settings import ModelSettings
from nereid_backend.spec import ModelSpec


class FakeTriton:
    """Loads in no time, but what is ``slow`` only when it is let go."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.dead: set[str] = set()
        self.slow: set[str] = set()
        self.let_go: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def find_dead(self) -> frozenset[str]:
        return frozenset(self.dead)

    async def load(self, model: str, _timeout_s: float, behind: Sequence[str] = ()) -> None:
        self.done.append(f"begin {model}")
        if model in self.slow:
            await self.let_go[model].wait()
        self.dead -= {model, *behind}
        self.done.append(f"end {model}")


def put(catalogue: Catalogue, folder: Path, name: str, text: str = "") -> Awaitable[None]:
    staged = folder / "staging" / f"{name}-{text}"
    (staged / name / "1").mkdir(parents=True)
    (staged / name / "1" / "nereid.json").write_text(text)
    source = Source(folder / f"{name}.onnx", ModelSettings(name=name, device="cpu", queue_capacity=1))
    return catalogue.put(source, Converted(ModelSpec(name, "fake", "fake", (), (), ()), staged))


def run(folder: Path, scenario: Callable[[Catalogue, FakeTriton], Awaitable[None]]) -> list[str]:
    async def inside() -> list[str]:
        triton: Any = FakeTriton()
        places: Any = SimpleNamespace(repository=folder / "repository", staging=folder / "staging")
        for place in vars(places).values():
            place.mkdir()
        catalogue = Catalogue(places, triton, 60)
        async with asyncio.timeout(20):
            await put(catalogue, folder, "a")
            triton.done.clear()
            await scenario(catalogue, triton)
        return list(triton.done)

    return asyncio.run(inside())


def test_a_model_is_brought_back_while_another_is_being_loaded(tmp_path: Path) -> None:
    async def scenario(catalogue: Catalogue, triton: FakeTriton) -> None:
        triton.slow.add("b")
        coming = asyncio.ensure_future(put(catalogue, tmp_path, "b"))
        while "begin b" not in triton.done:
            await asyncio.sleep(0.01)
        triton.dead.add("a")
        assert await catalogue.revive("a")
        assert catalogue.find_dead() == []
        triton.let_go["b"].set()
        await coming
        assert [*catalogue.models] == ["a", "b"]

    assert run(tmp_path, scenario) == ["begin b", "begin a", "end a", "end b"]


def test_a_model_is_not_brought_back_in_the_middle_of_its_own_change(tmp_path: Path) -> None:
    async def scenario(catalogue: Catalogue, triton: FakeTriton) -> None:
        triton.slow.add("a")
        coming = asyncio.ensure_future(put(catalogue, tmp_path, "a", "another version"))
        while "begin a" not in triton.done:
            await asyncio.sleep(0.01)
        triton.dead.add("a")
        reviving = asyncio.ensure_future(catalogue.revive("a"))
        await asyncio.sleep(0.1)
        triton.let_go["a"].set()
        await coming
        assert not await reviving  # the new version lives: nothing was left to do

    assert run(tmp_path, scenario) == ["begin a", "end a"]


def test_what_has_gone_meanwhile_is_not_brought_back(tmp_path: Path) -> None:
    async def scenario(catalogue: Catalogue, _triton: FakeTriton) -> None:
        assert not await catalogue.revive("gone")

    assert run(tmp_path, scenario) == []
