"""Worker directories of SnoozeML on disk: what they are told apart by, and what is learned of them by trying."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from converters import snooze
from converters.check import check
from converters.cli import command
from converters.convert import convert, prepare
from converters.discover import find
from converters.prepared import Prepared
from nereid_backend.engines.snooze import SnoozeEngine
from nereid_backend.errors import BundleError
from nereid_backend.spec import ModelSpec

FIRST = "x = next(iter(inputs.values()))"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEREID_CACHE_DIR", str(tmp_path / "cache"))


def worker(folder: Path, predict: str, *, file: str = "snooze_model.py", name: str = "Model", **options: Any) -> Path:
    """A worker directory; ``options`` are its snooze_model.json, when there are any."""
    folder.mkdir(parents=True)
    (folder / file).write_text(
        f"import numpy as np\nclass {name}:\n    def load(self, model_dir, device):\n        pass\n"
        f"    def predict(self, inputs):\n        {predict}\n"
    )
    if options:
        (folder / "snooze_model.json").write_text(json.dumps(options))
    return folder


def signature(prepared: Prepared) -> tuple[Any, Any]:
    spec = prepared.spec
    return tuple([(t.name, t.dtype, t.shape) for t in tensors] for tensors in (spec.inputs, spec.outputs))


def learned(folder: Path) -> Prepared:
    return prepare(folder, allow_code=True)


def test_nothing_of_a_worker_runs_without_consent(tmp_path: Path) -> None:
    folder = worker(tmp_path / "models" / "w", "pass")
    (folder / "snooze_model.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(BundleError, match="--allow-code"):
        prepare(folder)
    report = check(folder)
    assert (report.problem, report.kind) == (None, "snooze folder")
    assert "--allow-code" in report.notes[0]
    assert not (tmp_path / "ran").exists()


def test_a_worker_is_found_in_a_folder_of_models_by_its_code_or_its_options(tmp_path: Path) -> None:
    plain = worker(tmp_path / "plain", "pass")
    named = worker(tmp_path / "named", "pass", file="code.py", name="Own", entrypoint="code.py", **{"class": "Own"})
    (tmp_path / "other").mkdir()
    assert find(tmp_path) == [named, plain]


def test_a_model_that_takes_any_width_keeps_it_open_and_its_rows_share_runs(tmp_path: Path) -> None:
    prepared = learned(worker(tmp_path / "w", f"{FIRST}; return {{'output': x, 'sum': x.sum(1)}}"))
    assert signature(prepared) == (
        [("input", "f32", (-1, -1))],
        [("output", "f32", (-1, -1)), ("sum", "f32", (-1,))],
    )
    assert (prepared.spec.max_batch_size, prepared.spec.coalesce) == (32, True)


def test_names_and_the_only_width_are_what_predict_asks_for(tmp_path: Path) -> None:
    prepared = learned(
        worker(tmp_path / "w", "return {'y': inputs['left'] @ np.ones((5, 2)) + inputs['right'][:, :1]}")
    )
    assert signature(prepared) == (
        [("left", "f32", (-1, 5)), ("right", "f32", (-1, 5))],
        [("y", "f32", (-1, 2))],
    )


def test_rows_that_depend_on_each_other_run_apart(tmp_path: Path) -> None:
    prepared = learned(worker(tmp_path / "w", f"{FIRST}; return {{'y': x - x.mean(0)}}"))
    assert not prepared.spec.coalesce
    assert prepared.spec.max_batch_size >= 1000  # whoever has many rows can only send them together
    assert any("one by one" in note for note in prepared.notes)


def test_a_contract_declares_what_cannot_be_learned(tmp_path: Path) -> None:
    folder = worker(tmp_path / "w", "return {'y': inputs['image'].mean((1, 2, 3)), 'unused': inputs['image']}")
    (folder / "model_inference.textproto").write_text(
        'input { name: "image" data_type: "FP32" dims: [3, 8, 8] }\noutput { name: "y" data_type: "FP32" dims: [1] }\n'
        "max_batch_size: 4\n"
    )
    prepared = learned(folder)
    assert signature(prepared) == ([("image", "f32", (-1, 3, 8, 8))], [("y", "f32", (-1,))])
    assert (prepared.spec.max_batch_size, prepared.spec.coalesce) == (4, True)


@pytest.mark.parametrize("error", ["ValueError('only real data')", "MemoryError('only real data')"])
def test_a_model_that_fails_on_made_up_rows_is_served_as_assumed_and_told(tmp_path: Path, error: str) -> None:
    prepared = learned(worker(tmp_path / "w", f"raise {error}"))
    assert signature(prepared) == ([("input", "f32", (-1, -1))], [("output", "f32", (-1, -1))])
    assert not prepared.spec.coalesce
    assert any("only real data" in note and "model_inference.textproto" in note for note in prepared.notes)


def test_a_model_that_hangs_in_its_trial_is_ended_and_served_as_assumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snooze, "_LONGEST_TRIAL_S", 0.5)
    monkeypatch.setattr(snooze, "_ENOUGH_S", 0.0)
    prepared = learned(worker(tmp_path / "w", "import time; time.sleep(1000)"))
    assert signature(prepared) == ([("input", "f32", (-1, -1))], [("output", "f32", (-1, -1))])
    assert any("longer than 0.5 s" in note for note in prepared.notes)


def test_a_converted_worker_runs_from_the_repository_alone(tmp_path: Path) -> None:
    folder = worker(tmp_path / "source" / "w", "import more; return {'y': inputs['x'] + more.ONE}")
    (folder / "more.py").write_text("ONE = 1")
    convert(folder, tmp_path / "repository", allow_code=True)
    for path in folder.iterdir():
        path.unlink()
    version = tmp_path / "repository" / "w" / "1"
    engine = SnoozeEngine.load(ModelSpec.read(version), version)
    try:
        np.testing.assert_array_equal(engine.run([np.zeros((2, 3), np.float32)])[0], np.ones((2, 3)))
    finally:
        engine.close()


def test_a_trial_leaves_nothing_in_the_folder_of_the_user(tmp_path: Path) -> None:
    folder = worker(tmp_path / "w", "import more; open('trace', 'w'); return {'y': inputs['x']}")
    (folder / "more.py").write_text("")
    before = sorted(folder.iterdir())
    learned(folder)
    assert sorted(folder.iterdir()) == before


def test_requirements_make_an_environment_of_its_own(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "tenfold-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tenfold.py", "FACTOR = 10")
        wheel.writestr("tenfold-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tenfold\nVersion: 1.0\n")
        wheel.writestr("tenfold-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tenfold-1.0.dist-info/RECORD", "")
    folder = worker(tmp_path / "w", "pass", tensor_format="raw")
    (folder / "snooze_model.py").write_text(
        "import tenfold\nfrom snoozeml.worker import RawTensor\n"
        "class Model:\n    def load(self, model_dir, device):\n        pass\n"
        "    def predict(self, inputs):\n        x = inputs['x']\n"
        "        return {'y': RawTensor(x.shape, [tenfold.FACTOR * value for value in x.data])}\n"
    )
    (folder / "requirements.txt").write_text(f"--no-index\n--find-links {wheels}\ntenfold\n")
    assert signature(learned(folder)) == ([("x", "f32", (-1, -1))], [("y", "f32", (-1, -1))])
    (folder / "snooze_model.json").unlink()  # arrays need numpy, which nobody asked for
    with pytest.raises(BundleError, match=r"add it to requirements\.txt"):
        learned(folder)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"entrypoint": "../other.py"}, "no entrypoint"),
        ({"entrypoint": "missing.py"}, "no entrypoint"),
        ({"class": 3}, "class must be a text"),
        ({"tensor_format": "arrow"}, "tensor_format must be numpy or raw"),
        ({"env": {"A": 1}}, "env must map names to texts"),
        ({"python": "no-such-python"}, "no program"),
        ({"class": "Other"}, "has no class 'Other'"),
    ],
)
def test_options_that_make_no_sense_are_told(tmp_path: Path, options: Any, words: str) -> None:
    with pytest.raises(BundleError, match=words):
        learned(worker(tmp_path / "w", "pass", **options))


@pytest.mark.parametrize("text", ["{", "[]", "\xff", "[" * 100_000])
def test_a_broken_options_file_is_told(tmp_path: Path, text: str) -> None:
    folder = worker(tmp_path / "w", "pass")
    (folder / "snooze_model.json").write_text(text, encoding="latin-1")
    with pytest.raises(BundleError, match=r"snooze_model\.json"):
        learned(folder)
    assert "snooze_model.json" in (check(folder).problem or "")


def test_requirements_of_a_worker_with_a_python_of_its_own_are_told_to_be_its_own_matter(tmp_path: Path) -> None:
    folder = worker(tmp_path / "w", f"{FIRST}; return {{'y': x}}", python=sys.executable)
    (folder / "requirements.txt").write_text("no-such-distribution-of-anybody\n")
    assert any("requirements.txt is not installed" in note for note in learned(folder).notes)


def test_unknown_options_are_passed_over_and_told(tmp_path: Path) -> None:
    prepared = learned(worker(tmp_path / "w", f"{FIRST}; return {{'y': x}}", description="mine"))
    assert any("description" in note for note in prepared.notes)


def test_tensors_that_the_protocol_does_not_carry_are_refused(tmp_path: Path) -> None:
    folder = worker(tmp_path / "w", "pass")
    (folder / "model_inference.textproto").write_text(
        'input { name: "ids" data_type: "INT64" dims: [4] }\noutput { name: "y" data_type: "FP32" dims: [1] }\n'
    )
    with pytest.raises(BundleError, match="FP32"):
        learned(folder)


def test_a_folder_that_is_a_script_too_asks_which_is_meant(tmp_path: Path) -> None:
    folder = worker(tmp_path / "w", f"{FIRST}; return {{'y': x}}")
    (folder / "main.py").write_text("")
    (folder / "requirements.txt").write_text("")
    with pytest.raises(BundleError, match="several backends"):
        learned(folder)
    assert prepare(folder, allow_code=True, backend="snooze").spec.engine == "snooze"


def test_weights_of_its_own_beside_it_do_not_make_it_another_kind(tmp_path: Path) -> None:
    folder = worker(tmp_path / "w", f"{FIRST}; return {{'y': x}}")
    (folder / "weights.onnx").write_bytes(b"not looked at")
    (folder / "model_inference.textproto").write_text("input_shape: [4]\noutput_shape: [4]\nmax_batch_size: 8\n")
    with pytest.raises(BundleError, match=r"gave \['y'\], without \['output'\]"):
        learned(folder)
    (folder / "snooze_model.py").write_text((folder / "snooze_model.py").read_text().replace("'y'", "'output'"))
    assert learned(folder).spec.engine == "snooze"


def test_the_command_converts_what_the_sdk_makes(tmp_path: Path) -> None:
    sdk = pytest.importorskip("snoozeml", reason="the snoozeml package is not installed in this interpreter")
    for tensor_format in ("numpy", "raw"):
        sdk.scaffold_worker(tmp_path / "models" / tensor_format, tensor_format=tensor_format)
    arguments = [str(tmp_path / "models"), "-o", str(tmp_path / "repository"), "--allow-code"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    for name in ("numpy", "raw"):
        spec = ModelSpec.read(tmp_path / "repository" / name / "1")
        assert ([t.name for t in spec.inputs], [t.name for t in spec.outputs]) == (["input"], ["output"])
