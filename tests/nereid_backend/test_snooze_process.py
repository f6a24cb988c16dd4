"""The process of a worker model and our end of its protocol."""

from __future__ import annotations

import io
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import alive

from nereid_backend.errors import BundleError, EngineError, InvalidArgument
from nereid_backend.snooze import process, worker
from nereid_backend.spec import Worker

PLAIN = Worker("snooze_model.py", "Model", raw=False, python="", environment={})
X = np.float32([[1, 2], [3, 4]])


def model(predict: str, load: str = "pass", head: str = "") -> str:
    return f"""
import os, sys, numpy as np
{head}
class Model:
    def load(self, model_dir, device):
        self.started = (model_dir, device)
        {load}
    def predict(self, inputs):
        {predict}
"""


@contextmanager
def opened(folder: Path, text: str, spec: Worker = PLAIN, device: str = "cpu") -> Iterator[process.Process]:
    (folder / spec.entrypoint).write_text(text)
    running = process.Process(spec, folder, device)
    try:
        yield running
    finally:
        running.close()


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_tensors_go_by_name_and_keep_their_shapes_and_values(tmp_path: Path) -> None:
    text = model(
        "return {'same': inputs['a'], 'sum': inputs['a'].sum(axis=1), 'wide': inputs['b'][:, None].repeat(3, 1)}"
    )
    a = np.random.default_rng(0).normal(size=(4, 2, 3)).astype(np.float32)
    with opened(tmp_path, text) as running:
        result = running.predict({"a": a, "b": np.arange(4, dtype=np.float32)})
    np.testing.assert_array_equal(result["same"], a)
    np.testing.assert_allclose(result["sum"], a.sum(axis=1), rtol=1e-6)
    np.testing.assert_array_equal(result["wide"], np.arange(4)[:, None].repeat(3, 1))


def test_a_large_tensor_passes_both_ways(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).random((3, 1_000_001)).astype(np.float32)
    with opened(tmp_path, model("return {'y': inputs['x'] * 2}")) as running:
        np.testing.assert_array_equal(running.predict({"x": rows})["y"], rows * 2)


def test_load_is_told_the_folder_and_the_device_and_runs_once(tmp_path: Path) -> None:
    text = model("return {'n': np.full(2, self.n)}", "self.n = len(open(os.path.join(model_dir, device)).read())")
    (tmp_path / "cuda:1").write_text("12345")
    with opened(tmp_path, text, device="cuda:1") as running:
        (tmp_path / "cuda:1").unlink()
        for _ in range(2):
            np.testing.assert_array_equal(running.predict({"x": X})["n"], [5, 5])


def test_raw_tensors_need_no_numpy_and_come_from_the_sdk_s_module(tmp_path: Path) -> None:
    text = """
from snoozeml.worker import RawTensor

class Own:
    def load(self, model_dir, device):
        pass
    def predict(self, inputs):
        x = inputs["x"]
        assert isinstance(x, RawTensor)
        return {"y": RawTensor(x.shape, [2 * value for value in x.data])}
"""
    spec = Worker("own.py", "Own", raw=True, python="", environment={})
    with opened(tmp_path, text, spec) as running:
        np.testing.assert_array_equal(running.predict({"x": X})["y"], 2 * X)


def test_what_a_model_prints_goes_to_stderr_and_it_finds_nothing_to_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = model(
        "print('hello from python'); os.system('echo hello from a child'); rest = sys.stdin.read()\n"
        "        return {'n': np.full(2, len(rest))}"
    )
    with opened(tmp_path, text) as running:
        np.testing.assert_array_equal(running.predict({"x": X})["n"], [0, 0])
    told = capfd.readouterr()
    assert told.out == ""
    assert "hello from python" in told.err
    assert "hello from a child" in told.err


def test_the_variables_it_names_are_added_and_the_server_s_secrets_are_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    text = model("return {'seen': np.full(2, len(os.environ.get('SECRET_TOKEN', '')) + int(os.environ['WANTED']))}")
    spec = Worker("snooze_model.py", "Model", raw=False, python="", environment={"WANTED": "3"})
    with opened(tmp_path, text, spec) as running:
        np.testing.assert_array_equal(running.predict({"x": X})["seen"], [3, 3])


