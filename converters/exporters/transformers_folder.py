"""Reader of a folder that ``transformers`` or ``sentence-transformers`` saved: configuration, weights, vocabulary.

Only JSON, safetensors and text are read; nothing of the folder runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np

from converters.bundle import Array
from converters.exporters.encoder import EncoderConfig, read_config
from nereid_backend import safetensors
from nereid_backend.builtins.bert_text import Encoder, read_vocabulary
from nereid_backend.errors import BundleError, ExportError

Pooling = Literal["mean", "cls", "max", "mean_sqrt_len", "none"]
"""What becomes of the vectors of a text's tokens: one vector, that of the first token for ``cls``; or all, for none."""

POOLINGS = get_args(Pooling)
WEIGHTS_FILE, CONFIG_FILE, VOCABULARY_FILE, TOKENIZER_FILE = (
    "model.safetensors",
    "config.json",
    "vocab.txt",
    "tokenizer.json",
)

_POOLING_KEYS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
}
_BERT_TOKENIZERS = (None, "BertTokenizer", "BertTokenizerFast", "DistilBertTokenizer", "DistilBertTokenizerFast")
# Each has once told two tokenizers apart: accents, ideographs, characters without width, long words, special tokens.
_TRICKY_TEXTS = (
    "",
    "D\u00e9j\u00e0 vu, na\u00efve \u00c5ngstr\u00f6m!",
    "\u4e2d\u6587 and \ud55c\uad6d\uc5b4",
    "zero\u200bwidth, nul\x00 and\ttab",
    "x" * 101 + " don't [MASK] --me",
)


@dataclass(frozen=True, slots=True)
class Head:
    """What sentence-transformers does to the vectors of tokens; None where the folder does not say."""

    pooling: Pooling | None
    normalize: bool
    longest: int | None
    encoder: Path


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A BERT vocabulary as vocab.txt has it, and the most tokens of a text, where the folder says."""

    file: bytes
    ids: Mapping[str, int]
    lowercase: bool
    longest: int | None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file. Raises ExportError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ExportError(
            f"{path.name} cannot be read as JSON ({type(error).__name__}); save the model again"
        ) from None
    if not isinstance(found, dict):
        raise ExportError(f"{path.name} is no JSON object; save the model again")
    return found


def read_head(folder: Path) -> Head:
    """What ``modules.json`` says of the way from tokens to a text's vector. Raises ExportError."""
    modules = _modules(folder)
    if not modules:
        return Head(None, False, None, folder)
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise ExportError(
            f"modules.json has {', '.join(kinds)}, expected Transformer, Pooling and perhaps Normalize; give a folder "
            "of the encoder alone and pooling"
        )
    encoder = folder / modules[0]["path"]
    settings = read_json(folder / modules[1]["path"] / CONFIG_FILE)
    modes = [name for key, name in _POOLING_KEYS.items() if settings.get(key)]
    modes += [
        key for key, on in settings.items() if key.startswith("pooling_mode_") and on and key not in _POOLING_KEYS
    ]
    if isinstance(mode := settings.get("pooling_mode"), str):
        modes = [mode]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ExportError(
            f"the configuration of Pooling asks for {modes or 'nothing'}, expected one of {', '.join(POOLINGS[:-1])}; "
            "give pooling"
        )
    longest = read_json(encoder / "sentence_bert_config.json").get("max_seq_length")
    return Head(cast(Pooling, modes[0]), "Normalize" in kinds, longest if type(longest) is int else None, encoder)


def _modules(folder: Path) -> list[dict[str, str]]:
    path = folder / "modules.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, list):
            raise TypeError
        modules = sorted(found, key=lambda module: module["idx"])
        inside = [Path(module["path"]) for module in modules]
        if not all(isinstance(module["type"], str) for module in modules):
            raise TypeError
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ExportError(f"modules.json cannot be read ({type(error).__name__}); save the model again") from None
    if any(path.is_absolute() or ".." in path.parts for path in inside):
        raise ExportError("modules.json names a path outside the folder; save the model again")
    return modules


class StoredWeights(Mapping[str, Array]):
    """Weights by name, read from the file when they are asked for, so that a model is never twice in memory."""

    def __init__(self, path: Path, stored: Mapping[str, str], config: EncoderConfig) -> None:
        """``stored``: the name in the file of each."""
        self._path, self._stored, self._config = path, stored, config

    def __getitem__(self, name: str) -> Array:
        """As ``encode`` wants it, C-contiguous and aligned, the caller's own. Raises WeightsError."""
        with safetensors.opened(self._path) as file:
            found = file.tensor(self._stored[name])
        return np.ascontiguousarray(found.T) if self._config.is_linear(name) else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def read_weights(folder: Path) -> tuple[EncoderConfig, StoredWeights]:
    """The configuration of an encoder and its f32 weights, by their names there. Raises BundleError subclasses."""
    settings = read_json(folder / CONFIG_FILE)
    if not settings:
        raise ExportError(
            f"{folder} has no {CONFIG_FILE}; give a folder that transformers or sentence-transformers saved"
        )
    config = read_config(settings)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise ExportError(
            f"{folder} has no {WEIGHTS_FILE}; save the model in one such file (save_pretrained with a large "
            "max_shard_size)"
        )
    entries = safetensors.read_header(path).entries
    # Old checkpoints call the two weights of a layer norm gamma and beta.
    there = {
        name.removeprefix(config.family.prefix)
        .replace("Norm.gamma", "Norm.weight")
        .replace("Norm.beta", "Norm.bias"): name
        for name in entries
    }
    names = config.weight_names()
    if missing := [name for name in names if name not in there]:
        raise ExportError(
            f"{WEIGHTS_FILE} lacks {missing[0]!r} and {len(missing) - 1} more that {CONFIG_FILE} needs; save the model "
            "again"
        )
    found = {name: entries[there[name]] for name in names}
    for name, entry in found.items():
        if entry.dtype.numpy != np.float32:
            raise ExportError(f"weight {name!r} is {entry.dtype.token}, expected f32; save model.float() instead")
    _check_shapes({name: entry.shape for name, entry in found.items()}, config)
    return config, StoredWeights(path, {name: there[name] for name in names}, config)


