import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from native_service.envoy.listeners import FAILURE_FIELDS
from native_service.telemetry.failures import Failure, of_envoy, tell

LINE: dict[str, Any] = {
    "cluster": "model_m",
    "status": 3,
    "http_status": 200,
    "header": None,
    "trailer": "unexpected%20input%0A",
    "details": "via_upstream",
    "path": "/inference.GRPCInferenceService/ModelInfer",
    "id": " -",
    "request_id": "from-envoy",
    "ms": 12,
}

OWN_ANSWER = {"cluster": "service", "details": "overflow", "trailer": None, "id": " -", "status": 14}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Failure("m", "unary", "INVALID_ARGUMENT", "unexpected input\n", "from-envoy", 0.012)),
        ({"id": " own", "status": 13, "header": "x"}, Failure("m", "unary", "INTERNAL", "x", "own", 0.012)),
        # Envoy's own answers, for calls that never reached our service.
        (
            {**OWN_ANSWER, "path": "/inference.Nereid/Checkpoint"},
            Failure("", "checkpoint", "UNAVAILABLE", "overflow", "from-envoy", 0.012),
        ),
        (
            {**OWN_ANSWER, "path": "/a/stranger-s word", "cluster": None},
            Failure("", "another call", "UNAVAILABLE", "overflow", "from-envoy", 0.012),
        ),
        (
            {**OWN_ANSWER, "status": None, "http_status": 401, "cluster": "http_infer", "path": "/v2/models/m/infer"},
            Failure("", "assisted", "UNAUTHENTICATED", "overflow", "from-envoy", 0.012),
        ),
        (
            {**OWN_ANSWER, "status": None, "http_status": 503, "cluster": "http", "path": "/metrics"},
            Failure("", "another call", "UNAVAILABLE", "overflow", "from-envoy", 0.012),
        ),
        ({"cluster": "service"}, None),  # told by our service
        ({"cluster": "http_infer", "status": None, "http_status": 400}, None),
        ({"status": None}, None),  # the client went first
        ({"status": 2, "details": "http2.remote_reset", "trailer": None}, None),
    ],
)  # fmt: skip
def test_a_line_of_envoy_is_a_failure(changes: dict[str, Any], expected: Failure | None) -> None:
    assert LINE.keys() == FAILURE_FIELDS.keys()
    assert of_envoy(json.dumps({**LINE, **changes})) == expected


VALUES = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*LINE, "x"]), inner),
)


def lacks_a_field(line: str) -> bool:
    try:
        said = json.loads(line)
    except ValueError:
        return True
    return not isinstance(said, dict) or bool(LINE.keys() - said.keys())


@given(st.one_of(st.text(), VALUES.map(json.dumps)).filter(lacks_a_field))
def test_any_other_line_is_none(line: str) -> None:
    assert of_envoy(line) is None


@given(st.fixed_dictionaries(dict.fromkeys(LINE, VALUES)))
def test_a_line_of_any_values_raises_nothing(said: dict[str, Any]) -> None:
    of_envoy(json.dumps(said))


@pytest.mark.parametrize(("code", "level"), [("INTERNAL", "ERROR"), ("UNAVAILABLE", "ERROR"), ("NOT_FOUND", "WARNING")])
def test_a_failure_is_one_record_with_its_fields(code: str, level: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        tell(Failure("m", "unary", code, "x" * 9999, "id", 0.0015))
    (record,) = caplog.records
    assert record.levelname == level
    assert record.__dict__["fields"] == {
        "model": "m", "surface": "unary", "code": code, "request_id": "id", "duration_ms": 1.5,
    }  # fmt: skip
    assert len(record.getMessage()) < 700
