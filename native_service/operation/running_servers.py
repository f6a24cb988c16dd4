"""Finds the servers that this user runs on this machine, and asks them over their control sockets."""

from __future__ import annotations

import http.client
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from native_service.run_directory import CONTROL_SOCKET, runs_below
from nereid_backend.cache import cache_folder
from nereid_backend.errors import ServerUnavailable

_TIMEOUT_S = 15.0
_LARGEST_ANSWER_BYTES = 16 * 1024 * 1024
_KEYS = ("settings", "folder", "state_file")


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server, and what its ``/status`` said when it was found."""

    run: Path
    status: dict[str, Any]

    @property
    def name(self) -> str:
        """Its public address, or its process id while it has none yet."""
        return str(self.status["addresses"].get("address") or self.status["pid"])

    def goes_by(self, name: str) -> bool:
        """Whether ``name`` is its address, process id, settings file, folder of models or state file."""
        paths = {self.status[key] for key in _KEYS} - {None}
        return name in (self.name, str(self.status["pid"])) or os.path.realpath(name) in paths

    def ask(self, path: str) -> Any:
        """The answer to a question. Raises ServerUnavailable."""
        return _ask(self.run, "GET", path, _TIMEOUT_S)

    def order(self, path: str) -> Any:
        """The answer to an order, however long it takes. Raises ServerUnavailable."""
        return _ask(self.run, "POST", path, None)


def pick(name: str | None) -> RunningServer:
    """The server that goes by ``name``, or the only one. Raises ServerUnavailable."""
    servers = find_all()
    fitting = servers if name is None else [server for server in servers if server.goes_by(name)]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(server.name for server in fitting or servers)
    if fitting:
        raise ServerUnavailable(f"{len(fitting)} servers run: {names}; name one by its address or settings file")
    if servers:
        raise ServerUnavailable(f"no running server goes by {name!r}; there is {names}")
    raise ServerUnavailable(f"no server runs here (looked in {cache_folder(writable=False)}); start one: nereid serve")


def find_all() -> list[RunningServer]:
    """Every server of this user and cache folder that answers, oldest first."""
    found = []
    for run in runs_below(cache_folder(writable=False)):
        try:
            found.append(RunningServer(run, _ask(run, "GET", "/status", _TIMEOUT_S)))
        except ServerUnavailable:
            continue  # a run that has died, or is just beginning or ending
    return sorted(found, key=lambda server: str(server.status["started_at"]))


def _ask(run: Path, method: str, path: str, timeout_s: float | None) -> Any:
    connection = _Connection(run, timeout_s)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        content = json.loads(answer.read(_LARGEST_ANSWER_BYTES))
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ServerUnavailable(f"the server of {run.name} does not answer ({reason})") from None
    finally:
        connection.close()
    if answer.status != 200:
        raise ServerUnavailable(str(content["error"]))
    return content


class _Connection(http.client.HTTPConnection):
    """To the control socket in a run folder."""

    def __init__(self, run: Path, timeout_s: float | None) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._run = run

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        # The path of a socket may have 107 characters: the folder goes by a short name.
        folder = os.open(self._run, os.O_PATH | os.O_DIRECTORY)
        try:
            self.sock.connect(f"/proc/self/fd/{folder}/{CONTROL_SOCKET}")
        finally:
            os.close(folder)