@pytest.mark.parametrize(
    ("statement", "error", "words"),
    [
        ("raise ValueError('bad\\nrow')", InvalidArgument, "ValueError: bad row"),
        ("return {'y': inputs['other']}", InvalidArgument, "KeyError: 'other'"),
        ("raise MemoryError('no room')", MemoryError, "out of memory"),
        ("raise type('OutOfMemoryError', (RuntimeError,), {})('gpu 0')", MemoryError, "OutOfMemoryError: gpu 0"),
        ("raise RuntimeError('CUDA out of memory')", MemoryError, "CUDA out of memory"),
        ("raise RuntimeError('broken')", EngineError, "RuntimeError: broken"),
        ("raise RuntimeError('x' * 100_000)", EngineError, "RuntimeError: xxx"),
        ("return {}", EngineError, "a dict of tensors that is not empty"),
        ("return inputs['x']", EngineError, "gave ndarray"),
        ("return {'y': 'text'}", EngineError, "cannot be turned into float32"),
        ("return {1: inputs['x']}", EngineError, "names of outputs must be texts"),
        ("return {'y': inputs['x'][:1]}", EngineError, "its first axis must be the batch's, 2"),
    ],
)
def test_a_failure_is_told_by_its_kind_and_the_same_process_answers_on(
    tmp_path: Path, statement: str, error: type[Exception], words: str
) -> None:
    text = model(
        f"if inputs['x'][0, 0] == 1:\n            {statement}\n        return {{'pid': np.full(2, os.getpid())}}"
    )
    with opened(tmp_path, text) as running:
        before = running.predict({"x": X + 1})["pid"]
        with pytest.raises(error) as caught:
            running.predict({"x": X})
        assert words in str(caught.value)
        assert len(str(caught.value)) < 1000
        np.testing.assert_array_equal(running.predict({"x": X + 1})["pid"], before)


@pytest.mark.parametrize(
    ("ending", "words"), [("sys.exit(7)", "ended with code 7"), ("os.kill(os.getpid(), 9)", "was killed by signal 9")]
)
def test_a_process_that_ends_in_a_call_is_started_again(tmp_path: Path, ending: str, words: str) -> None:
    text = model(f"if inputs['x'][0, 0] == 1:\n            {ending}\n        return {{'pid': np.full(2, os.getpid())}}")
    with opened(tmp_path, text) as running:
        (before, _) = running.predict({"x": X + 1})["pid"]
        with pytest.raises(EngineError, match=words):
            running.predict({"x": X})
        (after, _) = running.predict({"x": X + 1})["pid"]
    assert before != after
    wait_for(lambda: not alive({int(before), int(after)}))


