from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereid_backend import dtypes
from nereid_backend.batching import OutputCheck, Staging, padded_size, split
from nereid_backend.errors import InvalidArgument, OutputError
from nereid_backend.spec import ModelSpec, Program, TensorSpec

TOKENS = ["bool", "u8", "i64", "f16", "f32", "bf16", "f8_e4m3"]


def tensor(name: str, dtype: str, *row_shape: int) -> TensorSpec:
    return TensorSpec(name, dtype, (-1, *row_shape), 0)


def filled(spec: TensorSpec, rows: int, seed: int, row_shape: tuple[int, ...] | None = None) -> np.ndarray:
    shape = (rows, *(spec.row_shape if row_shape is None else row_shape))
    return np.random.default_rng(seed).integers(1, 100, shape).astype(spec.element.numpy)


@pytest.mark.parametrize(("rows", "size"), [(0, 1), (1, 1), (2, 4), (4, 4), (5, 16), (16, 16)])
def test_rows_go_to_the_smallest_compiled_size_that_holds_them(rows: int, size: int) -> None:
    assert padded_size((1, 4, 16), rows) == size


def test_more_rows_than_the_largest_size_are_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidArgument, match="17 rows are more than the largest compiled batch size 16"):
        padded_size((1, 4, 16), 17)


def test_a_model_that_takes_any_size_is_not_padded() -> None:
    assert padded_size((), 7) == 7


def test_texts_are_gathered_and_padded_with_empty_ones() -> None:
    staging = Staging([tensor("words", "bytes", 2)])
    first, second = np.array([[b"a", b"b"]], object), np.array([[b"c", b""]], object)
    for _ in range(2):
        [batch] = staging.gather([[first], [second]], [1, 1], 3)
        assert batch.tolist() == [[b"a", b"b"], [b"c", b""], [b"", b""]]
        assert [array.tolist() for [array] in split([batch], [0], [1, 1])] == [first.tolist(), second.tolist()]


@given(
    st.lists(st.tuples(st.sampled_from(TOKENS), st.lists(st.integers(0, 3), max_size=3)), min_size=1, max_size=3),
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(0, 5),
)
def test_gathered_rows_split_back_into_the_requests_and_padding_is_zero(
    inputs: list[tuple[str, list[int]]], batches: list[list[int]], padding: int
) -> None:
    specs = [tensor(f"x{i}", token, *shape) for i, (token, shape) in enumerate(inputs)]
    staging = Staging(specs)
    for rows in batches:  # the buffers are reused from one batch to the next
        requests = [[filled(s, n, 10 * r + i) for i, s in enumerate(specs)] for r, n in enumerate(rows)]
        total = sum(rows)
        batch = staging.gather(requests, rows, total + padding)
        assert [(b.shape, b.dtype) for b in batch] == [(s.at_batch(total + padding), s.element.numpy) for s in specs]
        assert [bool(np.any(b[total:].astype(np.float32))) for b in batch] == [False] * len(specs)
        assert all(b.flags.c_contiguous for b in batch)
        got = split(batch, [0] * len(specs), rows)
        assert [[a.tobytes() for a in r] for r in got] == [[a.tobytes() for a in r] for r in requests]
        assert [[a.shape for a in r] for r in got] == [[a.shape for a in r] for r in requests]


def test_old_rows_do_not_leak_into_the_padding_of_a_later_batch() -> None:
    x = tensor("x", "f32", 2)
    staging = Staging([x])
    staging.gather([[np.full((3, 2), 9, np.float32)], [np.full((1, 2), 9, np.float32)]], [3, 1], 4)
    (batch,) = staging.gather([[np.full((1, 2), 5, np.float32)]], [1], 4)
    assert batch.tolist() == [[5, 5], [0, 0], [0, 0], [0, 0]]


def test_a_single_request_of_full_size_is_not_copied() -> None:
    array = filled(tensor("x", "f32", 2), 4, 0)
    (batch,) = Staging([tensor("x", "f32", 2)]).gather([[array]], [4], 4)
    assert batch is array


def test_a_single_strided_request_is_made_contiguous() -> None:
    array = np.arange(8, dtype=np.float32).reshape(2, 4).T
    (batch,) = Staging([tensor("x", "f32", 2)]).gather([[array]], [4], 4)
    assert (batch.flags.c_contiguous, batch.tolist()) == (True, array.tolist())


def test_the_buffer_is_kept_between_batches_grows_and_is_aligned() -> None:
    staging = Staging([tensor("x", "f32", 3)])
    two = [[np.ones((1, 3), np.float32)]] * 2
    (first,) = staging.gather(two, [1, 1], 8)
    (second,) = staging.gather(two, [1, 1], 4)
    assert (first.ctypes.data, first.ctypes.data % 64) == (second.ctypes.data, 0)
    (grown,) = staging.gather(two, [1, 1], 32)
    assert (grown.shape, grown.ctypes.data % 64, grown[:3].tolist()) == ((32, 3), 0, [[1] * 3, [1] * 3, [0] * 3])


