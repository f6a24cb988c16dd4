"""Encoders of the BERT family as JAX functions: what config.json and the names of the weights say.

The architectures are those of the papers (BERT: arXiv 1810.04805, RoBERTa: 1907.11692, DistilBERT: 1910.01108) with the
names and options of the ``transformers`` library's configurations. Weights keep their names there, and all but those of
linear layers their layout: these are [in, out] here, as XLA multiplies them. It turned others at every call, an eighth
of MiniLM's time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nereid_backend.errors import ExportError

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish")


@dataclass(frozen=True, slots=True)
class Family:
    """Where architectures of one kind differ: names of weights, ``{}`` being the layer, and of options.

    ``prefix`` is what a model with a head puts before its encoder's names. ``attended`` and ``fed`` are the layer norms
    after the two halves of a layer. ``offset``: positions are counted from the padding id + 1, over the tokens that are
    no padding.
    """

    prefix: str
    query: str
    key: str
    value: str
    output: str
    attended: str
    up: str
    down: str
    fed: str
    width: str = "hidden_size"
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    activation: str = "hidden_act"
    typed: bool = True
    offset: bool = False


def _bert(prefix: str, *, offset: bool = False) -> Family:
    layer = "encoder.layer.{}."
    return Family(
        prefix=prefix,
        query=f"{layer}attention.self.query",
        key=f"{layer}attention.self.key",
        value=f"{layer}attention.self.value",
        output=f"{layer}attention.output.dense",
        attended=f"{layer}attention.output.LayerNorm",
        up=f"{layer}intermediate.dense",
        down=f"{layer}output.dense",
        fed=f"{layer}output.LayerNorm",
        offset=offset,
    )


FAMILIES = {
    "bert": _bert("bert."),
    "roberta": _bert("roberta.", offset=True),
    "xlm-roberta": _bert("roberta.", offset=True),
    "distilbert": Family(
        prefix="distilbert.",
        query="transformer.layer.{}.attention.q_lin",
        key="transformer.layer.{}.attention.k_lin",
        value="transformer.layer.{}.attention.v_lin",
        output="transformer.layer.{}.attention.out_lin",
        attended="transformer.layer.{}.sa_layer_norm",
        up="transformer.layer.{}.ffn.lin1",
        down="transformer.layer.{}.ffn.lin2",
        fed="transformer.layer.{}.output_layer_norm",
        width="dim",
        layers="n_layers",
        heads="n_heads",
        activation="activation",
        typed=False,
    ),
}
"""By ``model_type`` of config.json."""


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """What config.json says about the computation."""

    family: Family
    width: int
    layers: int
    heads: int
    positions: int
    vocabulary: int
    activation: str
    epsilon: float
    padding: int

    @property
    def longest(self) -> int:
        """The most tokens that there are positions for."""
        return self.positions - (self.padding + 1 if self.family.offset else 0)

    def weight_names(self) -> list[str]:
        """The names of all weights that ``encode`` reads, in the order of the computation."""
        family = self.family
        embeddings = ["word_embeddings", "position_embeddings", *(["token_type_embeddings"] if family.typed else [])]
        attention = (family.query, family.key, family.value, family.output, family.attended)
        layer = (*attention, family.up, family.down, family.fed)
        both = ["embeddings.LayerNorm", *(name.format(index) for index in range(self.layers) for name in layer)]
        return [f"embeddings.{n}.weight" for n in embeddings] + [f"{n}.{w}" for n in both for w in ("weight", "bias")]

    def is_linear(self, name: str) -> bool:
        """Whether ``name``, one of ``weight_names``, is the matrix of a linear layer."""
        layer, _, kind = name.rpartition(".")
        return kind == "weight" and not layer.startswith("embeddings") and "norm" not in layer.lower()


def read_config(config: Mapping[str, Any]) -> EncoderConfig:
    """Check a config.json. Raises ExportError for what ``encode`` does not compute."""
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise ExportError(
            f"config.json has model_type {kind!r}; encoders of the kinds {', '.join(FAMILIES)} can be exported, others "
            "with export_torch"
        )
    for key, known in (("position_embedding_type", "absolute"), ("is_decoder", False), ("add_cross_attention", False)):
        if config.get(key, known) not in (known, None):
            raise ExportError(
                f"config.json has {key} {config[key]!r}, only {known!r} is computed here; use export_torch"
            )
    activation = config.get(family.activation, "gelu")
    if activation not in ACTIVATIONS:
        raise ExportError(
            f"config.json has {family.activation} {activation!r}, expected one of {', '.join(ACTIVATIONS)}; use "
            "export_torch"
        )
    keys = (family.width, family.layers, family.heads, "max_position_embeddings", "vocab_size")
    width, layers, heads, positions, vocabulary = (_count(config, key) for key in keys)
    if width % heads:
        raise ExportError(f"config.json: {family.heads} {heads} does not divide {family.width} {width}; correct it")
    padding = config.get("pad_token_id") or 0
    epsilon = config.get("layer_norm_eps", 1e-12)
    return EncoderConfig(family, width, layers, heads, positions, vocabulary, activation, float(epsilon), int(padding))


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise ExportError(f"config.json has {key} {value!r}, expected a positive integer; correct it")
    return value


def encode(config: EncoderConfig, params: Mapping[str, Any], ids: Any, mask: Any) -> Any:
    """The last hidden states, f32 [rows, tokens, width], of ``ids``, [rows, tokens]; ``mask`` is bool, true to see.

    A row of which nothing is to be seen has finite states, that mean nothing.
    """
    from jax import numpy as jnp

    family = config.family
    rows, tokens = ids.shape
    states = params["embeddings.word_embeddings.weight"][ids]
    positions = params["embeddings.position_embeddings.weight"]
    if family.offset:
        present = (ids != config.padding).astype(jnp.int32)
        states += positions[jnp.cumsum(present, 1) * present + config.padding]
    else:
        states += positions[:tokens]
    if family.typed:
        states += params["embeddings.token_type_embeddings.weight"][0]
    states = _normed(params, "embeddings.LayerNorm", states, config.epsilon)
    hidden = jnp.where(mask, 0, jnp.finfo(states.dtype).min)[:, None, None, :]

    def split(states: Any) -> Any:
        return states.reshape(rows, tokens, config.heads, config.width // config.heads)

    for index in range(config.layers):

        def linear(name: str, states: Any, index: int = index) -> Any:
            name = name.format(index)
            return states @ params[f"{name}.weight"] + params[f"{name}.bias"]

        query, key, value = (split(linear(name, states)) for name in (family.query, family.key, family.value))
        seen = _attended(query, key, value, hidden).reshape(states.shape)
        states = _normed(params, family.attended.format(index), states + linear(family.output, seen), config.epsilon)
        fed = linear(family.down, _activated(config.activation, linear(family.up, states)))
        states = _normed(params, family.fed.format(index), states + fed, config.epsilon)
    return states


def _attended(query: Any, key: Any, value: Any, hidden: Any) -> Any:
    """Attention, [rows, tokens, heads, d], of such tensors; ``hidden`` is added to the scores.

    The softmax's sum divides the result, which is smaller than the scores, and these are not written once more.
    """
    from jax import numpy as jnp

    scores = jnp.einsum("rqhd,rkhd->rhqk", query / query.shape[-1] ** 0.5, key) + hidden
    shares = jnp.exp(scores - scores.max(-1, keepdims=True))
    return (jnp.einsum("rhqk,rkhd->rhqd", shares, value) / shares.sum(-1, keepdims=True)).transpose(0, 2, 1, 3)


def _activated(activation: str, states: Any) -> Any:
    from jax import nn

    if activation == "relu":
        return nn.relu(states)
    if activation in ("silu", "swish"):
        return nn.silu(states)
    return nn.gelu(states, approximate=activation != "gelu")


def _normed(params: Mapping[str, Any], name: str, states: Any, epsilon: float) -> Any:
    from jax import lax

    mean = states.mean(-1, keepdims=True)
    spread = ((states - mean) ** 2).mean(-1, keepdims=True)
    scaled = (states - mean) * lax.rsqrt(spread + epsilon)
    return scaled * params[f"{name}.weight"] + params[f"{name}.bias"]
