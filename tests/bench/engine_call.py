"""What an engine adds to a call: each engine's ``run`` against the bare call of its library, numpy to numpy, batch 1.

Both sides are timed in turn, in blocks of 5 ms (A B B A ...), with the same arrays and settings; the figure is the
median of the pairs' ratios.

usage: python engine_call.py [--seconds 4]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import programs

from nereid_backend.engines.onnx import OnnxEngine
from nereid_backend.engines.stablehlo import StableHloEngine
from nereid_backend.engines.torchscript import TorchScriptEngine
from nereid_backend.spec import ModelSpec, Program, TensorSpec

AT_MOST = 1.2
BLOCK_S, FEWEST_PAIRS = 0.005, 9

Call = Callable[[], Any]


def ratio(ours: Call, bare: Call, seconds: float) -> tuple[float, float, float]:
    """Medians over ``seconds``: ours in us, bare in us, ours / bare."""
    start = time.perf_counter()
    bare()
    count = 1
    while time.perf_counter() - start < BLOCK_S:
        bare()
        count += 1
    results = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(results) < FEWEST_PAIRS:
        times = {}
        for name, call in (("a", ours), ("b", bare)) if len(results) % 2 == 0 else (("b", bare), ("a", ours)):
            start = time.perf_counter()
            for _ in range(count):
                call()
            times[name] = (time.perf_counter() - start) / count * 1e6
        results.append((times["a"], times["b"], times["a"] / times["b"]))
    a, b, r = (statistics.median(column) for column in zip(*results, strict=True))
    return a, b, r


def stablehlo(folder: Path) -> list[tuple[str, Call, Call]]:
    import jax

    cases = []
    for name, function, row, result, shapes in (
        ("linear 8-4", programs.linear, (8,), (4,), [(8, 4), (4,)]),
        ("mlp 784-512-512-10", programs.mlp, (784,), (10,), [(784, 512), (512,), (512, 512), (512,), (512, 10), (10,)]),
        ("mlp of 100 weights", programs.mlp, (16,), (16,), [(16, 16), (16,)] * 50),
        ("resnet18", programs.resnet18, (3, 224, 224), (1000,), programs.resnet18_shapes()),
    ):
        place = folder / name.replace(" ", "_")
        place.mkdir()
        weights = programs.values(shapes)
        engine = StableHloEngine.load(programs.write(place, function, row, result, weights), place)
        x = np.ones((1, *row), np.float32)
        jitted, resident = jax.jit(function), [jax.device_put(w) for w in weights]

        def ours(engine: StableHloEngine = engine, x: Any = x) -> Any:
            return engine.run([x])

        def bare(jitted: Any = jitted, x: Any = x, resident: Any = resident) -> Any:
            return np.asarray(jitted(x, *resident))

        np.testing.assert_allclose(ours()[0], bare(), rtol=1e-3, atol=1e-5)
        cases.append((f"stablehlo {name}", ours, bare))
    return cases


def torchscript(folder: Path) -> list[tuple[str, Call, Call]]:
    import torch

    cases = []
    for name, widths in (("linear 8-4", (8, 4)), ("mlp 784-512-512-10", (784, 512, 512, 10))):
        layers: list[Any] = []
        for before, after in itertools.pairwise(widths):
            layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
        path = folder / f"{len(widths)}.pt"
        torch.jit.save(torch.jit.script(torch.nn.Sequential(*layers[:-1])), str(path))
        engine = TorchScriptEngine.load(_spec("torchscript", path, widths), folder)
        module = torch.jit.load(str(path))
        x = np.ones((1, widths[0]), np.float32)

        def ours(engine: TorchScriptEngine = engine, x: Any = x) -> Any:
            return engine.run([x])

        def bare(module: Any = module, x: Any = x) -> Any:
            with torch.inference_mode():
                return module(torch.from_numpy(x)).numpy()

        np.testing.assert_array_equal(ours()[0], bare())
        cases.append((f"torchscript {name}", ours, bare))
    return cases


def onnx(folder: Path) -> list[tuple[str, Call, Call]]:
    import onnx
    import onnxruntime

    cases = []
    for name, widths in (("linear 8-4", (8, 4)), ("mlp 784-512-512-10", (784, 512, 512, 10))):
        path = folder / f"{len(widths)}.onnx"
        nodes, constants, value = [], [], "x"
        for place, (before, after) in enumerate(itertools.pairwise(widths)):
            for kind, shape in (("w", (before, after)), ("b", (after,))):
                (array,) = programs.values([shape])
                constants.append(onnx.numpy_helper.from_array(array, f"{kind}{place}"))
            last = place == len(widths) - 2
            nodes.append(
                onnx.helper.make_node("Gemm", [value, f"w{place}", f"b{place}"], ["y" if last else f"g{place}"])
            )
            if not last:
                value = f"r{place}"
                nodes.append(onnx.helper.make_node("Relu", [f"g{place}"], [value]))
        ends = [
            onnx.helper.make_tensor_value_info(end, onnx.TensorProto.FLOAT, ["n", width])
            for end, width in (("x", widths[0]), ("y", widths[-1]))
        ]
        graph = onnx.helper.make_graph(nodes, "g", ends[:1], ends[1:], constants)
        opset = [onnx.helper.make_opsetid("", 17)]
        onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=9), str(path))
        engine = OnnxEngine.load(_spec("onnx", path, widths), folder)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        x = np.ones((1, widths[0]), np.float32)

        def ours(engine: OnnxEngine = engine, x: Any = x) -> Any:
            return engine.run([x])

        def bare(session: Any = session, x: Any = x) -> Any:
            return session.run(["y"], {"x": x})

        np.testing.assert_array_equal(ours()[0], bare()[0])
        cases.append((f"onnx {name}", ours, bare))
    return cases


def _spec(engine: str, path: Path, widths: tuple[int, ...]) -> ModelSpec:
    ends = (TensorSpec(name, "f32", (-1, width), 0) for name, width in (("x", widths[0]), ("y", widths[-1])))
    first, last = ends
    return ModelSpec("bench", engine, engine, (first,), (last,), (Program(path.name),), max_batch_size=8, coalesce=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=4)
    options = parser.parse_args()
    met = True
    with tempfile.TemporaryDirectory() as folder:
        for cases in (stablehlo, torchscript, onnx):
            for name, ours, bare in cases(Path(folder)):
                a, b, r = ratio(ours, bare, options.seconds)
                print(f"{name}: {a:.1f} us against {b:.1f} us, ratio {r:.3f} (bar <= {AT_MOST})", flush=True)
                met &= r <= AT_MOST
    print("bars met" if met else "bars MISSED")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
