"""Exported bundles as clients of a real tritonserver meet them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import input_tensor

pytest.importorskip("jax")

from converters.exporters import export_jax

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
