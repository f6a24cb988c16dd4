"""ROIAlign: what a feature map holds in each of many boxes, resampled to one size."""

from __future__ import annotations

import numpy as np

from nereid_backend.builtins import Array

# Boxes sampled at once: bounds the memory of large pyramids.
_TOGETHER = 64


def roi_align(
    features: Array,
    boxes: Array,
    *,
    scale: float,
    pooled: int,
    sampling_ratio: int = 2,
    aligned: bool = False,
) -> Array:
    """[count, channels, pooled, pooled] of ``features`` [channels, height, width] within ``boxes`` [count, 4].

    Each cell is the mean of ``sampling_ratio`` squared bilinear samples (0: as many as its size in cells of the map).
    ``scale`` takes image pixels to cells. ``aligned`` shifts by half a cell; without, as in torchvision's detectors, a
    box is at least one cell wide.
    """
    channels = len(features)
    corners = boxes.astype(np.float32) * np.float32(scale)
    start = corners[:, :2] - (0.5 if aligned else 0)
    size = corners[:, 2:] - corners[:, :2]
    if not aligned:
        size = np.maximum(size, 1)
    cell = size / pooled
    samples = (
        np.full((len(boxes), 2), sampling_ratio) if sampling_ratio > 0 else np.maximum(np.ceil(cell), 1).astype(int)
    )
    channels_last = np.ascontiguousarray(features.transpose(1, 2, 0))
    result = np.empty((len(boxes), channels, pooled, pooled), features.dtype)
    for across, down in np.unique(samples, axis=0):
        same = np.flatnonzero((samples == (across, down)).all(1))
        for first in range(0, len(same), _TOGETHER):
            some = same[first : first + _TOGETHER]
            x = _positions(start[some, 0], cell[some, 0], pooled, int(across))
            y = _positions(start[some, 1], cell[some, 1], pooled, int(down))
            values = _bilinear(channels_last, y, x)
            values = values.reshape(len(some), pooled, down, pooled, across, channels).mean((2, 4))
            result[some] = values.transpose(0, 3, 1, 2)
    return result


def _positions(start: Array, cell: Array, pooled: int, samples: int) -> Array:
    """Where each box is sampled along one axis: [count, pooled * samples]."""
    steps = (np.arange(pooled * samples, dtype=np.float32) + 0.5) / samples
    result: Array = start[:, None] + cell[:, None] * steps
    return result


def _bilinear(features: Array, y: Array, x: Array) -> Array:
    """[count, y, x, channels] of ``features`` [height, width, channels]; more than a cell outside is 0."""
    height, width, _ = features.shape
    inside = ((y >= -1) & (y <= height))[:, :, None] & ((x >= -1) & (x <= width))[:, None, :]
    y, x = np.clip(y, 0, height - 1), np.clip(x, 0, width - 1)
    top, left = y.astype(int), x.astype(int)
    bottom, right = np.minimum(top + 1, height - 1), np.minimum(left + 1, width - 1)
    down, across = (y - top)[:, :, None, None], (x - left)[:, None, :, None]

    def at(rows: Array, columns: Array) -> Array:
        found: Array = features[rows[:, :, None], columns[:, None, :]]
        return found

    upper = at(top, left) * (1 - across) + at(top, right) * across
    lower = at(bottom, left) * (1 - across) + at(bottom, right) * across
    result: Array = (upper * (1 - down) + lower * down) * inside[..., None]
    return result
