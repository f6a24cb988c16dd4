from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_up
import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from made_up import MANY

pytest.importorskip("jax")

from converters import arity, bundle, cli
from converters.arity import ArityReport, ModuleArity
from converters.check import Report, WeightsFile, check, check_all
from converters.convert import convert, prepare
from nereid_backend.errors import NereidError, SignatureError
from nereid_backend.spec import TensorSpec

CONTRACT = "model_inference.textproto"
META_CODE = "from nereid_backend.hooks import register_meta_model\nregister_meta_model(lambda inputs, call: inputs)\n"


def f32(name: str, shape: str, **dims: int) -> dict[str, Any]:
    return {"name": name, "dtype": "f32", "shape": shape, "dims": dims}


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(cli.check, [str(argument) for argument in arguments], catch_exceptions=False)


def run(*arguments: Any, code: str = "from native_service.cli import main; main()") -> Any:
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


def meta_model(folder: Path, *calls: str) -> Path:
    folder.mkdir()
    client = [f32("x", "cn", c=4)]
    manifest = {"format_version": "2.1", "kind": "meta", "meta": {"calls": list(calls)}}
    (folder / "manifest.yaml").write_text(
        yaml.safe_dump({**manifest, "client_inputs": client, "client_outputs": client})
    )
    (folder / "hooks.py").write_text(META_CODE)
    return folder


# What is told.


def test_a_bundle_is_told_in_full(make_bundle: Callable[..., Path]) -> None:
    folder = make_bundle(
        nereid={"postprocess": [{"softmax": {"input": "y", "output": "p"}}]}, client_outputs=[f32("p", "kn", k=4)]
    )
    modules = tuple(ModuleArity(f"model.b{size}.mlir", 3, servable=True) for size in (1, 4))
    assert check(folder) == Report(
        str(folder),
        "linear",
        "bundle",
        inputs=(TensorSpec("x", "f32", (-1, 4), 0),),
        outputs=(TensorSpec("p", "f32", (-1, 4), 0),),
        max_batch_size=4,
        batch_sizes=(1, 4),
        weights=WeightsFile("weights.safetensors", 2, 80, "program axis order"),
        hooks=("softmax",),
        arity=ArityReport("linear", 1, 2, 3, modules, servable=True),
    )


def test_what_is_known_of_a_bad_bundle_is_told_beside_its_problem(make_bundle: Any) -> None:
    report = check(make_bundle(order=["b", "w"], axis_order=None))
    assert report.problem is not None
    assert report.weights == WeightsFile("weights.safetensors", 2, 80, "legacy axis order")
    assert report.arity is not None
    assert (report.arity.expected, report.inputs) == (3, ())


def test_variants_are_counted(make_pool: Any) -> None:
    report = check(make_pool())
    assert (report.problem, report.variants) == (None, ((2, 4), (5, 3)))
    assert "; variants: 2; 1 weights of 4 bytes" in report.line


def test_weights_are_not_read(make_bundle: Any) -> None:
    folder = make_bundle()
    with (folder / "weights.safetensors").open("r+b") as file:  # a sparse file of 1 TB takes no time to check
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        rows = 2**38
        header["w"]["shape"], header["w"]["data_offsets"] = [rows], [0, 4 * rows]
        header["b"]["data_offsets"] = [4 * rows, 4 * rows + 16]
        text = json.dumps(header).encode().ljust(length)
        file.seek(0)
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 4 * rows + 16)
    report = check(folder)
    assert report.weights == WeightsFile("weights.safetensors", 2, 4 * rows + 16, "program axis order")
    assert str(report.problem).startswith("model.b1.mlir: weight 'w' is f32[274877906944] in weights.safetensors")


def test_a_meta_model_is_checked_against_the_others(make_bundle: Any, tmp_path: Path) -> None:
    good, lost = meta_model(tmp_path / "a_good", "linear"), meta_model(tmp_path / "a_lost", "nobody")
    folder = make_bundle()
    reports = {report.name: report for report in check_all([good, lost, folder], in_child=False)}
    assert [*reports] == ["linear", "a_good", "a_lost"]
    assert (reports["a_good"].problem, reports["a_good"].calls) == (None, ("linear",))
    expected = "the meta model calls 'nobody', which is not among the converted models; convert it as well"
    assert reports["a_lost"].problem == expected


