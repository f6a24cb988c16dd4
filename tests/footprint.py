"""What the processes of a running ``nereid serve`` are and hold: memory, descriptors, shared memory, permits."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from serving import Served

from native_service.envoy.admin import EnvoyAdmin
from native_service.envoy.settings import ADMIN_SOCKET


@dataclass(frozen=True)
class Pulse:
    """One process at a pause: bytes that it holds, descriptors that it has open.

    ``spare_bytes`` of them are free: Envoy's allocator keeps what its busiest moment took.
    """

    role: str
    held_bytes: int
    descriptors: int
    spare_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        return self.held_bytes - self.spare_bytes


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
            spare = _spare_bytes(pid) if role == "envoy" else 0
            found[pid] = Pulse(role, held, len(list((process / "fd").iterdir())), spare)
    return found


def _spare_bytes(envoy: int) -> int:
    """What tcmalloc has of the system and nothing uses."""
    with socket.socket(socket.AF_UNIX) as admin:
        admin.settimeout(5)
        admin.connect(f"/proc/{envoy}/cwd/{ADMIN_SOCKET}")
        admin.sendall(b"GET /memory HTTP/1.1\r\nHost: envoy\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: admin.recv(65536), b""))
    told = json.loads(answer[answer.index(b"{") : answer.rindex(b"}") + 1])
    return int(told["total_physical_bytes"]) - int(told["allocated"])


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


def envoy_of(served: Served) -> int:
    found = [pid for pid, role in roles(served).items() if role == "envoy"]
    if len(found) != 1:
        told = {
            pid: [(Path("/proc") / str(pid) / name).read_bytes()[:300] for name in ("stat", "cmdline")] for pid in found
        }
        raise LookupError(f"{len(found)} processes look like Envoy: {told}")
    return found[0]


async def permits_that_stay(served: Served, wait_s: float) -> dict[str, int]:
    """The permits of each model that are still in use after ``wait_s`` without a call."""
    admin = EnvoyAdmin(f"/proc/{envoy_of(served)}/cwd/{ADMIN_SOCKET}")
    try:
        deadline = time.monotonic() + wait_s
        while any((used := await admin.permits_in_use()).values()) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
    finally:
        await admin.close()
    return {model: count for model, count in used.items() if count}