def test_a_process_that_died_between_calls_costs_none(tmp_path: Path) -> None:
    with opened(tmp_path, model("return {'pid': np.full(2, os.getpid())}")) as running:
        before = int(running.predict({"x": X})["pid"][0])
        os.kill(before, signal.SIGKILL)
        wait_for(lambda: not alive({before}))
        assert int(running.predict({"x": X})["pid"][0]) != before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (model("pass", "raise RuntimeError('no weights')"), "RuntimeError: no weights"),
        (model("pass", "raise MemoryError()"), "out of memory"),
        (model("pass", "sys.exit(3)"), "SystemExit: 3"),
        (model("pass", "os._exit(3)"), "ended with code 3 while the model was loaded"),
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
        ("class Other: pass", "has no class 'Model'"),
        ("class Model: load = print", "has no method 'predict'"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_told_with_its_reason(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises((BundleError, EngineError), match=words), opened(tmp_path, text):
        pass


def test_a_python_of_its_own_runs_it_and_one_that_is_not_there_is_told(tmp_path: Path) -> None:
    other = tmp_path / "own-python"
    other.write_text(f'#!/bin/sh\nWHO=own exec {sys.executable} "$@"\n')
    other.chmod(0o755)
    text = model("return {'n': np.full(2, os.environ.get('WHO') == 'own')}")
    spec = Worker("snooze_model.py", "Model", raw=False, python="./own-python", environment={})
    with opened(tmp_path, text, spec) as running:
        np.testing.assert_array_equal(running.predict({"x": X})["n"], [1, 1])
    missing = Worker("snooze_model.py", "Model", raw=False, python="no-such-python", environment={})
    with pytest.raises(BundleError, match="'no-such-python' is no program"), opened(tmp_path, text, missing):
        pass


def test_closing_ends_a_process_that_hangs_with_what_it_started(tmp_path: Path) -> None:
    text = model(
        "import subprocess, time; child = subprocess.Popen(['sleep', '1000'])\n"
        "        open('pids', 'w').write(f'{os.getpid()} {child.pid}'); os.rename('pids', 'told'); time.sleep(1000)"
    )
    # In a process of its own, which is then killed as a model's process is when its time is up.
    program = f"""
from pathlib import Path
import numpy as np
from nereid_backend.snooze import process
from nereid_backend.spec import Worker
folder = Path({str(tmp_path)!r})
running = process.Process(Worker("snooze_model.py", "Model", False, "", {{}}), folder, "cpu")
running.predict({{"x": np.zeros((1, 1), np.float32)}})
"""
    (tmp_path / "snooze_model.py").write_text(text)
    caller = subprocess.Popen([sys.executable, "-c", program])
    wait_for((tmp_path / "told").exists)
    pids = set(map(int, (tmp_path / "told").read_text().split()))
    assert alive(pids) == pids
    caller.kill()
    caller.wait()
    wait_for(lambda: not alive(pids))


def told(*shape: Any, name: Any = "y") -> bytes:
    """A RESULT with one value, whatever its header says of it."""
    return worker.packed(worker.RESULT, {"tensors": [{"name": name, "shape": shape}]}, 4) + bytes(4)


@pytest.mark.parametrize(
    "answer",
    [b"\xff" * 64, told(2**64), told(2**62, 4), told(0, 2**64), told(-1, -1), told(2), told("1"), told(1, name=["y"])],
)
def test_a_model_that_writes_into_the_protocol_s_way_is_replaced(tmp_path: Path, answer: bytes) -> None:
    # Nothing of ours is at descriptors 0 and 1; a model that looks for the copies breaks its own process only.
    text = model(
        "if inputs['x'][0, 0] == 1:\n"
        "            for number in range(3, 64):\n"
        f"                try: os.write(number, {answer!r})\n"
        "                except OSError: pass\n"
        "        return {'y': inputs['x']}"
    )
    with opened(tmp_path, text) as running:
        with pytest.raises(EngineError, match="started again"):
            running.predict({"x": X})
        np.testing.assert_array_equal(running.predict({"x": X + 1})["y"], X + 1)


def test_frames_are_those_of_protocol_version_1() -> None:
    values = X.astype("<f4").tobytes()
    header = {"tensors": [{"name": "x", "shape": [2, 2], "dtype": "f32"}]}
    text = json.dumps(header, separators=(",", ":")).encode()
    expected = struct.pack("<IBI", 5 + len(text) + len(values), 2, len(text)) + text + values
    assert worker.packed(worker.INFER, header, len(values)) + values == expected


def test_frames_are_read_and_written_as_the_sdk_does() -> None:
    sdk = pytest.importorskip("snoozeml.worker", reason="the snoozeml package is not installed in this interpreter")
    stream = io.BytesIO()
    header = {"tensors": [{"name": "x", "shape": [2, 2], "dtype": "f32"}]}
    sdk.write_frame(stream, sdk.MSG_RESULT, header, [X])
    theirs = bytearray(stream.getvalue())
    kind, told, values = worker.unpacked(theirs[worker.LENGTH.size :])
    assert (kind, told) == (worker.RESULT, header)
    np.testing.assert_array_equal(np.frombuffer(values, "<f4").reshape(2, 2), X)
    ours = io.BytesIO(worker.packed(worker.INFER, header, X.nbytes) + X.tobytes())
    kind, told, payload = sdk.read_frame(ours)
    assert (kind, told) == (sdk.MSG_INFER, header)
    np.testing.assert_array_equal(sdk.decode_tensors(told, payload, "numpy")["x"], X)
