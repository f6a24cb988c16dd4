"""``TritonPythonModel`` of a meta model: the bundle's own ``run(inputs, call)`` answers each request.

Callees run in their own processes and are reached through Triton (its BLS), so they coalesce the calls of several
metas with everybody else's. An instance works on one request at a time: the number of instances is the gate that
bounds how many run together.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from nereid_backend import model, user_code
from nereid_backend.batching import Array, OutputCheck
from nereid_backend.errors import (
    CODE_IN_TEXT,
    CallError,
    Cancelled,
    DeadlineExceeded,
    EngineError,
    InvalidArgument,
    ModelUnavailable,
    NereidError,
    OutputError,
    short_repr,
    split_code,
)
from nereid_backend.hooks import Arrays, MetaModel, NamedArray, by_name
from nereid_backend.spec import VARIABLE, ModelSpec
from nereid_backend.tensors import TensorAccess

# BLS on Triton 2.51 makes every error INTERNAL: our own runtime writes the code before its text when asked to.
_BY_CODE: dict[str, type[NereidError]] = {
    cls.code: cls for cls in (InvalidArgument, DeadlineExceeded, ModelUnavailable, Cancelled)
}
# Triton's own words for a callee that is gone, unloaded, or about to be.
_AWAY = ("is not healthy", "is not ready", "no available versions", "Server is stopping")


class TritonPythonModel(model.TritonPythonModel):
    """Serves one meta model."""

    def _open(self, spec: ModelSpec, directory: Path) -> None:
        self._spec = spec
        self._meta = user_code.load(directory, spec.name, MetaModel, "register_meta_model")
        access = TensorAccess(pb_utils)
        self._views = [(tensor.name, access.view(tensor), spec.is_scalar(tensor)) for tensor in spec.inputs]
        self._writers = [access.writer(tensor, scalar=spec.is_scalar(tensor)) for tensor in spec.outputs]
        self._check_outputs = OutputCheck(spec)
        self._callees = {callee.name: _Callee(callee, access) for callee in spec.calls or ()}

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def finalize(self) -> None:
        """Nothing is held but the code."""

    def _answer(self, request: Any) -> Any:
        call = Callees(self._spec.name, self._callees, request)
        try:
            call.check()
            given = self._meta.run([self._input(request, *view) for view in self._views], call)
            outputs = self._check_outputs(self._in_order(given), 1)
            return pb_utils.InferenceResponse(self._write_outputs(outputs))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the process edge: what the bundle's code raises ends here
            return self._report(request, error)
        finally:
            call.close()

    def _input(self, request: Any, name: str, view: Any, scalar: bool) -> NamedArray:
        array = view(pb_utils.get_input_tensor_by_name(request, name))
        return NamedArray(name, array.reshape(array.shape[:-1]) if scalar else array)

    def _in_order(self, given: Arrays) -> list[Array]:
        """What ``run`` gave, in the order of the specification. Raises OutputError."""
        arrays = by_name(given, f"run of model {self._spec.name!r} gave", OutputError)
        names = [tensor.name for tensor in self._spec.outputs]
        if set(arrays) != set(names):
            raise OutputError(f"run of model {self._spec.name!r} gave the outputs {sorted(arrays)}, expected {names}")
        return [arrays[name] for name in names]


class Callees:
    """The ``call`` of one request: runs declared callees until ``run`` has returned. Any thread may call it."""

    def __init__(self, model_name: str, callees: Mapping[str, _Callee], request: Any) -> None:
        self._model, self._callees, self._request = model_name, callees, request
        self._open = True
        self._lock = threading.Lock()

    def __call__(self, model: str, inputs: Arrays, outputs: Iterable[str] | None = None) -> list[NamedArray]:
        """The outputs of ``model`` for ``inputs``, in its order or in that of the names in ``outputs``.

        Arrays go in and come out in wire order, with the dtypes and shapes of the callee's contract; those that come
        out are read-only. Raises CallError for a model ``meta.calls`` does not declare, InvalidArgument for inputs
        that break its contract, Cancelled when the client has gone or its deadline has passed, and the callee's own
        error otherwise.
        """
        callee = self._callees.get(model)
        if callee is None:
            raise CallError(
                f"model {self._model!r} called {short_repr(model)}, which is undeclared; meta.calls has "
                f"{[*self._callees]}"
            )
        self.check()
        try:
            return callee(inputs, outputs)
        except NereidError as error:
            raise type(error)(f"in {self._model!r}: {error}") from None

    def check(self) -> None:
        """Raise Cancelled when nobody waits for the answer any more, CallError after the answer."""
        with self._lock:
            # Asking after the answer has been sent would crash Triton 2.51.
            if not self._open:
                raise CallError(f"model {self._model!r} made a call after its run had returned")
            if self._request.is_cancelled():
                raise Cancelled(f"the request to model {self._model!r} was cancelled or its deadline has passed")

    def close(self) -> None:
        with self._lock:
            self._open = False


class _Callee:
    """One declared callee and its contract."""

    def __init__(self, spec: ModelSpec, access: TensorAccess) -> None:
        self._spec = spec
        self._inputs = {
            tensor.name: (tensor, access.writer(tensor, scalar=spec.is_scalar(tensor))) for tensor in spec.inputs
        }
        self._outputs = {tensor.name: (tensor, access.view(tensor)) for tensor in spec.outputs}

    def __call__(self, inputs: Arrays, outputs: Iterable[str] | None) -> list[NamedArray]:
        spec = self._spec
        names = [tensor.name for tensor in spec.outputs] if outputs is None else list(outputs)
        if unknown := [name for name in names if name not in self._outputs]:
            raise InvalidArgument(
                f"model {spec.name!r} has no output {short_repr(unknown[0])}, only {[*self._outputs]}"
            )
        arrays = by_name(inputs, f"the call of model {spec.name!r} has", InvalidArgument)
        rows = self._check(arrays)
        tensors = [write(arrays[name]) for name, (_, write) in self._inputs.items()]
        request = pb_utils.InferenceRequest(
            model_name=spec.name,
            inputs=tensors,
            requested_output_names=names,
            parameters={CODE_IN_TEXT: True},
        )
        response = request.exec()
        if response.has_error():
            raise _error(spec.name, response.error().message())
        found = []
        for name in names:
            tensor, view = self._outputs[name]
            array = view(pb_utils.get_output_tensor_by_name(response, name))
            found.append(array.reshape(array.shape[:-1]) if spec.is_scalar(tensor) else array)
        check = OutputCheck(replace(spec, outputs=tuple(self._outputs[name][0] for name in names)))
        return [NamedArray(name, array) for name, array in zip(names, check(found, rows), strict=True)]

    def _check(self, arrays: Mapping[str, Array]) -> int:
        """Compare ``arrays`` with the contract; their rows, 1 when nothing is batched. Raises InvalidArgument."""
        spec = self._spec
        if set(arrays) != set(self._inputs):
            raise InvalidArgument(f"model {spec.name!r} takes the inputs {[*self._inputs]}, got {sorted(arrays)}")
        rows = None
        for name, (tensor, _) in self._inputs.items():
            array, dtype = arrays[name], tensor.element.numpy
            fits = array.ndim == len(tensor.shape) and all(
                want in (VARIABLE, got) for want, got in zip(tensor.shape, array.shape, strict=True)
            )
            if array.dtype != dtype or not fits:
                raise InvalidArgument(
                    f"model {spec.name!r} input {name!r} is {array.dtype.name}{list(array.shape)}, expected "
                    f"{dtype.name}{list(tensor.shape)}"
                )
            if tensor.batch_axis is not None:
                found = array.shape[tensor.batch_axis]
                if rows not in (None, found):
                    raise InvalidArgument(
                        f"model {spec.name!r} input {name!r} has {found} rows, other inputs have {rows}"
                    )
                rows = found
        if rows is None:
            return 1
        if rows < 1 or 0 < spec.max_batch_size < rows:
            most = f" to {spec.max_batch_size}" if spec.max_batch_size else " or more"
            raise InvalidArgument(f"model {spec.name!r} takes 1{most} rows in a call, got {rows}")
        return rows


def _error(callee: str, text: str) -> NereidError:
    """The error of a callee with its meaning, as far as Triton lets it through."""
    if told := split_code(text):
        return _BY_CODE.get(told[0], EngineError)(told[1])
    if any(words in text for words in _AWAY):
        return ModelUnavailable(f"model {callee!r} is not available at the moment; try later")
    return EngineError(f"model {callee!r} failed: {(text.splitlines() or [''])[0]}")
