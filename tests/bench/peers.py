"""nereid beside its peers: the same ONNX and StableHLO models, the same requests, one run, windows in turn.

Contestants: nereid at its public address and at Triton's port, bare Triton with a hand-written model.py, KServe's
Python server, LitServe, mosec without and with batches, and with batches in as many threads as there are processors.
The peers have environments of their own, built once in the cache folder (`NEREID_CACHE_DIR`) from the package index.
The client (replay.py) is one asyncio process that shares the processors with the servers; its own cost a call is in the
table. Answers are compared with those of the models in this process before anything is measured.

usage: python peers.py [--seconds 1.5] [--rounds 4] [--without KServe] [--write]

--write puts the tables into peer_servers/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import importlib.metadata
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tritonclient.grpc import service_pb2

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent / "peer_servers"))
import peer_models
import replay
from serving import Served

from converters.convert import convert
from converters.exporters import export_jax
from native_service.triton import embedded
from native_service.triton.process import TritonServer
from nereid_backend.cache import cache_folder

SERVERS = Path(__file__).resolve().parent / "peer_servers"
JAX = f"jax=={importlib.metadata.version('jax')}"
REQUIREMENTS = {
    "kserve": ("kserve==0.21.0", "onnxruntime", JAX),
    "litserve": ("litserve==0.2.19", "onnxruntime", JAX),
    "mosec": ("mosec==0.9.8", "onnxruntime", JAX),
}
NEREID, PORT, BARE, KSERVE, LITSERVE = "nereid", "nereid, Triton's port", "bare Triton", "KServe", "LitServe"
MOSEC, MOSEC_BATCHES, MOSEC_THREADS = "mosec", "mosec, batches", "mosec, batches, threads"
START_TIMEOUT_S, STOP_TIMEOUT_S = 180, 15
INFER = "/inference.GRPCInferenceService/ModelInfer"
PROCESSORS = len(os.sched_getaffinity(0))
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MARK = "<!-- written by peers.py -->"


class Work(NamedTuple):
    """A request of ``rows`` rows of a model, from so many clients."""

    model: str
    rows: int
    clients: int


WORKLOADS = (
    *(Work("echo", 1, clients) for clients in (1, 8, 32)),
    *(Work("mlp", 1, clients) for clients in (1, 8, 32)),
    *(Work("mlp14m", 1, clients) for clients in (1, 8, 32)),
    *(Work("mlp14m", 32, clients) for clients in (1, 8)),
    *(Work("minilm", 1, clients) for clients in (1, 8, 32)),
    *(Work("mib4", 1, clients) for clients in (1, 8)),
)


@dataclass
class Contestant:
    """A server that is up. ``process``: the root of the processes whose time on the processors is counted."""

    name: str
    port: int
    process: int
    grpc: bool
    prefix: str = ""

    def replay(self, model: str, x: np.ndarray) -> Any:
        """What makes a connection that sends ``x``."""
        if not self.grpc:
            return partial(replay.Http1, f"/{model}", x.tobytes())
        message = service_pb2.ModelInferRequest(model_name=f"{self.prefix}{model}")
        message.inputs.add(name="input", datatype=peer_models.KSERVE_TYPES[x.dtype.type], shape=x.shape)
        message.raw_input_contents.append(x.tobytes())
        return partial(replay.Grpc, INFER, message.SerializeToString())

    def result(self, answer: bytes) -> np.ndarray:
        if self.grpc:
            message = service_pb2.ModelInferResponse.FromString(answer)
            if not message.raw_output_contents:
                return np.array(message.outputs[0].contents.fp32_contents, np.float32)
            answer = message.raw_output_contents[0]
        return np.frombuffer(answer, np.float32)


class Figures(NamedTuple):
    """Medians over the windows of a contestant."""

    per_second: float
    p50_ms: float
    p99_ms: float
    server_ms: float
    """On the processors, all processes of the server, a call."""
    client_ms: float


def environment(peer: str) -> Path:
    """The Python of ``peer``, in an environment that is built when it is not there."""
    wanted = REQUIREMENTS[peer]
    digest = hashlib.sha256(" ".join((*wanted, platform.python_version())).encode()).hexdigest()[:12]
    folder = cache_folder() / "peers" / f"{peer}-{digest}"
    python = folder / "bin" / "python"
    if not (folder / ".done").exists():
        print(f"building the environment of {peer}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted], check=True)
        (folder / ".done").touch()
    return python


def free_port() -> int:
    """Of two in a row: KServe wants an HTTP port beside that of gRPC."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def write_folders(folder: Path, models: Path) -> None:
    """Nereid folders of the ONNX models, a bundle of the other."""
    for name, (width_in, width_out) in peer_models.WIDTHS.items():
        target = folder / name
        if name == "minilm":
            embed, params = peer_models.encoder()
            ids = peer_models.example(name, peer_models.SIZES[-1])
            names: dict[str, Any] = {"input_names": ["input"], "output_names": ["output"]}
            export_jax(embed, params, (ids,), target, peer_models.SIZES, provenance=None, **names)
            continue
        target.mkdir(parents=True)
        (target / "model.onnx").write_bytes((models / f"{name}.onnx").read_bytes())
        sizes = f"input_shape: [{width_in}]\noutput_shape: [{width_out}]\n"
        batch = f"max_batch_size: {peer_models.LARGEST_BATCH[name]}\n"
        (target / "model_inference.textproto").write_text(sizes + batch)


