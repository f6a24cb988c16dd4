"""Models whose process dies are noticed, kept from callers and started again: first with fakes, then for real."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hooked_bundle import RAGGED_HOOKS, RAGGED_TENSORS, write_bundle
from live import CONTROLLED, ROW, Live, code_of, listing, live, stubs, write_adding_twice
from serving import input_tensor, our_shared_memory
from tritonclient.utils import InferenceServerException

from native_service.children import restarts
from native_service.triton import watchdog
from native_service.triton.stubs import SHARED_MEMORY
from native_service.triton.watchdog import Watchdog
from nereid_backend.errors import ModelLoadError, TritonUnavailable


class FakeModels:
    """Triton, catalogue and control of one model, ``m``: what was done, in order; ``bad`` loads fail."""

    def __init__(self) -> None:
        self.is_dead = False
        self.bad = self.blind = 0
        self.done: list[str] = []
        self.bad_restarts = 0
        self.stuck: set[str] = set()
        self.hangs = False
        self.asked = 0
        self.answers: Callable[[int], bool] = lambda _: True
        self.is_running = True
        self.ended = asyncio.Event()

    def find_lost(self) -> set[str]:
        if self.blind:
            self.blind -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self.stuck

    async def is_ready(self) -> bool:
        self.asked += 1
        return self.answers(self.asked)

    def kill_hung(self) -> list[str]:
        if self.hangs:
            self.hangs, self.is_dead = False, True
            return ["model 'm': a run goes on"]
        return []

    async def wait(self) -> str:
        await self.ended.wait()
        return "tritonserver ended with code -9"

    async def drop(self) -> None:
        self.done.append("dropped")
        self.is_running, self.is_dead = False, True

    async def restart(self) -> None:
        self.done.append("restarted")
        if self.bad_restarts:
            self.bad_restarts -= 1
            raise TritonUnavailable("tritonserver ended with code 1 while starting")
        self.ended.clear()
        self.stuck, self.is_running, self.is_dead = set(), True, True

    async def restore(self) -> None:
        self.done.append("told")

    async def ends(self) -> None:
        self.is_running, self.is_dead = False, True
        self.ended.set()
        while not self.is_running or self.is_dead:
            await original_sleep(0)

    def find_dead(self) -> list[str]:
        return ["m"] if self.is_dead else []

    async def route_dead(self) -> None:
        self.done.append("routed away")

    async def revive(self, name: str) -> None:
        self.done.append(f"loaded {name}")
        if self.bad:
            self.bad -= 1
            raise ModelLoadError("no such luck")
        self.is_dead = False

    async def dies(self) -> None:
        self.is_dead = True
        while self.is_dead:
            await original_sleep(0)


original_sleep = asyncio.sleep


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the watchdog has waited for between loads; it does not really wait."""
    waited: list[float] = []

    async def sleep(pause_s: float) -> None:
        if pause_s not in (watchdog._LOOK_S, watchdog._QUESTION_S):
            waited.append(pause_s)
        await original_sleep(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return waited


def watched(scenario: Callable[[FakeModels], Any]) -> FakeModels:
    async def inside() -> FakeModels:
        models: Any = FakeModels()
        watching = asyncio.create_task(Watchdog(models, models, models, models.restore).watch())
        async with asyncio.timeout(20):
            await scenario(models)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        return models  # type: ignore[no-any-return]

    return asyncio.run(inside())


def test_a_dead_model_is_routed_away_before_it_is_loaded_and_at_once(pauses: list[float]) -> None:
    models = watched(lambda models: models.dies())
    assert (models.done, pauses) == (["routed away", "loaded m"], [0])


def test_a_look_that_fails_for_want_of_descriptors_is_not_the_last(pauses: list[float]) -> None:
    async def scenario(models: FakeModels) -> None:
        models.blind = 3
        while models.blind:
            await original_sleep(0)
        await models.dies()

    assert watched(scenario).done == ["routed away", "loaded m"]
    assert pauses == [watchdog._BLIND_S] * 3 + [0]


def test_a_model_that_dies_again_and_again_is_put_off_for_longer_and_longer(pauses: list[float]) -> None:
    async def scenario(models: FakeModels) -> None:
        for _ in range(10):
            await models.dies()

    watched(scenario)
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_model_that_has_lived_for_a_while_is_started_again_at_once(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "_STEADY_S", 0)

    async def scenario(models: FakeModels) -> None:
        for _ in range(3):
            await models.dies()

    watched(scenario)
    assert pauses == [0, 0, 0]


def test_a_load_that_fails_is_tried_again_with_the_same_pauses(
    pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(models: FakeModels) -> None:
        models.bad = 3
        await models.dies()

    models = watched(scenario)
    assert (pauses, models.done) == ([0, 1, 2, 4], ["routed away", *["loaded m"] * 4])
    assert caplog.text.count("no such luck") == 3


def test_a_model_that_hangs_is_made_dead_and_started_again(
    pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(models: FakeModels) -> None:
        models.hangs = True
        while "loaded m" not in models.done:
            await original_sleep(0)

    models = watched(scenario)
    assert models.done == ["routed away", "loaded m"]
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "model 'm': a run goes on",
        "model 'm': its process has died; it is started again now",
    ]


def test_a_triton_that_dies_is_started_again_with_its_models_and_nobody_says_they_died(
    pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    models = watched(lambda models: models.ends())
    assert (models.done, pauses) == (["dropped", "routed away", "restarted", "told", "loaded m"], [0])
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "tritonserver ended with code -9; it is started again now, with all its models"
    ]


def test_a_load_that_hangs_in_triton_for_good_costs_one_restart_and_no_second(
    pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(models: FakeModels) -> None:
        models.stuck = {"m"}
        while "loaded m" not in models.done:
            await original_sleep(0)
        models.stuck = {"m"}
        for _ in range(100):
            await original_sleep(0)

    models = watched(scenario)
    assert models.done == ["dropped", "routed away", "restarted", "told", "loaded m"]
    assert "the load of m hangs in tritonserver; it is started again now, with all its models" in caplog.text


def test_a_triton_that_does_not_answer_for_long_is_replaced_and_one_that_sometimes_does_is_not(
    pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(models: FakeModels) -> None:
        models.answers = lambda asked: asked % 8 == 0
        while models.asked < 100:
            await original_sleep(0)
        assert models.done == []
        models.answers = lambda _: "restarted" in models.done
        while "loaded m" not in models.done:
            await original_sleep(0)

    models = watched(scenario)
    assert models.done == ["dropped", "routed away", "restarted", "told", "loaded m"]
    assert "tritonserver does not answer any more; it is started again now, with all its models" in caplog.text


def test_a_triton_that_cannot_be_kept_up_is_given_up_after_growing_pauses(pauses: list[float]) -> None:
    async def scenario() -> tuple[str, FakeModels]:
        models: Any = FakeModels()
        models.bad_restarts = 99
        models.ended.set()
        async with asyncio.timeout(20):
            return await Watchdog(models, models, models, models.restore).watch(), models

    reason, models = asyncio.run(scenario())
    assert reason == "tritonserver ended with code 1 while starting, for the 6th time within 600 s"
    assert (models.done.count("restarted"), pauses) == (5, [0, 1, 2, 4, 8])


HTTP = ", http_addr: '127.0.0.1:0'"


def kill(serving: Live, model: str) -> int:
    pid = min(stubs(serving.served, model))
    os.kill(pid, signal.SIGKILL)
    return pid


def health(serving: Live, model: str) -> str:
    with grpc.insecure_channel(serving.served.state["address"]) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=model))
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


@contextmanager
def watched_health(serving: Live, model: str) -> Iterator[list[str]]:
    """What health says of ``model`` meanwhile, each change once."""
    told: list[str] = []
    with grpc.insecure_channel(serving.served.state["address"]) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=model))

        def watch() -> None:
            with suppress(grpc.RpcError):
                for answer in call:
                    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
                    if told[-1:] != [status]:
                        told.append(status)

        thread = threading.Thread(target=watch)
        thread.start()
        serving.until(lambda: bool(told))
        yield told
        call.cancel()
        thread.join()


