"""Which program runs, with whose rows, and who gets which result. Runs are seen by an engine made here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereid_backend.errors import EngineError, InvalidArgument
from nereid_backend.executor import Executor
from nereid_backend.spec import ModelSpec, Program, TensorSpec

Run = Callable[[list[np.ndarray]], list[np.ndarray]]


class Recorder:
    """An engine that keeps a copy of every batch it is given."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.batches: list[list[np.ndarray]] = []

    def run(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        self.batches.append([array.copy() for array in inputs])
        return self._run(inputs)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [batch[0].shape for batch in self.batches]


def opened(
    run: Run, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], programs: Any, **options: Any
) -> tuple[Executor, Recorder]:
    engine = Recorder(run)
    options = {"coalesce": True, "max_batch_size": 8, **options}
    spec = ModelSpec("m", "e", "p", tuple(inputs), tuple(outputs), tuple(programs), **options)
    return Executor(spec, engine), engine


# Images of (height, width) 2 x 4 with programs for 1 and 4 rows, and 5 x 3 with programs for 2.
IMAGE, SUM = TensorSpec("image", "f32", (-1, -1, -1), 0), TensorSpec("sum", "f32", (-1,), 0)
POOL = [Program("a", 1, (2, 4)), Program("b", 4, (2, 4)), Program("c", 2, (5, 3))]


def summed(batch: list[np.ndarray]) -> list[np.ndarray]:
    return [batch[0].sum((1, 2))]


def image(rows: int, height: int, width: int, value: int = 1) -> list[np.ndarray]:
    return [np.full((rows, height, width), value, np.float32)]


def told(results: Sequence[Any]) -> list[Any]:
    return [str(r) if isinstance(r, Exception) else [array.tolist() for array in r] for r in results]


@pytest.fixture
def pool() -> tuple[Executor, Recorder]:
    return opened(summed, [IMAGE], [SUM], POOL)


def test_requests_of_different_variants_are_grouped_and_each_group_shares_its_run(pool: Any) -> None:
    executor, engine = pool
    requests = [image(1, 2, 4), image(1, 5, 3, 2), image(2, 2, 4, 3), image(1, 5, 3, 4)]
    assert told(executor.run(requests)) == [[[8]], [[30]], [[24, 24]], [[60]]]
    assert engine.shapes == [(4, 2, 4), (2, 5, 3)]


def test_an_unknown_variant_fails_its_own_request_and_lists_those_that_exist(pool: Any) -> None:
    executor, engine = pool
    results = executor.run([image(1, 2, 4), image(1, 4, 2), image(1, 5, 3), image(0, 0, 0)])
    known = "compiled are image[-1, 2, 4], image[-1, 5, 3]"
    assert told(results) == [
        [[8]],
        f"model 'm' has no program for image[-1, 4, 2]; {known}",
        [[15]],
        f"model 'm' has no program for image[-1, 0, 0]; {known}",
    ]
    assert [type(r) for r in results].count(InvalidArgument) == 2
    assert engine.shapes == [(1, 2, 4), (2, 5, 3)]


def test_a_variant_has_its_own_largest_size(pool: Any) -> None:
    executor, engine = pool
    results = executor.run([image(3, 5, 3), image(3, 2, 4), image(5, 2, 4)])
    text = "rows are more than the largest compiled batch size"
    assert told(results) == [f"3 {text} 2; send fewer rows", [[8] * 3], f"5 {text} 4; send fewer rows"]
    assert engine.shapes == [(4, 2, 4)]


def test_a_long_list_of_variants_is_cut() -> None:
    x = TensorSpec("x", "f32", (-1, -1), 0)
    executor, _ = opened(lambda b: b, [x], [x], [Program(str(n), 1, (n,)) for n in range(1, 31)])
    (text,) = told(executor.run([[np.zeros((1, 99), np.float32)]]))
    assert text.endswith("x[-1, 7], x[-1, 8] and 22 more")


def test_axes_of_several_inputs_make_one_variant_together() -> None:
    a, fixed, b = (
        TensorSpec("a", "f32", (-1, -1), 0),
        TensorSpec("f", "f32", (-1, 2), 0),
        TensorSpec("b", "f32", (-1, -1), 0),
    )
    executor, _ = opened(
        lambda i: [i[0].sum(1)], [a, fixed, b], [SUM], [Program("p", 1, (3, 4)), Program("q", 1, (4, 3))]
    )

    def sent(n: int, m: int) -> list[np.ndarray]:
        return [np.ones((1, size), np.float32) for size in (n, 2, m)]

    assert told(executor.run([sent(3, 4), sent(3, 3), sent(4, 3)])) == [
        [[3]],
        "model 'm' has no program for a[-1, 3] b[-1, 3]; compiled are a[-1, 3] b[-1, 4], a[-1, 4] b[-1, 3]",
        [[4]],
    ]


