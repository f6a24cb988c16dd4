"""The unmodified SnoozeML SDK runs models of a real Triton over gRPC: the cases of the specification by number."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import snoozeml
import tritonclient.grpc as tritonclient
from hooked_bundle import write_bundle
from onnx import TensorProto
from serving import write_adder
from snoozing import ADM, INF, JWT_SECRET, RO, Snoozing, infer_together, snoozing
from tritonclient.utils import InferenceServerException

from native_service.proto import snoozeml_pb2 as pb

pytestmark = pytest.mark.triton

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
WIDE = 10 * 2**20
SERVICE = "/snoozeml.v1.InferenceService/"
# Tells that it runs, and sleeps for the first number of a row; a negative one is until the file "go" is there.
SLEEP = """
import os, time
from nereid_backend.hooks import register_model

def preprocess(inputs):
    with open({file!r}, "a") as file:
        file.write(".")
    seconds = float(inputs[0].array[0, 0])
    end = time.monotonic() + 300
    while seconds < 0 and time.monotonic() < end and not os.path.exists({go!r}):
        time.sleep(0.01)
    time.sleep(max(seconds, 0))
    return inputs

register_model(preprocess=preprocess)
"""


def make(models: Path) -> None:
    write_adder(models / "adder.onnx")
    write_adder(models / "ints.onnx", dtype=TensorProto.INT64)
    write_adder(models / "wide.onnx", width=WIDE)
    write_adder(models / "m.onnx", width=2)
    write_bundle(models / "sleeper", SLEEP.format(file=str(models.parent / "runs"), go=str(models.parent / "go")))


@pytest.fixture(scope="module")
def snooze(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snoozing]:
    pytest.importorskip("jax")
    models = {
        "adder": {"options": {"max_batch_size": 8}},
        "ints": {"options": {"batch_delay_ms": 500}},
        "wide": {},
        "m": {"options": {"load": "first_request"}},
        "sleeper": {"queue_capacity": 1},
    }
    server = {"name": "snooze-ml", "rest_addr": "127.0.0.1:0", "allow_model_control": True}
    with snoozing(tmp_path_factory.mktemp("snooze"), models, server=server, make=make) as running:
        yield running


def sleep(seconds: float) -> dict[str, np.ndarray]:
    return {"x": np.array([[seconds, 0, 0, 0]], np.float32)}


def request(
    model: str = "adder", *, data_type: int = 1, shape: tuple[int, ...] = (1, 4), raw: bytes = bytes(16)
) -> Any:
    message = pb.ModelInferRequest(model_id=model)
    message.inputs.add(name="input", shape=shape, data_type=data_type, raw_data=raw)
    return message


class Stub:
    """What a generator makes of our own proto."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        messages = (pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString)
        self.infer = self.channel.unary_unary(SERVICE + "Infer", *messages)
        self.stream = self.channel.stream_stream(SERVICE + "StreamInfer", *messages)


@pytest.fixture
def stub(snooze: Snoozing) -> Iterator[Stub]:
    opened = Stub(snooze.address)
    with opened.channel:
        yield opened


KEY = (("authorization", f"Bearer {INF}"),)


def code_of(call: Any) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return str(caught.value.code().name)


def test_a_stock_client_of_kserve_sees_models_come_and_go(snooze: Snoozing) -> None:  # 30, 5
    headers = {"authorization": f"Bearer {ADM}"}
    with tritonclient.InferenceServerClient(snooze.address) as client:

        def state() -> tuple[bool, str]:
            index = client.get_model_repository_index(headers=headers)
            (found,) = (model.state for model in index.models if model.name == "m")
            return client.is_model_ready("m", headers=headers), found

        assert client.get_server_metadata(headers=headers).name == "snooze-ml"
        assert list(client.get_model_metadata("adder", headers=headers).versions) == ["1"]
        assert state() == (False, "UNAVAILABLE")
        answer = snooze.client(INF).infer("m", ROWS[:, :2])
        np.testing.assert_array_equal(answer.get_numpy("output"), ROWS[:, :2] + 1)
        assert state() == (True, "READY")
        client.unload_model("m", headers=headers)
        assert state() == (False, "UNAVAILABLE")
        client.load_model("m", headers=headers)
        assert state() == (True, "READY")
        for key, code in ((ADM, "UNIMPLEMENTED"), (INF, "PERMISSION_DENIED")):
            with pytest.raises(InferenceServerException, match=code):
                client.register_system_shared_memory("r", "/r", 64, headers={"authorization": f"Bearer {key}"})
    snooze.close_clients()


