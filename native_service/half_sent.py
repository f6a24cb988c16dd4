"""Bounds the memory of messages that are still coming in on streams.

gRPC assembles a message inside this process before anybody here sees it, and tells nothing of how much it holds; only
the memory of the process does. (Messages of unary calls are assembled in Envoy, which has bounds of its own.)
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

from nereid_backend.errors import ResourceExhausted

_LOG = logging.getLogger("nereid.service")

_LOOK_EVERY_S = 0.25
# A message that is read this fast is nobody's fault.
_PATIENCE_S = 1.0
_TRIM_EVERY_S = 5.0
_STATUS = Path("/proc/self/status")


class HalfSent:
    """Calls read their messages through ``messages``; ``watch`` ends those that wait longest when memory runs out."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Timeout, float] = {}

    @property
    def waiting(self) -> int:
        """How many calls wait for a message, or for the rest of one."""
        return len(self._waiting)

    async def messages(self, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """What ``requests`` gives. Raises ResourceExhausted when this call has to make room."""
        while True:
            limit = asyncio.timeout(None)
            try:
                async with limit:
                    self._waiting[limit] = time.monotonic()
                    try:
                        message = await anext(requests)
                    finally:
                        del self._waiting[limit]
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise ResourceExhausted("the server is out of memory for requests, retry later") from None
            yield message

    async def watch(self, most_bytes: int) -> None:
        """Let this process grow by ``most_bytes``, then end the older half of the calls that wait, again and again."""
        base, trimmed = _anonymous_bytes(), 0.0
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            now = time.monotonic()
            if _anonymous_bytes() > base + most_bytes // 2 and now > trimmed + _TRIM_EVERY_S:
                # The allocator keeps what was freed, and calls would be ended for it.
                await asyncio.to_thread(ctypes.CDLL(None).malloc_trim, 0)
                trimmed = now
            if _anonymous_bytes() <= base + most_bytes:
                continue
            slow = [limit for limit, since in self._waiting.items() if now - since > _PATIENCE_S]
            ended = slow[: (len(slow) + 1) // 2]
            for limit in ended:
                limit.reschedule(asyncio.get_running_loop().time())
            if ended:
                _LOG.warning("callers hold too much memory; %d streams are ended", len(ended))
                trimmed = 0.0


def _anonymous_bytes() -> int:
    """The memory of this process that is not files and not shared."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
