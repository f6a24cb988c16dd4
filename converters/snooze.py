"""Reader of SnoozeML's worker directories: ``snooze_model.py`` and, if they are there, its options and requirements.

Such a directory says nothing about its tensors: any names and shapes may be sent. Triton needs to know them, so
``model_inference.textproto`` may declare them, and where it does not, the model itself is asked: ``predict`` is tried
on made-up rows of several widths, and a name that it misses is one it wants. Tensors are f32, as the protocol's are.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from converters import rows, script, trial
from converters.artifact import DEFAULT_MAX_BATCH_SIZE, input_spec
from converters.contract import CONTRACT_FILE, FLAT_INPUT, FLAT_OUTPUT, Contract, ContractTensor
from converters.prepared import Prepared, Source, place
from converters.trial import OpenOutput
from nereid_backend.engines.snooze import SnoozeEngine
from nereid_backend.errors import BundleError, EngineError, InvalidArgument, OutputError, short_repr
from nereid_backend.scripts import SCRIPT_FOLDER, environment
from nereid_backend.snooze import CLASS, ENGINE, MODEL_FILE, OPTIONS_FILE
from nereid_backend.snooze.process import Process
from nereid_backend.spec import VARIABLE, ModelSpec, TensorSpec, Worker

RUNS_CODE = "its class runs as a program of this user"
UNDECLARED = Contract((), (), DEFAULT_MAX_BATCH_SIZE, flat=False)
"""What holds without ``model_inference.textproto``."""

_PLATFORM = "python"
_KEYS = ("entrypoint", "class", "tensor_format", "python", "env")
_FORMATS = ("numpy", "raw")
_DTYPE = "f32"
# Two of the usual kind tell whether any width will do; else the one that the model takes is looked for.
_WIDTHS = (2, 3, 1, *range(4, 65))
_ENOUGH_S, _LONGEST_TRIAL_S = 20.0, 60.0
_MOST_INPUTS = 16
_MOST_ROWS_TOGETHER = 2**16
_SMALL = 2  # the kind of made-up row around one
_MISSES = re.compile(r"the model refused the input: KeyError: '([^'\\]+)'")


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the model told by being tried: f32 inputs of ``width`` a row, and its outputs; or why it told nothing."""

    inputs: tuple[str, ...]
    width: int
    outputs: list[OpenOutput]
    problem: str | None = None


def is_worker(folder: Path) -> bool:
    """Whether ``folder`` is meant as a worker directory."""
    return (folder / MODEL_FILE).exists() or (folder / OPTIONS_FILE).exists()


def read(folder: Path, name: str, device: str, contract: Contract) -> Prepared:
    """Read a worker directory and try it on the CPU. Raises BundleError subclasses."""
    worker, files, notes = inspect(folder, contract)
    sources: dict[str, Source] = {f"{SCRIPT_FOLDER}/{relative}": path for relative, path in files.items()}
    with tempfile.TemporaryDirectory() as scratch:  # the model may write into its folder
        for target, source in sources.items():
            place(source, Path(scratch) / target, link=True)
        process = Process(worker, Path(scratch) / SCRIPT_FOLDER, "cpu", trial_limit_s=_LONGEST_TRIAL_S)
        try:
            spec, learned = _tried(process, name, contract)
        finally:
            process.close()
    if contract == UNDECLARED and not spec.coalesce:
        spec = replace(spec, max_batch_size=_MOST_ROWS_TOGETHER)  # they cannot be sent in several requests
    spec = replace(spec, device=device, worker=worker)
    note = f"{worker.entrypoint} runs as a program of this user; serve only folders you trust"
    return Prepared(spec, sources, (note, *notes, *learned))


def inspect(folder: Path, contract: Contract) -> tuple[Worker, Mapping[str, Path], tuple[str, ...]]:
    """The options of a worker directory, its files by their paths in it, and remarks; nothing runs.

    Raises BundleError.
    """
    for tensor in (*contract.inputs, *contract.outputs):
        if tensor.dtype != _DTYPE:
            raise BundleError(f"{CONTRACT_FILE}: tensor {tensor.name!r} is {tensor.dtype}; a worker's tensors are FP32")
    if contract.script_keys:
        raise BundleError(f"{CONTRACT_FILE}: {contract.script_keys[0]} is for script folders, this is a worker's")
    files = script.files_of(folder)
    raw = _options(folder)
    worker = Worker(
        raw.get("entrypoint") or MODEL_FILE,
        raw.get("class") or CLASS,
        (raw.get("tensor_format") or _FORMATS[0]) == "raw",
        raw.get("python") or "",
        raw.get("env") or {},
    )
    if str(PurePosixPath(worker.entrypoint)) not in files:
        raise BundleError(f"{OPTIONS_FILE}: the folder holds no entrypoint {short_repr(worker.entrypoint)}")
    notes = []
    if unknown := sorted(raw.keys() - set(_KEYS)):
        notes.append(f"{OPTIONS_FILE}: {short_repr(unknown)} mean nothing here")
    if environment.names_packages(folder) and worker.python:
        notes.append(f"{environment.REQUIREMENTS_FILE} is not installed: {OPTIONS_FILE} names a python of its own")
    return worker, files, tuple(notes)


