from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from nereid_backend import builtins
from nereid_backend.builtins import boxes
from nereid_backend.builtins.bert_text import BertText
from nereid_backend.builtins.classes import Argmax, Labels, Softmax, softmax
from nereid_backend.builtins.detection import Detection
from nereid_backend.builtins.roi_align import roi_align
from nereid_backend.builtins.trim import Trim
from nereid_backend.errors import BundleError, InvalidArgument, OutputError, RecordError
from nereid_backend.spec import BuiltinSpec, TensorSpec

NOWHERE = Path("nowhere")


def run(
    builtin: Any,
    others: list[TensorSpec],
    directory: Path = NOWHERE,
    variants: list[list[TensorSpec]] | None = None,
    **given_arrays: Any,
) -> dict[str, Any]:
    """What the built-in gives, after checking that it is what it said at convert time."""
    fitted = builtin.fitted(variants or [others])
    said = {tensor.name: tensor for tensor in fitted.tensors(others)}
    got = fitted.open(directory)({name: np.asarray(array) for name, array in given_arrays.items()})
    if fitted.stage == "postprocess":
        for name, array in got.items():
            tensor = said[name]
            assert (array.dtype, array.ndim) == (tensor.element.numpy, len(tensor.shape)), name
            assert all(want in (-1, size) for want, size in zip(tensor.shape, array.shape, strict=True)), name
    return got


def test_every_registered_name_is_the_name_of_its_class() -> None:
    for name in builtins.BUILTINS:
        with pytest.raises(RecordError, match="unknown keys"):
            builtins.builtin(BuiltinSpec(name, {"no such option": 1}))
    assert builtins.builtin(BuiltinSpec("trim", {"output": "y", "count": "n"})) == Trim("y", "n")
    with pytest.raises(BundleError, match="unknown built-in 'nms'; known: argmax"):
        builtins.builtin(BuiltinSpec("nms", {}))


# trim


def trim(values: Any, count: Any, **options: Any) -> Any:
    values, count = np.asarray(values, np.float32), np.asarray(count, np.int32)
    others = [TensorSpec("y", "f32", values.shape), TensorSpec("n", "i32", count.shape)]
    return run(Trim("y", "n", **options), others, y=values, n=count)["y"].tolist()


def test_trim_keeps_what_counts_along_the_first_axis_or_another() -> None:
    assert trim([1, 2, 3, 0], [3]) == [1, 2, 3]
    assert trim([1, 2], 0) == []
    assert trim([[1, 2], [3, 4], [0, 0]], [2]) == [[1, 2], [3, 4]]
    assert trim([[1, 2, 0], [3, 4, 0]], [[2]], axis=1) == [[1, 2], [3, 4]]
    assert trim([[1, 2, 0], [3, 4, 0]], [2], axis=-1) == [[1, 2], [3, 4]]


def test_trim_cuts_a_batch_to_its_longest_row() -> None:
    others = [TensorSpec("y", "f32", (-1, 4), 0), TensorSpec("n", "i32", (-1,), 0)]
    values, counts = np.arange(8, dtype=np.float32).reshape(2, 4), np.array([1, 3], np.int32)
    assert run(Trim("y", "n"), others, y=values, n=counts)["y"].tolist() == [[0, 1, 2], [4, 5, 6]]
    none = run(Trim("y", "n"), others, y=values[:0], n=counts[:0])["y"]
    assert none.shape == (0, 0)


@pytest.mark.parametrize("count", [-1, 5])
def test_a_count_the_buffer_cannot_hold_is_the_executables_fault(count: int) -> None:
    with pytest.raises(OutputError, match=f"output 'n' says {count}, 'y' holds 0 to 4 entries"):
        trim([1, 2, 3, 4], [count])


# softmax, argmax, labels


@given(
    arrays.arrays(
        st.sampled_from([np.float16, np.float32, np.float64]),
        arrays.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=5),
        elements=st.floats(-60000, 60000, width=16),
    )
)
def test_softmax_gives_shares_in_the_order_of_the_scores(scores: np.ndarray) -> None:
    shares = softmax(scores)
    assert (shares.dtype, shares.shape) == (scores.dtype, scores.shape)
    np.testing.assert_allclose(shares.astype(float).sum(-1), 1, rtol=5e-3)
    best = np.take_along_axis(shares, scores.argmax(-1)[..., None], -1)[..., 0]
    assert (best == shares.max(-1)).all()