def test_rows_with_variable_axes_are_joined_too() -> None:
    x = tensor("x", "f32", -1)
    staging = Staging([x])
    for width in (3, 5):
        parts = [filled(x, 1, width, (width,)), filled(x, 2, width + 1, (width,))]
        (batch,) = staging.gather([[p] for p in parts], [1, 2], 4)
        assert batch.tolist() == [*parts[0].tolist(), *parts[1].tolist(), [0] * width]


def test_only_arrays_in_the_reused_buffers_are_owned() -> None:
    staging = Staging([tensor("x", "f32", 2)])
    (batch,) = staging.gather([[np.ones((1, 2), np.float32)]], [1], 4)
    outside = np.ones((4, 2), np.float32)
    assert [staging.owns(a) for a in (batch, batch[:1], batch.reshape(-1), outside)] == [True, True, True, False]
    assert not Staging([tensor("x", "f32", 2)]).owns(outside)


# F18: what an engine may give back.


def check(outputs: list[TensorSpec], **options: Any) -> OutputCheck:
    options.setdefault("max_batch_size", 8)
    return OutputCheck(ModelSpec("m", "e", "p", (), tuple(outputs), (Program("f"),), **options))


FOLDER = check([tensor("y", "f32", 4)], batch_may_be_omitted=True)
BUNDLE = check([tensor("y", "f32", 4)])


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def test_an_output_as_declared_passes_uncopied() -> None:
    output = zeros(2, 4)
    (got,) = BUNDLE([output], 2)
    assert got is output


def test_a_folder_may_leave_the_batch_axis_out_of_one_row() -> None:
    assert [array.shape for array in (*FOLDER([zeros(1, 4)], 1), *FOLDER([zeros(4)], 1))] == [(1, 4), (1, 4)]


@pytest.mark.parametrize(
    ("checker", "output", "size", "words"),
    [
        (FOLDER, zeros(1, 5), 1, r"output 'y' has shape \[1, 5\], expected \[1, 4\]"),
        (FOLDER, zeros(5), 1, r"shape \[5\], expected \[1, 4\]"),
        (FOLDER, zeros(1, 1, 4), 1, r"shape \[1, 1, 4\], expected \[1, 4\]"),
        (FOLDER, zeros(3, 4), 2, r"shape \[3, 4\], expected \[2, 4\]"),
        (FOLDER, zeros(4), 2, r"shape \[4\], expected \[2, 4\]"),
        (BUNDLE, zeros(4), 1, r"shape \[4\], expected \[1, 4\]"),
        (BUNDLE, zeros(2, 4, dtype=np.float64), 2, "dtype float64, expected float32"),
        (BUNDLE, zeros(2, 4, dtype=np.int32), 2, "dtype int32, expected float32"),
    ],
)
def test_another_shape_or_dtype_is_refused_with_both(
    checker: OutputCheck, output: np.ndarray, size: int, words: str
) -> None:
    with pytest.raises(OutputError, match=words):
        checker([output], size)


@pytest.mark.parametrize("count", [0, 2])
def test_another_number_of_outputs_is_refused(count: int) -> None:
    with pytest.raises(OutputError, match=f"model 'm' returned {count} outputs, expected 1"):
        BUNDLE([zeros(1, 4)] * count, 1)


@pytest.mark.parametrize("width", [0, 1, 7])
def test_a_variable_axis_accepts_any_extent(width: int) -> None:
    (got,) = check([tensor("y", "f32", -1)])([zeros(2, width)], 2)
    assert got.shape == (2, width)


def test_a_batch_axis_elsewhere_is_checked_at_its_place() -> None:
    checker = check([TensorSpec("y", "f32", (3, -1), 1)], max_batch_size=0)
    assert checker([zeros(3, 2)], 2)[0].shape == (3, 2)
    with pytest.raises(OutputError, match=r"shape \[2, 3\], expected \[3, 2\]"):
        checker([zeros(2, 3)], 2)


def test_bf16_outputs_are_compared_by_their_own_dtype() -> None:
    bf16 = dtypes.by_token("bf16").numpy
    checker = check([tensor("y", "bf16", 4)])
    assert checker([zeros(1, 4).astype(bf16)], 1)[0].dtype == bf16
    with pytest.raises(OutputError, match="dtype uint16, expected bfloat16"):
        checker([zeros(1, 4).astype(np.uint16)], 1)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_sizes_seen_before_change_nothing(sizes: list[int]) -> None:
    checker = check([tensor("y", "f32", 1)])
    assert [checker([zeros(size, 1)], size)[0].shape for size in sizes] == [(size, 1) for size in sizes]


def test_more_sizes_than_are_remembered_are_checked_all_the_same() -> None:
    checker = check([tensor("y", "f32", 1)])
    for size in range(1, 600):
        assert checker([zeros(size, 1)], size)[0].shape == (size, 1)
    with pytest.raises(OutputError, match=r"expected \[599, 1\]"):
        checker([zeros(600, 1)], 599)
