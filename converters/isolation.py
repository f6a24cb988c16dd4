"""Work on models one by one in a child process, so that a file which ends its reader costs one model.

MLIR aborts the process on some damaged files. The child is forked before any library is imported, answers each model
with one line of JSON, and is replaced where it ends early.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereid_backend.errors import NereidError, short_repr

_STDERR = 2


def ended_text(exit_code: int) -> str:
    """What to say of a model whose reading ended its process; a negative ``exit_code`` is a signal."""
    how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    return f"reading it ended the converter ({how}); it is damaged, or too large for this machine"


def problem_of(error: Exception) -> str:
    """What to say of a model that raised ``error``: the text of ours, the class and the text of any other."""
    if isinstance(error, NereidError):
        return str(error)
    return f"{type(error).__name__}: {short_repr(str(error))} (please report it)"


def each(
    sources: Sequence[Path],
    work: Callable[[Path], Any],
    ended: Callable[[Path, str], Any],
    *,
    in_child: bool,
    quiet: bool = False,
) -> Iterator[Any]:
    """``work`` of each source in turn, in a child process or in this one; it gives what JSON can carry.

    ``ended`` gives the result, from the text of what happened, for a source whose reading ended the child.
    ``quiet`` drops what a child's libraries print to stderr.
    """
    if not in_child:
        yield from map(work, sources)
        return
    left = list(sources)
    while left:
        first = True
        for answer in _in_child(tuple(left), work, quiet=quiet):
            result = answer
            if isinstance(answer, _Ended):
                if not first:  # what was read before may have damaged the process: once more, in a fresh one
                    break
                result = ended(left[0], ended_text(answer.exit_code))
            yield result
            left.pop(0)
            first = False


@dataclass(frozen=True, slots=True)
class _Ended:
    exit_code: int


def _in_child(sources: Sequence[Path], work: Callable[[Path], Any], *, quiet: bool) -> Iterator[Any]:
    """The results up to where the child ended, then what ended it before all were done."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()  # no engine has been imported yet, and the threads of numpy outlive a fork
    if child == 0:
        os.close(reader)
        try:
            if quiet:
                os.dup2(os.open(os.devnull, os.O_WRONLY), _STDERR)
            with os.fdopen(writer, "wb") as answers:
                for source in sources:
                    answers.write(json.dumps(work(source)).encode() + b"\n")
                    answers.flush()
            sys.stdout.flush()
        except BaseException as error:  # noqa: BLE001 - the edge of this process
            os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)
        os._exit(0)
    os.close(writer)
    count = 0
    try:
        with os.fdopen(reader, "rb") as answers:
            for line in answers:
                if line.endswith(b"\n"):
                    count += 1
                    yield json.loads(line)
    except BaseException:
        os.kill(child, signal.SIGTERM)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    if count < len(sources):
        yield _Ended(os.waitstatus_to_exitcode(status))
