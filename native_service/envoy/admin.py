"""Envoy's admin interface on its Unix socket: readiness, counters, draining."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from aiohttp import ClientError, ClientSession, ClientTimeout, UnixConnector

from native_service.envoy.listeners import FAILED_CALLS, TURNED_CALLS, TURNED_MS
from native_service.envoy.settings import model_of_cluster
from nereid_backend.errors import EnvoyUnavailable

_TIMEOUT_S = 2.0
_URL = "http://envoy"
_ACTIVE = re.compile(r"^cluster\.(model_.*)\.upstream_rq_active$")
_TRAFFIC = re.compile(r"^cluster\.(model_.*)\.upstream_rq_(active|total)$")
_FAILED = re.compile(rf"^{FAILED_CALLS}\.cluster\.(model_.*)\.status\.(\d*)$")
# Of calls from the public listener only: what comes from our service is internal (envoy_config).
_TIME = re.compile(r"^cluster\.(model_.*)\.external\.upstream_rq_time$")
_CONNECTIONS, _CONNECTIONS_EVER = "http.public.downstream_cx_active", "http.public.downstream_cx_total"
# By status: calls that were turned (envoy.snooze), and their milliseconds together.
_TURNED = re.compile(rf"^({TURNED_CALLS}|{TURNED_MS})\.status\.(\d*)$")
_EXACT = (rf"^{_CONNECTIONS}$", rf"^{_CONNECTIONS_EVER}$")
_LOOK = "|".join([_ACTIVE.pattern, _FAILED.pattern, _TIME.pattern, _TURNED.pattern, *_EXACT])


class Traffic(NamedTuple):
    """Calls of one model that are with Triton now, and those that were handed to it since Envoy's start."""

    active: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Look:
    """What Envoy counts. Since its start: calls that failed by model and gRPC status (None: the client went first),
    calls of the public address that Triton answered by model and whole milliseconds, connections, and of SnoozeML's
    calls that did not come to our service their number and milliseconds by TURNED_CALLS, TURNED_MS and status. Now: the
    others."""

    failed: Mapping[tuple[str, int | None], int]
    answered_ms: Mapping[tuple[str, int], int]
    connections_ever: int
    connections: int
    permits_in_use: Mapping[str, int]
    turned: Mapping[tuple[str, str], int]


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

    async def look(self) -> Look:
        """Everything that is counted, at one moment; the times are a second old."""
        query = {"format": "json", "histogram_buckets": "detailed", "filter": _LOOK}
        stats = json.loads(await self._ask("GET", "/stats", query))["stats"]
        counts = {stat["name"]: stat["value"] for stat in stats if "name" in stat}
        times = [stat["histograms"]["details"] for stat in stats if "histograms" in stat]
        return Look(
            {
                (model, int(match[2]) if match[2] else None): count
                for name, count in counts.items()
                if (match := _FAILED.match(name)) and (model := model_of_cluster(match[1])) is not None
            },
            {
                (model, round(step["lower_bound"])): step["count"]
                for time in chain.from_iterable(times)
                if (match := _TIME.match(time["name"])) and (model := model_of_cluster(match[1])) is not None
                for step in time["totals"]
            },
            counts.get(_CONNECTIONS_EVER, 0),
            counts.get(_CONNECTIONS, 0),
            _permits(counts),
            {(match[1], match[2]): count for name, count in counts.items() if (match := _TURNED.match(name))},
        )

    async def permits_in_use(self) -> dict[str, int]:
        """Calls that hold a permit now, by model."""
        return _permits(await self.counters(_ACTIVE.pattern))

    async def traffic(self) -> dict[str, Traffic]:
        """Of each model, of the public address and of our service."""
        found: dict[str, Traffic] = {}
        for name, count in (await self.counters(_TRAFFIC.pattern)).items():
            if (match := _TRAFFIC.match(name)) and (model := model_of_cluster(match[1])) is not None:
                found[model] = found.get(model, Traffic())._replace(**{match[2]: count})
        return found

    async def _ask(self, method: str, path: str, query: Mapping[str, str] | None = None) -> str:
        if self._session.closed:  # `nereid status` may ask at any time, also at the end
            raise EnvoyUnavailable("Envoy has ended")
        try:
            async with self._session.request(method, _URL + path, params=query) as answer:
                return await answer.text()
        except (ClientError, OSError, asyncio.TimeoutError) as error:  # noqa: UP041 - aiohttp's name on every version
            raise EnvoyUnavailable(f"Envoy's admin socket does not answer ({type(error).__name__})") from None


def _permits(counts: Mapping[str, int]) -> dict[str, int]:
    return {
        model: count
        for name, count in counts.items()
        if (match := _ACTIVE.match(name)) and (model := model_of_cluster(match[1])) is not None
    }
