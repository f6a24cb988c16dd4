"""Requests on an engine: chooses the program, shares runs, keeps failures apart.

Pure numpy: nothing here knows Triton. A request is its input arrays in spec order, in program shape; it is matched to
a variant by the sizes of its variable axes and is never split.
"""

from __future__ import annotations

import math
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from nereid_backend.batching import Array, OutputCheck, Staging, padded_size, rows_on, split, too_many_rows
from nereid_backend.engines import Engine
from nereid_backend.errors import InvalidArgument
from nereid_backend.spec import MAX_SIZE, VARIABLE, ModelSpec, Variant

_LISTED_VARIANTS = 8
# Several small runs instead of one that is padded must be so much cheaper: what a run takes is known from one trial.
_WORTH_SEVERAL_RUNS = 0.75


class _Cost(NamedTuple):
    """What a run takes: seconds of the processors, and seconds."""

    cpu_s: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class _Programs:
    """The programs of one variant: their ``sizes``, ascending, none when any number of rows runs."""

    sizes: tuple[int, ...]
    takes: Container[int]
    """Rows of a request that one of them runs."""
    costs: dict[int, _Cost] = field(default_factory=dict)
    """Of a run of each size, where several runs may take the place of one."""
    plans: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: ModelSpec) -> _Programs:
        sizes = spec.batch_sizes
        if sizes and not spec.coalesce:
            return cls(sizes, frozenset(sizes))
        return cls(sizes, range((sizes[-1] if sizes else MAX_SIZE) + 1))

    def plan(self, rows: int) -> tuple[int, ...]:
        """The sizes of the runs that take so many rows at the least cost, the largest first; usually one."""
        if len(self.costs) > 1 and rows and rows not in self.costs:
            if rows not in self.plans:
                self.plans[rows] = self._cheapest(rows)
            return self.plans[rows]
        return (padded_size(self.sizes, rows),)

    def _cheapest(self, rows: int) -> tuple[int, ...]:
        one = padded_size(self.sizes, rows)
        # What each number of rows takes of the processors, and minus the size of a run of it, from those of fewer rows.
        cheapest = [(0.0, 0)]
        for count in range(1, rows + 1):
            cheapest.append(min((cheapest[max(count - n, 0)][0] + self.costs[n].cpu_s, -n) for n in self.sizes))
        several, left = [], rows
        while left > 0:
            several.append(-cheapest[left][1])
            left -= several[-1]
        wall_s = sum(self.costs[size].wall_s for size in several)
        if cheapest[rows][0] > _WORTH_SEVERAL_RUNS * self.costs[one].cpu_s or wall_s > self.costs[one].wall_s:
            return (one,)
        return tuple(sorted(several, reverse=True))