def restart_counts(serving: Live) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{serving.served.state['http']}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    series = [line.partition("nereid_model_restarts_total") for line in lines]
    return {name.split('"')[1]: float(name.split()[1]) for before, word, name in series if word and not before}


@contextmanager
def within(bound_s: float) -> Iterator[None]:
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < bound_s


@pytest.mark.triton
def test_a_killed_model_is_back_soon_and_the_others_notice_nothing(tmp_path: Path) -> None:
    settings = listing("adder", "other", server=CONTROLLED + HTTP)
    with live(tmp_path, settings=settings, models=("adder", "other")) as serving:
        pid = serving.served.process.pid
        regions = our_shared_memory(pid)
        assert restart_counts(serving) == {"adder": 0, "other": 0}
        with serving.load("other") as failures:
            for _ in range(2):
                with within(20):  # the bar is 10 s on a quiet machine
                    serving.until(lambda: len(stubs(serving.served, "adder")) == 1)
                    kill(serving, "adder")
                    serving.until(lambda: health(serving, "adder") == "NOT_SERVING")
                    assert (serving.http_says("adder"), serving.client.is_model_ready("adder")) == (400, False)
                    # Not ready as a whole, but the other model is served as before.
                    assert (health(serving, ""), health(serving, "other")) == ("NOT_SERVING", "SERVING")
                    assert (serving.client.is_server_ready(), serving.http_says("other")) == (False, 200)
                    serving.until(lambda: serving.amount() == 1)
                serving.until(lambda: health(serving, "adder") == "SERVING")
        assert failures == []
        assert restart_counts(serving) == {"adder": 2, "other": 0}
        # The regions of the dead are gone: as many as before, one of them new.
        assert (len(our_shared_memory(pid)), len({*our_shared_memory(pid)} & {*regions})) == (2, 1)
        # Unloaded on purpose is not dead, and a model that is dead can be loaded by name as well.
        serving.client.unload_model("adder")
        time.sleep(1)
        serving.client.load_model("adder")
        assert (serving.amount(), restart_counts(serving)["adder"]) == (1, 2)
        kill(serving, "other")  # and the end comes while it is started again: code 0 all the same
        serving.until(lambda: health(serving, "other") == "NOT_SERVING")


