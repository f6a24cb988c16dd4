"""Export of encoders that ``transformers`` or ``sentence-transformers`` saved: texts in, vectors out.

The encoder is computed by ``encoder.py`` in JAX, from the folder's configuration and weights; the folder's tokenizer
becomes the built-in ``bert_text``. Neither library is needed. Where ``transformers`` is installed the bundle is
compared with its model, else with the function that it was made of.
"""

from __future__ import annotations

import gc
import importlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from converters.bundle import Array
from converters.exporters import transformers_folder as folders
from converters.exporters.client_side import PLAIN, ClientSide
from converters.exporters.description import Exported
from converters.exporters.encoder import EncoderConfig, encode
from converters.exporters.manifest_writer import Layout
from converters.exporters.programs import BATCH_SIZES, Origin, Run, compiled_sizes, export_programs, settings_kept
from converters.exporters.transformers_folder import POOLINGS, VOCABULARY_FILE, Dense, Pooling, Vocabulary
from converters.exporters.transformers_weights import StoredWeights, read_weights
from nereid_backend.builtins.bert_text import BertText, Encoder, bucket
from nereid_backend.errors import ExportError
from nereid_backend.spec import VARIABLE, TensorSpec

IDS, MASK = "input_ids", "attention_mask"  # as bert_text calls them
EXAMPLE_TEXTS = (
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "Two women walk by the sea; a dog, wet and happy, runs ahead of them and brings back what they throw. " * 30,
)
_SHORTEST = 32  # tokens: below, a call costs the same