def test_a_mixed_folder_has_a_line_for_each_model(make_bundle: Any, plus_one: Any, tmp_path: Path) -> None:
    make_bundle()
    plus_one(("batch", 4), path=tmp_path / "add.onnx")
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "main.py").write_text("def broken(:\n")
    (tmp_path / "script" / "requirements.txt").write_text("")
    (tmp_path / "script" / CONTRACT).write_text("input_shape: [4]\noutput_shape: [4]")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "m.pt").write_text("")
    (tmp_path / "torch" / CONTRACT).write_text("input_shape: [4]")
    (tmp_path / "forgotten").mkdir()
    (tmp_path / "forgotten" / "model.b1.mlir").write_text("")
    (tmp_path / "notes").mkdir()
    (tmp_path / "bare.pt").write_text("")
    result = invoke(tmp_path)
    assert result.exit_code == 1
    lines = [line.replace(f"{tmp_path}/", "") for line in result.stdout.splitlines()]
    assert [line[:30] for line in lines] == [
        "ok: add.onnx: onnx file",
        "ok: linear: bundle; x f32[-1, ",
        "error: script: main.py is not ",
        "ok: torch: torch folder",
    ]
    assert [line.replace(f"{tmp_path}/", "") for line in result.stderr.splitlines()] == [
        "note: add.onnx: add.onnx is not opened by a check; converting it reads it",
        "note: torch: m.pt is not opened by a check; converting it reads it",
        "note: bare.pt: is passed over: a torch file is converted by its own name only",
        f"note: forgotten: is passed over: model.b1.mlir needs {CONTRACT} beside it (or manifest.yaml, as a bundle)",
    ]


def test_a_script_is_not_built_and_code_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "script"
    folder.mkdir()
    (folder / "main.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (folder / "requirements.txt").write_text("no-such-distribution-anywhere\n")
    (folder / CONTRACT).write_text("input_shape: [4]\noutput_shape: [4]")
    monkeypatch.setenv("NEREID_CACHE_DIR", str(tmp_path / "cache"))
    report = check(folder)
    assert (report.problem, report.kind, len(report.inputs)) == (None, "python folder", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["script"]


def test_a_lone_module_is_read_and_consent_is_asked_for(make_bundle: Any, tmp_path: Path) -> None:
    folder = make_bundle()
    report = check(folder / "model.b4.mlir")
    assert [tensor.shape for tensor in report.inputs] == [(4, 4), (4, 4), (4,)]
    (tmp_path / "m.pt2").write_text("")
    with pytest.raises(NereidError) as unallowed:
        prepare(tmp_path / "m.pt2")
    assert check(tmp_path / "m.pt2").notes == (str(unallowed.value),)


def test_json_has_one_object_a_line(make_bundle: Any, tmp_path: Path) -> None:
    folder = make_bundle()
    (make_bundle("broken") / "weights.safetensors").unlink()
    result = invoke(tmp_path, "--json")
    assert (result.exit_code, result.stderr) == (1, "")
    broken, good = map(json.loads, result.stdout.splitlines())
    assert (broken["ok"], broken["problem"].partition(":")[0]) == (False, "weights.safetensors")
    assert good == {"ok": True, **json.loads(json.dumps(check(folder).to_json()))}
    assert (good["arity"]["servable"], good["weights"]["size_bytes"]) == (True, 80)
    (tmp_path / "broken" / "manifest.yaml").unlink()
    assert invoke(tmp_path, "--json").exit_code == 0


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        (lambda path: None, "does not exist; give a bundle, a nereid folder or a model file"),
        (lambda path: path.write_text(""), "is a file; give a bundle, a nereid folder or a model file"),
        (lambda path: path.mkdir(), "the folder is neither a bundle (manifest.yaml) nor a nereid folder"),
        (lambda path: path.symlink_to("nowhere"), "does not exist"),
        (
            lambda path: (path.mkdir(), os.mkfifo(path / "manifest.yaml")),
            "manifest.yaml is neither a file nor a folder",
        ),
    ],
)
def test_what_is_no_model_is_one_line_too(tmp_path: Path, setup: Any, words: str) -> None:
    setup(tmp_path / "thing")
    result = invoke(tmp_path / "thing")
    assert (result.exit_code, len(result.stdout.splitlines()), words in result.stdout) == (1, 1, True)
    assert result.stdout.startswith(f"error: {tmp_path / 'thing'}: ")


