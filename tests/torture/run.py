"""Torture for a real ``nereid serve``: each scenario has a server and a load of its own, in namespaces of its own.

What every scenario must hold beside its own line: no wrong answer and no hung call, every permit back, bounded memory,
exit code 0 on SIGTERM, no traceback in the log, no process, region of shared memory or file left. Exits 1 when one does
not hold.

usage: python run.py [NAME ...] [--seed 1] [--list] [--table]
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import deaths
import models
import shortages
import strangers
from ground import MIB, Ground, Impossible, Missed, standing
from scenarios import SCENARIOS, Scenario

from native_service.children import orphans

# Importing them is what fills the list.
assert all(module.scenario for module in (deaths, models, shortages, strangers))

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->\n"
LONGEST_S, REAPS_S, LAST_LINES = 600, 1.0, 40
# Everything a scenario starts ends with it, disks and shared memory are its own, and nothing needs privileges.
APART = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--fork", "--mount-proc", "--kill-child")
_SET_FLAGS, _UP_AND_RUNNING = 0x8914, 0x41  # SIOCSIFFLAGS, IFF_UP | IFF_RUNNING


@dataclass(frozen=True)
class Result:
    """``problem`` is empty when everything held; ``skipped`` when this machine cannot do it."""

    name: str
    problem: str = ""
    skipped: str = ""
    seconds: float = 0.0
    recovery_s: float = 0.0
    peak_mib: int = 0


async def torment(scenario: Scenario, folder: Path, seed: int) -> Result:
    """Run one scenario in this process."""
    begun = time.monotonic()
    ground: Ground | None = None
    problem = skipped = ""
    try:
        async with standing(folder, seed, scenario.terms, scenario.prepare) as ground:
            await scenario.body(ground)
    except Impossible as error:
        skipped = str(error)
    except Missed as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001 - the edge: any failure is the scenario's
        problem = f"{type(error).__name__}: {error}"
    met = (0.0, 0) if ground is None else (round(ground.recovery_s, 1), ground.peak_bytes // MIB)
    if problem and (log := folder / "log").exists():
        told = [line for line in log.read_text(errors="replace").splitlines() if " nereid.calls: " not in line]
        print("\n".join(told[-LAST_LINES:]), file=sys.stderr)
    return Result(scenario.name, problem, skipped, round(time.monotonic() - begun, 1), *met)


def run_apart(name: str, seed: int) -> Result:
    """Run one scenario in a process and in namespaces of its own, where they are allowed."""
    apart = APART if subprocess.run([*APART, "true"], capture_output=True).returncode == 0 else ()
    with tempfile.TemporaryDirectory(prefix="torture-") as scratch:
        told = Path(scratch) / "result"
        command = [*apart, sys.executable, __file__, name, "--seed", str(seed), "--inside", scratch]
        try:
            subprocess.run(command, timeout=LONGEST_S, check=False)
        except subprocess.TimeoutExpired:
            return Result(name, f"not over within {LONGEST_S} s", seconds=LONGEST_S)
        return Result(**json.loads(told.read_text())) if told.exists() else Result(name, "its process died")


def inside(name: str, seed: int, scratch: Path) -> None:
    (folder := scratch / "ground").mkdir()
    if orphans.is_first():
        with socket.socket() as any_socket:  # a new network's loopback is off
            fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh22x", b"lo", _UP_AND_RUNNING))

    async def alone() -> Result:
        # To a model's process a parent nobody waited for is alive.
        reaping = asyncio.create_task(orphans.reap(REAPS_S)) if orphans.is_first() else None
        result = await torment(SCENARIOS[name], folder, seed)
        if reaping is not None:
            reaping.cancel()
        return result

    result = asyncio.run(alone())
    (scratch / "result").write_text(json.dumps(asdict(result)))


def row(result: Result) -> str:
    held = f"**no**: {result.problem}" if result.problem else f"not run: {result.skipped}" if result.skipped else "yes"
    what = SCENARIOS[result.name].must_hold
    recovery = f"{result.recovery_s:.1f}" if result.recovery_s else "-"
    return f"| {result.name.replace('_', ' ')} | {what} | {held} | {recovery} | {result.peak_mib} |"


def write_table(results: Sequence[Result], seed: int) -> None:
    head = "| scenario | what must hold | holds | recovery, s | peak memory, MiB |\n| --- | --- | --- | --- | --- |\n"
    when = f"{time.strftime('%Y-%m-%d')}, seed {seed}:\n\n"
    before, _, rest = README.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    table = head + "".join(f"{row(result)}\n" for result in results)
    README.write_text(f"{before}{BEGIN}\n{when}{table}\n{END}{after}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="scenarios; all when left out")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="print the scenarios")
    parser.add_argument("--table", action="store_true", help="write the results into the README")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in SCENARIOS]:
        parser.error(f"no scenario {unknown[0]!r}; --list prints them")
    if options.list:
        for scenario in SCENARIOS.values():
            print(f"{scenario.name}: {scenario.must_hold}")
        return 0
    if options.inside:
        inside(options.names[0], options.seed, options.inside)
        return 0
    results = []
    for name in options.names or SCENARIOS:
        results.append(run_apart(name, options.seed))
        print(row(results[-1]), f"{results[-1].seconds:g} s", flush=True)
    if options.table:
        write_table(results, options.seed)
    return 1 if any(result.problem for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
