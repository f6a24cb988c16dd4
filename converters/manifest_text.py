"""Edits of manifest.yaml as text: one top-level line changes, everything else, comments included, stays as written."""

from __future__ import annotations

from collections.abc import Iterable

import yaml

from converters.manifest import MANIFEST_FILE
from converters.yaml12 import compose_yaml
from nereid_backend.errors import ManifestError

_ANCHOR = "format_version"
"""New lines go below this key's, which every manifest has."""


def with_value(text: str, key: str, value: str | None) -> str:
    """``text`` with the top-level ``key`` set to the plain or quoted string ``value``, or without it when None.

    Raises ManifestError where the text is written in a way that this cannot do.
    """
    edited = _edit(text, key, value)
    if edited is None or _reads(edited, key) != (value, _reads(text, key)[1]):
        wanted = f"add the line '{key}: {value}'" if value is not None else f"remove '{key}'"
        raise ManifestError(f"{MANIFEST_FILE}: is written in a way that cannot be edited here; {wanted} yourself")
    return edited


def _edit(text: str, key: str, value: str | None) -> str | None:
    root = _root(text)
    found = [(k, v) for k, v in root.value if k.value == key]
    anchors = [v for k, v in root.value if k.value == _ANCHOR]
    if len(found) > 1 or len(anchors) != 1 or not all(isinstance(v, yaml.ScalarNode) for v in anchors):
        return None
    if found and value is not None:
        node = found[0][1]
        start, end = node.start_mark.index, node.end_mark.index
        quote = node.style if isinstance(node, yaml.ScalarNode) and node.style in ("'", '"') else ""
        return f"{text[:start]}{quote}{value}{quote}{text[end:]}"
    if found:
        return _without(text, root, *found[0])
    if value is None:
        return text
    end = anchors[0].end_mark.index
    if root.flow_style:
        return f"{text[:end]}, {key}: {value}{text[end:]}"
    line_end = text.find("\n", end)
    before, after = (text[:line_end], text[line_end + 1 :]) if line_end >= 0 else (text, "")
    new_line = "\r\n" if before.endswith("\r") else "\n"
    indent = " " * root.start_mark.column
    return f"{before.removesuffix(chr(13))}{new_line}{indent}{key}: {value}{new_line}{after}"


def _without(text: str, root: yaml.MappingNode, key: yaml.Node, value: yaml.Node) -> str | None:
    if root.flow_style:
        previous = [v.end_mark.index for k, v in root.value if v.end_mark.index <= key.start_mark.index]
        removed = text[max(previous) : value.end_mark.index] if previous else "#"
        return None if "#" in removed else text[: max(previous)] + text[value.end_mark.index :]
    start = text.rfind("\n", 0, key.start_mark.index) + 1
    end = text.find("\n", value.end_mark.index) + 1 or len(text)
    comment = text[value.end_mark.index : end].strip()
    return text[:start] + (text[start : key.start_mark.index] + comment + "\n" if comment else "") + text[end:]


def _reads(text: str, key: str) -> tuple[str | None, str]:
    """The value of ``key``, and everything else as one canonical text (in which aliases stay aliases)."""
    root = _root(text)
    values: Iterable[str] = [v.value for k, v in root.value if k.value == key]
    rest = yaml.MappingNode(root.tag, [pair for pair in root.value if pair[0].value != key])
    return next(iter(values), None), yaml.serialize(rest, Dumper=yaml.SafeDumper)


def _root(text: str) -> yaml.MappingNode:
    try:
        root = compose_yaml(text)
    except (yaml.YAMLError, RecursionError):
        root = None
    if not isinstance(root, yaml.MappingNode):
        raise ManifestError(f"{MANIFEST_FILE}: is not one YAML mapping")
    return root
