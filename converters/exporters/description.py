"""What every exporter takes and gives: a model described in Python, and what became of it.

A description is what ``nereid export FILE.py:NAME`` exports: any object with an ``export`` method like that of
``Description``. The command knows no kinds; it passes what its user asked for, and says so when a description does not
take it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written. ``differences``: by output, the largest one to the model, relative to its largest value.

    ``batch_sizes`` are those compiled for; empty where a program takes any number of rows, or the examples' alone.
    """

    directory: Path
    batch_sizes: tuple[int, ...]
    differences: Mapping[str, float]
    notes: tuple[str, ...]


@runtime_checkable
class Description(Protocol):
    """A model with all that its export needs, such as ``JaxModel``."""

    def export(self, directory: Path | str, **options: Any) -> Exported:
        """Write the model at ``directory``, proved, or raise BundleError subclasses and leave what was there.

        Keyword options, each where the format has it: ``batch_sizes`` (a sequence, None for none), ``layout``,
        ``tolerance``, ``provenance`` (a mapping of further entries, None for none) and ``force``.
        """
        ...
