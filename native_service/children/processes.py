"""Children in a process group of their own, whose output is read line by line and which always end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from native_service.children import launch

_LONGEST_LINE = 16 * 1024
_READ_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Child:
    """A running child and the read ends of its output. ``close`` it after its end."""

    process: asyncio.subprocess.Process
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader
    pipes: tuple[asyncio.ReadTransport, ...]

    @property
    def is_running(self) -> bool:
        return self.process.returncode is None

    def kill_group(self) -> None:
        """SIGKILL the child and everything it started that stayed in its group, also after its own end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def stop(self, grace_s: float) -> int:
        """SIGTERM, then SIGKILL to the group after ``grace_s``; the exit code (negative = signal)."""
        if self.is_running and grace_s > 0:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.process.wait()
        self.kill_group()
        return await self.process.wait()

    def close(self) -> None:
        """Close our ends of the pipes; a grandchild that left the group may hold the others for ever."""
        for pipe in self.pipes:
            pipe.close()


async def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdin: int = asyncio.subprocess.DEVNULL,
    longest_line: int = _READ_BYTES,
    folder: Path | None = None,
    new_session: bool = True,
) -> Child:
    """Start ``command`` as the leader of a new process group; it is killed when this process dies.

    ``longest_line`` is in bytes and counts for ``readline`` only; ``folder`` is the working directory, None keeps ours.
    A group of its own keeps a terminal's Ctrl-C with the supervisor, which stops its children in order; in a session of
    its own ``command`` cannot ask the terminal anything either. But Linux shares the processors out by sessions: those
    through which a call passes are quicker in one. The pipes are ours and not asyncio's, whose ``wait``
    returns only when every holder of a pipe is gone: a grandchild that hangs would hide the child's death.
    Raises OSError when this process may not have another one, or no more files.
    """
    pipes: list[asyncio.ReadTransport] = []
    theirs = contextlib.ExitStack()
    try:
        readers, writers = [], []
        for _ in range(2):
            read_end, write_end = os.pipe()
            theirs.callback(os.close, write_end)
            reader, pipe = await _reader(read_end, longest_line)
            readers.append(reader)
            pipes.append(pipe)
            writers.append(write_end)
        process = await asyncio.create_subprocess_exec(
            *launch.tied(command),
            stdin=stdin,
            stdout=writers[0],
            stderr=writers[1],
            env=dict(environment),
            cwd=folder,
            start_new_session=new_session,
            process_group=None if new_session else 0,
        )
    except BaseException:  # a cancelled start must not leave open pipes either
        for pipe in pipes:
            pipe.close()
        raise
    finally:
        theirs.close()
    stdout, stderr = readers
    return Child(process, stdout, stderr, tuple(pipes))


async def _reader(descriptor: int, limit: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    reader = asyncio.StreamReader(limit=limit)
    file = os.fdopen(descriptor, "rb", buffering=0)
    loop = asyncio.get_running_loop()
    pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    return reader, pipe


async def lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """The lines of ``stream`` without their ends, until its end; a line over 16 KiB comes in pieces.

    ``StreamReader.readline`` would raise on a long line, and a pipe nobody reads stops its writer.
    """
    rest = b""
    while data := await stream.read(_READ_BYTES):
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace").rstrip("\r")
        if len(rest) > _LONGEST_LINE:
            yield rest.decode(errors="replace")
            rest = b""
    if rest:
        yield rest.decode(errors="replace")
