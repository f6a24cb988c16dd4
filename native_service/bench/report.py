"""Measurements as lines for people, and as JSON and CSV for programs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from native_service.bench.endpoint import NATIVE
from native_service.bench.scan import Measurement
from native_service.bench.windows import AGREEING, spread

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
COMPLETE = "complete"
# Where the time of a call goes: outside of Triton (network, front, gRPC, this client), waiting there, handing the
# tensors to the model's process, in that process, and taking the results from it.
SHARES = ("outside", "queue", "in", "model", "out")
_MS = 1e3
_SHOWN_FAILURES = 5
# Calls behind a quantile before it means something: so many beyond it.
_BEYOND = 10


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What was measured, and by what."""

    model: str
    address: str
    protocol: str
    server: str
    inputs: tuple[dict[str, Any], ...]
    client: dict[str, Any]
    plan: dict[str, Any]
    started: str


def ms(seconds: float) -> float | None:
    """For JSON, which has no NaN."""
    return round(seconds * _MS, 4) if math.isfinite(seconds) else None


def shares_s(each: Measurement) -> dict[str, float] | None:
    """Seconds of a mean call by ``SHARES``; None without Triton's statistics."""
    server = each.server
    if server is None:
        return None
    outside_s = each.whole.latencies.mean_s - server.whole_s
    return dict(zip(SHARES, (outside_s, server.queue_s, server.input_s, server.infer_s, server.output_s), strict=True))


def as_json(circumstances: Circumstances, measurements: Sequence[Measurement], ended: str) -> str:
    """``ended``: ``COMPLETE``, or why not all loads were measured."""
    whole = {**asdict(circumstances), "ended": ended, "measurements": [_row(each) for each in measurements]}
    return json.dumps(whole, indent=1, allow_nan=False) + "\n"


def as_csv(circumstances: Circumstances, measurements: Sequence[Measurement], ended: str) -> str:  # noqa: ARG001
    """A line a measurement; times in ms. What else there is to know is in the JSON."""
    rows = [dict(_flat(_row(each))) for each in measurements]
    file = io.StringIO()
    writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), restval="")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _row(each: Measurement) -> dict[str, Any]:
    whole, point = each.whole, each.point
    server, shares = each.server, shares_s(each)
    calls = whole.latencies.count + whole.failed
    return {
        "loop": "open" if point.rate else "closed",
        "clients": point.clients or None,
        "offered_per_second": point.rate or None,
        "rows": point.rows,
        "calls_per_second": round(whole.per_second, 2),
        "rows_per_second": round(whole.per_second * point.rows, 2),
        "spread": round(each.spread, 4),
        "settled": each.settled,
        "seconds": round(whole.passed_s, 3),
        "calls": whole.latencies.count,
        "failed": whole.failed,
        "latency_ms": {
            "mean": ms(whole.latencies.mean_s),
            **{name: ms(whole.latencies.quantile_s(fraction)) for name, fraction in QUANTILES.items()},
            "most": ms(whole.latencies.most_s) if whole.latencies.count else None,
        },
        "triton_ms": None if shares is None else {name: ms(seconds) for name, seconds in shares.items()},
        "triton": None
        if server is None
        else {
            "calls": server.calls,
            "calls_per_run": round(server.calls_per_run, 3),
            "rows_per_run": round(server.rows_per_run, 3),
            "cache_hits": server.cache_hits,
        },
        "client": {
            "busy": round(whole.busiest, 3),
            "cpu_us_per_call": round(sum(s.process_s for s in whole.spent.values()) / max(1, calls) * 1e6, 1),
            "late_p99_ms": ms(whole.late.quantile_s(0.99)),
            "held": whole.held,
            "waiting_at_end": whole.waiting,
            "is_limit": each.client_is_limit,
        },
        "failures": [
            {"code": failure.code, "text": whole.examples[failure], "count": count}
            for failure, count in whole.failures.most_common()
        ],
        "windows": [
            {
                "calls_per_second": round(window.per_second, 2),
                "p50_ms": ms(window.latencies.quantile_s(0.5)),
                "p99_ms": ms(window.latencies.quantile_s(0.99)),
                "failed": window.failed,
            }
            for window in each.windows
        ],
        "notes": list(notes(each)),
    }


