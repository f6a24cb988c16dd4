"""Worker directories of SnoozeML: the model is a class in a process of its own."""

from __future__ import annotations

from pathlib import Path

from nereid_backend.engines import Array, parse_device
from nereid_backend.errors import EngineError, OutputError
from nereid_backend.scripts import SCRIPT_FOLDER
from nereid_backend.snooze.process import Process
from nereid_backend.spec import ModelSpec


class SnoozeEngine:
    """One process; tensors go by name."""

    def __init__(self, process: Process, spec: ModelSpec) -> None:
        self._process = process
        self._inputs = [tensor.artifact_name for tensor in spec.inputs]
        self._outputs = [tensor.artifact_name for tensor in spec.outputs]

    @classmethod
    def check_device(cls, device: str) -> None:
        parse_device(device)  # what is there, its own interpreter knows

    @classmethod
    def load(cls, spec: ModelSpec, directory: Path) -> SnoozeEngine:
        if spec.worker is None:
            raise EngineError(f"model {spec.name!r} is not a worker; convert it again")
        return cls(Process(spec.worker, directory / SCRIPT_FOLDER, spec.device), spec)

    def run(self, inputs: list[Array]) -> list[Array]:
        outputs = self._process.predict(dict(zip(self._inputs, inputs, strict=True)))
        if missing := [name for name in self._outputs if name not in outputs]:
            raise OutputError(f"predict gave {[*outputs]}, without {missing}")
        return [outputs[name] for name in self._outputs]

    def close(self) -> None:
        self._process.close()
