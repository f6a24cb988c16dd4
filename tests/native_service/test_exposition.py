import re
from collections import Counter
from itertools import chain
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from native_service.envoy.settings import Admitted
from native_service.models.residence import Residence, Residences
from native_service.telemetry.calls import SECONDS, Calls
from native_service.telemetry.exposition import Counted, Loads, exposition
from native_service.telemetry.failures import SURFACES, UNARY
from native_service.telemetry.metrics import Failed
from nereid_backend.spec import ModelSpec

TRITON = """\
# HELP nv_inference_count Number of inferences performed (does not include cached requests)
# TYPE nv_inference_count counter
nv_inference_count{model="m",version="1"} 7
"""
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def admitted(*names: str) -> dict[str, Admitted]:
    return {name: Admitted(ModelSpec(name, "fake", "fake", (), (), ()), 4, away=name == "away") for name in names}


def counted(calls: Calls, answered_ms: dict[tuple[str, int], int], permits: dict[str, int] | None = None) -> Counted:
    return Counted(Failed({}, {}), answered_ms, permits or {}, 2, 7, {}, calls, 30, 100)


def series(models: dict[str, Admitted], shown: Counted, loads: Loads) -> Series:
    families = list(text_string_to_metric_families(exposition(TRITON, models, shown, loads)))
    assert len({family.name for family in families}) == len(families)
    samples = list(chain.from_iterable(family.samples for family in families))
    found = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def of(model: str, found: Series) -> Series:
    return {key: value for key, value in found.items() if dict(key[1]).get("model") == model and key[0][:3] != "nv_"}


def test_all_series_of_a_model_begin_at_zero_and_end_with_it() -> None:
    calls = Calls()
    calls.set_models(["m", "other"])
    idle = Residences({name: Residence("idle", False, None, None, 0, None, 0, 0, 0, False) for name in ("m", "other")})
    found = series(admitted("m", "other"), counted(calls, {}), Loads({}, {}, {"m": 0, "other": 0}, {}, idle))
    limits = {
        key: value for key, value in of("m", found).items() if key[0] in ("nereid_permits_limit", "nereid_model_up")
    }
    assert sorted(limits.values()) == [1, 4]
    assert {value for key, value in of("m", found).items() if key not in limits} == {0}
    assert {dict(labels).get("surface") for name, labels in of("m", found) if "duration" in name} == set(SURFACES)
    assert {(name, labels) for name, labels in found if ("model", "m") not in labels} - of("other", found).keys() == {
        ("nereid_connections", ()),
        ("nereid_connections_accepted_total", ()),
        ("nereid_checkpoint_buffered_bytes", ()),
        ("nereid_checkpoint_buffered_bytes_limit", ()),
        ("nereid_model_load_retries_total", ()),
        ("nereid_model_thrashing_total", ()),
        *(("nereid_model_deallocations_total", (("reason", reason),)) for reason in ("idle", "capacity", "oom")),
        *(key for key in found if key[0] == "nereid_build_info"),
    }
    calls.set_models(["other"])
    left = series(admitted("other"), counted(calls, {("m", 3): 1}, {"m": 1}), Loads({"m": 1}, {"m": 2}, {}))
    assert of("m", left) == {}
    calls.set_models(["other", "m"])
    again = series(admitted("m", "other"), counted(calls, {}), Loads({}, {}, {"m": 0, "other": 0}, {}, idle))
    assert again == found


def test_what_is_known_of_a_model_is_shown() -> None:
    calls = Calls()
    calls.set_models(["away"])
    shown = counted(calls, {}, {"away": 3, "gone": 1})
    found = series(admitted("away"), shown, Loads({"away": 1.5}, {"away": 2.5}, {"away": 9}))
    label = (("model", "away"),)
    names = [name for name, labels in found if labels == label and "checkpoint" not in name]
    assert {name.removeprefix("nereid_"): found[name, label] for name in names} == {
        "permits_in_use": 3,
        "permits_limit": 4,
        "model_up": 0,
        "model_restarts_total": 9,
        "model_conversion_duration_seconds": 1.5,
        "model_load_duration_seconds": 2.5,
    }  # fmt: skip


def test_how_a_model_comes_and_goes_is_shown() -> None:
    busy = Residence("busy", True, 1.0, 1.0, 4096, 300.0, 3, 0.25, 1.5, False)
    residences = Residences({"m": busy, "hidden": busy}, {"oom": 1, "idle": 2}, 3, 4)
    found = series(admitted("m"), counted(Calls(), {}), Loads({}, {}, {}, {}, residences))
    shown = {name: value for (name, labels), value in found.items() if labels == (("model", "m"),)}
    assert {name.removeprefix("nereid_model_"): shown[name] for name in shown if name.startswith("nereid_model_")} == {
        "up": 1, "loaded": 1, "memory_bytes": 4096, "cold_starts_total": 3, "cold_start_seconds_total": 1.5,
        "cold_start_last_seconds": 0.25,
    }  # fmt: skip
    gone = [found["nereid_model_deallocations_total", (("reason", each),)] for each in ("oom", "idle", "capacity")]
    assert (gone, found["nereid_model_load_retries_total", ()]) == ([1, 2, 0], 3)
    assert (found["nereid_model_thrashing_total", ()], of("hidden", found)) == (4, {})


@given(times_ms=st.lists(st.one_of(st.floats(0, 30), st.floats(0, 4_000_000)), max_size=50))
def test_what_envoy_cuts_off_puts_no_call_into_a_wrong_bucket(times_ms: list[float]) -> None:
    whole = [int(time) for time in times_ms]
    steps = [time - time % 10 ** max(0, len(str(time)) - 2) for time in whole]
    calls = Calls()
    calls.set_models(["m"])
    answered = {("m", step): count for step, count in Counter(steps).items()}
    found = series(admitted("m"), counted(calls, answered), Loads({}, {}, {}))
    name = "nereid_request_duration_seconds"
    for limit in SECONDS:
        below = found[f"{name}_bucket", (("le", str(limit)), ("model", "m"), ("surface", UNARY))]
        assert below == sum(time < limit * 1000 for time in times_ms)
    labels = (("model", "m"), ("surface", UNARY))
    assert found[f"{name}_count", labels] == len(times_ms)
    assert abs(found[f"{name}_sum", labels] - sum(times_ms) / 1000) <= sum(0.0005 + time / 20_000 for time in times_ms)


def test_the_page_lists_what_is_shown_and_nothing_else() -> None:
    calls = Calls()
    calls.set_models(["m"])
    shown = exposition(TRITON, admitted("m"), counted(calls, {}), Loads({"m": 1}, {"m": 1}, {"m": 0}, {"envoy": 0}))
    names = set(re.findall(r"^# TYPE (nereid_\w+) ", shown, re.MULTILINE))
    page = Path(__file__).parents[2] / "native_service" / "SERVING.md"
    table = page.read_text().partition("## Metrics")[2].partition("##")[0]
    assert set(re.findall(r"`(nereid_\w+)`", table)) == names
