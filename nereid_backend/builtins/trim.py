"""``trim``: a fixed buffer and a count become exactly the entries that count.

A compiled program has fixed shapes, so a result of variable length is a buffer beside the number of valid entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from nereid_backend.builtins import POSTPROCESS, Arrays, Builtin, put
from nereid_backend.errors import BundleError, OutputError
from nereid_backend.spec import VARIABLE, TensorSpec


@dataclass(frozen=True, slots=True)
class Trim(Builtin):
    """Cut ``output`` along ``axis`` (the first that is not the batch) to the number in ``count``.

    With a batch, ``count`` has one number per row and the buffer is cut to the largest of the request; which of a row's
    entries are valid the client reads off the count.
    """

    output: str
    count: str
    axis: int | None = None

    name: ClassVar[str] = "trim"
    stage: ClassVar[str] = POSTPROCESS

    def fitted(self, variants: Sequence[Sequence[TensorSpec]]) -> Self:
        buffer = self.find(variants[0], self.output)
        first = 1 if buffer.batch_axis == 0 else 0
        return replace(self, axis=self.axis_of(buffer, first if self.axis is None else self.axis))

    def tensors(self, others: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        buffer, count = self.find(others, self.output), self.find(others, self.count)
        if count.element.numpy.kind not in "iu" or any(size != 1 for size in count.row_shape):
            raise BundleError(
                f"trim: count {count.name!r} must hold one integer, or one per row of a batch; it is "
                f"{count.dtype}{list(count.shape)}"
            )
        if (buffer.batch_axis is None) != (count.batch_axis is None):
            raise BundleError(f"trim: only one of {buffer.name!r} and {count.name!r} has a batch axis")
        axis = self.axis or 0
        return put(others, replace(buffer, shape=(*buffer.shape[:axis], VARIABLE, *buffer.shape[axis + 1 :])))

    def open(self, directory: Path) -> Callable[[Arrays], Arrays]:  # noqa: ARG002 - nothing to read
        return self._trimmed

    def _trimmed(self, arrays: Arrays) -> Arrays:
        buffer, counts, axis = arrays[self.output], arrays[self.count], self.axis or 0
        least, most = (int(counts.min()), int(counts.max())) if counts.size else (0, 0)
        if least < 0 or most > buffer.shape[axis]:
            raise OutputError(
                f"trim: output {self.count!r} says {least if least < 0 else most}, {self.output!r} holds 0 to "
                f"{buffer.shape[axis]} entries"
            )
        return {**arrays, self.output: buffer[(slice(None),) * axis + (slice(most),)]}
