"""``TritonPythonModel``: what ``1/model.py`` of every converted model re-exports.

Triton calls ``initialize`` once and ``execute`` with a list of requests, one call at a time. Every request gets
exactly one response; a failing request never takes its neighbours along.
"""

from __future__ import annotations

import io
import operator
import sys
import traceback
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from nereid_backend import pulse
from nereid_backend.batching import Array
from nereid_backend.engines import Engine, engine_class
from nereid_backend.errors import CODE_IN_TEXT, Cancelled, InvalidArgument, NereidError
from nereid_backend.executor import Executor
from nereid_backend.pipeline import Pipeline
from nereid_backend.spec import ModelSpec
from nereid_backend.tensors import TensorAccess

# Asking Triton whether a request was cancelled is a round trip to the server process: 20 us, up to 200 on busy
# processors. It is worth it only where a run costs much more than the question, and so does what one request adds.
CANCEL_CHECK_MIN_RUN_S = 0.005
CANCEL_CHECK_MIN_SHARE_S = 0.002

# gRPC clients refuse status texts from 8 KiB on, counted after percent-encoding.
_LONGEST_TOLD_BYTES = 6000
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
        open_streams()
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
        self.execute = pulse.told(self.execute)  # type: ignore[method-assign, assignment]

    def _open(self, spec: ModelSpec, directory: Path) -> None:
        self._spec = spec
        self._engine: Engine = engine_class(spec.engine).load(spec, directory)
        executor = Executor(spec, self._engine)
        self._executor = executor if spec.hooks is None else Pipeline(spec, executor, directory)
        access = TensorAccess(pb_utils)
        self._read = access.request_reader(spec.client_inputs, spec.is_scalar)
        self._writers = [access.writer(t, scalar=spec.is_scalar(t)) for t in spec.client_outputs]
        if (problem := executor.warm_up()) is not None:
            pb_utils.Logger.log_warn(f"model {spec.name!r}: the warm-up run on zeros failed: {problem}")

    def execute(self, requests: list[Any]) -> list[Any]:
        # What is usual is done for all requests at once; what goes wrong is sorted out one by one.
        run_s = self._executor.run_s
        ask = run_s > CANCEL_CHECK_MIN_RUN_S and run_s > CANCEL_CHECK_MIN_SHARE_S * len(requests)
        try:
            inputs = None if ask else self._read(requests)
        except Exception:  # noqa: BLE001 - one unreadable request must not fail its neighbours
            inputs = None
        outcomes = self._run_each(requests, ask) if inputs is None else self._executor.run(inputs)
        try:
            response, writers, call = pb_utils.InferenceResponse, self._writers, operator.call
            return [response(list(map(call, writers, arrays))) for arrays in outcomes]  # type: ignore[arg-type]
        except Exception:  # noqa: BLE001 - outputs that cannot be handed over fail their own request only
            return list(map(self._response, requests, outcomes))

    def _run_each(self, requests: list[Any], ask: bool) -> list[list[Array] | Exception]:
        """The outputs of requests of which some may be unreadable or, when we ``ask``, cancelled."""
        outcomes: list[list[Array] | Exception] = [[]] * len(requests)
        readable = {}
        for index, request in enumerate(requests):
            try:
                if ask and request.is_cancelled():
                    raise Cancelled("the request was cancelled")
                (readable[index],) = self._read([request])
            except Exception as error:  # noqa: BLE001 - one unreadable request must not fail its neighbours
                outcomes[index] = error
        for index, outcome in zip(readable, self._executor.run(list(readable.values())), strict=True):
            outcomes[index] = outcome
        return outcomes

    def _response(self, request: Any, outcome: list[Array] | Exception) -> Any:
        if isinstance(outcome, Exception):
            return self._report(request, outcome)
        try:
            return pb_utils.InferenceResponse(self._write_outputs(outcome))
        except Exception as error:  # noqa: BLE001 - outputs that cannot be handed over fail their own request only
            return self._report(request, error)

    def finalize(self) -> None:
        if isinstance(self._executor, Pipeline):
            self._executor.close()
        self._engine.close()

    def _write_outputs(self, arrays: list[Array]) -> list[Any]:
        return list(map(operator.call, self._writers, arrays))

    def _report(self, request: Any, error: BaseException) -> Any:
        """The error response of one request; the log gets the whole story, the client a short text."""
        text, code = self._told(request, error)
        if CODE_IN_TEXT in request.parameters():
            text = f"[{code}] {text}"
        return failure(text, code)

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


def open_streams() -> None:
    """Let prints appear at once and survive any text: the 2.51 stub's streams are block-buffered ASCII."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)


def failure(message: str, code: str) -> Any:
    """An error response, with as much of ``message`` as a gRPC client accepts."""
    triton_code = getattr(pb_utils.TritonError, _TRITON_CODES.get(code, "INTERNAL"))
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(_shortened(message), triton_code))


def _shortened(text: str) -> str:
    """``text`` with its middle left out; the log has the whole."""
    if _encoded_bytes(text) <= _LONGEST_TOLD_BYTES:
        return text
    head, tail = text[:200], text[200:]
    budget = _LONGEST_TOLD_BYTES - _encoded_bytes(head) - 16
    kept = len(tail)
    while (size := _encoded_bytes(tail[-kept:])) > budget:
        kept = min(kept - 1, max(1, kept * budget // size))
    return f"{head} ... {tail[-kept:]}"


def _encoded_bytes(text: str) -> int:
    """The size of ``text`` in gRPC's percent-encoding, which leaves printable ASCII alone."""
    return sum(1 if 0x20 <= byte < 0x7F and byte != ord("%") else 3 for byte in text.encode(errors="replace"))
