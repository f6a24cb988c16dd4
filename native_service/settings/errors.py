"""Turns what pydantic found wrong with a settings file into lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nereid_backend.errors import short_repr

if TYPE_CHECKING:
    from pydantic import ValidationError

# pydantic's error type -> the rule in our words; {x} come from the error's own context.
_RULES = {
    "missing": "is required; add it",
    "extra_forbidden": "is not a known key; remove it or check the spelling",
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "tuple_type": "must be a list",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
}
# Where the value is absent or is a whole section, "got" would only repeat the file.
_WITHOUT_GOT = {"missing", "extra_forbidden"}
# A secret in clear may have been written in the place of anything else of that section, or of what names it.
_NEVER_SHOWN = {"auth", "key"}


def describe(path: Path, error: ValidationError) -> Iterator[str]:
    """One line per problem: file, key path, rule, what was found."""
    for problem in error.errors(include_url=False):
        kind, context = problem["type"], problem.get("ctx", {})
        if kind == "value_error":
            rule = str(context["error"])
        elif kind in _RULES:
            rule = _RULES[kind].format(**context)
        else:
            rule = f"is not valid ({problem['msg']})"
        key = _key(problem["loc"])
        # A rule about several keys sits on their section and names them itself.
        hidden = kind in _WITHOUT_GOT or _is_section(problem["input"]) or _may_be_secret(problem["loc"])
        got = "" if hidden else f", got {short_repr(problem['input'])}"
        yield f"{path}: {key} {rule}{got}" if key and not _is_rule_of_section(problem) else f"{path}: {rule}{got}"


def _may_be_secret(location: tuple[int | str, ...]) -> bool:
    return not _NEVER_SHOWN.isdisjoint(location)


def _is_rule_of_section(problem: Any) -> bool:
    return bool(problem["type"] == "value_error" and _is_section(problem["input"]))


def _is_section(value: Any) -> bool:
    return isinstance(value, dict)


def _key(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
