"""What the public address costs: the same calls to a bare tritonserver's port and through Envoy, admission on.

``nereid serve`` and a tritonserver on a TCP port, both with the same models, are measured in turn, window by window
(A B C C B A ...), so that a drift of the machine falls on all. The third way is a relay that only copies bytes to that
port: what any second hop costs here. Small calls are measured with roles on as well: a second server asks each of them
for a key. The client is one asyncio process with a raw gRPC stub, request bytes made once, answers not parsed; all
share the cores. Envoy's time in a call is its process's as the kernel counts it, which other work distorts less.

usage: python front.py [--seconds 2] [--repeats 8]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import multiprocessing
import os
import selectors
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from onnx import TensorProto, helper, save
from tritonclient.grpc import service_pb2

sys.path.insert(0, str(Path(__file__).parents[1]))
from serving import Served

from converters.convert import convert
from native_service.triton import embedded as embedded_triton
from native_service.triton.process import TritonServer

DIRECT, RELAY, FRONT, ROLES = "direct", "relay", "front", "front with roles"
KEY = "a-key-of-the-bench" * 2
RELAY_BUFFER_BYTES = 256 * 1024
# name -> floats in a row
MODELS = {"small": 16, "mib4": 1024 * 1024, "mib64": 16 * 1024 * 1024}
# The bars: added p50 and rate of the small call, time of the large ones.
ADDED_P50_AT_MOST_MS, RATE_AT_LEAST, LARGE_AT_MOST = 0.30, 0.70, 1.15
# Of the small call, with admission and roles on.
ROLES_ADDED_P50_AT_MOST_MS, ROLES_RATE_AT_LEAST = 0.35, 0.65
TICK_MS = 1e3 / os.sysconf("SC_CLK_TCK")
UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
START_TIMEOUT_S = 180


def write_identity(folder: Path, width: int) -> None:
    """A nereid folder whose model copies its input: as little of its own time as a model can take."""
    folder.mkdir(parents=True)
    tensor = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width]) for name in ("input", "output")]
    graph = helper.make_graph([helper.make_node("Identity", ["input"], ["output"])], "identity", tensor[:1], tensor[1:])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "model.onnx")
    contract = f"input_shape: [{width}]\noutput_shape: [{width}]\nmax_batch_size: 8\n"
    (folder / "model_inference.textproto").write_text(contract)


def request(model: str) -> bytes:
    message = service_pb2.ModelInferRequest(model_name=model)
    message.inputs.add(name="input", datatype="FP32", shape=[1, MODELS[model]])
    message.raw_input_contents.append(np.zeros(MODELS[model], np.float32).tobytes())
    return message.SerializeToString()


def processor_ms(pid: int) -> np.ndarray:
    """What the process has used of the processors so far: in its own code, in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return np.array(fields[11:13], float) * TICK_MS


