"""Reader of ONNX graphs: names, dtypes and shapes come from the file itself."""

from __future__ import annotations

from pathlib import Path

from converters.artifact import Artifact
from converters.external_data import external_data
from nereid_backend.engines.onnx import open_session, ports

PLATFORM = "onnxruntime_onnx"


def read(path: Path) -> Artifact:
    """Read an ``.onnx`` file. Raises SignatureError, EngineMissing."""
    inputs, outputs = ports(open_session(path))
    return Artifact(
        file=path.name,
        engine="onnx",
        platform=PLATFORM,
        directory=path.parent,
        files={path.name: path, **external_data(path)},
        inputs=inputs,
        outputs=outputs,
        binds_by_name=True,
    )
