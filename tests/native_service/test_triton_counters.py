"""Triton's counters while its models come and go, on texts as it writes them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from native_service.telemetry.triton_counters import TritonCounters

HEADS = """\
# HELP nv_inference_count Number of inferences performed
# TYPE nv_inference_count counter
"""
GAUGE = """\
# HELP nv_inference_pending_request_count Instantaneous number of pending requests awaiting execution per-model.
# TYPE nv_inference_pending_request_count gauge
"""
CPU = "# HELP nv_cpu_utilization CPU\n# TYPE nv_cpu_utilization gauge\nnv_cpu_utilization 0.5\n"


def counted(**models: int) -> str:
    lines = (f'nv_inference_count{{model="{name}",version="1"}} {n}\n' for name, n in models.items())
    return HEADS + "".join(lines) if models else ""


def pending(**models: int) -> str:
    lines = (f'nv_inference_pending_request_count{{model="{name}",version="1"}} {n}\n' for name, n in models.items())
    return GAUGE + "".join(lines)


def test_what_triton_says_is_passed_on_as_it_is() -> None:
    text = counted(a=1, b=2) + pending(a=1) + CPU
    assert TritonCounters().complete(text, 0, {"a", "b"}) == text


def test_the_counters_of_a_model_stay_while_it_is_not_loaded_and_go_on_after() -> None:
    counters = TritonCounters()
    counters.complete(counted(a=5, b=1) + pending(a=1, b=0) + CPU, 0, {"a", "b"})
    assert counters.complete(pending() + CPU, 0, {"a", "b"}) == pending() + CPU + counted(a=5, b=1)
    assert counters.complete(counted(a=0), 0, {"a", "b"}) == counted(a=5, b=1)
    assert counters.complete(counted(a=2), 0, {"a", "b"}) == counted(a=7, b=1)


def test_the_counters_of_a_model_that_is_served_no_longer_end() -> None:
    counters = TritonCounters()
    counters.complete(counted(a=5, b=1), 0, {"a", "b"})
    assert counters.complete(counted(b=1), 0, {"b"}) == counted(b=1)
    assert counters.complete(counted(a=1, b=1), 0, {"a", "b"}) == counted(a=1, b=1)


def test_the_counters_of_a_model_that_nobody_is_told_of_are_left_alone() -> None:
    counters = TritonCounters()
    counters.complete(counted(hidden=5), 0, {"a"})
    assert counters.complete(counted(hidden=2), 0, {"a"}) == counted(hidden=2)


@given(st.lists(st.tuples(st.sampled_from(["count", "unload", "restart"]), st.integers(0, 2**40))))
def test_no_counter_falls_whatever_happens_to_the_model(steps: list[tuple[str, int]]) -> None:
    counters, life, now, ever = TritonCounters(), 0, 0, 0
    for what, n in [("count", 1), *steps]:
        if what == "count":
            now, ever = now + n, ever + n
        else:
            now, life = 0, life + (what == "restart")
        assert counters.complete(counted(a=now), life, {"a"}) == counted(a=ever)
