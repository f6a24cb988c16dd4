"""What is being done with each model and how it went last, for people who ask a running server."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nereid_backend import progress
from nereid_backend.errors import NereidError

_LOG = logging.getLogger("nereid.serve")


@dataclass
class ModelRecord:
    """``step`` is what is being done now, ``failure`` why the last attempt went wrong, ``loaded_s`` seconds since the
    epoch."""

    step: str | None = None
    failure: str | None = None
    loaded_s: float | None = None


class ModelRecords:
    """One record per name."""

    def __init__(self) -> None:
        self._records: dict[str, ModelRecord] = defaultdict(ModelRecord)

    def __getitem__(self, name: str) -> ModelRecord:
        return self._records[name]

    @contextmanager
    def converting(self, name: str) -> Iterator[None]:
        """Around the conversion of a model. What takes long is told in the log."""
        with self._step(name, "converting"):
            yield

    @contextmanager
    def loading(self, name: str) -> Iterator[None]:
        """Around the load of a model: after it the model is served, unless it raises."""
        with self._step(name, "loading"):
            yield
        self._records[name].failure = None
        self.loaded(name)

    def loaded(self, name: str) -> None:
        """The model has been loaded now."""
        self._records[name].loaded_s = time.time()

    def forget(self, name: str) -> None:
        self._records.pop(name, None)

    @contextmanager
    def _step(self, name: str, step: str) -> Iterator[None]:
        record = self._records[name]
        record.step = step
        try:
            with progress.told(_LOG, f"{step} {name}"):
                yield
        except NereidError as error:
            record.failure = str(error)
            raise
        finally:
            record.step = None