def test_every_program_is_warmed_up_with_zeros_of_its_own_sizes(pool: Any) -> None:
    executor, engine = pool
    assert executor.warm_up() is None
    assert sorted(set(engine.shapes)) == [(1, 2, 4), (2, 5, 3), (4, 2, 4)]
    assert not any(batch[0].any() for batch in engine.batches)


def test_a_failure_in_one_group_leaves_the_other_alone() -> None:
    def picky(batch: list[np.ndarray]) -> list[np.ndarray]:
        if batch[0].shape[1] == 5:
            raise EngineError("no memory")
        return summed(batch)

    executor, _ = opened(picky, [IMAGE], [SUM], POOL)
    results = executor.run([image(1, 5, 3), image(1, 2, 4), image(1, 5, 3)])
    assert told(results) == ["no memory", [[8]], "no memory"]


def test_arrays_of_a_wrong_rank_fail_their_own_request_only(pool: Any) -> None:
    executor, _ = pool
    results = executor.run([image(1, 2, 4), [np.zeros(3, np.float32)], [np.array(1.0)], image(1, 2, 4)])
    assert [isinstance(r, Exception) for r in results] == [False, True, True, False]
    assert told([results[0], results[3]]) == [[[8]], [[8]]]


# A batch axis that is not the first one.


def test_rows_on_other_axes_are_joined_padded_and_split_there() -> None:
    x, w = TensorSpec("x", "f32", (2, -1), 1), TensorSpec("w", "f32", (-1,), 0)
    y, s = TensorSpec("y", "f32", (2, -1), 1), TensorSpec("s", "f32", (1, 1, -1), 2)
    executor, engine = opened(
        lambda b: [b[0] * b[1], b[1].reshape(1, 1, -1)], [x, w], [y, s], [Program("p", 4)], max_batch_size=0
    )
    requests = [
        [np.array([[1], [2]], np.float32), np.array([10], np.float32)],
        [np.array([[3, 4], [5, 6]], np.float32), np.array([20, 30], np.float32)],
    ]
    assert told(executor.run(requests)) == [[[[10], [20]], [[[10]]]], [[[60, 120], [100, 180]], [[[20, 30]]]]]
    assert [a.tolist() for a in engine.batches[0]] == [[[1, 3, 4, 0], [2, 5, 6, 0]], [10, 20, 30, 0]]
    assert told(executor.run([requests[1]])) == [[[[60, 120], [100, 180]], [[[20, 30]]]]]


# What may not be shared.


def test_dependent_rows_run_alone_and_at_exact_sizes_only() -> None:
    x = TensorSpec("x", "f32", (-1, 1), 0)
    executor, engine = opened(
        lambda b: b, [x], [x], [Program("p", 1), Program("q", 3)], coalesce=False, max_batch_size=0
    )
    sent = [[np.ones((n, 1), np.float32)] for n in (1, 2, 3, 1, 4)]
    text = "its batches cannot be padded; send one of [1, 3]"
    assert told(executor.run(sent)) == [
        [[[1]]],
        f"model 'm' has no program for 2 rows and {text}",
        [[[1]] * 3],
        [[[1]]],
        f"model 'm' has no program for 4 rows and {text}",
    ]
    assert engine.shapes == [(1, 1), (3, 1), (1, 1)]


@st.composite
def models(draw: st.DrawFn) -> tuple[list[TensorSpec], dict[tuple[int, ...], list[int]]]:
    """Inputs with one variable and one fixed axis and the batch anywhere; sizes by variant, both inputs alike."""
    sizes = st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True)
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True))
    inputs = []
    for name in draw(st.sampled_from(["a", "ab"])):
        axis = draw(st.integers(0, 2))
        shape = [-1, 2]
        shape.insert(axis, -1)
        inputs.append(TensorSpec(name, draw(st.sampled_from(["i32", "bf16"])), tuple(shape), axis))
    return inputs, {(length,) * len(inputs): sorted(draw(sizes)) for length in lengths}