@pytest.mark.triton
def test_a_killed_triton_is_back_with_its_models_and_its_permits(tmp_path: Path) -> None:
    settings = listing("adder", "other", server=f"{HTTP}, allow_shared_memory: true")
    with (
        live(tmp_path, settings=settings, models=("adder", "other")) as serving,
        registered(serving.client, "kept"),
        registered(serving.client, "given up") as abandoned,
    ):
        (SHARED_MEMORY / abandoned).unlink()
        pid = serving.served.process.pid
        with watched_health(serving, "") as told, serving.load("adder", "other") as failures:
            for _ in range(2):
                told.clear()
                (server,) = (p for p in serving.served.descendants() if is_tritonserver(p))
                os.kill(server, signal.SIGKILL)
                serving.until(lambda: told == ["NOT_SERVING", "SERVING"])
                assert (serving.amount("adder"), serving.amount("other")) == (1, 1)
                time.sleep(0.5)
        codes = {str(failure.status()) for failure in failures}
        assert codes == {"StatusCode.UNAVAILABLE"}
        assert len(our_shared_memory(pid)) == 2
        assert (serving.http_says("adder"), serving.client.is_server_ready()) == (200, True)
        assert restart_counts(serving) == {"adder": 2, "other": 2}
        there = grpcclient.InferInput("input", list(ROW.shape), "FP32")
        there.set_shared_memory("kept", ROW.nbytes)
        assert (serving.client.infer("adder", [there]).as_numpy("output") == ROW + 1).all()
        there.set_shared_memory("given up", ROW.nbytes)
        with pytest.raises(InferenceServerException, match="no region 'given up' is registered"):
            serving.client.infer("adder", [there])


