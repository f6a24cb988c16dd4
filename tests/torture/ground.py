"""One server under torture: a folder, a cache and a load of its own, and what must be left of them: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from endings import WIDTH
from footprint import permits_that_stay, pulses, roles, shared_memory
from load import CAPACITIES, LARGE_FLOATS, SETTLES_S, Load, connected, write_models
from serving import Served, alive

from native_service.client import AsyncClient, CallFailed, ServerFull
from native_service.operation.running_servers import RunningServer
from native_service.run_directory import runs_below
from nereid_backend.cache import cache_folder
from nereid_backend.errors import ServerUnavailable

MIB = 2**20
RECOVERS_S, ANSWERS_S = 60.0, 20.0
# Every kind of call, with room between them: what is tortured needs the processors, too.
CALLERS = {"unary": 2, "stream": 1, "checkpoint": 1, "program": 1, "cancel": 1, "deadline": 1, "bad": 1, "upload": 1}
REST_S = 0.02
_LOOK_S = 0.25
# What a cache keeps on purpose.
_KEPT = {"run", "run.lock", "triton", "environments", "programs", "xla"}
_GONE_S = 10.0
# What our log says of a bug; a model's own traceback is none.
_UNPLANNED = ("nobody planned", "a bug in", "never retrieved", "not followed any more")


class Missed(Exception):
    """Something that must hold does not."""


class Impossible(Exception):
    """This machine does not let a scenario be made."""


@dataclass
class Ground:
    """What a scenario works with."""

    folder: Path
    served: Served
    load: Load
    random: random.Random
    peak_bytes: int = 0
    recovery_s: float = 0.0

    @property
    def settings(self) -> Path:
        return self.folder / "nereid.yaml"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def pid_of(self, role: str) -> int:
        """The process that is ``role``: a model's name, supervisor, tritonserver or envoy."""
        found = [pid for pid, each in roles(self.served).items() if each == role]
        if not found:
            raise Missed(f"there is no process of {role}")
        return found[0]

    async def process_of(self, role: str) -> int:
        """The same, waiting for one that is being started again."""
        deadline = time.monotonic() + RECOVERS_S
        while True:
            with contextlib.suppress(Missed):
                return self.pid_of(role)
            if time.monotonic() > deadline:
                raise Missed(f"{role} is not started again")
            await asyncio.sleep(0.05)

    async def wait_a_while(self, least_s: float = 0.5, most_s: float = 2.0) -> None:
        await asyncio.sleep(self.random.uniform(least_s, most_s))

    async def kill(self, role: str, number: int = signal.SIGKILL) -> None:
        self.load.disturb()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid_of(role), number)

    async def recovers(self, models: Collection[str] = tuple(CAPACITIES), within_s: float = RECOVERS_S) -> None:
        """Wait until each of ``models`` has answered rightly three times in a row; the longest such wait is kept."""
        begun = time.monotonic()
        await asyncio.gather(*(self._answers(name, begun + within_s) for name in models))
        self.recovery_s = max(self.recovery_s, time.monotonic() - begun)

    async def _answers(self, name: str, deadline: float) -> None:
        right = 0
        async with AsyncClient(self.served.state["address"], attempts=1) as client:
            while right < 3:
                try:
                    async with asyncio.timeout(ANSWERS_S):
                        await _ask(client, name)
                    right += 1
                    continue
                except ServerFull:
                    pass  # the load has all permits; what was right before still is
                except (CallFailed, TimeoutError) as error:
                    right = 0
                    if time.monotonic() > deadline:
                        raise Missed(f"{name} does not answer: {error or 'nothing comes'}") from None
                await asyncio.sleep(0.05)

    async def reload(self) -> bool:
        """What ``nereid reload`` does; whether the server is as its settings say now."""
        (run,) = runs_below(self.cache)
        try:
            outcome = await asyncio.to_thread(RunningServer(run, {}).order, "/reload")
        except ServerUnavailable as error:  # nothing has changed
            print(f"reload: {error}", file=sys.stderr)
            return False
        return not outcome["failed"] and not outcome["refused"]

    async def next_start(self) -> None:
        """The server has ended: another one with the same settings and cache starts, answers and ends."""
        await self.load.pause()
        self.served.state_file.unlink(missing_ok=True)
        await asyncio.to_thread(self.served.process.wait)
        begun = time.monotonic()
        after = await asyncio.to_thread(self._start)
        self.recovery_s = max(self.recovery_s, time.monotonic() - begun)
        code, output = await asyncio.to_thread(after.end)
        if code != 0:
            raise Missed(f"the next server ended with code {code}: {output.splitlines()[-1:]}")

    async def start_and_kill(self, after_s: float) -> None:
        beside = await asyncio.to_thread(self._start, wait=False)
        await asyncio.sleep(after_s)
        beside.process.kill()
        await asyncio.to_thread(beside.process.wait)
        beside.state_file.unlink(missing_ok=True)

    def _start(self, *, wait: bool = True) -> Served:
        own = {"NEREID_CACHE_DIR": str(self.cache), "TMPDIR": str(self.folder / "tmp")}
        log = self.folder / f"log-{time.monotonic_ns()}"
        return Served(self.folder, "--config", str(self.settings), log=log, environment=own, wait=wait)

    async def until_gone(self, pids: Collection[int], within_s: float = RECOVERS_S) -> None:
        """Wait for the end of processes; the wait is kept as a recovery."""
        begun = time.monotonic()
        while left := alive(set(pids)):
            if time.monotonic() > begun + within_s:
                raise Missed(f"not gone within {within_s:g} s: {', '.join(map(_command, left))}")
            await asyncio.sleep(0.05)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"{pid} {(Path('/proc') / str(pid) / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()}"
    return str(pid)