def test_what_the_sdk_puts_on_the_wire_is_answered(snooze: Snoozing) -> None:  # 34
    """Captured from it: ``infer('m', [[1, 2], [3, 4]])``, once with client_timeout_ms=250 and parameters."""
    plain = bytes.fromhex("0a016d121f0a05696e70757412020202180122100000803f000000400000404000008040")
    with grpc.insecure_channel(snooze.address) as channel:
        infer = channel.unary_unary(SERVICE + "Infer", response_deserializer=pb.ModelInferResponse.FromString)
        for data in (plain, plain + bytes.fromhex("18fa01220a0a05726f757465120161")):
            (output,) = infer(data, metadata=(*KEY, ("x-api-key", INF)), timeout=60).outputs
            assert np.frombuffer(output.raw_data, "<f4").tolist() == [2, 3, 4, 5]
        for metadata in ((("authorization", "Bearer tok"),), ()):
            assert code_of(lambda: infer(plain, metadata=metadata)) == "UNAUTHENTICATED"  # noqa: B023 - called here


def test_a_model_answers_in_fp32_with_its_name_and_its_time(sdk: Any) -> None:  # 5, 6
    answer = sdk(INF).infer("adder", {"input": ROWS})
    assert answer.model_id == "adder"
    assert answer.get_numpy("output").dtype == np.float32
    np.testing.assert_array_equal(answer.get_numpy("output"), ROWS + 1)
    assert answer.duration_ms > 0
    # A bare array is the input named "input", and one row may come without its batch axis.
    np.testing.assert_array_equal(sdk(INF).infer("adder", ROWS[0]).get_numpy(), ROWS[:1] + 1)


def test_a_model_nobody_serves_is_not_found(sdk: Any) -> None:  # 4
    with pytest.raises(snoozeml.ModelNotFoundError, match="Model not found: absent") as caught:
        sdk(INF).infer("absent", ROWS)
    assert caught.value.grpc_code == "NOT_FOUND"


def test_a_wrong_shape_and_a_wrong_name_are_told_apart(sdk: Any) -> None:  # 8
    with pytest.raises(
        snoozeml.ShapeMismatchError, match=r"^Shape mismatch: model 'adder' input 'input' takes \[-1, 4\]"
    ):
        sdk(INF).infer("adder", ROWS[:, :3])
    with pytest.raises(snoozeml.InvalidInputError, match="no input 'inputs'; its inputs are") as caught:
        sdk(INF).infer("adder", {"inputs": ROWS})
    assert type(caught.value) is snoozeml.InvalidInputError


@pytest.mark.parametrize(
    "message",
    [
        request(raw=bytes(12)),
        request(shape=(0,), raw=b""),
        request(shape=(), raw=b""),
        request(shape=(-1, -4)),
        request(shape=(2**62, 4)),
        request(data_type=4),
        request(data_type=77),
        request(" "),
        request(""),
        pb.ModelInferRequest(model_id="adder"),
        pb.ModelInferRequest(model_id="adder", client_timeout_ms=0, inputs=request().inputs),
        pb.ModelInferRequest(model_id="adder", inputs=[*request().inputs, *request().inputs]),
        pb.ModelInferRequest(model_id="adder", inputs=request().inputs, parameters={"typed": "maybe"}),
    ],
    ids=str,
)
def test_a_request_that_breaks_a_rule_is_an_invalid_argument(stub: Stub, message: Any) -> None:  # 9
    assert code_of(lambda: stub.infer(message, metadata=KEY)) == "INVALID_ARGUMENT"


