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
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from footprint import Pulse, envoy_of, permits_that_stay, pulses, roles, shared_memory
from load import CALLERS, SETTLES_S, Load, connected, write_models
from serving import Served

FIRST_PAUSE, SECOND_PAUSE = 0.1, 0.7
STUB_KILLS, ENVOY_KILL = {"slow": 0.2, "large": 0.5}, 0.35
# Shorter runs are still warming up at their first pause.
JUDGES_MEMORY_FROM_S = 300.0
MOST_GROWTH, GRAIN_BYTES = 0.05, 4 * 2**20
# Envoy connects to Triton per model and worker, when a call comes; what leaks does so thousands of times.
SPARE_DESCRIPTORS = 12


@dataclass
class Findings:
    """What was seen at the pauses."""

    pulses: list[dict[int, Pulse]] = field(default_factory=list)
    regions: list[dict[str, int]] = field(default_factory=list)  # the bytes of each


class Soak:
    """The deaths and the pauses of a load."""

    def __init__(self, served: Served, load: Load, seconds: float) -> None:
        self._served, self._load, self._seconds = served, load, seconds
        self.findings = Findings()

    async def run(self) -> None:
        begun = time.monotonic()
        deaths = [(at, partial(self._kill_stub, model)) for model, at in STUB_KILLS.items()]
        pauses = [(at, self._pause) for at in (FIRST_PAUSE, SECOND_PAUSE, 1.0)]
        events = sorted([*deaths, (ENVOY_KILL, self._kill_envoy), *pauses], key=lambda event: event[0])
        self._load.start()
        paused_s = 0.0
        for at, happen in events:
            await asyncio.sleep(max(0.0, begun + paused_s + at * self._seconds - time.monotonic()))
            before = time.monotonic()
            await happen()
            if happen == self._pause:
                paused_s += time.monotonic() - before
        await self._load.stop()

    async def _kill_stub(self, model: str) -> None:
        self._load.disturb()
        (stub,) = (pid for pid, role in roles(self._served).items() if role == model)
        os.kill(stub, signal.SIGKILL)

    async def _kill_envoy(self) -> None:
        self._load.disturb()
        os.kill(envoy_of(self._served), signal.SIGKILL)

    async def _pause(self) -> None:
        """Let all calls end and look at what is left."""
        await self._load.pause()
        await self._load.fill()
        for model, count in (await permits_that_stay(self._served, SETTLES_S)).items():
            self._load.blame(f"{count} permits of {model} are not back")
        await asyncio.sleep(2)
        deadline = time.monotonic() + SETTLES_S
        while any("-call-" in name for name in shared_memory(self._served)) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)  # those of the last calls are kept for a moment
        self.findings.pulses.append(pulses(self._served))
        self.findings.regions.append(shared_memory(self._served))
        self._load.resume()


def judge(load: Load, findings: Findings, *, memory: bool) -> Iterator[str]:
    """Prints the tables; gives what is over the bars."""
    print(f"\n{'calls':<12}" + "how they ended")
    for kind in CALLERS:
        ends = load.ends(kind)
        print(f"{kind:<12}" + ", ".join(f"{outcome} {count}" for outcome, count in ends.items()))
        if not ends.get("right") and kind in ("unary", "stream", "checkpoint", "program"):
            yield f"no {kind} call was right"
    print(f"\n{'process':<14}{'pid':>8}{'MiB before':>12}{'MiB after':>11}{'growth':>9}{'MiB spare':>10}{'fds':>10}")
    first = {pid: pulse for pulses in reversed(findings.pulses) for pid, pulse in pulses.items()}
    for pid, after in findings.pulses[-1].items():
        before = first[pid]
        growth = after.used_bytes - before.used_bytes
        print(
            f"{after.role:<14}{pid:>8}{before.used_bytes / 2**20:>12.1f}{after.used_bytes / 2**20:>11.1f}"
            f"{growth / before.used_bytes:>9.1%}{after.spare_bytes / 2**20:>10.1f}"
            f"{before.descriptors:>5} {after.descriptors:>4}"
        )
        if memory and growth > max(MOST_GROWTH * before.used_bytes, GRAIN_BYTES):
            yield f"{after.role} grew by {growth / before.used_bytes:.1%}"
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
    async with connected(served.state["address"], seed) as load:
        work = Soak(served, load, seconds)
        await work.run()
    return [*load.problems, *judge(load, work.findings, memory=seconds >= JUDGES_MEMORY_FROM_S)]


def serve(folder: Path) -> Served:
    return Served(folder, "--config", str(write_models(folder)), log=folder / "log")


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
