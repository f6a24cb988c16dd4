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

from converters import weights as weights_files
from converters.convert import prepare
from converters.exporters import TransformersModel, export_transformers, transformers_models
from converters.prepared import place
from nereid_backend import safetensors
from nereid_backend.engines import engine_class
from nereid_backend.errors import BundleError, ExportError
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


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return dict(safetensors.read(folder / "model.safetensors").tensors)


def stored_as(dtype: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = {name: array.astype(dtype) for name, array in tensors_of(folder).items()}
        weights_files.write(folder / "model.safetensors", tensors, {})

    return change


def in_shards(folder: Path, **also_in_the_first: np.ndarray) -> None:
    """The weights in two files, as transformers saves large models."""
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    shards: list[dict[str, np.ndarray]] = [also_in_the_first, {}]
    for number, (name, array) in enumerate(tensors.items()):
        shards[number % 2][name] = array
    places = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-00002.safetensors"
        weights_files.write(folder / file, shard, {"format": "pt"})
        places |= dict.fromkeys(shard, file)
    write("model.safetensors.index.json", {"metadata": {}, "weight_map": places})(folder)


def indexed(*files: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        in_shards(folder)
        write("model.safetensors.index.json", {"weight_map": {str(n): file for n, file in enumerate(files)}})(folder)

    return change


def a_weight_twice(folder: Path) -> None:
    in_shards(folder)
    for file in folder.glob("model-*"):
        stored = dict(safetensors.read(file).tensors)
        weights_files.write(file, {**stored, "embeddings.LayerNorm.bias": np.zeros(8, np.float32)}, {})


def with_dense(folder: Path, *, bias: bool = True, activation: str = "Tanh", takes: int = 8, **stored: Any) -> Any:
    """A layer from 8 to 5 values after the pooling, as sentence-transformers saves one; its matrix and bias."""
    rng = np.random.default_rng(1)
    matrix, shift = (rng.normal(size=size).astype(np.float32) for size in ((5, takes), (5,)))
    dense = folder / "2_Dense"
    dense.mkdir()
    kind = f"torch.nn.modules.activation.{activation}"
    settings = {"in_features": takes, "out_features": 5, "bias": bias, "activation_function": kind}
    write("config.json", {**settings, **stored})(dense)
    weights = {"linear.weight": matrix, **({"linear.bias": shift} if bias else {})}
    weights_files.write(dense / "model.safetensors", weights, {"format": "pt"})
    write("modules.json", [TRANSFORMER, POOLING, DENSE, NORMALIZE])(folder)
    return matrix, shift * bias


POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
DENSE = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
DENSE_SETTINGS = {"in_features": 8, "out_features": 5, "bias": True, "activation_function": "torch.nn.Tanh"}
NORMALIZE = {"idx": 3, "path": "3_Normalize", "type": "sentence_transformers.models.Normalize"}


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (without("config.json"), {}, "no config.json"),
        (without("model.safetensors"), {}, "no model.safetensors and no model.safetensors.index.json"),
        (indexed("../other.safetensors"), {}, "names '../other.safetensors', which is not in its folder"),
        (indexed("pytorch_model.bin"), {}, "no weight_map to safetensors files"),
        (indexed("model-00001-of-00002.safetensors"), {}, "lacks 'embeddings"),
        (indexed("model-00003-of-00002.safetensors"), {}, "model-00003-of-00002.safetensors: cannot be read"),
        (a_weight_twice, {}, "'embeddings.LayerNorm.bias' is in model-00001-of-00002.safetensors and in"),
        (without("modules.json"), {}, "pooling is None, expected one of mean, cls"),
        (write("config.json", "{"), {}, "config.json cannot be read as JSON"),
        (write("config.json", "[" * 100_000), {}, "config.json cannot be read as JSON"),
        (write("config.json", "[]"), {}, "config.json is no JSON object"),
        (write("modules.json", "{}"), {}, "modules.json cannot be read"),
        (write("modules.json", [{**TRANSFORMER, "path": "../other"}, POOLING]), {}, "a path outside the folder"),
        (write("modules.json", [TRANSFORMER, POOLING, {**DENSE, "type": "Weights"}]), {}, ", Pooling, W"),
        (write("modules.json", [TRANSFORMER, POOLING, NORMALIZE, DENSE | {"idx": 9}]), {}, "Pooling, Normalize, Dense"),
        (lambda folder: with_dense(folder, activation="Mish"), {}, "activation_function 'Mish', expected one of"),
        (lambda folder: with_dense(folder, out_features=6), {}, r"2_Dense: 'linear.weight' has shape \[5, 8\]"),
        (lambda folder: with_dense(folder, in_features="8"), {}, "2_Dense/config.json has in_features '8'"),
        (lambda folder: with_dense(folder, takes=7), {}, "takes vectors of 7 values, those before it have 8"),
        (lambda folder: [with_dense(folder, bias=False), write("2_Dense/config.json", DENSE_SETTINGS)(folder)], {},
         "2_Dense/model.safetensors lacks 'linear.bias'"),
        (write("1_Pooling/config.json", {"pooling_mode_lasttoken": True}), {}, "pooling_mode_lasttoken"),
        (with_config(model_type="gpt2"), {}, "model_type 'gpt2'; encoders of the kinds bert, "),
        (with_config(is_decoder=True), {}, "is_decoder True"),
        (with_config(position_embedding_type="relative_key"), {}, "position_embedding_type 'relative_key'"),
        (with_config(hidden_act="mish"), {}, "hidden_act 'mish'"),
        (with_config(num_attention_heads=3), {}, "num_attention_heads 3 does not divide hidden_size 8"),
        (with_config(num_hidden_layers="two"), {}, "num_hidden_layers 'two', expected a positive integer"),
        (with_config(num_hidden_layers=2), {}, "lacks 'encoder.layer.1.attention.self.query.weight' and 15 more"),
        (with_config(max_position_embeddings=99), {}, "position_embeddings.weight' has shape"),
        (stored_as(np.float64), {}, "is f64, expected f32 or f16 or bf16; save model.float"),
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
    with pytest.raises(BundleError, match=words):
        export_transformers(folder, folder.parent / "bundles" / "texts", **{"lengths": [8], **options})
    assert not list(folder.parent.glob("bundles/*"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_half_precision_are_those_numbers_in_f32(folder: Path, dtype: str) -> None:
    weights = write_encoder(folder)
    kind = np.dtype(getattr(pytest.importorskip("ml_dtypes"), dtype, dtype))
    stored_as(kind)(folder)
    rounded = {name: array.astype(kind).astype(np.float32) for name, array in weights.items()}
    done = export_transformers(folder, folder.parent / "texts", [3], lengths=[8])
    expected = pooled(states_by_torch("bert", rounded, IDS, MASK), MASK, "mean", normalize=True)
    np.testing.assert_allclose(answer(done.directory, TEXTS), expected, rtol=1e-5, atol=1e-5)


def test_weights_may_lie_in_several_files(folder: Path) -> None:
    weights = write_encoder(folder, layers=2)
    in_shards(folder)
    done = export_transformers(folder, folder.parent / "texts", [3], lengths=[8])
    expected = pooled(states_by_torch("bert", weights, IDS, MASK), MASK, "mean", normalize=True)
    np.testing.assert_allclose(answer(done.directory, TEXTS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("activation", "bias"), [("Tanh", True), ("Identity", False)])
def test_a_dense_layer_follows_the_pooling(folder: Path, activation: str, bias: bool) -> None:
    import torch

    weights = write_encoder(folder)
    matrix, shift = map(torch.from_numpy, with_dense(folder, activation=activation, bias=bias))
    done = export_transformers(folder, folder.parent / "texts", [3], lengths=[8])
    vectors = torch.from_numpy(pooled(states_by_torch("bert", weights, IDS, MASK), MASK, "mean", normalize=False))
    layer = getattr(torch.nn, activation)()
    expected = torch.nn.functional.normalize(layer(torch.nn.functional.linear(vectors, matrix, shift)))
    np.testing.assert_allclose(answer(done.directory, TEXTS), expected.numpy(), rtol=1e-5, atol=1e-5)


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
