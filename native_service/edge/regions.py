"""Shared memory in which Triton finds the inputs of a call and leaves its outputs: no message carries them.

A region belongs to one call at a time. Its file is named for as long as Triton needs the name, and by chance, because
callers could read any region whose name they know. Triton has ended with one when it has answered; of a call that ended
otherwise it says so itself: 2.51 refuses to let go of a region that a running request reads or writes, whatever became
of the caller.

One that Triton has ended with by an answer stays in its place for a moment, and the next call that needs as much takes
it: its pages are mapped in Triton by then. Nobody reads more of it than was written for the call that has it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import grpc

from native_service.triton.stubs import SHARED_MEMORY
from nereid_backend.errors import ResourceExhausted, TritonUnavailable

_LOG = logging.getLogger("nereid.service")

# Below this the two calls that tell Triton of a region cost more than the copies that it saves.
SHARED_FROM_BYTES = 1024 * 1024
_ALLOCATED_AT_ONCE = 8 * 1024 * 1024
_NAME_BYTES = 16
# Each takes a descriptor of this process, which also accepts calls, looks after Triton and starts it again.
_SHARE_OF_DESCRIPTORS = 4
# Memory is held a quarter longer than needed at most, and a second.
_FIRST_POLL_S, _POLL_GROWTH, _LONGEST_POLL_S = 0.002, 1.25, 1.0
# What no call holds: two calls of the largest tensor, in and out, and no longer than a caller takes for the next one.
_MOST_KEPT_BYTES, _MOST_KEPT, _KEPT_S = 256 * 1024 * 1024, 16, 1.0


class Sharing(Protocol):
    """What is asked of Triton's side: :class:`native_service.triton.process.TritonServer`."""

    restarts: int
    """How often there was a new process, which knows none of the regions from before."""

    async def share_memory(self, name: str, size_bytes: int) -> None: ...

    async def unshare_memory(self, name: str) -> bool: ...


