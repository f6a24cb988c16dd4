"""The upstream cases of the built-in hooks: token ids and detections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from converters import bundle, repository
from nereid_backend.builtins.bert_text import BertText, Encoder, bucket, read_vocabulary
from nereid_backend.builtins.detection import Detection
from nereid_backend.builtins.roi_align import roi_align
from nereid_backend.engines import engine_class
from nereid_backend.executor import Executor
from nereid_backend.pipeline import Pipeline
from nereid_backend.spec import ModelSpec, TensorSpec

FIXTURES = Path(__file__).resolve().parents[3] / "shared" / "fixtures" / "reactant"

pytestmark = pytest.mark.skipif(not FIXTURES.exists(), reason="../shared/fixtures is not beside this checkout")


def cases(name: str) -> dict[str, Any]:
    path = FIXTURES / "cases" / f"{name}_cases.json"
    return json.loads(path.read_text()) if path.exists() else {}


BERT, DETECTION = cases("bert"), cases("detection")


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    pytest.importorskip("tokenizers", reason="the text extra is not installed in this interpreter")
    path = tmp_path / "vocab.txt"
    path.write_text("".join(f"{token}\n" for token in BERT["vocab"]), encoding="utf-8")
    return path


def test_a_text_has_the_upstream_ids(vocabulary: Path) -> None:
    got = [Encoder(read_vocabulary(vocabulary), longest).encode([text])[0][0] for text, longest, _ in BERT["single"]]
    assert got == [ids for _, _, ids in BERT["single"]]


def test_a_pair_has_the_upstream_ids_and_sides(vocabulary: Path) -> None:
    table = read_vocabulary(vocabulary)
    got = [Encoder(table, longest).encode_pairs(a, [b])[0] for a, b, longest, *_ in BERT["pair"]]
    assert got == [(ids, sides) for *_, ids, sides in BERT["pair"]]


def test_the_smallest_bucket_that_holds_a_length_is_taken() -> None:
    assert [bucket(length, sizes) for length, sizes, _ in BERT["seq_bucket"]] == [
        size for *_, size in BERT["seq_bucket"]
    ]


def packed(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    encoded = [text.encode() for text in texts]
    rows = np.zeros((len(texts), max(map(len, encoded))), np.uint8)
    for row, text in zip(rows, encoded, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
    return rows, np.array([len(text) for text in encoded], np.int32)


def opened(vocabulary: Path, **options: Any) -> Any:
    names = ("input_ids", "attention_mask", "token_type_ids")
    variants = [[TensorSpec(name, "i64", (-1, tokens), 0) for name in names] for tokens in (64, 128)]
    return BertText("vocab.txt", **options).fitted(variants).open(vocabulary.parent)


def test_a_batch_of_texts_is_padded_to_one_bucket(vocabulary: Path) -> None:
    case = BERT["text_batch"]
    texts, lengths = packed(case["texts"])
    got = opened(vocabulary)({"texts": texts, "text_lens": lengths})
    assert list(got["input_ids"].shape) == case["wire_ids_shape"]
    assert got["attention_mask"].sum(1).tolist() == case["mask_row_sums"]


def test_one_query_is_paired_with_every_key(vocabulary: Path) -> None:
    case = BERT["pair_batch"]
    keys, lengths = packed(case["keys"])
    run = opened(vocabulary, query="query", texts="keys", lengths="key_lens")
    query = np.frombuffer(case["query"].encode(), np.uint8)
    got = run({"query": query, "keys": keys, "key_lens": lengths})
    assert got["attention_mask"].sum(1).tolist() == case["mask_row_sums"]


@pytest.mark.parametrize("aligned", [True, False])
def test_roi_align_gives_the_upstream_numbers(aligned: bool) -> None:
    case = DETECTION["roi_align"]
    feature = np.arange(64, dtype=np.float32).reshape(1, 8, 8)
    box = np.array([case["box_xyxy"]], np.float32)
    got = roi_align(
        feature,
        box,
        scale=case["spatial_scale"],
        pooled=case["pooled"],
        sampling_ratio=case["sampling_ratio"],
        aligned=aligned,
    )
    # f32 here, f64 there: 1e-6 of the largest value.
    expected = case["aligned" if aligned else "not_aligned"]
    np.testing.assert_allclose(got[0, 0], expected, rtol=case["atol"], atol=case["atol"])


@pytest.mark.parametrize("index", range(len(DETECTION.get("final_nms", ()))))
def test_the_final_boxes_are_the_upstream_ones(index: int) -> None:
    case = DETECTION["final_nms"][index]
    given = {**DETECTION["final_nms"][case.get("same_as", index)], **case}
    logits = np.array(given["logits"], np.float32)
    head = Detection(
        "logits",
        "deltas",
        "proposals",
        background_first=given["bg_first"],
        min_size=given.get("min_size", 0.0),
    )
    proposals = np.array(given["proposals"], np.float32)
    got = head.image(logits, np.zeros((2, 4 * logits.shape[1]), np.float32), proposals)
    if "classes_sorted" in case:
        assert sorted(got[:, 5].tolist()) == case["classes_sorted"]
    else:
        assert len(got) == case["count"]


def test_the_fixed_buffer_is_trimmed_to_its_count(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    folder = tmp_path / "fixed"
    folder.mkdir()
    source = FIXTURES / "generated" / "fixed_buffer_count"
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    manifest = yaml.safe_load((source / "manifest.yaml").read_text())
    manifest["nereid"] = {"postprocess": [{"trim": {"output": "VALUES", "count": "COUNT"}}]}
    (folder / "manifest.yaml").write_text(yaml.safe_dump(manifest))
    version = repository.write(bundle.read(folder, "fixed", "cpu"), tmp_path / "r", link=False, force=False) / "1"
    spec = ModelSpec.read(version)
    assert [(tensor.name, tensor.shape) for tensor in spec.client_outputs] == [("VALUES", (-1,)), ("COUNT", (1,))]
    executor = Executor(spec, engine_class(spec.engine).load(spec, version))
    case = json.loads((FIXTURES / "generated" / "expected.json").read_text())["fixed_buffer_count"]
    ((values, count),) = Pipeline(spec, executor, version).run([[np.array(case["x"], np.float32)]])
    assert (values.tolist(), count.tolist()) == (case["trimmed"], case["COUNT"])