def test_of_several_things_that_are_wrong_the_first_is_told(stub: Stub, snooze: Snoozing) -> None:
    def ask(key: str | None, message: Any, method: str = "Infer") -> str:
        metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        call = stub.channel.unary_unary(SERVICE + method)
        return code_of(lambda: call(message.SerializeToString(), metadata=metadata))

    bad = request("absent", shape=(0,))
    assert [ask(None, bad), ask(RO, bad), ask(INF, bad), ask(INF, request(shape=(0,)))] == [
        *("UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND", "INVALID_ARGUMENT")
    ]
    assert [ask(key, bad, "Other") for key in (None, INF, ADM)] == [
        *("UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED")
    ]


def test_who_calls_is_known_and_may_call(sdk: Any) -> None:  # 10, 11
    for options in ({"api_key": None}, {"api_key": "nobody-s"}, {"api_key": None, "token": "a.b.c"}):
        with pytest.raises(snoozeml.AuthenticationError):
            sdk(**options).infer("adder", ROWS)
    with pytest.raises(snoozeml.PermissionDeniedError) as caught:
        sdk(RO).infer("absent", ROWS)  # the role before the name and the input
    assert (caught.value.status_code, caught.value.grpc_code) == (403, "PERMISSION_DENIED")
    sdk(ADM).infer("adder", ROWS)


def test_a_token_of_the_sdk_is_as_good_as_a_key_of_its_role(snooze: Snoozing, kind: str) -> None:  # 12
    def ask(token: str) -> None:
        snooze.client(None, kind=kind, token=token).infer("adder", ROWS)

    def token(**options: Any) -> str:
        return str(snoozeml.create_jwt_token(f"  {JWT_SECRET}\n", **options))

    try:
        for good in (
            token(role="inference"),
            token(role="admin"),
            token(role=None, extra_claims={"roles": ["ro", "user"]}),
        ):
            ask(good)
        ask(token(exp=int(time.time()) - 30))
        for poor in ({"role": "read_only"}, {"role": None}, {"role": None, "extra_claims": {"role": "boss"}}):
            with pytest.raises(snoozeml.PermissionDeniedError):
                ask(token(**poor))
        fine = token(role="inference")
        head, claims, signature = fine.split(".")
        for bad in (
            token(exp=int(time.time()) - 90),
            token(algorithm="HS512"),
            fine + "!!",
            f"{head}.{token(role='admin').split('.')[1]}.{signature}",
            f"eyJhbGciOiJub25lIiwidHlwIjoiSldUIn0.{claims}.",
        ):
            with pytest.raises(snoozeml.AuthenticationError):
                ask(bad)
    finally:
        snooze.close_clients()


class Held:
    """The sleeper's calls of ``WAIT`` wait until ``let_go``."""

    def __init__(self, folder: Path) -> None:
        self._runs, self._go = folder / "runs", folder / "go"
        self._runs.touch()
        self._go.unlink(missing_ok=True)

    @property
    def runs(self) -> int:
        """The calls that have reached the model so far."""
        return self._runs.stat().st_size

    def let_go(self) -> None:
        self._go.touch()


WAIT = sleep(-1)
WAITED = 2 * WAIT["x"]


@pytest.fixture
def held(snooze: Snoozing) -> Iterator[Held]:
    holding = Held(snooze.models.parent)
    try:
        yield holding
    finally:
        holding.let_go()


@contextmanager
def waiting(snooze: Snoozing, held: Held) -> Iterator[Future[Any]]:
    """A call of the sleeper that runs and waits."""
    before = held.runs
    with ThreadPoolExecutor() as pool:
        running = pool.submit(once_free, lambda: snooze.client(INF).infer("sleeper", WAIT, timeout=300))
        try:
            while held.runs == before:
                assert not running.done()
                time.sleep(0.01)
            yield running
        finally:
            held.let_go()


