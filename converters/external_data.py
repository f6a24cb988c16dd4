"""Which files an ONNX model keeps its large tensors in.

The graph itself names them (``TensorProto.external_data``, key ``location``, relative to the model); file names are a
convention only. Field numbers are those of onnx.proto.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from google.protobuf.message import DecodeError

from converters.messages import message_classes
from nereid_backend.errors import SignatureError

_EXTERNAL = 1  # TensorProto.DataLocation.EXTERNAL


@cache
def _model_class() -> Any:
    messages = {
        "Model": [("graph", 7, "Graph"), ("functions", 25, "Function[]")],
        "Function": [("node", 7, "Node[]"), ("attribute_proto", 11, "Attribute[]")],
        "Graph": [("node", 1, "Node[]"), ("initializer", 5, "Tensor[]"), ("sparse_initializer", 15, "Sparse[]")],
        "Node": [("attribute", 5, "Attribute[]")],
        "Attribute": [
            ("t", 5, "Tensor"),
            ("g", 6, "Graph"),
            ("tensors", 10, "Tensor[]"),
            ("graphs", 11, "Graph[]"),
            ("sparse_tensor", 22, "Sparse"),
            ("sparse_tensors", 23, "Sparse[]"),
        ],
        "Sparse": [("values", 1, "Tensor"), ("indices", 2, "Tensor")],
        "Tensor": [("external_data", 13, "Entry[]"), ("data_location", 14, "int32")],
        "Entry": [("key", 1, "string"), ("value", 2, "string")],
    }
    return message_classes("nereid.onnx", messages, "proto2")["Model"]


def external_data(path: Path) -> dict[str, Path]:
    """The files the model needs beside itself, by their name relative to it. Raises SignatureError.

    A name that leads out of the model's folder is refused: a model from a stranger must not pick files here.
    """
    try:
        model = _model_class().FromString(path.read_bytes())
    except OSError as error:
        raise SignatureError(f"{path.name}: cannot be read ({error.strerror})") from None
    except DecodeError:
        return {}  # ONNX Runtime says what is wrong with it, or reads a format of its own
    files = {}
    for location in sorted({location for tensor in _tensors(model) for location in _locations(tensor)}):
        relative = PurePosixPath(location)
        if relative.is_absolute() or ".." in relative.parts or not relative.parts:
            raise SignatureError(f"{path.name}: external data {location!r} lies outside the model's folder")
        if not (path.parent / relative).is_file():
            raise SignatureError(f"{path.name}: external data {location!r} is missing; put it beside the model")
        files[str(relative)] = path.parent / relative
    return files


def _locations(tensor: Any) -> list[str]:
    if tensor.data_location != _EXTERNAL:
        return []
    return [entry.value for entry in tensor.external_data if entry.key == "location"]


def _tensors(model: Any) -> Iterator[Any]:
    yield from _of_graph(model.graph)
    for function in model.functions:
        yield from _of_attributes(function.attribute_proto)
        yield from _of_nodes(function.node)


def _of_graph(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    yield from _of_sparse(graph.sparse_initializer)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Any) -> Iterator[Any]:
    for node in nodes:
        yield from _of_attributes(node.attribute)


def _of_attributes(attributes: Any) -> Iterator[Any]:
    for attribute in attributes:
        yield from (attribute.t, *attribute.tensors)
        yield from _of_sparse((attribute.sparse_tensor, *attribute.sparse_tensors))
        for inner in (attribute.g, *attribute.graphs):
            yield from _of_graph(inner)


def _of_sparse(tensors: Any) -> Iterator[Any]:
    for tensor in tensors:
        yield from (tensor.values, tensor.indices)
