"""Plots as SVG text: lines over numbers, and bars in layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 420, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 30, 64
# Told apart by people who see colours differently (Okabe and Ito).
COLOURS = ("#0072b2", "#e69f00", "#d55e00", "#009e73", "#cc79a7", "#56b4e9")
_TICKS = 5


class Series(NamedTuple):
    """A line. Points whose y is NaN are left out."""

    name: str
    points: Sequence[tuple[float, float]]


class Layer(NamedTuple):
    """A part of every bar."""

    name: str
    heights: Sequence[float]


def lines(title: str, x_label: str, y_label: str, series: Sequence[Series]) -> str:
    """Both axes start at zero."""
    drawn = [Series(name, [point for point in points if math.isfinite(point[1])]) for name, points in series]
    x_end = _end([x for each in drawn for x, _ in each.points])
    y_end = _end([y for each in drawn for _, y in each.points])
    parts = [_frame(title, x_label, y_label, y_end)]
    for tick in _ticks(x_end):
        parts.append(_text(_x(tick / x_end), HEIGHT - _BOTTOM + 14, f"{tick:g}", "middle"))
    for colour, each in zip(COLOURS, drawn, strict=False):
        places = [(_x(x / x_end), _y(y / y_end)) for x, y in each.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (x, y), point in zip(places, each.points, strict=True):
            words = f"{each.name}: {point[1]:.4g} at {point[0]:.4g}"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{escape(words)}</title></circle>'
            )
    return _svg(parts, [each.name for each in drawn])


def bars(title: str, x_label: str, y_label: str, names: Sequence[str], layers: Sequence[Layer]) -> str:
    """A bar for each of ``names``, the first layer at the bottom. What is below zero or NaN has no height."""
    heights = [[max(0.0, h) if math.isfinite(h) else 0.0 for h in layer.heights] for layer in layers]
    y_end = _end([sum(bar) for bar in zip(*heights, strict=True)])
    parts = [_frame(title, x_label, y_label, y_end)]
    step = 1 / max(1, len(names))
    for number, name in enumerate(names):
        left, right = _x((number + 0.2) * step), _x((number + 0.8) * step)
        parts.append(_text((left + right) / 2, HEIGHT - _BOTTOM + 14, name, "middle"))
        bottom = 0.0
        for colour, layer, height in zip(COLOURS, layers, (layer[number] for layer in heights), strict=False):
            top = bottom + height
            size = f'width="{right - left:.1f}" height="{_y(bottom / y_end) - _y(top / y_end):.1f}"'
            words = escape(f"{layer.name}: {height:.4g} at {name}")
            place = f'x="{left:.1f}" y="{_y(top / y_end):.1f}" {size}'
            parts.append(f'<rect {place} fill="{colour}"><title>{words}</title></rect>')
            bottom = top
    return _svg(parts, [layer.name for layer in layers])


def _svg(parts: Sequence[str], legend: Sequence[str]) -> str:
    entries = []
    left = float(_LEFT)
    for colour, name in zip(COLOURS, legend, strict=False):
        entries.append(f'<rect x="{left:.0f}" y="{HEIGHT - 20}" width="10" height="10" fill="{colour}"/>')
        entries.append(_text(left + 14, HEIGHT - 11, name, "start"))
        left += 26 + 6.5 * len(name)
    body = "\n".join([*parts, *entries])
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}">\n{body}\n</svg>'


def _frame(title: str, x_label: str, y_label: str, y_end: float) -> str:
    parts = [_text(_LEFT, 18, title, "start", "bold")]
    for tick in _ticks(y_end):
        y = _y(tick / y_end)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{tick:g}", "end"))
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - _BOTTOM + 30, x_label, "middle"))
    turned = f'transform="rotate(-90 14 {(_TOP + HEIGHT - _BOTTOM) / 2})"'
    parts.append(_text(14, (_TOP + HEIGHT - _BOTTOM) / 2, y_label, "middle", more=turned))
    return "\n".join(parts)


def _text(x: float, y: float, words: str, anchor: str, weight: str = "normal", more: str = "") -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" font-size="11" font-family="sans-serif"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style} {more}>{escape(words)}</text>'


def _x(part: float) -> float:
    return _LEFT + part * (WIDTH - _LEFT - _RIGHT)


def _y(part: float) -> float:
    return HEIGHT - _BOTTOM - part * (HEIGHT - _TOP - _BOTTOM)


def _step(most: float) -> float:
    """The least of 1, 2 and 5 times a power of ten of which ``_TICKS`` reach ``most``."""
    rough = most / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _end(values: Sequence[float]) -> float:
    most = max(values, default=0.0)
    if not most > 0:
        return 1.0
    step = _step(most)
    return step * math.ceil(most / step * (1 - 1e-9))


def _ticks(end: float) -> list[float]:
    step = _step(end)
    return [step * number for number in range(round(end / step) + 1)]
