"""What runs out under load: the disk, shared memory, descriptors; and processes that stand still."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
from ground import Ground, Impossible, Missed
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
        pid = await ground.process_of(role)
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


@scenario()
async def processes_stand_still(ground: Ground) -> None:
    """Each in turn is stopped for some seconds, as on a machine that swaps: calls wait, and nothing is lost."""
    ground.load.disturb(LONGEST_S)
    for role in ("envoy", "supervisor", "slow", "job"):
        pid = await ground.process_of(role)
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(ground.random.uniform(1, 4))
        finally:
            # A model's process that Triton has given up is killed where it stands.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        await ground.recovers()
