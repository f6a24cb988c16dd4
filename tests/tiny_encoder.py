"""A made-up encoder of texts as sentence-transformers saves one, and the same computed by torch's own layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from converters import weights as weights_files

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "man", "is", "eat", "##ing", "food", "bread", "!", "Paris"]
WIDTH, HEADS, INNER, POSITIONS = 8, 2, 12, 24
EPSILON = 1e-3

CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {
        "architectures": ["BertModel"],
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "hidden_act": "gelu",
        "layer_norm_eps": EPSILON,
        "type_vocab_size": 2,
        "pad_token_id": 0,
    },
    "distilbert": {"dim": WIDTH, "n_heads": HEADS, "hidden_dim": INNER, "activation": "gelu"},
}
CONFIGS["roberta"] = {**CONFIGS["bert"], "architectures": ["RobertaModel"], "pad_token_id": 1, "type_vocab_size": 1}
_LAYER = {
    "bert": (
        "encoder.layer.{}.",
        {
            "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
            "out": "attention.output.dense", "norm1": "attention.output.LayerNorm",
            "linear1": "intermediate.dense", "linear2": "output.dense", "norm2": "output.LayerNorm",
        },
    ),
    "distilbert": (
        "transformer.layer.{}.",
        {
            "q": "attention.q_lin", "k": "attention.k_lin", "v": "attention.v_lin", "out": "attention.out_lin",
            "norm1": "sa_layer_norm", "linear1": "ffn.lin1", "linear2": "ffn.lin2", "norm2": "output_layer_norm",
        },
    ),
}  # fmt: skip
_LAYER["roberta"] = _LAYER["bert"]


def write_encoder(
    folder: Path,
    kind: str = "bert",
    *,
    pooling: str | None = "mean",
    normalize: bool = True,
    prefix: str = "",
    longest: int | None = 16,
    layers: int = 1,
    old_names: bool = False,
    **config: Any,
) -> dict[str, np.ndarray]:
    """Write a model folder and give its weights. Without ``pooling`` it has no modules.json, as from transformers."""
    folder.mkdir(parents=True)
    weights = _weights(kind, layers)
    counted = "n_layers" if kind == "distilbert" else "num_hidden_layers"
    settings = {
        "model_type": kind,
        counted: layers,
        "max_position_embeddings": POSITIONS,
        "vocab_size": len(WORDS),
        **CONFIGS[kind],
    }
    _write_json(folder / "config.json", {**settings, **config})
    stored = {prefix + name: array for name, array in weights.items()}
    if old_names:  # as the first checkpoints have them
        stored = {
            n.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): a for n, a in stored.items()
        }
    stored["classifier.weight"] = np.zeros((2, WIDTH), np.float32)  # a head that nobody asked for
    weights_files.write(folder / "model.safetensors", stored, {"format": "pt"})
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "do_lower_case": True})
    if pooling is None:
        return weights
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [{"idx": i, "path": paths[i], "type": f"sentence_transformers.models.{k}"} for i, k in enumerate(kinds)]
    _write_json(folder / "modules.json", modules)
    (folder / "1_Pooling").mkdir()
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    _write_json(
        folder / "1_Pooling" / "config.json",
        {f"pooling_mode_{m}": m.startswith(pooling + "_") and m.count("_") == pooling.count("_") + 1 for m in modes},
    )
    if longest is not None:
        _write_json(folder / "sentence_bert_config.json", {"max_seq_length": longest})
    return weights


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def _weights(kind: str, layers: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    weights = {
        "embeddings.word_embeddings.weight": drawn(len(WORDS), WIDTH),
        "embeddings.position_embeddings.weight": drawn(POSITIONS, WIDTH),
        "embeddings.LayerNorm.weight": drawn(WIDTH),
        "embeddings.LayerNorm.bias": drawn(WIDTH),
    }
    if kind != "distilbert":
        weights["embeddings.token_type_embeddings.weight"] = drawn(CONFIGS[kind]["type_vocab_size"], WIDTH)
    stem, names = _LAYER[kind]
    for layer in range(layers):
        for role, name in names.items():
            out, of = {"linear1": (INNER, WIDTH), "linear2": (WIDTH, INNER)}.get(role, (WIDTH, WIDTH))
            full = stem.format(layer) + name
            weights[f"{full}.weight"] = drawn(WIDTH) if role.startswith("norm") else drawn(out, of)
            weights[f"{full}.bias"] = drawn(out)
    return weights


def states_by_torch(kind: str, weights: Mapping[str, np.ndarray], ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The last hidden states, [rows, tokens, WIDTH], of torch.nn.TransformerEncoderLayer with these weights."""
    import torch

    def tensor(name: str) -> Any:
        return torch.from_numpy(weights[name].copy())

    epsilon = 1e-12 if kind == "distilbert" else EPSILON
    places = np.arange(ids.shape[1])[None].repeat(len(ids), 0)
    if kind == "roberta":
        places = np.cumsum(ids != 1, 1) * (ids != 1) + 1
    states = tensor("embeddings.word_embeddings.weight")[torch.from_numpy(ids)]
    states = states + tensor("embeddings.position_embeddings.weight")[torch.from_numpy(places)]
    if kind != "distilbert":
        states = states + tensor("embeddings.token_type_embeddings.weight")[0]
    norm = [tensor(f"embeddings.LayerNorm.{name}") for name in ("weight", "bias")]
    states = torch.nn.functional.layer_norm(states, (WIDTH,), *norm, epsilon)
    stem, names = _LAYER[kind]
    for index in range(sum(name.endswith(f".{names['linear1']}.weight") for name in weights)):
        parts = {role: stem.format(index) + name for role, name in names.items()}
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, HEADS, INNER, dropout=0, activation="gelu", layer_norm_eps=epsilon, batch_first=True
        ).eval()
        state = {
            f"self_attn.in_proj_{end}": torch.cat([tensor(f"{parts[role]}.{end}") for role in "qkv"])
            for end in ("weight", "bias")
        }
        for role, own in (("out", "self_attn.out_proj"), *((r, r) for r in ("linear1", "linear2", "norm1", "norm2"))):
            state |= {f"{own}.{end}": tensor(f"{parts[role]}.{end}") for end in ("weight", "bias")}
        layer.load_state_dict(state)
        with torch.no_grad():
            states = layer(states, src_key_padding_mask=torch.from_numpy(mask == 0))
    return np.asarray(states.numpy())


def pooled(states: np.ndarray, mask: np.ndarray, pooling: str, *, normalize: bool) -> np.ndarray:
    """One vector per row, row by row."""
    vectors = []
    for row, seen in zip(states, mask != 0, strict=True):
        tokens = row[seen]
        vector = {
            "mean": lambda t=tokens: t.mean(0),
            "cls": lambda t=tokens: t[0],
            "max": lambda t=tokens: t.max(0),
            "mean_sqrt_len": lambda t=tokens: t.sum(0) / np.sqrt(len(t)),
        }[pooling]()
        vectors.append(vector / np.linalg.norm(vector) if normalize else vector)
    return np.array(vectors)
