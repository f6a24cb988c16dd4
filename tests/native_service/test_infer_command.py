"""``nereid infer`` as a process, against a made-up server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
from fake_native_server import WAIT_S, Faked, answers, echo, refuse

from native_service.client.messages import Contract
from native_service.proto import inference_pb2 as pb

R16 = np.arange(16, dtype=np.float32)


def start(*arguments: str | Path, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "native_service.cli", "infer", *map(str, arguments)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, **{**pipes, **options})


def infer(*arguments: str | Path, cwd: Path, **options: Any) -> tuple[int, str, str]:
    process = start(*arguments, cwd=cwd, **options)
    out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out, err


def program(*lines: str, exit_code: int = 0) -> Any:
    texts = [pb.CheckpointResponse(chunk=line) for line in lines]
    return answers(*texts, pb.CheckpointResponse(done=True, exit_code=exit_code))


@pytest.mark.parametrize("name", [[], ["x="]])
def test_an_array_goes_in_and_its_result_is_printed(faked: Faked, tmp_path: Path, name: list[str]) -> None:
    faked.behaviours = [echo]
    np.save(tmp_path / "x.npy", R16)
    code, out, err = infer("m", "--input", f"{''.join(name)}x.npy", "--address", faked.address, cwd=tmp_path)
    assert (code, err) == (0, "inference completed\n")
    assert out.splitlines()[0] == "y: float32 [16]"
    assert "14." in out


@pytest.mark.parametrize(("source", "target"), [("x.npz", "y.npz"), ("x.npy", "y.npy")])
def test_files_go_in_and_come_out(faked: Faked, tmp_path: Path, source: str, target: str) -> None:
    faked.behaviours = [echo]
    if source.endswith("z"):
        np.savez(tmp_path / source, x=R16)
    else:
        np.save(tmp_path / source, R16)
    (tmp_path / "state.json").write_text(json.dumps({"address": faked.address}))
    (tmp_path / "key").write_text("s3cret\n")
    options = ["--input", source, "--output", target, "--state", "state.json", "--key-file", "key"]
    assert infer("m", *options, cwd=tmp_path)[:2] == (0, "")
    result = np.load(tmp_path / target)
    np.testing.assert_array_equal(result["y"] if target.endswith("z") else result, R16)
    assert faked.metadata[0]["authorization"] == "Bearer s3cret"


def test_bytes_of_stdin_go_to_a_program_and_its_lines_to_stderr(faked: Faked, tmp_path: Path) -> None:
    faked.behaviours = [program("one", "two")]
    (tmp_path / "data").write_bytes(b"12345")
    with (tmp_path / "data").open("rb") as data:
        done = infer("m", "--input", "-", "--address", faked.address, cwd=tmp_path, stdin=data)
    assert done == (0, "", "one\ntwo\n")
    [meta, chunk] = faked.messages[0]
    assert meta.meta.model_name == "m"
    assert (list(chunk.chunk.shape), chunk.chunk.data) == ([5], b"12345")


def test_a_program_that_fails_is_exit_code_1(faked: Faked, tmp_path: Path) -> None:
    faked.behaviours = [program("oh no", exit_code=7)]
    (tmp_path / "data").write_bytes(b"1")
    done = infer("m", "--input", "data", "--address", faked.address, cwd=tmp_path)
    assert done == (1, "", "oh no\nerror: the program ended with exit code 7\n")


def test_an_unknown_model_is_told_with_those_there_are(faked: Faked, tmp_path: Path) -> None:
    done = infer("nope", "--address", faked.address, cwd=tmp_path)
    assert done == (1, "", "error: the server has no model 'nope'; it has: m, other\n")


def test_what_the_server_says_is_the_error(faked: Faked, tmp_path: Path) -> None:
    faked.behaviours = [refuse(grpc.StatusCode.INVALID_ARGUMENT, "model 'm': dimension 0 must be 16, got 3")]
    np.save(tmp_path / "x.npy", R16[:3])
    done = infer("m", "--input", "x.npy", "--address", faked.address, cwd=tmp_path)
    assert done == (1, "", "error: model 'm': dimension 0 must be 16, got 3\n")


def test_nobody_there_is_told_in_one_line(tmp_path: Path) -> None:
    code, out, err = infer("m", "--address", "127.0.0.1:1", cwd=tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith("error: no server answers at 127.0.0.1:1; is it running there?")
    assert err.count("\n") == 1


def test_interrupting_cancels_the_call(faked: Faked, tmp_path: Path) -> None:
    faked.behaviours = [faked.forever]
    np.save(tmp_path / "x.npy", R16)
    process = start("m", "--input", "x.npy", "--address", faked.address, cwd=tmp_path)
    assert process.stderr is not None
    assert process.stderr.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=WAIT_S)[1] == "interrupted; the call was cancelled\n"
    assert process.returncode == 130
    assert faked.over.wait(WAIT_S)


def test_the_time_to_wait_is_bounded(faked: Faked, tmp_path: Path) -> None:
    faked.behaviours = [faked.forever]
    np.save(tmp_path / "x.npy", R16)
    code, _, err = infer("m", "--input", "x.npy", "--address", faked.address, "--timeout", "1", cwd=tmp_path)
    assert (code, "eadline" in err) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--input", "none.npy"], 1, "none.npy: cannot be read (No such file or directory)"),
        (["--input", "text.npy"], 1, "text.npy: is not a .npy file"),
        (["--input", "pickle.npy"], 1, "pickle.npy: is not a .npy file"),
        (["--key-file", "none"], 1, "none: cannot be read"),
        (["--state", "text.npy"], 1, "text.npy: is not the state file of a server"),
        (["--input", "x.npy", "--input", "x.npy"], 2, "each needs its tensor"),
        (["--input", "x=x.npy", "--input", "x=x.npy"], 2, "'x' twice"),
        (["--input", "x=text"], 2, "needs an .npy file"),
        (["--output", "result.txt"], 2, "must end in .npy or .npz"),
        (["--address", "a:1", "--state", "b"], 2, "exclude each other"),
        (["--timeout", "0"], 2, "--timeout"),
    ],
)
def test_files_and_options_that_cannot_be_used(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    np.save(tmp_path / "x.npy", R16)
    np.save(tmp_path / "pickle.npy", np.array([object()]))
    for name in ("text.npy", "text"):
        (tmp_path / name).write_text("hello")
    status, out, err = infer("m", *arguments, cwd=tmp_path)
    assert (status, out) == (code, "")
    assert words in err
    assert "Traceback" not in err


def test_a_result_that_cannot_be_written_is_told(faked: Faked, tmp_path: Path) -> None:
    faked.behaviours = [echo]
    np.save(tmp_path / "x.npy", R16)
    done = infer("m", "--input", "x.npy", "--output", "no/y.npy", "--address", faked.address, cwd=tmp_path)
    assert done[2].endswith("error: no/y.npy: cannot be written (No such file or directory)\n")
    assert done[0] == 1


def test_bfloat16_survives_a_file(tmp_path: Path) -> None:
    array = np.array([1.5, -2], ml_dtypes.bfloat16)
    np.save(tmp_path / "x.npy", array)
    contract = Contract("m", {"x": array.dtype}, {}, {"x": [2]})
    assert contract.arrays(np.load(tmp_path / "x.npy"))["x"].tobytes() == array.tobytes()
