"""Models that come and go, as the unmodified SnoozeML SDK sees it where there is room for one: the cases by number."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import snoozeml
from live import stubs
from serving import write_adder
from snoozing import ADM, Snoozing, infer_together, snoozing

pytestmark = pytest.mark.triton

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)
INPUT = {"input": ROWS}
CALLERS = 20
WAIT_S = 60
# It loads when, and if, a file beside the models says so; each load leaves a line.
MOODY = """
import time
from pathlib import Path

class Model:
    def load(self, model_dir, device):
        with Path({loads!r}).open("a") as file:
            file.write("one load\\n")
        while (mood := Path({mood!r}).read_text()) not in ("good", "bad"):
            time.sleep(0.05)
        if mood == "bad":
            raise ValueError("not in the mood")

    def predict(self, inputs):
        return {{"output": inputs["input"] + 1}}
"""


def make(models: Path) -> None:
    for name in ("a", "b", "brief"):
        write_adder(models / f"{name}.onnx")
    (models / "moody").mkdir()
    text = MOODY.format(loads=str(models.parent / "loads"), mood=str(models.parent / "mood"))
    (models / "moody" / "snooze_model.py").write_text(text)
    set_mood(models, "good")


@pytest.fixture(scope="module")
def snooze(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snoozing]:
    on_call = {"load": "first_request"}
    models = {
        "a": {"options": on_call},
        "b": {"options": on_call},
        "brief": {"options": {**on_call, "idle_timeout_s": 1}},
        "moody": {"options": {**on_call, "allow_code": True}},
    }
    residency = {"max_loaded_models": 1, "min_residency_s": 0}
    server = {"rest_addr": "127.0.0.1:0", "allow_model_control": True, "residency": residency}
    with snoozing(tmp_path_factory.mktemp("snooze"), models, server=server, make=make) as running:
        yield running


def set_mood(models: Path, mood: str) -> None:
    (models.parent / "mood").write_text(mood)


def loads(snooze: Snoozing) -> int:
    path = snooze.models.parent / "loads"
    return path.read_text().count("\n") if path.exists() else 0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "not reached"
        time.sleep(0.05)


def state(client: Any, name: str) -> str:
    return str(client.models.get(name).state.value)


def assert_adds_one(answer: Any) -> None:
    np.testing.assert_array_equal(answer.get_numpy("output"), ROWS + 1)


def test_a_pinned_model_outlives_its_idle_time_until_it_is_unpinned(sdk: Any) -> None:  # 14
    client = sdk()
    until(lambda: state(client, "brief") == "idle")
    assert client.models.pin("brief") == {"model_id": "brief", "status": "pinned", "pinned": True}
    gone = client.get_metrics().idle_deallocations_total
    pinned = time.monotonic()
    while time.monotonic() - pinned < 3:  # of its times
        info = client.models.get("brief")
        assert (info.pinned, info.is_loaded, info.state.value) == (True, True, "ready")
        time.sleep(0.2)
    assert client.models.unpin("brief") == {"model_id": "brief", "status": "unpinned", "pinned": False}
    until(lambda: client.get_metrics().idle_deallocations_total == gone + 1)
    info = client.models.get("brief")
    assert (info.pinned, info.is_loaded, info.state.value) == (False, False, "idle")


def test_the_one_place_goes_to_whom_is_called_unless_a_pinned_model_has_it(caller: Any) -> None:  # 16
    client = caller()
    assert_adds_one(client.infer("a", INPUT))
    gone = client.get_metrics().capacity_deallocations_total
    assert_adds_one(client.infer("b", INPUT))
    assert (state(client, "a"), client.models.get("b").is_loaded) == ("idle", True)
    assert client.get_metrics().capacity_deallocations_total == gone + 1
    client.models.pin("a")
    with pytest.raises(snoozeml.ResourceExhaustedError, match="all active models are busy") as caught:
        client.infer("b", INPUT)
    assert caught.value.retry_after == 5
    client.models.unpin("a")
    assert_adds_one(client.infer("b", INPUT))


def test_what_a_model_has_counted_is_kept_while_it_is_away(snooze: Snoozing) -> None:
    client = snooze.client()

    def rows() -> int:
        (found,) = re.findall(r'^nv_inference_count{model="a",version="1"} (\S+)$', client.metrics(), re.MULTILINE)
        return int(float(found))

    client.infer("a", INPUT)
    before = rows()
    for more in (1, 2):
        client.infer("a", INPUT)
        client.infer("b", INPUT)  # which takes its place at once
        assert (state(client, "a"), rows()) == ("idle", before + more * len(ROWS))
    snooze.close_clients()


def test_a_client_that_hangs_up_does_not_leave_half_of_an_unload(sdk: Any, snooze: Snoozing) -> None:
    client = sdk()
    host, port = snooze.served.state["rest"].split(":")
    for pause_s in (0.02, 0.04, 0.06, 0.1, 0.2):
        assert_adds_one(client.infer("a", INPUT))
        with socket.create_connection((host, int(port))) as hasty:
            hasty.sendall(f"POST /v1/models/a/unload HTTP/1.1\r\nhost: x\r\nx-api-key: {ADM}\r\n\r\n".encode())
            time.sleep(pause_s)
    client.models.unload("a")
    until(lambda: state(client, "a") == "idle" and not stubs(snooze.served, "a"))
    time.sleep(1)  # four looks for dead models
    assert (state(client, "a"), stubs(snooze.served, "a")) == ("idle", set())


def test_many_first_callers_wait_for_one_load(snooze: Snoozing, caller: Any) -> None:  # 19
    client, before = snooze.client(ADM), loads(snooze)
    set_mood(snooze.models, "wait")
    client.models.unload("moody")
    with ThreadPoolExecutor(1) as beside:
        calls = beside.submit(infer_together, caller(), [("moody", INPUT)] * CALLERS)
        try:
            until(lambda: state(client, "moody") == "loading" and loads(snooze) > before)
            assert not calls.done()
        finally:
            set_mood(snooze.models, "good")
        for answer in calls.result():
            assert_adds_one(answer)
    assert loads(snooze) == before + 1


def test_a_load_that_fails_is_told_and_tried_again_by_the_next_call(caller: Any, snooze: Snoozing) -> None:  # 20
    client, before = caller(), loads(snooze)
    client.models.unload("moody")
    set_mood(snooze.models, "bad")
    for tries in (1, 2):
        with pytest.raises((snoozeml.RuntimeInferenceError, snoozeml.UnsupportedArchitectureError)):
            client.infer("moody", INPUT)
        assert (state(client, "moody"), loads(snooze)) == ("idle", before + tries)
    set_mood(snooze.models, "good")
    assert_adds_one(client.infer("moody", INPUT))
    assert (client.models.get("moody").is_loaded, loads(snooze)) == (True, before + 3)