@dataclass(frozen=True, slots=True)
class TransformersModel:
    """An encoder and how it is served.

    ``model`` is the folder that a model was saved in, or a model with ``save_pretrained``, with ``tokenizer`` beside it
    where it has none of its own. ``texts``: clients send texts, not token ids. ``pooling`` and ``normalize`` default to
    what a folder of sentence-transformers says. ``lengths`` are the numbers of tokens to compile for: a request is
    padded to the smallest that holds its longest text, and texts are cut to the largest (default: 32, 64, ... up to the
    model's own limit). ``examples`` are texts to compare the bundle on.
    """

    model: Any
    tokenizer: Any = None
    texts: bool = True
    pooling: Pooling | None = None
    normalize: bool | None = None
    lengths: Sequence[int] | None = None
    examples: Sequence[str] = EXAMPLE_TEXTS

    def export(
        self,
        directory: Path | str,
        batch_sizes: Sequence[int] = BATCH_SIZES,
        *,
        layout: Layout = "program",
        tolerance: float | None = None,
        provenance: Mapping[str, Any] | None = MappingProxyType({}),
        force: bool = False,
    ) -> Exported:
        """Write this model as a bundle and run it beside the original: see ``export_transformers``."""
        if compiled_sizes(batch_sizes) == (None,):
            raise ExportError("batch sizes are none, expected at least one; texts come in rows")
        with _saved(self.model, self.tokenizer) as folder:
            encoder, vocabulary, lengths = self._read(folder)
            ids = self._example_ids(encoder.config, vocabulary, lengths[-1])
            client = PLAIN
            if vocabulary is not None:
                with settings_kept():
                    client = self._client(encoder, vocabulary, ids, lengths, max(batch_sizes))
            return export_programs(
                [_Length(encoder, ids[:, :length]) for length in lengths],
                directory,
                batch_sizes,
                origin=_ORIGIN,
                layout=layout,
                tolerance=tolerance,
                provenance=provenance,
                force=force,
                client=client,
            )

    def _read(self, folder: Path) -> tuple[_Encoder, Vocabulary | None, list[int]]:
        head = folders.read_head(folder)
        config, weights = read_weights(head.encoder)
        pooling = head.pooling if self.pooling is None else self.pooling
        if pooling is None or pooling not in POOLINGS:
            raise ExportError(
                f"pooling is {pooling!r}, expected one of {', '.join(POOLINGS)}, as the model was trained"
            )
        normalize = head.normalize if self.normalize is None else self.normalize
        pooled = pooling != "none"
        encoder = _Encoder(
            head.encoder, config, weights, pooling, head.dense if pooled else (), normalize=normalize and pooled
        )
        vocabulary = folders.read_tokenizer(head.encoder, self.examples) if self.texts else None
        if vocabulary is not None and len(vocabulary.ids) > config.vocabulary:
            raise ExportError(
                f"the vocabulary has {len(vocabulary.ids)} tokens, the model {config.vocabulary}; they belong to "
                "different models"
            )
        limits = [config.longest, head.longest, vocabulary.longest if vocabulary is not None else None]
        longest = min(limit for limit in limits if limit is not None)
        lengths = compiled_lengths(self.lengths, config.longest, longest)
        return encoder, vocabulary, lengths

    def _example_ids(self, config: EncoderConfig, vocabulary: Vocabulary | None, longest: int) -> Array:
        """Token ids, i64 [texts, longest], of the examples; made-up ones where clients send ids."""
        if vocabulary is None:
            rng = np.random.default_rng(0)
            made_up = np.full((len(EXAMPLE_TEXTS), longest), config.padding)
            for row, tokens in zip(made_up, np.geomspace(2, longest, len(made_up)).astype(int), strict=True):
                row[:tokens] = rng.integers(0, config.vocabulary, tokens)
            return made_up
        if not self.examples:
            raise ExportError("there are no examples, expected texts; leave them out for some of ours")
        encoder = Encoder(dict(vocabulary.ids), longest, lowercase=vocabulary.lowercase)
        rows = [ids for ids, _ in encoder.encode(list(self.examples))]
        return np.array([ids + [encoder.padding] * (longest - len(ids)) for ids in rows])

    def _client(
        self, encoder: _Encoder, vocabulary: Vocabulary, ids: Array, lengths: Sequence[int], rows: int
    ) -> ClientSide:
        """Clients send texts: ``bert_text`` makes the ids of them, which ``ids`` are for all examples.

        The example fits ``rows``, the largest batch, for which the original is compiled anyway.
        """
        options = {"vocab": VOCABULARY_FILE, **({} if vocabulary.lowercase else {"lowercase": False})}
        texts = [text.encode() for text in self.examples[:rows]]
        mask = (ids != encoder.config.padding).astype(np.int64)
        width = bucket(int(mask[: len(texts)].sum(1).max()), lengths)
        repeated = np.arange(rows) % len(texts)
        (expected,) = encoder.original()([ids[repeated, :width], mask[repeated, :width]])
        longest = max(map(len, texts))
        return ClientSide(
            preprocess=[{BertText.name: options}],
            files={VOCABULARY_FILE: vocabulary.file},
            example={
                "texts": np.array([list(text.ljust(longest, b"\0")) for text in texts], np.uint8),
                "text_lens": np.array([len(text) for text in texts], np.int32),
            },
            expected={encoder.output: expected[: len(texts)]},
        )


def export_transformers(
    model: Any,
    directory: Path | str,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    *,
    tokenizer: Any = None,
    texts: bool = True,
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    lengths: Sequence[int] | None = None,
    examples: Sequence[str] = EXAMPLE_TEXTS,
    layout: Layout = "program",
    tolerance: float | None = None,
    provenance: Mapping[str, Any] | None = MappingProxyType({}),
    force: bool = False,
) -> Exported:
    """Write an encoder of texts as a bundle. See TransformersModel for the arguments.

    It has programs for each of ``lengths`` at each batch size, and gives ``embedding``, f32 [rows, width], or without
    pooling ``last_hidden_state``, f32 [rows, tokens, width]. Raises BundleError subclasses, EngineMissing; then nothing
    is written.
    """
    described = TransformersModel(model, tokenizer, texts, pooling, normalize, lengths, examples)
    return described.export(
        directory, batch_sizes, layout=layout, tolerance=tolerance, provenance=provenance, force=force
    )


