"""The unmodified SnoozeML SDK over REST, before the real Triton: the cases of the specification by number."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import snoozeml
from serving import write_adder
from snoozeml.config import AuthSettings
from snoozing import ADM, INF, JWT_SECRET, RO, Snoozing, snoozing_folder

from native_service.snooze.uploaded import FOLDER

pytestmark = pytest.mark.triton

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
INPUT = {"input": ROWS}
MIB = 1024 * 1024


def make(models: Path) -> None:
    for name in ("adder", "fresh_sync", "fresh_async", "moved_sync", "moved_async"):
        write_adder(models / f"{name}.onnx")
    write_adder(models / "file-of-listed.onnx", amount=2.0)
    for name in ("broken.onnx", "no name.onnx"):
        (models / name).write_bytes(b"no model")


@pytest.fixture(scope="module")
def snooze(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snoozing]:
    config = snoozeml.SnoozeConfig(auth=AuthSettings(protect_metrics=True))
    config.defaults.max_batch_delay_ms = 0
    config.add_model("listed", "file-of-listed.onnx", description="of the file", idle_timeout_secs=100)
    with snoozing_folder(tmp_path_factory.mktemp("snooze"), config, make) as running:
        yield running


@pytest.fixture
def rest(sdk: Any) -> Any:
    """``rest(key, **options)``: a client of each kind that calls over REST."""
    return lambda *key, **options: sdk(*key, use_grpc=False, **options)


@pytest.fixture
def onnx(tmp_path: Path) -> Any:
    """``onnx(amount)``: the file of a model that adds it."""

    def write(amount: float = 1.0) -> bytes:
        write_adder(tmp_path / "made.onnx", amount=amount)
        return (tmp_path / "made.onnx").read_bytes()

    return write


def output(response: Any) -> np.ndarray:
    return np.asarray(response.get_numpy("output"))


def refused(kind: type[Exception], status: int | None, call: Any, *args: Any, **more: Any) -> str:
    with pytest.raises(snoozeml.SnoozeError) as caught:
        call(*args, **more)
    assert (type(caught.value), caught.value.status_code) == (kind, status), caught.value
    return str(caught.value)


def test_health_needs_no_key(rest: Any) -> None:  # 1
    client = rest(None)
    assert (client.health_live(), client.health_ready()) == (True, True)
    assert client.service_info()["name"] == "snooze-ml"


def test_models_of_the_file_and_of_the_folder_are_idle_at_first(rest: Any, kind: str) -> None:  # 3
    models = {model.id: model for model in rest(RO).models.list()}
    assert {"adder", "listed", "fresh_sync", "fresh_async"} <= models.keys()
    assert "file-of-listed" not in models
    fresh, listed = models[f"moved_{kind}"], models["listed"]
    assert (fresh.state.value, fresh.onnx_path, fresh.pinned, fresh.memory_bytes) == (
        "idle", f"moved_{kind}.onnx", False, 0,
    )  # fmt: skip
    assert (fresh.idle_timeout_secs, fresh.max_batch_size, fresh.max_batch_delay_ms) == (300, 16, 0)
    assert (listed.onnx_path, listed.description, listed.idle_timeout_secs) == (
        "file-of-listed.onnx", "of the file", 100,
    )  # fmt: skip


def test_a_model_that_is_not_there_is_not_found(rest: Any) -> None:  # 4
    client = rest()
    with pytest.raises(snoozeml.ModelNotFoundError):
        client.models.get("absent")
    calls = (client.models.load, client.models.unload, client.models.pin, client.models.unpin)
    for call in (lambda name: client.infer(name, INPUT), *calls):
        assert "Model not found: absent" in refused(snoozeml.ModelNotFoundError, 404, call, "absent")
    refused(snoozeml.ModelNotFoundError, 404, client.models.load, "../../etc")


def test_the_first_call_of_an_idle_model_succeeds(rest: Any, kind: str) -> None:  # 5, 6
    client, name = rest(INF), f"fresh_{kind}"
    assert client.models.get(name).state.value == "idle"
    answer = client.infer(name, INPUT)
    np.testing.assert_array_equal(output(answer), ROWS + 1)
    assert (answer.model_id, answer.duration_ms > 0) == (name, True)
    assert client.models.get(name).is_loaded
    np.testing.assert_array_equal(output(client.infer(name, ROWS)), ROWS + 1)
    np.testing.assert_array_equal(output(client.infer("listed", INPUT)), ROWS + 2)


def test_wrong_inputs_are_told_in_the_words_of_the_sdk(rest: Any) -> None:  # 8
    client = rest(INF)
    text = refused(snoozeml.ShapeMismatchError, 400, client.infer, "adder", {"input": ROWS[:, :2]})
    assert text.startswith("Shape mismatch: ")
    refused(snoozeml.InvalidInputError, 400, client.infer, "adder", {"inptu": ROWS})
    # 27: the client itself, before it sends anything.
    refused(snoozeml.InvalidInputError, None, client.infer, "adder", {"input": ROWS * np.nan})


def test_who_has_no_key_or_a_wrong_one_is_nobody(rest: Any) -> None:  # 10
    expired = snoozeml.create_jwt_token(JWT_SECRET, exp=int(time.time()) - 90)
    unknown = {"api_key": "sk-unknown"}
    for credentials in ({"api_key": None}, unknown, {"api_key": None, "token": expired}):
        client = rest(**credentials)
        refused(snoozeml.AuthenticationError, 401, client.models.list)
        refused(snoozeml.AuthenticationError, 401, client.infer, "adder", INPUT)
        refused(snoozeml.AuthenticationError, 401, client.models.upload, b"", model_id="x")


def test_each_role_may_do_what_is_its(rest: Any) -> None:  # 11
    reader, caller, admin = rest(RO), rest(INF), rest(ADM)
    for client in (reader, caller, admin):
        assert client.models.list()
    refused(snoozeml.PermissionDeniedError, 403, reader.infer, "adder", INPUT)
    assert caller.infer("adder", INPUT)
    for client in (reader, caller):
        models = client.models
        for call in (models.load, models.unload, models.evict, models.pin, models.unpin):
            refused(snoozeml.PermissionDeniedError, 403, call, "adder")
        refused(snoozeml.PermissionDeniedError, 403, models.refresh)
        refused(snoozeml.PermissionDeniedError, 403, models.upload, b"x", model_id="x")
        refused(snoozeml.PermissionDeniedError, 403, client.get_metrics)
    assert admin.models.load("adder")


def test_a_token_is_as_good_as_a_key_of_its_role(rest: Any) -> None:  # 12
    def token(**claims: Any) -> Any:
        return rest(None, token=snoozeml.create_jwt_token(JWT_SECRET, **claims))

    assert token(role="admin").models.load("adder")
    refused(snoozeml.PermissionDeniedError, 403, token(role="read_only").infer, "adder", INPUT)
    assert token(role=None, roles=["ro", "user"]).infer("adder", INPUT)
    refused(snoozeml.PermissionDeniedError, 403, token(role=None).models.list)
    refused(snoozeml.AuthenticationError, 401, token(algorithm="HS512").models.list)
    assert token(exp=int(time.time()) - 30).models.list()
    head, payload, signature = snoozeml.create_jwt_token(JWT_SECRET).split(".")
    other = base64.urlsafe_b64encode(json.dumps({"exp": 2**33, "role": "admin"}).encode()).rstrip(b"=").decode()
    none = base64.urlsafe_b64encode(b'{"alg":"none","typ":"JWT"}').rstrip(b"=").decode()
    for forged in (f"{head}.{other}.{signature}", f"{none}.{payload}.", f"{head}.{payload}.{signature}!!"):
        refused(snoozeml.AuthenticationError, 401, rest(None, token=forged).models.list)


def test_models_come_and_go_as_they_are_told(rest: Any, kind: str) -> None:  # 13, 14, 15
    client, name = rest(), f"moved_{kind}"
    with pytest.raises(snoozeml.InferenceTimeoutError):
        client.models.wait_for_ready(name, timeout=0.1)
    assert client.models.wait_for_ready(name, trigger_load=True, timeout=60).is_loaded
    for _ in range(2):
        assert client.models.load(name) == {"model_id": name, "status": "loaded"}
        assert client.models.get(name).state.value == "ready"
    for leave in (client.models.unload, client.models.evict):
        assert leave(name) == {"model_id": name, "status": "unloaded"}
        assert client.models.get(name).state.value == "idle"
    assert client.models.pin(name) == {"model_id": name, "status": "pinned", "pinned": True}
    info = client.models.get(name)
    assert (info.pinned, info.is_loaded, info.memory_bytes > MIB) == (True, True, True)
    assert client.models.unpin(name) == {"model_id": name, "status": "unpinned", "pinned": False}
    assert not client.models.get(name).pinned


def test_an_uploaded_model_is_served_with_its_options(snooze: Snoozing, rest: Any, kind: str, onnx: Any) -> None:  # 21
    client, name = rest(), f"up_{kind}"
    options = {"max_batch_size": 8, "max_batch_delay_ms": 2, "idle_timeout_secs": 60, "description": "größer"}
    more = {"min_residency_secs": 1, "autoscale_queue_threshold": 9, "max_replicas": 2, "device": "cpu"}
    info = client.models.upload(onnx(3.0), model_id=name, routing_strategy="least_queue", **options, **more)
    assert {key: getattr(info, key) for key in options} == options
    assert (info.id, info.state.value, info.onnx_path) == (name, "idle", f"{name}.onnx")
    np.testing.assert_array_equal(output(client.infer(name, INPUT)), ROWS + 3)

    again = (client.models.upload, onnx(4.0))
    refused(snoozeml.SnoozeError, 409, *again, model_id=name)
    np.testing.assert_array_equal(output(client.infer(name, INPUT)), ROWS + 3)
    text = refused(snoozeml.InvalidInputError, 400, client.models.upload, b"no model", model_id=name, overwrite=True)
    assert str(snooze.models) not in text
    np.testing.assert_array_equal(output(client.infer(name, INPUT)), ROWS + 3)

    info = client.models.upload(onnx(4.0), model_id=name, overwrite=True, pinned=True)
    assert (info.is_loaded, info.pinned, info.description) == (True, True, "größer")
    np.testing.assert_array_equal(output(client.infer(name, INPUT)), ROWS + 4)
    assert [path.name for path in (snooze.models / FOLDER).iterdir()] == ["models.json"]


def test_what_may_not_be_uploaded_is_refused(rest: Any, onnx: Any, snooze: Snoozing) -> None:  # 21
    client, before = rest(), {path.name for path in snooze.models.iterdir()}
    for filename in ("m.pkl", "m.py", "m.joblib", "m.pt2"):
        refused(snoozeml.UnsupportedArchitectureError, 501, client.models.upload, b"x", filename=filename)
    for model_id in ("../x", ".x", "upload", "refresh", "a/b"):
        refused(snoozeml.InvalidInputError, 400, client.models.upload, onnx(), model_id=model_id, filename="m.onnx")
    text = refused(snoozeml.SnoozeError, 409, client.models.upload, onnx(), model_id="listed", overwrite=False)
    assert "send overwrite" in text
    assert {path.name for path in snooze.models.iterdir()} - {FOLDER} == before - {FOLDER}


def test_estimators_are_deployed_and_predict_as_before(rest: Any, kind: str) -> None:  # 22
    for module in ("sklearn", "skl2onnx", "xgboost", "onnxmltools"):
        pytest.importorskip(module, reason=f"{module} is not installed in this interpreter")
    import xgboost
    from sklearn.linear_model import LogisticRegression

    rows = np.random.default_rng(0).normal(size=(1000, 4)).astype(np.float32)
    labels = np.digitize(rows[:, 0] + rows[:, 1], [-1, 1])
    linear = LogisticRegression().fit(rows, labels)
    client, types = rest(), [("float_input", (None, 4))]
    assert client.deploy_sklearn(linear, model_id=f"linear_{kind}", initial_types=types).id == f"linear_{kind}"
    at_once = {"concurrency": 4} if kind == "async" else {}
    for use_grpc in (False, True):
        sliced = {"batch_size": 32, "use_grpc": use_grpc, **at_once}
        answers = client.infer_dataset(f"linear_{kind}", {"float_input": rows}, **sliced)
        np.testing.assert_allclose(output(answers), linear.predict_proba(rows), atol=1e-5)
    trees = xgboost.XGBClassifier(n_estimators=3, max_depth=2, n_jobs=1).fit(rows, labels)
    assert client.deploy_xgboost(trees, model_id=f"trees_{kind}").onnx_path == f"trees_{kind}.xgb.json"
    np.testing.assert_allclose(
        output(client.infer(f"trees_{kind}", {"input": rows[:9]})), trees.predict_proba(rows[:9]), atol=1e-5
    )


def test_a_file_dropped_into_the_folder_is_there_after_a_refresh(snooze: Snoozing, rest: Any, kind: str) -> None:  # 23
    client, name = rest(), f"dropped_{kind}"
    write_adder(snooze.models / f"{name}.onnx", amount=5.0)
    assert name in {model.id for model in client.models.refresh()}
    np.testing.assert_array_equal(output(client.infer(name, INPUT)), ROWS + 5)
    write_adder(snooze.models / f"{name}.onnx", amount=6.0)
    client.models.refresh()
    np.testing.assert_array_equal(output(client.infer(name, INPUT)), ROWS + 6)
    (snooze.models / f"{name}.onnx").unlink()
    assert name not in {model.id for model in client.models.refresh()}


def test_a_broken_file_is_left_out_until_it_is_mended(snooze: Snoozing) -> None:  # 20
    client = snooze.client(use_grpc=False)
    assert "broken" not in {model.id for model in client.models.list()}
    refused(snoozeml.ModelNotFoundError, 404, client.infer, "broken", INPUT)
    assert "broken" not in {model.id for model in client.models.refresh()}
    write_adder(snooze.models / "broken.onnx", amount=7.0)
    assert "broken" in {model.id for model in client.models.refresh()}
    np.testing.assert_array_equal(output(client.infer("broken", INPUT)), ROWS + 7)
    snooze.close_clients()


def test_metrics_are_what_the_sdk_adds_up(rest: Any) -> None:  # 24
    client, before = rest(), rest().get_metrics()
    for _ in range(3):
        client.infer("adder", INPUT)
    refused(snoozeml.ShapeMismatchError, 400, client.infer, "adder", {"input": ROWS[:, :2]})
    now = client.get_metrics()
    counts = [
        getattr(now, f"requests_{what}") - getattr(before, f"requests_{what}") for what in ("total", "success", "error")
    ]
    assert counts == [4, 3, 1]
    assert now.requests_total == now.requests_success + now.requests_error
    assert 0 < now.batches_dispatched_total <= now.requests_success
    assert now.average_latency_ms > 0
    names = [line.split(" ")[0] for line in client.metrics().splitlines() if line.startswith("snoozeml_")]
    assert len(names) == len(set(names)) == 13


def post(snooze: Snoozing, path: str, **request: Any) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {ADM}", **request.pop("headers", {})}
    answer = requests.post(
        f"http://{snooze.served.state['rest']}{path}", headers=headers, timeout=60, allow_redirects=False, **request
    )
    assert answer.headers["Content-Type"].startswith("application/json")
    return answer.status_code, answer.json()["error"]


def test_what_a_stranger_may_send_has_limits(snooze: Snoozing) -> None:
    infer, tensor = "/v1/models/adder/infer", {"name": "input", "shape": [1, 4], "data": [1, 2, 3, 4]}
    for bad in (b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"inputs": 5}', b'{"inputs": []}', b"1" * 10_000):
        assert post(snooze, infer, data=bad)[0] == 400, bad[:20]
    for wrong in (
        {"name": 5}, {"shape": []}, {"shape": [0, 4]}, {"shape": [-1, -4]}, {"shape": [1.0, 4]}, {"shape": [1, 5]},
        {"shape": [2**62, 2**62]}, {"shape": [1] * 1000}, {"data": None}, {"data": ["1", "2", "3", "4"]},
        {"data": [[1, 2], 3, 4]}, {"data": [10**400, 1, 1, 1]}, {"data": {}},
    ):  # fmt: skip
        assert post(snooze, infer, json={"inputs": [{**tensor, **wrong}]})[0] == 400, wrong
    assert post(snooze, infer, json={"inputs": [tensor, tensor]})[0] == 400
    assert post(snooze, infer, json={"inputs": [tensor] * 300})[0] == 400
    status, text = post(snooze, infer, data=b" " * (5 * MIB))
    assert (status, "server.limits.max_message_bytes" in text) == (413, True)
    assert post(snooze, "/v1/nothing")[0] == 404
    assert post(snooze, "/health/live")[0] == 405
    assert post(snooze, "/v1/models/upload", data=b"x")[0] == 400


def test_numbers_that_json_has_no_word_for_are_null(snooze: Snoozing) -> None:
    largest = float(np.finfo(np.float32).max)
    body = {"inputs": [{"name": "input", "shape": [1, 4], "data": [largest, 1e39, -1e39, 1]}]}
    headers = {"X-API-Key": INF}
    address = f"http://{snooze.served.state['rest']}/v1/models/adder/infer"
    answer = requests.post(address, json=body, headers=headers, timeout=60)
    [tensor] = answer.json()["outputs"]
    assert tensor == {"name": "output", "shape": [1, 4], "data": [largest, None, None, 2.0]}
