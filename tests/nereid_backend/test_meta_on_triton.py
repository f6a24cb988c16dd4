"""Meta models inside the real tritonserver. ``make test`` runs this file on both numpy generations."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import yaml
from fake_engine import write_fake
from hooked_bundle import RAGGED_HOOKS, RAGGED_TENSORS, write_bundle
from serving import raw_infer

from nereid_backend import dtypes
from nereid_backend.spec import TensorSpec

pytestmark = pytest.mark.triton

WIRE_DTYPES = [row for row in dtypes.TABLE if row.kserve is not None]
REGISTER = "\nfrom nereid_backend.hooks import InvalidArgument, register_meta_model\nregister_meta_model(run=run)\n"


def rows(name: str, dtype: str, *row_shape: int) -> TensorSpec:
    return TensorSpec(name, dtype, (-1, *row_shape), 0)


def floats(values: Any) -> dict[str, Any]:
    array = np.asarray(values, np.float32)
    return {"x": ("FP32", list(array.shape), array.tobytes())}


def answer(response: Any) -> list[float]:
    return np.frombuffer(response.raw_output_contents[0], np.float32).tolist()


@pytest.fixture
def add_meta(triton: Any, tmp_path: Path) -> Callable[..., str]:
    """Convert and load a meta model whose ``hooks.py`` is ``code``; x f32[-1, 2] to y f32[-1, 2] unless told."""

    def add(name: str, code: str, calls: list[str], **keys: Any) -> str:
        folder = tmp_path / name
        folder.mkdir()
        tensor = {"dtype": "f32", "shape": "an", "dims": {"a": 2}}
        manifest = {
            "format_version": "2.1",
            "kind": "meta",
            "client_inputs": [{"name": "x", **tensor}],
            "client_outputs": [{"name": "y", **tensor}],
            "meta": {"calls": calls},
            **keys,
        }
        (folder / "manifest.yaml").write_text(yaml.safe_dump(manifest))
        (folder / "hooks.py").write_text(code + REGISTER)
        return triton.add(folder)

    return add


@pytest.fixture(scope="session")
def doubler(triton: Any) -> str:
    """y = 2 x over at most 4 rows; a row that starts with -1 is refused, one with -2 breaks the engine."""
    body = """
        if (inputs[0][:, 0] == -1).any():
            raise InvalidArgument("row 0 starts with -1")
        if (inputs[0][:, 0] == -2).any():
            raise RuntimeError("secret of the engine")
        return [inputs[0] * 2]
"""
    x, y = rows("x", "f32", 2), rows("y", "f32", 2)
    return write_fake(triton, "doubler", body, (x,), (y,), max_batch_size=4, coalesce=True)


def test_random_bytes_of_every_dtype_pass_through_a_callee_exactly(triton: Any, add_meta: Callable[..., str]) -> None:
    def tensors(word: str) -> list[dict[str, Any]]:
        return [
            {"name": f"{word}_{row.token}", "dtype": row.token, "shape": "an", "dims": {"a": 5}} for row in WIRE_DTYPES
        ]

    inputs = tuple(rows(f"in_{row.token}", row.token, 5) for row in WIRE_DTYPES)
    outputs = tuple(rows(f"out_{row.token}", row.token, 5) for row in WIRE_DTYPES)
    write_fake(triton, "same", "return inputs", inputs, outputs, max_batch_size=8, coalesce=True)
    code = "def run(inputs, call):\n    return call('same', inputs)\n"
    name = add_meta("passing", code, ["same"], client_inputs=tensors("in"), client_outputs=tensors("out"))
    rng = np.random.default_rng(0)
    sent = {}
    for row in WIRE_DTYPES:
        data = rng.bytes(3 * 5 * row.size_bytes)
        if row.token == "bool":
            data = bytes(byte & 1 for byte in data)
        sent[f"in_{row.token}"] = (row.kserve, [3, 5], data)
    response = raw_infer(triton.address, name, sent)
    got = {
        o.name: (o.datatype, list(o.shape), d)
        for o, d in zip(response.outputs, response.raw_output_contents, strict=True)
    }
    assert got == {name.replace("in_", "out_"): value for name, value in sent.items()}


def test_scalars_and_wanted_outputs_reach_run_in_their_own_shape(triton: Any, add_meta: Callable[..., str]) -> None:
    scalar, outputs = TensorSpec("x", "f32", ()), (TensorSpec("a", "f32", ()), TensorSpec("b", "f32", (2,)))
    write_fake(triton, "pair", "return [inputs[0] + np.float32(1), np.float32([1, 2]) * inputs[0]]", (scalar,), outputs)
    code = (
        "def run(inputs, call):\n"
        "    (x,) = inputs\n"
        "    (b, a) = call('pair', {'x': x.array}, outputs=['b', 'a'])\n"
        "    (alone,) = call('pair', inputs, ['b'])\n"
        "    assert (x.array.shape, a.array.shape, b.array.shape, alone.name) == ((), (), (2,), 'b')\n"
        "    return {'y': a.array + b.array[1]}\n"
    )
    numbers = {
        key: [{"name": n, "dtype": "f32", "shape": ""}] for key, n in (("client_inputs", "x"), ("client_outputs", "y"))
    }
    name = add_meta("of_scalars", code, ["pair"], **numbers)
    assert answer(raw_infer(triton.address, name, {"x": ("FP32", [1], np.float32(3).tobytes())})) == [10.0]


FAULTS = """
import numpy as np
from nereid_backend.errors import NereidError

