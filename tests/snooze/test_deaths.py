"""Calls that meet the end of Triton, and of the whole server, by both clients and protocols of the SDK: case 33."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import snoozeml
from serving import alive, write_adder
from snoozing import ADM, INF, Snoozing, snoozing

pytestmark = pytest.mark.triton

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)
WAIT_S = 120
SURFACES = [(kind, over) for kind in ("sync", "async") for over in ("grpc", "rest")]
# It loads unless the file "no-loads" is there, and answers unless "no-answers" is.
HELD = """
import time
from pathlib import Path

def wait(name):
    while (Path({folder!r}) / name).exists():
        time.sleep(0.02)

class Model:
    def load(self, model_dir, device):
        wait("no-loads")

    def predict(self, inputs):
        wait("no-answers")
        return {{"output": inputs["input"] + 1}}
"""


def make(models: Path) -> None:
    write_adder(models / "adder.onnx")
    (models / "held").mkdir()
    (models / "held" / "snooze_model.py").write_text(HELD.format(folder=str(models.parent)))


@pytest.fixture(scope="module")
def snooze(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snoozing]:
    models = {"adder": {}, "held": {"options": {"allow_code": True}}}
    server = {"rest_addr": "127.0.0.1:0"}
    with snoozing(tmp_path_factory.mktemp("snooze"), models, server=server, make=make) as running:
        yield running


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "not reached"
        time.sleep(0.05)


@contextmanager
def holding(snooze: Snoozing, what: str) -> Iterator[None]:
    """While the file ``what`` is there."""
    path = snooze.models.parent / what
    path.touch()
    try:
        yield
    finally:
        path.unlink()


@contextmanager
def waiting(snooze: Snoozing, clients: Sequence[Any]) -> Iterator[list[Future[Any]]]:
    """A call of each of ``clients`` that has come to the model and waits."""
    watching = snooze.client(ADM)

    def there() -> bool:
        found = re.search(r'^nereid_permits_in_use\{[^}]*model="held"[^}]*\} (\S+)$', watching.metrics(), re.MULTILINE)
        return found is not None and float(found[1]) == len(clients)

    with ThreadPoolExecutor(len(clients)) as pool, holding(snooze, "no-answers"):
        calls = [pool.submit(client.infer, "held", ROWS, timeout=300) for client in clients]
        until(lambda: there() or any(call.done() for call in calls))
        yield calls


def test_calls_that_meet_a_dead_triton_say_so_and_later_ones_are_answered(snooze: Snoozing) -> None:
    clients = {way: snooze.client(INF, kind=way[0], use_grpc=way[1] == "grpc") for way in SURFACES}
    with holding(snooze, "no-loads"):
        with waiting(snooze, list(clients.values())) as calls:
            os.kill(triton_of(snooze), signal.SIGKILL)
            for (_, over), call in zip(clients, calls, strict=True):
                error = call.exception(WAIT_S)
                # Over REST its client takes every 503 but two for a server that is full.
                kind = snoozeml.SnoozeConnectionError if over == "grpc" else snoozeml.ResourceExhaustedError
                assert (type(error), error.status_code) == (kind, 503)
        for client in clients.values():
            until(lambda: health(client) == {False})  # noqa: B023 - called here
            with pytest.raises(snoozeml.SnoozeError) as caught:
                client.infer("held", ROWS)
            assert caught.value.status_code == 503
            assert caught.value.grpc_code in ("UNAVAILABLE", None)
            assert client.health_live()
    for client in clients.values():
        until(lambda: health(client) == {True})  # noqa: B023
        for model in ("held", "adder"):
            np.testing.assert_array_equal(client.infer(model, ROWS).get_numpy("output"), ROWS + 1)


def test_calls_that_meet_a_dead_server_find_no_connection(snooze: Snoozing) -> None:
    clients = [snooze.client(INF, kind=kind, use_grpc=over == "grpc") for kind, over in SURFACES]
    with waiting(snooze, clients) as calls:
        processes = snooze.kill()
        for call in calls:
            assert type(call.exception(WAIT_S)) is snoozeml.SnoozeConnectionError
    for client in clients:
        with pytest.raises(snoozeml.SnoozeConnectionError):
            client.infer("held", ROWS)
        with pytest.raises(snoozeml.SnoozeConnectionError):
            client.health_live()
    until(lambda: not alive(processes))


def health(client: Any) -> set[bool]:
    """What is said over both protocols."""
    try:
        return {client.grpc_health(), client.health_ready()}
    except snoozeml.ResourceExhaustedError:  # which the SDK makes of REST's 503 here, too
        return {client.grpc_health(), False}


def triton_of(snooze: Snoozing) -> int:
    (pid,) = (
        pid
        for pid in snooze.served.descendants()
        if b"tritonserver\0" in (Path("/proc") / str(pid) / "cmdline").read_bytes()
    )
    return pid
