"""Mixed load at the public address of a real ``nereid serve``, with deaths of processes in between.

Unary, streamed and Checkpoint calls, programs, cancels, deadlines and bad requests run side by side; two processes of
models and Envoy are killed. Three times the load pauses: then no permit may be in use, and the memory, the descriptors
and the shared memory of every process are compared with what they were at the first pause (a process that came later:
at the first that saw it). Prints tables; exits 1 for a wrong answer, a hung call, a permit that is not back, or growth.

usage: python soak.py [--seconds 600] [--seed 1]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
from endings import CHECKPOINT, INFER, STREAM, write_slow
from serving import Served, chunk, meta, write_adder
from tritonclient.grpc import service_pb2

from native_service.client import AsyncClient, CallFailed
from native_service.envoy.admin import EnvoyAdmin
from native_service.envoy.settings import ADMIN_SOCKET
from native_service.proto import inference_pb2 as pb

CAPACITIES = {"adder": 16, "slow": 8, "large": 4, "job": 3}
LARGE_FLOATS = 512 * 1024
CALLERS = {"unary": 4, "stream": 2, "checkpoint": 2, "program": 2, "cancel": 2, "deadline": 2, "bad": 2, "upload": 1}
ROUGH = ("cancel", "deadline", "upload")
# A call that takes longer hangs; a death may take calls along for so long.
HUNG_AFTER_S, DISTURBED_S = 60.0, 30.0
FIRST_PAUSE, SECOND_PAUSE = 0.1, 0.7
STUB_KILLS, ENVOY_KILL = {"slow": 0.2, "large": 0.5}, 0.35
# Shorter runs are still warming up at their first pause.
JUDGES_MEMORY_FROM_S = 300.0
MOST_GROWTH, GRAIN_BYTES = 0.05, 4 * 2**20
# Envoy connects to Triton per model and worker, when a call comes; what leaks does so thousands of times.
SPARE_DESCRIPTORS = 12
SETTLES_S = 20.0
FULL, GONE = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE
# What grpc.aio's client says when the end of a call overtakes a message it is sending.
OWN_WORDS = "Internal error from Core"

JOB = """import os, sys
data = sys.stdin.buffer.read()
for index in range(20):
    print("line", index)
with open(os.environ["NEREID_OUTPUT_PATH"], "wb") as file:
    file.write(b"float32 1\\n" + len(data).to_bytes(4, "little"))
"""


class Wrong(Exception):
    """An answer that is not the right one."""


@dataclass(frozen=True)
class Pulse:
    """One process at a pause: bytes that it holds, descriptors that it has open."""

    role: str
    held_bytes: int
    descriptors: int


@dataclass
class Findings:
    """What went on. Anything in ``problems`` fails the run."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    pulses: list[dict[int, Pulse]] = field(default_factory=list)
    regions: list[dict[str, int]] = field(default_factory=list)  # the bytes of each

    def blame(self, text: str) -> None:
        if len(self.problems) < 50:
            self.problems.append(text)


class Connections(NamedTuple):
    """What one client of the server has open."""

    channel: Any
    client: AsyncClient


