"""What runs out under load: the disk, shared memory, descriptors; and a clock that jumps."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
from ground import Ground, Impossible, Missed, Terms
from scenarios import scenario
from serving import write_adder

# A start asks for half a gibibyte of disk.
DISK_MIB, SHARED_MIB = 640, 192
# Of one process, beyond those it has open.
SPARE_DESCRIPTORS = 2
# Of a shortage and what comes after it.
LONGEST_S = 300
SHORT = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL, grpc.StatusCode.FAILED_PRECONDITION)


def mount(folder: Path, size_mib: int) -> None:
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m,mode=700", "none", folder], capture_output=True, text=True
    )
    if done.returncode:
        raise Impossible(f"no disk of its own ({done.stderr.strip()})")


def small_disk(folder: Path) -> None:
    mount(folder / "cache", DISK_MIB)


def small_shared_memory(_: Path) -> None:
    mount(Path("/dev/shm"), SHARED_MIB)


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """Not a byte is left in ``folder`` until the end."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (2**20, 4096):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    try:
        yield
    finally:
        ballast.unlink()


@scenario(prepare=small_disk)
async def the_disk_is_full(ground: Ground) -> None:
    """Calls that need no disk go on; a reload is refused and changes nothing; a model that dies comes back."""
    await ground.wait_a_while()
    with full(ground.cache):
        ground.load.disturb(LONGEST_S, *SHORT)
        await ground.recovers(("adder", "slow", "large"))
        write_adder(ground.folder / "models" / "adder.onnx", amount=7.0)
        if await ground.reload():
            raise Missed("a reload without room has gone well")
        await ground.kill("slow")
        await ground.kill("envoy")
        await ground.recovers(("adder", "slow", "large"))
    write_adder(ground.folder / "models" / "adder.onnx")
    if not await ground.reload():
        raise Missed("with room again a reload fails")
    await ground.recovers()


@scenario(prepare=small_shared_memory)
async def shared_memory_is_full(ground: Ground) -> None:
    """Calls fail with a reason or end with their process; nothing is wrong, and with room again all is served."""
    await ground.wait_a_while()
    ground.load.disturb(LONGEST_S, *SHORT)
    for _ in range(3):
        with full(Path("/dev/shm")):
            await ground.wait_a_while(1, 3)
            await ground.kill(ground.random.choice(("adder", "large")))
            await ground.wait_a_while(1, 3)
        await ground.recovers(within_s=120)


@scenario()
async def descriptors_run_out(ground: Ground) -> None:
    """In each process in turn: it goes on when there are some again, and what died of it was started again."""
    ground.load.disturb(LONGEST_S, *SHORT)
    for role in ("supervisor", "envoy", "tritonserver", "adder", "job"):
        pid = ground.pid_of(role)
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        few = len([*Path(f"/proc/{pid}/fd").iterdir()]) + SPARE_DESCRIPTORS
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(few, before[0]), before[1]))
        await ground.wait_a_while(2, 4)
        if role == "supervisor":
            await ground.kill("large")
            await ground.wait_a_while(2, 4)
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        await ground.recovers(within_s=120)


def _faked_clock() -> dict[str, str]:
    found = importlib.util.find_spec("libfaketime")
    if found is None or found.origin is None:
        return {}
    library = Path(found.origin).with_name("vendor") / "libfaketime" / "src" / "libfaketime.so.1"
    own = {"LD_PRELOAD": str(library), "FAKETIME_CACHE_DURATION": "1", "DONT_FAKE_MONOTONIC": "1"}
    return {**own, "FAKETIME_TIMESTAMP_FILE": "clock", "FAKETIME_NO_CACHE": "1"}


def a_clock(folder: Path) -> None:
    if not _faked_clock():
        raise Impossible("needs libfaketime: pip install libfaketime")
    (folder / "clock").write_text("+0")


@scenario(Terms(environment=_faked_clock()), prepare=a_clock)
async def the_clock_jumps(ground: Ground) -> None:
    """The time of day jumps by hours, back and forth: no call ends for it and no process is taken for hung."""
    before = ground.served.descendants()
    for jump in ("+3h", "-2d", "+400d", "+0"):
        (ground.folder / "clock.new").write_text(jump)
        (ground.folder / "clock.new").rename(ground.folder / "clock")
        await ground.wait_a_while(2, 4)
        await ground.recovers()
    for role in ("envoy", "tritonserver", "adder", "slow", "large", "job"):
        if ground.pid_of(role) not in before:
            raise Missed(f"{role} was started again")


@scenario()
async def processes_stand_still(ground: Ground) -> None:
    """Each in turn is stopped for some seconds, as on a machine that swaps: calls wait, and nothing is lost."""
    ground.load.disturb(LONGEST_S)
    for role in ("envoy", "supervisor", "slow", "job"):
        pid = ground.pid_of(role)
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(ground.random.uniform(1, 4))
        finally:
            os.kill(pid, signal.SIGCONT)
        await ground.recovers()
