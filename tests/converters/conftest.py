"""Models made on the spot: bundles with programs exported by JAX, nereid folders and ONNX files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from converters import weights as weights_files

W = np.arange(16, dtype=np.float32).reshape(4, 4) / 8  # square: a wrong layout has the right shape
B = np.arange(4, dtype=np.float32)


def linear(x: Any, w: Any, b: Any) -> Any:
    return x @ w + b


def tensor(name: str, shape: str, dtype: str = "f32", **dims: int) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": shape, "dims": dims}


def write_manifest(folder: Path, **keys: Any) -> None:
    manifest = {
        "format_version": "2.1",
        "executable_inputs": [tensor("x", "cn", c=4)],
        "executable_outputs": [tensor("y", "kn", k=4)],
        "batching": {"compiled_batch_sizes": [1, 4]},
        **keys,
    }
    (folder / "manifest.yaml").write_text(yaml.safe_dump({k: v for k, v in manifest.items() if v is not None}))


def write_program(path: Path, function: Callable[..., Any], *arguments: tuple[Sequence[int], Any]) -> None:
    import jax
    import jax.export

    jax.config.update("jax_enable_x64", True)
    shapes = [jax.ShapeDtypeStruct(tuple(shape), dtype) for shape, dtype in arguments]
    exported = jax.export.export(jax.jit(function, keep_unused=True), platforms=["cpu"])(*shapes)
    path.write_bytes(exported.mlir_module_serialized)


def write_weights(
    folder: Path,
    tensors: Mapping[str, np.ndarray],
    order: Any = None,
    axis_order: str | None = "xla",
    file: str = "weights.safetensors",
) -> None:
    metadata = {"argument_order": json.dumps(list(tensors) if order is None else order)}
    if axis_order is not None:
        metadata["axis_order"] = axis_order
    weights_files.write(folder / file, tensors, metadata)


@pytest.fixture
def make_bundle(tmp_path: Path) -> Callable[..., Path]:
    """y = x w + b with programs for the given sizes (None: a size-less module of 4 rows); one argument per aspect."""

    def make(
        name: str = "linear",
        *,
        sizes: Sequence[int | None] = (1, 4),
        function: Callable[..., Any] = linear,
        tensors: Mapping[str, np.ndarray] | None = None,
        order: Any = None,
        axis_order: str | None = "xla",
        x: Callable[[int], tuple[Any, Any]] = lambda n: ((n, 4), np.float32),
        **manifest: Any,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        tensors = {"w": W, "b": B} if tensors is None else tensors
        for size in sizes:
            file = "model.mlir" if size is None else f"model.b{size}.mlir"
            arguments = [(a.shape[::-1] if axis_order is None else a.shape, a.dtype) for a in tensors.values()]
            write_program(folder / file, function, x(4 if size is None else size), *arguments)
        write_manifest(folder, **manifest)
        write_weights(folder, tensors, order, axis_order)
        return folder

    return make


def total(x: Any, scale: Any) -> Any:
    return scale * x.sum((1, 2))


@pytest.fixture
def make_pool(tmp_path: Path, program_writer: Any, manifest_writer: Any, weights_writer: Any) -> Callable[..., Path]:
    """total[n] = scale * sum(img[n]) for images of (w, h) = (4, 2) and (3, 5), sizes as listed per variant."""

    def make(
        sizes: Sequence[Sequence[int | None]] = ((1, 2), (1, 2)),
        functions: Sequence[Any] = (..., ...),
        **manifest: Any,
    ) -> Path:
        folder = tmp_path / "pool"
        folder.mkdir()
        for variant, ((width, height), compiled, function) in enumerate(
            zip(((4, 2), (3, 5)), sizes, functions, strict=True)
        ):
            for size in compiled:
                file = f"model.v{variant}.mlir" if size is None else f"model.v{variant}.b{size}.mlir"
                shape = (3 if size is None else size, height, width)
                function = total if function is ... else function
                program_writer(folder / file, function, (shape, np.float32), ((), np.float32))
        keys: dict[str, Any] = {
            "executable_inputs": [{"name": "img", "dtype": "f32", "shape": "whn", "dims": {"w": -1, "h": -1}}],
            "executable_outputs": [{"name": "total", "dtype": "f32", "shape": "n"}],
            "batching": None,
            "input_shapes": [{"w": 4, "h": 2}, {"w": 3, "h": 5}],
        }
        manifest_writer(folder, **{**keys, **manifest})
        weights_writer(folder, {"scale": np.array(2, np.float32)})
        return folder

    return make


@pytest.fixture
def make_onnx(tmp_path: Path) -> Callable[..., Path]:
    """An ONNX file of nodes given as (operator, inputs, outputs)."""
    onnx = pytest.importorskip("onnx")

    def make(
        nodes: Any,
        inputs: Any,
        outputs: Any,
        path: Path | None = None,
        constants: Mapping[str, Any] | None = None,
        **attributes: Any,
    ) -> Path:
        graph = onnx.helper.make_graph(
            [onnx.helper.make_node(op, i, o, **attributes) for op, i, o in nodes],
            "g",
            [onnx.helper.make_tensor_value_info(*v) for v in inputs],
            [onnx.helper.make_tensor_value_info(*v) for v in outputs],
            [onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in (constants or {}).items()],
        )
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
        path = tmp_path / "model.onnx" if path is None else path
        onnx.save(model, str(path))
        return path

    return make


@pytest.fixture
def plus_one(make_onnx: Callable[..., Path]) -> Callable[..., Path]:
    """``y = x + 1`` over float32 of a given shape."""

    def make(shape: Sequence[Any], out: Sequence[Any] | None = None, path: Path | None = None) -> Path:
        values = ("x", 1, list(shape)), ("y", 1, list(shape if out is None else out))
        return make_onnx([("Add", ["x", "one"], ["y"])], values[:1], values[1:], path, {"one": np.float32(1)})

    return make


@pytest.fixture
def run() -> Callable[..., list[np.ndarray]]:
    """Run a prepared model with its own engine, from a directory like the one Triton sees."""

    def run_prepared(prepared: Any, repository: Path, *inputs: np.ndarray) -> list[np.ndarray]:
        from converters import repository as writer
        from nereid_backend.engines import engine_class
        from nereid_backend.spec import ModelSpec

        version = writer.write(prepared, repository, link=False, force=True) / "1"
        spec = ModelSpec.read(version)
        assert spec == prepared.spec
        engine = engine_class(spec.engine).load(spec, version)
        try:
            return [np.array(output) for output in engine.run(list(inputs))]
        finally:
            engine.close()

    return run_prepared


@pytest.fixture(scope="session")
def manifest_writer() -> Callable[..., None]:
    return write_manifest


@pytest.fixture(scope="session")
def weights_writer() -> Callable[..., None]:
    return write_weights


@pytest.fixture(scope="session")
def program_writer() -> Callable[..., None]:
    return write_program
