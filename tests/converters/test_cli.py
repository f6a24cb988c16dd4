from __future__ import annotations

import signal
import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("onnxruntime")

from converters.cli import command
from converters.convert import check_device, convert, model_name, prepare
from nereid_backend import engines
from nereid_backend.errors import BundleError, DeviceMissing
from nereid_backend.spec import ModelSpec

CONTRACT = "model_inference.textproto"


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture
def add_one(plus_one: Any, tmp_path: Path) -> Path:
    path: Path = plus_one(("batch", 4), path=tmp_path / "add_one.onnx")
    return path


def test_a_model_is_one_line_and_exit_code_0(add_one: Path, tmp_path: Path) -> None:
    result = invoke(add_one, "-o", tmp_path / "r")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{add_one} -> {tmp_path / 'r' / 'add_one'} (engine onnx, batch sizes: up to 32)\n"
    assert ModelSpec.read(tmp_path / "r" / "add_one" / "1").name == "add_one"


def test_a_command_leaves_the_signals_of_its_caller_as_they_were(add_one: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert [invoke(add_one, "-o", tmp_path / "r").exit_code for _ in range(2)] == [0, 1]  # the second finds the first
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("options", "sizes"), [(("--max-batch-size", "7"), "up to 7"), (("--max-batch-size", "0"), "none")]
)
def test_the_line_tells_the_batch_sizes(add_one: Path, tmp_path: Path, options: Any, sizes: str) -> None:
    assert invoke(add_one, "-o", tmp_path / "r", *options).stdout.endswith(f"(engine onnx, batch sizes: {sizes})\n")


def test_a_bundle_tells_its_compiled_sizes(make_bundle: Any, tmp_path: Path) -> None:
    pytest.importorskip("jax")
    result = invoke(make_bundle(), "-o", tmp_path / "r")
    assert (result.exit_code, result.stdout.endswith("(engine stablehlo, batch sizes: 1, 4)\n")) == (0, True)


def test_one_bad_model_does_not_stop_the_others_and_exits_with_1(add_one: Path, plus_one: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_text("garbage")
    result = invoke(tmp_path, "-o", tmp_path / "r")
    assert result.exit_code == 1
    assert result.stdout == f"{add_one} -> {tmp_path / 'r' / 'add_one'} (engine onnx, batch sizes: up to 32)\n"
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path / 'broken.onnx'}: broken.onnx: ONNX Runtime ")
    assert [p.name for p in (tmp_path / "r").iterdir()] == ["add_one"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Missing argument 'SOURCE...'"),
        (("{x}", "--colour", "red"), "No such option"),
        (("{x}", "--max-batch-size", "-1"), "--max-batch-size"),
        (("{x}", "--max-batch-size", "many"), "not a valid integer"),
        (("{x}", "{x}", "--name", "n"), "--name needs exactly one model, found 2"),
    ],
)
def test_wrong_usage_exits_with_2(add_one: Path, arguments: tuple[str, ...], words: str) -> None:
    result = invoke(*[a.format(x=add_one) for a in arguments])
    assert (result.exit_code, result.stdout, words in result.stderr) == (2, "", True)


@pytest.mark.parametrize(
    ("setup", "options", "words"),
    [
        (None, (), "does not exist; give a bundle, a nereid folder or a model file (.pt, .onnx, "),
        ("folder", (), "the folder is neither a bundle (manifest.yaml) nor a nereid folder"),
        ("text", (), "is a file; give a bundle, a nereid folder or a model file (.pt, .onnx, "),
        ("manifest", (), "manifest.yaml line 1: is not YAML (the value is no timestamp, quote it); correct the line"),
        ("torch", ("--signature", "f"), "signature 'f' belongs to a TensorFlow SavedModel, this model is none"),
        ("torch", ("--max-batch-size", "4"), "--max-batch-size applies to a bare file"),
        ("torch", ("--backend", "onnx"), "backend 'onnx' was asked for"),
        ("folder", ("--device", "metal"), "unknown device 'metal'; use cpu, cuda or cuda:<index>"),
        ("folder", ("--name", "a/b"), "model name 'a/b' has characters outside letters, digits and _.-"),
        ("folder", ("--name", ""), "model name '' has characters outside"),
        ("folder", ("--name", ".."), "model name '..' has characters outside"),
    ],
)
def test_a_source_that_cannot_be_converted_is_one_line_on_stderr(
    tmp_path: Path, setup: str | None, options: tuple[str, ...], words: str
) -> None:
    source = tmp_path / "source"
    if setup == "text":
        source.write_text("")
    elif setup is not None:
        source.mkdir()
    if setup == "manifest":
        (source / "manifest.yaml").write_text("description: 2024-99-99")
    if setup == "torch":
        (source / CONTRACT).write_text("input_shape: [4]")
        (source / "m.pt").write_text("")
    result = invoke(source, "-o", tmp_path / "r", *options)
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)
    assert result.stderr.startswith(f"error: {source}: ")
    assert words in result.stderr
    assert not (tmp_path / "r").exists()


def test_an_engine_that_is_installed_wrongly_is_one_line(
    add_one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = [EntryPoint("onnx", "mine:Engine", engines.ENTRY_POINTS)]
    monkeypatch.setattr(engines, "entry_points", lambda group: wrong)
    result = invoke(add_one, "-o", tmp_path / "r")
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)
    assert result.stderr.startswith(f"error: {add_one}: mine:Engine declares an engine 'onnx', which is built in")