def test_softmax_runs_along_the_given_axis_and_on_bf16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    scores = np.log(np.array([[1, 1], [3, 1]], np.float32))
    others = [TensorSpec("s", "f32", (2, 2))]
    np.testing.assert_allclose(run(Softmax("s", "p", axis=0), others, s=scores)["p"], [[0.25, 0.5], [0.75, 0.5]])
    narrow = softmax(scores.astype(ml_dtypes.bfloat16))
    assert narrow.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(narrow.astype(np.float32), [[0.5, 0.5], [0.75, 0.25]], rtol=1e-2)


def test_argmax_is_the_place_of_the_largest_and_drops_the_axis() -> None:
    scores = np.array([[3, 9, 1], [8, 2, 2]], np.float32)
    rows = [TensorSpec("s", "f32", (-1, 3), 0)]
    assert run(Argmax("s", "best"), rows, s=scores)["best"].tolist() == [1, 0]
    assert run(Argmax("s", "best", axis=0), [TensorSpec("s", "f32", (2, 3))], s=scores)["best"].tolist() == [1, 0, 1]


def test_labels_are_padded_utf8_and_an_unknown_number_is_the_executables_fault(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat\nécureuil\n\n", encoding="utf-8")
    labels, others = Labels("best", "label", "labels.txt"), [TensorSpec("best", "i32", (-1,), 0)]
    labels.check(tmp_path)
    got = run(labels, others, tmp_path, best=np.array([1, 0, 2], np.int32))["label"]
    assert [bytes(row).rstrip(b"\0").decode() for row in got] == ["écureuil", "cat", ""]
    assert run(labels, others, tmp_path, best=np.zeros(0, np.int32))["label"].shape == (0, 9)
    with pytest.raises(OutputError, match=r"'best' has -1 to 3, labels\.txt has 3 lines"):
        run(labels, others, tmp_path, best=np.array([-1, 3], np.int32))
    (tmp_path / "labels.txt").write_text("")
    with pytest.raises(BundleError, match="is empty"):
        labels.check(tmp_path)


# bert_text


@pytest.fixture
def texts(tmp_path: Path) -> Any:
    pytest.importorskip("tokenizers", reason="the text extra is not installed in this interpreter")
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\ncat\n")
    names = ("input_ids", "attention_mask")
    others = [TensorSpec(name, "i32", (-1, -1), 0) for name in names]
    variants = [[TensorSpec(name, "i32", (-1, tokens), 0) for name in names] for tokens in (4, 8)]

    def encode(rows: Any, lengths: Any, **options: Any) -> dict[str, Any]:
        given_arrays = {"texts": np.asarray(rows, np.uint8), "text_lens": np.asarray(lengths, np.int32)}
        return run(BertText("vocab.txt", **options), others, tmp_path, variants, **given_arrays)

    return encode


def test_bytes_beyond_a_texts_length_do_not_count(texts: Any) -> None:
    row = np.frombuffer(b"the cat\0\0", np.uint8)
    got = texts([row, row], [3, 7])
    assert got["input_ids"].tolist() == [[2, 4, 3, 0], [2, 4, 5, 3]]
    assert got["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert got["input_ids"].dtype == np.int32


def test_no_texts_give_no_rows_of_the_smallest_bucket(texts: Any) -> None:
    assert texts(np.zeros((0, 5)), [])["input_ids"].shape == (0, 4)


@pytest.mark.parametrize(
    ("rows", "lengths", "words"),
    [
        ([[116]], [2], "'text_lens' must be 0 to 1, the width of 'texts'; got 2 to 2"),
        ([[116]], [-1], "got -1 to -1"),
        ([[116]], [1, 1], "'texts' has 1 rows, 'text_lens' has 2"),
        ([[255, 254]], [2], r"'texts' is not UTF-8 text \(byte 0\)"),
    ],
)
def test_bad_texts_are_the_clients_fault(texts: Any, rows: Any, lengths: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        texts(rows, lengths)


# Boxes.


def naive_nms(found: np.ndarray, scores: np.ndarray, threshold: float) -> list[int]:
    def overlap(a: np.ndarray, b: np.ndarray) -> float:
        width, height = (min(a[i + 2], b[i + 2]) - max(a[i], b[i]) for i in (0, 1))
        shared = max(width, 0) * max(height, 0)
        whole = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)) - shared
        return shared / whole if whole else 0.0

    kept: list[int] = []
    for index in sorted(range(len(found)), key=lambda i: (-scores[i], i)):
        if all(overlap(found[index], found[other]) <= threshold for other in kept):
            kept.append(index)
    return kept


corner = st.integers(0, 8)
box_lists = st.lists(st.tuples(corner, corner, corner, corner, st.integers(0, 5), st.integers(0, 2)), max_size=12)


@settings(max_examples=200)
@given(box_lists, st.sampled_from([0.0, 0.25, 0.5, 0.75]))
def test_nms_keeps_what_the_definition_keeps(rows: list[Any], threshold: float) -> None:
    table = np.array(rows, np.float64).reshape(-1, 6)
    found = np.concatenate([np.minimum(table[:, :2], table[:, 2:4]), np.maximum(table[:, :2], table[:, 2:4])], 1)
    scores, classes = table[:, 4], table[:, 5]
    kept = boxes.nms(found, scores, threshold).tolist()
    assert kept == naive_nms(found, scores, threshold)
    assert boxes.nms(found, scores, threshold, 2).tolist() == kept[:2]
    of_each: list[int] = []
    for each in range(3):
        (same,) = np.nonzero(classes == each)
        of_each += same[naive_nms(found[same], scores[same], threshold)].tolist()
    assert sorted(boxes.nms_per_class(found, scores, classes, threshold)) == sorted(of_each)


def test_deltas_move_and_scale_boxes_and_growth_is_bounded() -> None:
    box = np.array([[0, 0, 10, 20]], np.float32)
    deltas = np.array([[1, 0, 0, 0, 0, 0, 5 * np.log(2), 0, 0, 0, 100, 0]], np.float32)
    got = boxes.decode(box, deltas)[0]
    np.testing.assert_allclose(got[0], [1, 0, 11, 20], rtol=1e-6)
    np.testing.assert_allclose(got[1], [-5, 0, 15, 20], rtol=1e-5)
    assert got[2, 2] - got[2, 0] == pytest.approx(10 * 1000 / 16, rel=1e-5)
    assert boxes.clip(got[1:2], 15, 12).tolist() == [[0, 0, 12, 15]]


def test_anchors_run_over_height_then_width_then_shape() -> None:
    got = boxes.anchors((2, 3), (8, 16), sizes=(4,), ratios=(1, 4))
    assert got.shape == (12, 4)
    assert got[:4].tolist() == [[-2, -2, 2, 2], [-1, -4, 1, 4], [14, -2, 18, 2], [15, -4, 17, 4]]
    assert got[6].tolist() == [-2, 6, 2, 10]


def test_proposals_of_levels_are_suppressed_within_their_level_only() -> None:
    box = np.array([[0, 0, 10, 10], [0, 0, 10, 9], [50, 50, 90, 90]], np.float32)
    scores = np.array([2, 1, -1], np.float32)
    levels = [(box, scores, np.zeros((3, 4), np.float32))] * 2
    found, score = boxes.proposals(levels, (60, 60))
    assert found.tolist() == [[0, 0, 10, 10]] * 2 + [[50, 50, 60, 60]] * 2
    np.testing.assert_allclose(score[[0, 2]], 1 / (1 + np.exp([-2.0, 1.0])), rtol=1e-6)


def test_larger_boxes_are_read_from_coarser_maps() -> None:
    sides = np.array([1, 112, 223, 224, 447, 448, 5000], np.float32)
    found = np.stack([0 * sides, 0 * sides, sides, sides], 1)
    assert boxes.feature_level(found, 2, 5).tolist() == [0, 1, 1, 2, 2, 3, 3]


def naive_roi_align(feature: np.ndarray, box: np.ndarray, scale: float, pooled: int, ratio: int, aligned: bool) -> Any:
    """The published definition, one sample at a time."""
    height, width = feature.shape

    def sample(y: float, x: float) -> float:
        if y < -1 or y > height or x < -1 or x > width:
            return 0.0
        y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
        top, left = int(y), int(x)
        bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
        down, across = y - top, x - left
        upper = feature[top, left] * (1 - across) + feature[top, right] * across
        return upper * (1 - down) + (feature[bottom, left] * (1 - across) + feature[bottom, right] * across) * down

    x1, y1, x2, y2 = box * scale - (0.5 if aligned else 0)
    w, h = (x2 - x1, y2 - y1) if aligned else (max(x2 - x1, 1), max(y2 - y1, 1))
    across, down = ratio or max(int(np.ceil(w / pooled)), 1), ratio or max(int(np.ceil(h / pooled)), 1)
    return [
        [
            np.mean([
                sample(y1 + h / pooled * (i + (a + 0.5) / down), x1 + w / pooled * (j + (b + 0.5) / across))
                for a in range(down) for b in range(across)
            ])
            for j in range(pooled)
        ]
        for i in range(pooled)
    ]  # fmt: skip


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(-20, 60).map(lambda v: v + 0.25), min_size=4, max_size=4), min_size=1, max_size=3),
    st.sampled_from([0, 1, 2]),
    st.booleans(),
)
def test_roi_align_is_the_mean_of_its_samples(corners: list[Any], ratio: int, aligned: bool) -> None:
    found = np.sort(np.array(corners, np.float32).reshape(-1, 2, 2), 1).reshape(-1, 4)
    features = np.random.default_rng(0).normal(size=(2, 7, 9)).astype(np.float32)
    got = roi_align(features, found, scale=0.25, pooled=3, sampling_ratio=ratio, aligned=aligned)
    expected = [[naive_roi_align(f, box, 0.25, 3, ratio, aligned) for f in features] for box in found]
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)


