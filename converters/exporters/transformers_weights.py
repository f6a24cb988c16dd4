"""Reader of the weights that ``transformers`` saved: one safetensors file or several with an index, in f32 or less."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from converters.bundle import Array
from converters.exporters.encoder import EncoderConfig, read_config
from converters.exporters.settings_file import read_json
from nereid_backend import safetensors
from nereid_backend.errors import ExportError

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
_HELD_EXACTLY = ("f32", "f16", "bf16")
"""What f32, in which encoders are computed, has every value of."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file; ``turned`` when it is to be transposed: linear layers are [out, in] in files."""

    path: Path
    name: str
    shape: tuple[int, ...]
    turned: bool

    def read(self) -> Array:
        """In f32, C-contiguous and aligned, the caller's own. Raises WeightsError."""
        with safetensors.opened(self.path) as file:
            found = file.tensor(self.name)
            if not file.header.entries[self.name].dtype.in_numpy:
                # bf16: the upper half of an f32, whatever numpy calls it.
                found = (found.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        if not self.turned and found.dtype == np.float32:
            return found
        target = safetensors.aligned_empty(found.size * 4).view(np.float32)
        target = target.reshape(found.shape[::-1] if self.turned else found.shape)
        target[...] = found.T if self.turned else found
        return target


class StoredWeights(Mapping[str, Array]):
    """Weights by name, read from their files when they are asked for, so that a model is never twice in memory."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> Array:
        return self._stored[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __or__(self, more: StoredWeights) -> StoredWeights:
        return StoredWeights({**self._stored, **more._stored})


def read_weights(folder: Path) -> tuple[EncoderConfig, StoredWeights]:
    """The configuration of an encoder and its weights, by their names there. Raises BundleError subclasses."""
    settings = read_json(folder / CONFIG_FILE)
    if not settings:
        raise ExportError(
            f"{folder} has no {CONFIG_FILE}; give a folder that transformers or sentence-transformers saved"
        )
    config = read_config(settings)
    entries = _entries(folder)
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
    stored = {name: _stored(*entries[there[name]], there[name], turned=config.is_linear(name)) for name in names}
    _check_shapes({name: tensor.shape for name, tensor in stored.items()}, config)
    return config, StoredWeights(stored)


def read_linear(folder: Path, name: str, wide: int, out: int, *, bias: bool) -> StoredWeights:
    """The weights of a head's linear layer, [wide, out] and [out], as ``NAME.weight`` and ``NAME.bias``."""
    entries = _entries(folder)
    shapes = {"weight": (out, wide), **({"bias": (out,)} if bias else {})}
    stored = {}
    for kind, shape in shapes.items():
        if (inside := f"linear.{kind}") not in entries:
            raise ExportError(f"{folder.name}/{WEIGHTS_FILE} lacks {inside!r}; save the model again")
        found = _stored(*entries[inside], inside, turned=kind == "weight")
        if found.shape != shape:
            raise ExportError(
                f"{folder.name}: {inside!r} has shape {list(found.shape)}, {CONFIG_FILE} says {list(shape)}; save the "
                "model again"
            )
        stored[f"{name}.{kind}"] = found
    return StoredWeights(stored)


def _stored(path: Path, entry: safetensors.Entry, name: str, *, turned: bool) -> StoredTensor:
    if entry.dtype.token not in _HELD_EXACTLY:
        raise ExportError(
            f"weight {name!r} is {entry.dtype.token}, expected {' or '.join(_HELD_EXACTLY)}; save model.float() instead"
        )
    return StoredTensor(path, name, entry.shape, turned)


def _entries(folder: Path) -> dict[str, tuple[Path, safetensors.Entry]]:
    """By a tensor's name, the file that it is in and where. Raises ExportError, WeightsError."""
    if (folder / WEIGHTS_FILE).is_file():
        paths = [folder / WEIGHTS_FILE]
    elif (folder / INDEX_FILE).is_file():
        paths = [folder / name for name in _indexed(folder)]
    else:
        raise ExportError(f"{folder} has no {WEIGHTS_FILE} and no {INDEX_FILE}; save the model with save_pretrained")
    found: dict[str, tuple[Path, safetensors.Entry]] = {}
    for path in paths:
        for name, entry in safetensors.read_header(path).entries.items():
            if name in found:
                raise ExportError(f"weight {name!r} is in {found[name][0].name} and in {path.name}; save it once")
            found[name] = path, entry
    return found


def _indexed(folder: Path) -> list[str]:
    """The files that the index names, all of them beside it."""
    places = read_json(folder / INDEX_FILE).get("weight_map")
    names = list(places.values()) if isinstance(places, dict) else []
    if not names or not all(isinstance(name, str) and name.endswith(".safetensors") for name in names):
        raise ExportError(f"{INDEX_FILE} has no weight_map to safetensors files; save the model again")
    if outside := [name for name in names if Path(name).name != name]:
        raise ExportError(f"{INDEX_FILE} names {outside[0]!r}, which is not in its folder; save the model again")
    return sorted(set(names))


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