def test_an_existing_model_needs_force(add_one: Path, tmp_path: Path) -> None:
    codes = [invoke(add_one, "-o", tmp_path / "r", *force).exit_code for force in ((), (), ("--force",))]
    assert codes == [0, 1, 0]


def test_remarks_go_to_stderr(make_onnx: Any, tmp_path: Path) -> None:
    make_onnx(
        [("Transpose", ["x"], ["y"])], [("x", 1, ["a", "b"])], [("y", 1, ["b", "a"])], tmp_path / "t.onnx", perm=[1, 0]
    )
    result = invoke(tmp_path / "t.onnx", "-o", tmp_path / "r")
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 1)
    assert result.stderr == (
        f"note: {tmp_path / 't.onnx'}: the first axes have different names and no common meaning: not batched\n"
    )


def test_the_default_output_is_triton_models_here(add_one: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert invoke(add_one).exit_code == 0
    assert (tmp_path / "here" / "triton_models" / "add_one" / "config.pbtxt").exists()


def test_a_model_may_be_linked_named_and_put_on_a_gpu(add_one: Path, tmp_path: Path) -> None:
    assert invoke(add_one, "-o", tmp_path / "r", "--link", "--name", "n.1-x", "--device", "cuda:1").exit_code == 0
    assert (tmp_path / "r" / "n.1-x" / "1" / "add_one.onnx").samefile(add_one)
    assert "KIND_GPU" in (tmp_path / "r" / "n.1-x" / "config.pbtxt").read_text()


def test_a_name_comes_from_the_folder_or_the_file_stem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "v1.2.onnx").write_text("")
    monkeypatch.chdir(tmp_path / "folder.onnx")
    assert [model_name(p) for p in (Path(), tmp_path / "v1.2.onnx")] == ["folder.onnx", "v1.2"]


def test_a_failed_conversion_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_text("garbage")
    with pytest.raises(BundleError):
        convert(tmp_path / "bad.onnx", tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_the_device_is_checked_on_request_only(add_one: Path) -> None:
    import onnxruntime

    spec = prepare(add_one, device="cuda:1").spec
    assert spec.device == "cuda:1"
    assert check_device(prepare(add_one).spec) is None
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        with pytest.raises(DeviceMissing, match="cuda:1"):
            check_device(spec)


def test_two_models_of_one_name_are_refused_before_any_is_written(add_one: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    twin = other / add_one.name
    twin.write_bytes(add_one.read_bytes())
    result = invoke(add_one, twin, "-o", tmp_path / "r")
    assert (result.exit_code, (tmp_path / "r").exists()) == (2, False)
    assert "several models would be called 'add_one'" in result.stderr


def test_a_pipe_among_the_files_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    import os

    folder = tmp_path / "m"
    folder.mkdir()
    os.mkfifo(folder / "manifest.yaml")
    result = invoke(folder, "-o", tmp_path / "r")
    assert (result.exit_code, "manifest.yaml is neither a file nor a folder" in result.stderr) == (1, True)


def test_a_fault_of_ours_is_one_line_and_the_other_models_go_on(
    add_one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from converters import convert as module

    good = module.convert

    def faulty(source: Path, *arguments: object, **options: object) -> object:
        if source.name == "bad.onnx":
            raise KeyError("something nobody thought of")
        return good(source, *arguments, **options)

    monkeypatch.setattr(module, "convert", faulty)
    bad = add_one.with_name("bad.onnx")
    bad.write_bytes(add_one.read_bytes())
    result = invoke(bad, add_one, "-o", tmp_path / "r")
    assert (result.exit_code, (tmp_path / "r" / "add_one").is_dir()) == (1, True)
    assert "KeyError" in result.stderr
    assert "Traceback" not in result.output


ABORTING = """
import os, signal, converters.convert
from converters.cli import main
convert = converters.convert.convert
def aborting(source, *rest, **options):
    if source.name == "aborts.onnx":
        os.abort()
    if source.name == "exits.onnx":
        os._exit(7)
    return convert(source, *rest, **options)
converters.convert.convert = aborting
main()
"""


def test_a_reader_that_ends_its_process_fails_its_own_model_only(plus_one: Any, tmp_path: Path) -> None:
    for name in ("aborts", "before", "exits", "last"):
        plus_one(("batch", 4), path=tmp_path / f"{name}.onnx")
    command = [sys.executable, "-c", ABORTING, str(tmp_path), "-o", str(tmp_path / "r")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"error: {tmp_path / name}.onnx: reading it ended the converter ({how}); "
        "it is damaged, or too large for this machine"
        for name, how in (("aborts", "signal 6"), ("exits", "exit code 7"))
    ]
    assert [line.partition(" -> ")[0] for line in done.stdout.splitlines()] == [
        str(tmp_path / f"{name}.onnx") for name in ("before", "last")
    ]


def test_a_stopped_command_stops_its_child(plus_one: Any, tmp_path: Path) -> None:
    plus_one(("batch", 4), path=tmp_path / "m.onnx")
    waiting = (
        "import os, pathlib, time, converters.convert\n"
        "from converters.cli import main\n"
        "def convert(source, *rest, **options):\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "    time.sleep(60)\n"
        "converters.convert.convert = convert\n"
        "main()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", waiting, str(tmp_path / "m.onnx")])
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    assert process.wait(timeout=30) == 1
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()
