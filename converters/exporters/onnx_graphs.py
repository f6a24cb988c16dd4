"""Export of ONNX models: the graph as it is, in a nereid folder, proved beside ONNX Runtime.

Names, types and axes are the graph's own. The batch is the first axis, which the graph leaves open on every input and
output; without such an axis the shapes are served as they are, one request to a run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from converters import artifact, contract, graph, rows
from converters.artifact import Artifact
from converters.by_onnx import first_line
from converters.contract import Contract
from converters.exporters import comparison
from converters.exporters.comparison import Trial
from converters.exporters.description import Exported
from converters.exporters.folder_writer import MODEL_STEM, write_folder
from converters.exporters.provenance import Provenance, collect
from converters.prepared import Prepared, Source
from nereid_backend import dtypes
from nereid_backend.engines import Array, Port, import_library
from nereid_backend.engines.onnx import CPU_PROVIDER, OnnxEngine
from nereid_backend.errors import ExportError
from nereid_backend.spec import VARIABLE, ModelSpec, TensorSpec

FILE = f"{MODEL_STEM}.onnx"
_VARIABLE_SIZES = (2, 5)

Run = Callable[[list[Array]], Sequence[Array]]


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """An ``.onnx`` file, or an ``onnx.ModelProto``.

    ``example_inputs`` is one array, a sequence in the graph's order or a mapping by name; None stands for made-up
    values, which a model that looks up ids may refuse. ``max_batch_size``: the most rows of a run (default 32), also
    for a graph made for one number of rows, whose batches are then padded; 0 serves the shapes as they are.
    """

    model: Any
    example_inputs: Any = None
    max_batch_size: int | None = None

    def export(
        self,
        directory: Path | str,
        *,
        tolerance: float | None = None,
        provenance: Mapping[str, Any] | None = MappingProxyType({}),
        force: bool = False,
    ) -> Exported:
        """See ``export_onnx``."""
        with _on_disk(self.model) as path:
            found = graph.read(path)
            declared = _contract(found, self.max_batch_size)
            origin = Provenance({})
            if provenance is not None:
                facts = {"source_framework": "onnx", "converter": "nereid export_onnx", **graph.versions(path)}
                origin = collect(path, ("onnxruntime", "numpy"), {**facts, **provenance})
            differences: dict[str, float] = {}

            def proof(prepared: Prepared) -> None:
                trials = _trials(_original(path, prepared.spec), prepared.spec, self.example_inputs)
                differences.update(comparison.prove(prepared, trials, tolerance))

            prepared = write_folder(
                Path(directory),
                declared,
                _files(found),
                provenance=origin.fields,
                patch=origin.patch,
                force=force,
                proof=proof,
            )
        return Exported(Path(directory), prepared.spec.batch_sizes, differences, prepared.notes)


def export_onnx(
    model: Any,
    directory: Path | str,
    example_inputs: Any = None,
    *,
    max_batch_size: int | None = None,
    tolerance: float | None = None,
    provenance: Mapping[str, Any] | None = MappingProxyType({}),
    force: bool = False,
) -> Exported:
    """Write an ONNX model as a nereid folder and run it beside ONNX Runtime itself. See OnnxModel for the arguments.

    ``tolerance`` is for floating-point outputs, relative to the largest value (default: 1e-5 for f32,
    ``comparison.TOLERANCE``). Entries of ``provenance`` are added to what is collected; None writes none. Raises
    BundleError subclasses, EngineMissing; then nothing is written.
    """
    described = OnnxModel(model, example_inputs, max_batch_size)
    return described.export(directory, tolerance=tolerance, provenance=provenance, force=force)


@contextmanager
def _on_disk(model: Any) -> Iterator[Path]:
    """The file of a model. Raises ExportError."""
    if isinstance(model, str | Path):
        if not Path(model).is_file():
            raise ExportError(f"{model} is not there or no file; give an .onnx file")
        yield Path(model)
        return
    if not hasattr(model, "SerializeToString") or not hasattr(model, "graph"):
        raise ExportError(f"a model of type {type(model).__name__} was given, expected an .onnx file or a ModelProto")
    try:
        content = model.SerializeToString()
    except Exception as error:  # of a class that depends on the protobuf library: more than 2 GiB
        raise ExportError(
            f"the model cannot be written to one file ({error}); save it with external data and give the file"
        ) from error
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / FILE
        path.write_bytes(content)
        yield path


def _files(found: Artifact) -> dict[str, Source]:
    """The graph under our own name, and its external data under the names that it gives them."""
    beside = {name: source for name, source in found.files.items() if name != found.file}
    if FILE in beside:
        raise ExportError(f"the graph keeps tensors in a file {FILE!r}, the name of the graph itself here; rename it")
    return {FILE: found.files[found.file], **beside}


def _contract(found: Artifact, max_batch_size: int | None) -> Contract:
    """What is served. Raises BundleError subclasses."""
    ports = (*(found.inputs or ()), *(found.outputs or ()))
    if texts := [port.name for port in ports if port.dtype == dtypes.BYTES.token]:
        raise ExportError(
            f"{texts[0]!r} is a tensor of texts, which a nereid folder cannot declare; serve the .onnx file itself"
        )
    if max_batch_size and (size := _fixed_rows(ports)) is not None:
        if max_batch_size > size:
            raise ExportError(f"max_batch_size is {max_batch_size}, the graph was made for {size} rows; lower it")
        return contract.contract_of(_of_rows(found, max_batch_size))
    return contract.contract_of(artifact.serve_as_is(found, MODEL_STEM, "cpu", max_batch_size).spec)


def _fixed_rows(ports: Sequence[Port]) -> int | None:
    """The number of rows that the graph was made for, None when it is open or there are none."""
    sizes = {port.shape[0] if port.shape else None for port in ports}
    size = sizes.pop() if len(sizes) == 1 else None
    return size if isinstance(size, int) else None


def _of_rows(found: Artifact, max_batch_size: int) -> ModelSpec:
    def tensors(ports: Sequence[Port] | None) -> tuple[TensorSpec, ...]:
        shapes = [tuple(axis if isinstance(axis, int) else VARIABLE for axis in port.shape[1:]) for port in ports or ()]
        return tuple(
            TensorSpec(port.name, port.dtype, (VARIABLE, *shape), 0)
            for port, shape in zip(ports or (), shapes, strict=True)
        )

    return ModelSpec(
        name=MODEL_STEM,
        engine=found.engine,
        platform=found.platform,
        inputs=tensors(found.inputs),
        outputs=tensors(found.outputs),
        programs=(),
        max_batch_size=max_batch_size,
    )


def _original(path: Path, spec: ModelSpec) -> Run:
    """The model in ONNX Runtime as it comes, tensors bound by the names in the graph."""
    ort = import_library("onnx")
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what it refuses is told by us
    session = ort.InferenceSession(str(path), options, providers=[CPU_PROVIDER])
    if any(tensor.dtype == "bf16" for tensor in (*spec.inputs, *spec.outputs)):
        return OnnxEngine(session, spec).run  # numpy has no such type
    inputs, outputs = [t.artifact_name for t in spec.inputs], [t.artifact_name for t in spec.outputs]
    return lambda arrays: session.run(outputs, dict(zip(inputs, arrays, strict=True)))


def _trials(run: Run, spec: ModelSpec, given: Any) -> list[Trial]:
    sizes = comparison.sizes_to_try(spec)
    try:
        if given is not None:
            return comparison.trials_of(run, spec.inputs, comparison.examples_of(spec, given), sizes)
        tried = [
            (f"made-up inputs{'' if size is None else f' at batch size {size}'}", _made_up(spec, size, variable))
            for size in sizes
            for variable in _VARIABLE_SIZES
        ]
        return [Trial(what, inputs, list(run(inputs))) for what, inputs in tried]
    except ExportError:
        raise
    except Exception as error:  # onnxruntime raises a dozen unrelated classes of its own here
        what, hint = (
            ("made-up inputs", "give example_inputs") if given is None else ("the example inputs", "check them")
        )
        raise ExportError(f"the model does not run on {what} ({first_line(error)}); {hint}") from error


def _made_up(spec: ModelSpec, size: int | None, variable: int) -> list[Array]:
    """Rows of all kinds beside each other."""
    rng = np.random.default_rng(variable)
    made = [rows.made_up(spec.inputs, variable, rng, 1 + index % (rows.KINDS - 1)) for index in range(size or 1)]
    return [np.concatenate(arrays) if size is not None else arrays[0] for arrays in zip(*made, strict=True)]