@pytest.mark.parametrize("name", ["manifest.yaml", CONTRACT])
def test_a_broken_link_among_other_models_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / name).symlink_to("nowhere")
    result = invoke(tmp_path)
    assert result.exit_code == 1
    assert result.stdout.startswith(f"error: {tmp_path / 'broken'}: {name}")


@pytest.mark.parametrize("name", [b"two\nlines", b"no \xff text", "r\u00e9seau".encode()])
def test_any_name_of_a_folder_is_one_line(make_bundle: Any, tmp_path: Path, name: bytes) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    make_bundle(sizes=(1,)).rename(folder)
    done = run("check", tmp_path)
    (line,) = done.stdout.splitlines()
    assert (done.returncode, line.startswith("error: "), "has characters outside letters" in line) == (1, True, True)
    assert json.loads(run("check", tmp_path, "--json").stdout)["path"] == str(folder)


# The same as conversion.


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory, program_writer: Any, weights_writer: Any) -> Path:
    folder = tmp_path_factory.mktemp("made_up") / "model"
    folder.mkdir()
    for size in (1, 4):
        shapes = ((size, 4), np.float32), ((4, 4), np.float32), ((4,), np.float32)
        program_writer(folder / f"model.b{size}.mlir", lambda x, w, b: x @ w + b, *shapes)
    weights_writer(folder, {"w": np.ones((4, 4), np.float32), "b": np.ones(4, np.float32)})
    return folder


MANIFEST = {
    "format_version": "2.1",
    "name": "model",
    "executable_inputs": [f32("x", "cn", c=4)],
    "executable_outputs": [f32("y", "kn", k=4)],
    "client_inputs": [f32("x", "cn", c=4)],
    "client_outputs": [f32("y", "kn", k=4), f32("p", "kn", k=4)],
    "batching": {"compiled_batch_sizes": [1, 4]},
    "nereid": {"postprocess": [{"softmax": {"input": "y", "output": "p"}}]},
}
HEADER = {
    "__metadata__": {"argument_order": '["w", "b"]', "axis_order": "xla"},
    "w": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]},
    "b": {"dtype": "F32", "shape": [4], "data_offsets": [64, 80]},
}


@MANY
@given(
    manifest=st.just(yaml.safe_dump(MANIFEST))
    | made_up.altered(MANIFEST, 2).map(yaml.safe_dump)
    | made_up.damaged(yaml.safe_dump(MANIFEST), ["nereid", "n", "-1", "[", "meta", ": "]),
    header=st.just(HEADER) | st.just(HEADER) | made_up.altered(HEADER, 2),
    short=st.sampled_from([0, 0, 0, 1]),
    missing=st.sampled_from([None, None, None, "model.b1.mlir", "weights.safetensors"]),
)
def test_made_up_bundles_are_refused_in_the_words_of_conversion(
    hooked: Path, manifest: str, header: Any, short: int, missing: str | None
) -> None:
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        folder = Path(scratch, "model")
        shutil.copytree(hooked, folder)
        (folder / "manifest.yaml").write_text(manifest, encoding="utf-8", errors="replace")
        text = json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text + bytes(80)
        (folder / "weights.safetensors").write_bytes(data[: len(data) - short])
        if missing is not None:
            (folder / missing).unlink()
        patch.setattr(bundle, "_with_rows_checked", lambda prepared: prepared)  # it needs the weights' values
        assert check(folder).problem == refusal(folder, Path(scratch, "repository"))


def refusal(folder: Path, repository: Path) -> str | None:
    """What conversion says of a bundle that it does not convert."""
    try:
        convert(folder, repository, link=True)
    except NereidError as error:
        return str(error)
    return None


