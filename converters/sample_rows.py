"""Rows on which a converted model is compared with its source.

A decision tree is wrong at its thresholds or nowhere: a row drawn at random meets them almost never. So rows are led
down to each node and put on both sides of its threshold, one float32 apart, and where missing values go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nereid_backend.engines import Array
from nereid_backend.errors import BundleError

_DRAWN = 2000
_FAR = (1, 1, 10)
_MOST_NODES = 5000
MOST_COLUMNS = 100_000
# Of all rows of one kind together, 128 MB: a wide table is compared on fewer rows.
_MOST_VALUES = 2**25


@dataclass(frozen=True, slots=True)
class Tree:
    """A binary tree over float32 values: a row goes left at a node when its value is <= ``edge``.

    All arrays are [nodes]; ``left`` is -1 at a leaf; ``missing_left``: a missing value goes left, where the tree says.
    """

    left: Array
    right: Array
    feature: Array
    edge: Array
    missing_left: Array | None = None


def check_columns(name: str, columns: int) -> None:
    """Raise BundleError for a model of more columns than can be compared."""
    if columns > MOST_COLUMNS:
        raise BundleError(
            f"{name}: takes a table of {columns} columns, more than the {MOST_COLUMNS} on which a converted model can "
            "be compared with its source; train on fewer, or convert it to ONNX yourself"
        )


def largest_float32_not_above(threshold: Array) -> Array:
    """The edge of ``value <= threshold`` for a float64 threshold. Rounding to the nearest may be one too far."""
    edge = threshold.astype(np.float32)
    return np.where(edge > threshold, np.nextafter(edge, np.float32(-np.inf)), edge)


def largest_float32_below(threshold: Array) -> Array:
    """The edge of ``value < threshold``."""
    edge: Array = np.nextafter(threshold.astype(np.float32), np.float32(-np.inf))
    return edge


def drawn(centre: Array, spread: Array, edges: Sequence[Array], rng: np.random.Generator) -> Array:
    """Rows [n, features] around ``centre``, some far out, half of their values at the ``edges`` of their feature."""
    count = max(1, min(_DRAWN, _MOST_VALUES // max(len(centre), 1)))
    far = rng.choice(_FAR, (count, 1))  # where sigmoids saturate and labels are decided by what is left of them
    rows: Array = (centre + rng.normal(0, 1, (count, len(centre))) * spread * far).astype(np.float32)
    for feature, values in enumerate(edges):
        if len(values):
            chosen = rng.choice(np.concatenate([values, np.nextafter(values, np.float32(np.inf))]), count)
            rows[:, feature] = np.where(rng.random(count) < 0.5, chosen, rows[:, feature])
    return rows


def with_missing(rows: Array, rng: np.random.Generator) -> Array:
    """``rows`` with a tenth of their values missing."""
    return np.where(rng.random(rows.shape) < 0.1, np.float32(np.nan), rows)


def edges_by_feature(trees: Iterable[Tree], features: int) -> list[Array]:
    """The distinct edges of each feature, over all trees."""
    found: list[list[Array]] = [[] for _ in range(features)]
    for tree in trees:
        inner = (tree.left >= 0) & np.isfinite(tree.edge)  # an infinite one tells missing values from all others
        for feature in np.unique(tree.feature[inner]):
            found[feature].append(tree.edge[inner & (tree.feature == feature)])
    return [np.unique(np.concatenate(edges)) if edges else np.empty(0, np.float32) for edges in found]


def at_thresholds(trees: Sequence[Tree], background: Array, rng: np.random.Generator) -> Array:
    """Rows that reach the nodes of ``trees``: at its edge, just above it, and with its value missing.

    ``background`` [n, features] is what the values are that no node on the way looks at.
    """
    nodes = sum(int((tree.left >= 0).sum()) for tree in trees)
    wanted = min(_MOST_NODES, _MOST_VALUES // (3 * max(background.shape[1], 1)))
    share = min(1.0, wanted / max(nodes, 1))
    rows = []
    for tree in trees:
        for low, high, feature, edge in _nodes(tree, background.shape[1]):
            if rng.random() > share or not low[feature] <= edge < high[feature]:
                continue
            row = np.clip(background[rng.integers(len(background))], low, high)
            for value in (edge, np.nextafter(edge, np.float32(np.inf)), np.float32(np.nan)):
                row = row.copy()
                row[feature] = value
                rows.append(row)
    return np.array(rows, np.float32).reshape(-1, background.shape[1])


def _nodes(tree: Tree, features: int) -> Iterator[tuple[Array, Array, int, np.float32]]:
    """Each inner node with the bounds [features] of what reaches it, its feature and its edge."""
    stack = [(0, np.full(features, -np.inf, np.float32), np.full(features, np.inf, np.float32))]
    while stack:
        node, low, high = stack.pop()
        if tree.left[node] < 0:
            continue
        feature, edge = int(tree.feature[node]), np.float32(tree.edge[node])
        yield low, high, feature, edge
        left_high, right_low = high.copy(), low.copy()
        left_high[feature] = min(high[feature], edge)
        right_low[feature] = max(low[feature], np.nextafter(edge, np.float32(np.inf)))
        stack += [(int(tree.left[node]), low, left_high), (int(tree.right[node]), right_low, high)]
