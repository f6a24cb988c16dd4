"""What Triton says of a model that it has loaded, for one that it has not: from the specification and its own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from nereid_backend.errors import ModelUnavailable
from nereid_backend.spec import VARIABLE, ModelSpec

VERSION = "1"
_CONFIG_FILE = "config.pbtxt"


def metadata(spec: ModelSpec) -> Any:
    """The ModelMetadataResponse; shapes have Triton's batch in front."""
    answer = pb.ModelMetadataResponse(name=spec.name, versions=[VERSION], platform=spec.platform)
    for told, tensors in ((answer.inputs, spec.client_inputs), (answer.outputs, spec.client_outputs)):
        for tensor in tensors:
            batch = [VARIABLE] if spec.max_batch_size else []
            told.add(name=tensor.name, datatype=tensor.element.kserve, shape=[*batch, *spec.dims(tensor)])
    return answer


def configuration(directory: Path) -> Any:
    """The ModelConfigResponse of the model in ``directory``, without what Triton fills in when it loads it.

    Raises ModelUnavailable when it has gone meanwhile.
    """
    try:
        text = (directory / _CONFIG_FILE).read_text(encoding="utf-8")
    except OSError:
        raise ModelUnavailable(f"model {directory.name!r} is being changed, retry later") from None
    return pb.ModelConfigResponse(config=text_format.Parse(text, model_config_pb2.ModelConfig()))