class Soak:
    """The callers, the deaths and the pauses."""

    def __init__(self, served: Served, patient: Connections, rough: Connections, seconds: float, seed: int) -> None:
        """``rough`` is for calls that are cut: Envoy closes a connection on which most calls are."""
        self._served, self._patient, self._rough, self._seconds = served, patient, rough, seconds
        self._random = random.Random(seed)
        self._gate = asyncio.Event()
        self._in_flight = 0
        self._disturbed_until = 0.0
        self._over = False
        self.findings = Findings()

    async def run(self) -> None:
        calls: dict[str, Callable[[Connections], Awaitable[str]]] = {
            "unary": self._unary,
            "stream": self._stream,
            "checkpoint": self._checkpoint,
            "program": self._program,
            "cancel": self._cancelled,
            "deadline": self._late,
            "bad": self._bad,
            "upload": self._given_up,
        }
        begun = time.monotonic()
        deaths = [(at, partial(self._kill_stub, model)) for model, at in STUB_KILLS.items()]
        pauses = [(at, self._pause) for at in (FIRST_PAUSE, SECOND_PAUSE, 1.0)]
        events = sorted([*deaths, (ENVOY_KILL, self._kill_envoy), *pauses], key=lambda event: event[0])
        self._gate.set()
        callers = [
            asyncio.create_task(self._caller(kind, calls[kind]))
            for kind, count in CALLERS.items()
            for _ in range(count)
        ]
        paused_s = 0.0
        for at, happen in events:
            await asyncio.sleep(max(0.0, begun + paused_s + at * self._seconds - time.monotonic()))
            before = time.monotonic()
            await happen()
            if happen == self._pause:
                paused_s += time.monotonic() - before
        self._over = True
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)

    async def _caller(self, kind: str, call: Callable[[Connections], Awaitable[str]]) -> None:
        on = self._rough if kind in ROUGH else self._patient
        while not self._over:
            await self._gate.wait()
            self._in_flight += 1
            try:
                async with asyncio.timeout(HUNG_AFTER_S):
                    outcome = await call(on)
            except TimeoutError:
                outcome = "HUNG"
                self.findings.blame(f"{kind}: a call hung for {HUNG_AFTER_S:g} s")
            except Wrong as error:
                outcome = "WRONG"
                self.findings.blame(f"{kind}: {error}")
            finally:
                self._in_flight -= 1
            self.findings.outcomes[kind, outcome] += 1
            if outcome in ("refused", "unavailable"):
                await asyncio.sleep(0.05)

    # Calls: each gives how it ended, and raises Wrong for what must not be.

    async def _unary(self, on: Connections) -> str:
        model = self._random.choice(("adder", "slow"))
        request, check = self._request(model)
        with self._endings(on) as ended:
            check(service_pb2.ModelInferResponse.FromString(await on.channel.unary_unary(INFER)(request)))
        return ended()

    async def _stream(self, on: Connections) -> str:
        pairs = [self._request("adder") for _ in range(3)]
        with self._endings(on) as ended:
            call = on.channel.stream_stream(STREAM)(iter([request for request, _ in pairs]))
            answers = [service_pb2.ModelStreamInferResponse.FromString(message) async for message in call]
            if len(answers) != len(pairs):
                raise Wrong(f"{len(answers)} answers to {len(pairs)} requests of a stream")
            for (_, check), answer in zip(pairs, answers, strict=True):
                if not answer.error_message:
                    check(answer.infer_response)
                elif "queue full" not in answer.error_message and not self._is_disturbed():
                    raise Wrong(answer.error_message)
        return ended()

    async def _checkpoint(self, on: Connections) -> str:
        values = self._values((self._random.randint(1, 2), LARGE_FLOATS))
        with self._endings(on) as ended:
            outputs = await on.client.infer("large", values)
            _same(outputs["output"], values + 1)
        return ended()

    async def _program(self, on: Connections) -> str:
        data = self._random.randbytes(self._random.randint(1, 100_000))
        with self._endings(on) as ended:
            async with await on.client.run("job", data) as job:
                lines = [line async for line in job]
                outputs = await job.outputs()
            if lines != [f"line {index}" for index in range(20)]:
                raise Wrong(f"the lines of a program were {lines[:3]} ... ({len(lines)})")
            if int.from_bytes(outputs["output"].tobytes(), "little") != len(data):
                raise Wrong("a program did not get its input")
        return ended()

    async def _cancelled(self, on: Connections) -> str:
        kind = self._random.choice((self._unary, self._checkpoint, self._program))
        task = asyncio.ensure_future(kind(on))
        await asyncio.wait((task,), timeout=self._random.uniform(0, 0.2))
        task.cancel()
        with suppress(asyncio.CancelledError):
            return await task
        return "cancelled"

    async def _late(self, on: Connections) -> str:
        timeout_s = self._random.uniform(0.001, 0.1)
        with self._endings(on, grpc.StatusCode.DEADLINE_EXCEEDED) as ended:
            if self._random.random() < 0.5:
                request, check = self._request("slow")
                call = on.channel.unary_unary(INFER)(request, timeout=timeout_s)
                check(service_pb2.ModelInferResponse.FromString(await call))
            else:
                values = self._values((1, LARGE_FLOATS))
                _same((await on.client.infer("large", values, timeout_s=timeout_s))["output"], values + 1)
        return ended()

    async def _bad(self, on: Connections) -> str:
        refused = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
        request = service_pb2.ModelInferRequest(model_name=self._random.choice(("adder", "slow", "large", "nobody")))
        shape = self._random.choice(([1, 5], [0, 4], [2**62], [-1, 4], [], [1, 4, 4]))
        request.inputs.add(name="input", datatype="FP32", shape=shape)
        request.raw_input_contents.append(self._random.randbytes(self._random.randint(0, 40)))
        with self._endings(on, *refused) as ended:
            await on.channel.unary_unary(INFER)(request.SerializeToString())
            raise Wrong(f"shape {shape} of {request.model_name} was taken")
        return ended()

    async def _given_up(self, on: Connections) -> str:
        """Half of a large tensor, then nothing more."""
        shape, piece = [1, LARGE_FLOATS], bytes(256 * 1024)

        async def messages() -> Any:
            yield meta("large")
            for _ in range(4):
                yield chunk(shape, piece, end=False)
            await asyncio.sleep(self._random.uniform(0, 0.2))
            call.cancel()

        call = on.channel.stream_stream(CHECKPOINT, pb.CheckpointRequest.SerializeToString)(messages())
        with self._endings(on, grpc.StatusCode.CANCELLED) as ended, suppress(asyncio.CancelledError):
            async for _ in call:
                raise Wrong("half a tensor was answered")
        return ended()

    def _request(self, model: str) -> tuple[bytes, Callable[[Any], None]]:
        """A request and the check of its answer."""
        values = self._values((1, 4 if model == "adder" else 16))
        request = service_pb2.ModelInferRequest(model_name=model, id=str(self._random.random()))
        request.inputs.add(name="input", datatype="FP32", shape=values.shape)
        request.raw_input_contents.append(values.tobytes())

        def check(response: Any) -> None:
            if response.id != request.id:
                raise Wrong("the answer of another call came")
            got = np.frombuffer(response.raw_output_contents[0], np.float32)
            if model == "adder":
                _same(got, values[0] + 1)
            elif not np.allclose(got, values.sum() + 1, rtol=1e-4):
                raise Wrong(f"slow gave {got} for a sum of {values.sum()}")

        return request.SerializeToString(), check

    def _values(self, shape: tuple[int, ...]) -> np.ndarray:
        # Whole numbers: right means equal, whatever the order of a sum.
        return np.full(shape, self._random.randint(0, 1000), np.float32) + np.arange(shape[-1], dtype=np.float32) % 8

    def _endings(self, on: Connections, *expected: grpc.StatusCode) -> _Endings:
        return _Endings((lambda: True) if on is self._rough else self._is_disturbed, expected)

    def _is_disturbed(self) -> bool:
        return time.monotonic() < self._disturbed_until

    # Deaths and pauses.

    async def _kill_stub(self, model: str) -> None:
        self._disturbed_until = time.monotonic() + DISTURBED_S
        (stub,) = (pid for pid, role in roles(self._served).items() if role == model)
        os.kill(stub, signal.SIGKILL)

    async def _kill_envoy(self) -> None:
        self._disturbed_until = time.monotonic() + DISTURBED_S
        os.kill(self._envoy(), signal.SIGKILL)

    def _envoy(self) -> int:
        (pid,) = (pid for pid, role in roles(self._served).items() if role == "envoy")
        return pid

    async def _pause(self) -> None:
        """Let all calls end and look at what is left."""
        self._gate.clear()
        deadline = time.monotonic() + HUNG_AFTER_S + SETTLES_S
        while self._in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if self._in_flight:
            self.findings.blame(f"{self._in_flight} calls do not end")
        await self._fill()
        await self._permits_are_back()
        await asyncio.sleep(2)
        self.findings.pulses.append(pulses(self._served))
        self.findings.regions.append(shared_memory(self._served))
        self._gate.set()

    async def _fill(self) -> None:
        """As many of the largest calls as are taken at once: at every pause a process has held what it ever may."""
        values = self._values((2, LARGE_FLOATS))
        for _ in range(3):
            calls = (self._patient.client.infer("large", values) for _ in range(CAPACITIES["large"]))
            await asyncio.gather(*calls, return_exceptions=True)

    async def _permits_are_back(self) -> None:
        admin = EnvoyAdmin(f"/proc/{self._envoy()}/cwd/{ADMIN_SOCKET}")
        try:
            deadline = time.monotonic() + SETTLES_S
            while any((used := await admin.permits_in_use()).values()) and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
        finally:
            await admin.close()
        for model, count in used.items():
            if count:
                self.findings.blame(f"{count} permits of {model} are not back")


