from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereid_backend import dtypes
from nereid_backend.engines.torchscript import TorchScriptEngine
from nereid_backend.errors import DeviceMissing, EngineError, SignatureError
from nereid_backend.spec import ModelSpec, Program

torch = pytest.importorskip("torch", reason="the torch extra is not installed in this interpreter")

SPEC = ModelSpec("m", "torchscript", "p", (), (), (Program("model.pt"),))


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., TorchScriptEngine]:
    """An engine over a module whose TorchScript source is given."""

    def loaded(source: str) -> TorchScriptEngine:
        # torch.jit.script reads the source back from a file
        file = tmp_path / "scripted.py"
        body = source.replace("\n", "\n    ")
        file.write_text(f"import torch\n\n\nclass M(torch.nn.Module):\n    {body}\n")
        found = importlib.util.spec_from_file_location(f"scripted_{tmp_path.name}", file)
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.save(torch.jit.script(module.M()), str(tmp_path / "model.pt"))
        return TorchScriptEngine.load(SPEC, tmp_path)

    return loaded


def test_a_tensor_comes_back_as_one_output(load: Any) -> None:
    (got,) = load("def forward(self, x): return x + 1").run([np.array([[1, 2]], np.float32)])
    assert (got.dtype, got.tolist()) == (np.float32, [[2, 3]])


@pytest.mark.parametrize(
    "source",
    [
        "def forward(self, a, b): return a - b, a * b",
        "def forward(self, a, b): return [a - b, a * b]",
    ],
)
def test_tuples_and_lists_of_tensors_come_back_in_order(load: Any, source: str) -> None:
    a, b = np.array([5], np.float32), np.array([2], np.float32)
    assert [o.tolist() for o in load(source).run([a, b])] == [[3], [10]]


@pytest.mark.parametrize("token", [row.token for row in dtypes.TABLE if row.kserve])
def test_every_wire_dtype_passes_exactly(load: Any, token: str) -> None:
    array = np.array([[0, 1], [1, 0]]).astype(dtypes.by_token(token).numpy)
    (got,) = load("def forward(self, x): return x.t()").run([array])
    assert (got.dtype, got.flags.c_contiguous, got.tobytes()) == (array.dtype, True, array.T.tobytes())


def test_64_bit_integers_and_bf16_are_computed_exactly(load: Any) -> None:
    engine = load("def forward(self, x): return x * 2")
    assert engine.run([np.array([2**60])])[0].tolist() == [2**61]
    bf16 = dtypes.by_token("bf16").numpy
    (got,) = engine.run([np.array([1.5, -3], bf16)])
    assert (got.dtype, got.astype(np.float32).tolist()) == (bf16, [3, -6])


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 0)])
def test_scalars_and_empty_arrays_pass(load: Any, shape: tuple[int, ...]) -> None:
    (got,) = load("def forward(self, x): return x + 1").run([np.zeros(shape, np.float32)])
    assert (got.shape, got.dtype) == (shape, np.float32)


def test_a_read_only_input_is_copied_before_the_module_may_write_to_it(load: Any) -> None:
    array = np.zeros(3, np.float32)
    array.flags.writeable = False
    (got,) = load("def forward(self, x): return x.add_(1)").run([array])
    assert (got.tolist(), array.tolist()) == ([1, 1, 1], [0, 0, 0])


def test_a_parameter_given_back_is_no_trouble(tmp_path: Path) -> None:
    class Weighted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(2))

        def forward(self, x: Any) -> Any:
            return self.w, x

    torch.jit.save(torch.jit.trace(Weighted(), (torch.zeros(2),)), str(tmp_path / "model.pt"))
    got = TorchScriptEngine.load(SPEC, tmp_path).run([np.zeros(2, np.float32)])
    assert [o.tolist() for o in got] == [[1, 1], [0, 0]]


def test_the_module_runs_in_evaluation_mode(load: Any) -> None:
    engine = load("def forward(self, x): return torch.dropout(x, 0.9, self.training)")
    assert engine.run([np.ones(100, np.float32)])[0].tolist() == [1] * 100


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("def forward(self, x): return 3", "int"),
        ("def forward(self, x): return {'y': x}", "dict"),
        ("def forward(self, x): return x, 3", "tuple"),
        ("def forward(self, x): return None", "NoneType"),
    ],
)
def test_a_result_that_is_not_tensors_is_an_engine_error(load: Any, source: str, kind: str) -> None:
    with pytest.raises(EngineError, match=f"returned {kind}, expected tensors"):
        load(source).run([np.zeros(1, np.float32)])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def forward(self, x): return x.reshape(7)", "shape '\\[7\\]' is invalid"),
        ("def forward(self, x): return x[9]", "index 9 out of range"),
        ("def forward(self, x):\n    raise ValueError('negative energy')\n    return x", "negative energy"),
        ("def forward(self, x):\n    assert x.dim() == 9, 'nine axes'\n    return x", "nine axes"),
        ("def forward(self, x, y): return x + y", "missing value for argument 'y'"),
        ("def forward(self, x): return torch.zeros(10).index_select(0, x.long() + 99)", "index out of range"),
    ],
)
def test_a_failing_module_is_an_engine_error_with_the_cause_in_one_line(load: Any, source: str, words: str) -> None:
    engine = load(source)
    with pytest.raises(EngineError, match=f"the TorchScript module failed: .*{words}") as caught:
        engine.run([np.zeros(2, np.float32)])
    assert "\n" not in str(caught.value)
    assert ".py" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04garbage", bytes(range(256)) * 40])
def test_a_file_that_is_no_torchscript_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(SignatureError, match=r"^model\.pt: is not a TorchScript file that torch .* can load") as caught:
        TorchScriptEngine.load(SPEC, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_of_weights_only_is_refused_with_what_to_do(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, str(tmp_path / "model.pt"))
    with pytest.raises(SignatureError, match=r"save it with torch\.jit\.save"):
        TorchScriptEngine.load(SPEC, tmp_path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SignatureError, match=r"^model\.pt: is not a TorchScript file"):
        TorchScriptEngine.load(SPEC, tmp_path)


def test_a_device_that_is_not_there_is_refused_with_how_many_there_are(tmp_path: Path) -> None:
    if torch.cuda.device_count():
        pytest.skip("this machine has a GPU")
    words = r"device 'cuda:3' is not there: torch sees 0 cuda device\(s\)"
    with pytest.raises(DeviceMissing, match=words):
        TorchScriptEngine.load(replace(SPEC, device="cuda:3"), tmp_path)
    with pytest.raises(DeviceMissing, match=words):
        TorchScriptEngine.check_device("cuda:3")


def test_the_number_of_threads_is_the_specs(load: Any, tmp_path: Path) -> None:
    load("def forward(self, x): return x")
    before = torch.get_num_threads()
    try:
        TorchScriptEngine.load(replace(SPEC, threads=1), tmp_path)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
