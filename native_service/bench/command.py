"""``nereid bench``: put load on a model of a running server, and say how it does and where the time goes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from native_service.bench import arrivals, options, page, report
from native_service.bench.caller import Manner
from native_service.bench.endpoint import KSERVE, PROTOCOLS, Connection, Endpoint
from native_service.bench.progress import Progress
from native_service.bench.report import Circumstances
from native_service.bench.scan import Callers, Measurement, Plan, Point
from native_service.bench.target import Target
from native_service.client.files import DEFAULT_ADDRESS, FileProblem, address_of, certificate_option, given, read

_FAILED, _INTERRUPTED = 1, 130
_CLIENTS = (1, 8, 32)
# Calls of a lone client that a window holds at least.
_CALLS_IN_A_WINDOW = 5
_SECONDS = click.FloatRange(min=0.01, max=86400)


@click.command()
@click.argument("name")
@click.option("--address", metavar="HOST:PORT", help=f"The server (default: {DEFAULT_ADDRESS}).")
@click.option("--state", type=click.Path(path_type=Path), help="The state file of the server, instead of --address.")
@click.option("--key-file", type=click.Path(path_type=Path), help="A file that holds an API key or a token.")
@click.option("--ca", type=click.Path(path_type=Path), help="Certificates to trust (PEM); the connection is TLS.")
@certificate_option
@click.option("--protocol", type=click.Choice(PROTOCOLS), default=KSERVE, help="ModelInfer (default) or Checkpoint.")
@click.option(
    "--concurrency",
    metavar="N,N,...",
    callback=options.numbers(10_000, whole=True),
    help="Clients that wait for each answer (default: 1,8,32).",
)
@click.option(
    "--rate",
    metavar="N,N,...",
    callback=options.numbers(1_000_000, whole=False),
    help="Instead of clients: calls a second, whatever comes back.",
)
@click.option("--arrival", type=click.Choice(arrivals.KINDS), default=arrivals.POISSON, help="How --rate is spread.")
@click.option(
    "--batch",
    metavar="N,N,...",
    default="1",
    callback=options.numbers(1_000_000, whole=True),
    help="Rows in a request (default: 1).",
)
@click.option(
    "--shape",
    "shapes",
    metavar="TENSOR:N,N,...",
    multiple=True,
    callback=options.shapes,
    help="The sizes of an input that the model leaves open, without the rows.",
)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="[TENSOR=]FILE",
    help="A .npy or .npz file, whose rows are sent in turn (default: made up).",
)
@click.option("--deadline", "deadline_s", type=_SECONDS, help="Seconds that a call may take (default: any number).")
@click.option(
    "--warm-up",
    "warm_up_s",
    type=click.FloatRange(min=0, max=86400),
    default=1.0,
    help="Seconds at the start of a load that do not count (default: 1).",
)
@click.option("--window", "window_s", type=_SECONDS, default=2.0, help="Seconds of a window (default: 2).")
@click.option(
    "--within",
    "within_percent",
    type=click.FloatRange(min=0, max=100, min_open=True),
    default=10.0,
    help="Percent that windows may be off their mean (default: 10).",
)
@click.option("--windows", type=click.IntRange(3, 10_000), default=10, help="Windows to try for that (default: 10).")
@click.option("--duration", "duration_s", type=_SECONDS, help="Seconds of each load, whether windows agree or not.")
@click.option("--processes", type=click.IntRange(1, 256), default=1, help="Processes that make the calls (default: 1).")
@click.option("--connections", type=click.IntRange(1, 1000), default=1, help="Connections of each (default: 1).")
@click.option(
    "--outstanding",
    type=click.IntRange(1, 1_000_000),
    default=2000,
    help="Calls of --rate that may be open (default: 2000).",
)
@click.option(
    "--output",
    "outputs",
    type=click.Path(path_type=Path),
    multiple=True,
    callback=options.outputs,
    help="Write the results as .json, .csv, or .html with plots.",
)
def bench(name: str, address: str | None, state: Path | None, outputs: tuple[Path, ...], **asked: Any) -> None:
    """Put load on the model NAME of a running server: nereid, Triton or another that speaks KServe v2 over gRPC.

    Each load is measured in windows until the rate and the mean latency of three in a row agree. Exit codes: 0 done,
    1 an error or a server that stopped answering, 2 wrong usage, 130 interrupted; what was measured until then is shown
    and written all the same.
    """
    if address is not None and state is not None:
        raise click.UsageError("--address and --state exclude each other")
    if asked["concurrency"] and asked["rate"]:
        raise click.UsageError("--concurrency and --rate exclude each other")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    endpoint = _endpoint(address or address_of(state), asked["key_file"], asked["ca"], asked["certificate"])
    try:
        with Connection(endpoint) as connection:
            arrays = given(asked["inputs"])
            target = Target(connection, name, asked["protocol"], asked["shapes"], arrays)
            points = _points(asked)
            slowest_s = max(target.try_out(rows) for rows in dict.fromkeys(point.rows for point in points))
            plan = _plan(asked, _CALLS_IN_A_WINDOW * slowest_s)
            about = _circumstances(endpoint.address, connection.server(), target, plan, asked)
            click.echo(report.title(about))
            click.echo(report.heading(closed=not asked["rate"]))
            measurements: list[Measurement] = []
            with Callers(endpoint, asked["protocol"], asked["processes"], asked["connections"]) as callers:
                ended = _scan(callers, target, points, plan, _manner(asked), measurements)
    except KeyboardInterrupt:
        click.echo("interrupted before anything was measured", err=True)
        sys.exit(_INTERRUPTED)
    for file in outputs:
        _write(file, about, measurements, ended)
    if ended != report.COMPLETE:
        click.echo(f"error: {ended}", err=True)
        sys.exit(_INTERRUPTED if measurements[-1].interrupted else _FAILED)


def _scan(
    callers: Callers,
    target: Target,
    points: Sequence[Point],
    plan: Plan,
    manner: Manner,
    measurements: list[Measurement],
) -> str:
    """Fill ``measurements`` and show each; why it ended."""
    with Progress(len(points), plan) as progress:
        for number, point in enumerate(points):
            tick = progress.of(number, point)
            requests = target.requests(point.rows)
            each = callers.measure(point, requests, plan, manner, target.counters, tick)
            measurements.append(each)
            progress.show([report.line(each), *(f"         {note}" for note in report.notes(each))])
            if each.interrupted:
                return f"interrupted after {number} of {len(points)} loads"
            if each.stopped:
                return f"stopped after {number} of {len(points)} loads: {each.stopped}"
    return report.COMPLETE


def _endpoint(address: str, key_file: Path | None, ca: Path | None, certificate: tuple[Path, Path] | None) -> Endpoint:
    key = None if key_file is None else read(key_file).decode(errors="replace").strip()
    own = None if certificate is None else (read(certificate[0]), read(certificate[1]))
    return Endpoint(address, key, None if ca is None else read(ca), own)


def _points(asked: dict[str, Any]) -> list[Point]:
    if asked["rate"]:
        return [Point(rows, rate=rate) for rows in asked["batch"] for rate in asked["rate"]]
    return [Point(rows, clients) for rows in asked["batch"] for clients in asked["concurrency"] or _CLIENTS]


def _plan(asked: dict[str, Any], window_at_least_s: float) -> Plan:
    return Plan(
        asked["warm_up_s"],
        max(asked["window_s"], window_at_least_s),
        asked["within_percent"] / 100,
        asked["windows"],
        asked["duration_s"],
    )


def _manner(asked: dict[str, Any]) -> Manner:
    return Manner(asked["arrival"], asked["outstanding"], asked["deadline_s"])


def _circumstances(address: str, server: str, target: Target, plan: Plan, asked: dict[str, Any]) -> Circumstances:
    client = {
        "processes": asked["processes"],
        "connections": asked["processes"] * asked["connections"],
        "library": f"grpcio {importlib.metadata.version('grpcio')}",
        "python": platform.python_version(),
        "processors": os.cpu_count(),
    }
    inputs = tuple(tensor._asdict() for tensor in target.inputs.tensors)
    manner = asdict(_manner(asked)) if asked["rate"] else {"deadline_s": asked["deadline_s"]}
    started = datetime.now(UTC).isoformat(timespec="seconds")
    names = target.model, address, asked["protocol"], server
    return Circumstances(*names, inputs, client, {**asdict(plan), **manner}, started)


def _write(file: Path, about: Circumstances, measurements: Sequence[Measurement], ended: str) -> None:
    write = {".json": report.as_json, ".csv": report.as_csv, ".html": page.as_html}[file.suffix]
    try:
        file.write_text(write(about, measurements, ended))
    except OSError as error:
        raise FileProblem(f"{file}: cannot be written ({error.strerror})") from None
