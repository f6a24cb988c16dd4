"""``TritonPythonModel``: what ``1/model.py`` of every converted model re-exports.

Triton calls ``initialize`` once and ``execute`` with a list of requests, one call at a time. Every request gets
exactly one response; a failing request never takes its neighbours along.
"""

from __future__ import annotations

import io
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from nereid_backend.batching import Array, OutputCheck, Staging, padded_size, split
from nereid_backend.engines import Engine, engine_class
from nereid_backend.errors import Cancelled, InvalidArgument, NereidError
from nereid_backend.spec import VARIABLE, ModelSpec
from nereid_backend.tensors import TensorAccess

# Asking Triton whether a request was cancelled is a round trip to the server process. It is worth it only where a
# run costs much more than the question.
CANCEL_CHECK_MIN_RUN_S = 0.005

# A caller that gets texts only (BLS drops codes) asks with this request parameter for the code before the text.
CODE_IN_TEXT = "nereid_code_in_text"

_TRITON_CODES = {
    "INVALID_ARGUMENT": "INVALID_ARG",
    "NOT_FOUND": "NOT_FOUND",
    "UNAVAILABLE": "UNAVAILABLE",
    "UNIMPLEMENTED": "UNSUPPORTED",
    "CANCELLED": "CANCELLED",
}


