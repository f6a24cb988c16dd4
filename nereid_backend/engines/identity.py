"""Gives back what it gets: the executable of a process that runs hooks only."""

from __future__ import annotations

from pathlib import Path

from nereid_backend.engines import Array
from nereid_backend.spec import ModelSpec


class IdentityEngine:
    """Inputs are outputs, in order."""

    @classmethod
    def load(cls, spec: ModelSpec, directory: Path) -> IdentityEngine:  # noqa: ARG003 - nothing to open
        return cls()

    @classmethod
    def check_device(cls, device: str) -> None:
        """Any device will do."""

    def run(self, inputs: list[Array]) -> list[Array]:
        return inputs

    def close(self) -> None:
        """Nothing is held."""
