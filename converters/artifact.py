"""A model file and what it says about itself, and how it is served: as it is, or under a folder's contract.

Every kind of file has a reader that gives an Artifact. In a nereid folder the contract says what is served and is
checked against the artifact, by name where the names agree and by position (nereid-server's rule) where they do not.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from converters import trial
from converters.contract import ONE_NUMBER, Contract, ContractTensor
from converters.prepared import Prepared, Source, place
from converters.trial import OpenOutput
from nereid_backend.engines import Port
from nereid_backend.errors import BundleError, SignatureError
from nereid_backend.spec import VARIABLE, ModelSpec, Program, TensorSpec

DEFAULT_MAX_BATCH_SIZE = 32


@dataclass(frozen=True, slots=True)
class Artifact:
    """``inputs`` and ``outputs`` are None when the file does not tell them (TorchScript).

    ``file`` is the program. ``directory`` holds it and what it needs beside it; None when ``files`` only can write
    them. ``max_rows`` is the artifact's own bound on its first axis. ``sizes_from``: rows are padded to this size,
    twice, four times it and so on; None when any number of rows runs as it is. ``binds_by_name``: its engine feeds
    tensors by name, not in the order of ``inputs``. ``trial_device``: where it can be tried out; a model may be
    converted on another machine than it is served on, so that is the CPU wherever the file allows it.
    """

    file: str
    engine: str
    platform: str
    directory: Path | None
    files: Mapping[str, Source]
    inputs: tuple[Port, ...] | None = None
    outputs: tuple[Port, ...] | None = None
    max_rows: int | None = None
    sizes_from: int | None = None
    binds_by_name: bool = False
    trial_device: str = "cpu"
    notes: tuple[str, ...] = ()

    @contextmanager
    def on_disk(self) -> Iterator[Path]:
        """A directory from which an engine can load it."""
        if self.directory is not None:
            yield self.directory
            return
        with tempfile.TemporaryDirectory() as scratch:
            for name, source in self.files.items():
                place(source, Path(scratch) / name, link=True)
            yield Path(scratch)

    def programs(self, max_batch_size: int, fixed_size: int | None) -> tuple[Program, ...]:
        """What to run for batches of up to ``max_batch_size`` rows, or of the one size the file was made for."""
        if fixed_size is not None or self.sizes_from is None or not max_batch_size:
            return (Program(self.file, fixed_size),)
        doubled = (self.sizes_from * 2**power for power in range(max_batch_size.bit_length()))
        sizes = [size for size in doubled if size < max_batch_size]
        return tuple(Program(self.file, size) for size in (*sizes, max_batch_size))


def positional_names(role: str, count: int) -> list[str]:
    """Names for tensors that have none: ``input`` alone, ``input_0``, ``input_1``, ... together."""
    return [role] if count == 1 else [f"{role}_{index}" for index in range(count)]


def serve_as_is(
    artifact: Artifact,
    name: str,
    device: str,
    max_batch_size: int | None,
    default_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
) -> Prepared:
    """Serve an artifact under its own signature.

    Triton batches when the first axis of every input and output is symbolic: by one common name, or, where the names
    differ, when a trial run shows that it counts independent rows. Otherwise the shapes are served as they are.
    ``default_batch_size`` is the limit of what can be batched where ``max_batch_size`` is None. Raises SignatureError,
    BundleError, EngineMissing.
    """
    inputs, outputs = artifact.inputs, artifact.outputs
    if inputs is None or outputs is None:
        raise BundleError(
            f"{artifact.file} does not say what it takes and gives; put it into a folder with "
            "model_inference.textproto, which does"
        )
    first_axes = [port.shape[0] if port.shape else 0 for port in (*inputs, *outputs)]
    batchable = bool(inputs) and not any(isinstance(axis, int) for axis in first_axes)
    if max_batch_size and not batchable:
        raise BundleError(
            f"{artifact.file}: --max-batch-size needs a symbolic first axis on every input and output; the graph has "
            f"{', '.join(f'{p.name} {list(p.shape)}' for p in (*inputs, *outputs))}"
        )
    _check_rows(artifact, "--max-batch-size", max_batch_size or 0)

    def spec(limit: int) -> ModelSpec:
        return _own_spec(artifact, name, device, inputs, outputs, limit)

    default = min(default_batch_size, artifact.max_rows or default_batch_size)
    limit = (default if max_batch_size is None else max_batch_size) if batchable else 0
    batched = spec(limit)
    if limit < 2:
        return Prepared(batched, artifact.files, artifact.notes)
    # Is the batch only a guess? Then an output that does not have it shows that the guess is wrong.
    guessed = max_batch_size is None and len({axis for axis in first_axes if axis is not None}) > 1
    open_outputs = [OpenOutput(t.name, t.dtype, t.row_shape) for t in batched.outputs]
    try:
        with artifact.on_disk() as directory:
            learned = trial.learn(batched, directory, open_outputs, artifact.trial_device)
    except BundleError:
        if not guessed:
            raise
        learned = None
    if learned is None or (guessed and not learned.coalesce):
        note = "the first axes have different names and no common meaning: not batched"
        return Prepared(spec(0), artifact.files, (*artifact.notes, note))
    return Prepared(learned.complete(batched), artifact.files, (*artifact.notes, *learned.notes))


def _own_spec(
    artifact: Artifact, name: str, device: str, inputs: Sequence[Port], outputs: Sequence[Port], limit: int
) -> ModelSpec:
    """The specification of an artifact under its own signature, batched up to ``limit`` rows; 0: not batched."""
    axis = 0 if limit else None
    return ModelSpec(
        name=name,
        engine=artifact.engine,
        platform=artifact.platform,
        inputs=tuple(TensorSpec(p.name, p.dtype, _shape(p), axis) for p in inputs),
        outputs=tuple(TensorSpec(p.name, p.dtype, _shape(p), axis) for p in outputs),
        programs=artifact.programs(limit, None),
        max_batch_size=limit,
        device=device,
    )


def serve_under(artifact: Artifact, name: str, device: str, contract: Contract) -> Prepared:
    """Serve an artifact under a folder's contract. Raises BundleError subclasses."""
    inputs = _bind(artifact, "input", contract.inputs, artifact.inputs)
    outputs = _bind(artifact, "output", contract.outputs, artifact.outputs)
    limit = contract.max_batch_size
    _check_rows(artifact, "max_batch_size", limit)
    inputs, outputs = (
        [(_as_scalar(tensor, port, limit), port) for tensor, port in bound] for bound in (inputs, outputs)
    )
    bound_ports = [port for _, port in inputs if port is not None]
    size = _fixed_batch(artifact.file, bound_ports, limit)
    for tensor, port in inputs:
        _check_port(artifact.file, tensor, port, batched=limit > 0)
    spec = ModelSpec(
        name=name,
        engine=artifact.engine,
        platform=artifact.platform,
        inputs=tuple(input_spec(t, limit, p) for t, p in inputs),
        outputs=(),
        programs=artifact.programs(limit, size),
        max_batch_size=limit,
        batch_may_be_omitted=limit > 0,
        device=device,
    )
    if not contract.flat:
        for tensor, port in outputs:
            _check_dtype(artifact.file, "output", tensor, port)
    open_outputs = [_open_output(t, p, contract) for t, p in outputs]
    with artifact.on_disk() as directory:
        learned = trial.learn(spec, directory, open_outputs, artifact.trial_device)
    return Prepared(learned.complete(spec), artifact.files, (*artifact.notes, *learned.notes))


