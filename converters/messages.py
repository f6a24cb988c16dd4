"""Protobuf message classes declared in code, for the few fields of foreign formats that are read here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_TYPE = descriptor_pb2.FieldDescriptorProto
SCALARS = {"string": _TYPE.TYPE_STRING, "int32": _TYPE.TYPE_INT32, "int64": _TYPE.TYPE_INT64, "bool": _TYPE.TYPE_BOOL}

Field = tuple[str, int, str]
"""Name, number, and a scalar's name or another message's; ``[]`` behind it means repeated."""


def message_classes(package: str, messages: Mapping[str, Sequence[Field]], syntax: str) -> dict[str, Any]:
    """A class for each message of ``messages``, in a private pool. Fields not declared are kept as unknown ones."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax=syntax)
    for message, fields in messages.items():
        descriptor = file.message_type.add(name=message)
        for name, number, kind in fields:
            base = kind.removesuffix("[]")
            descriptor.field.add(
                name=name,
                number=number,
                label=_TYPE.LABEL_OPTIONAL if base == kind else _TYPE.LABEL_REPEATED,
                type=SCALARS.get(base, _TYPE.TYPE_MESSAGE),
                type_name=None if base in SCALARS else f".{package}.{base}",
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in messages}
