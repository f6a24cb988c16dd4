"""The processes that tritonserver starts for the instances of a python model."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from pathlib import Path

from nereid_backend import pulse
from nereid_backend.pulse import Pulse

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory lives on Linux
_PROC = Path("/proc")
# A run over its limit may still end by itself; nobody waits for it any more.
_GRACE_S = 2.0
# A process that runs nothing beats five times a second, unless something holds its interpreter or it has been stopped.
_SILENT_S = 30.0
# Who looks so much later than before stood still itself, and with it maybe the whole container (docker pause).
_STOOD_STILL_S = 15.0


def stubs_of(server: int, model: Path) -> set[int]:
    """The ids of the children of process ``server`` that run ``model``, a directory of its repository."""
    script = os.fsencode(model / "1" / "model.py")
    found = set()
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # A zombie's command line reads as empty.
            if script in (entry / "cmdline").read_bytes().split(b"\0") and _parent(entry) == server:
                found.add(int(entry.name))
        except OSError:
            continue  # gone meanwhile, or not ours to look at
    return found


def is_running(pid: int, model: Path) -> bool:
    """Whether process ``pid``, a stub of ``model`` once, still is: neither gone nor a zombie nor another by now."""
    try:
        return os.fsencode(model / "1" / "model.py") in (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # too many open files, say: no proof of anything
        return True


def regions_of(pid: int, prefix: str) -> frozenset[Path]:
    """The files of shared memory whose name begins with ``prefix`` that process ``pid`` has mapped."""
    try:
        paths = {line.split(maxsplit=5)[-1] for line in (_PROC / str(pid) / "maps").read_text().splitlines()}
    except OSError:
        return frozenset()
    return frozenset(Path(path) for path in paths if path.startswith(f"{SHARED_MEMORY}/{prefix}"))


def with_descendants(pids: Iterable[int]) -> list[int]:
    """``pids`` and what they have started: a worker of SnoozeML, programs and what starts those."""
    found = list(pids)
    for pid in found:  # which grows meanwhile
        for task in (_PROC / str(pid) / "task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(child) for child in task.read_text().split()]
    return found


def memory_bytes_of(pid: int) -> int:
    """What process ``pid`` and its descendants hold, of pages that others share their part only; 0 when it is gone.

    Libraries and what a fork shares would count for every process otherwise. Takes some milliseconds for each GB.
    """
    return sum(map(_own_memory_bytes_of, with_descendants([pid])))


def _own_memory_bytes_of(pid: int) -> int:
    try:
        facts = dict(line.split(":", 1) for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()[1:])
    except OSError:
        return 0
    return int(facts["Pss"].split()[0]) * 1024


def kill(pids: Iterable[int]) -> None:
    """SIGKILL each of ``pids`` that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _parent(entry: Path) -> int:
    # pid (name of any characters) state parent ...
    return int((entry / "stat").read_text().rpartition(")")[2].split()[1])


class StubRecord:
    """The processes of each model that one tritonserver has loaded, and which models have lost one."""

    def __init__(self, repository: Path, prefix: str, pulses: Path | None) -> None:
        """``prefix`` begins the names of their regions of shared memory; in ``pulses`` they tell how they are."""
        self._repository, self._prefix, self._pulses = repository, prefix, pulses
        # Of each loaded model its processes, and the regions of shared memory of each.
        self._processes: dict[str, dict[int, frozenset[Path]]] = {}
        self._instances: dict[str, int] = {}
        self._dead: set[str] = set()
        self._hung: set[int] = set()
        self._looked_ns, self._awake_since_ns = time.monotonic_ns(), 0

    def take_note(self, server: int, model: str, before: set[int]) -> None:
        """``model`` has been loaded; ``before`` are its processes from before the load.

        Triton ends those within a second or so, or keeps them when nothing had changed.
        """
        found, known = stubs_of(server, self._repository / model), self._processes.get(model, {})
        self._processes[model] = self._regions(found - before or found & known.keys())
        self._hung -= found
        self._instances[model] = len(self._processes[model])
        self._dead.discard(model)

    def processes_of(self, model: str) -> list[int]:
        """The ids of the processes of ``model``, as far as they live."""
        return [pid for pid in self._processes.get(model, ()) if is_running(pid, self._repository / model)]

    def forget(self, model: str) -> None:
        """``model`` has been unloaded."""
        self._processes.pop(model, None)
        self._dead.discard(model)

    def all_died(self) -> None:
        """The server has ended, and its group with it."""
        self._dead |= self._processes.keys()
        for file in chain.from_iterable(chain.from_iterable(each.values()) for each in self._processes.values()):
            file.unlink(missing_ok=True)
        self._processes.clear()

    def look(self, server: int, changing: Collection[str]) -> frozenset[str]:
        """The models that have lost a process, but for those ``changing``; the memory of the lost is gone after this.

        Nothing else would remove it before the server's end.
        """
        for model, running in self._processes.items():
            gone = [pid for pid in running if not is_running(pid, self._repository / model)]
            if model in changing or not gone:
                continue
            if len(now := stubs_of(server, self._repository / model)) >= self._instances[model]:
                # The load of an ensemble starts new ones for the models behind it and ends the old ones one by one.
                self._processes[model] = self._regions(now)
                continue
            for file in chain.from_iterable(running.pop(pid) for pid in gone):
                file.unlink(missing_ok=True)
            self._dead.add(model)
        return frozenset(self._dead)

    def find_hung(self, limits: Mapping[str, float]) -> dict[int, str]:
        """The processes that will not answer any more, each told once, with the reason.

        ``limits`` are of runs, in seconds; without one a run may take for ever.
        """
        hung: dict[int, str] = {}
        if self._pulses is None:
            return hung
        now = time.monotonic_ns()
        if now - self._looked_ns > _STOOD_STILL_S * 1e9:
            self._awake_since_ns = now
        self._looked_ns = now
        for model, running in self._processes.items():
            for pid in running.keys() - self._hung:
                last = pulse.read(self._pulses / str(pid))
                if reason := _why_hung(last, limits.get(model), self._awake_since_ns):
                    hung[pid] = f"model {model!r}: {reason}; its process is killed"
        self._hung |= hung.keys()
        return hung

    def _regions(self, pids: Iterable[int]) -> dict[int, frozenset[Path]]:
        return {pid: regions_of(pid, self._prefix) for pid in pids}


def _why_hung(last: Pulse | None, limit_s: float | None, since_ns: int) -> str:
    """Why a process that told ``last`` will not answer any more, by the time since ``since_ns``; empty when it may."""
    now = time.monotonic_ns()
    if last is None:
        return ""
    if last.busy_since_ns:
        over = limit_s is not None and now - max(last.busy_since_ns, since_ns) > (limit_s + _GRACE_S) * 1e9
        return f"a run goes on past its time limit of {limit_s:g} s" if over else ""
    return f"it gave no sign of life for {_SILENT_S:g} s" if now - max(last.beat_ns, since_ns) > _SILENT_S * 1e9 else ""
