"""The processes of a model, as they are found by looking."""

from __future__ import annotations

import os
import subprocess
import sys

from native_service.triton import stubs

CHILD = "import sys; held = bytearray(b'x') * (48 << 20); print('held', flush=True); sys.stdin.read()"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_the_memory_of_what_a_process_has_started_is_its_own() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"held\n"
        first, child = stubs.with_descendants([parent.pid])
        assert first == parent.pid
        assert child not in (parent.pid, os.getpid())
        assert stubs.memory_bytes_of(parent.pid) > stubs.memory_bytes_of(child) > 48 << 20
        parent.stdin.close()
    assert stubs.with_descendants([parent.pid]) == [parent.pid]
    assert stubs.memory_bytes_of(parent.pid) == 0
