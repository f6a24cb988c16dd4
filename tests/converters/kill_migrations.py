"""Kills a migration at every step. A process of its own: forks want one without threads.

usage: python kill_migrations.py BUNDLE copy|replace

BUNDLE is a legacy bundle. A step is a change of the folder (a file opened, named, renamed or removed), as the
interpreter's audit events tell, and every line of the functions that write. For each one a fresh copy of the bundle is
migrated by a child that ends with SIGKILL right there; what is left must load with the same numbers, and migrating it
again must end as an undisturbed migration does.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

from converters import durable, manifest, migrate, weights
from nereid_backend import safetensors

CHANGES = {"open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.chmod"}
WRITERS = {weights._write.__code__, durable.write_text.__code__, durable.sync_directory.__code__}


def loaded(bundle: Path) -> dict[str, Any]:
    """The weights as a conversion would write them."""
    found, _ = weights.in_use(bundle, manifest.read(bundle / "manifest.yaml", has_hook=False).weights_file)
    if not found.needs_transpose:
        tensors = safetensors.read(found.path).tensors
    else:
        with tempfile.TemporaryDirectory() as folder:
            found.writer()(Path(folder) / "written")
            tensors = safetensors.read(Path(folder) / "written").tensors
    return {name: (tensors[name].shape, tensors[name].tobytes()) for name in found.argument_order}


def content(bundle: Path) -> dict[str, bytes]:
    """Every file, without the time of the original that a copy records."""
    return {
        str(path.relative_to(bundle)): path.read_bytes().replace(b"mtime", b"").partition(b"_ns")[0]
        for path in sorted(bundle.rglob("*"))
        if path.is_file()
    }


def migrate_until(step: int, bundle: Path, *, replace: bool) -> bool:
    """Whether the child was killed at its ``step``-th step, and did not get to its end before."""
    pid = os.fork()
    if pid == 0:
        steps = itertools.count(1)

        def end_here() -> None:
            if next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            if event in CHANGES and str(arguments[0]).startswith(str(bundle)):
                end_here()

        def trace(frame: FrameType, event: str, _argument: Any) -> Any:
            if frame.f_code not in WRITERS:
                return None
            if event == "line":
                end_here()
            return trace

        sys.addaudithook(audit)
        sys.settrace(trace)
        migrate.migrate(bundle, replace=replace)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status) and os.waitstatus_to_exitcode(status):
        raise SystemExit("the migration failed by itself")
    return os.WIFSIGNALED(status)


def main(source: Path, *, replace: bool) -> None:
    wanted = loaded(source)
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        undisturbed, bundle = Path(folder) / "undisturbed", Path(folder) / "bundle"
        shutil.copytree(source, undisturbed)
        migrate.migrate(undisturbed, replace=replace)
        end, states, step = content(undisturbed), set(), 1
        while True:
            shutil.copytree(source, bundle)
            killed = migrate_until(step, bundle, replace=replace)
            states.add(tuple(content(bundle).items()))
            assert loaded(bundle) == wanted, f"killed at step {step}, the bundle loads other weights"
            migrate.migrate(bundle, replace=replace)
            assert content(bundle) == end, f"killed at step {step}, the migration is not taken up"
            assert loaded(bundle) == wanted
            shutil.rmtree(bundle)
            if not killed:
                break
            step += 1
    print(json.dumps({"kills": step - 1, "states": len(states)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), replace=sys.argv[2] == "replace")
