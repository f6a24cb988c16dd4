from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny_encoder import write_encoder

README = Path(__file__).parents[3] / "converters" / "README.md"


@pytest.mark.parametrize(
    ("chapter", "library"), [("Export from JAX", "jax"), ("Export from transformers", "tokenizers")]
)
def test_the_export_in_the_readme_works_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chapter: str, library: str
) -> None:
    pytest.importorskip(library)
    _, _, text = README.read_text().partition(f"## {chapter}\n")
    (code,) = re.findall(r"^```python\n(.*?)^```", text.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    write_encoder(tmp_path / "models" / "minilm")
    exec(code, {})
    assert len(list(tmp_path.glob("bundles/*/manifest.yaml"))) == 1
