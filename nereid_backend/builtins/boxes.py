"""Boxes of object detectors in numpy: the arithmetic between the compiled stages of a detector.

Boxes are f32 [count, 4] as x1 y1 x2 y2 in pixels of the image the model sees. Formulas and defaults are torchvision's,
as the bundle format's own detection library has them. For ``hooks.py`` and meta models to import, and for
:mod:`nereid_backend.builtins.detection`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nereid_backend.builtins import Array

DELTA_WEIGHTS = (10.0, 10.0, 5.0, 5.0)
"""How a final head scales its deltas; a region proposal head uses 1 throughout."""

# exp of a larger growth would make a box of many times the image.
_MOST_GROWTH = math.log(1000 / 16)


def nms(boxes: Array, scores: Array, threshold: float, most: int | None = None) -> Array:
    """Indices of the boxes kept, best first: one is dropped when it overlaps a better one by more than ``threshold``.

    Overlap is intersection over union. ``most`` ends the search once so many are kept.
    """
    order = np.argsort(-scores, kind="stable")
    boxes = boxes[order]
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    left = np.ones(len(boxes), bool)
    kept: list[int] = []
    for index in range(len(boxes)):
        if not left[index]:
            continue
        kept.append(index)
        if most is not None and len(kept) >= most:
            break
        rest = boxes[index + 1 :]
        low, high = np.maximum(boxes[index, :2], rest[:, :2]), np.minimum(boxes[index, 2:], rest[:, 2:])
        shared = np.maximum(high - low, 0).prod(1)
        union = areas[index] + areas[index + 1 :] - shared
        # Without a division: boxes without area overlap nothing.
        left[index + 1 :] &= ~(shared > threshold * union)
    return order[kept]


def nms_per_class(boxes: Array, scores: Array, classes: Array, threshold: float, most: int | None = None) -> Array:
    """``nms`` among boxes of the same class only, all classes at once."""
    if not len(boxes):
        return np.zeros(0, np.int64)
    # Moved apart by more than the largest coordinate, boxes of different classes cannot meet.
    apart = classes.astype(boxes.dtype) * (boxes.max() - min(float(boxes.min()), 0.0) + 1)
    return nms(boxes + apart[:, None], scores, threshold, most)


def decode(boxes: Array, deltas: Array, weights: Sequence[float] = DELTA_WEIGHTS) -> Array:
    """Boxes moved and scaled by ``deltas`` [count, 4 k] (dx dy dw dh for each of k classes): [count, k, 4]."""
    size = boxes[:, 2:] - boxes[:, :2]
    centre = boxes[:, :2] + size / 2
    steps = deltas.reshape(len(boxes), deltas.shape[1] // 4, 4) / np.asarray(weights, deltas.dtype)
    moved = centre[:, None] + steps[..., :2] * size[:, None]
    grown = np.exp(np.minimum(steps[..., 2:], _MOST_GROWTH)) * size[:, None]
    result: Array = np.concatenate([moved - grown / 2, moved + grown / 2], -1)
    return result


def clip(boxes: Array, height: float, width: float) -> Array:
    """Boxes cut to the image."""
    result: Array = np.clip(boxes, 0, np.asarray([width, height, width, height], boxes.dtype))
    return result


def at_least(boxes: Array, size: float) -> Array:
    """Which boxes are at least ``size`` wide and high."""
    result: Array = ((boxes[..., 2:] - boxes[..., :2]) >= size).all(-1)
    return result


def anchors(
    grid: tuple[int, int], stride: tuple[float, float], sizes: Sequence[float], ratios: Sequence[float]
) -> Array:
    """Anchor boxes of a feature map of ``grid`` (height, width) cells, in the order height, width, anchor.

    Anchors of a cell run over ``ratios`` (height to width), then ``sizes``; ``stride`` is a cell's height and width in
    pixels.
    """
    heights = np.sqrt(np.asarray(ratios, np.float32))
    base = np.asarray([[-s / h, -s * h, s / h, s * h] for h in heights for s in sizes], np.float32) / 2
    y, x = np.meshgrid(np.arange(grid[0]) * stride[0], np.arange(grid[1]) * stride[1], indexing="ij")
    corners = np.stack([x, y, x, y], -1).astype(np.float32)
    result: Array = (corners[:, :, None] + base.round()).reshape(-1, 4)
    return result


def proposals(
    levels: Sequence[tuple[Array, Array, Array]],
    image: tuple[float, float],
    *,
    before: int = 1000,
    after: int = 1000,
    threshold: float = 0.7,
    min_size: float = 1e-3,
) -> tuple[Array, Array]:
    """Boxes and scores of the regions a proposal head finds, best first.

    ``levels`` are (anchors [count, 4], objectness [count], deltas [count, 4]) of each feature map; the ``before`` best
    of each level are decoded, cut to ``image`` (height, width), and go through ``nms`` within their level.
    """
    boxes, scores, level = [], [], []
    for number, (anchor, objectness, deltas) in enumerate(levels):
        best = np.argsort(-objectness, kind="stable")[:before]
        boxes.append(clip(decode(anchor[best], deltas[best], (1.0,) * 4)[:, 0], *image))
        scores.append(1 / (1 + np.exp(-objectness[best])))
        level.append(np.full(len(best), number))
    found, score, which = (np.concatenate(parts) for parts in (boxes, scores, level))
    large = at_least(found, min_size)
    found, score, which = found[large], score[large], which[large]
    kept = nms_per_class(found, score, which, threshold, after)
    return found[kept], score[kept]


def feature_level(boxes: Array, lowest: int, highest: int, *, canonical: int = 4, canonical_size: float = 224) -> Array:
    """Which pyramid level, from 0 for ``lowest``, each box is read from: larger boxes from coarser maps."""
    area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    level = np.floor(canonical + np.log2(np.sqrt(np.maximum(area, 1e-12)) / canonical_size) + 1e-6)
    result: Array = (np.clip(level, lowest, highest) - lowest).astype(np.int64)
    return result
