"""Encoders that transformers or sentence-transformers saved become bundles that take texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_encoder import WORDS, pooled, states_by_torch, write_encoder

pytest.importorskip("jax")
pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from converters.convert import prepare
from converters.exporters import TransformersModel, export_transformers, transformers_models
from converters.prepared import place
from nereid_backend.engines import engine_class
from nereid_backend.errors import ExportError
from nereid_backend.executor import Executor
from nereid_backend.pipeline import Pipeline

TEXTS = ["A man is eating food!", "bread", ""]
IDS = np.array(
    [[WORDS.index(word) for word in row.split()] + [0] * (8 - len(row.split())) for row in (
        "[CLS] a man is eat ##ing food [SEP]", "[CLS] bread [SEP]", "[CLS] [SEP]")]
)  # fmt: skip
MASK = (IDS != 0).astype(np.int64)


@pytest.fixture(autouse=True)
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests say holds where the library is not installed."""
    monkeypatch.setitem(sys.modules, "transformers", None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


def as_request(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    rows = [text.encode() for text in texts]
    width = max(map(len, rows))
    return (
        np.array([list(row.ljust(width, b"\0")) for row in rows], np.uint8),
        np.array([len(row) for row in rows], np.int32),
    )


def answer(bundle: Path, texts: list[str]) -> np.ndarray:
    """What the runtime gives for a request of texts."""
    prepared, version = prepare(bundle), bundle.parent / "version"
    version.mkdir(exist_ok=True)
    for name, source in prepared.files.items():
        place(source, version / name, link=True)
    engine = engine_class(prepared.spec.engine).load(prepared.spec, version)
    pipeline = Pipeline(prepared.spec, Executor(prepared.spec, engine), version)
    try:
        ((vectors,),) = pipeline.run([list(as_request(texts))])
    finally:
        pipeline.close()
        engine.close()
    return np.asarray(vectors)


@pytest.mark.parametrize(
    ("kind", "pooling", "normalize", "prefix", "old_names"),
    [
        ("bert", "mean", True, "", False),
        ("bert", "cls", False, "bert.", True),
        ("distilbert", "max", False, "distilbert.", False),
        ("distilbert", "mean_sqrt_len", True, "", False),
    ],
)
def test_texts_become_the_vectors_that_the_folder_says(
    folder: Path, kind: str, pooling: str, normalize: bool, prefix: str, old_names: bool
) -> None:
    weights = write_encoder(
        folder, kind, pooling=pooling, normalize=normalize, prefix=prefix, layers=2 - bool(prefix), old_names=old_names
    )
    done = export_transformers(folder, folder.parent / "texts", [3], lengths=[8])
    vectors = answer(done.directory, TEXTS)
    expected = pooled(states_by_torch(kind, weights, IDS, MASK), MASK, pooling, normalize=normalize)
    np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-5)
    assert (done.batch_sizes, list(done.differences)) == ((3,), ["embedding"])


def test_clients_may_send_token_ids_instead(folder: Path, run: Callable[..., Any]) -> None:
    weights = write_encoder(folder, "roberta", pooling=None)
    (folder / "vocab.txt").unlink()
    ids = np.where(MASK, IDS, 1)
    done = export_transformers(folder, folder.parent / "ids", [3], texts=False, pooling="none", lengths=[4, 8])
    prepared = prepare(done.directory)
    assert (prepared.spec.variants, prepared.spec.coalesce) == (((4, 4), (8, 8)), True)
    (states,) = run(prepared, folder.parent / "repository", ids, MASK)
    expected = states_by_torch("roberta", weights, ids, MASK)
    np.testing.assert_allclose(states[MASK != 0], expected[MASK != 0], rtol=1e-5, atol=1e-5)
    short, seen = np.roll(ids, -1, 0)[:, :4], np.array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    (states,) = run(prepared, folder.parent / "repository", short, seen)
    expected = states_by_torch("roberta", weights, short, seen)
    np.testing.assert_allclose(states[seen != 0], expected[seen != 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("most", "own", "asked", "lengths"),
    [
        (512, 256, None, [32, 64, 128, 256]),
        (512, 100, None, [32, 64, 100]),
        (24, 16, None, [16]),
        (512, 512, [384, 48], [48, 384]),
    ],
)
def test_lengths_double_up_to_the_limit_unless_they_are_given(
    most: int, own: int, asked: Any, lengths: list[int]
) -> None:
    assert transformers_models.compiled_lengths(asked, most, own) == lengths


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))

    return change


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def half_precision(folder: Path) -> None:
    from converters import weights as weights_files
    from nereid_backend import safetensors

    tensors = safetensors.read(folder / "model.safetensors").tensors
    weights_files.write(folder / "model.safetensors", {n: a.astype(np.float16) for n, a in tensors.items()}, {})


POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
DENSE = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (without("config.json"), {}, "no config.json"),
        (without("model.safetensors"), {}, "no model.safetensors; save the model in one such file"),
        (without("modules.json"), {}, "pooling is None, expected one of mean, cls"),
        (write("config.json", "{"), {}, "config.json cannot be read as JSON"),
        (write("config.json", "[" * 100_000), {}, "config.json cannot be read as JSON"),
        (write("config.json", "[]"), {}, "config.json is no JSON object"),
        (write("modules.json", "{}"), {}, "modules.json cannot be read"),
        (write("modules.json", [{**TRANSFORMER, "path": "../other"}, POOLING]), {}, "a path outside the folder"),
        (write("modules.json", [TRANSFORMER, POOLING, DENSE]), {}, "has Transformer, Pooling, Dense"),
        (write("1_Pooling/config.json", {"pooling_mode_lasttoken": True}), {}, "pooling_mode_lasttoken"),
        (with_config(model_type="gpt2"), {}, "model_type 'gpt2'; encoders of the kinds bert, "),
        (with_config(is_decoder=True), {}, "is_decoder True"),
        (with_config(position_embedding_type="relative_key"), {}, "position_embedding_type 'relative_key'"),
        (with_config(hidden_act="mish"), {}, "hidden_act 'mish'"),
        (with_config(num_attention_heads=3), {}, "num_attention_heads 3 does not divide hidden_size 8"),
        (with_config(num_hidden_layers="two"), {}, "num_hidden_layers 'two', expected a positive integer"),
        (with_config(num_hidden_layers=2), {}, "lacks 'encoder.layer.1.attention.self.query.weight' and 15 more"),
        (with_config(max_position_embeddings=99), {}, "position_embeddings.weight' has shape"),
        (half_precision, {}, "is f16, expected f32; save model.float"),
        (without("vocab.txt"), {}, "texts=False"),
        (write("vocab.txt", "a\nman\n"), {}, "lacks"),
        (write("tokenizer_config.json", {"tokenizer_class": "MPNetTokenizer"}), {}, "MPNetTokenizer.*texts=False"),
        (write("vocab.txt", "\n".join([*WORDS, "further"])), {}, "15 tokens, the model 14"),
        (lambda _: None, {"lengths": [1, 8]}, r"lengths are \[1, 8\], expected numbers of tokens from 2 to 24"),
        (lambda _: None, {"lengths": [32]}, "from 2 to 24"),
        (lambda _: None, {"pooling": "median"}, "pooling is 'median'"),
        (lambda _: None, {"examples": []}, "expected texts"),
        (lambda _: None, {"batch_sizes": None}, "expected at least one"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_named_and_leaves_nothing(
    folder: Path, change: Callable[[Path], None], options: dict[str, Any], words: str
) -> None:
    write_encoder(folder)
    change(folder)
    with pytest.raises(ExportError, match=words):
        export_transformers(folder, folder.parent / "bundles" / "texts", **{"lengths": [8], **options})
    assert not list(folder.parent.glob("bundles/*"))


def own_tokenizer(folder: Path, *, lowercase: bool) -> Any:
    """A tokenizer.json, as the tokenizers library writes it, in ``folder``."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(WORDS[:5])
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.enable_padding()
    tokenizer.enable_truncation(5)
    tokenizer.save(str(folder / "tokenizer.json"))


def test_a_vocabulary_is_found_in_tokenizer_json_and_may_have_capitals(folder: Path) -> None:
    weights = write_encoder(folder)
    (folder / "vocab.txt").unlink()
    own_tokenizer(folder, lowercase=False)
    write("tokenizer_config.json", {"do_lower_case": False})(folder)
    done = export_transformers(folder, folder.parent / "texts", [1], lengths=[4])
    vectors = answer(done.directory, ["Paris A"])
    ids = np.array([[2, WORDS.index("Paris"), 1, 3]])
    expected = pooled(states_by_torch("bert", weights, ids, ids != 0), ids != 0, "mean", normalize=True)
    np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-5)


def test_a_tokenizer_that_differs_from_what_is_served_is_refused(folder: Path) -> None:
    write_encoder(folder)
    own_tokenizer(folder, lowercase=False)
    with pytest.raises(ExportError, match=r"gives other tokens for 'A man is eating food\.', .*texts=False"):
        export_transformers(folder, folder.parent / "texts", lengths=[8])


class Saved:
    """A model in memory, which knows how to save itself."""

    def __init__(self, source: Path, *names: str) -> None:
        self._source, self._names = source, names

    def save_pretrained(self, folder: str) -> None:
        for name in self._names:
            (Path(folder) / name).write_bytes((self._source / name).read_bytes())


def test_a_model_in_memory_is_exported_with_its_tokenizer(folder: Path) -> None:
    write_encoder(folder, pooling=None)
    model, tokenizer = Saved(folder, "config.json", "model.safetensors"), Saved(folder, "vocab.txt")
    described = TransformersModel(model, tokenizer, pooling="cls", lengths=[4])
    import jax

    before = jax.config.jax_enable_x64
    done = described.export(folder.parent / "texts", [1])
    assert jax.config.jax_enable_x64 == before
    assert [tensor.name for tensor in prepare(done.directory).spec.client_inputs] == ["texts", "text_lens"]
    assert done.notes[0].startswith("transformers and torch are not both installed")
    with pytest.raises(ExportError, match="the model is a int"):
        export_transformers(3, folder.parent / "three")


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_the_model_of_the_library_decides_where_it_is_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    import torch

    weights = write_encoder(folder)

    class Model:
        def eval(self) -> Model:
            return self

        def __call__(self, input_ids: Any, attention_mask: Any) -> Any:
            states = states_by_torch("bert", weights, input_ids.numpy(), attention_mask.numpy())
            return SimpleNamespace(last_hidden_state=torch.from_numpy(states + (factor - 1)))

    def from_pretrained(path: Path, *, local_files_only: bool, dtype: Any) -> Model:
        assert (path, local_files_only, dtype) == (folder, True, torch.float32)
        return Model()

    library = SimpleNamespace(AutoModel=SimpleNamespace(from_pretrained=from_pretrained))
    monkeypatch.setitem(sys.modules, "transformers", library)
    if factor == 1:
        done = export_transformers(folder, folder.parent / "texts", [2], lengths=[8])
        assert (done.notes, 0 < done.differences["embedding"] < 1e-5) == ((), True)
        return
    with pytest.raises(ExportError, match=r"output 'embedding' of the bundle differs from the model on .* by 0\.00"):
        export_transformers(folder, folder.parent / "texts", [2], lengths=[8])
    assert not (folder.parent / "texts").exists()