kept = []

def run(inputs, call):
    x = inputs[0].array
    kept.append(x)
    what = int(x[0, 1])
    if what == 1:
        raise InvalidArgument("the image is empty")
    if what == 2:
        raise ValueError("secret of the pipeline")
    if what == 3:
        raise SystemExit("bye")
    if what == 4:
        return call("other", inputs)
    if what == 5:
        return call("doubler", {"x": x.astype(np.float64)})
    if what == 6:
        return call("doubler", {"z": x})
    if what == 7:
        return call("doubler", {"x": np.zeros((5, 2), np.float32)})
    if what == 8:
        return call("doubler", {"x": x[:0]})
    if what == 9:
        return None
    if what == 10:
        return {"z": x}
    if what == 11:
        return {"y": np.zeros((1, 3), np.float32)}
    if what == 12:
        return call("doubler", inputs, ["nope"])
    if what == 13:
        try:
            call("doubler", [("x", np.float32([[-1, 0]]))])
        except NereidError as error:
            return {"y": np.float32([[len(str(error)) > 0, 13]])}
    if what == 14:
        return call("absent", inputs)
    if what == 15:
        x[0, 0] = 7
    return call("doubler", inputs)
"""
LOG = "the server's log has the details"


@pytest.fixture
def faulty(triton: Any, doubler: str, add_meta: Callable[..., str], tmp_path: Path) -> str:
    if not (triton.repository / "faulty").exists():
        from converters import repository
        from converters.prepared import Prepared
        from nereid_backend.spec import ModelSpec

        # In the repository, so that it can be declared, but not in the server.
        absent = ModelSpec("absent", "fake", "fake", (rows("x", "f32", 2),), (rows("y", "f32", 2),), ())
        repository.write(Prepared(absent, {}), triton.repository, link=False, force=True)
        add_meta("faulty", FAULTS, [doubler, "absent"], nereid={"concurrency": 1})
    return "faulty"


@pytest.mark.parametrize(
    ("row", "code", "said"),
    [
        ([-1, 0], "INVALID_ARGUMENT", "in 'faulty': row 0 starts with -1"),
        ([-2, 0], "INTERNAL", f"in 'faulty': model 'doubler' failed with RuntimeError; {LOG}"),
        ([0, 1], "INVALID_ARGUMENT", "the image is empty"),
        ([0, 2], "INTERNAL", f"model 'faulty' failed with ValueError; {LOG}"),
        ([0, 3], "INTERNAL", f"model 'faulty' failed with SystemExit; {LOG}"),
        (
            [0, 4],
            "INTERNAL",
            "model 'faulty' called 'other', which is undeclared; meta.calls has ['doubler', 'absent']",
        ),
        (
            [0, 5],
            "INVALID_ARGUMENT",
            "in 'faulty': model 'doubler' input 'x' is float64[1, 2], expected float32[-1, 2]",
        ),
        ([0, 6], "INVALID_ARGUMENT", "in 'faulty': model 'doubler' takes the inputs ['x'], got ['z']"),
        ([0, 7], "INVALID_ARGUMENT", "in 'faulty': model 'doubler' takes 1 to 4 rows in a call, got 5"),
        ([0, 8], "INVALID_ARGUMENT", "in 'faulty': model 'doubler' takes 1 to 4 rows in a call, got 0"),
        (
            [0, 9],
            "INTERNAL",
            "run of model 'faulty' gave None, expected named arrays ('NoneType' object is not iterable)",
        ),
        ([0, 10], "INTERNAL", "run of model 'faulty' gave the outputs ['z'], expected ['y']"),
        ([0, 11], "INTERNAL", "model 'faulty' output 'y' has shape [1, 3], expected [-1, 2]"),
        ([0, 12], "INVALID_ARGUMENT", "in 'faulty': model 'doubler' has no output 'nope', only ['y']"),
        ([0, 14], "UNAVAILABLE", "in 'faulty': model 'absent' is not available at the moment; try later"),
        ([0, 15], "INTERNAL", f"model 'faulty' failed with ValueError; {LOG}"),
    ],
)
def test_what_goes_wrong_fails_its_request_with_the_right_code(
    triton: Any, faulty: str, row: list[float], code: str, said: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        raw_infer(triton.address, faulty, floats([row]))
    assert (caught.value.code().name, caught.value.details()) == (code, said)
    assert answer(raw_infer(triton.address, faulty, floats([[1, 0], [2, 0]]))) == [2, 0, 4, 0]


def test_run_may_handle_the_error_of_a_callee(triton: Any, faulty: str) -> None:
    assert answer(raw_infer(triton.address, faulty, floats([[0, 13]]))) == [1, 13]


def test_a_callee_whose_process_has_died_is_unavailable(triton: Any, add_meta: Callable[..., str]) -> None:
    mortal = write_fake(triton, "mortal", "return inputs", (rows("x", "f32", 2),), (rows("y", "f32", 2),))
    name = add_meta("surviving", "def run(inputs, call):\n    return call('mortal', inputs)\n", [mortal])
    assert answer(raw_infer(triton.address, name, floats([[1, 2]]))) == [1, 2]
    place = str(triton.repository / mortal / "1" / "model.py").encode()
    (stub,) = (path.parent for path in Path("/proc").glob("[0-9]*/cmdline") if place in path.read_bytes())
    os.kill(int(stub.name), signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as caught:
        raw_infer(triton.address, name, floats([[1, 2]]), timeout=30)
    said = "in 'surviving': model 'mortal' is not available at the moment; try later"
    assert (caught.value.code().name, caught.value.details()) == ("UNAVAILABLE", said)
    triton.load(mortal)
    assert answer(raw_infer(triton.address, name, floats([[1, 2]]))) == [1, 2]


def test_arrays_that_run_keeps_stay_as_they_were(triton: Any, doubler: str, add_meta: Callable[..., str]) -> None:
    code = (
        "kept = []\n"
        "def run(inputs, call):\n"
        "    kept.append((inputs[0].array, call('doubler', inputs)[0].array))\n"
        "    first, twice = kept[0]\n"
        "    return {'y': first * 1000 + twice}\n"
    )
    name = add_meta("keeping", code, [doubler], nereid={"concurrency": 1})
    answers = [answer(raw_infer(triton.address, name, floats([[n, n]]))) for n in range(1, 200)]
    assert answers == [[1002, 1002]] * len(answers)


def test_no_callee_is_called_once_the_client_has_gone(
    triton: Any, doubler: str, add_meta: Callable[..., str], tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    code = (
        "def run(inputs, call):\n"
        "    outputs = call('doubler', inputs)\n"
        "    if inputs[0].array[0, 0] == 1:\n"
        f"        with open({str(journal)!r}, 'w') as file:\n"
        "            try:\n"
        "                while True:\n"  # until the news of the deadline is there
        "                    call('doubler', inputs)\n"
        "            except Exception as error:\n"
        "                print(type(error).__name__, error, file=file)\n"
        "                raise\n"
        "    return outputs\n"
    )
    name = add_meta("patient", code, [doubler], nereid={"concurrency": 1})
    with pytest.raises(grpc.RpcError) as caught:
        raw_infer(triton.address, name, floats([[1, 1]]), timeout=0.5)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert answer(raw_infer(triton.address, name, floats([[2, 2]]), timeout=30)) == [4, 4]  # the process is free again
    said = "Cancelled the request to model 'patient' was cancelled or its deadline has passed\n"
    assert journal.read_text() == said


def test_a_call_after_run_has_returned_is_refused(
    triton: Any, doubler: str, add_meta: Callable[..., str], tmp_path: Path
) -> None:
    late = tmp_path / "late"
    code = (
        "import pathlib, threading, time\n"
        f"late = pathlib.Path({str(late)!r})\n"
        "def later(call, inputs):\n"
        "    time.sleep(0.2)\n"
        "    try:\n"
        "        call('doubler', inputs)\n"
        "    except Exception as error:\n"
        "        late.with_name('told').write_text(str(error))\n"
        "        late.with_name('told').rename(late)\n"
        "def run(inputs, call):\n"
        "    threading.Thread(target=later, args=(call, inputs)).start()\n"
        "    return call('doubler', inputs)\n"
    )
    name = add_meta("hasty", code, [doubler])
    raw_infer(triton.address, name, floats([[1, 1]]))
    deadline = time.monotonic() + 20
    while not late.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert late.read_text() == "model 'hasty' made a call after its run had returned"
    assert answer(raw_infer(triton.address, name, floats([[1, 1]]))) == [2, 2]


def test_as_many_requests_run_together_as_the_gate_lets_through(
    triton: Any, add_meta: Callable[..., str], tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    journal.touch()
    code = (
        "import os, time\n"
        "def note(word):\n"
        f"    with open({str(journal)!r}, 'a') as file:\n"
        "        file.write(word)\n"
        "def run(inputs, call):\n"
        "    note('(')\n"
        f"    while open({str(journal)!r}).read().count('(') < 2:\n"  # until another one is inside
        "        time.sleep(0.01)\n"
        "    time.sleep(0.1)\n"
        "    note(')')\n"
        "    return {'y': inputs[0].array}\n"
    )
    name = add_meta("gated", code, [])
    threads = [
        threading.Thread(target=raw_infer, args=(triton.address, name, floats([[n, n]])), kwargs={"timeout": 30})
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    depth, most = 0, 0
    for mark in journal.read_text():
        depth += 1 if mark == "(" else -1
        most = max(most, depth)
    assert (most, depth, len(journal.read_text())) == (2, 0, 12)


# Callees of other kinds.

SCRIPT = """
import array, os, sys
x = array.array("f", sys.stdin.buffer.read())
shape = os.environ["NEREID_INPUT_SHAPE"]
if x[0] < 0:
    sys.exit("negative")
