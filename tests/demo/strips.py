"""Strips of handwritten digits side by side, and the model that finds them: the first stage of the demo's pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

WIDTH, SIZE = 64, 8
PLACES = WIDTH - SIZE + 1
LAYERS = (SIZE * SIZE, 48, 1)
_STRIPS, _BATCH, _STEPS = 640, 64, 300


def make(images: np.ndarray, labels: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """Strips f32[count, 8, 64] of digits with random gaps, 1 where one begins f32[count, 57], and what they say."""
    rng = np.random.default_rng(0)
    strips, begins = np.zeros((count, SIZE, WIDTH), np.float32), np.zeros((count, PLACES), np.float32)
    texts: list[list[int]] = []
    for strip, begin in zip(strips, begins, strict=True):
        texts.append([])
        column = rng.integers(SIZE)
        while column < PLACES:
            digit = rng.integers(len(images))
            strip[:, column : column + SIZE] = images[digit].reshape(SIZE, SIZE)
            begin[column] = 1
            texts[-1].append(int(labels[digit]))
            column += SIZE + rng.integers(SIZE)
    return strips, begins, texts


def find(strip: jax.Array, *parameters: jax.Array) -> jax.Array:
    """Scores f32[n, 57] of strips f32[n, 8, 64]: positive where a digit begins."""
    kernel0, bias0, kernel1, bias1 = parameters
    columns = np.arange(PLACES)[:, None] + np.arange(SIZE)
    windows = jnp.moveaxis(strip[:, :, columns], 1, 2).reshape(len(strip), PLACES, SIZE * SIZE)
    hidden = jax.nn.relu(windows / 16 @ kernel0 + bias0)
    return (hidden @ kernel1 + bias1)[..., 0]


def train(images: np.ndarray, parameters: Sequence[jax.Array]) -> list[jax.Array]:
    """Gradient descent with momentum on made-up strips of ``images``; about two seconds on one core."""
    strips, begins, _ = make(images, np.zeros(len(images)), _STRIPS)

    def loss(values: list[jax.Array], strip: jax.Array, begin: jax.Array) -> jax.Array:
        scores = find(strip, *values)
        return jnp.mean(jnp.where(begin > 0, 4, 1) * (jax.nn.softplus(scores) - begin * scores))

    @jax.jit
    def step(
        values: list[jax.Array], speed: list[jax.Array], strip: jax.Array, begin: jax.Array
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        slope = jax.grad(loss)(values, strip, begin)
        speed = [0.9 * v - 0.5 * g for v, g in zip(speed, slope, strict=True)]
        return [value + v for value, v in zip(values, speed, strict=True)], speed

    values, speed = list(parameters), [jnp.zeros_like(value) for value in parameters]
    for number in range(_STEPS):
        batch = slice(number * _BATCH % _STRIPS, number * _BATCH % _STRIPS + _BATCH)
        values, speed = step(values, speed, strips[batch], begins[batch])
    return values
