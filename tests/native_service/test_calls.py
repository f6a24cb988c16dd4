from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest

from native_service.telemetry.calls import Call, Calls
from native_service.telemetry.failures import ASSISTED, CHECKPOINT
from nereid_backend.errors import InvalidArgument, ResourceExhausted, Unplanned


def context(*metadata: tuple[str, str]) -> Any:
    return SimpleNamespace(invocation_metadata=lambda: metadata)


def ending(watching: AbstractContextManager[Call], model: str, error: BaseException | None) -> BaseException | None:
    """What comes out of a call of ``model`` that ends with ``error``."""
    try:
        with watching as call:
            call.model = model
            if error is not None:
                raise error
    except BaseException as raised:  # noqa: BLE001 - whatever it is, it is what is asked for
        return raised
    return None


def measured(calls: Calls) -> dict[tuple[str, str], float]:
    samples = [sample for family in calls.histograms[0].collect() for sample in family.samples]
    return {
        (sample.labels["model"], sample.labels["surface"]): sample.value
        for sample in samples
        if sample.name.endswith("_count") and sample.value
    }


@pytest.mark.parametrize(
    ("error", "is_measured", "levels"),
    [
        (None, True, []),
        (InvalidArgument("no"), True, ["WARNING"]),
        (ResourceExhausted("full"), False, ["WARNING"]),
        (asyncio.CancelledError(), False, []),
    ],
)
def test_what_a_call_ends_with_decides_whether_it_is_measured_and_told(
    error: BaseException | None, is_measured: bool, levels: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    calls = Calls()
    calls.set_models(["m"])
    watching = calls.watched(ASSISTED, context(("x-request-id", "r" * 999)))
    assert ending(watching, "m", error) is error
    assert measured(calls) == ({("m", ASSISTED): 1} if is_measured else {})
    assert [record.levelname for record in caplog.records] == levels
    assert all(len(record.__dict__["fields"]["request_id"]) == 100 for record in caplog.records)


def test_a_model_that_is_not_served_is_told_and_not_measured(caplog: pytest.LogCaptureFixture) -> None:
    calls = Calls()
    calls.set_models(["m"])
    ending(calls.watched(CHECKPOINT, context()), "nobody's\n", InvalidArgument("no"))
    assert measured(calls) == {}
    assert caplog.records[0].__dict__["fields"]["model"] == "nobody's\n"


def test_a_bug_is_one_line_with_its_traceback_and_says_nothing_to_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    calls = Calls()
    raised = ending(calls.watched(CHECKPOINT, context()), "m", ZeroDivisionError("secret path /srv"))
    assert isinstance(raised, Unplanned)
    assert str(raised) == "internal error; the server's log has the details"
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "ZeroDivisionError" in record.getMessage()
    assert record.exc_info is not None