class _Endings:
    """How a call may fail: for want of a permit always, as ``expected``, and while a process is being replaced."""

    def __init__(self, is_disturbed: Callable[[], bool], expected: Sequence[grpc.StatusCode]) -> None:
        self._is_disturbed, self._expected = is_disturbed, expected
        self._disturbed_before = is_disturbed()
        self._outcome = "right"

    def __enter__(self) -> Callable[[], str]:
        return lambda: self._outcome

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> bool:
        if isinstance(error, grpc.aio.AioRpcError):
            code, text = error.code(), error.details() or ""
        elif isinstance(error, CallFailed):
            code, text = grpc.StatusCode[error.status], str(error)
        else:
            return False
        disturbed = self._disturbed_before or self._is_disturbed()
        if code in self._expected:
            self._outcome = code.name.lower()
        elif code is FULL and "queue full" in text:
            self._outcome = "refused"
        elif text.startswith(OWN_WORDS):
            self._outcome = "lost by grpc.aio"
        elif code is GONE and disturbed:
            self._outcome = "unavailable"
        else:
            raise Wrong(f"{code.name}: {text}") from None
        return True


def _same(got: np.ndarray, expected: np.ndarray) -> None:
    if got.shape != expected.shape or not np.array_equal(got, expected):
        raise Wrong(f"{np.count_nonzero(got != expected) if got.shape == expected.shape else got.shape} values differ")


