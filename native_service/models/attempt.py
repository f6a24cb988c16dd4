"""What a model was made of, and what of that may differ without making it anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, Self

from native_service.models.conversion import Source
from native_service.models.watch import Fingerprint
from native_service.settings import ModelSettings
from nereid_backend.spec import ModelSpec

# What a model need not be converted or loaded anew for, as its queue_capacity.
_ADMISSION_OPTIONS = ("time_limit_s", "required", "load", "idle_timeout_s", "min_residency_s", "pinned")


class Attempt(NamedTuple):
    """A source as it was in its folder, with the contracts of its callees when it is a meta model."""

    source: Source
    state: Fingerprint
    callees: Mapping[str, ModelSpec]

    def differs_in_admission(self, now: Self, spec: ModelSpec) -> bool:
        """Whether ``now`` is this, made into ``spec``, but for what is decided before calls reach the model."""
        old, new = self.source.settings, now.source.settings
        if spec.script is not None and old.queue_capacity != new.queue_capacity:
            return False  # its own files hold that number
        options = old.options.model_copy(update={key: getattr(new.options, key) for key in _ADMISSION_OPTIONS})
        settings = old.model_copy(update={"queue_capacity": new.queue_capacity, "options": options})
        return self._replace(source=replace(self.source, settings=settings)) == now


def callees_of(source: Source, others: Mapping[str, ModelSpec]) -> Mapping[str, ModelSpec]:
    """The contracts of those of ``others`` that ``source`` calls."""
    return {name: others[name].contract for name in source.calls or () if name in others}


def news_of_admission(old: ModelSettings, new: ModelSettings) -> Iterator[str]:
    """What is decided anew before calls reach the model, for people."""
    if old.queue_capacity != new.queue_capacity:
        yield f"queue_capacity is {new.queue_capacity} now, was {old.queue_capacity}"
    for key in _ADMISSION_OPTIONS:
        before, now = getattr(old.options, key), getattr(new.options, key)
        if before != now:
            yield f"options.{key} is {now} now, was {before}"
