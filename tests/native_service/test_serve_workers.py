"""Worker directories of SnoozeML through the whole path: converted, served, and asked at the public address."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as tritonclient
from serving import Served, alive, infer, input_tensor
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.triton

MODEL = """
import os, time
import numpy as np

class Model:
    def load(self, model_dir, device):
        self.weights = np.loadtxt(os.path.join(model_dir, "weights.txt"), dtype=np.float32)

    def predict(self, inputs):
        rows = inputs["rows"]
        what = {7: ValueError("seven is no number"), 8: MemoryError("no room"), 9: RuntimeError("broken")}
        for value in rows[:, 0]:
            if value in what:
                raise what[value]
            if value == 10:
                os._exit(5)
            if value == 11:
                time.sleep(1000)
        return {"sums": rows @ self.weights, "pid": np.full(len(rows), os.getpid())}
"""
WEIGHTS = np.float32([[1, 2], [3, 4], [5, 6]])


def worker_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "snooze_model.py").write_text(MODEL)
    np.savetxt(folder / "weights.txt", WEIGHTS)
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("workers")
    worker_folder(folder / "models" / "sums")
    (folder / "nereid.yaml").write_text(
        "server: {bind_addr: '127.0.0.1:0', ml_backends_path: models}\n"
        "models:\n"
        "  - {name: sums, device: cpu, queue_capacity: 16, options: {allow_code: true, time_limit_s: 2}}\n"
    )
    server = Served(folder, "--config", str(folder / "nereid.yaml"), log=folder / "log")
    yield server
    worker = {process_of(server)}
    assert server.end()[0] == 0
    assert not alive(worker)


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with tritonclient.InferenceServerClient(served.state["address"]) as client:
        yield client


def process_of(served: Served) -> int:
    with tritonclient.InferenceServerClient(served.state["address"]) as client:
        return answered_by(client)


def answered_by(client: Any) -> int:
    return int(infer(client, "sums", rows=np.ones((1, 3), np.float32))["pid"][0, 0])


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def refused(client: Any, *first: float) -> tuple[str, str]:
    """Code and text of the error for rows that begin with ``first``."""
    rows = np.zeros((len(first), 3), np.float32)
    rows[:, 0] = first
    with pytest.raises(InferenceServerException) as caught:
        client.infer("sums", [input_tensor("rows", rows)])
    return caught.value.status(), caught.value.message()


def test_a_worker_is_served_with_the_names_and_the_width_that_its_code_asks_for(client: Any) -> None:
    metadata = client.get_model_metadata("sums")
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [("rows", "FP32", [-1, 3])]
    assert [t.name for t in metadata.outputs] == ["sums", "pid"]
    rows = np.arange(12, dtype=np.float32).reshape(4, 3) / 8
    np.testing.assert_allclose(infer(client, "sums", rows=rows)["sums"], rows @ WEIGHTS)


def test_each_kind_of_failure_has_its_code_and_the_model_answers_on(client: Any) -> None:
    before = answered_by(client)
    code, text = refused(client, 7)
    assert (code, "ValueError: seven is no number" in text) == ("StatusCode.INVALID_ARGUMENT", True)
    code, text = refused(client, 8)
    assert (code, "out of memory" in text) == ("StatusCode.UNAVAILABLE", True)
    code, text = refused(client, 9)
    assert (code, "RuntimeError: broken" in text) == ("StatusCode.INTERNAL", True)
    assert answered_by(client) == before


def test_a_refused_row_fails_no_request_that_shares_its_run(client: Any) -> None:
    good = [np.full((1, 3), number, np.float32) for number in range(1, 7)]
    bad = np.full((1, 3), 7, np.float32)
    results: dict[int, Any] = {}

    def keep(number: int) -> Any:
        return lambda result, error: results.__setitem__(number, error or result.as_numpy("sums"))

    for number, rows in enumerate([*good, bad]):
        client.async_infer("sums", [input_tensor("rows", rows)], keep(number))
    wait_for(lambda: len(results) > len(good))
    assert isinstance(results.pop(len(good)), InferenceServerException)
    for number, rows in enumerate(good):
        np.testing.assert_allclose(results[number], rows @ WEIGHTS)


def test_a_worker_that_ends_in_a_call_is_started_again(client: Any) -> None:
    before = answered_by(client)
    code, text = refused(client, 10)
    assert (code, "ended with code 5" in text) == ("StatusCode.INTERNAL", True)
    assert answered_by(client) != before


def test_a_worker_that_is_killed_while_idle_costs_no_call(client: Any) -> None:
    before = answered_by(client)
    os.kill(before, signal.SIGKILL)
    # Reaped: a zombie's other threads may still hold its sockets.
    wait_for(lambda: not (Path("/proc") / str(before)).exists())
    assert answered_by(client) != before


def test_a_worker_that_hangs_is_killed_when_the_time_limit_is_over_and_the_model_is_back(client: Any) -> None:
    before = answered_by(client)
    assert refused(client, 11)[0] == "StatusCode.DEADLINE_EXCEEDED"
    wait_for(lambda: not alive({before}))

    def is_back() -> bool:
        try:
            return answered_by(client) != before
        except InferenceServerException:
            return False

    wait_for(is_back)