def input_spec(tensor: ContractTensor, max_batch_size: int, port: Port | None = None) -> TensorSpec:
    """An input of a nereid folder: the contract's dims exclude the batch."""
    dims = tensor.dims or ()
    batched = max_batch_size > 0
    return TensorSpec(
        tensor.name,
        tensor.dtype,
        (VARIABLE, *dims) if batched else dims,
        0 if batched else None,
        _binding(tensor, port),
    )


def _open_output(tensor: ContractTensor, port: Port | None, contract: Contract) -> OpenOutput:
    if port is not None:
        return OpenOutput(tensor.name, port.dtype, tensor.dims, _binding(tensor, port))
    # A flat contract's data_type does not bind the output (nereid-server: "whatever the model made").
    return OpenOutput(tensor.name, None if contract.flat else tensor.dtype, tensor.dims)


def _as_scalar(tensor: ContractTensor, port: Port | None, max_batch_size: int) -> ContractTensor:
    """A tensor whose dims are [1] because a contract, like Triton, has no other way to write one number (per row)."""
    if tensor.dims == ONE_NUMBER and port is not None and len(port.shape) == (1 if max_batch_size else 0):
        return replace(tensor, dims=())
    return tensor


def _binding(tensor: ContractTensor, port: Port | None) -> str:
    return "" if port is None or port.name == tensor.name else port.name


