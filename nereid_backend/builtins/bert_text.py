"""``bert_text``: UTF-8 texts become the token ids of a BERT vocabulary.

The bundle format has no strings: texts travel as u8 [rows, bytes], zero-padded, beside their lengths in bytes, i32
[rows]. For pairs one ``query``, u8 [bytes], goes with every row. Normalization, word pieces, truncation and the special
tokens are those of BERT (the ``tokenizers`` library); rows are padded to the smallest bucket that holds the longest of
the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from nereid_backend.builtins import PREPROCESS, Array, Arrays, Builtin, put
from nereid_backend.errors import BundleError, EngineMissing, InvalidArgument
from nereid_backend.spec import VARIABLE, TensorSpec

_UNKNOWN, _START, _END, _PADDING, _MASK = "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"
_REQUIRED = (_UNKNOWN, _START, _END, _PADDING)
_LONGEST_WORD = 100  # characters; a longer one is unknown


@dataclass(frozen=True, slots=True)
class BertText(Builtin):
    """Feed ``ids``, ``mask`` and ``types`` (those the executable has) from ``texts``, or from ``query`` and ``texts``.

    ``vocab`` is a file with one token per line. Texts are cut to ``max_length`` tokens (the largest bucket).
    ``buckets`` are the numbers of tokens to pad to (all that are compiled). ``dtype`` is the executable's. Without
    ``lowercase`` capitals and accents stay, as cased vocabularies have them.
    """

    vocab: str
    texts: str = "texts"
    lengths: str = "text_lens"
    query: str | None = None
    ids: str = "input_ids"
    mask: str = "attention_mask"
    types: str = "token_type_ids"
    buckets: tuple[int, ...] = ()
    max_length: int | None = None
    dtype: str | None = None
    lowercase: bool = True

    name: ClassVar[str] = "bert_text"
    stage: ClassVar[str] = PREPROCESS

    def fitted(self, variants: Sequence[Sequence[TensorSpec]]) -> Self:
        ids = self.find(variants[0], self.ids)
        for tensor in variants[0]:
            if ids.dtype not in ("i64", "i32") or len(ids.shape) != 2 or ids.batch_axis != 0:
                raise BundleError(
                    f"bert_text: {ids.name!r} is {ids.dtype}{list(ids.shape)}; it must be i64 or i32 of wire shape "
                    "[rows, tokens]"
                )
            if tensor.name in (self.mask, self.types) and replace(tensor, name=ids.name) != ids:
                raise BundleError(f"bert_text: {tensor.name!r} must have the dtype and the shape of {ids.name!r}")
        compiled = sorted({self.find(tensors, self.ids).shape[1] for tensors in variants})
        buckets = self.buckets or tuple(compiled)
        if list(buckets) != sorted(set(buckets)) or not set(buckets) <= set(compiled):
            raise BundleError(
                f"bert_text: buckets must be ascending numbers of tokens that {ids.name!r} is compiled for, which are "
                f"{compiled}; got {list(buckets)}"
            )
        longest = buckets[-1] if self.max_length is None else self.max_length
        least = 2 if self.query is None else 3
        if not least <= longest <= buckets[-1]:
            raise BundleError(f"bert_text: max_length must be {least} to {buckets[-1]}, got {longest}")
        return replace(self, buckets=buckets, max_length=longest, dtype=ids.dtype)

    def tensors(self, others: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        kept = [tensor for tensor in others if tensor.name not in (self.ids, self.mask, self.types)]
        query = [] if self.query is None else [TensorSpec(self.query, "u8", (VARIABLE,))]
        texts = TensorSpec(self.texts, "u8", (VARIABLE, VARIABLE), 0)
        return put(kept, *query, texts, TensorSpec(self.lengths, "i32", (VARIABLE,), 0))

    def files(self) -> tuple[str, ...]:
        return (self.vocab,)

    def check(self, directory: Path) -> None:
        read_vocabulary(directory / self.vocab)

    def open(self, directory: Path) -> Callable[[Arrays], Arrays]:
        longest = self.max_length or self.buckets[-1]
        encoder = Encoder(read_vocabulary(directory / self.vocab), longest, lowercase=self.lowercase)

        def encoded(arrays: Arrays) -> Arrays:
            texts = _texts(arrays, self.texts, self.lengths)
            if self.query is None:
                rows = encoder.encode(texts)
            else:
                query = _text(arrays[self.query].tobytes(), self.query)
                rows = encoder.encode_pairs(query, texts)
            return {**arrays, **self._padded(rows, encoder.padding)}

        return encoded

    def _padded(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], padding: int) -> Arrays:
        width = bucket(max((len(ids) for ids, _ in rows), default=0), self.buckets)
        ids = np.full((len(rows), width), padding, np.int32 if self.dtype == "i32" else np.int64)
        mask, types = np.zeros_like(ids), np.zeros_like(ids)
        for index, (row, sides) in enumerate(rows):
            ids[index, : len(row)], mask[index, : len(row)], types[index, : len(row)] = row, 1, sides
        return {self.ids: ids, self.mask: mask, self.types: types}


class Encoder:
    """A tokenizer of one vocabulary; threads may share it."""

    def __init__(self, vocabulary: dict[str, int], max_length: int, *, lowercase: bool = True) -> None:
        """Sequences are cut to ``max_length`` tokens, the special ones included. Raises EngineMissing."""
        try:
            import tokenizers
            from tokenizers import models, normalizers, pre_tokenizers, processors
        except ImportError as error:
            raise EngineMissing(
                f"built-in bert_text needs tokenizers, which this Python cannot import ({error}); install it with: "
                "pip install 'nereid-triton[text]'"
            ) from None
        words = models.WordPiece(vocabulary, unk_token=_UNKNOWN, max_input_chars_per_word=_LONGEST_WORD)
        tokenizer: Any = tokenizers.Tokenizer(words)
        tokenizer.normalizer = normalizers.BertNormalizer(
            clean_text=True, handle_chinese_chars=True, strip_accents=lowercase, lowercase=lowercase
        )
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.add_special_tokens([token for token in (*_REQUIRED, _MASK) if token in vocabulary])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{_START} $A {_END}",
            pair=f"{_START} $A {_END} $B:1 {_END}:1",
            special_tokens=[(token, vocabulary[token]) for token in (_START, _END)],
        )
        tokenizer.enable_truncation(max_length, strategy="longest_first")
        self._tokenizer = tokenizer
        self.padding = vocabulary[_PADDING]

    def encode(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Ids and type ids of each text."""
        return [(row.ids, row.type_ids) for row in self._tokenizer.encode_batch(list(texts))]

    def encode_pairs(self, query: str, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Ids and type ids of ``query`` with each text; alone where a text is empty."""
        pairs = [(query, text) if text else query for text in texts]
        return [(row.ids, row.type_ids) for row in self._tokenizer.encode_batch(pairs)]


def bucket(length: int, buckets: Sequence[int]) -> int:
    """The smallest of the ascending ``buckets`` that holds ``length``; the largest when none does."""
    return next((size for size in buckets if size >= length), buckets[-1])


def read_vocabulary(path: Path) -> dict[str, int]:
    """Token to id: the number of its line, from 0. Raises BundleError."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"bert_text: {path.name} cannot be read as UTF-8 text ({type(error).__name__})") from None
    if lines[-1] == "":
        lines.pop()
    vocabulary = {line.rstrip("\r"): index for index, line in enumerate(lines)}
    if missing := [token for token in _REQUIRED if token not in vocabulary]:
        raise BundleError(f"bert_text: {path.name} lacks {missing}; it must be a BERT vocabulary, one token per line")
    return vocabulary


def _texts(arrays: Arrays, texts: str, lengths: str) -> list[str]:
    rows, sizes = arrays[texts], arrays[lengths]
    if len(rows) != len(sizes):
        raise InvalidArgument(f"input {texts!r} has {len(rows)} rows, {lengths!r} has {len(sizes)}")
    if sizes.size and not (sizes.min() >= 0 and sizes.max() <= rows.shape[1]):
        raise InvalidArgument(
            f"input {lengths!r} must be 0 to {rows.shape[1]}, the width of {texts!r}; got {_range(sizes)}"
        )
    return [_text(row[:size].tobytes(), texts) for row, size in zip(rows, sizes.tolist(), strict=True)]


def _range(sizes: Array) -> str:
    return f"{int(sizes.min())} to {int(sizes.max())}"


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"input {name!r} is not UTF-8 text (byte {error.start})") from None
