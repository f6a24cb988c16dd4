from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereid_backend.errors import HookError, InvalidArgument, OutputError, UserCodeError
from nereid_backend.executor import Executor
from nereid_backend.pipeline import Pipeline
from nereid_backend.spec import BuiltinSpec, Hooks, ModelSpec, Program, TensorSpec

HEAD = "import time\nimport numpy as np\nfrom nereid_backend.hooks import InvalidArgument, NamedArray, register_model\n"


def rows(name: str, *row_shape: int, dtype: str = "f32") -> TensorSpec:
    return TensorSpec(name, dtype, (-1, *row_shape), 0)


class Doubling:
    """An engine that remembers its runs."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def run(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        self.sizes.append(len(inputs[0]))
        return [inputs[0] * 2]

    def close(self) -> None:
        pass


@pytest.fixture
def pipeline(tmp_path: Path) -> Any:
    """A pipeline of y = 2 x around the text of a hooks.py, and its engine; a run is taken to last ``run_s``."""
    made: list[Pipeline] = []

    def make(code: str | None = None, run_s: float = 1.0, **options: Any) -> tuple[Pipeline, Doubling]:
        sizes = options.pop("sizes", (1, 8))
        hooks = {"client_inputs": (rows("x", 2),), "client_outputs": (rows("y", 2),), **options.pop("hooks", {})}
        spec = ModelSpec(
            name="m",
            engine="fake",
            platform="fake",
            inputs=(rows("x", 2),),
            outputs=(rows("y", 2),),
            programs=tuple(Program("f", size) for size in sizes),
            hooks=Hooks(code=() if code is None else ("preprocess", "postprocess"), **hooks),
            **{"max_batch_size": 8, "coalesce": True, **options},
        )
        if code is not None:
            (tmp_path / "hooks.py").write_text(HEAD + code)
        engine = Doubling()
        executor = Executor(spec, engine)  # type: ignore[arg-type]
        executor.run_s = run_s
        made.append(Pipeline(spec, executor, tmp_path))
        return made[-1], engine

    yield make
    for each in made:
        each.close()


def x(value: float, count: int = 1) -> list[np.ndarray]:
    return [np.full((count, 2), value, np.float32)]


def told(results: list[Any]) -> list[Any]:
    return [(type(r), str(r)) if isinstance(r, Exception) else r[0].tolist() for r in results]


AROUND = """
def preprocess(inputs):
    ((name, x),) = inputs
    if (x < 0).any():
        raise InvalidArgument("negative")
    return {"x": x + 1, "unused": x}

def postprocess(outputs):
    return [("y", outputs[0].array * 10)]

register_model("another name", preprocess=preprocess, postprocess=postprocess)
"""


def test_each_request_is_prepared_run_with_others_and_finished_by_itself(pipeline: Any) -> None:
    around, engine = pipeline(AROUND)
    got = told(around.run([x(1), x(2, 3), x(-1), x(3)]))
    assert got == [[[40, 40]], [[60, 60]] * 3, (InvalidArgument, "negative"), [[80, 80]]]
    assert engine.sizes == [8]


def test_a_side_without_a_hook_passes_on_what_it_gets(pipeline: Any) -> None:
    bare, _ = pipeline("register_model()")
    assert told(bare.run([x(1), x(2)])) == [[[2, 2]], [[4, 4]]]


def test_requests_are_prepared_and_finished_at_the_same_time(pipeline: Any) -> None:
    code = "slow = lambda arrays: (time.sleep(0.1), [('x' if a == 'x' else 'y', b) for a, b in arrays])[1]\n"
    slow, engine = pipeline(code + "register_model(preprocess=slow, postprocess=slow)")
    start = time.monotonic()
    assert told(slow.run([x(n) for n in range(8)])) == [[[2 * n] * 2] for n in range(8)]
    assert time.monotonic() - start < 8 * 0.1
    assert engine.sizes == [8]


SOMETIMES_SLOW = """
def preprocess(inputs):
    time.sleep(0.4 if (inputs[0].array == 9).any() else 0.001)
    return inputs

