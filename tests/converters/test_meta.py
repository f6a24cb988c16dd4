"""Meta models from a bundle to a repository: contracts of callees, the bundle's own code and files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from converters import cli
from converters.convert import convert
from nereid_backend.errors import BundleError, ManifestError, NereidError, UserCodeError
from nereid_backend.spec import ModelSpec, TensorSpec

CODE = "from nereid_backend.hooks import register_meta_model\nregister_meta_model(run=lambda inputs, call: inputs)\n"


@pytest.fixture
def make_meta(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str = "pipeline", *, calls: Any = ("linear",), code: str | None = CODE, **keys: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        manifest = {
            "format_version": "2.1",
            "kind": "meta",
            "client_inputs": [{"name": "image", "dtype": "u8", "shape": "whn", "dims": {"w": -1, "h": 8}}],
            "client_outputs": [{"name": "label", "dtype": "i32", "shape": "n"}],
            "meta": {"calls": list(calls)},
            **keys,
        }
        (folder / "manifest.yaml").write_text(yaml.safe_dump(manifest))
        if code is not None:
            (folder / "hooks.py").write_text(code)
        return folder

    return make


def test_a_meta_model_carries_the_contracts_of_its_callees(make_bundle: Any, make_meta: Any, tmp_path: Path) -> None:
    callee = convert(make_bundle(), tmp_path / "repository").spec
    spec = convert(make_meta(), tmp_path / "repository").spec
    assert spec == ModelSpec(
        name="pipeline",
        engine="meta",
        platform="meta",
        inputs=(TensorSpec("image", "u8", (-1, 8, -1)),),
        outputs=(TensorSpec("label", "i32", (-1,)),),
        programs=(),
        instances=2,
        calls=(callee.contract,),
    )
    assert spec.calls is not None
    assert (spec.calls[0].inputs, spec.calls[0].max_batch_size) == (callee.inputs, callee.max_batch_size)
    assert ModelSpec.read(tmp_path / "repository" / "pipeline" / "1") == spec


def test_the_code_and_the_files_it_may_read_go_along(make_meta: Any, tmp_path: Path) -> None:
    folder = make_meta(calls=())
    (folder / "vocab.txt").write_text("a\nb\n")
    (folder / "parts").mkdir()
    (folder / "parts" / "glue.py").write_text("x = 1\n")
    for hidden in (".git", "__pycache__"):
        (folder / hidden).mkdir()
        (folder / hidden / "file").write_text("not for the model")
    convert(folder, tmp_path / "repository")
    version = tmp_path / "repository" / "pipeline" / "1"
    written = {str(path.relative_to(version)) for path in version.rglob("*") if path.is_file()}
    assert written == {"model.py", "nereid.json", "hooks.py", "vocab.txt", "parts/glue.py"}
    assert "nereid_backend.meta" in (version / "model.py").read_text()


def test_the_gate_is_the_number_of_instances(make_meta: Any, tmp_path: Path) -> None:
    convert(make_meta(calls=(), nereid={"concurrency": 5}), tmp_path / "repository")
    assert re.search(r"count: 5\b", (tmp_path / "repository" / "pipeline" / "config.pbtxt").read_text())


@pytest.mark.parametrize("value", [0, 65, True, "2", None])
def test_a_gate_that_is_no_small_number_is_refused(make_meta: Any, tmp_path: Path, value: Any) -> None:
    with pytest.raises(ManifestError, match=r"'nereid.concurrency' must be an integer from 1 to 64"):
        convert(make_meta(calls=(), nereid={"concurrency": value}), tmp_path / "repository")


def test_the_gate_is_for_meta_models_only(make_bundle: Any, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="for kind meta only"):
        convert(make_bundle(nereid={"concurrency": 2}), tmp_path / "repository")


@pytest.mark.parametrize(
    ("keys", "error", "said"),
    [
        ({"calls": ["absent"]}, BundleError, "calls 'absent', which is not among the converted models"),
        ({"calls": ["../linear"]}, BundleError, "calls '../linear', which is not among"),
        ({"calls": ["pipeline"]}, ManifestError, "lists the model itself"),
        ({"calls": ["outer"]}, BundleError, "calls 'outer', which is a meta model too"),
        ({"code": "def run(:\n"}, UserCodeError, "hooks.py line 1: is not Python"),
        ({"code": "x = '\0'"}, UserCodeError, "hooks.py.*is not Python"),
    ],
)
def test_a_meta_model_that_could_not_work_is_refused(
    make_bundle: Any, make_meta: Any, tmp_path: Path, keys: dict[str, Any], error: type[NereidError], said: str
) -> None:
    repository = tmp_path / "repository"
    convert(make_bundle(), repository)
    convert(make_meta("outer"), repository)
    with pytest.raises(error, match=said):
        convert(make_meta(**keys), repository)
    assert not (repository / "pipeline").exists()


def test_a_meta_model_in_julia_is_told_what_to_write(make_meta: Any, tmp_path: Path) -> None:
    folder = make_meta(code=None)
    (folder / "model.jl").write_text("register_meta_model(...)")
    with pytest.raises(BundleError, match=r"write a hooks\.py that calls nereid_backend.hooks.register_meta_model"):
        convert(folder, tmp_path / "repository")


def test_code_beside_a_name_that_the_model_needs_is_refused(make_meta: Any, tmp_path: Path) -> None:
    folder = make_meta(calls=())
    (folder / "model.py").write_text("x = 1")
    with pytest.raises(BundleError, match=r"holds a model.py, a name that the converted model needs"):
        convert(folder, tmp_path / "repository")


def test_the_command_converts_callees_first_and_says_that_code_will_run(
    make_bundle: Any, make_meta: Any, tmp_path: Path
) -> None:
    make_meta("a_pipeline")  # before its callee by name
    make_bundle()
    done = CliRunner().invoke(cli.command, [str(tmp_path), "-o", str(tmp_path / "repository")])
    assert done.exit_code == 0, done.output
    assert "its hooks.py is run when the model is loaded" in done.output
    assert {path.name for path in (tmp_path / "repository").iterdir()} == {"a_pipeline", "linear"}
