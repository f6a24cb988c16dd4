"""Bounds the memory of messages that are still coming in on streams, and how long they keep others from theirs.

gRPC assembles a message inside this process before anybody here sees it, and tells nothing of how much it holds; only
the memory of the process does. (Messages of unary calls are assembled in Envoy, which has bounds of its own.)
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from nereid_backend.errors import ResourceExhausted

_LOG = logging.getLogger("nereid.service")

_LOOK_EVERY_S = 0.25
# A message that is read this fast is nobody's fault.
_PATIENCE_S = 1.0
# A slow line brings a message of the largest size within this; it matters while half of the budget is taken.
_CROWDED_PATIENCE_S = 30.0
# The allocator keeps what was freed: near the bound calls would be ended for it, and at rest it is nobody's.
_TRIM_EVERY_S, _TRIM_AT_REST_EVERY_S = 5.0, 60.0
_STATUS = Path("/proc/self/status")


class HalfSent:
    """Calls read their messages through ``messages``; ``watch`` ends those that wait longest when memory runs out."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Timeout, tuple[float, Callable[[], int]]] = {}

    @property
    def waiting(self) -> int:
        """How many calls wait for a message, or for the rest of one."""
        return len(self._waiting)

    async def messages(
        self, requests: AsyncIterator[bytes], held_bytes: Callable[[], int] = lambda: 0
    ) -> AsyncIterator[bytes]:
        """What ``requests`` gives. Raises ResourceExhausted when this call has to make room.

        ``held_bytes`` is what the call has taken of the budget that all calls share.
        """
        while True:
            limit = asyncio.timeout(None)
            try:
                async with limit:
                    self._waiting[limit] = time.monotonic(), held_bytes
                    try:
                        message = await anext(requests)
                    finally:
                        del self._waiting[limit]
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise ResourceExhausted("the server is out of memory for requests, retry later") from None
            yield message

    async def watch(self, most_bytes: int, is_crowded: Callable[[], bool] = lambda: False) -> None:
        """Let this process grow by ``most_bytes``, then end the older half of the calls that wait, again and again.

        While ``is_crowded`` those that hold a part of the budget and have long sent nothing are ended as well.
        """
        base, trimmed = _anonymous_bytes(), 0.0
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            now = time.monotonic()
            is_near = _anonymous_bytes() > base + most_bytes // 2
            if now > trimmed + (_TRIM_EVERY_S if is_near else _TRIM_AT_REST_EVERY_S):
                await asyncio.to_thread(ctypes.CDLL(None).malloc_trim, 0)
                trimmed = now
            if _anonymous_bytes() > base + most_bytes:
                slow = [limit for limit, (since, _) in self._waiting.items() if now - since > _PATIENCE_S]
            elif is_crowded():
                slow = [
                    limit
                    for limit, (since, held) in self._waiting.items()
                    if now - since > _CROWDED_PATIENCE_S and held()
                ]
            else:
                continue
            ended = slow[: (len(slow) + 1) // 2]
            for limit in ended:
                limit.reschedule(asyncio.get_running_loop().time())
            if ended:
                _LOG.warning("callers hold too much memory; %d streams are ended", len(ended))
                trimmed = 0.0


def _anonymous_bytes() -> int:
    """The memory of this process that is not files and not shared; 0 when it cannot be told."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:  # too many open files, say
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)
