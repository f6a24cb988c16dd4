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
from nereid_backend.errors import NereidError, short_repr

__all__ = ["Arrays", "Call", "InvalidArgument", "NamedArray", "register_meta_model", "register_model"]

Array = np.ndarray[Any, Any]


class NamedArray(NamedTuple):
    """A tensor in wire order. Arrays that a function is given are read-only."""

    name: str
    array: Array


Arrays = Mapping[str, Array] | Iterable[tuple[str, Array]]
"""What a function may give: NamedArrays or other pairs, or a mapping of names to arrays."""


Hook = Callable[[list[NamedArray]], Arrays]
"""Preprocess or postprocess of one request."""


class Call(Protocol):
    """Runs a model that ``meta.calls`` declares; see :class:`nereid_backend.meta.Callees`."""

    def __call__(self, model: str, inputs: Arrays, outputs: Iterable[str] | None = None) -> list[NamedArray]: ...


MetaRun = Callable[[list[NamedArray], Call], Arrays]


def unchanged(arrays: list[NamedArray]) -> Arrays:
    """What a hook that was left out does."""
    return arrays


@dataclass(frozen=True, slots=True)
class ModelHooks:
    """What ``register_model`` was given."""

    preprocess: Hook = unchanged
    postprocess: Hook = unchanged


@dataclass(frozen=True, slots=True)
class MetaModel:
    """What ``register_meta_model`` was given."""

    run: MetaRun


registered: list[Any] = []
"""What the file being loaded has registered so far; :mod:`nereid_backend.user_code` empties it."""


def register_model(
    name: str | None = None,  # noqa: ARG001 - the folder is the name
    *,
    preprocess: Hook = unchanged,
    postprocess: Hook = unchanged,
) -> None:
    """Run ``preprocess`` on each request before the executable and ``postprocess`` on its results.

    ``name`` is for readers: the folder names the model. ``preprocess`` gets the client's tensors in the manifest's
    order and gives every executable input; what else it gives is dropped. ``postprocess`` gets the executable's
    outputs, rows of this request only, and gives every client output. Several requests are worked on at once, on
    several threads; copy what is kept beyond the call. A hook may raise InvalidArgument to refuse a request;
    everything else it raises is INTERNAL for that request, with the traceback in the log.
    """
    for hook in (preprocess, postprocess):
        if not callable(hook):
            raise TypeError(f"register_model needs functions, got {type(hook).__name__}")
    registered.append(ModelHooks(preprocess, postprocess))


def register_meta_model(name: str | None = None, *, run: MetaRun) -> None:  # noqa: ARG001 - the folder is the name
    """Answer the requests of this meta model with ``run(inputs, call)``.

    ``name`` is for readers: the folder names the model. ``inputs`` come in the manifest's order and stay
    valid. ``run`` may raise InvalidArgument to refuse a request.
    """
    if not callable(run):
        raise TypeError(f"register_meta_model needs a function as run, got {type(run).__name__}")
    registered.append(MetaModel(run))


def by_name(given: Any, what: str, error: type[NereidError]) -> dict[str, Array]:
    """``given`` as a dictionary of arrays. Raises ``error``, beginning with ``what``, for anything but named arrays."""
    try:
        pairs = list(given.items() if isinstance(given, Mapping) else given)
        arrays = {name: np.asarray(array) for name, array in pairs}
    except (TypeError, ValueError) as problem:
        raise error(f"{what} {short_repr(given)}, expected named arrays ({problem})") from None
    if not all(isinstance(name, str) for name in arrays):
        raise error(f"{what} names that are no text: {short_repr([*arrays])}")
    if len(arrays) != len(pairs):
        raise error(f"{what} a name twice: {short_repr([name for name, _ in pairs])}")
    return arrays
