"""YAML 1.2 booleans for manifests: ``shape: on`` is the axes o and n, not True.

PyYAML follows YAML 1.1, where on, off, yes, no, y and n are booleans. Here only true and false are. A number keeps its
own text when a version is meant: ``format_version: 2.10`` stays a number, as the format compares numbers by value.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_BOOLEAN_TAG = "tag:yaml.org,2002:bool"


class _Loader(yaml.SafeLoader):
    """SafeLoader with its own resolver table, so that yaml.safe_load elsewhere is untouched."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError):  # PyYAML's own, for 2024-99-99 or !!int before a word
            problem = f"the value is no {node.tag.rpartition(':')[2]}, quote it"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOLEAN_TAG]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOLEAN_TAG, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


def load_yaml(data: bytes | str) -> Any:
    """Parse one document. Raises yaml.YAMLError."""
    return yaml.load(data, Loader=_Loader)  # noqa: S506 - a SafeLoader with fewer booleans


def compose_yaml(text: str) -> yaml.Node | None:
    """The nodes of one document, which know where they stand in ``text``. Raises yaml.YAMLError."""
    node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    return node
