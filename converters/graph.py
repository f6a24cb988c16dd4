"""Reader of ONNX graphs: names, dtypes and shapes come from the file itself."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from converters.artifact import Artifact
from converters.external_data import external_data
from converters.messages import message_classes
from nereid_backend.engines.onnx import open_session, ports

PLATFORM = "onnxruntime_onnx"


def read(path: Path) -> Artifact:
    """Read an ``.onnx`` file. Raises SignatureError, EngineMissing."""
    beside = external_data(path)  # before ONNX Runtime opens what a stranger names
    inputs, outputs = ports(open_session(path))
    return Artifact(
        file=path.name,
        engine="onnx",
        platform=PLATFORM,
        directory=path.parent,
        files={path.name: path, **beside},
        inputs=inputs,
        outputs=outputs,
        binds_by_name=True,
    )


@cache
def _header_class() -> Any:
    messages = {
        "Model": [("ir_version", 1, "int64"), ("producer_name", 2, "string"), ("opset_import", 8, "Opset[]")],
        "Opset": [("domain", 1, "string"), ("version", 2, "int64")],
    }
    return message_classes("nereid.onnx_header", messages, "proto2")["Model"]


def versions(path: Path) -> dict[str, Any]:
    """What a readable ``.onnx`` file says it was made by and for; the operator sets by domain, ai.onnx when unnamed."""
    try:
        header = _header_class().FromString(path.read_bytes())
    except DecodeError:  # a format of ONNX Runtime's own
        return {}
    opsets = {opset.domain or "ai.onnx": opset.version for opset in header.opset_import}
    return {"onnx_ir_version": header.ir_version, "onnx_opsets": opsets, "onnx_producer": header.producer_name}