def _shape(port: Port) -> tuple[int, ...]:
    if 0 in port.shape:
        raise SignatureError(f"tensor {port.name!r} has shape {list(port.shape)}; Triton has no dimension of size 0")
    return tuple(axis if isinstance(axis, int) else VARIABLE for axis in port.shape)


def _bind(
    artifact: Artifact, role: str, tensors: Sequence[ContractTensor], ports: Sequence[Port] | None
) -> list[tuple[ContractTensor, Port | None]]:
    if ports is None:
        return [(tensor, None) for tensor in tensors]
    if len(tensors) != len(ports):
        raise SignatureError(
            f"{artifact.file}: the graph has {len(ports)} {role}s ({', '.join(p.name for p in ports)}), the contract "
            f"declares {len(tensors)}"
        )
    declared = {tensor.name: tensor for tensor in tensors}
    if declared.keys() != {port.name for port in ports}:
        return list(zip(tensors, ports, strict=True))
    if artifact.binds_by_name:
        by_name = {port.name: port for port in ports}
        return [(tensor, by_name[tensor.name]) for tensor in tensors]
    return [(declared[port.name], port) for port in ports]


def _check_rows(artifact: Artifact, key: str, max_batch_size: int) -> None:
    if artifact.max_rows is not None and max_batch_size > artifact.max_rows:
        raise BundleError(
            f"{artifact.file}: {key} {max_batch_size} is more than the {artifact.max_rows} rows it was made for; "
            "lower it, or export the model again"
        )


def _check_dtype(label: str, role: str, tensor: ContractTensor, port: Port | None) -> None:
    if port is not None and tensor.dtype != port.dtype:
        raise SignatureError(
            f"{label}: {role} {tensor.name!r} is {tensor.dtype} by the contract, the graph's {port.name!r} is "
            f"{port.dtype}; correct data_type"
        )


def _check_port(label: str, tensor: ContractTensor, port: Port | None, *, batched: bool) -> None:
    if port is None:
        return
    _check_dtype(label, "input", tensor, port)
    want = (VARIABLE, *(tensor.dims or ())) if batched else tensor.dims or ()
    got = _shape(port)
    if len(want) != len(got) or any(VARIABLE not in (w, g) and w != g for w, g in zip(want, got, strict=True)):
        raise SignatureError(
            f"{label}: input {tensor.name!r} has shape {list(want)} by the contract, the graph's {port.name!r} is "
            f"{list(got)}; correct the contract (its dims exclude the batch)"
        )


def _fixed_batch(label: str, ports: Sequence[Port], max_batch_size: int) -> int | None:
    """The graph's own fixed batch size, None when it takes any."""
    if not max_batch_size:
        return None
    sizes = {port.shape[0] for port in ports if port.shape and isinstance(port.shape[0], int)}
    if not sizes:
        return None
    size = min(sizes)
    if len(sizes) > 1 or max_batch_size > size:
        raise SignatureError(
            f"{label}: the graph takes exactly {sorted(sizes)} rows, the contract says max_batch_size {max_batch_size}"
            "; export the graph with a symbolic first axis or lower max_batch_size"
        )
    return size