@contextmanager
def registered(client: Any, name: str) -> Iterator[str]:
    """A shared memory object of this process with ROW, that the server knows as ``name``; its own name."""
    key = f"test-{os.getpid()}-{name.replace(' ', '-')}"
    (SHARED_MEMORY / key).write_bytes(ROW.tobytes())
    try:
        client.register_system_shared_memory(name, f"/{key}", ROW.nbytes)
        yield key
    finally:
        (SHARED_MEMORY / key).unlink(missing_ok=True)


def is_tritonserver(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")[0].endswith(b"tritonserver")
    except OSError:
        return False


PRESUMPTUOUS_HOOKS = """
import os, signal
from nereid_backend.hooks import register_model

def preprocess(inputs):
    if inputs[0].array.max() > 600:
        os.kill(os.getpid(), signal.SIGKILL)
    return inputs

register_model(preprocess=preprocess)
"""


@pytest.mark.triton
def test_a_model_that_dies_at_every_request_harms_no_other(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    write_bundle(tmp_path / "models" / "frail", PRESUMPTUOUS_HOOKS)
    harmless, deadly = ([input_tensor("x", np.full((1, 4), value, np.float32))] for value in (1, 666))
    with live(tmp_path, watch=True, models=("other",)) as serving, serving.load("other") as failures:
        seen = set()
        for _ in range(3):
            serving.until(lambda: serving.client.infer("frail", harmless) is not None)
            seen |= stubs(serving.served, "frail")
            code, _ = code_of(lambda: serving.client.infer("frail", deadly))
            assert code == "UNAVAILABLE"
        serving.until(lambda: stubs(serving.served, "frail") - seen != set())
        assert (len(seen), failures) == (3, [])


def write_script(folder: Path) -> None:
    folder.mkdir()
    (folder / "main.py").write_text(
        "import os\n"
        "with open(os.environ['NEREID_OUTPUT_PATH'], 'wb') as file:\n"
        "    file.write(b'float32 1\\n' + bytes(4))\n"
    )
    (folder / "requirements.txt").write_text("")
    (folder / "model_inference.textproto").write_text("input_shape: [4]\noutput_shape: [1]\nmax_batch_size: 4\n")


@pytest.mark.triton
def test_every_process_behind_a_model_is_brought_back(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    write_bundle(tmp_path / "models" / "scored", RAGGED_HOOKS, **RAGGED_TENSORS)
    write_adding_twice(tmp_path / "models" / "twice")
    write_script(tmp_path / "models" / "script")
    ragged = [input_tensor("query", ROW[0]), input_tensor("keys", ROW)]

    with live(tmp_path, watch=True, models=("adder",)) as serving:

        def ask(name: str) -> bool:
            if name == "twice":
                return serving.amount(name) == 2
            inputs = ragged if name == "scored" else [input_tensor("input", ROW)]
            return serving.client.infer(name, inputs) is not None

        for process, model in {
            "adder": "twice",  # hidden: only the meta model calls it
            "twice": "twice",
            "scored__preprocess": "scored",  # one of its two processes
            "scored__core": "scored",
            "script": "script",
        }.items():
            assert ask(model)
            with watched_health(serving, model) as told:
                kill(serving, process)
                serving.until(lambda: told == ["SERVING", "NOT_SERVING", "SERVING"])
            assert ask(model)


@pytest.mark.triton
def test_the_processes_of_an_ensemble_are_started_once(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    noted = tmp_path / "started"
    hooks = f"import os\nwith open({str(noted)!r}, 'a') as file:\n    print(os.getpid(), file=file)\n{RAGGED_HOOKS}"
    write_bundle(tmp_path / "models" / "scored", hooks, **RAGGED_TENSORS)
    ragged = [input_tensor("query", ROW[0]), input_tensor("keys", ROW)]
    with live(tmp_path) as serving:

        def started() -> list[int]:
            return sorted(map(int, noted.read_text().split()))

        def running() -> list[int]:
            return sorted(stubs(serving.served, "scored__preprocess") | stubs(serving.served, "scored__postprocess"))

        assert started() == running()
        noted.unlink()
        (server,) = (pid for pid in serving.served.descendants() if is_tritonserver(pid))
        os.kill(server, signal.SIGKILL)
        serving.until(lambda: serving.client.infer("scored", ragged) is not None)
        assert started() == running()
