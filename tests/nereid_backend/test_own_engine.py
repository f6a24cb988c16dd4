"""An engine of one's own, as nereid_backend/README.md has it, from an installed distribution."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import input_tensor

from nereid_backend import engines
from nereid_backend.engines import ENTRY_POINTS, engine_class, installed_engines
from nereid_backend.errors import BundleError, DeviceMissing, EngineMissing, SignatureError

README = (Path(__file__).parents[2] / "nereid_backend" / "README.md").read_text()
X = np.array([[0, 1, 2], [-1, 0.5, 3]], np.float32)


def block(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return str(text)


@pytest.fixture(scope="module")
def polynomial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The README's engine as an installed wheel: it is Triton's own interpreter that must find it."""
    points = tomllib.loads(block("toml"))["project"]["entry-points"][ENTRY_POINTS]
    ((name, target),) = points.items()
    wheel = tmp_path_factory.mktemp("wheel") / "nereid_test_polynomial-1.0-py3-none-any.whl"
    info = "nereid_test_polynomial-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{target.partition(':')[0]}.py", block("python"))
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: nereid-test-polynomial\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/entry_points.txt", f"[{ENTRY_POINTS}]\n{name} = {target}\n")
        archive.writestr(f"{info}/RECORD", "")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--force-reinstall", wheel], check=True)
    yield
    subprocess.run([*pip, "uninstall", "--yes", "nereid-test-polynomial"], check=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "parabola"
    path.mkdir()
    (path / "square.polynomial").write_text("[1, 0, 1]")
    (path / "model_inference.textproto").write_text(block("textproto"))
    return path


@pytest.mark.usefixtures("polynomial")
def test_an_installed_engine_opens_the_files_that_end_in_its_name(folder: Path) -> None:
    from converters.convert import prepare
    from converters.discover import find

    assert find(folder.parent) == [folder]
    spec = prepare(folder).spec
    assert (spec.engine, spec.platform, spec.max_batch_size, spec.coalesce) == ("polynomial", "polynomial", 16, True)
    (folder / "square.polynomial").write_text("hello")
    with pytest.raises(SignatureError, match=r"square\.polynomial: must be a JSON list"):
        prepare(folder)
    with pytest.raises(DeviceMissing, match="cpu only, got 'cuda'"):
        engine_class("polynomial").check_device("cuda")


@pytest.mark.triton
@pytest.mark.usefixtures("polynomial")
def test_an_installed_engine_runs_inside_triton(folder: Path, triton: Any, client: Any) -> None:
    triton.add(folder)
    answer = client.infer("parabola", [input_tensor("input", X)])
    np.testing.assert_array_equal(answer.as_numpy("output"), X * X + 1)


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> Any:
    def declare(*points: tuple[str, str]) -> None:
        found = [EntryPoint(name, value, ENTRY_POINTS) for name, value in points]
        monkeypatch.setattr(engines, "entry_points", lambda group: found)

    return declare


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([("onnx", "mine:Engine")], "mine:Engine declares an engine 'onnx', which is built in"),
        ([("a", "mine:A"), ("a", "yours:A")], "mine:A and yours:A both declare an engine 'a'; uninstall one"),
        ([("../x", "mine:A")], r"declares an engine '\.\./x'; a name is lower-case letters"),
    ],
)
def test_a_name_that_cannot_be_an_engine_is_refused(declared: Any, points: Any, words: str) -> None:
    declared(*points)
    with pytest.raises(BundleError, match=words):
        installed_engines()


def test_a_distribution_that_is_listed_twice_counts_once(declared: Any) -> None:
    declared(("a", "mine:A"), ("a", "mine:A"))
    assert list(installed_engines()) == ["a"]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("a_module_nobody_has:Engine", "engine 'mine' of .* cannot be imported .*a_module_nobody_has"),
        ("json:Engine", "engine 'mine' of .* cannot be imported"),
        ("json:JSONDecoder", "engine 'mine' of json:JSONDecoder has no load, check_device, run, close"),
    ],
)
def test_a_broken_engine_is_reported_when_it_is_used(declared: Any, target: str, words: str) -> None:
    declared(("mine", target))
    with pytest.raises(EngineMissing, match=words):
        engine_class("mine")
    assert engine_class("onnx").__name__ == "OnnxEngine"