class Executor:
    """Runs the requests of one model, one call at a time."""

    def __init__(self, spec: ModelSpec, engine: Engine) -> None:
        self._spec = spec
        self._engine = engine
        self._programs = {variant: _Programs.of(spec.at_variant(variant)) for variant in spec.variants}
        self._any_variant = self._programs.get(())
        self._variable = spec.variable_axes
        self._batched = [(i, t.batch_axis, t.name) for i, t in enumerate(spec.inputs) if t.batch_axis is not None]
        # The programs that may run all requests of a call at once, whatever their sizes are.
        self._joining = self._any_variant if spec.coalesce and self._batched and not self._variable else None
        self._output_axes = [tensor.batch_axis for tensor in spec.outputs]
        # Whether a run may be made in several: each tensor has rows, all of one shape.
        self._divisible = spec.coalesce and all(
            tensor.batch_axis is not None and VARIABLE not in tensor.row_shape
            for tensor in (*spec.inputs, *spec.outputs)
        )
        self._staging = Staging(spec.inputs, bounded=self._any_variant is None)
        self._check_outputs = OutputCheck(spec)
        self.run_s = 0.0
        """Moving mean of one run's duration."""

    def warm_up(self) -> Exception | None:
        """Run every program once, so that no request pays for compilation.

        Gives the error of a model that takes any size: it may refuse zeros or ones where real input is fine.
        """
        for variant, programs in self._programs.items():
            inputs = self._spec.at_variant(variant).inputs
            for size in programs.sizes or (1,):
                shapes = [[1 if n == VARIABLE else n for n in tensor.at_batch(size)] for tensor in inputs]
                zeros = [t.element.zeros(shape) for shape, t in zip(shapes, inputs, strict=True)]
                try:
                    self._engine.run(zeros)
                    start, cpu_s = time.perf_counter(), time.process_time()
                    self._engine.run(zeros)
                    self.run_s = time.perf_counter() - start
                    if self._divisible and programs.sizes:
                        programs.costs[size] = _Cost(time.process_time() - cpu_s, self.run_s)
                except Exception as error:
                    if programs.sizes:
                        raise
                    return error
        return None

    def run(self, requests: Sequence[list[Array]]) -> list[list[Array] | Exception]:
        """The outputs of each request, or why it has none."""
        joining = self._joining
        if joining is not None and (rows := self._rows_of_one_run(requests, joining.takes)) is not None:
            return self._run_together(requests, rows, joining)
        return self._run_apart(requests)

    def _rows_of_one_run(self, requests: Sequence[list[Array]], takes: Container[int]) -> list[int] | None:
        """The rows of each request when one run takes them all, which is usual; None when they must be sorted out."""
        rows: list[int] | None = None
        try:
            for index, axis, _ in self._batched:
                counts = [arrays[index].shape[axis] for arrays in requests]
                if rows is None:
                    rows = counts
                elif rows != counts:
                    return None
        except IndexError:  # an array of a wrong rank
            return None
        return rows if rows and sum(rows) in takes else None

    def _run_apart(self, requests: Sequence[list[Array]]) -> list[list[Array] | Exception]:
        """Requests of several variants, or more than one run takes, or some that no program takes."""
        results: list[list[Array] | Exception] = [[]] * len(requests)
        rows = [0] * len(requests)
        groups: dict[Variant, list[int]] = {}
        variant: Variant = ()
        programs = self._any_variant
        for index, arrays in enumerate(requests):
            try:
                rows[index] = count = self._rows(arrays)
                if self._variable:
                    variant = tuple([arrays[i].shape[axis] for i, axis in self._variable])
                    programs = self._any_variant or self._programs.get(variant)
                if programs is None or count not in programs.takes:
                    raise self._refusal(variant, programs, count)
                groups.setdefault(variant, []).append(index)
            except Exception as error:  # noqa: BLE001 - arrays of a wrong rank, say: that request's own failure
                results[index] = error
        for variant, members in groups.items():
            found = self._any_variant or self._programs[variant]
            for shared in self._shared(members, rows, found.sizes):
                outcomes = self._run_together([requests[i] for i in shared], [rows[i] for i in shared], found)
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

    def _refusal(self, variant: Variant, programs: _Programs | None, rows: int) -> InvalidArgument:
        """Why no program takes ``rows`` rows of ``variant``."""
        name = self._spec.name
        if programs is None:
            known = [self._text(v) for v in list(self._programs)[:_LISTED_VARIANTS]]
            more = f" and {len(self._programs) - len(known)} more" if len(self._programs) > len(known) else ""
            return InvalidArgument(
                f"model {name!r} has no program for {self._text(variant)}; compiled are {', '.join(known)}{more}"
            )
        if self._spec.coalesce:
            return too_many_rows(programs.sizes, rows)
        return InvalidArgument(
            f"model {name!r} has no program for {rows} rows and its batches cannot be padded; "
            f"send one of {list(programs.sizes)}"
        )

    def _text(self, variant: Variant) -> str:
        """The inputs of a variant as a client writes their shapes, -1 for the batch: ``image[-1, 2, 4]``."""
        spec = self._spec
        shapes = [list(tensor.shape) for tensor in spec.inputs]
        for (index, axis), size in zip(self._variable, variant, strict=True):
            shapes[index][axis] = size
        named = dict.fromkeys(index for index, _ in self._variable)
        return " ".join(f"{spec.inputs[index].name}{shapes[index]}" for index in named)

    def _shared(self, members: list[int], rows: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
        """The requests of each run, in order: as many whole ones as the largest size holds."""
        if not self._spec.coalesce:
            yield from ([index] for index in members)
            return
        limit = sizes[-1] if sizes else math.inf
        if len(members) == 1 or sum([rows[index] for index in members]) <= limit:
            yield members
            return
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
        self, requests: Sequence[list[Array]], rows: Sequence[int], programs: _Programs
    ) -> list[list[Array] | Exception]:
        try:
            return [*self._run(requests, rows, programs)]
        except Exception as error:  # noqa: BLE001 - the process edge: whatever a model raises ends here
            if len(rows) == 1:
                return [error]
        # One of them may be at fault (an index out of range, say): alone, only that one fails.
        return [self._run_together([r], [n], programs)[0] for r, n in zip(requests, rows, strict=True)]

    def _run(self, requests: Sequence[list[Array]], rows: Sequence[int], programs: _Programs) -> list[list[Array]]:
        plan = programs.plan(sum(rows)) if self._spec.coalesce else (rows[0],)
        size = sum(plan)
        batch = self._staging.gather(requests, rows, size)
        start = time.perf_counter()
        outputs = self._check_outputs(self._engine.run(batch), size) if len(plan) == 1 else self._in_turn(batch, plan)
        self.run_s += 0.1 * (time.perf_counter() - start - self.run_s)
        if len(rows) == 1 and rows[0] == size:
            return [outputs]
        # An identity model returns its input, which the next run overwrites.
        outputs = [output.copy() if self._staging.owns(output) else output for output in outputs]
        return split(outputs, self._output_axes, rows)

    def _in_turn(self, batch: list[Array], plan: Sequence[int]) -> list[Array]:
        """The outputs of ``batch``, which is run in parts of the sizes of ``plan``."""
        joined = [np.empty(tensor.at_batch(sum(plan)), tensor.element.numpy) for tensor in self._spec.outputs]
        start = 0
        for size in plan:
            part = [
                np.asarray(array[rows_on(axis, start, start + size)], order="C")
                for array, (_, axis, _) in zip(batch, self._batched, strict=True)
            ]
            outputs = self._check_outputs(self._engine.run(part), size)
            for array, output, axis in zip(joined, outputs, self._output_axes, strict=True):
                array[rows_on(axis or 0, start, start + size)] = output
            start += size
        return joined
