"""One model that is served."""

from __future__ import annotations

from dataclasses import dataclass

from native_service.envoy.settings import Admitted, Place
from native_service.models.conversion import Source
from nereid_backend.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model; ``triton_models`` are those behind it in the order in which they load, itself the last.

    It is public unless its source is hidden: then it is there for meta models only. An idle one has its files in
    Triton's repository and is not loaded.
    """

    source: Source
    spec: ModelSpec
    triton_models: tuple[str, ...]
    place: Place = Place.TRITON

    def loads(self, *, at_once: bool) -> list[tuple[str, tuple[str, ...]]]:
        """What to load in order, each with the models that Triton loads with it: those of an ensemble ``at_once``.

        Loaded one by one they would be loaded twice, the second time with the ensemble; but what serves already is
        replaced one by one, so that a failure can be undone.
        """
        if at_once and self.spec.stages:
            return [(self.spec.name, self.triton_models[:-1])]
        return [(model, ()) for model in self.triton_models]

    def admitted(self, *, away: bool) -> Admitted:
        settings, options = self.source.settings, self.source.settings.options
        return Admitted(self.spec, settings.queue_capacity, away, options.required, options.time_limit_s, self.place)
