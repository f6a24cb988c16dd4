"""The results as one HTML page that loads nothing: plots, the table and what there is to say of it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

from native_service.bench import report
from native_service.bench.chart import Layer, Series, bars, lines
from native_service.bench.report import QUANTILES, Circumstances
from native_service.bench.scan import Measurement

_MS = 1e3
_DRAWN = ("p50", "p90", "p99")
_STYLE = "body{font-family:sans-serif;margin:2em}svg{margin:0 1em 1em 0}pre{font-size:12px;overflow-x:auto}"


def as_html(circumstances: Circumstances, measurements: Sequence[Measurement], ended: str) -> str:
    """A section for each size of batch."""
    parts = [f"<h1>{escape(circumstances.model)}</h1>", f"<pre>{escape(report.title(circumstances))}"]
    client = ", ".join(f"{key} {value}" for key, value in circumstances.client.items())
    plan = ", ".join(f"{key} {value}" for key, value in circumstances.plan.items())
    parts.append(escape(f"client: {client}\nplan: {plan}\nstarted {circumstances.started}; {ended}") + "</pre>")
    for rows, group in groupby(measurements, lambda each: each.point.rows):
        parts += [f"<h2>{rows} row{'s' * (rows != 1)} in a request</h2>", *_plots(list(group))]
    closed = not (measurements and measurements[0].point.rate)
    table = [report.heading(closed=closed)]
    for each in measurements:
        table += [report.line(each), *(f"         {note}" for note in report.notes(each))]
    parts += ["<h2>All</h2>", f"<pre>{escape(chr(10).join(table))}</pre>"]
    head = f'<meta charset="utf-8"><title>{escape(circumstances.model)} under load</title><style>{_STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _plots(group: Sequence[Measurement]) -> list[str]:
    closed = not group[0].point.rate
    load = "clients" if closed else "calls/s offered"
    loads = [float(each.point.clients or each.point.rate) for each in group]
    rates = [each.whole.per_second for each in group]
    latencies = [
        Series(
            name,
            [
                (rate, each.whole.latencies.quantile_s(QUANTILES[name]) * _MS)
                for rate, each in zip(rates, group, strict=True)
            ],
        )
        for name in _DRAWN
    ]
    failures = [each.whole.failed / each.whole.passed_s if each.whole.passed_s else 0.0 for each in group]
    throughput = [
        Series("answered", list(zip(loads, rates, strict=True))),
        Series("failed", list(zip(loads, failures, strict=True))),
    ]
    names = [f"{number:g}" for number in loads]
    plots = [
        lines("Latency against throughput", "calls/s answered", "ms", latencies),
        lines("Throughput against load", load, "calls/s", throughput),
    ]
    if any(each.server for each in group):
        plots.append(bars("Where the time of a call goes", load, "ms, mean", names, _layers(group)))
    return plots


def _layers(group: Sequence[Measurement]) -> list[Layer]:
    """Of calls on a server without statistics there is nothing to draw."""
    shares = [report.shares_s(each) or dict.fromkeys(report.SHARES, 0.0) for each in group]
    return [Layer(name, [share[name] * _MS for share in shares]) for name in report.SHARES]