def _options(folder: Path) -> dict[str, Any]:
    """``snooze_model.json``, checked; empty when it is not there. Raises BundleError."""
    path = folder / OPTIONS_FILE
    try:
        raw = json.loads(path.read_bytes()) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{OPTIONS_FILE} is not JSON ({short_repr(str(error))})") from None
    if not isinstance(raw, dict):
        raise BundleError(f"{OPTIONS_FILE} must hold one JSON object, got {type(raw).__name__}")
    for key in ("entrypoint", "class", "tensor_format", "python"):
        if not isinstance(raw.get(key) or "", str):
            raise BundleError(f"{OPTIONS_FILE}: {key} must be a text, got {short_repr(raw[key])}")
    if (raw.get("tensor_format") or "raw") not in _FORMATS:
        raise BundleError(
            f"{OPTIONS_FILE}: tensor_format must be {' or '.join(_FORMATS)}, got {short_repr(raw['tensor_format'])}"
        )
    variables = raw.get("env") or {}
    if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
        raise BundleError(f"{OPTIONS_FILE}: env must map names to texts, got {short_repr(variables)}")
    return raw


def _tried(process: Process, name: str, contract: Contract) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model's contract, as declared or as the model itself tells it, and remarks."""
    limit = contract.max_batch_size
    asked = _ask(process, contract)
    declared = contract.inputs or tuple(ContractTensor(each, _DTYPE, (asked.width,)) for each in asked.inputs)
    spec = ModelSpec(
        name=name,
        engine=ENGINE,
        platform=_PLATFORM,
        inputs=tuple(input_spec(tensor, limit) for tensor in declared),
        outputs=(),
        programs=(),
        max_batch_size=limit,
    )
    if asked.problem is not None:
        assumed = contract.outputs or (ContractTensor(FLAT_OUTPUT, _DTYPE, (VARIABLE,)),)
        spec = replace(spec, outputs=tuple(input_spec(tensor, limit) for tensor in assumed))
        unknown = f"what it takes and gives is not known and was assumed; declare it in {CONTRACT_FILE}"
        return spec, (f"a trial run failed ({asked.problem}): {unknown}",)
    outputs = [OpenOutput(tensor.name, _DTYPE, tensor.dims) for tensor in contract.outputs] or asked.outputs
    draft = replace(spec, outputs=tuple(TensorSpec(output.name, _DTYPE, ()) for output in outputs))
    try:
        learned = trial.try_out(SnoozeEngine(process, draft), spec, outputs)
    except OutputError as error:
        raise BundleError(f"{CONTRACT_FILE} declares other outputs than the model gives: {error}") from None
    return learned.complete(spec), learned.notes


def _ask(process: Process, contract: Contract) -> _Asked:
    """Try ``predict`` on made-up rows until it is known what the contract leaves open."""
    if contract.inputs and contract.outputs:
        return _Asked((), VARIABLE, [])
    names = [tensor.name for tensor in contract.inputs] or [FLAT_INPUT]
    deadline = time.monotonic() + _ENOUGH_S
    ran: list[int] = []
    given: Mapping[str, Any] = {}
    problem = ""
    for width in _WIDTHS:
        try:
            given = _run(process, contract, names, width)
        except (EngineError, InvalidArgument, MemoryError) as error:
            problem = problem or str(error)
        else:
            ran.append(width)
        if len(ran) > 1 or time.monotonic() > deadline or (contract.inputs and ran):
            break
    if not ran:
        return _Asked(tuple(names), VARIABLE, [], problem)
    outputs = [OpenOutput(name, _DTYPE, None) for name in given]
    return _Asked(tuple(names), VARIABLE if len(ran) > 1 else ran[0], outputs)


def _run(process: Process, contract: Contract, names: list[str], width: int) -> Mapping[str, Any]:
    """What one row gives; ``names`` becomes what ``predict`` asks for, unless they are declared."""
    rng = np.random.default_rng(0)
    while True:
        tensors = contract.inputs or tuple(ContractTensor(name, _DTYPE, (width,)) for name in names)
        row = rows.made_up([input_spec(tensor, contract.max_batch_size) for tensor in tensors], width, rng, _SMALL)
        try:
            return process.predict(dict(zip(names, row, strict=True)))
        except InvalidArgument as error:
            missed = _MISSES.fullmatch(str(error))
            if contract.inputs or missed is None or missed[1] in names or len(names) == _MOST_INPUTS:
                raise
            names[:] = [missed[1]] if names == [FLAT_INPUT] else [*names, missed[1]]
