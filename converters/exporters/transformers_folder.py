"""Reader of a folder that ``transformers`` or ``sentence-transformers`` saved: what is around the encoder, vocabulary.

Only JSON, safetensors and text are read; nothing of the folder runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from converters.exporters.settings_file import read_json
from converters.exporters.transformers_weights import CONFIG_FILE, StoredWeights, read_linear
from nereid_backend.builtins.bert_text import Encoder, read_vocabulary
from nereid_backend.errors import BundleError, ExportError

Pooling = Literal["mean", "cls", "max", "mean_sqrt_len", "none"]
"""What becomes of the vectors of a text's tokens: one vector, that of the first token for ``cls``; or all, for none."""

POOLINGS = get_args(Pooling)
VOCABULARY_FILE, TOKENIZER_FILE = "vocab.txt", "tokenizer.json"
ACTIVATIONS = ("Identity", "Tanh", "ReLU")
"""torch's, by the names of their classes."""

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
class Dense:
    """A layer over the vectors of texts; ``name`` is that of its weights, ``width`` of its result."""

    name: str
    weights: StoredWeights
    takes: int
    width: int
    activation: str


@dataclass(frozen=True, slots=True)
class Head:
    """What sentence-transformers does to the vectors of tokens; None where the folder does not say."""

    pooling: Pooling | None
    normalize: bool
    longest: int | None
    encoder: Path
    dense: Sequence[Dense] = ()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A BERT vocabulary as vocab.txt has it, and the most tokens of a text, where the folder says."""

    file: bytes
    ids: Mapping[str, int]
    lowercase: bool
    longest: int | None


def read_head(folder: Path) -> Head:
    """What ``modules.json`` says of the way from tokens to a text's vector. Raises ExportError."""
    modules = _modules(folder)
    if not modules:
        return Head(None, False, None, folder)
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    heads = [module for module, kind in zip(modules, kinds, strict=True) if kind == "Dense"]
    after = kinds[2 + len(heads) :]
    if kinds != ["Transformer", "Pooling", *(["Dense"] * len(heads)), *after] or after not in ([], ["Normalize"]):
        raise ExportError(
            f"modules.json has {', '.join(kinds)}, expected Transformer, Pooling and perhaps Dense and Normalize; give "
            "a folder of the encoder alone and pooling"
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
    dense = [_read_dense(folder / module["path"], f"dense.{index}") for index, module in enumerate(heads)]
    pooling = cast(Pooling, modes[0])
    return Head(pooling, "Normalize" in kinds, longest if type(longest) is int else None, encoder, dense)


def _read_dense(folder: Path, name: str) -> Dense:
    settings = read_json(folder / CONFIG_FILE)
    takes, width, bias = (settings.get(key) for key in ("in_features", "out_features", "bias"))
    activation = str(settings.get("activation_function", "")).rpartition(".")[2]
    sizes = (takes, width)
    if not all(type(size) is int and size > 0 for size in sizes) or type(bias) is not bool:
        raise ExportError(
            f"{folder.name}/{CONFIG_FILE} has in_features {takes!r}, out_features {width!r} and bias {bias!r}, "
            "expected two positive integers and true or false; save the model again"
        )
    if activation not in ACTIVATIONS:
        raise ExportError(
            f"{folder.name}/{CONFIG_FILE} has activation_function {activation!r}, expected one of "
            f"{', '.join(ACTIVATIONS)}; export the model with export_torch"
        )
    takes, width = cast(tuple[int, int], sizes)
    weights = read_linear(folder, name, takes, width, bias=bias)
    return Dense(name, weights, takes, width, activation)


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