def roles(served: Served) -> dict[int, str]:
    """What each process of the server is; a model's process has the model's name."""
    found = {served.process.pid: "supervisor"}
    for pid in served.descendants():
        with suppress(OSError):
            words = (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")
            model = [word for word in words if word.endswith(b"/1/model.py")]
            program = Path(os.fsdecode(words[0])).name
            if model:
                found[pid] = Path(os.fsdecode(model[0])).parts[-3]
            elif program in ("tritonserver", "envoy"):
                found[pid] = program
            elif (Path("/proc") / str(pid) / "exe").exists():
                found[pid] = "envoy" if "envoy" in program else program
    return found


def pulses(served: Served) -> dict[int, Pulse]:
    found = {}
    for pid, role in roles(served).items():
        with suppress(OSError):
            process = Path("/proc") / str(pid)
            rollup = (process / "smaps_rollup").read_text()
            # Pages of files are shared with whatever else runs here, and shared memory is counted by its files.
            held = int(rollup.partition("\nAnonymous:")[2].split()[0]) * 1024
            found[pid] = Pulse(role, held, len(list((process / "fd").iterdir())))
    return found


def shared_memory(served: Served) -> dict[str, int]:
    """The regions of the server by name, and the bytes of each; those of calls have none any more."""
    files = Path("/dev/shm").glob(f"nereid-*-{served.process.pid}-*")
    found = {path.name: path.stat().st_blocks * 512 for path in files}
    for pid in roles(served):
        with suppress(OSError):
            for entry in (Path("/proc") / str(pid) / "fd").iterdir():
                if "-call-" in (name := str(entry.readlink())):
                    found[name] = entry.stat().st_size
    return found


def judge(findings: Findings, *, memory: bool) -> Iterator[str]:
    """Prints the tables; gives what is over the bars."""
    print(f"\n{'calls':<12}" + "how they ended")
    for kind in CALLERS:
        ends = {outcome: count for (k, outcome), count in sorted(findings.outcomes.items()) if k == kind}
        print(f"{kind:<12}" + ", ".join(f"{outcome} {count}" for outcome, count in ends.items()))
        if not ends.get("right") and kind in ("unary", "stream", "checkpoint", "program"):
            yield f"no {kind} call was right"
    print(f"\n{'process':<14}{'pid':>8}{'MiB before':>12}{'MiB after':>11}{'growth':>9}{'fds':>10}")
    first = {pid: pulse for pulses in reversed(findings.pulses) for pid, pulse in pulses.items()}
    for pid, after in findings.pulses[-1].items():
        before = first[pid]
        growth = after.held_bytes - before.held_bytes
        print(
            f"{after.role:<14}{pid:>8}{before.held_bytes / 2**20:>12.1f}{after.held_bytes / 2**20:>11.1f}"
            f"{growth / before.held_bytes:>9.1%}{before.descriptors:>5} {after.descriptors:>4}"
        )
        if memory and growth > max(MOST_GROWTH * before.held_bytes, GRAIN_BYTES):
            yield f"{after.role} grew by {growth / before.held_bytes:.1%}"
        if after.descriptors > before.descriptors + SPARE_DESCRIPTORS:
            yield f"{after.role} has {after.descriptors} descriptors, {before.descriptors} before"
    for regions, when in zip(findings.regions, ("first", "second", "last"), strict=True):
        print(f"{when + ' pause':<14}{len(regions)} regions of shared memory, {sum(regions.values()) / 2**20:.1f} MiB")
        if left := [name for name in regions if "-call-" in name]:
            yield f"{len(left)} regions of calls are left at the {when} pause"
    if len(findings.regions[-1]) > len(findings.regions[0]):
        yield f"there are {len(findings.regions[-1])} regions of shared memory, {len(findings.regions[0])} before"
    sizes = {name: size for regions in reversed(findings.regions) for name, size in regions.items()}
    for name, size in findings.regions[-1].items():
        if memory and size > sizes[name] * (1 + MOST_GROWTH):
            yield f"region {name} grew from {sizes[name]} to {size} bytes"


async def soak(served: Served, seconds: float, seed: int) -> list[str]:
    """Everything that is over the bars after so many seconds of load."""
    async with AsyncExitStack() as opened:
        patient, rough = [await connect(served, opened) for _ in range(2)]
        work = Soak(served, patient, rough, seconds, seed)
        await work.run()
    findings = work.findings
    return [*findings.problems, *judge(findings, memory=seconds >= JUDGES_MEMORY_FROM_S)]


async def connect(served: Served, opened: AsyncExitStack) -> Connections:
    address = served.state["address"]
    # Channels with equal options would share a connection.
    own = (("grpc.use_local_subchannel_pool", 1),)
    channel = await opened.enter_async_context(grpc.aio.insecure_channel(address, options=own))
    return Connections(channel, await opened.enter_async_context(AsyncClient(address, attempts=1)))


def serve(folder: Path) -> Served:
    (models := folder / "models").mkdir()
    write_adder(models / "adder.onnx")
    write_adder(models / "large.onnx", width=LARGE_FLOATS)
    write_slow(models / "slow.onnx")
    (models / "job").mkdir()
    (models / "job" / "main.py").write_text(JOB)
    (models / "job" / "requirements.txt").write_text("")
    (models / "job" / "model_inference.textproto").write_text("input_shape: [-1]\noutput_shape: [-1]\n")
    rows = "".join(f"  - {{name: {n}, device: cpu, queue_capacity: {c}}}\n" for n, c in CAPACITIES.items())
    (folder / "nereid.yaml").write_text(
        f"server: {{bind_addr: '127.0.0.1:0', ml_backends_path: models}}\nmodels:\n{rows}"
    )
    return Served(folder, "--config", str(folder / "nereid.yaml"), log=folder / "log")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        served = serve(Path(scratch))
        try:
            missed = asyncio.run(soak(served, options.seconds, options.seed))
        finally:
            code, output = served.end()
        if code != 0:
            missed.append(f"the server ended with code {code}")
        if missed:
            print("\nthe server's last lines:\n" + "\n".join(output.splitlines()[-40:]))
    print("\n" + ("\n".join(f"MISSED: {each}" for each in missed) or "all bars met"))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