register_model(preprocess=preprocess)
"""


def test_ready_requests_run_while_a_slow_one_is_still_prepared(pipeline: Any) -> None:
    eager, engine = pipeline(SOMETIMES_SLOW, run_s=0.02)
    assert told(eager.run([x(9), x(1), x(2)])) == [[[18, 18]], [[2, 2]], [[4, 4]]]
    assert engine.sizes == [8, 1]


def test_a_run_waits_for_others_when_it_takes_longer_than_they_do(pipeline: Any) -> None:
    patient, engine = pipeline(SOMETIMES_SLOW, run_s=2.0)
    assert told(patient.run([x(9), x(1), x(2)])) == [[[18, 18]], [[2, 2]], [[4, 4]]]
    assert engine.sizes == [8]


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (
            "raise KeyError('/srv/secret')",
            HookError,
            "preprocess of model 'm' failed with KeyError; the server's log has",
        ),
        ("raise SystemExit(1)", HookError, "failed with SystemExit"),
        ("yield from [1 / 0]", HookError, "failed with ZeroDivisionError"),
        ("raise MemoryError", MemoryError, "^$"),
        ("inputs[0].array[:] = 0; return inputs", HookError, "failed with ValueError"),
        ("return None", OutputError, "preprocess of model 'm' gave None, expected named arrays"),
        ("return []", OutputError, r"preprocess of model 'm' gave \[\], without \['x'\]"),
        ("return [('z', inputs[0].array)]", OutputError, r"gave \['z'\], without \['x'\]"),
        ("return inputs + inputs", OutputError, r"gave a name twice"),
        ("return {1: inputs[0].array}", OutputError, "names that are no text"),
        ("return {'x': inputs[0].array.astype(float)}", OutputError, "preprocess result 'x' has dtype float64"),
        ("return {'x': inputs[0].array[:, :1]}", OutputError, r"preprocess result 'x' has shape \[1, 1\]"),
        ("return {'x': 'text'}", OutputError, "preprocess result 'x' has dtype"),
    ],
)
def test_what_goes_wrong_in_a_hook_fails_its_own_request_only(
    pipeline: Any, body: str, error: type[Exception], words: str
) -> None:
    code = f"def bad(inputs):\n    {body}\n"
    code += "def preprocess(inputs):\n    return bad(inputs) if inputs[0].array[0, 0] == 9 else inputs\n"
    failing, _ = pipeline(code + "register_model(preprocess=preprocess)")
    bad, good = failing.run([x(9), x(1)])
    assert told([good]) == [[[2, 2]]]
    with pytest.raises(error, match=words) as caught:
        raise bad
    assert "secret" not in str(caught.value)
    assert told(failing.run([x(3)])) == [[[6, 6]]]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return {'y': outputs[0].array[:1]}", r"postprocess result 'y' has shape \[1, 2\], expected \[2, 2\]"),
        ("return {'z': outputs[0].array}", r"postprocess of model 'm' gave \['z'\], without \['y'\]"),
    ],
)
def test_results_are_checked_against_the_client_spec(pipeline: Any, body: str, words: str) -> None:
    wrong, _ = pipeline(f"def post(outputs):\n    {body}\nregister_model(postprocess=post)")
    (result,) = wrong.run([x(1, 2)])
    with pytest.raises(OutputError, match=words):
        raise result


def test_a_hook_may_change_the_number_of_rows_on_the_way(pipeline: Any) -> None:
    code = "pre = lambda inputs: {'x': np.repeat(inputs[0].array, 3, 0)}\n"
    code += "post = lambda outputs: {'y': outputs[0].array.reshape(-1, 3, 2).sum(1)}\n"
    crops, engine = pipeline(code + "register_model(preprocess=pre, postprocess=post)")
    assert told(crops.run([x(1), x(2, 2)])) == [[[6, 6]], [[12, 12]] * 2]
    assert engine.sizes == [8, 8]  # 3 and 6 rows do not fit the largest program together


def test_requests_of_a_model_without_rows_are_answered_as_the_spec_says(pipeline: Any) -> None:
    hooks = {"client_outputs": (TensorSpec("total", "f32", ()),)}
    code = "register_model(postprocess=lambda outputs: {'total': np.float32(outputs[0].array.sum())})"
    total, _ = pipeline(code, max_batch_size=0, hooks=hooks)
    assert told(total.run([x(1, 3)])) == [12.0]


def test_built_ins_lie_between_the_python_file_and_the_executable(pipeline: Any) -> None:
    softmax = BuiltinSpec("softmax", {"input": "y", "output": "p", "axis": 1})
    hooks = {"client_outputs": (rows("p", 2),), "postprocess": (softmax,)}
    code = "register_model(postprocess=lambda outputs: {'p': dict(outputs)['p'] * 100})"
    percent, _ = pipeline(code, hooks=hooks)
    assert told(percent.run([x(1)])) == [[[50, 50]]]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("", "must call register_model exactly once .* registered nothing"),
        ("register_model()\nregister_model()", "registered ModelHooks and ModelHooks"),
        ("register_model(preprocess=3)", "register_model needs functions, got int"),
        (
            "from nereid_backend.hooks import register_meta_model\nregister_meta_model(run=print)",
            "registered MetaModel",
        ),
    ],
)
def test_a_file_that_registers_something_else_is_refused(pipeline: Any, code: str, words: str) -> None:
    with pytest.raises(UserCodeError, match=words):
        pipeline(code)


def test_hooks_of_two_models_share_nothing(pipeline: Callable[..., Any]) -> None:
    code = "seen = []\ndef pre(inputs):\n    seen.append(1)\n    return {'x': inputs[0].array * len(seen)}\n"
    first, second = (pipeline(code + "register_model(preprocess=pre)")[0] for _ in range(2))
    assert [told(model.run([x(1)])) for model in (first, first, second)] == [[[[2, 2]]], [[[4, 4]]], [[[2, 2]]]]


def test_a_closed_pipeline_leaves_no_threads(pipeline: Any) -> None:
    slow, _ = pipeline("register_model(preprocess=lambda inputs: (time.sleep(0.01), inputs)[1])")
    slow.run([x(1), x(2)])
    assert any(thread.name.startswith("nereid-hook") for thread in threading.enumerate())
    slow.close()
    assert not any(thread.name.startswith("nereid-hook") for thread in threading.enumerate())
