from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nereid_backend import dtypes
from nereid_backend.errors import EngineError, InvalidArgument, OutputError, ResourceExhausted
from nereid_backend.spec import ModelSpec, TensorSpec

BATCHED = {"max_batch_size": 8, "coalesce": True}


def answers(model: Any, *requests: Any) -> list[Any]:
    return [response.answer for response in model.execute(list(requests))]


def double(batch: list[np.ndarray]) -> list[np.ndarray]:
    return [batch[0] * 2]


@pytest.fixture
def doubler(serve: Callable[..., Any], rows: Any) -> Any:
    return serve(double, (rows("x", "f32", 2),), (rows("y", "f32", 2),), sizes=(1, 4, 8), **BATCHED)


def test_requests_of_one_call_share_one_padded_run_and_get_their_own_rows(doubler: Any, request_of: Any) -> None:
    requests = [request_of(x=np.full((n, 2), n, np.float32)) for n in (1, 3, 2)]
    assert answers(doubler, *requests) == [{"y": [[2 * n] * 2] * n} for n in (1, 3, 2)]
    rows_in_order = [[1, 1]] + [[3, 3]] * 3 + [[2, 2]] * 2
    assert doubler.runs == [[[*rows_in_order, [0, 0], [0, 0]]]]


def test_a_smaller_batch_after_a_larger_one_is_padded_with_zeros(doubler: Any, request_of: Any) -> None:
    answers(doubler, *[request_of(x=np.full((3, 2), 9, np.float32))] * 2)
    assert answers(doubler, request_of(x=np.ones((3, 2), np.float32))) == [{"y": [[2, 2]] * 3}]
    assert doubler.runs[-1] == [[[1, 1], [1, 1], [1, 1], [0, 0]]]


def test_requests_that_do_not_fit_the_largest_program_together_run_one_by_one(doubler: Any, request_of: Any) -> None:
    requests = [request_of(x=np.full((6, 2), n, np.float32)) for n in (1, 2)]
    assert answers(doubler, *requests) == [{"y": [[2 * n] * 2] * 6} for n in (1, 2)]
    assert [len(run[0]) for run in doubler.runs] == [8, 8]


def test_a_request_beyond_the_largest_program_is_refused_alone(doubler: Any, request_of: Any) -> None:
    got = answers(doubler, request_of(x=np.ones((9, 2), np.float32)), request_of(x=np.ones((1, 2), np.float32)))
    text = "9 rows are more than the largest compiled batch size 8; send fewer rows"
    assert got == [("INVALID_ARG", text), {"y": [[2, 2]]}]


def test_an_empty_call_gets_an_empty_list(doubler: Any) -> None:
    assert doubler.execute([]) == []
    assert doubler.runs == []


def test_a_request_of_no_rows_gets_no_rows(serve: Any, rows: Any, request_of: Any) -> None:
    model = serve(double, (rows("x", "f32", 2),), (rows("y", "f32", 2),), **BATCHED)
    zero, one = np.zeros((0, 2), np.float32), np.ones((1, 2), np.float32)
    assert answers(model, request_of(x=zero), request_of(x=one)) == [{"y": []}, {"y": [[2, 2]]}]
    assert answers(model, request_of(x=zero)) == [{"y": []}]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(calls=st.lists(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=5), max_size=4), data=st.data())
def test_every_request_gets_exactly_its_own_answer(
    serve: Any, rows: Any, request_of: Any, calls: Any, data: Any
) -> None:
    def run(batch: list[np.ndarray]) -> list[np.ndarray]:
        if (batch[0] < 0).any():
            raise RuntimeError("poison")
        return [batch[0], batch[0][:, 0].astype(np.int32) * 3]

    model = serve(
        run, (rows("x", "f32", 2),), (rows("same", "f32", 2), rows("triple", "i32")), sizes=(1, 4, 8), **BATCHED
    )
    number = 0
    for call in calls:
        requests, expected = [], []
        for count, poisoned in call:
            number += 1
            value = -1 if poisoned and count else number
            requests.append(request_of(x=np.full((count, 2), value, np.float32)))
            if count > 8:
                expected.append("INVALID_ARG")
            elif value < 0:
                expected.append("INTERNAL")
            else:
                expected.append({"same": [[value] * 2] * count, "triple": [[value * 3]] * count})
        got = [a if isinstance(a, dict) else a[0] for a in answers(model, *requests)]
        assert got == expected