def _flat(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            yield f"{prefix}{key}", value


_TABLE = "{:>8} {:>5} {:>9} {:>4} {:>8} {:>8} {:>8} {:>8} {:>7} | {:>8} {:>7} {:>6} {:>7} {:>6} {:>8}"


def title(circumstances: Circumstances) -> str:
    """What is measured, in a line."""
    sizes = ", ".join(f"{t['name']} {t['datatype']} {list(t['shape'])}" for t in circumstances.inputs)
    by = "Checkpoint" if circumstances.protocol == NATIVE else "ModelInfer"
    return (
        f"{circumstances.model} ({sizes}) on {circumstances.address} ({circumstances.server}) by {by}\n"
        "times in ms: what callers saw | means by Triton's statistics of a call, and outside of Triton\n"
    )


def heading(closed: bool) -> str:
    """The table's first line. Times are in ms."""
    load = "clients" if closed else "rate/s"
    columns = "p50", "p90", "p99", "most", "failed", *SHARES, "rows/run"
    return _TABLE.format(load, "rows", "calls/s", "+-%", *columns)


def line(each: Measurement) -> str:
    """A measurement in the table; after the bar Triton's means, before it the client's times."""
    whole, server = each.whole, each.server
    load = f"{each.point.rate:g}" if each.point.rate else str(each.point.clients)
    latencies = [whole.latencies.quantile_s(QUANTILES[name]) for name in ("p50", "p90", "p99")]
    latencies.append(whole.latencies.most_s if whole.latencies.count else math.nan)
    shares = shares_s(each)
    means = [math.nan] * len(SHARES) if shares is None else list(shares.values())
    rows = "-" if server is None else f"{server.rows_per_run:.2f}"
    times = [_shown(seconds) for seconds in latencies], [_shown(seconds) for seconds in means]
    rate, failed = f"{whole.per_second:.1f}", str(whole.failed)
    return _TABLE.format(load, each.point.rows, rate, f"{each.spread * 100:.0f}", *times[0], failed, *times[1], rows)


def _shown(seconds: float) -> str:
    return f"{seconds * _MS:.2f}" if math.isfinite(seconds) else "-"


def notes(each: Measurement) -> Iterator[str]:
    """What a reader of the numbers has to know of them."""
    whole, latencies = each.whole, each.whole.latencies
    if each.interrupted:
        yield f"interrupted after {whole.passed_s:.1f} s"
    elif not each.settled and len(each.windows) < AGREEING:
        yield f"measured in fewer than {AGREEING} windows"
    elif not each.settled:
        means = spread([window.latencies.mean_s for window in each.windows if window.latencies.count])
        differ = f"{each.spread * 100:.0f} %, mean latencies by {means * 100:.0f} %"
        yield f"not steady: over {whole.passed_s:.0f} s the rates differ by {differ}"
    if each.client_is_limit:
        busy = f"busy {whole.busiest * 100:.0f} % of the time"
        yield f"the client is the limit, {busy}; the server may do more (--processes)"
    if not each.keeps_up:
        yield (
            f"the server does not keep up with {each.point.rate:g} calls/s; its latencies grow as long as it is asked"
            + (f", {whole.waiting} calls were due and not sent at the end" if whole.waiting else "")
        )
    late_s = whole.late.quantile_s(0.99)
    if late_s > max(1e-3, latencies.quantile_s(0.99) / 4):
        yield f"the client is behind its schedule: 1 % of the calls went {late_s * _MS:.1f} ms or more late"
    if whole.held:
        yield f"{whole.held} calls waited to be sent because too many were open (--outstanding)"
    if 0 < latencies.count < _BEYOND * 100:
        yield f"only {latencies.count} calls: p99 says little"
    yield from _notes_on_the_server(each)
    for failure, count in whole.failures.most_common(_SHOWN_FAILURES):
        yield f"{count} x {failure.code}: {whole.examples[failure]}"
    if (more := len(whole.failures) - _SHOWN_FAILURES) > 0:
        yield f"and {more} other kinds of failures"


def _notes_on_the_server(each: Measurement) -> Iterator[str]:
    server, calls = each.server, each.whole.latencies.count
    if server is None or not calls:
        return
    if server.calls > 1.1 * calls + 10 * len(each.windows):
        yield f"Triton answered {server.calls} calls in this time: other callers share the model"
    if server.cache_hits:
        yield f"{server.cache_hits} answers came from Triton's response cache"
