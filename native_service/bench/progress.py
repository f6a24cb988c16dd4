"""How far a scan is, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import click

from native_service.bench.scan import Plan, Point, Tick

_CLEAR_LINE = "\r\033[2K"


class Progress:
    """A bar on stderr, which makes way for what is shown on stdout."""

    def __init__(self, loads: int, plan: Plan) -> None:
        self._load_s = plan.warm_up_s + plan.windows_at_least * plan.window_s
        self._bar: Any = click.progressbar(length=round(loads * self._load_s * 10), file=sys.stderr, show_pos=False)
        self._visible = sys.stderr.isatty()

    def __enter__(self) -> Self:
        if self._visible:
            self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._visible:
            self._bar.__exit__(kind, error, trace)

    def of(self, number: int, point: Point) -> Tick:
        """For load ``number``, counted from zero."""
        load = f"{point.rate:g} calls/s" if point.rate else f"{point.clients} clients"
        self._bar.label = f"{load}, {point.rows} row{'s' * (point.rows > 1)}"

        def tick(passed_s: float) -> None:
            if self._visible:
                done_s = number * self._load_s + min(passed_s, self._load_s)
                self._bar.update(max(0, round(done_s * 10) - self._bar.pos))

        return tick

    def show(self, lines: Sequence[str]) -> None:
        """On stdout, above the bar."""
        if self._visible:
            click.echo(_CLEAR_LINE, nl=False, err=True)
        for line in lines:
            click.echo(line)
        sys.stdout.flush()
