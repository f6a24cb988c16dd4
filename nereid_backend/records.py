"""Frozen dataclasses from mappings that were JSON or YAML, checked by their annotations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from nereid_backend.errors import RecordError, short_repr

_T = TypeVar("_T")


def record(cls: type[_T], raw: Any, where: str = "") -> _T:
    """``raw`` as an instance of the dataclass ``cls``; ``where`` it lies, for messages. Raises RecordError."""
    if not isinstance(raw, Mapping):
        raise mismatch(where, "an object", raw)
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(map(str, set(raw) - set(known))):
        raise RecordError(f"unknown keys {unknown} in {cls.__name__}; known: {', '.join(known)}")
    for name, field in known.items():
        if field.default is MISSING and name not in raw:
            raise RecordError(f"{cls.__name__} has no {name!r}")
    kinds = get_type_hints(cls)
    return cls(**{name: _value(kinds[name], value, f"{where}.{name}".lstrip(".")) for name, value in raw.items()})


def mismatch(where: str, expected: str, got: Any) -> RecordError:
    return RecordError(f"{where or 'the whole'} must be {expected}, got {short_repr(got)}")


def _value(kind: Any, raw: Any, where: str) -> Any:
    """``raw`` as the annotated ``kind``: a dataclass, a tuple of one kind, a kind or None, a mapping, a scalar."""
    if is_dataclass(kind):
        return record(kind, raw, where)  # type: ignore[arg-type]
    inner, *_ = (*get_args(kind), kind)
    if get_origin(kind) is tuple:
        if not isinstance(raw, list):
            raise mismatch(where, "a list", raw)
        return tuple(_value(inner, item, f"{where}[{index}]") for index, item in enumerate(raw))
    if isinstance(kind, UnionType):
        return None if raw is None else _value(inner, raw, where)
    if get_origin(kind) is Mapping:
        if not isinstance(raw, dict):
            raise mismatch(where, "an object", raw)
        return raw
    if kind is float and type(raw) is int:
        return float(raw)
    if type(raw) is not kind:  # True is no number here
        raise mismatch(where, f"of type {kind.__name__}", raw)
    return raw
