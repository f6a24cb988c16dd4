"""A 64 MiB Checkpoint round trip against a bare grpc.aio echo of the same chunks, in turn.

Both servers are processes of their own, the client is one asyncio process with a raw stub: messages made once, answers
not parsed. The echo keeps what it gets and sends it back when the client has closed its side, as no model could answer
sooner; nothing lies between it and the client, which is what the bar is about. The second echo is behind an Envoy with
plain routes and the windows of ours: the same kind of connection. The Checkpoint passes Envoy, our service and Triton,
whose model copies its input. Processor time, of all processes together, says what a machine with other work on it does
to the times.

usage: python checkpoint.py [--repeats 8] [--chunk-kib 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from front import MODELS, UNLIMITED, write_identity

sys.path.insert(0, str(Path(__file__).parents[1]))
from serving import Served

from native_service.envoy import install as envoy_install
from native_service.envoy.settings import http2_options
from native_service.proto import inference_pb2 as pb

MODEL = "mib64"
TENSOR_BYTES = 4 * MODELS[MODEL]
CHECKPOINT = "/inference.Nereid/Checkpoint"
DIRECT, BEHIND_ENVOY, OURS = "echo", "echo behind Envoy", "Checkpoint"
THROUGHPUT_AT_LEAST = 0.8
ENVOY_START_S = 20
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def echo(ready: Any) -> None:
    """A server whose only call gives back the messages of its stream; runs until killed."""

    async def serve() -> None:
        async def answer(requests: Any, context: Any) -> None:
            for message in [message async for message in requests]:
                await context.write(message)

        server = grpc.aio.server(options=UNLIMITED)
        handlers = {"Checkpoint": grpc.stream_stream_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.Nereid", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ready.put(f"127.0.0.1:{port}")
        await server.wait_for_termination()

    asyncio.run(serve())


def plain_envoy(folder: Path, target: str) -> tuple[subprocess.Popen[bytes], str]:
    """An Envoy that hands everything to ``target``, once it is open, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    kinds, windows = "type.googleapis.com/envoy.extensions.", http2_options(TENSOR_BYTES)
    router = {"@type": f"{kinds}filters.http.router.v3.Router"}
    manager = {
        "@type": f"{kinds}filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "echo",
        "codec_type": "HTTP2",
        "http2_protocol_options": windows,
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "echo",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "echo", "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": router}],
    }
    options = {
        "@type": f"{kinds}upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": windows},
    }
    cluster = {
        "name": "echo",
        "type": "STATIC",
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options},
        "load_assignment": {
            "cluster_name": "echo",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(int(target.rpartition(":")[2]))}}]}],
        },
    }
    listener = {
        "name": "echo",
        "address": _address(port),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    config = folder / "plain-envoy.json"
    config.write_text(json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}}))
    program = envoy_install.find(None)
    command = [str(program), "--config-path", str(config), "--disable-hot-restart", "--log-level", "error"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + ENVOY_START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.05)
        else:
            return process, f"127.0.0.1:{port}"
    process.kill()
    raise SystemExit("the plain Envoy does not open its address")


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def messages(chunk_bytes: int) -> list[bytes]:
    shape, piece = [1, MODELS[MODEL]], bytes(chunk_bytes)
    sent = [pb.CheckpointRequest(meta=pb.CheckpointMeta(model_name=MODEL))]
    sent += [pb.CheckpointRequest(chunk=pb.TensorChunk(shape=shape, data=piece))] * (TENSOR_BYTES // chunk_bytes)
    return [message.SerializeToString() for message in sent]


async def round_trip(channel: Any, sent: Sequence[bytes]) -> float:
    """Seconds of one call; what comes back is counted and forgotten."""
    started, received = time.perf_counter(), 0
    async for message in channel.stream_stream(CHECKPOINT)(iter(sent)):
        received += len(message)
    if received < TENSOR_BYTES:
        raise SystemExit(f"{received} bytes came back, expected {TENSOR_BYTES}")
    return time.perf_counter() - started


def processor_s(pids: set[int]) -> float:
    """User and system time of the processes so far."""
    fields = [(Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / _TICKS_PER_S


async def measure(addresses: dict[str, tuple[str, set[int]]], sent: Sequence[bytes], repeats: int) -> bool:
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in addresses}
    channels = {way: grpc.aio.insecure_channel(address, options=UNLIMITED) for way, (address, _) in addresses.items()}
    for way in addresses:
        await round_trip(channels[way], sent)
    for repeat in range(repeats):
        for way in addresses if repeat % 2 == 0 else reversed(addresses):
            pids = {os.getpid(), *addresses[way][1]}
            before = processor_s(pids)
            wall = await round_trip(channels[way], sent)
            times[way].append((wall, processor_s(pids) - before))
    for channel in channels.values():
        await channel.close()
    wall, processor = (
        {way: statistics.median(each[index] for each in times[way]) for way in times} for index in (0, 1)
    )
    for way in times:
        rate = 2 * TENSOR_BYTES / wall[way] / 2**20
        print(f"{way:<18}{wall[way] * 1e3:8.0f} ms {rate:8.0f} MiB/s {processor[way] * 1e3:8.0f} ms of processors")
    ratios = {
        way: [
            statistics.median(e[kind] / c[kind] for e, c in zip(times[way], times[OURS], strict=True))
            for kind in (0, 1)
        ]
        for way in (DIRECT, BEHIND_ENVOY)
    }
    for way, (of_time, of_processors) in ratios.items():
        print(f"throughput against the {way} {of_time:.2f}, by processor time {of_processors:.2f}")
    good = ratios[DIRECT][0] >= THROUGHPUT_AT_LEAST
    print(f"against the {DIRECT} {ratios[DIRECT][0]:.2f}   bar {THROUGHPUT_AT_LEAST}   {'ok' if good else 'MISSED'}")
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--chunk-kib", type=int, default=64)
    options = parser.parse_args(arguments)
    context = multiprocessing.get_context("spawn")
    ready = context.Queue()
    echoing = context.Process(target=echo, args=(ready,), daemon=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_identity(folder / "models" / MODEL, MODELS[MODEL])
        served = Served(folder, str(folder / "models"), "--bind", "127.0.0.1:0")
        envoy = None
        echoing.start()
        try:
            direct, state, pid = ready.get(), served.state, int(echoing.pid or 0)
            envoy, behind = plain_envoy(folder, direct)
            addresses = {
                DIRECT: (direct, {pid}),
                BEHIND_ENVOY: (behind, {pid, envoy.pid}),
                OURS: (state["address"], {state["pid"], *served.descendants()}),
            }
            passed = asyncio.run(measure(addresses, messages(options.chunk_kib * 1024), options.repeats))
        finally:
            for process in (echoing, envoy):
                if process is not None:
                    process.kill()
            served.end()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