def write_bare(repository: Path) -> None:
    """A Triton repository as one writes it by hand, beside the converted models."""
    for name, (width_in, width_out) in peer_models.WIDTHS.items():
        target = repository / f"bare_{name}"
        (target / "1").mkdir(parents=True)
        (target / "1" / "model.py").write_bytes((SERVERS / "triton_model.py").read_bytes())
        (target / "config.pbtxt").write_text(
            f'backend: "python" max_batch_size: {peer_models.LARGEST_BATCH[name]}\n'
            f'input [{{name: "input" data_type: TYPE_{peer_models.KSERVE_TYPES[peer_models.DTYPES[name]]} '
            f"dims: [{width_in}]}}]\n"
            f'output [{{name: "output" data_type: TYPE_FP32 dims: [{width_out}]}}]\n'
            "instance_group [{kind: KIND_CPU count: 1}] dynamic_batching {}\n"
            f'parameters [{{key: "model" value {{string_value: "{name}"}}}},\n'
            f' {{key: "folder" value {{string_value: "{SERVERS}"}}}}]\n'
        )


@contextlib.asynccontextmanager
async def contestants(scratch: Path, wanted: Sequence[str]) -> AsyncIterator[list[Contestant]]:
    """Start what is ``wanted``, one after another; all stay up. End everything in the end."""
    models = scratch / "models"
    models.mkdir()
    peer_models.write(models)
    os.environ["PEER_MODELS"] = str(models)
    found: list[Contestant] = []
    async with contextlib.AsyncExitStack() as stack:
        say = partial(print, "starting", file=sys.stderr, flush=True)
        if NEREID in wanted:
            say(NEREID)
            found.append(serve_nereid(scratch, models, stack))
        if PORT in wanted or BARE in wanted:
            say(BARE)
            found += [each for each in await serve_triton(scratch, stack) if each.name in wanted]
        # Its own time limit is three seconds.
        mosec = ("--log-level", "warning", "--max-request-size", str(2**26), "--timeout", "60000")
        for name, script, options, variables in (
            (KSERVE, "kserve", (), {}),
            (LITSERVE, "litserve", (), {}),
            (MOSEC, "mosec", mosec, {"PEER_BATCH": "0"}),
            (MOSEC_BATCHES, "mosec", mosec, {"PEER_BATCH": "1"}),
            (MOSEC_THREADS, "mosec", mosec, {"PEER_BATCH": "1", "PEER_THREADS": str(PROCESSORS)}),
        ):
            if name in wanted:
                say(name)
                found.append(await serve_peer(name, script, options, variables, scratch, stack))
        yield found


def serve_nereid(scratch: Path, models: Path, stack: contextlib.AsyncExitStack) -> Contestant:
    write_folders(scratch / "folders", models)
    entries = "".join(f"  - {{name: {name}, device: cpu, queue_capacity: 64}}\n" for name in peer_models.WIDTHS)
    (scratch / "nereid.yaml").write_text(
        f"server: {{bind_addr: '127.0.0.1:0', ml_backends_path: folders}}\nmodels:\n{entries}"
    )
    served = Served(scratch, "--config", str(scratch / "nereid.yaml"), log=scratch / "nereid.log")
    stack.callback(served.end)
    return Contestant(NEREID, int(served.state["address"].rpartition(":")[2]), served.process.pid, grpc=True)