class TritonPythonModel:
    """Serves one ModelSpec with one engine."""

    def initialize(self, args: dict[str, str]) -> None:
        _open_streams()
        directory = Path(args["model_repository"]) / args["model_version"]
        try:
            self._open(ModelSpec.read(directory), directory)
        except NereidError as error:
            # Triton shows this text to whoever asked for the load.
            if error.__cause__ is not None:  # the code of a bundle: whoever wrote it needs the traceback
                pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
            raise pb_utils.TritonModelException(f"{type(error).__name__}: {error}") from error
        except Exception as error:
            pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
            reason = (str(error).splitlines() or [""])[0]
            raise pb_utils.TritonModelException(f"{type(error).__name__}: {reason}") from error

    def _open(self, spec: ModelSpec, directory: Path) -> None:
        self._spec = spec
        self._sizes = spec.batch_sizes
        self._engine: Engine = engine_class(spec.engine).load(spec, directory)
        self._check_outputs = OutputCheck(spec)
        self._staging = Staging(spec.inputs)
        access = TensorAccess(pb_utils)
        self._readers = [(access.reader(t), spec.is_scalar(t)) for t in spec.inputs]
        self._writers = [(access.writer(t), spec.is_scalar(t)) for t in spec.outputs]
        self._batched = [(i, t.batch_axis, t.name) for i, t in enumerate(spec.inputs) if t.batch_axis is not None]
        self._run_s = 0.0  # moving mean of one run's duration
        self._warm_up()

    def _warm_up(self) -> None:
        """Run every compiled size once, so that no request pays for compilation."""
        for size in self._sizes or (1,):
            zeros = [
                np.zeros([1 if n == VARIABLE else n for n in t.at_batch(size)], t.element.numpy)
                for t in self._spec.inputs
            ]
            try:
                self._engine.run(zeros)
                start = time.perf_counter()
                self._engine.run(zeros)
                self._run_s = time.perf_counter() - start
            except Exception as error:
                if self._sizes:
                    raise
                # A model that takes any size may refuse zeros or ones where real input is fine.
                pb_utils.Logger.log_warn(f"model {self._spec.name!r}: the warm-up run on zeros failed: {error}")

    def execute(self, requests: list[Any]) -> list[Any]:
        responses: list[Any] = [None] * len(requests)
        accepted: list[int] = []
        inputs: list[list[Array]] = []
        rows: list[int] = []
        ask = self._run_s > CANCEL_CHECK_MIN_RUN_S
        for index, request in enumerate(requests):
            try:
                if ask and request.is_cancelled():
                    responses[index] = _failure("the request was cancelled", "CANCELLED")
                    continue
                arrays = self._read_inputs(request)
                rows.append(self._rows(arrays))
            except Exception as error:  # noqa: BLE001 - one unreadable request must not fail its neighbours
                responses[index] = self._report(request, error)
                continue
            accepted.append(index)
            inputs.append(arrays)
        for index, result in zip(accepted, self._run_all(inputs, rows), strict=True):
            responses[index] = self._respond(requests[index], result)
        return responses

    def _respond(self, request: Any, result: list[Array] | Exception) -> Any:
        if not isinstance(result, Exception):
            try:
                return pb_utils.InferenceResponse(self._write_outputs(result))
            except Exception as error:  # noqa: BLE001 - outputs that cannot be handed over fail their own request only
                result = error
        return self._report(request, result)

    def finalize(self) -> None:
        self._engine.close()

    def _run_all(self, inputs: list[list[Array]], rows: list[int]) -> Sequence[list[Array] | Exception]:
        """The outputs of each request, or why it has none."""
        if len(rows) == 1 or (self._spec.coalesce and rows):
            try:
                return self._run(inputs, rows)
            except Exception as error:  # noqa: BLE001 - the process edge: whatever a model raises ends here
                if len(rows) == 1:
                    return [error]
        # Not to be coalesced; or one of them may be at fault (an index out of range, say): alone, only that one fails.
        return [self._run_all([i], [r])[0] for i, r in zip(inputs, rows, strict=True)]

    def _run(self, inputs: list[list[Array]], rows: list[int]) -> list[list[Array]]:
        spec = self._spec
        if spec.max_batch_size == 0:
            return [self._check_outputs(self._timed_run(inputs[0]), rows[0])]
        size = padded_size(self._sizes, sum(rows))
        batch = self._staging.gather(inputs, rows, size)
        outputs = self._check_outputs(self._timed_run(batch), size)
        # An identity model returns its input, which the next run overwrites.
        outputs = [output.copy() if self._staging.owns(output) else output for output in outputs]
        return split(outputs, rows)

    def _timed_run(self, batch: list[Array]) -> list[Array]:
        start = time.perf_counter()
        outputs = self._engine.run(batch)
        self._run_s += 0.1 * (time.perf_counter() - start - self._run_s)
        return outputs

    def _read_inputs(self, request: Any) -> list[Array]:
        # A scalar per request or per row travels as a dimension of 1: Triton has no rank 0.
        arrays = []
        for read, scalar in self._readers:
            array = read(request)
            arrays.append(array.reshape(array.shape[:-1]) if scalar else array)
        return arrays

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
        if self._spec.max_batch_size == 0 and self._sizes and rows not in self._sizes:
            raise InvalidArgument(
                f"model {self._spec.name!r} has no program for {rows} rows and its batches cannot be padded; "
                f"send one of {list(self._sizes)}"
            )
        return rows

    def _write_outputs(self, arrays: list[Array]) -> list[Any]:
        return [
            write(array[..., np.newaxis] if scalar else array)
            for (write, scalar), array in zip(self._writers, arrays, strict=True)
        ]

    def _report(self, request: Any, error: BaseException) -> Any:
        """The error response of one request; the log gets the whole story, the client a short text."""
        text, code = self._told(request, error)
        if CODE_IN_TEXT in request.parameters():
            text = f"[{code}] {text}"
        return _failure(text, code)

    def _told(self, request: Any, error: BaseException) -> tuple[str, str]:
        name, request_id = self._spec.name, request.request_id() or "-"
        if isinstance(error, InvalidArgument | Cancelled):
            pb_utils.Logger.log_verbose(f"model {name!r} request {request_id}: {error}")
            return str(error), error.code
        trace = "".join(traceback.format_exception(error))
        pb_utils.Logger.log_error(f"model {name!r} request {request_id} failed\n{trace}")
        if isinstance(error, NereidError):
            return str(error), error.code
        if isinstance(error, MemoryError):
            return f"model {name!r} ran out of memory; send less at once or try later", "UNAVAILABLE"
        return f"model {name!r} failed with {type(error).__name__}; the server's log has the details", "INTERNAL"


def _open_streams() -> None:
    """Let prints appear at once and survive any text: the 2.51 stub's streams are block-buffered ASCII."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _failure(message: str, code: str) -> Any:
    triton_code = getattr(pb_utils.TritonError, _TRITON_CODES.get(code, "INTERNAL"))
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, triton_code))
