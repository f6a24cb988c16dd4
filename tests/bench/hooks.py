"""Where hooks run: inside the model's process, or in processes of their own around the executable.

The executable is a sleep of 5 ms for up to 8 rows (a device), preprocess and postprocess are sleeps of 1 ms (work that
releases the GIL); one row per request, closed loop, every answer checked. ``inside`` is what tensors that all carry the
batch get. ``apart_N`` is an ensemble with N processes for each side's hooks, what ragged ones get; ``one_by_one`` is
what they would get in a single model, because Triton cannot batch them. Without hooks the executable alone is the most
there is to reach.

usage: python hooks.py [--seconds 3] [--repeats 3]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from converters import repository, stages
from converters.prepared import Prepared
from native_service.triton import embedded as embedded_triton
from native_service.triton.process import TritonServer
from nereid_backend.spec import Hooks, ModelSpec, Program, TensorSpec

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_engine import FAKE_ENGINE

DEVICE = "time.sleep(0.005); return [inputs[0] * 2]"
CODE = """
import time
from nereid_backend.hooks import register_model

def preprocess(inputs):
    time.sleep(0.001)
    return [("x", inputs[0].array + 1)]

def postprocess(outputs):
    time.sleep(0.001)
    return [("y", outputs[0].array * 10)]

register_model(preprocess=preprocess, postprocess=postprocess)
"""
X, Y = TensorSpec("x", "f32", (-1, 4), 0), TensorSpec("y", "f32", (-1, 4), 0)
CONCURRENCIES = (1, 8, 32)
START_TIMEOUT_S = 60
# The bars, at 32 clients: requests share runs in spite of tensors that Triton cannot batch, and one process is not much
# behind several where it can.
BARE, INSIDE, ONE_BY_ONE, APART = "no_hooks", "inside", "one_by_one", "apart_2"
APART_AT_LEAST, INSIDE_AT_LEAST = 3.0, 0.5


def write_models(folder: Path) -> list[str]:
    """Every form of the model; their names."""
    code = folder.parent / "hooks.py"
    code.write_text(CODE)
    bare = ModelSpec("bare", "fake", "fake", (X,), (Y,), (Program("none", 8),), max_batch_size=8, coalesce=True)
    hooked = replace(bare, hooks=Hooks((X,), (Y,), code=("preprocess", "postprocess")))
    files = {"hooks.py": code}
    models = {
        BARE: Prepared(replace(bare, name="no_hooks"), {}),
        INSIDE: Prepared(replace(hooked, name=INSIDE), files),
        ONE_BY_ONE: Prepared(replace(hooked, name=ONE_BY_ONE, max_batch_size=0), files),
        **{f"apart_{n}": stages.split(Prepared(replace(hooked, name=f"apart_{n}"), files), n) for n in (1, 2, 4)},
    }
    for prepared in models.values():
        repository.write(prepared, folder, link=True, force=False)
        for each in (prepared, *prepared.stages):
            if each.spec.engine == "fake" and not each.spec.stages:
                (folder / each.spec.name / "1" / "model.py").write_text(FAKE_ENGINE.format(body=DEVICE))
    return list(models)


def request(model: str, value: float) -> bytes:
    message = service_pb2.ModelInferRequest(model_name=model)
    message.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    message.raw_input_contents.append(np.full(4, value, np.float32).tobytes())
    return message.SerializeToString()


async def window(channel: Any, model: str, concurrency: int, seconds: float) -> tuple[float, float]:
    """Closed loop for ``seconds``: median latency in ms, requests per second."""
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    times: list[float] = []
    begin = time.perf_counter()

    async def client(number: int) -> None:
        data = request(model, number)
        right = np.full(4, number * 2 if model == BARE else (number + 1) * 20, np.float32).tobytes()
        while time.perf_counter() - begin < seconds:
            started = time.perf_counter()
            answer = service_pb2.ModelInferResponse.FromString(await call(data))
            times.append(time.perf_counter() - started)
            if answer.raw_output_contents[0] != right:
                raise SystemExit(f"{model}: client {number} got another's answer")

    await asyncio.gather(*(client(number) for number in range(concurrency)))
    return statistics.median(times) * 1e3, len(times) / (time.perf_counter() - begin)


async def measure(folder: Path, seconds: float, repeats: int) -> bool:
    names = write_models(folder)
    install = await embedded_triton.find()
    async with TritonServer(install, folder, shared_memory_prefix=f"nereid-bench-{os.getpid()}-") as server:
        await server.start()
        for name in names:
            await server.load(name, START_TIMEOUT_S)
        async with grpc.aio.insecure_channel(server.addresses.grpc) as channel:
            return await compare(channel, names, seconds, repeats)


async def compare(channel: Any, names: list[str], seconds: float, repeats: int) -> bool:
    rates: dict[str, float] = {}
    print("form         clients      p50    requests/s")
    for concurrency in CONCURRENCIES:
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for repeat in range(repeats):
            for name in names if repeat % 2 == 0 else reversed(names):
                found[name].append(await window(channel, name, concurrency, seconds))
        for name, windows in found.items():
            p50_ms, rate = (statistics.median(w[i] for w in windows) for i in (0, 1))
            rates[name] = rate
            print(f"{name:12} {concurrency:7} {p50_ms:8.2f} ms {rate:8.0f}")
    passed = True
    for form, base, bar in ((APART, ONE_BY_ONE, APART_AT_LEAST), (INSIDE, BARE, INSIDE_AT_LEAST)):
        ratio = rates[form] / rates[base]
        passed &= ratio >= bar
        print(f"{form} / {base} at {CONCURRENCIES[-1]} clients: {ratio:.2f} (bar >= {bar})")
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        passed = asyncio.run(measure(Path(scratch) / "models", arguments.seconds, arguments.repeats))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
