"""The cheapest client that Python allows: one request, made once, replayed over HTTP/1.1 or as gRPC over HTTP/2.

A gRPC library costs more than most servers for a small tensor, and a comparison of gRPC with HTTP must not compare
clients. Nothing of an answer is read but whether it is a good one. No TLS, no compression, loopback only.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque
from typing import Any

import hpack

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 1, 1, 4, 8
_TABLE_SIZE, _PUSH, _INITIAL_WINDOW, _MOST_FRAME = 1, 2, 4, 5
_LARGEST_WINDOW, _LARGEST_FRAME, _FIRST_WINDOW, _FIRST_FRAME = 2**31 - 1, 2**24 - 1, 65535, 16384
_HEAD = 9
_ANSWER_TIMEOUT_S = 60


class Refused(Exception):
    """An answer that is no good one, or the end of a connection."""


class _Replay(asyncio.Protocol):
    """What both protocols share: the connection, and the bytes that came and are not read yet."""

    def __init__(self) -> None:
        self._came = bytearray()
        self._transport: Any = None
        self._lost = ""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = f"the connection ended ({error})"
        self._fail(Refused(self._lost))

    def close(self) -> None:
        self._transport.close()

    def _check(self) -> None:
        if self._lost:
            raise Refused(self._lost)

    def _fail(self, error: Refused) -> None:
        raise NotImplementedError

    def call(self) -> asyncio.Future[bytes]:
        raise NotImplementedError


class Http1(_Replay):
    """One call at a time: a connection for each client."""

    def __init__(self, path: str, body: bytes) -> None:
        super().__init__()
        head = f"POST {path} HTTP/1.1\r\nHost: peer\r\nContent-Type: application/octet-stream\r\n"
        self._request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._end = 0

    def call(self) -> asyncio.Future[bytes]:
        self._check()
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(self._request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        came = self._came
        came += data
        if not self._end:
            head = came.find(b"\r\n\r\n")
            if head < 0:
                return
            lines = bytes(came[:head]).lower().split(b"\r\n")
            sizes = [int(line[15:]) for line in lines if line.startswith(b"content-length:")]
            if lines[0].split()[1] != b"200" or not sizes:
                self._fail(Refused(bytes(came[:300]).decode(errors="replace")))
                return
            self._end = head + 4 + sizes[0]
            self._body = head + 4
        if len(came) >= self._end:
            answer, self._end = bytes(came[self._body : self._end]), 0
            came.clear()
            self._answer.set_result(answer)

    def _fail(self, error: Refused) -> None:
        if not self._answer.done():
            self._answer.set_exception(error)


class _Stream:
    """A call in progress: what is left to send, what its answer is."""

    __slots__ = ("answer", "came", "window")

    def __init__(self, window: int) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.came: list[bytes] = []
        self.window = window


class Grpc(_Replay):
    """Any number of calls at a time on one connection."""

    def __init__(self, path: str, message: bytes, authority: str = "peer") -> None:
        super().__init__()
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": authority,
            "te": "trailers",
            "content-type": "application/grpc",
        }
        # Literal fields that no table remembers: the same bytes serve every call.
        self._block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())
        self._message = struct.pack("!BI", 0, len(message)) + message
        self._streams: dict[int, _Stream] = {}
        self._next = 1
        self._window, self._stream_window, self._most = _FIRST_WINDOW, _FIRST_WINDOW, _FIRST_FRAME
        self._unsent: deque[tuple[int, int]] = deque()  # streams whose message is not out, and from where on
        self._read = 0
        self._good: set[bytes] = set()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Without a table a block means the same wherever it comes, and blocks can be compared.
        wanted = {_TABLE_SIZE: 0, _PUSH: 0, _INITIAL_WINDOW: _LARGEST_WINDOW, _MOST_FRAME: _LARGEST_FRAME}
        settings = b"".join(struct.pack("!HI", *pair) for pair in wanted.items())
        grown = struct.pack("!I", _LARGEST_WINDOW - _FIRST_WINDOW)
        transport.write(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW, 0, 0, grown))

    def call(self) -> asyncio.Future[bytes]:
        self._check()
        number, self._next = self._next, self._next + 2
        self._streams[number] = stream = _Stream(self._stream_window)
        head = _frame(_HEADERS, _END_HEADERS, number, self._block)
        size = len(self._message)
        if not self._unsent and size <= min(self._window, self._stream_window, self._most):
            self._window -= size
            self._transport.write(head + _frame(_DATA, _END_STREAM, number, self._message))
        else:
            self._transport.write(head)
            self._unsent.append((number, 0))
            self._send()
        return stream.answer

    def _send(self) -> None:
        """As much of the messages as the windows allow, one after another."""
        size = len(self._message)
        for _ in range(len(self._unsent)):
            number, start = self._unsent.popleft()
            stream = self._streams.get(number)
            while stream is not None and start < size:
                part = min(size - start, self._window, stream.window, self._most)
                if part <= 0:
                    self._unsent.append((number, start))
                    break
                flags = _END_STREAM if start + part == size else 0
                self._transport.write(_frame(_DATA, flags, number, self._message[start : start + part]))
                self._window -= part
                stream.window -= part
                start += part

    def data_received(self, data: bytes) -> None:
        came, start = self._came, 0
        came += data
        while len(came) - start >= _HEAD:
            size = came[start] << 16 | came[start + 1] << 8 | came[start + 2]
            end = start + _HEAD + size
            if len(came) < end:
                break
            kind, flags = came[start + 3], came[start + 4]
            number = int.from_bytes(came[start + 5 : start + 9]) & 0x7FFFFFFF
            self._take(kind, flags, number, bytes(came[start + _HEAD : end]))
            start = end
        del came[:start]

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        stream = self._streams.get(number)
        if kind == _DATA:
            self._count(len(payload))
            if stream is not None:
                stream.came.append(payload)
        elif kind == _HEADERS and flags & _END_STREAM:
            self._end(number, payload, flags)
        elif kind == _WINDOW:
            (grown,) = struct.unpack("!I", payload)
            if number == 0:
                self._window += grown
            elif stream is not None:
                stream.window += grown
            self._send()
        elif kind == _SETTINGS and not flags & _ACK:
            self._settle(payload)
        elif kind == _PING and not flags & _ACK:
            self._transport.write(_frame(_PING, _ACK, 0, payload))
        elif kind == _RESET and stream is not None:
            del self._streams[number]
            stream.answer.set_exception(Refused(f"the stream was reset ({int.from_bytes(payload)})"))
        elif kind == _GOAWAY:
            self._fail(Refused(f"the server says goodbye: {payload[8:].decode(errors='replace')}"))

    def _end(self, number: int, block: bytes, flags: int) -> None:
        stream = self._streams.pop(number, None)
        if stream is None or stream.answer.done():
            return
        if block not in self._good:
            if flags & _PADDED or not flags & _END_HEADERS:
                stream.answer.set_exception(Refused("padded or continued headers, which this client does not read"))
                return
            fields = dict(hpack.Decoder().decode(block))
            if fields.get("grpc-status") != "0":
                words = f"grpc-status {fields.get('grpc-status')}: {fields.get('grpc-message', '')}"
                stream.answer.set_exception(Refused(words))
                return
            if len(self._good) < 1000:
                self._good.add(block)
        stream.answer.set_result(b"".join(stream.came)[5:])

    def _count(self, size: int) -> None:
        self._read += size
        if self._read > _LARGEST_WINDOW // 2:
            self._transport.write(_frame(_WINDOW, 0, 0, struct.pack("!I", self._read)))
            self._read = 0

    def _settle(self, payload: bytes) -> None:
        for at in range(0, len(payload), 6):
            key, value = struct.unpack_from("!HI", payload, at)
            if key == _INITIAL_WINDOW:
                for stream in self._streams.values():
                    stream.window += value - self._stream_window
                self._stream_window = value
            elif key == _MOST_FRAME:
                self._most = value
        self._transport.write(_frame(_SETTINGS, _ACK, 0, b""))
        self._send()

    def _fail(self, error: Refused) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            if not stream.answer.done():
                stream.answer.set_exception(error)


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    return struct.pack("!HBBBI", len(payload) >> 8, len(payload) & 255, kind, flags, number) + payload


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) > 126:
        raise ValueError(f"a header of {len(data)} bytes is too long for this client")
    return bytes([len(data)]) + data


class Window:
    """What a closed loop showed: ``times_s`` of all its calls."""

    def __init__(self, times_s: list[float], passed_s: float, client_s: float) -> None:
        self.times_s, self.passed_s, self.client_s = times_s, passed_s, client_s

    @property
    def per_second(self) -> float:
        return len(self.times_s) / self.passed_s


async def connect(make: Any, port: int, connections: int) -> list[Any]:
    """``make``: what makes a protocol."""
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(make, "127.0.0.1", port))[1] for _ in range(connections)]


async def window(connections: list[Any], clients: int, seconds: float, size: int) -> Window:
    """Closed loop of so many clients, each on one of the connections; every answer has ``size`` bytes.

    Raises Refused for an answer that is no good one, and TimeoutError.
    """
    times: list[float] = []
    begin, spent = time.perf_counter(), time.process_time()
    end = begin + seconds

    async def client(number: int) -> None:
        call = connections[number % len(connections)].call
        while (begun := time.perf_counter()) < end:
            answer = await call()
            times.append(time.perf_counter() - begun)
            if len(answer) != size:
                raise Refused(f"an answer of {len(answer)} bytes instead of {size}")

    async with asyncio.timeout(seconds + _ANSWER_TIMEOUT_S):
        await asyncio.gather(*(client(number) for number in range(clients)))
    return Window(times, time.perf_counter() - begin, time.process_time() - spent)
