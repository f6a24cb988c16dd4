import ast
import asyncio
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from native_service import settings
from native_service.models.conversion import Converter, Source
from native_service.settings import ModelOptions, ModelSettings
from nereid_backend.errors import NereidError
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

def convert(source, target, *, name, device, **options):
    print("noise on stdout")
    if name == "options":
        raise ManifestError(repr(sorted(options.items())))
    if name == "crashes":
        print("last words", file=sys.stderr, flush=True)
        os.abort()
    if name.startswith("killed"):
        note = Path(source).with_name("note")
        if name == "killed" or not note.exists():
            note.touch()
            (target / "half").mkdir()
            os.kill(os.getpid(), 9)
    if name == "slow":
        time.sleep(60)
    if name == "wrong":
        raise ManifestError("manifest.yaml: outputs are missing")
    if name == "full":
        raise OSError(28, "No space left on device", "/a/b/weights.bin")
    if name == "bug":
        raise ZeroDivisionError("oops")
    (target / name).mkdir()
    many = tuple(TensorSpec("weight" * 20 + str(n), "f32", (1,)) for n in range(2000 if name == "large" else 1))
    return SimpleNamespace(spec=ModelSpec(name, "fake", device, many, (), ()), notes=[f"{name} was made up"])

def check_device(spec):
    if spec.platform == "cuda:0":
        raise DeviceMissing("no CUDA device 0 here")
"""


# A model that holds words is a meta model, which calls them.
FAKE_DISCOVER = """
def find(path):
    return sorted(path.iterdir())

def calls_of(path):
    return path.is_file() and path.read_text().split() or None
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "fake" / "converters"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "convert.py").write_text(FAKE)
    (package / "discover.py").write_text(FAKE_DISCOVER)
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


async def convert(converter: Converter, folder: Path, name: str, device: str = "cpu", **keys: Any) -> ModelSpec:
    model = ModelSettings(name=name, device=device, queue_capacity=1, **keys)
    converted = await converter.convert(Source(folder / name, model), folder.parent / "repository")
    return converted.spec


async def problem(converter: Converter, folder: Path, name: str, device: str = "cpu", **keys: Any) -> str:
    with pytest.raises(NereidError) as caught:
        await convert(converter, folder, name, device, **keys)
    return str(caught.value)


def test_a_converter_that_nobody_waits_for_to_end_leaves_no_pipe_open(folder: Path) -> None:
    async def scenario() -> None:
        converter = Converter({}, 20)
        await convert(converter, folder, "fine")
        child = converter._child
        assert child is not None
        ending = asyncio.create_task(converter.__aexit__(None, None, None))
        await asyncio.sleep(0)
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        assert all(pipe.is_closing() for pipe in child.pipes)
        assert await child.process.wait() == -signal.SIGKILL

    asyncio.run(scenario())


def test_a_model_s_failure_does_not_touch_the_next(folder: Path) -> None:
    async def scenario(converter: Converter) -> None:
        assert await problem(converter, folder, "wrong") == "manifest.yaml: outputs are missing"
        assert "ZeroDivisionError: oops (a bug in the converter" in await problem(converter, folder, "bug")
        told = "conversion failed (No space left on device, weights.bin); check the disk and its rights"
        assert await problem(converter, folder, "full") == told
        assert "ended unexpectedly (signal 6)" in await problem(converter, folder, "crashes")
        assert await problem(converter, folder, "gpu", "cuda:0") == "no CUDA device 0 here"
        assert (await convert(converter, folder, "fine")).name == "fine"
        assert len((await convert(converter, folder, "large")).inputs) == 2000

    run(scenario)


