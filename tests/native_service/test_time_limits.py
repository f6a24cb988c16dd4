"""Deadlines, time limits, processes that hang, on the real server: who waits is told in time, nothing runs in vain."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hooked_bundle import write_bundle
from live import Live, live, stubs
from serving import chunk, meta, raw_infer
from tritonclient.grpc import service_pb2

from native_service.envoy.scripts import PROCESS_DIED
from native_service.proto import inference_pb2 as pb

pytestmark = pytest.mark.triton

# The first number of the row is how long a run takes, in seconds; with a second one it holds the interpreter all the
# while, as a library that has lost itself would. The third one names the run.
HOOKS = """
import ctypes, time
from pathlib import Path
from nereid_backend.hooks import register_model

def preprocess(inputs):
    seconds, stubborn, name, _ = inputs[0].array[0]
    with open({file!r}, "a") as file:
        file.write(f"{{name:g}} ")
    if stubborn:
        ctypes.PyDLL(None).sleep(int(seconds))
    else:
        time.sleep(float(seconds))
    return inputs

register_model(preprocess=preprocess)
"""
SETTINGS = """
server: {bind_addr: '127.0.0.1:0', http_addr: '127.0.0.1:0', ml_backends_path: models}
models:
  - {name: free, device: cpu, queue_capacity: 4}
  - {name: limited, device: cpu, queue_capacity: 4, options: {time_limit_s: 1}}
