"""StableHLO programs for the benchmarks, exported from JAX functions: (function, shapes of its arguments)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nereid_backend.spec import ModelSpec, Program, TensorSpec, Weights

Shape = tuple[int, ...]
WEIGHTS = "weights.safetensors"


def linear(x: Any, w: Any, b: Any) -> Any:
    return x @ w + b


def mlp(x: Any, *weights: Any) -> Any:
    import jax

    for w, b in zip(weights[:-2:2], weights[1:-2:2], strict=True):
        x = jax.nn.relu(x @ w + b)
    return x @ weights[-2] + weights[-1]


def resnet18(x: Any, *weights: Any) -> Any:
    """The shapes and the arithmetic of ResNet-18 with its normalisation folded away; x is [N, 3, 224, 224]."""
    import jax
    import jax.numpy as jnp

    left = iter(weights)

    def convolve(x: Any, stride: int = 1) -> Any:
        layout = ("NCHW", "OIHW", "NCHW")
        return jax.lax.conv_general_dilated(x, next(left), (stride, stride), "SAME", dimension_numbers=layout)

    x = jax.nn.relu(convolve(x, 2))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 3, 3), (1, 1, 2, 2), "SAME")
    for stage, _ in enumerate(_STAGES):
        for block in range(2):
            stride = 2 if block == 0 and stage > 0 else 1
            y = convolve(jax.nn.relu(convolve(x, stride)))
            x = jax.nn.relu((convolve(x, stride) if stride == 2 else x) + y)
    return x.mean((2, 3)) @ next(left) + next(left)


_STAGES = (64, 128, 256, 512)


def resnet18_shapes() -> list[Shape]:
    shapes: list[Shape] = [(64, 3, 7, 7)]
    before = 64
    for channels in _STAGES:
        for _ in range(2):
            shapes += [(channels, before, 3, 3), (channels, channels, 3, 3)]
            if before != channels:
                shapes.append((channels, before, 1, 1))
            before = channels
    return [*shapes, (512, 1000), (1000,)]


def values(shapes: Sequence[Shape]) -> list[np.ndarray[Any, Any]]:
    """Weights of a plausible size: each layer keeps the spread of what it gets."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(s, np.float32) / np.sqrt(max(1, np.prod(s[1:]))).astype(np.float32) for s in shapes]


def write(
    folder: Path,
    function: Callable[..., Any],
    row: Shape,
    result: Shape,
    weights: Sequence[np.ndarray[Any, Any]],
    sizes: Sequence[int] = (1,),
) -> ModelSpec:
    """Write one program per size and the weights into ``folder``; the specification of the model."""
    import jax
    import jax.export

    from converters import weights as weights_files

    program = jax.jit(function, keep_unused=True)
    fixed = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in weights]
    for size in sizes:
        shapes = [jax.ShapeDtypeStruct((size, *row), np.float32), *fixed]
        exported = jax.export.export(program, platforms=["cpu"])(*shapes)
        (folder / f"model.b{size}.mlir").write_bytes(exported.mlir_module_serialized)
    names = tuple(f"w{place:03}" for place in range(len(weights)))
    weights_files.write(folder / WEIGHTS, dict(zip(names, weights, strict=True)), {})
    return ModelSpec(
        name="bench",
        engine="stablehlo",
        platform="stablehlo",
        inputs=(TensorSpec("x", "f32", (-1, *row), 0),),
        outputs=(TensorSpec("y", "f32", (-1, *result), 0),),
        programs=tuple(Program(f"model.b{size}.mlir", size) for size in sizes),
        weights=Weights(WEIGHTS, names),
        max_batch_size=max(sizes),
        coalesce=True,
    )
