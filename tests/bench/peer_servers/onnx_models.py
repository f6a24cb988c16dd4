"""The models of every contestant: float32 ``input`` [n, d] to ``output`` [n, e]; written once, run by ONNX Runtime.

python onnx_models.py FOLDER     # writes mlp.onnx and mlp14m.onnx
"""

import os
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np

# name -> floats in a row of the input and of the output, rows in a batch at most
WIDTHS = {"echo": (16, 16), "mlp": (16, 4), "mlp14m": (2400, 10), "mib4": (1 << 20, 1 << 20)}
LARGEST_BATCH = {"echo": 64, "mlp": 64, "mlp14m": 64, "mib4": 4}
LAYERS = {"mlp": (16, 256, 256, 4), "mlp14m": (2400, 1800, 1800, 1800, 1800, 10)}
ECHOES = ("echo", "mib4")


def load(name):
    """A function from input to output. One thread, no spinning: as nereid runs ONNX."""
    if name in ECHOES:
        return lambda x: x
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    file = str(Path(os.environ["PEER_MODELS"]) / f"{name}.onnx")
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(["output"], {"input": x})[0]


def rows(name, data):
    """The input in the bytes of a request."""
    return np.frombuffer(data, np.float32).reshape(-1, WIDTHS[name][0])


def write(folder):
    """Needs the package onnx. Also the echoes, for those who serve nothing but ONNX files."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    for name, (width_in, width_out) in WIDTHS.items():
        nodes, weights, last = [], [], "input"
        chance = np.random.default_rng(0)
        sizes = LAYERS.get(name, ())
        for number, (size, following) in enumerate(pairwise(sizes)):
            weight = (chance.standard_normal((size, following)) * (2 / size) ** 0.5).astype(np.float32)
            bias = np.zeros(following, np.float32)
            weights += [numpy_helper.from_array(weight, f"w{number}"), numpy_helper.from_array(bias, f"b{number}")]
            is_end = number == len(sizes) - 2
            result = "output" if is_end else f"g{number}"
            nodes.append(helper.make_node("Gemm", [last, f"w{number}", f"b{number}"], [result]))
            if not is_end:
                nodes.append(helper.make_node("Relu", [result], [f"r{number}"]))
            last = f"r{number}"
        if not nodes:
            nodes = [helper.make_node("Identity", ["input"], ["output"])]
        tensors = [
            helper.make_tensor_value_info(tensor, TensorProto.FLOAT, ["n", width])
            for tensor, width in (("input", width_in), ("output", width_out))
        ]
        graph = helper.make_graph(nodes, name, tensors[:1], tensors[1:], weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        onnx.save(model, Path(folder) / f"{name}.onnx")


if __name__ == "__main__":
    write(sys.argv[1])
