"""A small bundle for tests of hooks: y = 2 x over rows of 4, or another function, with programs for 1 and 8 rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from converters import weights


def tensor(name: str, shape: str, dtype: str = "f32", **dims: int) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": shape, "dims": dims}


def write_bundle(
    folder: Path,
    hooks: str | None = None,
    files: dict[str, str] | None = None,
    function: Callable[[Any], Any] = lambda x: x * 2,
    row: tuple[tuple[int, ...], Any] = ((4,), np.float32),
    **keys: Any,
) -> Path:
    """``hooks`` is the text of hooks.py, ``row`` the shape and dtype of an input row, ``keys`` are the manifest's."""
    import jax
    import jax.export

    jax.config.update("jax_enable_x64", True)
    folder.mkdir(parents=True)
    for size in (1, 8):
        argument = jax.ShapeDtypeStruct((size, *row[0]), row[1])
        exported = jax.export.export(jax.jit(function), platforms=["cpu"])(argument)
        (folder / f"model.b{size}.mlir").write_bytes(exported.mlir_module_serialized)
    weights.write(folder / "weights.safetensors", {}, {"argument_order": "[]", "axis_order": "xla"})
    manifest = {
        "format_version": "2.1",
        "executable_inputs": [tensor("x", "cn", c=4)],
        "executable_outputs": [tensor("y", "cn", c=4)],
        **keys,
    }
    (folder / "manifest.yaml").write_text(yaml.safe_dump(manifest))
    for file, text in {**({} if hooks is None else {"hooks.py": hooks}), **(files or {})}.items():
        (folder / file).write_text(text)
    return folder


RAGGED_HOOKS = """
from nereid_backend.hooks import InvalidArgument, register_model

def preprocess(inputs):
    arrays = dict(inputs)
    if not len(arrays["keys"]):
        raise InvalidArgument("no keys")
    return {"x": arrays["keys"] + arrays["query"]}

def postprocess(outputs):
    best = outputs[0].array.max(1)
    return {"best": best, "above": best[best > 20]}

register_model(preprocess=preprocess, postprocess=postprocess)
"""
RAGGED_TENSORS: dict[str, Any] = {
    "client_inputs": [tensor("query", "c", c=4), tensor("keys", "cn", c=4)],
    "client_outputs": [tensor("best", "n"), tensor("above", "k", k=-1)],
}
"""One query for any number of keys; a result for each, and those above 20."""
