"""A model added and removed, and another changed, again and again under load of the others: what it costs them.

Bars: no failed call, no lost permit. The clients are asyncio tasks of one process that shares the cores with the
servers, so the times are upper bounds.

usage: python live_models.py [--rounds 50]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from serving import Served, write_adder

from native_service.envoy.admin import EnvoyAdmin
from native_service.envoy.settings import ADMIN_SOCKET
from native_service.run_directory import MARK

STAYING, GUEST, CHANGING = ("one", "two"), "guest", "changing"
CLIENTS_PER_MODEL = 4
KSERVE = "/inference.GRPCInferenceService/"


def infer_request(model: str) -> bytes:
    message = service_pb2.ModelInferRequest(model_name=model)
    message.inputs.add(name="input", datatype="FP32", shape=[1, 4])
    message.raw_input_contents.append(np.zeros(4, np.float32).tobytes())
    return message.SerializeToString()


def run_directory(served: Served) -> Path:
    """Where the server's Envoy has its admin socket."""
    for pid in served.descendants():
        for entry in (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0"):
            if entry.startswith(f"{MARK}=".encode()):
                return Path(os.fsdecode(entry.partition(b"=")[2]))
    raise SystemExit("no process of the server carries its mark")


async def measure(served: Served, models: Path, rounds: int) -> bool:
    channel = grpc.aio.insecure_channel(served.state["address"])
    infer = channel.unary_unary(KSERVE + "ModelInfer")
    times: list[float] = []
    failures: list[str] = []
    over = False

    async def client(model: str) -> None:
        data = infer_request(model)
        while not over:
            started = time.perf_counter()
            try:
                await infer(data)
            except grpc.aio.AioRpcError as error:
                failures.append(f"{model}: {error.code().name} {error.details()}")
            times.append(time.perf_counter() - started)

    async def change(verb: str, model: str) -> None:
        request = getattr(service_pb2, f"RepositoryModel{verb}Request")(model_name=model)
        await channel.unary_unary(f"{KSERVE}RepositoryModel{verb}")(request.SerializeToString())

    async def timed(work: Callable[[], Awaitable[None]]) -> float:
        started = time.perf_counter()
        await work()
        return time.perf_counter() - started

    alone = asyncio.create_task(client(STAYING[0]))
    await asyncio.sleep(2)
    quiet_ms = statistics.median(times) * 1e3
    clients = [alone, *(asyncio.create_task(client(m)) for m in (*STAYING, CHANGING) for _ in range(CLIENTS_PER_MODEL))]
    added, removed, changed = [], [], []
    wrong = 0
    for number in range(rounds):
        removed.append(await timed(lambda: change("Unload", GUEST)))
        try:
            await infer(infer_request(GUEST))
            wrong += 1
        except grpc.aio.AioRpcError as error:
            wrong += error.code() is not grpc.StatusCode.NOT_FOUND
        added.append(await timed(lambda: change("Load", GUEST)))
        await infer(infer_request(GUEST))
        write_adder(models / f"{CHANGING}.onnx", number)
        changed.append(await timed(lambda: change("Load", CHANGING)))
        answer = service_pb2.ModelInferResponse.FromString(await infer(infer_request(CHANGING)))
        wrong += np.frombuffer(answer.raw_output_contents[0], np.float32)[0] != number
    over = True
    await asyncio.gather(*clients)
    await channel.close()
    permits = await permits_in_use(run_directory(served))
    for label, seconds in (("added", added), ("removed", removed), ("changed", changed)):
        print(f"  {label:<10} {statistics.median(seconds):6.2f} s median, {max(seconds):6.2f} s longest")
    print(f"  {len(times)} calls, longest {max(times) * 1e3:.0f} ms (one client alone: median {quiet_ms:.1f} ms)")
    results = {
        "failed calls": len(failures),
        "wrong answers": int(wrong),
        "permits not given back": sum(permits.values()),
    }
    for label, count in results.items():
        print(f"  {label:<24}{count:>6}   bar 0   {'ok' if not count else 'MISSED'}", flush=True)
    for line in failures[:5]:
        print(f"    {line}")
    return not any(results.values())


async def permits_in_use(run: Path) -> dict[str, int]:
    os.chdir(run)  # a socket's path may have 107 characters
    admin = EnvoyAdmin(ADMIN_SOCKET)
    try:
        return await admin.permits_in_use()
    finally:
        await admin.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "models").mkdir()
        names: Any = (*STAYING, GUEST, CHANGING)
        for name in names:
            write_adder(folder / "models" / f"{name}.onnx")
        entry = "  - {{name: {}, device: cpu, queue_capacity: 8, options: {{max_batch_size: 8}}}}\n"
        (folder / "nereid.yaml").write_text(
            "server: {bind_addr: '127.0.0.1:0', ml_backends_path: models, allow_model_control: true}\nmodels:\n"
            + "".join(entry.format(name) for name in names)
        )
        served = Served(folder, "--config", str(folder / "nereid.yaml"))
        print(f"{options.rounds} rounds under load of {len(STAYING) + 1} models, {CLIENTS_PER_MODEL} clients each")
        try:
            passed = asyncio.run(measure(served, folder / "models", options.rounds))
        finally:
            code, output = served.end()
        print(f"  the server's end: code {code}")
    if not passed or code:
        print(output)
    return 0 if passed and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