def _check_shapes(shapes: Mapping[str, tuple[int, ...]], config: EncoderConfig) -> None:
    """Raise ExportError where a weight has not the shape that the configuration gives it."""
    family, width = config.family, config.width
    inner = shapes[f"{family.up.format(0)}.bias"][:1]
    for name, shape in shapes.items():
        layer, _, kind = name.rpartition(".")
        if layer.endswith("embeddings"):
            least = {
                "embeddings.word_embeddings": config.vocabulary,
                "embeddings.position_embeddings": config.positions,
            }
            fits = len(shape) == 2 and shape[1] == width and shape[0] >= least.get(layer, 1)
        else:
            out = inner if _is_any(layer, family.up, config.layers) else (width,)
            of = inner if _is_any(layer, family.down, config.layers) else (width,)
            fits = shape == (out if kind == "bias" or "norm" in layer.lower() else (*out, *of))
        if not fits:
            raise ExportError(
                f"weight {name!r} has shape {list(shape)}, which does not fit {CONFIG_FILE}; save the model again"
            )


def _is_any(layer: str, name: str, layers: int) -> bool:
    return any(layer == name.format(index) for index in range(layers))


def read_tokenizer(folder: Path, texts: Sequence[str]) -> Vocabulary:
    """The vocabulary of a BERT tokenizer that ``bert_text`` can stand for; tried on ``texts`` where the folder allows.

    Raises ExportError for any other tokenizer, EngineMissing without the tokenizers library.
    """
    settings = read_json(folder / "tokenizer_config.json")
    whole = read_json(folder / TOKENIZER_FILE)
    file, ids = _tokens(folder, whole)
    lowercase = settings.get("do_lower_case", True) is not False
    longest = settings.get("model_max_length")
    found = Vocabulary(file, ids, lowercase, longest if type(longest) is int and longest < 2**31 else None)
    kind = settings.get("tokenizer_class")
    if whole:
        _compare(folder / TOKENIZER_FILE, found, [*texts, *_TRICKY_TEXTS])
    elif kind not in _BERT_TOKENIZERS or settings.get("strip_accents") not in (None, lowercase):
        raise ExportError(_OTHER_TOKENIZER.format(f"is a {kind or 'tokenizer with strip_accents of its own'}"))
    return found


_OTHER_TOKENIZER = (
    "the tokenizer {}, which is not that of BERT; export the model with texts=False, and let clients send token ids"
)


def _tokens(folder: Path, whole: Mapping[str, Any]) -> tuple[bytes, dict[str, int]]:
    """The vocabulary as a file, and its tokens with their ids."""
    path = folder / VOCABULARY_FILE
    if path.is_file():
        try:
            return path.read_bytes(), read_vocabulary(path)
        except BundleError as error:
            raise ExportError(str(error)) from None
    model = whole.get("model")
    ids = model.get("vocab") if isinstance(model, dict) and model.get("type") == "WordPiece" else None
    if not isinstance(ids, dict):
        raise ExportError(_OTHER_TOKENIZER.format(f"has no {VOCABULARY_FILE} and no word pieces"))
    if sorted(ids.values()) != list(range(len(ids))) or any({"\n", "\r"} & set(token) for token in ids):
        raise ExportError(f"{TOKENIZER_FILE} has a vocabulary that is no list of lines; save the tokenizer again")
    return "".join(f"{token}\n" for token in sorted(ids, key=ids.__getitem__)).encode(), ids


def _compare(path: Path, found: Vocabulary, texts: Sequence[str]) -> None:
    """Raise ExportError unless the folder's own tokenizer gives the same ids."""
    ours = Encoder(dict(found.ids), _NO_LIMIT, lowercase=found.lowercase)
    import tokenizers

    try:
        own = tokenizers.Tokenizer.from_file(str(path))
        own.no_truncation()
        own.no_padding()
        for text, (row, _) in zip(texts, ours.encode(texts), strict=True):
            if own.encode(text).ids != row:
                raise ExportError(_OTHER_TOKENIZER.format(f"gives other tokens for {text[:40]!r}"))
    except ExportError:
        raise
    except Exception as error:
        # The library raises nothing narrower for a file it cannot read.
        raise ExportError(f"{path.name} cannot be used ({error}); save the tokenizer again") from error


_NO_LIMIT = 10**6
