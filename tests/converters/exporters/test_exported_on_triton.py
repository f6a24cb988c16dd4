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

from converters.exporters import ClientSide, TensorSpec, export_jax, export_sklearn, export_transformers

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


def test_variants_and_hooks_answer_on_the_server_as_in_python(triton: Any, client: Any, tmp_path: Path) -> None:
    import jax.numpy as jnp

    (tmp_path / "scaling.py").write_text(
        "from nereid_backend.hooks import register_model\n\n\n"
        "def preprocess(inputs):\n"
        "    ((_, levels),) = inputs\n"
        "    return {'x': levels.astype('float32') / 8}\n\n\n"
        "register_model(preprocess=preprocess)\n"
    )
    weight = np.random.default_rng(2).normal(size=(3, 4)).astype(np.float32)

    def model(weight: Any, x: Any) -> Any:
        return {"scores": jnp.tanh(x @ weight).sum(1)}

    def levels(rows: int, steps: int) -> np.ndarray:
        return np.random.default_rng(steps).integers(0, 99, (rows, steps, 3)).astype(np.uint8)

    done = export_jax(
        model,
        weight,
        levels(2, 5).astype(np.float32),
        tmp_path / "steps",
        [1, 4],
        variants=[levels(2, 2).astype(np.float32)],
        client=ClientSide(
            inputs=[TensorSpec("levels", "u8", (-1, -1, 3), 0)],
            postprocess=[{"argmax": {"input": "scores", "output": "best"}}],
            files={"hooks.py": tmp_path / "scaling.py"},
            example={"levels": levels(2, 5)},
        ),
    )
    name = triton.add(done.directory)
    for steps in (2, 5):
        sent = levels(3, steps)
        result = client.infer(name, [input_tensor("levels", sent)])
        expected = np.asarray(model(weight, sent.astype(np.float32) / 8)["scores"])
        np.testing.assert_allclose(result.as_numpy("scores"), expected, rtol=1e-5, atol=1e-5)
        assert result.as_numpy("best").ravel().tolist() == expected.argmax(1).tolist()


def test_an_exported_classifier_answers_on_the_server_as_in_python(triton: Any, client: Any, tmp_path: Path) -> None:
    """The label, one number per row, has the shape on the wire that its contract says."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    pytest.importorskip("skl2onnx")
    rng = np.random.default_rng(2)
    table = rng.normal(size=(60, 3))
    model = linear_model.LogisticRegression().fit(table, np.digitize(table.sum(1), [-1, 1]))
    name = triton.add(export_sklearn(model, tmp_path / "exported_classifier").directory)
    rows = rng.normal(size=(5, 3)).astype(np.float32)
    result = client.infer(name, [input_tensor("input", rows)])
    np.testing.assert_allclose(result.as_numpy("probabilities"), model.predict_proba(rows), rtol=1e-5, atol=1e-6)
    assert result.as_numpy("label").tolist() == model.predict(rows)[:, None].tolist()


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
