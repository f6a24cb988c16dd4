"""``nereid serve`` as the unmodified SnoozeML SDK sees it, with a key of each role and tokens."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import snoozeml
from serving import Served, alive

RO, INF, ADM = KEYS = tuple(f"sk-{role}-{'7' * 32}" for role in ("ro", "inf", "adm"))
"""Keys of the roles read_only, inference and admin."""
JWT_SECRET = "fixture-secret"
_ROLES = ("read_only", "inference", "admin")


class Blocking:
    """An ``AsyncSnoozeClient`` whose methods wait for their answers, so that a test is written once for both."""

    def __init__(self, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = self._loop.run_until_complete(self._open(options))
        self.models = _Blocked(self._client.models, self._loop)

    @staticmethod
    async def _open(options: dict[str, Any]) -> Any:
        return snoozeml.AsyncSnoozeClient(**options)

    def __getattr__(self, name: str) -> Any:
        return getattr(_Blocked(self._client, self._loop), name)

    def infer_together(self, calls: Sequence[Sequence[Any]]) -> list[Any]:
        async def together() -> list[Any]:
            answers = await asyncio.gather(*(self._client.infer(*each) for each in calls), return_exceptions=True)
            # Not before all have ended: those over REST would go on in their threads.
            for error in answers:
                if isinstance(error, BaseException):
                    raise error
            return answers

        return self._loop.run_until_complete(together())

    def close(self) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


class _Blocked:
    def __init__(self, of: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._of, self._loop = of, loop

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._of, name)
        return lambda *args, **options: self._loop.run_until_complete(call(*args, **options))


def infer_together(client: Any, calls: Sequence[Sequence[Any]]) -> list[Any]:
    """``client.infer`` with each of the arguments in ``calls``, all at once."""
    if isinstance(client, Blocking):
        return client.infer_together(calls)
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda arguments: client.infer(*arguments), calls))


class Snoozing:
    """The running server and the clients that a test opens; ``kind`` of those is ``sync`` or ``async``."""

    def __init__(self, served: Served, models: Path) -> None:
        self.served, self.models = served, models
        self._clients: list[Any] = []
        self.tokens: set[str] = set()
        """Those that clients have sent."""
        self.exit_code = 0
        """What the server is to end with."""

    @property
    def address(self) -> str:
        """Of gRPC."""
        return str(self.served.state["address"])

    def client(self, key: str | None = ADM, *, kind: str = "sync", **options: Any) -> Any:
        """The SDK's client with ``key``, over gRPC unless ``use_grpc`` says otherwise; it is closed at the end."""
        rest = self.served.state.get("rest")
        if isinstance(options.get("token"), str):
            self.tokens.add(options["token"])
        known = {"grpc_endpoint": self.address, "use_grpc": True, "api_key": key}
        if rest is not None:
            known["http_endpoint"] = f"http://{rest}"
        client = (snoozeml.SnoozeClient if kind == "sync" else Blocking)(**{**known, **options})
        self._clients.append(client)
        return client

    def kill(self) -> set[int]:
        """Kill every process of the server, as the end of its machine does; those that it had."""
        processes = self.served.descendants()
        # First who holds the connections: it would still tell REST's callers of the end of the others.
        order = sorted(processes, key=lambda pid: b"envoy.json" not in Path(f"/proc/{pid}/cmdline").read_bytes())
        for pid in (*order, self.served.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.exit_code = -signal.SIGKILL
        return processes

    def close_clients(self) -> None:
        while self._clients:
            self._clients.pop().close()


@contextmanager
def snoozing(
    folder: Path,
    models: Mapping[str, Mapping[str, Any]],
    *,
    server: Mapping[str, Any] | None = None,
    make: Callable[[Path], None] | None = None,
) -> Iterator[Snoozing]:
    """A server of ``models``: by name, what their entries have beside a device and 64 places for calls.

    ``make`` writes their files into a folder. ``server`` is what that section has beside addresses and keys.
    """
    (folder / "models").mkdir()
    if make is not None:
        make(folder / "models")
    (folder / "jwt").write_text(JWT_SECRET)
    keys = [
        {"name": role, "role": role, "sha256": hashlib.sha256(key.encode()).hexdigest()}
        for role, key in zip(_ROLES, KEYS, strict=True)
    ]
    auth = {"keys": keys, "jwt": {"secret_file": "jwt"}}
    settings = {
        "server": {"bind_addr": "127.0.0.1:0", "ml_backends_path": "models", "auth": auth, **(server or {})},
        "models": [{"name": name, "device": "cpu", "queue_capacity": 64, **more} for name, more in models.items()],
    }
    (folder / "nereid.yaml").write_text(json.dumps(settings))  # which is YAML, too
    served = Served(folder, "--config", str(folder / "nereid.yaml"), log=folder / "log")
    with _running(served, folder / "models") as running:
        yield running


@contextmanager
def snoozing_folder(folder: Path, config: Any, make: Callable[[Path], None]) -> Iterator[Snoozing]:
    """A server of a folder that ``make`` fills, with the SDK's ``config`` in it as ``models.toml``, and REST."""
    models = folder / "models"
    models.mkdir()
    make(models)
    for role, key in zip(_ROLES, KEYS, strict=True):
        config.add_api_key(role, key=key, name=role)
    config.auth.jwt = snoozeml.JwtSettings(secret=JWT_SECRET)
    config.save(models / "models.toml")
    free = "127.0.0.1:0"
    served = Served(folder, str(models), "--bind", free, "--rest", free, log=folder / "log")
    with _running(served, models) as running:
        yield running


@contextmanager
def _running(served: Served, models: Path) -> Iterator[Snoozing]:
    running = Snoozing(served, models)
    told: list[str] = []
    construct = snoozeml.SnoozeError.__init__

    def remembered(error: Any, *args: Any, **options: Any) -> None:
        construct(error, *args, **options)
        told.append(f"{error} {vars(error)}")

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(snoozeml.SnoozeError, "__init__", remembered)
            yield running
    finally:
        running.close_clients()
        processes = served.descendants()
        code, output = served.end()
        print(output)
    assert (code, alive(processes)) == (running.exit_code, set())
    secrets = (*KEYS, JWT_SECRET, *running.tokens)
    assert not [secret for secret in secrets if secret in output or any(secret in text for text in told)]  # case 35
