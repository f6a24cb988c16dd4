"""The other way of a call: a Unix socket from the model's process to the service that made the call.

The service puts a token into the request and listens on ``LINK_SOCKET`` in the run directory that ``NEREID_RUN`` names.
We connect, send the token, and get a line of JSON (``Header``) and the bytes it announces. Then we send frames: a kind,
a length, that many bytes. What comes from a client is a token at most, never a path.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from dataclasses import asdict, dataclass

from nereid_backend.errors import Cancelled, EngineError, InvalidArgument

RUN_VARIABLE = "NEREID_RUN"
LINK_SOCKET = "link.sock"
PARAMETER = "nereid_link"
TOKEN_BYTES = 32
FRAME = struct.Struct("!cI")
STDOUT, STDERR, EXIT = b"o", b"e", b"x"

_PATIENCE_S = 10.0
_LONGEST_HEADER = 64 * 1024
_MOST_PENDING_BYTES = 256 * 1024
_READ_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Header:
    """What the service adds to the request.

    ``input_bytes`` is None when the input travels in the request itself. ``live``: it is a Checkpoint, whose caller
    wants the child's output; otherwise the link only tells the service that this process lives.
    """

    shape: tuple[int, ...]
    input_bytes: int | None
    live: bool

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Header:
        raw = json.loads(line)
        return cls(tuple(raw["shape"]), raw["input_bytes"], raw["live"])


class Link:
    """Our end. ``give`` never waits; what is not taken yet is kept, and ``is_full`` says when to stop giving."""

    def __init__(self, connection: socket.socket, header: Header, rest: bytes) -> None:
        self._socket = connection
        self._received = rest
        self._pending = bytearray()
        self.header = header

    @classmethod
    def open(cls, token: str) -> Link:
        """Connect to the service that wrote ``token`` into a request. Raises InvalidArgument for anybody else's."""
        unknown = InvalidArgument(f"the parameter {PARAMETER!r} is not for clients; leave it out")
        run = os.environ.get(RUN_VARIABLE)
        if run is None or len(token) != TOKEN_BYTES or not token.isascii():
            raise unknown
        connection = _connect(run)
        try:
            connection.sendall(token.encode())
            received = b""
            while b"\n" not in received and len(received) < _LONGEST_HEADER:
                data = connection.recv(_LONGEST_HEADER)
                if not data:
                    raise unknown
                received += data
            line, _, rest = received.partition(b"\n")
            return cls(connection, Header.from_line(line), rest)
        except OSError as error:
            connection.close()
            raise EngineError(f"the service does not answer ({error.strerror or error})") from None
        except BaseException:
            connection.close()
            raise

    def read_input(self, file: int) -> None:
        """Write the announced bytes to the descriptor ``file``. Raises Cancelled when they do not come."""
        left = self.header.input_bytes or 0
        data = self._received[:left]
        while True:
            os.writev(file, [data])
            left -= len(data)
            if left <= 0:
                break
            try:
                data = self._socket.recv(min(left, _READ_BYTES))
            except OSError:
                data = b""
            if not data:
                raise Cancelled("the caller is gone")

    def start(self) -> None:
        """From here on nothing waits."""
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_pending(self) -> bool:
        return bool(self._pending)

    @property
    def is_full(self) -> bool:
        return len(self._pending) >= _MOST_PENDING_BYTES

    def give(self, kind: bytes, data: bytes) -> None:
        if self.header.live or kind == EXIT:
            self._pending += FRAME.pack(kind, len(data)) + data

    def end(self, exit_code: int) -> None:
        """The last frame: how the child ended; negative is a signal."""
        self.give(EXIT, b"%d" % exit_code)

    def flush(self) -> None:
        """Send what can be sent without waiting. Raises Cancelled when nobody listens any more."""
        while self._pending:
            try:
                sent = self._socket.send(self._pending)
            except BlockingIOError:
                return
            except OSError:
                raise Cancelled("the caller is gone") from None
            del self._pending[:sent]

    def close(self) -> None:
        self._socket.close()


def _connect(run: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_PATIENCE_S)
    try:
        # By the folder's descriptor: a socket's path may have 107 characters only.
        folder = os.open(run, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            connection.connect(f"/proc/self/fd/{folder}/{LINK_SOCKET}")
        finally:
            os.close(folder)
    except OSError as error:
        connection.close()
        raise EngineError(f"the service cannot be reached ({error.strerror or error})") from None
    return connection
