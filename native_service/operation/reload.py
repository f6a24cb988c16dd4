"""Applies a changed settings file to the running server: what can change does, each other key is refused with a reason.

A file that cannot be read, breaks a rule or names a model that cannot be converted changes nothing at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from native_service.access.credentials import Credentials
from native_service.envoy import access as envoy_access
from native_service.front import Front
from native_service.models.catalogue import Catalogue
from native_service.models.control import ModelControl, Outcome
from native_service.models.residency import Residency
from native_service.settings import ServerSettings, Settings
from nereid_backend.errors import NereidError

_LOG = logging.getLogger("nereid.reload")

_NOTHING = "nothing has changed"

_OPEN = "connections that are open would be closed"
# By the first parts of a key; what is not here is read once, by more than one process.
_WHY = {
    **dict.fromkeys(("bind_addr", "http_addr", "http_infer_addr", "rest_addr", "tls", "auth"), _OPEN),
    "limits.max_request_bytes": "open connections have windows of that size",
    "ml_backends_path": "every model would be another one",
}

Commit = Callable[[Outcome], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Part:
    """Keys of the section ``server`` that may change while it serves.

    ``keys`` are dotted names below ``server``; one that names a section stands for all below it. ``prepare`` checks new
    settings without a visible effect, or raises NereidError and then nothing of the file is applied. What it gives puts
    them in force, and tells the outcome what the keys do not show (a key's file with another content). It is called at
    every reload, also when none of the keys differs.
    """

    keys: tuple[str, ...]
    prepare: Callable[[ServerSettings], Awaitable[Commit]]

    def covers(self, key: str) -> bool:
        return any(key == own or key.startswith(f"{own}.") for own in self.keys)


class Reload:
    """``run`` as often as asked; one at a time."""

    def __init__(
        self, settings: Settings, reread: Callable[[], Settings] | None, control: ModelControl, parts: Sequence[Part]
    ) -> None:
        """``settings`` are those in force. ``reread`` None: there is no file, only a folder of models."""
        self._settings, self._reread, self._control, self._parts = settings, reread, control, parts
        self._turn = asyncio.Lock()

    async def run(self) -> Outcome:
        """Read the file again and apply it. Never raises for what is in it; the log tells the same."""
        async with self._turn:
            try:
                outcome = await self._apply()
            except NereidError as error:
                outcome = Outcome(failed=[*str(error).splitlines(), _NOTHING])
        for line in outcome.applied:
            _LOG.info("%s", line)
        for line in (*outcome.failed, *outcome.refused):
            _LOG.error("%s", line)
        if not (outcome.applied or outcome.failed or outcome.refused):
            _LOG.info("%s", _NOTHING)
        return outcome

    async def _apply(self) -> Outcome:
        fresh = self._settings if self._reread is None else await asyncio.to_thread(self._reread)
        old = self._settings.server
        differing = dict(_differences(old, fresh.server))
        live = {key for key in differing if any(part.covers(key) for part in self._parts)}
        server = _merged(old, fresh.server, live)
        settings = fresh.model_copy(update={"server": server})
        commits = [await part.prepare(server) for part in self._parts]
        outcome = Outcome(refused=[_refusal(key) for key in differing if key not in live])

        async def commit() -> None:
            outcome.applied.extend(f"server.{key}{differing[key]}" for key in differing if key in live)
            for each in commits:
                await each(outcome)

        await self._control.reload(settings, outcome, before=commit)
        self._settings = settings
        return outcome


def live_limits(front: Front, catalogue: Catalogue) -> Part:
    """The limits that are looked at by each call or change anew; Envoy is started with the others."""

    async def prepare(server: ServerSettings) -> Commit:
        async def commit(outcome: Outcome) -> None:
            front.set_limits(server.limits)
            catalogue.load_timeout_s = server.limits.load_timeout_s
            if (wanted := server.limits.max_buffered_bytes) != (held := front.envoy_buffered_bytes):
                outcome.refused.append(
                    f"server.limits.max_buffered_bytes: Envoy's share of {wanted} takes a restart, it reads its bound"
                    f" once; until then {held} is that share"
                )

        return commit

    names = (
        *("max_message_bytes", "max_tensor_bytes", "max_buffered_bytes", "max_chunks", "max_upload_bytes"),
        "load_timeout_s",
    )
    return Part(tuple(f"limits.{name}" for name in names), prepare)


def live_residency(residency: Residency) -> Part:
    """What may be in Triton at a time; what is there already goes only when room is needed."""

    async def prepare(server: ServerSettings) -> Commit:
        async def commit(_outcome: Outcome) -> None:
            residency.settings = server.residency

        return commit

    return Part(("residency",), prepare)


def live_access(front: Front) -> Part:
    """Static keys and the rules for tokens, in the settings and in their files, and what the files of the certificates
    hold."""

    async def prepare(server: ServerSettings) -> Commit:
        access = await asyncio.to_thread(envoy_access.read, server)
        before, now = front.access.credentials, access.credentials

        async def commit(outcome: Outcome) -> None:
            if before is None or now is None:
                await front.set_access(front.access)
                return
            await front.set_access(access)
            if before.tokens != now.tokens:
                outcome.applied.append(f"server.auth: {_tokens_told(now)}")
            if before.keys != now.keys:
                outcome.applied.append(f"server.auth: {len(now.keys)} keys are let in now")

        return commit

    return Part(("auth.keys", "auth.jwt"), prepare)


def _tokens_told(credentials: Credentials) -> str:
    return "no tokens are let in now" if credentials.tokens is None else "tokens are verified anew"


def _differences(old: BaseModel, new: BaseModel, section: str = "") -> Iterator[tuple[str, str]]:
    """The dotted keys whose values differ, each with what to tell of it: values only where they cannot be a secret."""
    for name in type(old).model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(before, BaseModel) and isinstance(after, BaseModel) and type(before) is type(after):
            yield from _differences(before, after, f"{section}{name}.")
        elif before != after:
            told = f" is {after} now, was {before}" if _is_plain(before) and _is_plain(after) else " changed"
            yield f"{section}{name}", told


def _refusal(key: str) -> str:
    whys = [why for part, why in _WHY.items() if key == part or key.startswith(f"{part}.")]
    return f"server.{key} takes a restart: {whys[0] if whys else 'it is read once, at the start'}"


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float))


def _merged(old: ServerSettings, new: ServerSettings, live: set[str]) -> ServerSettings:
    """``old`` with those keys of ``new`` that are in ``live``."""
    merged: ServerSettings = _with(old, new, live, "")
    return merged


def _with(old: Any, new: Any, live: set[str], section: str) -> Any:
    changed = {}
    for name in type(old).model_fields:
        before, after, key = getattr(old, name), getattr(new, name), f"{section}{name}"
        if key in live:
            changed[name] = after
        elif isinstance(before, BaseModel) and type(before) is type(after):
            changed[name] = _with(before, after, live, f"{key}.")
    return old.model_copy(update=changed)
