"""Start a child that cannot outlive its parent.

Run as a script, this file is the tiny launcher in between: it asks the kernel to SIGKILL it when the parent
dies (PR_SET_PDEATHSIG survives exec) and then becomes the real program. ``preexec_fn`` would do the same inside
the forked copy of a threaded process, which can deadlock; a launcher cannot.

The kernel ties the request to the parent *thread*: start children from the main thread's event loop.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def tied(command: Sequence[str]) -> list[str]:
    """``command`` behind the launcher: the process it becomes is killed when this process dies."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *command]  # noqa: PTH100


def _become(parent: int, command: list[str]) -> None:
    import ctypes
    import signal

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # The parent died before the request was in place: nobody is left to serve.
        sys.exit(1)
    try:
        os.execvp(command[0], command)  # noqa: S606 - a fixed argument list, no shell
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
