"""``TritonPythonModel`` of a script: what ``1/model.py`` of a converted script folder re-exports.

Triton makes one ``execute`` call at a time per instance, and a script's calls are long and many: each is answered by a
thread of a pool through its response sender. Only that thread asks Triton whether the call is cancelled and only it
answers, because asking after the answer crashes tritonserver 2.51.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from nereid_backend import pulse
from nereid_backend.errors import CODE_IN_TEXT, Cancelled, EngineError, InvalidArgument, NereidError, OutputError
from nereid_backend.model import failure, open_streams
from nereid_backend.scripts import MAIN_FILE, PROGRAM_FILE, PYTHON, SCRIPT_FOLDER, child, environment, frame
from nereid_backend.scripts.link import PARAMETER, RUN_VARIABLE, Link
from nereid_backend.spec import VARIABLE, ModelSpec, TensorSpec
from nereid_backend.tensors import TensorAccess

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_FLOAT = "float32"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where nereid-server's C++ models leave their outputs, too


@dataclass(slots=True)
class _Call:
    """A request while it waits or runs; ``stdin`` is an open file of this call's own, None for no input."""

    sender: Any
    request_id: str
    shape: tuple[int, ...]
    stdin: int | None
    token: str | None
    code_in_text: bool


class TritonPythonModel:
    """Serves one script folder."""

    def initialize(self, args: dict[str, str]) -> None:
        open_streams()
        logging.basicConfig(format="%(message)s", level=logging.INFO)  # an environment may have to be built
        directory = Path(args["model_repository"]) / args["model_version"]
        try:
            self._open(ModelSpec.read(directory), directory / SCRIPT_FOLDER)
        except NereidError as error:
            raise pb_utils.TritonModelException(f"{type(error).__name__}: {error}") from error
        except OSError as error:
            raise pb_utils.TritonModelException(f"the folder for outputs: {error.strerror}") from error
        self.execute = pulse.told(self.execute)  # type: ignore[method-assign, assignment]

    def _open(self, spec: ModelSpec, folder: Path) -> None:
        if spec.script is None:
            raise EngineError(f"model {spec.name!r} is not a script; convert it again")
        self._spec, self._script = spec, spec.script
        self._access = TensorAccess(pb_utils)
        self._read = self._access.request_reader(spec.inputs) if spec.inputs else None
        if spec.engine == PYTHON:
            python = environment.prepare(folder)
            command = [str(python), "-u", MAIN_FILE]
            outputs = os.environ.get(RUN_VARIABLE)  # cleared also after a kill; elsewhere the temporary folder
        else:
            python = None
            command = [str(folder / PROGRAM_FILE)]
            outputs = os.environ.get("NEREID_SCRATCH_DIR") or (str(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None)
        self._outputs = Path(tempfile.mkdtemp(prefix="nereid-", dir=outputs))
        variables = environment.child_variables(os.environ, python)
        self._worker = child.Worker(
            python or environment.interpreter(), command, folder, variables, self._outputs, spec.script.preload
        )
        self._worker.start()
        self._pool = ThreadPoolExecutor(spec.script.children, thread_name_prefix="call")

    def execute(self, requests: list[Any]) -> list[Any]:
        for request in requests:
            sender = request.get_response_sender()
            try:
                call = self._begin(request, sender)
            except Exception as error:  # noqa: BLE001 - an unreadable request must not fail its neighbours
                asked = CODE_IN_TEXT in request.parameters()
                sender.send(self._report(request.request_id(), error, code_in_text=asked), flags=_FINAL)
                continue
            self._pool.submit(self._answer, call)
        return [None] * len(requests)

    def finalize(self) -> None:
        # Triton waits for every answer before it calls this.
        self._pool.shutdown()
        self._worker.close()
        shutil.rmtree(self._outputs, ignore_errors=True)

    def _begin(self, request: Any, sender: Any) -> _Call:
        """What a call needs of its request, which is not ours any more when ``execute`` has returned."""
        parameters = json.loads(request.parameters() or "{}")
        token = parameters.get(PARAMETER)
        if token is not None and not isinstance(token, str):
            raise InvalidArgument(f"the parameter {PARAMETER!r} is not for clients; leave it out")
        shape: tuple[int, ...] = ()
        stdin = None
        if self._read is not None:
            ((array,),) = self._read([request])
            shape = array.shape
            stdin = os.memfd_create("input", os.MFD_CLOEXEC)
            _write(stdin, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return _Call(sender, request.request_id(), shape, stdin, token, CODE_IN_TEXT in parameters)

    def _answer(self, call: _Call) -> None:
        """Run a call to its end and answer it, once, whatever happens."""
        try:
            response = pb_utils.InferenceResponse([self._run(call)])
        except Exception as error:  # noqa: BLE001 - the process edge: whatever a program does ends here
            response = self._report(call.request_id, error, code_in_text=call.code_in_text)
        finally:
            if call.stdin is not None:
                os.close(call.stdin)
        call.sender.send(response, flags=_FINAL)

    def _run(self, call: _Call) -> Any:
        if call.sender.is_cancelled():
            raise Cancelled("the request was cancelled")
        if call.token is None:
            return self._run_child(call, None)
        link = Link.open(call.token)
        try:
            if link.header.shape:
                call.shape = link.header.shape
            if link.header.input_bytes is not None and call.stdin is not None:
                os.ftruncate(call.stdin, 0)
                os.lseek(call.stdin, 0, os.SEEK_SET)
                link.read_input(call.stdin)
            link.start()
            return self._run_child(call, link)
        finally:
            link.close()

    def _run_child(self, call: _Call, link: Link | None) -> Any:
        """The output tensor of one child. Raises NereidError subclasses."""
        descriptor, name = tempfile.mkstemp(dir=self._outputs)
        os.close(descriptor)
        output = Path(name)
        output.unlink()
        try:
            with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a descriptor, not a path
                stdin = nothing.fileno() if call.stdin is None else call.stdin
                os.lseek(stdin, 0, os.SEEK_SET)
                ended = child.run(
                    self._worker,
                    self._variables(call, output, live=link is not None and link.header.live),
                    stdin,
                    link=link,
                    is_cancelled=call.sender.is_cancelled,
                    time_limit_s=self._script.time_limit_s,
                )
            if ended.code:
                raise EngineError(_death(ended))
            return self._tensor(frame.read(output), call.shape)
        finally:
            output.unlink(missing_ok=True)

    def _variables(self, call: _Call, output: Path, *, live: bool) -> Mapping[str, str]:
        # A Checkpoint carries float32 whatever the contract says.
        dtype = _FLOAT if live or not self._spec.inputs else self._spec.inputs[0].element.numpy_name
        variables = {"NEREID_OUTPUT_PATH": str(output), "NEREID_OUTPUT_DTYPE": dtype}
        if self._spec.inputs:
            variables["NEREID_INPUT_SHAPE"] = ",".join(map(str, call.shape))
            variables["NEREID_INPUT_DTYPE"] = dtype
        return variables

    def _tensor(self, written: frame.Frame, shape: Sequence[int]) -> Any:
        declared = self._spec.outputs[0]
        if written.element != declared.element and not self._script.any_dtype:
            raise OutputError(
                f"its output is {written.element.numpy_name}, the contract says {declared.element.numpy_name}"
            )
        rows = shape[0] if self._spec.max_batch_size else None
        _check_shape(self._spec.dims(declared), written.shape, rows)
        tensor = TensorSpec(declared.name, written.element.token, written.shape)
        return self._access.writer(tensor)(written.array)

    def _report(self, request_id: str, error: Exception, *, code_in_text: bool) -> Any:
        """The error response of one call; the log gets the whole story, the client a short text."""
        name = self._spec.name
        if isinstance(error, InvalidArgument | Cancelled):
            pb_utils.Logger.log_verbose(f"model {name!r} request {request_id or '-'}: {error}")
        elif isinstance(error, NereidError):
            pb_utils.Logger.log_error(f"model {name!r} request {request_id or '-'}: {error}")
        else:
            trace = "".join(traceback.format_exception(error))
            pb_utils.Logger.log_error(f"model {name!r} request {request_id or '-'} failed\n{trace}")
            error = EngineError(f"{type(error).__name__}; the server's log has the details")
        text = f"model {name!r}: {error}"
        return failure(f"[{error.code}] {text}" if code_in_text else text, error.code)


def _write(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]


def _check_shape(dims: Sequence[int], shape: Sequence[int], rows: int | None) -> None:
    """A batched model's output may have the batch dimension or not; with it, it is the request's."""
    expected = [list(dims)] if rows is None else [list(dims), [rows, *dims]]
    for wanted in expected:
        if len(wanted) == len(shape) and all(w in (VARIABLE, got) for w, got in zip(wanted, shape, strict=True)):
            return
    raise OutputError(f"its output has shape {list(shape)}, expected {' or '.join(map(str, expected))}")


def _death(ended: child.Ended) -> str:
    how = f"was killed by signal {-ended.code}" if ended.code < 0 else f"ended with exit code {ended.code}"
    stderr = ended.stderr.decode(errors="replace").strip()
    return f"it {how}; stderr: {stderr}" if stderr else f"it {how} and wrote nothing to stderr"
