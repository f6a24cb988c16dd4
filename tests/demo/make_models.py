"""Make the demo's models under a folder: a trained bundle, a real ONNX file, a nereid folder, a pipeline.

usage: python make_models.py BUNDLES
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import strips
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.model_selection import train_test_split

from converters.exporters import export_jax

BATCH_SIZES = (1, 8, 32)
LAYERS = (64, 48, 10)
ARGUMENTS = ("dense0/kernel", "dense0/bias", "dense1/kernel", "dense1/bias")
MAGIKA = "models/standard_v3_3"
READER = Path(__file__).with_name("reader")


def classify(pixels: jax.Array, *parameters: jax.Array) -> jax.Array:
    """Class probabilities f32[n, 10] of images f32[n, 64] with values 0 to 16."""
    kernel0, bias0, kernel1, bias1 = parameters
    hidden = jax.nn.relu(pixels / 16 @ kernel0 + bias0)
    return jax.nn.softmax(hidden @ kernel1 + bias1)


def first_parameters(layers: Sequence[int]) -> list[jax.Array]:
    """A random kernel and a zero bias per layer."""
    rng = np.random.default_rng(0)
    parameters = []
    for fan_in, fan_out in pairwise(layers):
        kernel = rng.normal(0, np.sqrt(2 / fan_in), (fan_in, fan_out))
        parameters += [jnp.asarray(kernel, jnp.float32), jnp.zeros(fan_out, jnp.float32)]
    return parameters


def train(images: np.ndarray, labels: np.ndarray) -> list[jax.Array]:
    """Full-batch gradient descent with momentum; about two seconds on one core."""
    parameters = first_parameters(LAYERS)
    targets = jax.nn.one_hot(labels, LAYERS[-1])

    def loss(values: list[jax.Array]) -> jax.Array:
        return -jnp.mean(jnp.sum(targets * jnp.log(classify(images, *values) + 1e-9), axis=1))

    @jax.jit
    def step(values: list[jax.Array], speed: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        speed = [0.9 * v - 0.3 * g for v, g in zip(speed, jax.grad(loss)(values), strict=True)]
        return [value + v for value, v in zip(values, speed, strict=True)], speed

    speed = [jnp.zeros_like(value) for value in parameters]
    for _ in range(300):
        parameters, speed = step(parameters, speed)
    return parameters


def write_bundle(
    bundle: Path, function: Any, parameters: Sequence[jax.Array], examples: dict[str, Any], output: str, axes: Any
) -> None:
    shutil.rmtree(bundle, ignore_errors=True)
    named = dict(zip(ARGUMENTS, parameters, strict=True))

    def model(params: dict[str, jax.Array], **inputs: jax.Array) -> jax.Array:
        return function(*inputs.values(), *(params[name] for name in ARGUMENTS))

    export_jax(model, named, examples, bundle, BATCH_SIZES, axes=axes, output_names=[output])


def write_classifier(bundle: Path, parameters: Sequence[jax.Array], images: np.ndarray) -> None:
    axes = {"pixels": "nc", "probabilities": "nk"}
    write_bundle(bundle, classify, parameters, {"pixels": images}, "probabilities", axes)


def write_finder(bundle: Path, parameters: Sequence[jax.Array], held_out: np.ndarray) -> None:
    axes = {"strip": "nhw", "scores": "nw"}
    write_bundle(bundle, strips.find, parameters, {"strip": held_out}, "scores", axes)


def write_projection(folder: Path, images: np.ndarray, held_out: np.ndarray) -> None:
    """A nereid folder: the first two principal components as one ONNX Gemm."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pca = PCA(2).fit(images)
    matrix = pca.components_.T.astype(np.float32)
    offset = (-pca.mean_ @ pca.components_.T).astype(np.float32)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Gemm", ["input", "matrix", "offset"], ["output"])],
        "projection",
        [onnx.helper.make_tensor_value_info("input", onnx.TensorProto.FLOAT, ["batch", LAYERS[0]])],
        [onnx.helper.make_tensor_value_info("output", onnx.TensorProto.FLOAT, ["batch", 2])],
        [onnx.numpy_helper.from_array(matrix, "matrix"), onnx.numpy_helper.from_array(offset, "offset")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, str(folder / "model.onnx"))
    (folder / "model_inference.textproto").write_text("input_shape: [64]\noutput_shape: [2]\nmax_batch_size: 32\n")
    np.save(folder / "local_sklearn.npy", pca.transform(held_out).astype(np.float32))


def main(bundles: Path) -> None:
    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        images.astype(np.float32), labels, test_size=0.2, random_state=0
    )
    classifier = train(train_x, train_y)
    write_classifier(bundles / "digits", classifier, train_x[:32])
    np.save(bundles / "digits" / "local_jax.npy", np.asarray(jax.jit(classify)(test_x, *classifier)))
    write_projection(bundles / "projection", train_x, test_x)
    np.savez(bundles / "held_out.npz", images=test_x, labels=test_y)
    shutil.copyfile(str(files("magika") / MAGIKA / "model.onnx"), bundles / "magika.onnx")

    shutil.copytree(READER, bundles / "reader", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    held_out, _, texts = strips.make(test_x, test_y, 100)
    write_finder(bundles / "reader_find", strips.train(train_x, first_parameters(strips.LAYERS)), held_out[:32])
    write_classifier(bundles / "reader_classify", classifier, train_x[:32])
    (bundles / "strips.json").write_text(json.dumps({"strips": held_out.tolist(), "texts": texts}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
