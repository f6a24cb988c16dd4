"""Exported bundles as clients of a real tritonserver meet them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import input_tensor
from tiny_encoder import pooled, states_by_torch, write_encoder
from tritonclient.utils import InferenceServerException

pytest.importorskip("jax")

from converters.exporters import export_jax, export_transformers

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("layout", ["program", "legacy"])
def test_an_exported_function_answers_on_the_server_as_in_python(
    triton: Any, client: Any, tmp_path: Path, layout: Any
) -> None:
    import jax.numpy as jnp

    rng = np.random.default_rng(1)
    embedding = rng.normal(size=(10, 6)).astype(np.float32)
    params = {"embedding": embedding, "head": {"kernel": rng.normal(size=(6, 6)).astype(np.float32)}}

    def model(params: Any, ids: Any, weight: Any) -> Any:
        rows = params["embedding"][ids] * weight[..., None]
        return {"scores": jnp.tanh(rows.sum(1) @ params["head"]["kernel"]), "count": (ids > 0).sum(1)}

    examples = rng.integers(0, 10, (5, 4)).astype(np.int32), rng.uniform(size=(5, 4)).astype(np.float32)
    done = export_jax(model, params, examples, tmp_path / f"embedded_{layout}", [1, 4], layout=layout)
    name = triton.add(done.directory)
    ids, weight = rng.integers(0, 10, (3, 4)).astype(np.int32), rng.uniform(size=(3, 4)).astype(np.float32)
    result = client.infer(name, [input_tensor("ids", ids), input_tensor("weight", weight)])
    expected = model(params, ids, weight)
    np.testing.assert_allclose(result.as_numpy("scores"), expected["scores"], rtol=1e-5, atol=1e-6)
    assert result.as_numpy("count").ravel().tolist() == expected["count"].tolist()


def test_an_exported_encoder_answers_texts_and_refuses_what_is_none(triton: Any, client: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tokenizers", reason="the text extra is not installed in this interpreter")
    weights = write_encoder(tmp_path / "model")
    name = triton.add(export_transformers(tmp_path / "model", tmp_path / "texts", [2], lengths=[8]).directory)

    def ask(*texts: bytes, size: int | None = None) -> Any:
        rows = np.array([list(text.ljust(80, b"\0")) for text in texts], np.uint8)
        sizes = np.array([[len(text) if size is None else size] for text in texts], np.int32)
        return client.infer(name, [input_tensor("texts", rows), input_tensor("text_lens", sizes)]).as_numpy("embedding")

    ids = np.array([[2, 5, 6, 7, 8, 9, 10, 3], [2, 3, 0, 0, 0, 0, 0, 0]])  # "a man is eat ##ing food", nothing
    mask = (ids != 0) | (np.arange(8) < 2)
    expected = pooled(states_by_torch("bert", weights, ids, mask), mask, "mean", normalize=True)
    np.testing.assert_allclose(ask(b"A man is eating food", b""), expected, atol=1e-5)
    # What does not fit into eight tokens is cut.
    np.testing.assert_allclose(ask(b"A man is eating food, bread and more bread!"), expected[:1], atol=1e-5)
    with pytest.raises(InferenceServerException, match=r"input 'texts' is not UTF-8 text \(byte 2\)"):
        ask(b"a \xff")
    with pytest.raises(InferenceServerException, match="'text_lens' must be 0 to 80"):
        ask(b"a", size=81)
    with pytest.raises(InferenceServerException, match="batch"):
        ask(b"a", b"man", b"is")
    np.testing.assert_allclose(ask(b"A man is eating food"), expected[:1], atol=1e-5)
