"""A program's code in huge pages of memory.

Envoy's code is 68 MB, and a call of a single client meets it cold: a third of its time goes into finding the pages.
Most kernels put no files on disk into huge pages, but all since Linux 6.1 put files in memory there when asked. So the
program is copied into one, its code to where a huge page can hold it, and started from there.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

_PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
# <linux/memfd.h> and <linux/mman.h>; Python 3.11 does not know them.
_MFD_EXEC, _MADV_COLLAPSE = 0x10, 25
_MAP_FIXED, _MAP_FAILED = 0x10, 2**64 - 1
_TRIAL_TIMEOUT_S = 10.0
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

# <elf.h>: a 64-bit little-endian file; the place, size and number of its program headers; one of these.
_MAGIC, _HEADER_BYTES = b"\x7fELF\x02\x01", 64
_TABLE, _TABLE_SIZES = struct.Struct("<32xQ"), struct.Struct("<54xHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_PT_LOAD, _PF_X = 1, 1


class _Code(NamedTuple):
    """Where a program's code lies in its file, and where in the copy."""

    source: int
    target: int
    bytes: int


def copy_program(program: Path) -> int:
    """The descriptor of a sealed file in memory that does as ``program`` does; the caller's to close.

    It is tried out with ``--version``. Raises OSError where the system does not allow this, ValueError for what is no
    64-bit program with a lot of code.
    """
    page_bytes = int(_PAGE_SIZE.read_text())
    with program.open("rb") as file:
        source = file.fileno()
        size = os.fstat(source).st_size
        head, code = _move_code(source, size, page_bytes)
        copy = _memory_file(program.name)
        try:
            os.truncate(copy, _up(code.target + code.bytes, page_bytes))
            end = code.source + code.bytes
            _copy_bytes(source, 0, copy, 0, code.source)
            _copy_bytes(source, end, copy, end, size - end)
            _copy_bytes(source, code.source, copy, code.target, code.bytes)
            os.pwrite(copy, head, 0)
            _collapse(copy, code.target // page_bytes * page_bytes, page_bytes)
            fcntl.fcntl(copy, fcntl.F_ADD_SEALS, _SEALS)
            _try_out(copy)
        except BaseException:
            os.close(copy)
            raise
    return copy


def _move_code(source: int, size: int, page_bytes: int) -> tuple[bytes, _Code]:
    """The copy's head, which has its code behind everything else, and what is to be moved there."""
    head = os.pread(source, _HEADER_BYTES, 0)
    if len(head) < _HEADER_BYTES or not head.startswith(_MAGIC):
        raise ValueError("it is no 64-bit program")
    [table], (entry_bytes, entries) = _TABLE.unpack_from(head), _TABLE_SIZES.unpack_from(head)
    end = table + entries * entry_bytes
    if entry_bytes != _SEGMENT.size or end > size:
        raise ValueError("its program headers cannot be read")
    new_head = bytearray(os.pread(source, end, 0))
    for header in range(table, end, entry_bytes):
        kind, flags, offset, address, physical, file_bytes, memory_bytes, _ = _SEGMENT.unpack_from(new_head, header)
        if kind == _PT_LOAD and flags & _PF_X and file_bytes >= page_bytes and offset >= end:
            # The loader wants the place in the file and the address to agree within a page.
            code = _Code(offset, _up(size, page_bytes) + address % page_bytes, file_bytes)
            moved = (kind, flags, code.target, address, physical, file_bytes, memory_bytes, page_bytes)
            _SEGMENT.pack_into(new_head, header, *moved)
            return bytes(new_head), code
    raise ValueError("it has no code that fills a huge page")


def _memory_file(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_EXEC)
    except OSError:
        return os.memfd_create(name, flags)  # Linux before 6.3, where all may be executed


def _copy_bytes(source: int, offset: int, target: int, target_offset: int, count: int) -> None:
    os.lseek(target, target_offset, os.SEEK_SET)
    while count > 0:
        copied = os.sendfile(target, source, offset, count)
        if not copied:
            raise OSError("the program became shorter while it was copied")
        offset, count = offset + copied, count - copied


def _collapse(file: int, offset: int, page_bytes: int) -> None:
    """Put ``file`` from ``offset`` to its end into huge pages. They stay when nothing maps them any more."""
    library, length = _library(), os.fstat(file).st_size - offset
    area = library.mmap(None, length + page_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if area == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "no room for the program's code")
    try:
        address = _up(area, page_bytes)
        if library.mmap(address, length, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, file, offset) != address:
            raise OSError(ctypes.get_errno(), "the program's code cannot be mapped")
        if library.madvise(address, length, _MADV_COLLAPSE):
            raise OSError(ctypes.get_errno(), "the kernel gives no huge pages")
    finally:
        library.munmap(area, length + page_bytes)


def _try_out(copy: int) -> None:
    """What may not be executed from memory (policies, sandboxes) shows only when it is tried."""
    command = [f"/proc/{os.getpid()}/fd/{copy}", "--version"]
    quiet = subprocess.DEVNULL
    try:
        subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, check=True, timeout=_TRIAL_TIMEOUT_S)
    except subprocess.SubprocessError as error:
        raise OSError(f"it does not run from memory: {error}") from None


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    library.mmap.argtypes = [pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    library.mmap.restype = ctypes.c_size_t
    library.munmap.argtypes = [pointer, size]
    library.madvise.argtypes = [pointer, size, ctypes.c_int]
    return library


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