"""
LIMIT_S, GRACE_S = 1, 2
# Far from what is measured and from what would be wrong.
SLACK_S = 5


class Sleepers:
    """The served models ``free`` and ``limited``, and what they have run."""

    def __init__(self, live: Live, file: Path) -> None:
        self.live, self._file = live, file
        self.address = live.served.state["address"]

    def ran(self) -> list[str]:
        return self._file.read_text().split()

    def ask(
        self, surface: str, model: str, seconds: float, *, name: int = 0, stubborn: bool = False, **call: Any
    ) -> str:
        """How the call ended: OK or the name of the code."""
        row = np.array([[seconds, stubborn, name, 0]], np.float32).tobytes()
        surfaces = {"unary": self._unary, "stream": self._stream, "checkpoint": self._checkpoint}
        try:
            return surfaces[surface](model, row, call)
        except grpc.RpcError as error:
            return str(error.code().name)

    def _unary(self, model: str, row: bytes, call: dict[str, Any]) -> str:
        raw_infer(self.address, model, {"x": ("FP32", [1, 4], row)}, **call)
        return "OK"

    def _stream(self, model: str, row: bytes, call: dict[str, Any]) -> str:
        request = service_pb2.ModelInferRequest(model_name=model)
        request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
        request.raw_input_contents.append(row)
        with grpc.insecure_channel(self.address) as channel:
            answers = channel.stream_stream(
                "/inference.GRPCInferenceService/ModelStreamInfer",
                request_serializer=service_pb2.ModelInferRequest.SerializeToString,
                response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
            )(iter([request]), **call)
            (answer,) = answers
        if "longer than its time limit of 1 s" in answer.error_message:
            return "DEADLINE_EXCEEDED"  # and the stream goes on
        return str(answer.error_message) or "OK"

    def _checkpoint(self, model: str, row: bytes, call: dict[str, Any]) -> str:
        with grpc.insecure_channel(self.address) as channel:
            answers = channel.stream_stream(
                "/inference.Nereid/Checkpoint",
                request_serializer=pb.CheckpointRequest.SerializeToString,
                response_deserializer=pb.CheckpointResponse.FromString,
            )(iter([meta(model), chunk([1, 4], row)]), **call)
            assert [*answers][-1].done
        return "OK"


@pytest.fixture(scope="module")
def sleepers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sleepers]:
    pytest.importorskip("jax")
    folder = tmp_path_factory.mktemp("limits")
    file = folder / "ran"
    file.touch()
    for name in ("free", "limited"):
        write_bundle(folder / "models" / name, HOOKS.format(file=str(file)))
    with live(folder, settings=SETTINGS) as serving:
        yield Sleepers(serving, file)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.monotonic()
    return call(), time.monotonic() - begun


SURFACES = pytest.mark.parametrize("surface", ["unary", "stream", "checkpoint"])


@SURFACES
def test_a_deadline_that_is_long_enough_or_absent_changes_nothing(sleepers: Sleepers, surface: str) -> None:
    assert sleepers.ask(surface, "free", 0.2) == "OK"
    assert sleepers.ask(surface, "free", 0.2, timeout=60) == "OK"
    assert sleepers.ask(surface, "limited", 0.2) == "OK"
    assert sleepers.ask(surface, "limited", 0.2, timeout=60) == "OK"


@SURFACES
def test_what_nobody_waits_for_is_dropped_before_it_runs(sleepers: Sleepers, surface: str) -> None:
    first, late, tiny, last = (1000 * (1 + ["unary", "stream", "checkpoint"].index(surface)) + n for n in range(4))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sleepers.ask, "unary", "free", 2, name=first)
        sleepers.live.until(lambda: str(first) in sleepers.ran())
        assert sleepers.ask(surface, "free", 0, name=late, timeout=0.3) == "DEADLINE_EXCEEDED"
        assert sleepers.ask(surface, "free", 0, name=tiny, timeout=0.005) == "DEADLINE_EXCEEDED"
        assert running.result() == "OK"
    assert sleepers.ask(surface, "free", 0, name=last) == "OK"
    ran = sleepers.ran()
    assert (str(first) in ran, str(late) in ran, str(last) in ran) == (True, False, True)


@SURFACES
def test_a_call_ends_at_the_time_limit_and_a_run_that_ends_by_itself_soon_is_left_alone(
    sleepers: Sleepers, surface: str
) -> None:
    processes = stubs(sleepers.live.served, "limited")
    code, seconds = timed(lambda: sleepers.ask(surface, "limited", LIMIT_S + 0.5))
    assert code == "DEADLINE_EXCEEDED"
    assert LIMIT_S - 0.1 < seconds < LIMIT_S + SLACK_S
    sleepers.live.until(lambda: sleepers.ask(surface, "limited", 0) == "OK")
    assert stubs(sleepers.live.served, "limited") == processes


def test_a_process_that_hangs_in_a_run_is_replaced_and_no_other_model_notices(sleepers: Sleepers) -> None:
    processes = stubs(sleepers.live.served, "limited")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(sleepers.ask, "unary", "free", LIMIT_S + GRACE_S + 2, stubborn=True)
        code, _ = timed(lambda: sleepers.ask("unary", "limited", 600, stubborn=True))
        assert code == "DEADLINE_EXCEEDED"
        sleepers.live.until(lambda: not processes & stubs(sleepers.live.served, "limited"))
        sleepers.live.until(lambda: sleepers.ask("unary", "limited", 0) == "OK")
        assert other.result() == "OK"  # it has no limit: a long run is what it is for


@pytest.mark.parametrize("surface", ["unary", "stream"])
def test_a_process_that_stands_still_in_a_call_answers_no_other(sleepers: Sleepers, surface: str) -> None:
    """Triton gives it up after a second or so; gone on with, it would answer the next call with this one's result."""
    name = 9000 + ["unary", "stream"].index(surface)
    processes = stubs(sleepers.live.served, "free")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sleepers.ask, surface, "free", 1, name=name)
        sleepers.live.until(lambda: str(name) in sleepers.ran())
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        ended = waiting.result()
        assert ended in ("UNAVAILABLE", PROCESS_DIED)
    sleepers.live.until(lambda: not processes & stubs(sleepers.live.served, "free"))
    sleepers.live.until(lambda: sleepers.ask("unary", "free", 0) == "OK")