def test_a_poisoned_row_fails_its_own_request_only(serve: Any, rows: Any, request_of: Any) -> None:
    def run(batch: list[np.ndarray]) -> list[np.ndarray]:
        if (batch[0] < 0).any():
            raise InvalidArgument("index -1 is out of range")
        return [batch[0] * 10]

    model = serve(run, (rows("x", "i32", 1),), (rows("y", "i32", 1),), **BATCHED)
    requests = [request_of(x=np.array([[value]], np.int32)) for value in (1, -1, 3)]
    assert answers(model, *requests) == [{"y": [[10]]}, ("INVALID_ARG", "index -1 is out of range"), {"y": [[30]]}]
    assert [len(run[0]) for run in model.runs] == [3, 1, 1, 1]


class Surprise(Exception):
    def __str__(self) -> str:
        return "Traceback /srv/secret/model.py line 3"


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (InvalidArgument("token 9 is unknown"), ("INVALID_ARG", "token 9 is unknown")),
        (EngineError("the program failed: bad"), ("INTERNAL", "the program failed: bad")),
        (OutputError("wrong shape"), ("INTERNAL", "wrong shape")),
        (ResourceExhausted("no slot"), ("INTERNAL", "no slot")),
        (Surprise(), ("INTERNAL", "model 'm' failed with Surprise; the server's log has the details")),
        (
            ZeroDivisionError("/srv"),
            ("INTERNAL", "model 'm' failed with ZeroDivisionError; the server's log has the details"),
        ),
        (MemoryError(), ("UNAVAILABLE", "model 'm' ran out of memory; send less at once or try later")),
        (StopIteration(), ("INTERNAL", "model 'm' failed with StopIteration; the server's log has the details")),
    ],
)
def test_whatever_an_engine_raises_every_request_gets_one_short_answer(
    serve: Any, rows: Any, request_of: Any, log: list[str], error: Exception, answer: Any
) -> None:
    def run(batch: list[np.ndarray]) -> Any:
        if (batch[0] != 0).any():
            raise error
        return [batch[0]]

    for options in (BATCHED, {**BATCHED, "coalesce": False}, {"max_batch_size": 0}):
        model = serve(run, (rows("x", "f32", 2),), (rows("y", "f32", 2),), **options)
        assert answers(model, *[request_of(x=np.ones((1, 2), np.float32)) for _ in range(3)]) == [answer] * 3
    if not isinstance(error, InvalidArgument):  # the whole story is in the log
        assert any("Traceback" in line and type(error).__name__ in line for line in log)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (lambda x: [x.astype(np.float64)], "model 'm' output 'y' has dtype float64, expected float32"),
        (lambda x: [x[:, :1]], "model 'm' output 'y' has shape [1, 1], expected [1, 2]"),
        (lambda x: [np.concatenate([x, x])], "model 'm' output 'y' has shape [2, 2], expected [1, 2]"),
        (lambda x: [x[0]], "model 'm' output 'y' has shape [2], expected [1, 2]"),
        (lambda x: [x, x], "model 'm' returned 2 outputs, expected 1"),
        (lambda x: [], "model 'm' returned 0 outputs, expected 1"),
        (lambda x: None, "model 'm' failed with TypeError; the server's log has the details"),
        (lambda x: [x.tolist()], "model 'm' failed with AttributeError; the server's log has the details"),
    ],
)
def test_a_wrong_result_is_internal_with_expected_and_got(
    serve: Any, rows: Any, request_of: Any, result: Callable[[np.ndarray], Any], text: str
) -> None:
    model = serve(lambda batch: result(batch[0]), (rows("x", "f32", 2),), (rows("y", "f32", 2),), max_batch_size=4)
    assert answers(model, request_of(x=np.ones((1, 2), np.float32))) == [("INTERNAL", text)]


def test_a_folder_may_answer_one_row_without_the_batch_axis(serve: Any, rows: Any, request_of: Any) -> None:
    model = serve(
        lambda b: [b[0].squeeze(0)] if len(b[0]) == 1 else [b[0]],
        (rows("x", "f32", 2),),
        (rows("y", "f32", 2),),
        batch_may_be_omitted=True,
        **BATCHED,
    )
    one, two = (request_of(x=np.ones((n, 2), np.float32)) for n in (1, 2))
    assert answers(model, one) + answers(model, two) == [{"y": [[1, 1]]}, {"y": [[1, 1]] * 2}]


def test_rows_that_disagree_between_inputs_are_the_callers_fault(serve: Any, rows: Any, request_of: Any) -> None:
    model = serve(lambda b: [b[0] + b[1]], (rows("a", "f32"), rows("b", "f32")), (rows("y", "f32"),), **BATCHED)
    good = request_of(a=np.ones((2, 1), np.float32), b=np.ones((2, 1), np.float32))
    bad = request_of(a=np.ones((2, 1), np.float32), b=np.ones((3, 1), np.float32))
    refused = ("INVALID_ARG", "model 'm' input 'b' has 3 rows, other inputs have 2")
    assert answers(model, good, bad, good) == [{"y": [[2], [2]]}, refused, {"y": [[2], [2]]}]