async def serve_triton(scratch: Path, stack: contextlib.AsyncExitStack) -> list[Contestant]:
    """One server with both repositories: converted, and written by hand."""
    repository = scratch / "repository"
    if not (scratch / "folders").exists():
        write_folders(scratch / "folders", scratch / "models")
    for name in peer_models.WIDTHS:
        convert(scratch / "folders" / name, repository)
    write_bare(repository)
    prefix = f"nereid-bench-{os.getpid()}-"
    server = await stack.enter_async_context(
        TritonServer(await embedded.find(), repository, shared_memory_prefix=prefix)
    )
    before = children(os.getpid())
    await server.start()
    (process,) = children(os.getpid()) - before
    for name in peer_models.WIDTHS:
        for model in (name, f"bare_{name}"):
            await server.load(model, START_TIMEOUT_S)
    port = int(server.addresses.grpc.rpartition(":")[2])
    return [Contestant(PORT, port, process, grpc=True), Contestant(BARE, port, process, grpc=True, prefix="bare_")]


async def serve_peer(
    name: str,
    script: str,
    options: Sequence[str],
    variables: dict[str, str],
    scratch: Path,
    stack: contextlib.AsyncExitStack,
) -> Contestant:
    port = free_port()
    place = ("--address", "127.0.0.1", "--port", str(port)) if script == "mosec" else (str(port),)
    command = [environment(script), SERVERS / f"{script}_server.py", *place, *options]
    folder = scratch / name.replace(" ", "-")
    folder.mkdir()
    own = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
    own.pop("PYTHONPATH", None)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=own, stdout=log, stderr=log, process_group=0)
    stack.callback(end, process)
    return Contestant(name, port, process.pid, grpc=script == "kserve")


def end(process: subprocess.Popen[Any]) -> None:
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def children(root: int) -> set[int]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == root:
                found.add(int(folder.name))
    return found


def processor_s(root: int) -> float:
    """What the process and all below it have used so far."""
    parents, used = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)], used[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:13]))
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(used.get(pid, 0) for pid in family) / TICKS_PER_S


async def connected(each: Contestant, work: Work, make: Any) -> list[Any]:
    """Connections to a model that answers. A server that starts may refuse calls until it is ready."""
    end_s = time.monotonic() + START_TIMEOUT_S
    while True:
        opened: list[Any] = []
        try:
            opened = await replay.connect(make, each.port, 1 if each.grpc else work.clients)
            async with asyncio.timeout(START_TIMEOUT_S):
                await opened[0].call()
            return opened
        except (OSError, replay.Refused) as error:
            for connection in opened:
                connection.close()
            if time.monotonic() > end_s or "grpc-status 3" in str(error):
                raise SystemExit(f"{each.name} does not answer {work.model}: {error}") from None
            await asyncio.sleep(0.2)


async def check(each: Contestant, work: Work, x: np.ndarray, expected: np.ndarray) -> int:
    """Wait until the model answers, and compare; the size of its answers. Raises SystemExit for a wrong one."""
    opened = await connected(each, work, each.replay(work.model, x))
    answers = [await connection.call() for connection in opened]
    for connection in opened:
        connection.close()
    for answer in answers:
        if not np.allclose(each.result(answer).reshape(expected.shape), expected, rtol=1e-3, atol=1e-3):
            raise SystemExit(f"{each.name} gives a wrong answer of {work.model}")
    return len(answers[0])


async def measure(each: Contestant, work: Work, x: np.ndarray, size: int, seconds: float) -> Figures:
    """One window, on connections of its own: servers close those that wait for their turn."""
    opened = await connected(each, work, each.replay(work.model, x))
    before = processor_s(each.process)
    took = await replay.window(opened, work.clients, seconds, size)
    spent_s, calls = processor_s(each.process) - before, len(took.times_s)
    for connection in opened:
        connection.close()
    p50_s, p99_s = np.quantile(took.times_s, [0.5, 0.99])
    return Figures(took.per_second, p50_s * 1e3, p99_s * 1e3, spent_s / calls * 1e3, took.client_s / calls * 1e3)


async def compare(found: Sequence[Contestant], work: Work, seconds: float, rounds: int) -> dict[str, Figures]:
    x = peer_models.example(work.model, work.rows)
    expected = peer_models.load(work.model)(x)
    sizes = {each.name: await check(each, work, x, expected) for each in found}
    windows: dict[str, list[Figures]] = {each.name: [] for each in found}
    for number in range(rounds + 1):
        for each in found if number % 2 == 0 else reversed(found):
            windows[each.name].append(await measure(each, work, x, sizes[each.name], seconds))
    # The first of each was for getting warm.
    return {name: Figures(*map(statistics.median, zip(*rows[1:], strict=True))) for name, rows in windows.items()}


