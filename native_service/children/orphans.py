"""What the first process of a container owes the others: it is the parent of every process that lost its own.

Model processes outlive a tritonserver that was killed; as zombies nobody waits for they would add up.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

_FIRST = 1
_LOOK_S = 5.0


async def reap(look_s: float = _LOOK_S) -> None:
    """Wait for children that nobody else does, until cancelled.

    Children of our own are waited for at once by who started them: what is still a zombie a look later is not one.
    """
    before: set[int] = set()
    while True:
        await asyncio.sleep(look_s)
        dead = _zombies()
        for pid in dead & before:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue  # somebody did meanwhile
        before = dead


def is_first() -> bool:
    """Whether this process is the first of its container."""
    return os.getpid() == _FIRST


def _zombies() -> set[int]:
    """Our children that have ended and wait to be waited for."""
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        try:
            children = (thread / "children").read_text()
        except OSError:  # the thread has ended: its children are another's now, and seen at the next look
            continue
        for pid in map(int, children.split()):
            try:
                stat = Path(f"/proc/{pid}/stat").read_text()
            except OSError:
                continue
            if stat.rpartition(")")[2].split()[0] == "Z":
                found.add(pid)
    return found
