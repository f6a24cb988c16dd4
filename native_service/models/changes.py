"""Changes of models, which go on to their end when whoever asked for one leaves: half of one would be neither."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Changes:
    """Those that are under way; ``stop`` at the end."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, change: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``change``, whoever waits for it."""
        task = asyncio.create_task(change)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        # Whoever asked may have gone, and nobody else looks at its error.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    async def to_its_end(self, change: Coroutine[Any, Any, T]) -> T:
        """What ``change`` gives. Raises what it raises."""
        return await asyncio.shield(self.begin(change))

    async def stop(self) -> None:
        """Cut those that are under way."""
        running = tuple(self._running)
        for change in running:
            change.cancel()
        await asyncio.gather(*running, return_exceptions=True)
