"""Mixed load at the public address of a real ``nereid serve``: every kind of call, each answer checked.

``write_models`` makes what is called. Calls that are cut, late or bad are part of it; a call may end in what it asked
for, for want of a permit, and while the server is disturbed with UNAVAILABLE. Anything else is a problem.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
from endings import CHECKPOINT, INFER, STREAM, write_slow
from serving import chunk, meta, write_adder
from tritonclient.grpc import service_pb2

from native_service.client import AsyncClient, CallFailed
from native_service.proto import inference_pb2 as pb

CAPACITIES = {"adder": 16, "slow": 8, "large": 4, "job": 3}
LARGE_FLOATS = 512 * 1024
CALLERS = {"unary": 4, "stream": 2, "checkpoint": 2, "program": 2, "cancel": 2, "deadline": 2, "bad": 2, "upload": 1}
ROUGH = ("cancel", "deadline", "upload")
# A call that takes longer hangs; a death may take calls along for so long.
HUNG_AFTER_S, DISTURBED_S = 60.0, 30.0
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


class Connections(NamedTuple):
    """What one client of the server has open."""

    channel: Any
    client: AsyncClient


class Load:
    """The callers, and what they met."""

    def __init__(self, patient: Connections, rough: Connections, seed: int) -> None:
        """``rough`` is for calls that are cut: Envoy closes a connection on which most calls are."""
        self.patient, self._rough = patient, rough
        self.random = random.Random(seed)
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.problems: list[str] = []
        self._gate = asyncio.Event()
        self._in_flight = 0
        self._disturbed_until = 0.0
        self._meanwhile = {GONE}
        self._over = False
        self._rest_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, callers: Mapping[str, int] = CALLERS, rest_s: float = 0.0) -> None:
        """Call again and again, so many of each kind side by side, each with a rest between its calls."""
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
        self._rest_s = rest_s
        self._gate.set()
        kinds = [kind for kind, count in callers.items() for _ in range(count)]
        self._tasks = [asyncio.create_task(self._caller(kind, calls[kind])) for kind in kinds]

    async def stop(self) -> None:
        """Cut what is still called."""
        self._over = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def pause(self) -> None:
        """Let all calls end; ``resume`` goes on."""
        self._gate.clear()
        deadline = time.monotonic() + HUNG_AFTER_S + SETTLES_S
        while self._in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if self._in_flight:
            self.blame(f"{self._in_flight} calls do not end")

    def resume(self) -> None:
        self._gate.set()

    def disturb(self, seconds: float = DISTURBED_S, *codes: grpc.StatusCode) -> None:
        """From now on, for so long, calls may end with UNAVAILABLE, or with one of ``codes``."""
        self._disturbed_until = max(self._disturbed_until, time.monotonic() + seconds)
        self._meanwhile.update(codes)

    def blame(self, text: str) -> None:
        if len(self.problems) < 50:
            self.problems.append(f"{time.strftime('%H:%M:%S')} {text}")

    def ends(self, kind: str) -> dict[str, int]:
        """How the calls of one kind ended."""
        return {outcome: count for (k, outcome), count in sorted(self.outcomes.items()) if k == kind}

    async def _caller(self, kind: str, call: Callable[[Connections], Awaitable[str]]) -> None:
        on = self._rough if kind in ROUGH else self.patient
        while not self._over:
            await self._gate.wait()
            self._in_flight += 1
            try:
                async with asyncio.timeout(HUNG_AFTER_S):
                    outcome = await call(on)
            except TimeoutError:
                outcome = "HUNG"
                self.blame(f"{kind}: a call hung for {HUNG_AFTER_S:g} s")
            except Wrong as error:
                outcome = "WRONG"
                self.blame(f"{kind}: {error}")
            finally:
                self._in_flight -= 1
            self.outcomes[kind, outcome] += 1
            if rest_s := 0.05 if outcome in ("refused", "unavailable") else self._rest_s:
                await asyncio.sleep(rest_s)

    async def fill(self) -> None:
        """As many of the largest calls as are taken at once: a process then has held what it ever may."""
        values = self._values((2, LARGE_FLOATS))
        for _ in range(3):
            calls = (self.patient.client.infer("large", values) for _ in range(CAPACITIES["large"]))
            await asyncio.gather(*calls, return_exceptions=True)

    # Calls: each gives how it ended, and raises Wrong for what must not be.

    async def _unary(self, on: Connections) -> str:
        model = self.random.choice(("adder", "slow"))
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
        values = self._values((self.random.randint(1, 2), LARGE_FLOATS))
        with self._endings(on) as ended:
            outputs = await on.client.infer("large", values)
            _same(outputs["output"], values + 1)
        return ended()

    async def _program(self, on: Connections) -> str:
        data = self.random.randbytes(self.random.randint(1, 100_000))
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
        kind = self.random.choice((self._unary, self._checkpoint, self._program))
        task = asyncio.ensure_future(kind(on))
        await asyncio.wait((task,), timeout=self.random.uniform(0, 0.2))
        task.cancel()
        with suppress(asyncio.CancelledError):
            return await task
        return "cancelled"

    async def _late(self, on: Connections) -> str:
        timeout_s = self.random.uniform(0.001, 0.1)
        with self._endings(on, grpc.StatusCode.DEADLINE_EXCEEDED) as ended:
            if self.random.random() < 0.5:
                request, check = self._request("slow")
                call = on.channel.unary_unary(INFER)(request, timeout=timeout_s)
                check(service_pb2.ModelInferResponse.FromString(await call))
            else:
                values = self._values((1, LARGE_FLOATS))
                _same((await on.client.infer("large", values, timeout_s=timeout_s))["output"], values + 1)
        return ended()

    async def _bad(self, on: Connections) -> str:
        refused = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
        request = service_pb2.ModelInferRequest(model_name=self.random.choice(("adder", "slow", "large", "nobody")))
        shape = self.random.choice(([1, 5], [0, 4], [2**62], [-1, 4], [], [1, 4, 4]))
        request.inputs.add(name="input", datatype="FP32", shape=shape)
        request.raw_input_contents.append(self.random.randbytes(self.random.randint(0, 40)))
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
            await asyncio.sleep(self.random.uniform(0, 0.2))
            call.cancel()

        call = on.channel.stream_stream(CHECKPOINT, pb.CheckpointRequest.SerializeToString)(messages())
        with self._endings(on, grpc.StatusCode.CANCELLED) as ended, suppress(asyncio.CancelledError):
            async for _ in call:
                raise Wrong("half a tensor was answered")
        return ended()

    def _request(self, model: str) -> tuple[bytes, Callable[[Any], None]]:
        """A request and the check of its answer."""
        values = self._values((1, 4 if model == "adder" else 16))
        request = service_pb2.ModelInferRequest(model_name=model, id=str(self.random.random()))
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
        return np.full(shape, self.random.randint(0, 1000), np.float32) + np.arange(shape[-1], dtype=np.float32) % 8

    def _endings(self, on: Connections, *expected: grpc.StatusCode) -> _Endings:
        return _Endings((lambda: True) if on is self._rough else self._is_disturbed, expected, self._meanwhile)

    def _is_disturbed(self) -> bool:
        return time.monotonic() < self._disturbed_until


class _Endings:
    """How a call may fail: for want of a permit always, as ``expected``, and as ``meanwhile`` while it is disturbed."""

    def __init__(
        self,
        is_disturbed: Callable[[], bool],
        expected: Sequence[grpc.StatusCode],
        meanwhile: Collection[grpc.StatusCode],
    ) -> None:
        self._is_disturbed, self._expected, self._meanwhile = is_disturbed, expected, meanwhile
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
        elif code in self._meanwhile and disturbed:
            self._outcome = "unavailable"
        else:
            raise Wrong(f"{code.name}: {text}") from None
        return True


def _same(got: np.ndarray, expected: np.ndarray) -> None:
    if got.shape != expected.shape or not np.array_equal(got, expected):
        raise Wrong(f"{np.count_nonzero(got != expected) if got.shape == expected.shape else got.shape} values differ")


@asynccontextmanager
async def connected(address: str, seed: int) -> AsyncIterator[Load]:
    """A load of the server at ``address`` that has not started; it stops at the end."""
    async with AsyncExitStack() as opened:
        load = Load(*[await _connect(address, opened) for _ in range(2)], seed)
        opened.push_async_callback(load.stop)
        yield load


async def _connect(address: str, opened: AsyncExitStack) -> Connections:
    # Channels with equal options would share a connection.
    own = (("grpc.use_local_subchannel_pool", 1),)
    channel = await opened.enter_async_context(grpc.aio.insecure_channel(address, options=own))
    return Connections(channel, await opened.enter_async_context(AsyncClient(address, attempts=1)))


def write_models(folder: Path, more: str = "") -> Path:
    """The models of the load below ``folder`` and the settings that serve them, and what is there already.

    ``more`` is added to the settings of the latter.
    """
    (models := folder / "models").mkdir(exist_ok=True)
    others = [path.stem for path in sorted(models.iterdir())]
    write_adder(models / "adder.onnx")
    write_adder(models / "large.onnx", width=LARGE_FLOATS)
    write_slow(models / "slow.onnx")
    (models / "job").mkdir()
    (models / "job" / "main.py").write_text(JOB)
    (models / "job" / "requirements.txt").write_text("")
    (models / "job" / "model_inference.textproto").write_text("input_shape: [-1]\noutput_shape: [-1]\n")
    rows = "".join(f"  - {{name: {n}, device: cpu, queue_capacity: {c}}}\n" for n, c in CAPACITIES.items())
    rows += "".join(f"  - {{name: {name}, device: cpu, queue_capacity: 8{more}}}\n" for name in others)
    settings = folder / "nereid.yaml"
    settings.write_text(f"server: {{bind_addr: '127.0.0.1:0', ml_backends_path: models}}\nmodels:\n{rows}")
    return settings