@given(
    models(),
    st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 10)), max_size=6), min_size=1, max_size=3),
)
def test_every_request_gets_its_own_rows_whatever_shares_its_run(
    model: Any, calls: list[list[tuple[int, int]]]
) -> None:
    inputs, sizes = model
    programs = [Program(f"{v}{size}", size, v) for v, compiled in sizes.items() for size in compiled]
    executor, engine = opened(lambda batch: batch, inputs, inputs, programs)
    number = 0
    for call in calls:
        requests, expected = [], []
        for length, rows in call:
            number += 1
            request = []
            for tensor in inputs:
                shape = [length, 2]
                shape.insert(tensor.batch_axis, rows)
                request.append(np.full(shape, number, tensor.element.numpy))
            variant = (length,) * len(inputs)
            fits = variant in sizes and rows <= sizes[variant][-1]
            expected.append([a.astype(int).tolist() for a in request] if fits else InvalidArgument)
            requests.append(request)
        engine.batches.clear()
        results = executor.run(requests)
        got = [type(r) if isinstance(r, Exception) else [a.astype(int).tolist() for a in r] for r in results]
        assert got == expected
        for batch in engine.batches:
            used = {a.shape[t.batch_axis] for a, t in zip(batch, inputs, strict=True)}
            lengths = tuple(np.moveaxis(a, t.batch_axis, 0).shape[1] for a, t in zip(batch, inputs, strict=True))
            assert len(used) == 1
            assert used.pop() in sizes[lengths]


def timed(
    patch: pytest.MonkeyPatch, sizes: Sequence[int], cpu: Any, wall: Any, axis: int = 0
) -> tuple[Executor, Recorder]:
    """A warmed-up model of two numbers a row, under a clock that its runs move: ``cpu`` and ``wall`` by size."""
    clock = SimpleNamespace(cpu=0.0, wall=0.0)
    clock.process_time, clock.perf_counter = (lambda: clock.cpu), (lambda: clock.wall)
    patch.setattr("nereid_backend.executor.time", clock)

    def run(batch: list[np.ndarray]) -> list[np.ndarray]:
        clock.cpu += cpu(batch[0].shape[axis])
        clock.wall += wall(batch[0].shape[axis])
        return batch

    tensors = [TensorSpec("x", "i32", (-1, 2) if axis == 0 else (2, -1), axis)]
    programs = [Program(str(size), size) for size in sizes]
    executor, engine = opened(run, tensors, tensors, programs, max_batch_size=sizes[-1])
    executor.warm_up()
    engine.batches.clear()
    return executor, engine


def linear(size: int) -> float:
    return 1.0 * size


@pytest.mark.parametrize(
    ("rows", "runs"), [(1, [1]), (3, [1, 1, 1]), (7, [8]), (8, [8]), (10, [8, 1, 1]), (28, [32]), (32, [32])]
)
def test_rows_that_would_be_padded_at_a_cost_go_to_several_runs(
    monkeypatch: pytest.MonkeyPatch, rows: int, runs: list[int]
) -> None:
    executor, engine = timed(monkeypatch, (1, 8, 32), linear, linear)
    results = executor.run([[np.full((1, 2), number, np.int32)] for number in range(rows)])
    assert told(results) == [[[[number, number]]] for number in range(rows)]
    assert [shape[0] for shape in engine.shapes] == runs


@pytest.mark.parametrize(
    ("cpu", "wall"),
    [(lambda _: 1.0, linear), (linear, lambda _: 1.0), (lambda size: 3.0 + size, linear)],
    ids=["a large run costs no more", "it takes no longer", "a run costs much by itself"],
)
def test_rows_share_one_padded_run_where_several_cost_as_much(
    monkeypatch: pytest.MonkeyPatch, cpu: Any, wall: Any
) -> None:
    executor, engine = timed(monkeypatch, (1, 8), cpu, wall)
    executor.run([[np.ones((3, 2), np.int32)]])
    assert engine.shapes == [(8, 2)]


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=3, unique=True).map(sorted),
    st.integers(0, 1),
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
)
def test_every_request_gets_its_own_rows_of_several_runs(sizes: list[int], axis: int, rows: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        executor, _ = timed(patch, sizes, linear, linear, axis)
        shapes = [(count, 2) if axis == 0 else (2, count) for count in rows]
        requests = [[np.full(shape, number, np.int32)] for number, shape in enumerate(shapes)]
        fit = [count <= sizes[-1] for count in rows]
        expected = [[sent[0].tolist()] if fits else None for sent, fits in zip(requests, fit, strict=True)]
        got = [None if isinstance(r, InvalidArgument) else [r[0].tolist()] for r in executor.run(requests)]
        assert got == expected