def test_a_size_without_a_program_is_refused_where_nothing_can_be_padded(serve: Any, request_of: Any) -> None:
    x, y = TensorSpec("x", "f32", (2, -1), 1), TensorSpec("y", "f32", (2, -1), 1)
    model = serve(double, (x,), (y,), sizes=(1, 4), name="sideways")
    bad, good = request_of(x=np.ones((2, 3), np.float32)), request_of(x=np.ones((2, 4), np.float32))
    text = "model 'sideways' has no program for 3 rows and its batches cannot be padded; send one of [1, 4]"
    assert answers(model, bad, good) == [("INVALID_ARG", text), {"y": [[2] * 4] * 2}]


def test_requests_that_must_not_share_a_run_run_one_by_one(serve: Any, rows: Any, request_of: Any) -> None:
    model = serve(lambda b: [b[0] - b[0].mean(0)], (rows("x", "f32"),), (rows("y", "f32"),), max_batch_size=8)
    requests = [request_of(x=np.array([[v], [v + 2]], np.float32)) for v in (0, 10)]
    assert answers(model, *requests) == [{"y": [[-1], [1]]}] * 2
    assert model.runs == [[[0, 2]], [[10, 12]]]


def test_a_scalar_travels_as_a_dimension_of_one(serve: Any, rows: Any, request_of: Any) -> None:
    scalar = TensorSpec("x", "f32", ())
    model = serve(lambda b: [b[0] + b[0]], (scalar,), (TensorSpec("y", "f32", ()),))
    assert answers(model, request_of(x=np.array([21], np.float32))) == [{"y": [42]}]
    assert model.runs == [[21]]
    per_row = serve(double, (rows("x", "i32"),), (rows("y", "i32"),), **BATCHED)
    assert answers(per_row, request_of(x=np.array([[1], [2]], np.int32))) == [{"y": [[2], [4]]}]
    assert per_row.runs == [[[1, 2]]]


def test_an_identity_model_gives_every_call_its_own_memory(serve: Any, rows: Any, request_of: Any) -> None:
    """The engine returns its input, which is a buffer that the next run overwrites."""
    model = serve(
        lambda b: b, (rows("x", "f32", 2),), (rows("y", "f32", 2),), sizes=(4,), max_batch_size=4, coalesce=True
    )
    responses = model.execute([request_of(x=np.full((2, 2), n, np.float32)) for n in (1, 2, 3)])
    assert [r.answer for r in responses] == [{"y": [[n, n]] * 2} for n in (1, 2, 3)]


def test_the_engine_never_sees_the_same_memory_as_an_earlier_answer(serve: Any, rows: Any, request_of: Any) -> None:
    kept: list[np.ndarray] = []

    def run(batch: list[np.ndarray]) -> list[np.ndarray]:
        kept.append(batch[0])
        return [batch[0] + 0]

    model = serve(run, (rows("x", "f32", 1),), (rows("y", "f32", 1),), sizes=(2,), max_batch_size=2, coalesce=True)
    got = answers(model, *[request_of(x=np.array([[n]], np.float32)) for n in (1, 2)])
    assert (got, len(kept[-1])) == ([{"y": [[1]]}, {"y": [[2]]}], 2)


@pytest.mark.parametrize("row", [r for r in dtypes.TABLE if r.kserve], ids=lambda r: r.token)
def test_every_wire_dtype_passes_the_whole_path(serve: Any, rows: Any, request_of: Any, row: dtypes.DType) -> None:
    model = serve(
        lambda b: [b[0][:, ::-1]], (rows("x", row.token, 3),), (rows("y", row.token, 3),), sizes=(4,), **BATCHED
    )
    sent = [np.array([[0, 1, 1]] * n).astype(row.numpy) for n in (1, 2)]
    got = [r.tensors[0]._array for r in model.execute([request_of(x=array) for array in sent])]
    assert [(a.dtype, a.tobytes()) for a in got] == [(row.numpy, s[:, ::-1].tobytes()) for s in sent]


def test_an_input_that_triton_does_not_hand_over_fails_its_own_request_only(doubler: Any, request_of: Any) -> None:
    got = answers(doubler, request_of(), request_of(x=np.ones((1, 2), np.float32)))
    assert [got[0][0], got[1]] == ["INTERNAL", {"y": [[2, 2]]}]