def envoy_of(supervisor: int) -> int:
    """The process id of the Envoy that ``supervisor`` has started."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == supervisor and b"envoy.json" in (folder / "cmdline").read_bytes():
                return int(folder.name)
    raise SystemExit("nereid serve has no Envoy")


async def window(
    channel: Any, data: bytes, concurrency: int, seconds: float, *, with_key: bool = False
) -> tuple[float, float, int]:
    """Closed loop for ``seconds``: median latency in ms, requests per second, requests."""
    metadata = (("authorization", f"Bearer {KEY}"),) if with_key else None
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    times: list[float] = []
    begin = time.perf_counter()

    async def client() -> None:
        while time.perf_counter() - begin < seconds:
            started = time.perf_counter()
            await call(data, metadata=metadata)
            times.append(time.perf_counter() - started)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return statistics.median(times) * 1e3, len(times) / (time.perf_counter() - begin), len(times)


async def compare(
    channels: dict[str, Any], envoy: int, model: str, concurrency: int, seconds: float, repeats: int
) -> tuple[dict[str, tuple[float, float]], np.ndarray]:
    """The median window of each address, and what a call cost Envoy: ms in its own code, ms in the kernel."""
    data, found = request(model), {name: list[tuple[float, float, int]]() for name in channels}
    spent = np.zeros(2)
    for name in channels:
        await window(channels[name], data, concurrency, seconds / 2, with_key=name == ROLES)
    for repeat in range(repeats):
        for name in channels if repeat % 2 == 0 else reversed(channels):
            before = processor_ms(envoy)
            found[name].append(await window(channels[name], data, concurrency, seconds, with_key=name == ROLES))
            spent += (processor_ms(envoy) - before) * (name == FRONT)
    middle = {
        name: (statistics.median(w[0] for w in windows), statistics.median(w[1] for w in windows))
        for name, windows in found.items()
    }
    return middle, spent / sum(calls for _, _, calls in found[FRONT])


def relay(listener: socket.socket, target: str) -> None:
    """Copy bytes between each client and a connection of its own to ``target``, until killed."""
    host, _, port = target.rpartition(":")
    buffer, selector = memoryview(bytearray(RELAY_BUFFER_BYTES)), selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                pair = (listener.accept()[0], socket.create_connection((host, int(port))))
                for ours, other in (pair, pair[::-1]):
                    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    selector.register(ours, selectors.EVENT_READ, other)
            elif count := key.fileobj.recv_into(buffer):  # type: ignore[union-attr]
                key.data.sendall(buffer[:count])
            else:
                for end in (key.fileobj, key.data):
                    selector.unregister(end)
                    end.close()


async def measure(front: str, with_roles: str, envoy: int, repository: Path, seconds: float, repeats: int) -> bool:
    """Compare every model on its ways; whether all bars are met."""
    install = await embedded_triton.find()
    prefix = f"nereid-bench-{os.getpid()}-"
    async with TritonServer(install, repository, shared_memory_prefix=prefix) as server:
        await server.start()
        for model in MODELS:
            await server.load(model, START_TIMEOUT_S)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            relaying = multiprocessing.Process(target=relay, args=(listener, server.addresses.grpc), daemon=True)
            relaying.start()
            hop = f"127.0.0.1:{listener.getsockname()[1]}"
            addresses = {DIRECT: server.addresses.grpc, RELAY: hop, FRONT: front, ROLES: with_roles}
            try:
                return await compare_all(addresses, envoy, seconds, repeats)
            finally:
                relaying.kill()


async def compare_all(addresses: dict[str, str], envoy: int, seconds: float, repeats: int) -> bool:
    channels = {name: grpc.aio.insecure_channel(address, options=UNLIMITED) for name, address in addresses.items()}
    passed = True

    def bar(label: str, value: float, limit: float, good: bool) -> None:
        nonlocal passed
        passed &= good
        print(f"  {label:<36}{value:>8.2f}   bar {limit:<6g}{'ok' if good else 'MISSED'}", flush=True)

    print(f"{'call':<16}" + "".join(f"{way:>24}" for way in addresses))
    for model, concurrency in (("small", 1), ("small", 8), ("small", 32), ("mib4", 1), ("mib64", 1)):
        ways = {way: channel for way, channel in channels.items() if way != ROLES or model == "small"}
        found, (own, kernel) = await compare(ways, envoy, model, concurrency, seconds, repeats)
        (p50, rate), (front_p50, front_rate) = found[DIRECT], found[FRONT]
        roles_p50, roles_rate = found.get(ROLES, (0, 0))
        cells = "".join(f"{found[way][0]:>11.2f} ms {found[way][1]:>6.0f}/s " for way in ways)
        print(f"{model + ' x' + str(concurrency):<16}{cells}", flush=True)
        print(f"  Envoy's time in a call: {own:.3f} ms in its own code, {kernel:.3f} ms in the kernel", flush=True)
        if model != "small":
            bar("time against direct", front_p50 / p50, LARGE_AT_MOST, front_p50 <= LARGE_AT_MOST * p50)
        elif concurrency == 1:
            added = front_p50 - p50
            bar("added p50, ms", added, ADDED_P50_AT_MOST_MS, added <= ADDED_P50_AT_MOST_MS)
            added = roles_p50 - p50
            bar("with roles", added, ROLES_ADDED_P50_AT_MOST_MS, added <= ROLES_ADDED_P50_AT_MOST_MS)
        elif concurrency == 32:
            bar("rate against direct", front_rate / rate, RATE_AT_LEAST, front_rate >= RATE_AT_LEAST * rate)
            good = roles_rate >= ROLES_RATE_AT_LEAST * rate
            bar("with roles", roles_rate / rate, ROLES_RATE_AT_LEAST, good)
    for channel in channels.values():
        await channel.close()
    return passed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=8)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, width in MODELS.items():
            write_identity(folder / "models" / name, width)
            convert(folder / "models" / name, folder / "repository")
        entries = "".join(f"  - {{name: {name}, device: cpu, queue_capacity: 64}}\n" for name in MODELS)
        digest = hashlib.sha256(KEY.encode()).hexdigest()
        keys = {"open": "", "roles": f", auth: {{keys: [{{name: bench, role: inference, sha256: {digest}}}]}}"}
        with contextlib.ExitStack() as ending:
            servers = []
            for name, auth in keys.items():
                own = folder / name
                own.mkdir()
                (own / "nereid.yaml").write_text(
                    f"server: {{bind_addr: '127.0.0.1:0', ml_backends_path: ../models{auth}}}\nmodels:\n{entries}"
                )
                servers.append(Served(own, "--config", str(own / "nereid.yaml")))
                ending.callback(servers[-1].end)
            front, with_roles = (served.state["address"] for served in servers)
            envoy, repository = envoy_of(servers[0].process.pid), folder / "repository"
            passed = asyncio.run(measure(front, with_roles, envoy, repository, options.seconds, options.repeats))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
