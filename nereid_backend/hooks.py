"""What a bundle's ``hooks.py`` imports to say which of its functions the model runs.

A function gets and gives the named arrays of one request, never those of a batch, and is called for several requests
at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from nereid_backend.errors import InvalidArgument as InvalidArgument

__all__ = ["Arrays", "Call", "InvalidArgument", "NamedArray", "register_meta_model"]

Array = np.ndarray[Any, Any]


class NamedArray(NamedTuple):
    """A tensor in wire order. Arrays that a function is given are read-only and stay valid."""

    name: str
    array: Array


Arrays = Mapping[str, Array] | Iterable[tuple[str, Array]]
"""What a function may give: NamedArrays or other pairs, or a mapping of names to arrays."""


class Call(Protocol):
    """Runs a model that ``meta.calls`` declares; see :class:`nereid_backend.meta.Callees`."""

    def __call__(self, model: str, inputs: Arrays, outputs: Iterable[str] | None = None) -> list[NamedArray]: ...


MetaRun = Callable[[list[NamedArray], Call], Arrays]


@dataclass(frozen=True, slots=True)
class MetaModel:
    """What ``register_meta_model`` was given."""

    run: MetaRun


registered: list[Any] = []
"""What the file being loaded has registered so far; :mod:`nereid_backend.user_code` empties it."""


def register_meta_model(name: str | None = None, *, run: MetaRun) -> None:  # noqa: ARG001 - the folder is the name
    """Answer the requests of this meta model with ``run(inputs, call)``.

    ``name`` is for readers: the folder names the model. ``inputs`` come in the manifest's order. ``run`` may raise
    InvalidArgument to refuse a request.
    """
    if not callable(run):
        raise TypeError(f"register_meta_model needs a function as run, got {type(run).__name__}")
    registered.append(MetaModel(run))
