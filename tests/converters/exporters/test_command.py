from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("jax")

from converters.exporters import command

MODEL = """
import numpy as np
import jax.numpy as jnp
from converters.exporters import Exported, JaxModel
from offsets import OFFSET

def double(params, x):
    return x * params["two"] + OFFSET

ready = JaxModel(double, {"two": np.float32(2)}, np.ones((2, 3), np.float32))

def made():
    return ready

def broken():
    return jnp.nonsense

number = 3

class Tree:
    # A kind of model that is not compiled for sizes.

    def export(self, directory, *, force=False):
        return Exported(directory, (), {"label": 0.0}, (f"forced: {force}",))

tree = Tree()
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "model.py").write_text(MODEL)
    (tmp_path / "models" / "offsets.py").write_text("OFFSET = 1\n")
    monkeypatch.chdir(tmp_path)
    # What the command does to its own process. Not another dict of modules: libraries in C keep to the first one.
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("model", "offsets"):
        sys.modules.pop(name, None)


def export(*arguments: str) -> Result:
    return CliRunner().invoke(command.export, list(arguments))


def test_a_model_of_a_python_file_becomes_a_bundle(models: Path) -> None:
    # The module search path of this run, so that a checkout is tested and not what happens to be installed.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])}
    arguments = [sys.executable, "-m", "native_service.cli", "export", "models/model.py:ready", "--batch-sizes", "2,4"]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "models/model.py:ready -> bundles/ready (batch sizes: 2, 4; largest difference: output 0.0e+00)\n"
    )
    written = sorted(path.name for path in (models / "bundles" / "ready").iterdir())
    assert written == ["manifest.yaml", "model.b2.mlir", "model.b4.mlir", "weights.safetensors"]


def test_a_bundle_is_replaced_only_with_force(models: Path) -> None:
    options = ["models/model.py:made", "--batch-sizes", "none", "--layout", "legacy", "--name", "twice"]
    assert export(*options).exit_code == 0
    again = export(*options)
    assert (again.exit_code, "exists; replace it" in again.stderr) == (1, True)
    assert export(*options, "--force").exit_code == 0
    written = sorted(path.name for path in (models / "bundles" / "twice").iterdir())
    assert written == ["manifest.yaml", "model.mlir", "weights.safetensors"]


def test_any_description_is_exported_with_the_options_that_it_has(models: Path) -> None:
    done = export("models/model.py:tree", "--force")
    assert done.stdout == (
        "models/model.py:tree -> bundles/tree (batch sizes: none; largest difference: label 0.0e+00)\n"
    )
    assert done.stderr == "note: models/model.py:tree: forced: True\n"
    refused = export("models/model.py:tree", "--batch-sizes", "1", "--no-provenance")
    words = "a Tree has no --batch-sizes and no --provenance; leave it out"
    assert (refused.exit_code, words in refused.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["models/model.py:number"], 1, "is of type int; make it a description such as JaxModel"),
        (["models/model.py:nothing"], 1, "models/model.py has no 'nothing'"),
        (["models/none.py:x"], 1, "models/none.py is not there"),
        (["models/model.py:broken"], 1, "return jnp.nonsense"),
        (["models/model.py"], 2, "is not FILE.py:NAME"),
        (["models/model.py:ready", "--batch-sizes", "1,two"], 2, "is no list like 1,8"),
    ],
)
def test_what_cannot_be_exported_is_told_and_leaves_nothing(
    models: Path, arguments: list[str], code: int, words: str
) -> None:
    done = export(*arguments)
    assert (done.exit_code, words in done.stderr) == (code, True), done.stderr
    assert not (models / "bundles").exists()
