import asyncio

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from native_service.telemetry.metrics import Failed, Refusals, Tally, with_failures
from nereid_backend.errors import DeadlineExceeded, InvalidArgument, ModelUnavailable, OverLimit, ResourceExhausted

TEXT = """\
# HELP nv_inference_request_failure Number of failed inference requests, all batch sizes
# TYPE nv_inference_request_failure counter
nv_inference_request_failure{model="m.1-x_Y",reason="OTHER",version="1"} 3
nv_inference_request_failure{model="m.1-x_Y",reason="BACKEND",version="1"} 2
nv_inference_request_failure{model="m.1-x_Y",reason="CANCELED",version="1"} 1
nv_inference_request_failure{model="m.1-x_Y",reason="REJECTED",version="1"} 0
nv_inference_request_failure{model="m",reason="REJECTED",version="1"} 0
# HELP nv_inference_count Number of inferences performed (does not include cached requests)
# TYPE nv_inference_count counter
nv_inference_count{model="m.1-x_Y",version="1"} 7
"""


def failures(text: str) -> dict[tuple[str, str], float]:
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert any(sample.name.startswith("nv_inference_count") and sample.value == 7 for sample in samples)
    return {
        (sample.labels["model"], sample.labels["reason"]): sample.value
        for sample in samples
        if sample.name.startswith("nv_inference_request_failure")
    }


def test_each_status_raises_the_series_of_its_reason_and_its_model() -> None:
    name = "m.1-x_Y"
    by_status = {(name, 8): 10, (name, 3): 20, (name, 5): 1, (name, 14): 2, (name, 13): 5, (name, 2): 4}
    by_status |= {(name, None): 100, (name, 1): 100, (name, 4): 100, ("gone", 8): 100}
    by_reason = {(name, "OTHER"): 1000, (name, "CANCELED"): 2000, (name, "REJECTED"): 3000, ("gone", "OTHER"): 1}
    assert failures(with_failures(TEXT, Failed(by_status, by_reason))) == {
        (name, "OTHER"): 3 + 20 + 1 + 1000,
        (name, "BACKEND"): 11,  # Triton knows of two of them
        (name, "CANCELED"): 1 + 2000,
        (name, "REJECTED"): 10 + 3000,
        ("m", "REJECTED"): 0,
    }


def test_nothing_that_failed_changes_nothing() -> None:
    assert with_failures(TEXT, Failed({}, {})) == TEXT


def test_what_ended_a_call_is_its_reason() -> None:
    refusals = Refusals()
    for error in (InvalidArgument("x"), OverLimit("x"), ResourceExhausted("x"), DeadlineExceeded("x")):
        refusals.add("m", error)
    refusals.add("m", asyncio.CancelledError())
    refusals.add("m", ModelUnavailable("x"))
    assert refusals.counts == {("m", "OTHER"): 2, ("m", "REJECTED"): 1, ("m", "CANCELED"): 2, ("m", "BACKEND"): 1}


@given(
    lives=st.lists(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(1, 9)), min_size=1), max_size=4),
)
def test_a_tally_adds_up_over_the_lives_of_a_process(lives: list[list[dict[str, int]]]) -> None:
    tally: Tally[str] = Tally()
    expected: dict[str, int] = {}
    for life, increments in enumerate(lives):
        counts: dict[str, int] = {}
        for increment in increments:
            for key, n in increment.items():
                counts[key] = counts.get(key, 0) + n
                expected[key] = expected.get(key, 0) + n
            assert tally.total(life, counts) == expected


def test_a_counter_that_falls_within_a_life_has_begun_again() -> None:
    tally: Tally[str] = Tally()
    looks = [{"a": 5, "b": 1}, {"b": 2}, {"a": 1, "b": 2}, {"a": 3, "b": 2}]
    assert [tally.total(1, counts)["a"] for counts in looks] == [5, 5, 6, 8]
