"""Clients that mean harm: frames of HTTP/2 made by hand, on sockets that nobody else looks after."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import hpack
from tritonclient.grpc import service_pb2

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
FRAME_BYTES = 16_384
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
CHECKPOINT = "/inference.Nereid/Checkpoint"
TIMEOUT_S = 20.0


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def message(data: bytes, claimed: int | None = None) -> bytes:
    """``data`` as gRPC frames it; ``claimed`` bytes are announced."""
    return struct.pack(">BI", 0, len(data) if claimed is None else claimed) + data


class Connection:
    """A connection that has said hello; what comes back is thrown away unless ``read`` asks for it."""

    def __init__(self, address: str, settings: dict[int, int] | None = None, *, reads: bool = True) -> None:
        """``reads``: whether the socket is emptied."""
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
        self.encoder = hpack.Encoder()
        self.closed = threading.Event()
        pairs = b"".join(struct.pack(">HI", *pair) for pair in (settings or {}).items())
        self.send(PREFACE + frame(SETTINGS, 0, 0, pairs) + frame(SETTINGS, ACK, 0))
        if reads:
            threading.Thread(target=self._discard, daemon=True).start()

    def send(self, data: bytes) -> bool:
        """False once the other side has gone."""
        try:
            self.socket.sendall(data)
        except OSError:
            self.closed.set()
            return False
        return True

    def headers(self, path: str, *extra: tuple[str, str]) -> bytes:
        pairs = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "a")]
        return bytes(self.encoder.encode([*pairs, ("content-type", "application/grpc"), ("te", "trailers"), *extra]))

    def call(self, stream: int, path: str, *extra: tuple[str, str]) -> bool:
        return self.send(frame(HEADERS, END_HEADERS, stream, self.headers(path, *extra)))

    def upload(self, stream: int, data: bytes, flags: int = 0) -> bool:
        parts = [data[at : at + FRAME_BYTES] for at in range(0, len(data), FRAME_BYTES)] or [b""]
        return all(self.send(frame(DATA, flags if part is parts[-1] else 0, stream, part)) for part in parts)

    def _discard(self) -> None:
        with suppress(OSError):
            while self.socket.recv(65536):
                pass
        self.closed.set()

    def close(self) -> None:
        # A thread that waits for data would keep the socket open.
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


@contextmanager
def connections(address: str, count: int, **options: object) -> Iterator[list[Connection]]:
    with ExitStack() as open_ones:
        made = []
        for _ in range(count):
            with suppress(OSError):
                connection = Connection(address, **options)  # type: ignore[arg-type]
                open_ones.callback(connection.close)
                made.append(connection)
        yield made


def half_send(address: str, count: int, size: int, path: str, *extra: tuple[str, str]) -> Callable[[], None]:
    """Start ``count`` calls whose message of ``size`` bytes never ends; what is returned hangs up."""
    head = service_pb2.ModelInferRequest(model_name="adder").SerializeToString()
    body = head + b"\x3a" + b"\xff\xff\xff\x7f" + bytes(size - len(head) - 6)
    data = message(body, size)
    blast = b"".join(frame(DATA, 0, 1, data[at : at + FRAME_BYTES]) for at in range(0, len(data), FRAME_BYTES))
    stack = ExitStack()
    made = stack.enter_context(connections(address, count))
    threads = []
    for connection in made:
        connection.call(1, path, *extra)
        threads.append(threading.Thread(target=connection.send, args=(blast,), daemon=True))
        threads[-1].start()
    deadline = time.monotonic() + TIMEOUT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return stack.close
