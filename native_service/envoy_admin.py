"""Envoy's admin interface on its Unix socket: readiness, counters, draining."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping

from aiohttp import ClientError, ClientSession, ClientTimeout, UnixConnector

from native_service.envoy_config import FAILED_CALLS, model_of_cluster
from nereid_backend.errors import EnvoyUnavailable

_TIMEOUT_S = 2.0
_URL = "http://envoy"
_ACTIVE = re.compile(r"^cluster\.(model_.*)\.upstream_rq_active$")
_FAILED = re.compile(rf"^{FAILED_CALLS}\.cluster\.(model_.*)\.status\.(\d*)$")


class EnvoyAdmin:
    """Calls raise EnvoyUnavailable when Envoy does not answer within two seconds. ``close`` at the end."""

    def __init__(self, socket: str) -> None:
        self._session = ClientSession(connector=UnixConnector(socket), timeout=ClientTimeout(total=_TIMEOUT_S))

    async def close(self) -> None:
        await self._session.close()

    async def is_ready(self) -> bool:
        """Whether every listener is open and every file was read; False also when nobody answers."""
        try:
            return await self._ask("GET", "/ready") == "LIVE\n"
        except EnvoyUnavailable:
            return False

    async def version(self) -> str:
        """Envoy's version, such as 1.40.0."""
        # <commit>/<version>/<how it was built>
        parts = str(json.loads(await self._ask("GET", "/server_info"))["version"]).split("/")
        return parts[1] if len(parts) > 1 else parts[0]

    async def drain(self) -> None:
        """Close the listeners after the drain time; until then ask clients to leave. Calls in flight go on."""
        await self._ask("POST", "/drain_listeners?graceful&skip_exit")

    async def counters(self, pattern: str) -> dict[str, int]:
        """Counters and gauges whose name matches the regular expression ``pattern``."""
        found = {}
        for line in (await self._ask("GET", "/stats", {"filter": pattern})).splitlines():
            name, _, value = line.rpartition(": ")
            if value.isdigit():
                found[name] = int(value)
        return found

    async def failed_calls(self) -> dict[tuple[str, int | None], int]:
        """Calls that did not end with OK since Envoy's start, by model and gRPC status; None: the client went first."""
        return {
            (model, int(match[2]) if match[2] else None): count
            for name, count in (await self.counters(_FAILED.pattern)).items()
            if (match := _FAILED.match(name)) and (model := model_of_cluster(match[1])) is not None
        }

    async def permits_in_use(self) -> dict[str, int]:
        """Calls that hold a permit now, by model."""
        return {
            model: count
            for name, count in (await self.counters(_ACTIVE.pattern)).items()
            if (match := _ACTIVE.match(name)) and (model := model_of_cluster(match[1])) is not None
        }

    async def _ask(self, method: str, path: str, query: Mapping[str, str] | None = None) -> str:
        try:
            async with self._session.request(method, _URL + path, params=query) as answer:
                return await answer.text()
        except (ClientError, OSError, asyncio.TimeoutError) as error:  # noqa: UP041 - aiohttp's name on every version
            raise EnvoyUnavailable(f"Envoy's admin socket does not answer ({type(error).__name__})") from None