@contextmanager
def _saved(model: Any, tokenizer: Any) -> Iterator[Path]:
    """The folder of a model; one in memory is saved for as long as the context lasts."""
    if isinstance(model, str | Path):
        yield Path(model)
        return
    if not hasattr(model, "save_pretrained"):
        raise ExportError(
            f"the model is a {type(model).__name__}, expected a folder or a model with save_pretrained; export others "
            "with export_torch"
        )
    with tempfile.TemporaryDirectory() as folder:
        for part in filter(None, (model, tokenizer)):
            part.save_pretrained(folder)
        yield Path(folder)


class _Encoder:
    """All lengths of a model share this: what is computed, and where it was read."""

    def __init__(
        self,
        folder: Path,
        config: EncoderConfig,
        weights: StoredWeights,
        pooling: Pooling,
        dense: Sequence[Dense],
        *,
        normalize: bool,
    ) -> None:
        self.folder, self.config, self.weights = folder, config, weights
        self.pooling, self.dense, self.normalize = pooling, dense, normalize
        self.width = config.width
        for layer in dense:
            if layer.takes != self.width:
                raise ExportError(
                    f"{layer.name} takes vectors of {layer.takes} values, those before it have {self.width}; save the "
                    "model again"
                )
            self.weights = self.weights | layer.weights
            self.width = layer.width
        self._traced: Any = None

    @property
    def output(self) -> str:
        return "last_hidden_state" if self.pooling == "none" else "embedding"

    def call(self, ids: Any, mask: Any, *weights: Any) -> Any:
        """The result for ``ids`` and ``mask``, i64 [rows, tokens]."""
        from jax import numpy as jnp

        params, seen = dict(zip(self.weights, weights, strict=True)), mask != 0
        states = encode(self.config, params, ids.astype(jnp.int32), seen)
        return self._after(jnp, params, states, seen)

    def _after(self, np: Any, params: Mapping[str, Any], states: Any, seen: Any) -> Any:
        """What comes of the states of tokens; ``np`` is numpy or its like in JAX."""
        vectors = pool(np, states, seen, self.pooling)
        for layer in self.dense:
            vectors = vectors @ params[f"{layer.name}.weight"]
            if f"{layer.name}.bias" in layer.weights:
                vectors = vectors + params[f"{layer.name}.bias"]
            vectors = _activated(np, layer.activation, vectors)
        return normalized(np, vectors) if self.normalize else vectors

    def original(self) -> Run:
        """The model of the transformers library, where that is installed, else the function that is exported."""
        library = _transformers()
        if library is None:
            return self._function()
        import torch

        heads = {name: array for layer in self.dense for name, array in layer.weights.items()}
        model = library.AutoModel.from_pretrained(self.folder, local_files_only=True, dtype=torch.float32).eval()

        def run(inputs: list[Array]) -> list[Array]:
            ids, mask = (torch.from_numpy(array) for array in inputs)
            with torch.inference_mode():
                states = model(input_ids=ids, attention_mask=mask).last_hidden_state.numpy()
            return [self._after(np, heads, states, inputs[1] != 0)]

        return run

    def _function(self) -> Run:
        import jax

        jax.config.update("jax_enable_x64", True)
        cpu = jax.devices("cpu")[0]
        gc.collect()  # JAX leaves those of the length before in cycles
        weights = [jax.device_put(array, cpu) for array in self.weights.values()]
        if self._traced is None:
            # Traced anew, not from the cache of what was exported.
            self._traced = jax.jit(lambda *arrays: self.call(*arrays))
        traced = self._traced

        def run(inputs: list[Array]) -> list[Array]:
            with jax.default_device(cpu):
                return [np.asarray(traced(*inputs, *weights))]

        return run