def test_a_conversion_that_somebody_kills_is_tried_once_more(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(converter: Converter) -> None:
        assert (await convert(converter, folder, "killed-once")).name == "killed-once"
        assert [path.name for path in (folder.parent / "repository").iterdir()] == ["killed-once"]
        assert "ended unexpectedly (signal 9)" in await problem(converter, folder, "killed")

    run(scenario)
    assert caplog.text.count("trying once more") == 2


def test_the_options_of_a_model_reach_its_conversion(folder: Path) -> None:
    async def scenario(converter: Converter) -> None:
        options = {"batch_sizes": "largest", "max_batch_size": 3, "allow_code": True}
        keys = {"backend": "onnx", "signature": "classify", "options": options}
        told = dict(ast.literal_eval(await problem(converter, folder, "options", **keys)))
        assert {key: told[key] for key in ("backend", "signature", *options)} == {
            "backend": "onnx", "signature": "classify", **options,
        }  # fmt: skip

    run(scenario)


def test_a_conversion_that_takes_too_long_is_killed(folder: Path) -> None:
    async def scenario(converter: Converter) -> None:
        assert await problem(converter, folder, "slow") == "conversion took longer than 1.5 s"
        converter._timeout_s = 20  # a new child on a busy machine may take longer to start
        assert (await convert(converter, folder, "fine")).name == "fine"

    run(scenario, timeout_s=1.5)


def test_a_folder_gives_every_model_in_it_the_defaults(folder: Path) -> None:
    for name in ("b", "a.onnx"):
        (folder / name).touch()

    async def scenario(converter: Converter) -> None:
        sources, problems = await converter.sources(settings.for_folder(folder))
        assert problems == []
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
        sources, [problem] = await converter.sources(settings.for_folder(folder))
        assert words in problem
        assert [source.name for source in sources] == sorted({name.removesuffix(".onnx") for name in names})

    run(scenario)


def test_an_entry_whose_name_cannot_be_a_model_s_does_not_hide_the_others(folder: Path) -> None:
    for name in ("my model.onnx", "%s\n.onnx", "fine.onnx"):
        (folder / name).touch()

    async def scenario(converter: Converter) -> None:
        sources, problems = await converter.sources(settings.for_folder(folder))
        assert [source.name for source in sources] == ["fine"]
        for problem, name in zip(problems, ("%s\\n.onnx", "my model.onnx"), strict=True):
            assert name in problem
            assert "rename it" in problem
            assert "\n" not in problem

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
        found, problems = await converter.sources(listing("b", "a"))
        assert ([source.path.name for source in found], problems) == (["b.onnx", "a"], [])
        found, problems = await converter.sources(listing("a", "x", "y"))
        assert [source.path.name for source in found] == ["a"]
        assert [line.split(":")[0] for line in problems] == ["model 'x'", "model 'y'"]

    run(scenario)
    assert list((folder.parent / "repository").iterdir()) == []


def test_callees_of_a_folder_are_hidden_and_come_first(folder: Path) -> None:
    for name, calls in {"a": "c", "b": "", "c": "", "d": "c gone"}.items():
        (folder / name).write_text(calls)

    async def scenario(converter: Converter) -> None:
        sources, _ = await converter.sources(settings.for_folder(folder))
        assert [(s.settings.name, s.hidden, s.calls) for s in sources] == [
            ("b", False, None), ("c", True, None), ("a", False, ("c",)), ("d", False, ("c", "gone")),
        ]  # fmt: skip

    run(scenario)


def test_callees_that_the_settings_do_not_name_come_along_hidden(folder: Path) -> None:
    for name, calls in {"a": "c e", "c": "", "e": "", "other": ""}.items():
        (folder / name).write_text(calls)
    model = {"device": "cuda:1", "queue_capacity": 2}
    told = settings.for_folder(folder).model_copy(
        update={"models": tuple(ModelSettings(name=name, **model) for name in ("a", "e")), "others": None}
    )

    async def scenario(converter: Converter) -> None:
        sources, _ = await converter.sources(told)
        assert [(s.settings.name, s.hidden, s.settings.device) for s in sources] == [
            ("e", False, "cuda:1"), ("c", True, "cuda:1"), ("a", False, "cuda:1"),
        ]  # fmt: skip
        (folder / "a").write_text("../models/c")
        assert (await converter.sources(told))[1] == [
            "model 'a' calls '../models/c', which cannot be the name of a model"
        ]
        (folder / "a").write_text("gone")
        assert (await converter.sources(told))[1] == [
            f"model 'a' calls 'gone': {folder} holds no folder and no model file of that name"
        ]

    run(scenario)


def test_a_listed_model_may_be_called_otherwise_than_its_file_beside_all_others(folder: Path) -> None:
    for name, calls in {"a": "", "of-b": "", "c": "a"}.items():
        (folder / name).write_text(calls)
    b = ModelSettings(name="b", device="cuda:1", queue_capacity=2, options=ModelOptions(path="of-b"))
    told = settings.for_folder(folder).model_copy(update={"models": (b,)})

    async def scenario(converter: Converter) -> None:
        sources, problems = await converter.sources(told)
        assert [(s.name, s.path.name, s.hidden, s.settings.device) for s in sources] == [
            ("b", "of-b", False, "cuda:1"), ("a", "a", True, "cpu"), ("c", "c", False, "cpu"),
        ]  # fmt: skip
        assert problems == []
        (folder / "of-b").unlink()
        assert (await converter.sources(told))[1] == [f"model 'b': {folder} holds no of-b"]

    run(scenario)


def test_what_the_converter_remarks_on_a_model_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nereid.convert")

    async def scenario(converter: Converter) -> None:
        await convert(converter, folder, "fine")

    run(scenario)
    told = [(record.levelname, record.message) for record in caplog.records]
    assert ("INFO", "model 'fine': fine was made up") in told
    assert ("INFO", "noise on stdout") in told
