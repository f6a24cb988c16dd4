"""The model under load: what it takes, the requests for it, and that it answers them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from native_service.bench import payload
from native_service.bench.endpoint import NATIVE, Connection
from native_service.bench.payload import Request
from native_service.bench.server_times import Counters
from native_service.client.errors import BadRequest
from native_service.client.messages import Contract

# The first call of a batch size may compile.
_TRY_TIMEOUT_S = 300


class Target:
    """Raises CallFailed subclasses, from the start on for a model that is not there."""

    def __init__(
        self,
        connection: Connection,
        model: str,
        protocol: str,
        shapes: Mapping[str, Sequence[int]],
        arrays: Any,
    ) -> None:
        """``shapes``, ``arrays``: as :func:`payload.requests` takes them, an array for the only input, or None."""
        self._connection, self.model, self._native = connection, model, protocol == NATIVE
        self._metadata, config = connection.describe(model)
        self.inputs = payload.of_metadata(self._metadata, config)
        self._shapes = shapes
        arrays = {} if arrays is None else arrays
        self._arrays = arrays if isinstance(arrays, Mapping) else {self._only_input(): arrays}
        self._made: tuple[int, list[Request]] = 0, []

    @cached_property
    def _contract(self) -> Contract:
        return Contract.of_metadata(self._metadata)

    def _only_input(self) -> str:
        if len(self.inputs.tensors) != 1:
            names = ", ".join(tensor.name for tensor in self.inputs.tensors)
            raise BadRequest(f"model {self.model!r} has the inputs {names}; say which: --input TENSOR=FILE")
        return self.inputs.tensors[0].name

    def requests(self, rows: int) -> list[Request]:
        """Those of ``rows`` rows; the last ones that were made are kept."""
        if self._made[0] != rows:
            self._made = rows, payload.requests(self.inputs, rows, self._shapes, self._arrays, native=self._native)
        return self._made[1]

    def try_out(self, rows: int) -> float:
        """Look at a whole answer; the seconds of a second call, which finds everything warm."""
        request = self.requests(rows)[0]
        for _ in range(2):
            begun_s = time.monotonic()
            if isinstance(request, bytes):
                self._connection.try_infer(request, _TRY_TIMEOUT_S)
            else:
                self._connection.try_checkpoint(request, self._contract, _TRY_TIMEOUT_S)
        return time.monotonic() - begun_s

    def counters(self) -> Counters | None:
        return self._connection.counters(self.model)
