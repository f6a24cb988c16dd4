"""Reader of ONNX graphs: names, dtypes and shapes come from the file itself.

A bare ``.onnx`` is a model of its own; in a nereid folder the contract says what is served and is checked against
the graph, by name where the names agree and by position (nereid-server's rule) where they do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from converters import trial
from converters.contract import Contract, ContractTensor
from converters.external_data import external_data
from converters.prepared import Prepared
from converters.trial import OpenOutput
from nereid_backend.engines.onnx import Port, open_session, ports
from nereid_backend.errors import BundleError, SignatureError
from nereid_backend.spec import VARIABLE, ModelSpec, Program, TensorSpec

PLATFORM = "onnxruntime_onnx"
DEFAULT_MAX_BATCH_SIZE = 32


def read(path: Path, name: str, device: str, max_batch_size: int | None) -> Prepared:
    """Read a bare ``.onnx`` file.

    Triton batches when the first axis of every input and output is symbolic: by one common name, or, where the names
    differ, when a trial run shows that it counts independent rows. Otherwise the shapes are served as they are.
    Raises SignatureError, BundleError, EngineMissing.
    """
    inputs, outputs = ports(open_session(path))
    first_axes = [port.shape[0] if port.shape else 0 for port in (*inputs, *outputs)]
    batchable = bool(inputs) and not any(isinstance(axis, int) for axis in first_axes)
    if max_batch_size and not batchable:
        raise BundleError(
            f"{path.name}: --max-batch-size needs a symbolic first axis on every input and output; the graph has "
            f"{', '.join(f'{p.name} {list(p.shape)}' for p in (*inputs, *outputs))}"
        )
    files = {path.name: path, **external_data(path)}

    def spec(limit: int) -> ModelSpec:
        axis = 0 if limit else None
        return ModelSpec(
            name=name,
            engine="onnx",
            platform=PLATFORM,
            inputs=tuple(TensorSpec(p.name, p.dtype, _shape(p), axis) for p in inputs),
            outputs=tuple(TensorSpec(p.name, p.dtype, _shape(p), axis) for p in outputs),
            programs=(Program(path.name),),
            max_batch_size=limit,
            device=device,
        )

    limit = (DEFAULT_MAX_BATCH_SIZE if max_batch_size is None else max_batch_size) if batchable else 0
    batched = spec(limit)
    if limit < 2:
        return Prepared(batched, files)
    # Is the batch only a guess? Then an output that does not have it shows that the guess is wrong.
    guessed = max_batch_size is None and len({axis for axis in first_axes if axis is not None}) > 1
    try:
        learned = trial.learn(batched, path.parent, [OpenOutput(t.name, t.dtype, t.row_shape) for t in batched.outputs])
    except BundleError:
        if not guessed:
            raise
        learned = None
    if learned is None or (guessed and not learned.coalesce):
        return Prepared(spec(0), files, ("the first axes have different names and no common meaning: not batched",))
    return Prepared(learned.complete(batched), files, learned.notes)


def read_folder(path: Path, name: str, device: str, contract: Contract) -> Prepared:
    """Read the ONNX file of a nereid folder under its contract. Raises BundleError subclasses."""
    inputs, outputs = ports(open_session(path))
    bound_inputs = _bind("input", contract.inputs, inputs, path.name)
    bound_outputs = _bind("output", contract.outputs, outputs, path.name)
    limit = contract.max_batch_size
    size = _fixed_batch(path.name, [port for _, port in bound_inputs], limit)
    for tensor, port in bound_inputs:
        _check_port(path.name, tensor, port, batched=limit > 0)
    spec = ModelSpec(
        name=name,
        engine="onnx",
        platform=PLATFORM,
        inputs=tuple(input_spec(t, limit, p.name) for t, p in bound_inputs),
        outputs=(),
        programs=(Program(path.name, size),),
        max_batch_size=limit,
        batch_may_be_omitted=limit > 0,
        device=device,
    )
    open_outputs = [OpenOutput(t.name, p.dtype, t.dims, p.name) for t, p in bound_outputs]
    if not contract.flat:
        for tensor, port in bound_outputs:
            _check_dtype(path.name, "output", tensor, port)
    learned = trial.learn(spec, path.parent, open_outputs)
    return Prepared(learned.complete(spec), {path.name: path, **external_data(path)}, learned.notes)


def input_spec(tensor: ContractTensor, max_batch_size: int, binding: str = "") -> TensorSpec:
    """An input of a nereid folder: the contract's dims exclude the batch."""
    dims = tensor.dims or ()
    batched = max_batch_size > 0
    binding = "" if binding == tensor.name else binding
    return TensorSpec(
        tensor.name, tensor.dtype, (VARIABLE, *dims) if batched else dims, 0 if batched else None, binding
    )


def _shape(port: Port) -> tuple[int, ...]:
    if 0 in port.shape:
        raise SignatureError(
            f"ONNX tensor {port.name!r} has shape {list(port.shape)}; Triton has no dimension of size 0"
        )
    return tuple(axis if isinstance(axis, int) else VARIABLE for axis in port.shape)


def _bind(
    role: str, tensors: Sequence[ContractTensor], ports: Sequence[Port], file: str
) -> list[tuple[ContractTensor, Port]]:
    if len(tensors) != len(ports):
        raise SignatureError(
            f"{file}: the graph has {len(ports)} {role}s ({', '.join(p.name for p in ports)}), the contract declares "
            f"{len(tensors)}"
        )
    by_name = {port.name: port for port in ports}
    if all(tensor.name in by_name for tensor in tensors):
        return [(tensor, by_name[tensor.name]) for tensor in tensors]
    return list(zip(tensors, ports, strict=True))


def _check_dtype(file: str, role: str, tensor: ContractTensor, port: Port) -> None:
    if tensor.dtype != port.dtype:
        raise SignatureError(
            f"{file}: {role} {tensor.name!r} is {tensor.dtype} by the contract, the graph's {port.name!r} is "
            f"{port.dtype}; correct data_type"
        )


def _check_port(file: str, tensor: ContractTensor, port: Port, *, batched: bool) -> None:
    _check_dtype(file, "input", tensor, port)
    want = (VARIABLE, *(tensor.dims or ())) if batched else tensor.dims or ()
    got = _shape(port)
    if len(want) != len(got) or any(VARIABLE not in (w, g) and w != g for w, g in zip(want, got, strict=True)):
        raise SignatureError(
            f"{file}: input {tensor.name!r} has shape {list(want)} by the contract, the graph's {port.name!r} is "
            f"{list(got)}; correct the contract (its dims exclude the batch)"
        )


def _fixed_batch(file: str, ports: Sequence[Port], max_batch_size: int) -> int | None:
    """The graph's own fixed batch size, None when it takes any."""
    if not max_batch_size:
        return None
    sizes = {port.shape[0] for port in ports if port.shape and isinstance(port.shape[0], int)}
    if not sizes:
        return None
    size = min(sizes)
    if len(sizes) > 1 or max_batch_size > size:
        raise SignatureError(
            f"{file}: the graph takes exactly {sorted(sizes)} rows, the contract says max_batch_size {max_batch_size}; "
            "export the graph with a symbolic first axis or lower max_batch_size"
        )
    return size
