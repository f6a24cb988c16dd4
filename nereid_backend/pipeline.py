"""Hooks around an executor: each request is prepared and finished by itself, several at once.

Within one call of Triton the hooks of different requests overlap each other and the executable: requests that are
ready run while slower ones are still being prepared, and finished ones leave while others run. Everything here is
synchronous towards Triton, so that its metrics and its handling of a dead process stay right.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

from nereid_backend import builtins, user_code
from nereid_backend.batching import Array, OutputCheck
from nereid_backend.errors import HookError, NereidError, OutputError
from nereid_backend.executor import Executor
from nereid_backend.hooks import Arrays, ModelHooks, NamedArray, by_name, unchanged
from nereid_backend.spec import POSTPROCESS, PREPROCESS, VARIABLE, BuiltinSpec, ModelSpec, TensorSpec

_MOST_THREADS = 32
# Handing work to another thread and back costs about 50 us.
_WORTH_A_THREAD_S = 1e-4

Step = Callable[[list[NamedArray]], Arrays]


class Pipeline:
    """Preprocess, executor, postprocess. One call at a time."""

    def __init__(self, spec: ModelSpec, executor: Executor, directory: Path) -> None:
        """``directory`` holds the Python file and the data files of ``spec.hooks``."""
        hooks = spec.hooks
        if hooks is None:
            raise HookError(f"model {spec.name!r} has no hooks; convert the bundle again")
        code = ModelHooks()
        if hooks.code:
            code = user_code.load(directory, spec.name, ModelHooks, "register_model")
        before = [*_code(code.preprocess, PREPROCESS in hooks.code), *_opened(hooks.preprocess, directory)]
        after = [*_opened(hooks.postprocess, directory), *_code(code.postprocess, POSTPROCESS in hooks.code)]
        self._before = _Stage(spec, PREPROCESS, hooks.client_inputs, before, spec.inputs)
        self._after = _Stage(spec, POSTPROCESS, spec.outputs, after, hooks.client_outputs)
        self._executor = executor
        # Triton lets a client count on as many rows as it sent only where it knows of rows.
        batched = [(i, t.batch_axis) for i, t in enumerate(hooks.client_inputs) if t.batch_axis is not None]
        self._rows_at = batched[0] if batched and spec.max_batch_size else None
        self._pool = ThreadPoolExecutor(min(max(spec.max_batch_size, 1), _MOST_THREADS), "nereid-hook")

    @property
    def run_s(self) -> float:
        """Moving mean of the time from preprocess to postprocess of a request that is alone."""
        return self._executor.run_s + self._before.mean_s + self._after.mean_s

    def close(self) -> None:
        self._pool.shutdown()

    def run(self, requests: Sequence[list[Array]]) -> list[list[Array] | Exception]:
        """The client's outputs of each request, or why it has none."""
        quick = self._before.mean_s + self._after.mean_s < _WORTH_A_THREAD_S
        return self._in_turn(requests) if quick or len(requests) == 1 else self._overlapping(requests)

    def _in_turn(self, requests: Sequence[list[Array]]) -> list[list[Array] | Exception]:
        results = [self._before.outcome(arrays, VARIABLE) for arrays in requests]
        ready = {index: result for index, result in enumerate(results) if not isinstance(result, Exception)}
        for index, outcome in zip(ready, self._executor.run(list(ready.values())), strict=True):
            if isinstance(outcome, Exception):
                results[index] = outcome
            else:
                results[index] = self._after.outcome(outcome, self._rows(requests[index]))
        return results

    def _overlapping(self, requests: Sequence[list[Array]]) -> list[list[Array] | Exception]:
        results: list[list[Array] | Exception] = [[] for _ in requests]
        start = self._pool.submit
        preparing = {start(self._before.outcome, arrays, VARIABLE): index for index, arrays in enumerate(requests)}
        finishing: dict[int, Future[list[Array] | Exception]] = {}
        pending = set(preparing)
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            if pending:
                # The slower ones are waited for as long as a run of their own would take.
                more, pending = wait(pending, timeout=self._executor.run_s)
                done |= more
            ready: dict[int, list[Array]] = {}
            for index, outcome in sorted(((preparing[f], f.result()) for f in done), key=itemgetter(0)):
                if isinstance(outcome, Exception):
                    results[index] = outcome
                else:
                    ready[index] = outcome
            for index, outcome in zip(ready, self._executor.run(list(ready.values())), strict=True):
                if isinstance(outcome, Exception):
                    results[index] = outcome
                else:
                    finishing[index] = start(self._after.outcome, outcome, self._rows(requests[index]))
        for index, future in finishing.items():
            results[index] = future.result()
        return results

    def _rows(self, arrays: list[Array]) -> int:
        """How many rows the answer must have; VARIABLE when the client's tensors do not say."""
        if self._rows_at is None:
            return VARIABLE
        index, axis = self._rows_at
        rows: int = arrays[index].shape[axis]
        return rows


class _Stage:
    """The hooks on one side of the executable, in order."""

    def __init__(
        self,
        spec: ModelSpec,
        what: str,
        takes: Sequence[TensorSpec],
        steps: Sequence[Step],
        gives: tuple[TensorSpec, ...],
    ) -> None:
        self._what = f"{what} of model {spec.name!r}"
        self._takes = [tensor.name for tensor in takes]
        self._steps = list(steps)
        self._gives = [tensor.name for tensor in gives]
        self._check = OutputCheck(replace(spec, outputs=gives), f"{what} result")
        self.mean_s = math.inf if steps else 0.0
        """Moving mean of the time it takes."""

    def outcome(self, arrays: Sequence[Array], rows: int) -> list[Array] | Exception:
        """The arrays of ``gives`` from those of ``takes``, with ``rows`` on their batch axis; or what went wrong."""
        try:
            return self._run(arrays, rows)
        except Exception as error:  # noqa: BLE001 - the process edge: whatever a hook raises ends here
            return error

    def _run(self, arrays: Sequence[Array], rows: int) -> list[Array]:
        start = time.perf_counter()
        named = dict(zip(self._takes, arrays, strict=True))
        for step in self._steps:
            try:
                given = step([NamedArray(name, _read_only(array)) for name, array in named.items()])
                named = by_name(given, f"{self._what} gave", OutputError)
            except (NereidError, MemoryError):
                raise
            except (Exception, SystemExit) as error:
                raise HookError(
                    f"{self._what} failed with {type(error).__name__}; the server's log has the details"
                ) from error
        if missing := [name for name in self._gives if name not in named]:
            raise OutputError(f"{self._what} gave {[*named]}, without {missing}")
        results = self._check([named[name] for name in self._gives], rows)
        if self._steps:
            taken_s = time.perf_counter() - start
            self.mean_s = taken_s if self.mean_s == math.inf else self.mean_s + 0.1 * (taken_s - self.mean_s)
        return results


def _code(hook: Step, wanted: bool) -> list[Step]:
    return [hook] if wanted and hook is not unchanged else []


def _opened(specs: Sequence[BuiltinSpec], directory: Path) -> list[Step]:
    return [_step(builtins.builtin(spec).open(directory)) for spec in specs]


def _step(function: Callable[[dict[str, Array]], Mapping[str, Array]]) -> Step:
    return lambda named: function(dict(named))


def _read_only(array: Array) -> Array:
    """A hook that writes into what it is given would sometimes change the client's or the executable's memory."""
    view = array.view()
    view.flags.writeable = False
    return view
