"""gzip and deflate of HTTP bodies, in pieces of bounded size whatever a little input claims to become."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from nereid_backend.errors import InvalidArgument, short_repr

CODINGS = ("gzip", "deflate")
_GZIP_BITS, _ZLIB_BITS, _EITHER_BITS = 31, 15, 47  # zlib's wbits
_PIECE_BYTES = 1024 * 1024
# A better one costs more time than it saves on any network that carries tensors.
_LEVEL = 1


class Decoder:
    """Undoes the ``Content-Encoding`` of one body."""

    def __init__(self, coding: str) -> None:
        """Raises InvalidArgument for a coding other than gzip and deflate."""
        name = coding.strip().lower()
        if name not in ("", "identity", *CODINGS):
            raise InvalidArgument(f"Content-Encoding {short_repr(coding)} is not read here; use gzip or deflate")
        self._zlib = zlib.decompressobj(_EITHER_BITS) if name in CODINGS else None

    def parts(self, chunk: bytes) -> Iterator[bytes]:
        """What ``chunk``, the next of the body, becomes, at most 1 MiB at a time. Raises InvalidArgument."""
        if self._zlib is None:
            yield chunk
            return
        part = b""
        # Of what did not fit into a part some is input and some is inside zlib.
        while chunk or len(part) == _PIECE_BYTES:
            try:
                part = self._zlib.decompress(chunk, _PIECE_BYTES)
            except zlib.error:
                raise InvalidArgument("the body is not in the coding that its Content-Encoding names") from None
            if part:
                yield part
            if self._zlib.unused_data:
                raise InvalidArgument("bytes follow the end of the compressed body")
            chunk = self._zlib.unconsumed_tail

    def finish(self) -> None:
        """Raises InvalidArgument when the body ended too early."""
        if self._zlib is not None and not self._zlib.eof:
            raise InvalidArgument("the compressed body is cut off")


def accepted_coding(header: str) -> str | None:
    """The coding to answer in by an ``Accept-Encoding``; None for none. Of two the first that is not weighed zero."""
    for entry in header.lower().split(","):
        name, _, weight = entry.partition(";")
        if name.strip() in CODINGS and weight.replace(" ", "").rstrip("0.") != "q=":
            return name.strip()
    return None


def encode(coding: str, body: bytes) -> bytes:
    """``body`` in ``coding``."""
    packer = zlib.compressobj(_LEVEL, wbits=_GZIP_BITS if coding == "gzip" else _ZLIB_BITS)
    return packer.compress(body) + packer.flush()
