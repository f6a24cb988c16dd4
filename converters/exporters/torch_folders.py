"""Export of torch modules as torch's own files, in a nereid folder: ``.pt2`` of torch.export, or TorchScript."""

from __future__ import annotations

import importlib
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from converters.bundle import Array
from converters.contract import ONE_NUMBER, Contract, ContractTensor
from converters.exporters import comparison
from converters.exporters.description import Exported
from converters.exporters.folder_writer import MODEL_STEM, write_folder
from converters.exporters.programs import compiled_sizes, dtype_token, input_tensor
from converters.exporters.provenance import Provenance
from converters.exporters.torch_calls import ModuleCall
from converters.exporters.torch_programs import exported_program
from converters.prepared import Prepared
from nereid_backend.errors import ExportError
from nereid_backend.spec import TensorSpec

SUFFIXES = {"pt2": ".pt2", "torchscript": ".pt"}


def export_file(
    call: ModuleCall,
    format: str,
    directory: Path | str,
    batch_sizes: Sequence[int] | None,
    *,
    axes: Mapping[str, str],
    origin: Provenance,
    tolerance: float | None,
    force: bool,
) -> Exported:
    """Write a folder whose file takes any number of rows up to the largest batch size, and run it beside the module.

    Raises BundleError subclasses; then nothing is written.
    """
    sizes = compiled_sizes(batch_sizes)
    most = sizes[-1]
    inputs = [
        input_tensor(name, array, axes.get(name), batched=most is not None)
        for name, array in zip(call.input_names, call.examples, strict=True)
    ]
    rows = call.rows(inputs, most)
    results = call.results(rows)
    if format == "torchscript" and (name := _one_number(inputs, results, most)) is not None:
        raise ExportError(f"{name!r} is one number, which TorchScript does not tell from [1]; use format='pt2'")
    contract = _contract(inputs, results, most)
    differences: dict[str, float] = {}

    def proof(prepared: Prepared) -> None:
        if [tensor.shape for tensor in prepared.spec.inputs] != [tensor.shape for tensor in inputs]:
            raise ExportError(
                f"{format} files cannot tell one number per row from [1]; use format='stablehlo' or 'pt2'"
            )
        tried = sizes if most is None else sorted({1, *sizes})  # type: ignore[type-var]
        trials = comparison.trials_of(call.run, inputs, call.examples, tried)
        differences.update(comparison.prove(prepared, trials, tolerance))

    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / f"{MODEL_STEM}{SUFFIXES[format]}"
        write = _write_program if format == "pt2" else _write_script
        write(call, rows, most, file)
        prepared = write_folder(
            Path(directory),
            contract,
            {file.name: file},
            allow_code=format == "pt2",
            provenance=origin.fields,
            patch=origin.patch,
            force=force,
            proof=proof,
        )
    return Exported(Path(directory), (), differences, prepared.notes)


def _one_number(inputs: Sequence[TensorSpec], results: Mapping[str, Array], most: int | None) -> str | None:
    """The first input that is one number (per row), or output that is one without a batch."""
    names = [tensor.name for tensor in inputs if len(tensor.shape) == (most is not None)]
    names += [name for name, array in results.items() if most is None and not array.shape]
    return next(iter(names), None)


def _contract(inputs: Sequence[TensorSpec], results: Mapping[str, Array], most: int | None) -> Contract:
    """What clients see. Raises ExportError where a tensor's first axis is not the batch."""
    declared = [(tensor.name, tensor.dtype, tensor.shape, tensor.batch_axis == 0) for tensor in inputs]
    given = [
        (name, dtype_token(f"output {name!r}", array.dtype), array.shape, array.shape[:1] == (most,))
        for name, array in results.items()
    ]
    for name, _, shape, batched in (*declared, *given):
        if most is not None and not batched:
            raise ExportError(
                f"the first axis of {name!r} (shape {list(shape)}) is not the batch, as a folder of this format needs "
                "it; use format='stablehlo' or batch_sizes=None"
            )

    def tensors(found: Sequence[tuple[str, str, tuple[int, ...], bool]]) -> tuple[ContractTensor, ...]:
        rows = [(name, dtype, shape if most is None else shape[1:]) for name, dtype, shape, _ in found]
        return tuple(ContractTensor(name, dtype, dims or ONE_NUMBER) for name, dtype, dims in rows)

    return Contract(tensors(declared), tensors(given), most or 0, flat=False)


def _write_program(call: ModuleCall, rows: Sequence[Array], most: int | None, file: Path) -> None:
    torch = importlib.import_module("torch")
    shapes = None
    if most is not None and most > 1:
        batch = torch.export.Dim("batch", max=most)
        shapes = (tuple({0: batch} for _ in rows),)
    torch.export.save(exported_program(call, rows, None, dynamic_shapes=shapes), str(file))


def _write_script(call: ModuleCall, rows: Sequence[Array], _most: int | None, file: Path) -> None:
    torch = importlib.import_module("torch")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", UserWarning)
        torch.jit.save(_scripted(torch, call, rows), str(file))


def _scripted(torch: Any, call: ModuleCall, rows: Sequence[Array]) -> Any:
    """The module with its branches where torch can compile them, else as the run on ``rows`` went."""

    def traced(module: Callable[..., Any]) -> Any:
        return torch.jit.trace(call.of(module).flat, call.tensors(rows), check_trace=False)

    with suppress(Exception):  # whatever its compiler cannot do with the module's code
        return traced(torch.jit.script(call.module))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", torch.jit.TracerWarning)
        script = traced(call.module)
    for warning in told:
        if issubclass(warning.category, torch.jit.TracerWarning):
            raise ExportError(
                f"forward makes Python values of tensors ({Path(warning.filename).name}:{warning.lineno}) and "
                "torch.jit.script cannot compile it, so other inputs might take another way; use format='stablehlo' or "
                "'pt2'"
            )
    return script
