from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_encoder import write_encoder

from converters.convert import prepare

README = Path(__file__).parents[3] / "converters" / "README.md"


@pytest.mark.parametrize(
    ("chapter", "library"),
    [
        ("Export from JAX", "jax"),
        ("Export from torch", "torch"),
        ("Export from transformers", "tokenizers"),
        ("Export from ONNX", "onnx"),
        ("Export from scikit-learn", "skl2onnx"),
        ("Export from XGBoost", "onnxmltools"),
    ],
)
def test_the_exports_in_the_readme_work_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chapter: str, library: str
) -> None:
    pytest.importorskip(library)
    if library == "torch" and importlib.util.find_spec("torchax") is None:
        pytest.skip("torchax is not installed (the extra export)")
    _, _, text = README.read_text().partition(f"## {chapter}\n")
    blocks = re.findall(r"^```python\n(.*?)^```", text.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    write_encoder(tmp_path / "models" / "minilm")
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    written = list((tmp_path / "bundles").iterdir())
    assert len(written) >= len(blocks) > 0
    assert all(prepare(folder, allow_code=True).spec.name == folder.name for folder in written)