HEAD = {
    "logits": np.log(np.array([[0.1, 0.8, 0.1], [0.1, 0.6, 0.3], [1, 1e-9, 1e-9]], np.float32)),
    "deltas": np.zeros((3, 12), np.float32),
    "proposals": np.array([[0, 0, 10, 10], [0, 0, 10, 9], [5, 5, 9, 9]], np.float32),
}
HEAD_SPECS = [TensorSpec(name, "f32", array.shape) for name, array in HEAD.items()]


def test_detections_are_rows_of_box_score_and_class_best_first() -> None:
    got = run(Detection("logits", "deltas", "proposals", score_threshold=0.2), HEAD_SPECS, **HEAD)["detections"]
    np.testing.assert_allclose(got, [[0, 0, 10, 10, 0.8, 1], [0, 0, 10, 9, 0.3, 2]], rtol=1e-5)


def test_detections_of_a_batch_are_padded_and_counted() -> None:
    others = [TensorSpec(t.name, t.dtype, (-1, *t.shape), 0) for t in HEAD_SPECS]
    nothing = {**HEAD, "logits": HEAD["logits"][[2, 2, 2]]}
    both = {name: np.stack([HEAD[name], nothing[name]]) for name in HEAD}
    got = run(Detection("logits", "deltas", "proposals", top=3, score_threshold=0.2), others, **both)
    assert (got["detections"].shape, got["counts"].tolist()) == ((2, 3, 6), [2, 0])
    assert got["detections"][0, 2].tolist() == got["detections"][1, 0].tolist() == [0] * 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"deltas": (3, 8)}, r"they are \[3, 3\], \[3, 8\], \[3, 4\]"),
        ({"proposals": (2, 4)}, r"\[2, 4\]"),
        ({"logits": (3,)}, "must be"),
    ],
)
def test_a_detection_head_whose_tensors_do_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    others = [TensorSpec(t.name, t.dtype, change.get(t.name, t.shape)) for t in HEAD_SPECS]
    with pytest.raises(BundleError, match=words):
        Detection("logits", "deltas", "proposals").tensors(others)