def once_free(call: Callable[[], Any]) -> Any:
    """``call`` as soon as the server has its permit back from the call before, which takes it a moment."""
    end = time.monotonic() + 60
    while True:
        try:
            return call()
        except snoozeml.ResourceExhaustedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def test_a_full_queue_asks_its_callers_to_come_back_in_five_seconds(
    caller: Any, snooze: Snoozing, held: Held
) -> None:  # 17
    client = caller(INF)
    with waiting(snooze, held) as running:
        for _ in range(5):
            with pytest.raises(snoozeml.SnoozeError) as caught:
                client.infer("sleeper", sleep(0))
            assert (type(caught.value), caught.value.retry_after) == (snoozeml.ResourceExhaustedError, 5)
            assert (caught.value.status_code, caught.value.grpc_code in ("RESOURCE_EXHAUSTED", None)) == (503, True)
        held.let_go()
        np.testing.assert_array_equal(running.result().get_numpy("y"), WAITED)


def test_a_call_that_is_refused_succeeds_when_it_is_tried_again(
    caller: Any, snooze: Snoozing, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:  # 17
    client, waits = caller(INF), []
    with waiting(snooze, held) as running:

        def wait_instead(seconds: float) -> None:
            waits.append(seconds)
            held.let_go()
            running.result()
            time.sleep(0.1)

        async def wait_beside(seconds: float) -> None:
            await asyncio.to_thread(wait_instead, seconds)

        for module, wait in ((time, wait_instead), (asyncio, wait_beside)):
            patched = SimpleNamespace(**{**vars(module), "sleep": wait})
            monkeypatch.setattr(f"snoozeml.client.{module.__name__}", patched)
        np.testing.assert_array_equal(client.infer("sleeper", sleep(0), retries=100).get_numpy("y"), np.zeros((1, 4)))
        assert waits[0] == 5


@pytest.mark.parametrize("limit", ["client_timeout_ms", "timeout"])
def test_the_time_a_client_gives_its_call_ends_it(sdk: Any, held: Held, limit: str) -> None:  # 18
    client, before = sdk(INF), held.runs
    for seconds in (0.2, 1, 5, 25):
        times = {"client_timeout_ms": int(1000 * seconds), "timeout": 60} if limit != "timeout" else {limit: seconds}
        with pytest.raises(snoozeml.InferenceTimeoutError) as caught:
            once_free(lambda: client.infer("sleeper", WAIT, **times))  # noqa: B023 - called here
        assert (caught.value.status_code, caught.value.grpc_code) == (504, "DEADLINE_EXCEEDED")
        if held.runs > before:
            break
    assert held.runs > before
    # The server has ended it, too: the only permit is free, though the model still waits.
    with pytest.raises(snoozeml.InferenceTimeoutError):
        once_free(lambda: client.infer("sleeper", sleep(0), client_timeout_ms=200, timeout=60))
    held.let_go()
    answer = once_free(lambda: client.infer("sleeper", sleep(0), client_timeout_ms=60_000, timeout=90))
    np.testing.assert_array_equal(answer.get_numpy("y"), np.zeros((1, 4)))


def test_callers_share_runs_and_get_their_own_rows(snooze: Snoozing, sdk: Any) -> None:  # 25
    client = sdk(INF)
    with tritonclient.InferenceServerClient(snooze.address) as kserve:

        def runs() -> int:
            found = kserve.get_inference_statistics("ints", headers={"authorization": f"Bearer {RO}"})
            return int(found.model_stats[0].execution_count)

        before = runs()
        answers = infer_together(client, [("ints", np.full((1, 4), n)) for n in range(64)])
        assert [answer.get_numpy("output").tolist() for answer in answers] == [[[n + 1.0] * 4] for n in range(64)]
        assert 0 < runs() - before < 64


def test_more_rows_than_one_run_takes_become_several(sdk: Any) -> None:
    rows = np.arange(400, dtype=np.float32).reshape(100, 4)
    np.testing.assert_array_equal(sdk(INF).infer("adder", rows).get_numpy("output"), rows + 1)
    np.testing.assert_array_equal(sdk(INF).infer_dataset("adder", rows, batch_size=32).get_numpy("output"), rows + 1)


def test_integers_pass_through_a_model_of_integers_and_fractions_do_not(caller: Any) -> None:  # 26
    client, numbers = caller(INF), np.array([[0, -3, 2**24, 2**40]])
    np.testing.assert_array_equal(
        client.infer("ints", {"input": numbers}).get_numpy("output"), (numbers + 1).astype(np.float32)
    )
    for bad in (1.5, 2.0**63):
        with pytest.raises(snoozeml.InvalidInputError, match="takes INT64: send whole numbers"):
            client.infer("ints", {"input": np.full((1, 4), bad)})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_cast_to_an_integer(sdk: Any, bad: float) -> None:
    with pytest.raises(snoozeml.InvalidInputError, match="takes INT64: send whole numbers"):
        sdk(INF).infer("ints", {"input": np.full((1, 4), bad)})


def test_a_client_that_says_so_sends_and_gets_the_types_of_the_model(stub: Stub) -> None:
    numbers = np.array([[0, -3, 2**24 + 1, 2**62]])
    message = request("ints", data_type=pb.DATA_TYPE_INT64, raw=numbers.tobytes())
    assert code_of(lambda: stub.infer(message, metadata=KEY)) == "INVALID_ARGUMENT"
    message.parameters["typed"] = "true"
    (output,) = stub.infer(message, metadata=KEY).outputs
    assert (output.data_type, list(output.shape)) == (pb.DATA_TYPE_INT64, [1, 4])
    assert output.raw_data == (numbers + 1).tobytes()
    message.inputs[0].data_type, message.inputs[0].raw_data = pb.DATA_TYPE_INT32, numbers.astype("<i4").tobytes()
    assert code_of(lambda: stub.infer(message, metadata=KEY)) == "INVALID_ARGUMENT"


def test_nan_and_infinity_reach_a_model_unharmed(sdk: Any) -> None:  # 27
    row = np.array([[np.nan, np.inf, -np.inf, 0]], np.float32)
    np.testing.assert_array_equal(sdk(INF).infer("adder", row).get_numpy("output"), row + 1)


def test_forty_mebibytes_go_in_and_out(sdk: Any) -> None:  # 28
    row = np.arange(WIDE, dtype=np.float32)[None]
    np.testing.assert_array_equal(sdk(INF).infer("wide", row, timeout=120).get_numpy("output"), row + 1)


def frames(count: int, *, bad: int | None = None) -> Iterator[Any]:
    for n in range(1, count + 1):
        raw = np.full(4, n, np.float32).tobytes()
        yield request(raw=raw[:-1] if n == bad else raw)


def test_a_stream_is_answered_in_order_to_its_end(stub: Stub) -> None:  # 29
    answers = [np.frombuffer(answer.outputs[0].raw_data, "<f4")[0] for answer in stub.stream(frames(100), metadata=KEY)]
    assert answers == [n + 1 for n in range(1, 101)]
    with pytest.raises(grpc.RpcError) as caught:
        next(stub.stream(frames(1)))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_the_first_frame_that_fails_ends_the_stream_after_the_answers_before_it(stub: Stub) -> None:  # 29
    answers, stream = [], stub.stream(frames(100, bad=50), metadata=KEY)
    with pytest.raises(grpc.RpcError) as caught:
        answers.extend(answer.outputs[0].raw_data[:4] for answer in stream)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [np.frombuffer(raw, "<f4")[0] for raw in answers] == [n + 1 for n in range(1, 50)]


def test_the_frames_of_a_stream_are_not_refused_for_each_other(stub: Stub) -> None:
    def naps() -> Iterator[Any]:
        for _ in range(3):
            message = pb.ModelInferRequest(model_id="sleeper")
            message.inputs.add(name="x", shape=[1, 4], raw_data=sleep(0.05)["x"].tobytes())
            yield message

    assert len(list(stub.stream(naps(), metadata=KEY))) == 3