class Region:
    """``size_bytes`` of shared memory; ``used_bytes`` of them hold a tensor. Read and written, never mapped here."""

    def __init__(self, name: str, size_bytes: int) -> None:
        self.name, self.size_bytes, self.used_bytes = name, size_bytes, 0
        self.registration: asyncio.Future[None] | None = None
        self.registered_with = 0
        """The count of Triton's restarts at that time."""
        self.is_answered = False
        """Whether Triton has answered the call, and so has ended with it."""
        self._allocated_bytes = 0
        self._file = self._create()

    def _create(self) -> int:
        file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        os.ftruncate(file, self.size_bytes)
        return file

    @property
    def _path(self) -> Path:
        return SHARED_MEMORY / self.name

    def append(self, data: bytes) -> None:
        """Raises ResourceExhausted when the system has no shared memory left."""
        while data:
            try:
                count = os.pwrite(self._file, data, self.used_bytes)
            except OSError as error:
                raise _no_room(error) from None
            self.used_bytes += count
            data = data[count:]
        self._allocated_bytes = max(self._allocated_bytes, self.used_bytes)

    def read(self, start: int, stop: int) -> bytes:
        """A copy of these bytes of the tensor, fewer beyond its end."""
        return os.pread(self._file, min(stop, self.used_bytes) - start, start)

    async def allocate(self) -> None:
        """Have the memory now: a write that finds none later kills Triton. Raises ResourceExhausted."""
        while (start := self._allocated_bytes) < self.size_bytes:
            count = min(_ALLOCATED_AT_ONCE, self.size_bytes - start)
            try:
                os.posix_fallocate(self._file, start, count)
            except OSError as error:
                raise _no_room(error) from None
            self._allocated_bytes += count
            await asyncio.sleep(0)  # other calls go on

    def rename(self, name: str) -> None:
        """A file of this name with the same tensor takes the place of one that is named no more."""
        before, self.name = self._file, name
        self._file, start, self._allocated_bytes = self._create(), 0, 0
        try:
            while start < self.used_bytes:
                start += os.sendfile(self._file, before, start, self.used_bytes - start)
        except OSError as error:
            raise _no_room(error) from None
        finally:
            os.close(before)

    def spare_bytes(self) -> int:
        """What the system could give out beside it."""
        room = os.fstatvfs(self._file)
        return room.f_bavail * room.f_frsize

    def unname(self) -> None:
        """From here on it is gone with the last process that uses it."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        self.unname()
        os.close(self._file)


class Regions:
    """All regions of a service. ``close`` at the end, when no call is in progress."""

    def __init__(self, prefix: str, triton: Sharing) -> None:
        """``prefix`` of the files' names: the run directory removes what a killed process leaves."""
        self._prefix, self._triton = prefix, triton
        self._leaving: set[asyncio.Task[None]] = set()
        self._kept: dict[Region, asyncio.TimerHandle] = {}
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most, self._open = descriptors // _SHARE_OF_DESCRIPTORS, 0

    def create(self, size_bytes: int) -> Region | None:
        """A region for one call; None when calls hold so many that the tensor has to do without.

        Raises ResourceExhausted.
        """
        if (kept := self._take_kept(size_bytes)) is not None:
            return kept
        if self._open - len(self._kept) >= self._most >= 0:
            return None
        try:
            region = Region(self._new_name(), size_bytes)
        except OSError as error:
            raise _no_room(error) from None
        self._open += 1
        return region

    def _new_name(self) -> str:
        return f"{self._prefix}call-{secrets.token_hex(_NAME_BYTES)}"

    async def share(self, regions: Sequence[Region]) -> None:
        """Let Triton use ``regions``. Raises grpc.aio.AioRpcError, TritonUnavailable or ResourceExhausted."""
        for region in regions:
            if region.registration is not None and region.registered_with != self._triton.restarts:
                region.rename(self._new_name())
                region.registration = None
            if region.registration is None:
                region.registered_with = self._triton.restarts
                # Not cut off with the call: what Triton was asked for must be over before it can be taken back.
                region.registration = asyncio.ensure_future(self._triton.share_memory(region.name, region.size_bytes))
        for region in regions:
            if region.registration is not None:
                await asyncio.shield(region.registration)
            region.unname()

    def release(self, region: Region, then: Callable[[], None] = lambda: None) -> None:
        """The call of ``region`` is over; ``then`` is called once Triton has ended with it, too."""
        if region.registration is None:
            self._close(region)
            then()
        elif region.is_answered and self._has_room_to_keep(region):
            self._kept[region] = asyncio.get_running_loop().call_later(_KEPT_S, self._give_back_kept, region)
            then()
        else:
            self._give_back(region, region.registration, then)

    def _take_kept(self, size_bytes: int) -> Region | None:
        """The smallest that fits, empty; not one of twice the size."""
        known = (region for region in self._kept if region.registered_with == self._triton.restarts)
        fitting = [region for region in known if size_bytes <= region.size_bytes < 2 * size_bytes]
        if not fitting:
            return None
        region = min(fitting, key=lambda each: each.size_bytes)
        self._kept.pop(region).cancel()
        region.used_bytes, region.is_answered = 0, False
        return region

    def _has_room_to_keep(self, region: Region) -> bool:
        kept_bytes = sum(each.size_bytes for each in self._kept) + region.size_bytes
        most_bytes = min(_MOST_KEPT_BYTES, region.spare_bytes())  # models' processes need shared memory as well
        return len(self._kept) < _MOST_KEPT and kept_bytes <= most_bytes

    def _give_back_kept(self, region: Region) -> None:
        del self._kept[region]
        if region.registration is not None:
            self._give_back(region, region.registration, lambda: None)

    def _give_back(self, region: Region, registration: asyncio.Future[None], then: Callable[[], None]) -> None:
        leaving = asyncio.create_task(self._take_back(region, registration, then))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """Give back what is kept and what Triton still uses; it goes with Triton's process."""
        for region, timer in self._kept.items():
            timer.cancel()
            self._close(region)
        self._kept.clear()
        for task in (leaving := tuple(self._leaving)):
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)

    async def _take_back(self, region: Region, registration: asyncio.Future[None], then: Callable[[], None]) -> None:
        pause_s = _FIRST_POLL_S
        try:
            await asyncio.gather(registration, return_exceptions=True)
            while not await self._triton.unshare_memory(region.name):
                await asyncio.sleep(pause_s)
                pause_s = min(_POLL_GROWTH * pause_s, _LONGEST_POLL_S)
        except (grpc.aio.AioRpcError, TritonUnavailable) as error:
            # With a Triton that has ended its maps are gone as well.
            _LOG.debug("Triton was not told that a region is given back: %s", error)
        finally:
            self._close(region)
            then()

    def _close(self, region: Region) -> None:
        self._open -= 1
        region.close()


def _no_room(error: OSError) -> ResourceExhausted:
    return ResourceExhausted(f"this server has no shared memory left for the tensor ({error.strerror}), retry later")
