from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from native_service.children import orphans


def test_orphans_are_waited_for_and_children_of_our_own_keep_their_exit_code() -> None:
    program = """
        import asyncio, ctypes, os, sys, time
        from native_service.children.orphans import _zombies, reap

        PR_SET_CHILD_SUBREAPER = 36
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what the first process of a container is

        async def main():
            reaping = asyncio.create_task(reap(look_s=0.2))
            # Its own child ends at once and leaves us a grandchild that ends a little later.
            shell = await asyncio.create_subprocess_exec("sh", "-c", "sleep 0.3 & exit 5")
            assert await shell.wait() == 5
            slow = await asyncio.create_subprocess_exec("sh", "-c", "sleep 1.5; exit 7")
            deadline = time.monotonic() + 20
            seen = False
            while time.monotonic() < deadline and not (seen and not _zombies()):
                seen = seen or bool(_zombies())
                await asyncio.sleep(0.02)
            print(seen, _zombies())
            print(await slow.wait())
            reaping.cancel()

        asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == ["True set()", "7"]


def test_a_thread_that_ends_while_it_is_looked_at_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["true"]) as child:
        while True:  # until it is a zombie
            if child.pid in orphans._zombies():
                break
        look = Path.iterdir
        monkeypatch.setattr(Path, "iterdir", lambda folder: [folder / "0", *look(folder)])
        assert child.pid in orphans._zombies()
