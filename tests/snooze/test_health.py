"""``grpc.health.v1`` as the SnoozeML SDK asks it, on the real Triton: cases 1 and 2 of the specification."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import snoozeml
from serving import write_adder
from snoozing import Snoozing, snoozing

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def snooze(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snoozing]:
    folder = tmp_path_factory.mktemp("snooze")
    with snoozing(folder, {"adder": {}}, make=lambda models: write_adder(models / "adder.onnx")) as running:
        yield running


def test_health_is_told_without_credentials(sdk: Any) -> None:
    client = sdk(None)
    for service in ("", "snoozeml.v1.InferenceService", "inference.GRPCInferenceService"):
        assert client.grpc_health(service) is True


def test_the_health_of_a_name_nobody_knows_is_not_found(sdk: Any) -> None:
    with pytest.raises(snoozeml.ModelNotFoundError) as caught:
        sdk(None).grpc_health("nope")
    assert caught.value.grpc_code == "NOT_FOUND"
