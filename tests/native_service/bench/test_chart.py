"""Plots are well-formed and their marks stand where the numbers are."""

from __future__ import annotations

import math
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from native_service.bench.chart import HEIGHT, WIDTH, Layer, Series, bars, lines

NUMBERS = st.floats(1e-3, 1e7)
SVG = "{http://www.w3.org/2000/svg}"


def marks(svg: str, tag: str, *attributes: str) -> list[tuple[float, ...]]:
    """Those with a number to show."""
    return [
        tuple(float(mark.attrib[name]) for name in attributes)
        for mark in ElementTree.fromstring(svg).iter(SVG + tag)
        if mark.find(SVG + "title") is not None
    ]


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=20))
def test_points_lie_in_the_plot_in_the_order_of_their_numbers(points: list[tuple[float, float]]) -> None:
    drawn = marks(lines("t", "x", "y", [Series("s", points)]), "circle", "cx", "cy")
    assert len(drawn) == len(points)
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in drawn)
    for axis, sign in ((0, 1), (1, -1)):
        by_number = sorted(range(len(points)), key=lambda index: points[index][axis])
        places = [sign * drawn[index][axis] for index in by_number]
        assert places == sorted(places)


@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=5))
def test_layers_of_a_bar_stand_on_each_other_and_are_as_high_as_their_numbers(heights: list[list[float]]) -> None:
    layers = [Layer(f"l{number}", each) for number, each in enumerate(heights)]
    boxes = marks(bars("t", "x", "y", ["a", "b", "c"], layers), "rect", "y", "height")
    for bar in range(3):
        stack = boxes[bar * len(layers) : (bar + 1) * len(layers)]
        for (lower, _), (upper, height) in pairwise(stack):
            assert upper + height == pytest.approx(lower, abs=0.2)
    total = sum(height for _, height in boxes)
    numbers = [number for bar in zip(*heights, strict=True) for number in bar]
    for (_, height), number in zip(boxes, numbers, strict=True):
        assert height == pytest.approx(total * number / sum(numbers), abs=0.2 + 0.1 * len(numbers))


def test_what_has_no_number_is_left_out() -> None:
    svg = lines("t", "x", "y", [Series("s", [(1, 2.0), (2, math.nan)]), Series("none", [])])
    assert len(marks(svg, "circle", "cx")) == 1
    assert marks(bars("t", "x", "y", ["a"], [Layer("l", [math.nan])]), "rect", "height") == [(0.0,)]


def test_words_stay_words() -> None:
    svg = lines("<t>", "a & b", "y", [Series("</svg>", [(1, 1)])])
    assert {"<t>", "a & b", "</svg>"} <= {text.text for text in ElementTree.fromstring(svg).iter(SVG + "text")}
