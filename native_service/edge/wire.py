"""Protobuf's wire format read and written without its objects: fields by their places, and varints."""

from __future__ import annotations

from collections.abc import Iterator

VARINT, LENGTH = 0, 2
"""Kinds of fields: a number, and bytes behind their count."""
_FIXED_BYTES = {1: 8, 5: 4}


def fields(message: bytes | memoryview, at: int = 0, end: int | None = None) -> Iterator[tuple[int, int, int]]:
    """Key (number * 8 + kind) and the place of the content of every field in a part of ``message``.

    Raises IndexError or KeyError for what is none.
    """
    end = len(message) if end is None else end
    while at < end:
        key, at = read_varint(message, at)
        kind = key & 7
        if not 8 <= key < 2**32:
            raise KeyError(key)  # fields are numbered from 1 to 2**29 - 1
        if kind == LENGTH:
            size, at = read_varint(message, at)
            stop = at + size
        elif kind == VARINT:
            _, stop = read_varint(message, at)
        else:
            stop = at + _FIXED_BYTES[kind]
        if stop > end:
            raise IndexError(stop)
        yield key, at, stop
        at = stop


def varint(value: int) -> bytes:
    """``value``, 0 or more."""
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def read_varint(message: bytes | memoryview, at: int) -> tuple[int, int]:
    """The number at ``at`` and where it ends. Raises IndexError beyond the end and past 64 bits."""
    value = message[at]
    at += 1
    if value < 128:
        return value, at
    value &= 127
    for shift in range(7, 70, 7):
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & 2**64 - 1, at
    raise IndexError(at)
