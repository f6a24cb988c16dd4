"""What the clients of an exported model see instead of the program's own tensors, and the hooks between the two."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from converters import durable
from converters.bundle import Array
from converters.exporters import comparison
from converters.prepared import Prepared, place
from converters.weights import digest, is_file_name
from nereid_backend.engines import engine_class
from nereid_backend.errors import EngineMissing, ExportError, NereidError
from nereid_backend.executor import Executor
from nereid_backend.pipeline import Pipeline
from nereid_backend.spec import VARIABLE, ModelSpec, TensorSpec
from nereid_backend.user_code import USER_CODE


@dataclass(frozen=True, slots=True)
class ClientSide:
    """Client specs and hooks of a bundle (see "Hooks" in nereid_backend/MODELS.md).

    ``inputs`` and ``outputs``, in wire order, may be left out where built-ins tell them. ``preprocess`` and
    ``postprocess`` are built-ins in the order they run, as a manifest declares them: ``{"softmax": {"input": "logits",
    "output": "probs"}}``. ``files`` are what the bundle holds beside its programs, by name, as a path or as content:
    what built-ins read, and ``hooks.py`` with functions of its own.

    ``example``, a request by tensor, is run through the hooks and the program before the bundle is put in its place;
    ``expected`` is what it has to give, for some outputs or all.
    """

    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()
    preprocess: Sequence[Mapping[str, Any]] = ()
    postprocess: Sequence[Mapping[str, Any]] = ()
    files: Mapping[str, Path | str | bytes] = field(default_factory=dict)
    example: Mapping[str, Any] = field(default_factory=dict)
    expected: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_hooks(self) -> bool:
        return bool(self.preprocess or self.postprocess or USER_CODE in self.files)

    def check(self, taken: re.Pattern[str]) -> None:
        """Raise ExportError for hooks without an example, and for files that are not there or have ``taken`` names."""
        if self.has_hooks and not self.example:
            raise ExportError("the hooks cannot be tried: there is no example; give what a client sends, by tensor")
        for name, source in self.files.items():
            if not is_file_name(name) or taken.fullmatch(name):
                raise ExportError(f"files have {name!r}, which is no name for a file beside a bundle's own; rename it")
            if not isinstance(source, bytes) and not Path(source).is_file():
                raise ExportError(f"files have {name!r} from {source}, which is no file; give a path or its content")

    def write_files(self, directory: Path) -> dict[str, str]:
        """Write the files into ``directory``; their SHA-256 by name. Raises OSError."""
        for name, source in self.files.items():
            if isinstance(source, bytes):
                durable.write_bytes(directory / name, source)
            else:
                place(Path(source), directory / name, link=False)
        return digests(directory, self.files)

    def prove(self, prepared: Prepared, tolerance: float | None) -> dict[str, float]:
        """Run the example as the server would and give the relative differences to what is expected, by output.

        Python hooks run, in this process. Raises ExportError, EngineMissing.
        """
        spec = prepared.spec
        arrays = _request(spec.client_inputs, self.example)
        if unknown := sorted(set(self.expected) - {tensor.name for tensor in spec.client_outputs}):
            raise ExportError(f"expected names {unknown}; clients get {[t.name for t in spec.client_outputs]}")
        with tempfile.TemporaryDirectory() as scratch:
            for number, stage in enumerate(prepared.stages or (prepared,)):
                directory = Path(scratch) / str(number)
                for name, source in stage.files.items():
                    place(source, directory / name, link=True)
                arrays = _run(stage.spec, directory, arrays)
        return {
            tensor.name: comparison.difference(
                tensor, arrays[tensor.name], np.asarray(self.expected[tensor.name], tensor.element.numpy),
                "the clients' example", tolerance,
            )
            for tensor in spec.client_outputs if tensor.name in self.expected
        }  # fmt: skip


PLAIN = ClientSide()
"""Clients see the program's own tensors."""


def digests(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of those files of ``directory`` that are there, by name."""
    return {name: digest(directory / name) for name in names if (directory / name).is_file()}


def _request(tensors: Sequence[TensorSpec], example: Mapping[str, Any]) -> dict[str, Array]:
    """The example as Triton lets it pass. Raises ExportError."""
    if set(example) != {tensor.name for tensor in tensors}:
        raise ExportError(f"the example has {sorted(example)}, clients send {[t.name for t in tensors]}; give each")
    arrays = {name: np.asarray(value) for name, value in example.items()}
    for tensor in tensors:
        array = arrays[tensor.name]
        fits = len(tensor.shape) == array.ndim and all(
            want in (VARIABLE, got) for want, got in zip(tensor.shape, array.shape, strict=True)
        )
        if array.dtype != tensor.element.numpy or not fits:
            raise ExportError(
                f"the example's {tensor.name!r} is {array.dtype}{list(array.shape)}, clients send "
                f"{tensor.dtype}{list(tensor.shape)}; correct one of them"
            )
    return arrays


def _run(spec: ModelSpec, directory: Path, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """What one model of the server, with its hooks, gives for a request, by name."""
    pipeline: Pipeline | None = None
    try:
        engine = engine_class(spec.engine).load(spec, directory)
        try:
            executor = Executor(spec, engine)
            pipeline = None if spec.hooks is None else Pipeline(spec, executor, directory)
            (result,) = (pipeline or executor).run([[arrays[tensor.name] for tensor in spec.client_inputs]])
        finally:
            engine.close()
            if pipeline is not None:
                pipeline.close()
        if isinstance(result, Exception):
            raise result
    except EngineMissing:
        raise
    except NereidError as error:
        cause = error.__cause__
        why = f"{error}" if cause is None else f"{error} ({type(cause).__name__}: {cause})"
        raise ExportError(f"the clients' example fails: {why}; nothing was written") from error
    return dict(zip((tensor.name for tensor in spec.client_outputs), result, strict=True))