class _Length:
    """An encoder at one number of tokens: a ProgramSource."""

    def __init__(self, encoder: _Encoder, ids: Array) -> None:
        """``ids``: examples, i64 [texts, tokens], cut to that number."""
        self._encoder = encoder
        self._tokens = ids.shape[1]
        self.examples = [np.ascontiguousarray(ids), (ids != encoder.config.padding).astype(np.int64)]
        self.inputs = [TensorSpec(name, "i64", (VARIABLE, self._tokens), 0) for name in (IDS, MASK)]
        self.weights = encoder.weights
        self.notes = () if _transformers() else (_NOT_COMPARED,)

    def outputs(self, size: int | None) -> list[TensorSpec]:
        width, rows = self._encoder.width, size or 1
        tokens = (self._tokens,) if self._encoder.pooling == "none" else ()
        return [TensorSpec(self._encoder.output, "f32", (rows, *tokens, width))]

    def module(self, size: int | None) -> bytes:
        import jax

        export = importlib.import_module("jax.export")
        jax.config.update("jax_enable_x64", True)  # ids are i64 as tokenizers make them
        rows = jax.ShapeDtypeStruct((size or 1, self._tokens), np.int64)
        weights = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in self.weights.values()]
        jitted = jax.jit(self._encoder.call, keep_unused=True)
        module: bytes = export.export(jitted, platforms=["cpu"])(rows, rows, *weights).mlir_module_serialized
        return module

    def original(self) -> Run:
        return self._encoder.original()


def compiled_lengths(asked: Sequence[int] | None, most: int, longest: int) -> list[int]:
    """The numbers of tokens to compile for, ascending. Raises ExportError."""
    if asked is None:
        ladder = [_SHORTEST << step for step in range(longest.bit_length())]
        return [*(length for length in ladder if length < longest), longest]
    if not asked or not all(type(length) is int and _LEAST <= length <= most for length in asked):
        raise ExportError(f"lengths are {list(asked)}, expected numbers of tokens from {_LEAST} to {most}")
    return sorted(set(asked))


def pool(np: Any, states: Any, seen: Any, pooling: Pooling) -> Any:
    """The vectors of texts, [rows, width], of those of their tokens; as sentence-transformers computes them.

    ``np`` is numpy or its like in JAX; ``states`` are f32 [rows, tokens, width], ``seen`` bool [rows, tokens].
    """
    if pooling == "none":
        return states
    weights = seen[..., None].astype(states.dtype)
    if pooling == "cls":
        return states[:, 0]
    if pooling == "max":
        return np.where(weights > 0, states, np.float32(_UNSEEN)).max(1)
    counts = np.maximum(weights.sum(1), np.float32(_FEWEST))
    return (states * weights).sum(1) / (counts if pooling == "mean" else np.sqrt(counts))


def normalized(np: Any, vectors: Any) -> Any:
    """Vectors of length one, as sentence-transformers makes them."""
    return vectors / np.maximum(np.sqrt((vectors * vectors).sum(-1, keepdims=True)), np.float32(_SHORTEST_VECTOR))


def _activated(np: Any, activation: str, vectors: Any) -> Any:
    """``vectors`` through one of ``transformers_folder.ACTIVATIONS``."""
    if activation == "Tanh":
        return np.tanh(vectors)
    return np.maximum(vectors, np.float32(0)) if activation == "ReLU" else vectors


# As sentence-transformers has them, for texts of which nothing is seen.
_UNSEEN, _FEWEST, _SHORTEST_VECTOR = -1e9, 1e-9, 1e-12
_LEAST = 2  # the tokens at the ends of a text


def _transformers() -> Any:
    """The library, None where it or torch is not installed."""
    try:
        importlib.import_module("torch")
        return importlib.import_module("transformers")
    except ImportError:
        return None


_NOT_COMPARED = (
    "transformers and torch are not both installed here: the bundle was compared with the function it was made of, "
    "not with the library's own model"
)
_ORIGIN = Origin("transformers", "nereid export_transformers", ("jax", "jaxlib", "numpy", "transformers"), encode)
