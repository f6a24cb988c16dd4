"""The models of every contestant: ``input`` [n, d] to float32 ``output`` [n, e]; written once.

ONNX files, run by ONNX Runtime, and `minilm`: an encoder of the sizes of all-MiniLM-L6-v2 with made-up weights, from
token ids to a vector, StableHLO in the files of jax.export, one per batch size, and its weights beside them.
"""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np

# name -> floats in a row of the input and of the output, rows in a batch at most
WIDTHS = {"echo": (16, 16), "mlp": (16, 4), "mlp14m": (2400, 10), "mib4": (1 << 20, 1 << 20), "minilm": (64, 384)}
LARGEST_BATCH = {"echo": 64, "mlp": 64, "mlp14m": 64, "mib4": 4, "minilm": 8}
DTYPES = {name: np.int32 if name == "minilm" else np.float32 for name in WIDTHS}
KSERVE_TYPES = {np.float32: "FP32", np.int32: "INT32"}
LAYERS = {"mlp": (16, 256, 256, 4), "mlp14m": (2400, 1800, 1800, 1800, 1800, 10)}
THREADS = int(os.environ.get("PEER_THREADS", "1"))
ECHOES = ("echo", "mib4")
SIZES = (1, 8)
ENCODER = {
    "model_type": "bert",
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
    "vocab_size": 30522,
    "type_vocab_size": 2,
}


def load(name, threads=THREADS):
    """A function from input to output. No spinning: as nereid runs ONNX."""
    if name in ECHOES:
        return lambda x: x
    if name == "minilm":
        return load_encoder()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    file = str(Path(os.environ["PEER_MODELS"]) / f"{name}.onnx")
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(["output"], {"input": x})[0]


def load_encoder():
    """A program per size, weights as arguments, zero rows up to the next size: as nereid runs StableHLO."""
    import jax
    from jax import export

    folder = Path(os.environ["PEER_MODELS"])
    with np.load(folder / "minilm.npz") as file:
        params = {key: jax.device_put(file[key]) for key in file.files}
    exported = {size: export.deserialize((folder / f"minilm.{size}.jax").read_bytes()) for size in SIZES}
    programs = {size: jax.jit(each.call) for size, each in exported.items()}
    for size, program in programs.items():
        program(params, np.zeros((size, WIDTHS["minilm"][0]), np.int32)).block_until_ready()

    def run(x):
        found = []
        for start in range(0, len(x), SIZES[-1]):
            part = x[start : start + SIZES[-1]]
            size = next(size for size in SIZES if size >= len(part))
            padded = np.pad(part, ((0, size - len(part)), (0, 0)))
            found.append(np.asarray(programs[size](params, padded))[: len(part)])
        return found[0] if len(found) == 1 else np.concatenate(found)

    return run


def rows(name, data):
    """The input in the bytes of a request."""
    return np.frombuffer(data, DTYPES[name]).reshape(-1, WIDTHS[name][0])


def example(name, count):
    """An input of so many rows."""
    chance = np.random.default_rng(1)
    shape = (count, WIDTHS[name][0])
    if DTYPES[name] is np.int32:
        return chance.integers(1, ENCODER["vocab_size"], shape, np.int32)
    return chance.standard_normal(shape).astype(np.float32)


def encoder():
    """The function (params, ids) -> vectors, and made-up params. Needs nereid."""
    from jax import numpy as jnp

    from converters.exporters.encoder import encode, read_config

    config = read_config(ENCODER)
    width, inner, chance = config.width, ENCODER["intermediate_size"], np.random.default_rng(0)
    rows = {"word": config.vocabulary, "position": config.positions, "token": ENCODER["type_vocab_size"]}

    def made(name):
        if "LayerNorm" in name:
            return np.full(width, 1.0 if name.endswith("weight") else 0.0, np.float32)
        if name.startswith("embeddings."):
            shape = (rows[name.split(".")[1].split("_")[0]], width)
        else:
            out, into = (inner, width) if ".intermediate." in name else (width, width)
            into = inner if ".output.dense" in name and "attention" not in name else into
            shape = (into, out) if config.is_linear(name) else (out,)
        return (chance.standard_normal(shape) * 0.02).astype(np.float32)

    def embed(params, ids):
        mask = ids != 0
        states = encode(config, params, ids, mask)
        share = mask[..., None].astype(states.dtype)
        summed = (states * share).sum(1) / jnp.maximum(share.sum(1), 1)
        return summed / jnp.maximum(jnp.linalg.norm(summed, axis=-1, keepdims=True), 1e-12)

    return embed, {name: made(name) for name in config.weight_names()}


def write(folder):
    """Write all models. Needs the packages onnx and jax, and nereid."""
    write_onnx(Path(folder))
    import jax
    from jax import export

    embed, params = encoder()
    np.savez(Path(folder) / "minilm.npz", **params)
    for size in SIZES:
        ids = jax.ShapeDtypeStruct((size, WIDTHS["minilm"][0]), np.int32)
        (Path(folder) / f"minilm.{size}.jax").write_bytes(export.export(jax.jit(embed))(params, ids).serialize())


def write_onnx(folder):
    """Also the echoes, for those who serve nothing but ONNX files."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    for name, (width_in, width_out) in WIDTHS.items():
        if name == "minilm":
            continue
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
        onnx.save(model, folder / f"{name}.onnx")
