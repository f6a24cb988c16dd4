"""Where tritonserver listens: on loopback, or on a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass, replace

_LOOPBACK = "127.0.0.1"
# Triton appends a port to every address, also to a socket's path.
SOCKET_SUFFIX = ":1"
_UNIX = "unix:"


@dataclass(frozen=True, slots=True)
class TritonAddresses:
    """Where the running server listens, each as ``127.0.0.1:port``; ``grpc`` may be ``unix:/path``.

    Nowhere else: its HTTP inference would be a way around permits and keys.
    """

    grpc: str
    metrics: str


def free_addresses(grpc_socket: str | None) -> TritonAddresses:
    """Ports that are free now; ``grpc_socket``, when it is given, instead of gRPC's."""
    with contextlib.ExitStack() as held:
        ports = []
        for _ in range(2):
            probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            probe.bind((_LOOPBACK, 0))
            ports.append(probe.getsockname()[1])
    free = TritonAddresses(*(f"{_LOOPBACK}:{port}" for port in ports))
    return free if grpc_socket is None else replace(free, grpc=_UNIX + grpc_socket)


async def is_open(address: str) -> bool:
    """Whether something listens at ``address``, an address of ``TritonAddresses``."""
    host, _, port = address.rpartition(":")
    try:
        if address.startswith(_UNIX):
            _, writer = await asyncio.open_unix_connection(address.removeprefix(_UNIX))
        else:
            _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