def test_a_dtype_that_triton_lacks_is_told_although_only_the_writer_refuses_it(
    make_bundle: Any, tmp_path: Path
) -> None:
    folder = make_bundle(
        function=lambda x: x.astype("float8_e5m2"),
        tensors={},
        executable_outputs=[{**f32("y", "kn", k=4), "dtype": "f8_e5m2"}],
        client_outputs=[f32("best", "r", r=-1)],
    )
    (folder / "hooks.py").write_text("from nereid_backend.hooks import register_model\nregister_model()\n")
    problem = check(folder).problem
    assert problem == "tensor 'y' is f8_e5m2, which Triton has no type for"
    assert refusal(folder, tmp_path / "r") == problem


# Files that end their reader.

ABORTING = """
import os, converters.bundle
from native_service.cli import main
read_manifest = converters.bundle.read_manifest
before = set()
def reading(directory):
    before.add(directory.name)
    if directory.name == "aborts" or (directory.name == "victim" and "aborts_late" in before):
        os.abort()
    return read_manifest(directory)
converters.bundle.read_manifest = reading
main()
"""


def test_a_bundle_that_ends_its_reader_is_one_line_about_that_bundle(make_bundle: Any, tmp_path: Path) -> None:
    for name in ("aborts", "aborts_late", "good", "victim"):
        make_bundle(name, sizes=(1,), batching=None)
    done = run("check", tmp_path, code=ABORTING)
    assert done.returncode == 1
    assert [line[:3] for line in done.stdout.splitlines()] == ["err", "ok:", "ok:", "ok:"]
    assert done.stdout.splitlines()[0] == (
        f"error: {tmp_path / 'aborts'}: reading it ended the converter (signal 6); "
        "it is damaged, or too large for this machine"
    )
    assert done.stderr == ""


def test_flipped_bytes_in_programs_cost_their_own_bundle_only(make_bundle: Any, tmp_path: Path) -> None:
    source = make_bundle(sizes=(1,), batching=None)
    program = (source / "model.b1.mlir").read_bytes()
    flips = random.Random(6)
    for index in range(60):
        folder = tmp_path / f"x{index:02}"
        shutil.copytree(source, folder)
        damaged = bytearray(program)
        for _ in range(3 if index % 2 else 0):
            damaged[flips.randrange(len(damaged))] = flips.randrange(256)
        (folder / "model.b1.mlir").write_bytes(damaged)
    done = run("check", tmp_path, "--json")
    answers = {Path(line["path"]).name: line["ok"] for line in map(json.loads, done.stdout.splitlines())}
    assert len(answers) == 61
    assert all(ok for name, ok in answers.items() if name == "linear" or int(name[1:]) % 2 == 0)
    assert (done.returncode, all(answers.values())) == (1, False)


# Arity.


def test_the_arity_of_a_bundle_is_reported(make_bundle: Any) -> None:
    folder = make_bundle()
    report = arity.bundle_arity_report(folder)
    modules = tuple(ModuleArity(f"model.b{size}.mlir", 3, servable=True) for size in (1, 4))
    assert report == ArityReport("linear", 1, 2, 3, modules, servable=True)
    assert arity.assert_bundle_arity(folder) == report
    assert arity.bundle_entry_arity(folder / "model.b1.mlir") == 3


def test_an_input_added_to_the_manifest_makes_the_bundle_unservable(make_bundle: Any) -> None:
    folder = make_bundle(executable_inputs=[f32("x", "cn", c=4), f32("seed", "cn", c=4)])
    report = arity.bundle_arity_report(folder)
    assert (report.expected, [m.entry_args for m in report.modules], report.servable) == (4, [3, 3], False)
    with pytest.raises(
        SignatureError, match=r"linear: model\.b1\.mlir: main takes 3 arguments, the manifest's 2 inputs"
    ):
        arity.assert_bundle_arity(folder)
    assert check(folder).problem == report.problem


@pytest.mark.parametrize("damage", ["manifest.yaml", "weights.safetensors", "model.b1.mlir", "everything"])
def test_the_report_of_a_bad_bundle_raises_nothing(make_bundle: Any, damage: str) -> None:
    folder = make_bundle()
    if damage == "everything":
        shutil.rmtree(folder)
    else:
        (folder / damage).write_bytes(b"\xff" * 7)
    report = arity.bundle_arity_report(folder)
    assert (report.name, report.servable, report.modules, report.expected) == ("linear", False, (), None)
    assert report.problem
    with pytest.raises(SignatureError, match="linear: "):
        arity.assert_bundle_arity(folder)