def test_an_output_that_cannot_be_handed_over_fails_its_own_request_only(
    doubler: Any, request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (write,), written = doubler._writers, []

    def broken(array: np.ndarray) -> Any:
        written.append(len(array))
        if len(array) == 2:
            raise RuntimeError("Failed to increase the shared memory pool size for key '/srv/triton_shm'")
        return write(array)

    monkeypatch.setattr(doubler, "_writers", [broken])
    got = answers(doubler, *[request_of(x=np.ones((n, 2), np.float32)) for n in (1, 2, 3)])
    text = "model 'm' failed with RuntimeError; the server's log has the details"
    assert got == [{"y": [[2, 2]]}, ("INTERNAL", text), {"y": [[2, 2]] * 3}]


# Cancelled requests.


def test_a_cancelled_request_is_dropped_before_a_slow_run(serve: Any, rows: Any, request_of: Any) -> None:
    def run(batch: list[np.ndarray]) -> list[np.ndarray]:
        time.sleep(0.01)
        return [batch[0]]

    model = serve(run, (rows("x", "i32", 1),), (rows("y", "i32", 1),), **BATCHED)
    requests = [request_of(x=np.array([[n]], np.int32), cancelled=n == 2) for n in (1, 2, 3)]
    got = answers(model, *requests)
    assert got == [{"y": [[1]]}, ("CANCELLED", "the request was cancelled"), {"y": [[3]]}]
    assert model.runs == [[[[1], [3]]]]
    assert [r.asked for r in requests] == [1, 1, 1]


def test_a_call_of_cancelled_requests_only_runs_nothing(serve: Any, rows: Any, request_of: Any) -> None:
    def run(batch: list[np.ndarray]) -> list[np.ndarray]:
        time.sleep(0.01)
        return [batch[0]]

    model = serve(run, (rows("x", "i32", 1),), (rows("y", "i32", 1),), **BATCHED)
    got = answers(model, *[request_of(x=np.array([[1]], np.int32), cancelled=True)] * 2)
    assert (got, model.runs) == ([("CANCELLED", "the request was cancelled")] * 2, [])


def test_nobody_is_asked_where_a_run_costs_less_than_the_question(doubler: Any, request_of: Any) -> None:
    doubler._executor.run_s = 0.0  # a busy machine may have made the warm-up slow
    request = request_of(x=np.ones((1, 2), np.float32), cancelled=True)
    assert (answers(doubler, request), request.asked) == ([{"y": [[2, 2]]}], 0)


# Start and end.


def test_every_compiled_size_runs_before_the_first_request(serve: Any, rows: Any) -> None:
    seen: list[tuple[int, ...]] = []

    def run(batch: list[np.ndarray]) -> list[np.ndarray]:
        seen.append(batch[0].shape)
        return [batch[0]]

    serve(run, (rows("x", "f32", 2),), (rows("y", "f32", 2),), sizes=(4, 1, 8), **BATCHED)
    assert sorted(set(seen)) == [(1, 2), (4, 2), (8, 2)]


def test_a_model_of_any_size_may_refuse_the_zeros_of_the_warm_up(
    serve: Any, rows: Any, request_of: Any, log: Any
) -> None:
    def run(batch: list[np.ndarray]) -> list[np.ndarray]:
        if not batch[0].any():
            raise EngineError("log of zero")
        return [batch[0]]

    model = serve(run, (rows("x", "f32", 2),), (rows("y", "f32", 2),), **BATCHED)
    assert [line for line in log if "warm-up" in line] == ["model 'm': the warm-up run on zeros failed: log of zero"]
    assert answers(model, request_of(x=np.ones((1, 2), np.float32))) == [{"y": [[1, 1]]}]


def test_a_compiled_program_that_fails_its_warm_up_does_not_start(serve: Any, rows: Any, pb_utils: Any) -> None:
    def run(batch: list[np.ndarray]) -> list[np.ndarray]:
        raise EngineError("the StableHLO program failed: no memory")

    with pytest.raises(pb_utils.TritonModelException, match="EngineError: the StableHLO program failed: no memory"):
        serve(run, (rows("x", "f32", 2),), (rows("y", "f32", 2),), sizes=(1,), **BATCHED)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "SpecError: cannot read nereid.json"),
        ("{}", "SpecError: nereid.json has format_version None"),
        (ModelSpec("m", "xgboost", "p", (), (), ()).to_json(), "BundleError: unknown engine 'xgboost'"),
    ],
)
def test_a_model_that_cannot_be_opened_says_why_in_one_line(
    pb_utils: Any, tmp_path: Any, content: Any, words: str
) -> None:
    import importlib

    (tmp_path / "1").mkdir()
    if content is not None:
        (tmp_path / "1" / "nereid.json").write_text(content)
    model = importlib.import_module("nereid_backend.model").TritonPythonModel()
    with pytest.raises(pb_utils.TritonModelException) as caught:
        model.initialize({"model_repository": str(tmp_path), "model_version": "1"})
    text = str(caught.value)
    assert (text.startswith(words), "\n" in text, str(tmp_path) in text) == (True, False, False)


def test_the_engine_is_closed_with_the_model(doubler: Any) -> None:
    doubler.finalize()
    assert doubler.runs == [["closed"]]
