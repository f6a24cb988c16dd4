import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from native_service import settings
from native_service.conversion import Converter, Source
from native_service.settings import ModelSettings
from nereid_backend.errors import BundleError, NereidError
from nereid_backend.spec import ModelSpec

# What the child imports instead of the real package; the model's name says what happens.
FAKE = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
from nereid_backend.errors import ManifestError, DeviceMissing
from nereid_backend.spec import ModelSpec, TensorSpec

def model_name(path):
    return path.stem

def convert(source, target, *, name, device, link, **_):
    print("noise on stdout")
    if name == "crashes":
        print("last words", file=sys.stderr, flush=True)
        os.abort()
    if name == "slow":
        time.sleep(60)
    if name == "wrong":
        raise ManifestError("manifest.yaml: outputs are missing")
    if name == "bug":
        raise ZeroDivisionError("oops")
    (target / name).mkdir()
    many = tuple(TensorSpec("weight" * 20 + str(n), "f32", (1,)) for n in range(2000 if name == "large" else 1))
    return SimpleNamespace(spec=ModelSpec(name, "fake", device, many, (), ()))

def check_device(spec):
    if spec.platform == "cuda:0":
        raise DeviceMissing("no CUDA device 0 here")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "fake" / "converters"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "convert.py").write_text(FAKE)
    (package / "discover.py").write_text("def find(path):\n    return sorted(path.iterdir())\n")
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}:{root}")
    models = tmp_path / "models"
    models.mkdir()
    (tmp_path / "repository").mkdir()
    return models


def run(scenario: Callable[[Converter], Coroutine[Any, Any, None]], timeout_s: float = 20) -> None:
    async def inside() -> None:
        async with Converter({}, timeout_s) as converter:
            await scenario(converter)

    asyncio.run(inside())


async def convert(converter: Converter, folder: Path, name: str, device: str = "cpu") -> ModelSpec:
    model = ModelSettings(name=name, device=device, queue_capacity=1)
    return await converter.convert(Source(folder / name, model), folder.parent / "repository")


async def problem(converter: Converter, folder: Path, name: str, device: str = "cpu") -> str:
    with pytest.raises(NereidError) as caught:
        await convert(converter, folder, name, device)
    return str(caught.value)


def test_a_model_s_failure_does_not_touch_the_next(folder: Path) -> None:
    async def scenario(converter: Converter) -> None:
        assert await problem(converter, folder, "wrong") == "manifest.yaml: outputs are missing"
        assert "ZeroDivisionError: oops (a bug in the converter" in await problem(converter, folder, "bug")
        assert "ended unexpectedly (signal 6)" in await problem(converter, folder, "crashes")
        assert await problem(converter, folder, "gpu", "cuda:0") == "no CUDA device 0 here"
        assert (await convert(converter, folder, "fine")).name == "fine"
        assert len((await convert(converter, folder, "large")).inputs) == 2000

    run(scenario)


def test_a_conversion_that_takes_too_long_is_killed(folder: Path) -> None:
    async def scenario(converter: Converter) -> None:
        assert await problem(converter, folder, "slow") == "conversion took longer than 1.5 s"
        assert (await convert(converter, folder, "fine")).name == "fine"

    run(scenario, timeout_s=1.5)


def test_a_folder_gives_every_model_in_it_the_defaults(folder: Path) -> None:
    for name in ("b", "a.onnx"):
        (folder / name).touch()

    async def scenario(converter: Converter) -> None:
        sources = await converter.sources(settings.for_folder(folder))
        assert [(s.settings.name, s.path.name, s.settings.queue_capacity) for s in sources] == [
            ("a", "a.onnx", 16), ("b", "b", 16),
        ]  # fmt: skip

    run(scenario)


@pytest.mark.parametrize(
    ("names", "words"), [([], "holds no bundle"), (["a", "a.onnx"], "would both be served as 'a'")]
)
def test_a_folder_that_cannot_be_served_is_told(folder: Path, names: list[str], words: str) -> None:
    for name in names:
        (folder / name).touch()

    async def scenario(converter: Converter) -> None:
        with pytest.raises(BundleError, match=words):
            await converter.sources(settings.for_folder(folder))

    run(scenario)


def test_named_models_are_looked_up_and_all_missing_ones_told(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "b.onnx").touch()
    file = folder.parent / "nereid.yaml"

    def listing(*names: str) -> settings.Settings:
        rows = "".join(f"  - {{name: {name}, device: cpu, queue_capacity: 1}}\n" for name in names)
        file.write_text(f"server: {{bind_addr: '127.0.0.1:0', ml_backends_path: {folder}}}\nmodels:\n{rows}")
        return settings.load(file)

    async def scenario(converter: Converter) -> None:
        found = await converter.sources(listing("b", "a"))
        assert [source.path.name for source in found] == ["b.onnx", "a"]
        with pytest.raises(BundleError) as caught:
            await converter.sources(listing("a", "x", "y"))
        assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["model 'x'", "model 'y'"]

    run(scenario)
    assert list((folder.parent / "repository").iterdir()) == []