async def _ask(client: AsyncClient, name: str) -> None:
    """A call of one of the models of the load, and the check of its answer. Raises CallFailed."""
    if name == "job":
        async with await client.run("job", b"12345") as job:
            right = (await job.outputs())["output"].tobytes() == (5).to_bytes(4, "little")
    else:
        width = {"adder": 4, "slow": WIDTH, "large": LARGE_FLOATS}[name]
        values = np.ones((1, width), np.float32)
        output = (await client.infer(name, values))["output"]
        # A sum may differ in its last bits.
        right = np.allclose(output, WIDTH + 1 if name == "slow" else values + 1, rtol=1e-4)
    if not right:
        raise Missed(f"{name} gave a wrong answer")


@dataclass(frozen=True)
class Terms:
    """What holds for every scenario unless it says otherwise."""

    models: str = ""  # what is added to the settings of further models
    most_mib: int = 1500
    exit_code: int = 0


@asynccontextmanager
async def standing(folder: Path, seed: int, terms: Terms, prepare: Callable[[Path], None]) -> AsyncIterator[Ground]:
    """A server under load; at the end everything that must hold is looked at. Raises Missed.

    ``prepare`` may put further models beside those of the load, or a small disk below the cache.
    """
    (cache := folder / "cache").mkdir(mode=0o700)
    for name in ("tmp", "models"):
        (folder / name).mkdir()
    prepare(folder)
    for name in ("triton", "environments"):  # fetched and built once for all
        (cache_folder() / name).mkdir(mode=0o700, exist_ok=True)
        (cache / name).symlink_to(cache_folder() / name)
    settings = write_models(folder, terms.models)
    own = {"NEREID_CACHE_DIR": str(cache), "TMPDIR": str(folder / "tmp")}
    served = await asyncio.to_thread(
        lambda: Served(folder, "--config", str(settings), log=folder / "log", environment=own)
    )
    try:
        async with connected(served.state["address"], seed) as load:
            ground = Ground(folder, served, load, random.Random(seed))
            watching = asyncio.create_task(_watch_memory(ground))
            load.start(CALLERS, REST_S)
            try:
                yield ground
                await load.pause()
                await _settles(ground)
            finally:
                watching.cancel()
        if ground.peak_bytes > terms.most_mib * MIB:
            raise Missed(f"{ground.peak_bytes // MIB} MiB were held, {terms.most_mib} may be")
    finally:
        code, output = await asyncio.to_thread(served.end)
    _is_clean(folder, code, output, terms)


async def _watch_memory(ground: Ground) -> None:
    while True:
        with contextlib.suppress(OSError, IndexError):
            held = sum(pulse.held_bytes for pulse in pulses(ground.served).values())
            held += sum(shared_memory(ground.served).values())
            ground.peak_bytes = max(ground.peak_bytes, held)
        await asyncio.sleep(_LOOK_S)


async def _settles(ground: Ground) -> None:
    """After the load: it met nothing wrong, every permit is back."""
    if ground.served.process.poll() is None:
        for model, count in (await permits_that_stay(ground.served, SETTLES_S)).items():
            ground.load.blame(f"{count} permits of {model} are not back")
    if ground.load.problems:
        raise Missed("; ".join(ground.load.problems[:3]))


def _is_clean(folder: Path, code: int, output: str, terms: Terms) -> None:
    """After the server: its exit code is right, and no process, shared memory or file of it is left."""
    if code != terms.exit_code:
        raise Missed(f"it ended with code {code}: {output.splitlines()[-1:]}")
    if unplanned := [line for line in output.splitlines() if any(mark in line for mark in _UNPLANNED)]:
        raise Missed(f"nobody planned for it: {unplanned[0]}")
    deadline = time.monotonic() + _GONE_S
    while left := _left(folder):
        if time.monotonic() > deadline:
            raise Missed(f"left behind: {', '.join(left)}")
        time.sleep(0.1)


def _left(folder: Path) -> list[str]:
    cache = folder / "cache"
    left = [f"process {pid}" for pid in _processes_of(folder)]
    mark = hashlib.sha256(os.fsencode(cache)).hexdigest()[:8]
    left += [f"shared memory {path.name}" for path in Path("/dev/shm").glob(f"nereid-{mark}-*")]
    left += [path.name for path in cache.iterdir() if path.name not in _KEPT]
    left += [f"run {path.name}" for path in (cache / "run").glob("*")]
    left += [f"temporary {path.name}" for path in (folder / "tmp").iterdir()]
    return left + [path.name for path in folder.glob("state-*")]


def _processes_of(folder: Path) -> list[int]:
    """Whose environment, command line or folder is below ``folder``."""
    mark, found = os.fsencode(folder), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                texts = (entry / "environ").read_bytes(), os.fsencode((entry / "cwd").readlink())
                if any(mark in text for text in texts):
                    found.append(int(entry.name))
    return found
