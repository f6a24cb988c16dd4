"""Requests on an engine: chooses the program, shares runs, keeps failures apart.

Pure numpy: nothing here knows Triton. A request is its input arrays in spec order, in program shape; it is matched to
a variant by the sizes of its variable axes and is never split.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import numpy as np

from nereid_backend.batching import Array, OutputCheck, Staging, padded_size, split
from nereid_backend.engines import Engine
from nereid_backend.errors import InvalidArgument
from nereid_backend.spec import VARIABLE, ModelSpec, Variant

_LISTED_VARIANTS = 8


class Executor:
    """Runs the requests of one model, one call at a time."""

    def __init__(self, spec: ModelSpec, engine: Engine) -> None:
        self._spec = spec
        self._engine = engine
        self._sizes = {variant: spec.at_variant(variant).batch_sizes for variant in spec.variants}
        self._any_variant = self._sizes.get(())
        self._variable = spec.variable_axes
        self._batched = [(i, t.batch_axis, t.name) for i, t in enumerate(spec.inputs) if t.batch_axis is not None]
        self._output_axes = [tensor.batch_axis for tensor in spec.outputs]
        self._staging = Staging(spec.inputs, bounded=self._any_variant is None)
        self._check_outputs = OutputCheck(spec)
        self.run_s = 0.0
        """Moving mean of one run's duration."""

    def warm_up(self) -> Exception | None:
        """Run every program once, so that no request pays for compilation.

        Gives the error of a model that takes any size: it may refuse zeros or ones where real input is fine.
        """
        for variant, sizes in self._sizes.items():
            inputs = self._spec.at_variant(variant).inputs
            for size in sizes or (1,):
                shapes = [[1 if n == VARIABLE else n for n in tensor.at_batch(size)] for tensor in inputs]
                zeros = [np.zeros(shape, t.element.numpy) for shape, t in zip(shapes, inputs, strict=True)]
                try:
                    self._engine.run(zeros)
                    start = time.perf_counter()
                    self._engine.run(zeros)
                    self.run_s = time.perf_counter() - start
                except Exception as error:
                    if sizes:
                        raise
                    return error
        return None

    def run(self, requests: Sequence[list[Array]]) -> list[list[Array] | Exception]:
        """The outputs of each request, or why it has none."""
        results: list[list[Array] | Exception] = [[] for _ in requests]
        rows = [0] * len(requests)
        groups: dict[Variant, list[int]] = {}
        for index, arrays in enumerate(requests):
            try:
                rows[index] = self._rows(arrays)
                variant = tuple(arrays[i].shape[axis] for i, axis in self._variable)
                self._check_program(variant, rows[index])
            except Exception as error:  # noqa: BLE001 - arrays of a wrong rank, say: that request's own failure
                results[index] = error
            else:
                groups.setdefault(variant, []).append(index)
        for variant, members in groups.items():
            sizes = self._sizes_of(variant) or ()
            for shared in self._shared(members, rows, sizes):
                outcomes = self._run_together([requests[i] for i in shared], [rows[i] for i in shared], sizes)
                for index, outcome in zip(shared, outcomes, strict=True):
                    results[index] = outcome
        return results

    def _rows(self, arrays: list[Array]) -> int:
        """Rows of a request, 1 when nothing is batched. Raises InvalidArgument."""
        if not self._batched:
            return 1
        first, axis, _ = self._batched[0]
        rows: int = arrays[first].shape[axis]
        for index, axis, name in self._batched[1:]:
            if arrays[index].shape[axis] != rows:
                raise InvalidArgument(
                    f"model {self._spec.name!r} input {name!r} has {arrays[index].shape[axis]} rows, other inputs have "
                    f"{rows}"
                )
        return rows

    def _sizes_of(self, variant: Variant) -> tuple[int, ...] | None:
        """Compiled sizes of a variant; empty when any number of rows runs, None when there is no such variant."""
        return self._sizes.get(variant) if self._any_variant is None else self._any_variant

    def _check_program(self, variant: Variant, rows: int) -> None:
        """Raises InvalidArgument when no program takes ``rows`` rows of ``variant``."""
        sizes = self._sizes_of(variant)
        if sizes is None:
            known = [self._text(v) for v in list(self._sizes)[:_LISTED_VARIANTS]]
            more = f" and {len(self._sizes) - len(known)} more" if len(self._sizes) > len(known) else ""
            raise InvalidArgument(
                f"model {self._spec.name!r} has no program for {self._text(variant)}; compiled are "
                f"{', '.join(known)}{more}"
            )
        if self._spec.coalesce:
            padded_size(sizes, rows)
        elif sizes and rows not in sizes:
            raise InvalidArgument(
                f"model {self._spec.name!r} has no program for {rows} rows and its batches cannot be padded; "
                f"send one of {list(sizes)}"
            )

    def _text(self, variant: Variant) -> str:
        """The inputs of a variant as a client writes their shapes, -1 for the batch: ``image[-1, 2, 4]``."""
        spec = self._spec
        shapes = [list(tensor.shape) for tensor in spec.inputs]
        for (index, axis), size in zip(self._variable, variant, strict=True):
            shapes[index][axis] = size
        named = dict.fromkeys(index for index, _ in self._variable)
        return " ".join(f"{spec.inputs[index].name}{shapes[index]}" for index in named)

    def _shared(self, members: Sequence[int], rows: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
        """The requests of each run, in order: as many whole ones as the largest size holds."""
        if not self._spec.coalesce:
            yield from ([index] for index in members)
            return
        limit = sizes[-1] if sizes else math.inf
        shared: list[int] = []
        total = 0
        for index in members:
            if shared and total + rows[index] > limit:
                yield shared
                shared, total = [], 0
            shared.append(index)
            total += rows[index]
        yield shared

    def _run_together(
        self, requests: Sequence[list[Array]], rows: Sequence[int], sizes: Sequence[int]
    ) -> Sequence[list[Array] | Exception]:
        try:
            return self._run(requests, rows, sizes)
        except Exception as error:  # noqa: BLE001 - the process edge: whatever a model raises ends here
            if len(rows) == 1:
                return [error]
        # One of them may be at fault (an index out of range, say): alone, only that one fails.
        return [self._run_together([r], [n], sizes)[0] for r, n in zip(requests, rows, strict=True)]

    def _run(self, requests: Sequence[list[Array]], rows: Sequence[int], sizes: Sequence[int]) -> list[list[Array]]:
        size = padded_size(sizes, sum(rows)) if self._spec.coalesce else rows[0]
        batch = self._staging.gather(requests, rows, size)
        start = time.perf_counter()
        outputs = self._engine.run(batch)
        self.run_s += 0.1 * (time.perf_counter() - start - self.run_s)
        outputs = self._check_outputs(outputs, size)
        # An identity model returns its input, which the next run overwrites.
        outputs = [output.copy() if self._staging.owns(output) else output for output in outputs]
        return split(outputs, self._output_axes, rows) if self._spec.coalesce else [outputs]