def table(work: Work, figures: dict[str, Figures]) -> str:
    rows = f", {work.rows} rows" if work.rows > 1 else ""
    lines = [
        f"### {work.model}{rows}, {work.clients} client{'s' * (work.clients > 1)}\n",
        "| | calls/s | of bare Triton | p50 ms | p99 ms | server's CPU ms | client's |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    base = figures[BARE].per_second if BARE in figures else float("nan")
    for name, each in figures.items():
        cells = f"{each.per_second:.0f} | {each.per_second / base:.2f} | {each.p50_ms:.2f} | {each.p99_ms:.2f}"
        lines.append(f"| {name} | {cells} | {each.server_ms:.3f} | {each.client_ms:.3f} |")
    return "\n".join(lines) + "\n"


def bars(found: dict[Work, dict[str, Figures]], bare_loop_rows: float) -> list[tuple[str, float, float]]:
    """What is asked of nereid, what was measured, and what it should be at least."""
    asked = []

    def ratio(words: str, work: Work, ours: str, theirs: str, at_least: float) -> None:
        figures = found.get(work, {})
        if ours in figures and theirs in figures:
            asked.append((words, figures[ours].per_second / figures[theirs].per_second, at_least))

    small, large = Work("mlp", 1, 32), Work("mlp14m", 1, 32)
    ratio("mlp, 32 clients: Triton's port to bare Triton", small, PORT, BARE, 0.95)
    for peer in (KSERVE, LITSERVE):
        ratio(f"mlp, 32 clients: Triton's port to {peer}", small, PORT, peer, 3)
        ratio(f"mlp, 32 clients: public address to {peer}", small, NEREID, peer, 2)
        figures = found.get(small, {})
        if PORT in figures and peer in figures:
            asked.append((f"the same, p99 of {peer} to ours", figures[peer].p99_ms / figures[PORT].p99_ms, 1))
    ratio("mlp14m, 32 clients: Triton's port to mosec with batches", large, PORT, MOSEC_BATCHES, 1)
    batch = found.get(Work("mlp14m", 32, 8), {})
    if PORT in batch:
        asked.append(("mlp14m, 32 rows: Triton's port to a bare loop", batch[PORT].per_second / bare_loop_rows, 0.9))
    return asked


def bare_loop(seconds: float) -> float:
    """Runs a second of the 14 M-parameter model with 32 rows, in a loop in this process and as many threads as ours."""
    run = peer_models.load("mlp14m", PROCESSORS)
    x = peer_models.example("mlp14m", 32)
    run(x)
    calls, begun = 0, time.perf_counter()
    while (passed := time.perf_counter() - begun) < seconds:
        run(x)
        calls += 1
    return calls / passed


async def run(wanted: Sequence[str], workloads: Sequence[Work], seconds: float, rounds: int) -> tuple[list[str], bool]:
    """The lines of the result, and whether every bar was met."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        async with contestants(Path(scratch), wanted) as found:
            results: dict[Work, dict[str, Figures]] = {}
            lines = []
            for work in workloads:
                results[work] = await compare(found, work, seconds, rounds)
                lines.append(table(work, results[work]))
                print(lines[-1], flush=True)
            asked = bars(results, bare_loop(seconds * rounds))
    verdicts = ["| bar | measured | at least | |", "| --- | --- | --- | --- |"]
    verdicts += [
        f"| {w} | {got:.2f} | {least:g} | {'met' if got >= least else '**missed**'} |" for w, got, least in asked
    ]
    versions = ", ".join(
        ["onnxruntime " + importlib.metadata.version("onnxruntime"), *(wanted[0] for wanted in REQUIREMENTS.values())]
    )
    machine = f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}"
    when = datetime.now(UTC).date().isoformat()
    head = (
        f"{when}, {machine}, load {load:.1f} before the start and {os.getloadavg()[0]:.1f} at the "
        f"end; {versions}; medians of {rounds} windows of {seconds} s."
    )
    print("\n".join([head, "", *verdicts]), flush=True)
    return [head, "", *verdicts, "", *lines], all(got >= least for _, got, least in asked)


def main() -> int:
    everybody = (NEREID, PORT, BARE, KSERVE, LITSERVE, MOSEC, MOSEC_BATCHES, MOSEC_THREADS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--without", action="append", choices=everybody, default=[])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--workload", action="append", metavar="MODEL:ROWS:CLIENTS", help="instead of all", default=[])
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing is left running
    wanted = [name for name in everybody if name not in options.without]
    chosen = [Work(model, int(rows), int(clients)) for model, rows, clients in (w.split(":") for w in options.workload)]
    lines, met = asyncio.run(run(wanted, chosen or WORKLOADS, options.seconds, options.rounds))
    if options.write:
        readme = SERVERS / "README.md"
        kept = readme.read_text().partition(MARK)[0]
        readme.write_text(f"{kept}{MARK}\n\n" + "\n".join(lines).rstrip() + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