with open(os.environ["NEREID_OUTPUT_PATH"], "wb") as file:
    file.write(f"float32 {'2' if x[0] == 9 else shape}\\n".encode())
    file.write(array.array("f", [2 * v for v in x]).tobytes())
"""


def test_a_meta_model_calls_a_script(triton: Any, add_meta: Callable[..., str], tmp_path: Path) -> None:
    folder = tmp_path / "scripted"
    folder.mkdir()
    (folder / "main.py").write_text(SCRIPT)
    (folder / "requirements.txt").write_text("")
    (folder / "model_inference.textproto").write_text("input_shape: [2]\noutput_shape: [2]\nmax_batch_size: 4\n")
    triton.add(folder)
    code = (
        "def run(inputs, call):\n"
        "    (output,) = call('scripted', {'input': inputs[0].array})\n"
        "    return {'y': output.array}\n"
    )
    name = add_meta("of_scripts", code, ["scripted"])
    assert answer(raw_infer(triton.address, name, floats([[1, 2], [3, 4]]))) == [2, 4, 6, 8]
    # A script may leave the batch dimension out.
    assert answer(raw_infer(triton.address, name, floats([[9, 1]]))) == [18, 2]
    with pytest.raises(grpc.RpcError) as caught:
        raw_infer(triton.address, name, floats([[-1, 2]]))
    said = "in 'of_scripts': model 'scripted': it ended with exit code 1; stderr: negative"
    assert (caught.value.code().name, caught.value.details()) == ("INTERNAL", said)
    with pytest.raises(grpc.RpcError) as caught:
        raw_infer(triton.address, name, floats(np.ones((5, 2))))
    assert caught.value.code().name == "INVALID_ARGUMENT"


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
def test_a_meta_model_calls_models_with_hooks(triton: Any, add_meta: Callable[..., str], tmp_path: Path) -> None:
    batched = (
        "from nereid_backend.hooks import InvalidArgument, register_model\n"
        "def preprocess(inputs):\n"
        "    if (inputs[0].array < 0).any():\n"
        "        raise InvalidArgument('negative')\n"
        "    return {'x': inputs[0].array + 1}\n"
        "register_model(preprocess=preprocess)\n"
    )
    triton.add(write_bundle(tmp_path / "one_process", batched))
    triton.add(write_bundle(tmp_path / "in_stages", RAGGED_HOOKS, **RAGGED_TENSORS))
    code = (
        "import numpy as np\n"
        "def run(inputs, call):\n"
        "    x = np.repeat(inputs[0].array, 2, 1)\n"
        "    (y,) = call('one_process', {'x': x})\n"
        "    best, above = call('in_stages', {'query': x[0], 'keys': x})\n"
        "    return {'y': np.stack([y.array[:, 0], best.array], 1)}\n"
    )
    name = add_meta("of_hooks", code, ["one_process", "in_stages"])
    assert answer(raw_infer(triton.address, name, floats([[1, 2], [3, 4]]))) == [4, 8, 8, 12]
    with pytest.raises(grpc.RpcError) as caught:
        raw_infer(triton.address, name, floats([[-1, 0]]))
    assert (caught.value.code().name, caught.value.details()) == ("INVALID_ARGUMENT", "in 'of_hooks': negative")
