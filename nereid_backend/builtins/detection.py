"""``detection``: a detector's proposals, class scores and box deltas become its final boxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from nereid_backend.builtins import POSTPROCESS, Array, Arrays, Builtin, put
from nereid_backend.builtins.boxes import DELTA_WEIGHTS, at_least, clip, decode, nms_per_class
from nereid_backend.builtins.classes import softmax
from nereid_backend.errors import BundleError
from nereid_backend.spec import VARIABLE, TensorSpec

_COLUMNS = 6


@dataclass(frozen=True, slots=True)
class Detection(Builtin):
    """``output`` f32 rows of x1 y1 x2 y2 score class, best first, from ``logits`` [count, classes], ``deltas``
    [count, 4 classes] and ``proposals`` [count, 4].

    Without a batch there are as many rows as detections. With one (axis 0 of all three) there are ``top`` per image,
    zero-padded, and ``counts``, i32, says how many are meant.

    The background class is the first (``background_first``) or the last. ``image_height`` and ``image_width`` cut boxes
    to the image.
    """

    logits: str
    deltas: str
    proposals: str
    output: str = "detections"
    counts: str = "counts"
    background_first: bool = True
    score_threshold: float = 0.05
    nms_threshold: float = 0.5
    top: int = 100
    min_size: float = 0.01
    image_height: int | None = None
    image_width: int | None = None
    delta_weights: tuple[float, ...] = DELTA_WEIGHTS

    name: ClassVar[str] = "detection"
    stage: ClassVar[str] = POSTPROCESS

    def tensors(self, others: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        found = [self.find(others, name) for name in (self.logits, self.deltas, self.proposals)]
        batched = found[0].batch_axis is not None
        if any(t.batch_axis != (0 if batched else None) or t.element.numpy.kind not in "fV" for t in found):
            raise BundleError(
                f"detection: {[t.name for t in found]} must be floats, all with the batch first or all without one"
            )
        logits, *others_rows = (tensor.row_shape for tensor in found)
        count, classes = logits if len(logits) == 2 else (0, 0)
        if others_rows != [(count, 4 * classes), (count, 4)] or classes < 2:
            raise BundleError(
                f"detection: logits, deltas and proposals must be [count, classes], [count, 4 classes] and [count, 4]; "
                f"they are {', '.join(str(list(tensor.row_shape)) for tensor in found)}"
            )
        if len(self.delta_weights) != 4 or min(self.delta_weights) <= 0 or self.top < 1:
            raise BundleError("detection: needs four delta_weights above 0 and a top of at least 1")
        if (self.image_height is None) != (self.image_width is None):
            raise BundleError("detection: image_height and image_width go together")
        if not batched:
            return put(others, TensorSpec(self.output, "f32", (VARIABLE, _COLUMNS)))
        rows = TensorSpec(self.output, "f32", (VARIABLE, self.top, _COLUMNS), 0)
        return put(others, rows, TensorSpec(self.counts, "i32", (VARIABLE,), 0))

    def open(self, directory: Path) -> Callable[[Arrays], Arrays]:  # noqa: ARG002 - nothing to read
        return self._detected

    def _detected(self, arrays: Arrays) -> Arrays:
        logits, deltas, proposals = (arrays[n].astype(np.float32) for n in (self.logits, self.deltas, self.proposals))
        if logits.ndim == 2:
            return {**arrays, self.output: self.image(logits, deltas, proposals)}
        images = [self.image(*image) for image in zip(logits, deltas, proposals, strict=True)]
        padded = np.zeros((len(images), self.top, _COLUMNS), np.float32)
        for target, image in zip(padded, images, strict=True):
            target[: len(image)] = image
        return {**arrays, self.output: padded, self.counts: np.asarray([len(i) for i in images], np.int32)}

    def image(self, logits: Array, deltas: Array, proposals: Array) -> Array:
        """The detections of one image, [found, 6]."""
        boxes = decode(proposals, deltas, self.delta_weights)
        if self.image_height is not None and self.image_width is not None:
            boxes = clip(boxes, self.image_height, self.image_width)
        scores = softmax(logits)
        first, last = (1, scores.shape[1]) if self.background_first else (0, scores.shape[1] - 1)
        wanted = (scores > self.score_threshold) & at_least(boxes, self.min_size)
        row, column = np.nonzero(wanted[:, first:last])
        column = column + first
        found, score = boxes[row, column], scores[row, column]
        kept = nms_per_class(found, score, column, self.nms_threshold, self.top)
        return np.column_stack([found[kept], score[kept], column[kept]]).astype(np.float32)
