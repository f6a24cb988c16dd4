"""The socket over which the commands of this user reach the running server: HTTP on a Unix socket in its run folder.

The folder is private (0700) and so is the socket (0600); nothing of it is reachable from the network.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from native_service.edge.http_endpoints import listen
from native_service.run_directory import CONTROL_SOCKET, RunDirectory
from nereid_backend.errors import NereidError

_LOG = logging.getLogger("nereid.control")

_LARGEST_REQUEST_BYTES = 1024
_ANSWER_TIMEOUT_S, _LAST_ANSWERS_S = 10.0, 0.5
# A reload takes as long as its models; whoever asked may go, and those that wait are bounded by number.
_MOST_AT_A_TIME = 16

Answer = Callable[[], Awaitable[Any]]


class ControlChannel:
    """``start`` it early: it answers while the server is still starting. ``stop`` at the end."""

    def __init__(self, run: RunDirectory, *, questions: dict[str, Answer], orders: dict[str, Answer]) -> None:
        """``questions`` (GET) are answered within ten seconds, ``orders`` (POST) take their time; both give JSON or
        raise NereidError. Their keys are paths such as ``/status``."""
        self._run, self._questions, self._orders = run, questions, orders
        self._runner: web.AppRunner | None = None
        self._asked = 0

    async def start(self) -> None:
        application = web.Application(client_max_size=_LARGEST_REQUEST_BYTES)
        application.add_routes(
            [web.get(path, self._handler(work, bounded=True)) for path, work in self._questions.items()]
        )
        application.add_routes(
            [web.post(path, self._handler(work, bounded=False)) for path, work in self._orders.items()]
        )
        socket = self._run.socket_path(CONTROL_SOCKET)
        self._runner = await listen(application, socket, _LOG, last_answers_s=_LAST_ANSWERS_S)
        (self._run.path / CONTROL_SOCKET).chmod(0o600)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def _handler(self, work: Answer, *, bounded: bool) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(_request: web.Request) -> web.Response:
            if self._asked >= _MOST_AT_A_TIME:
                return web.json_response({"error": "too many commands wait for this server"}, status=503)
            self._asked += 1
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT_S if bounded else None):
                    return web.json_response(await work())
            except NereidError as error:
                return web.json_response({"error": str(error)}, status=503)
            except TimeoutError:
                return web.json_response({"error": f"no answer within {_ANSWER_TIMEOUT_S:g} s"}, status=503)
            finally:
                self._asked -= 1

        return answer
