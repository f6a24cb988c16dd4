"""Models that come and go in a running ``nereid serve``: the real Triton and Envoy, under load of the others."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc as tritonclient
from live import CONTROLLED, ROW, WAIT_S, Live, code_of, listing, live, stubs, write_adding_twice
from onnx import TensorProto
from serving import Served, alive, input_tensor, write_adder
from tritonclient.utils import InferenceServerException

from converters import weights
from nereid_backend.cache import cache_folder

pytestmark = pytest.mark.triton


def test_a_model_is_added_and_removed_again_and_again_without_a_failed_call(tmp_path: Path) -> None:
    with (
        live(
            tmp_path, settings=listing("one", "two", "guest", server=CONTROLLED), models=("one", "two", "guest")
        ) as serving,
        serving.load("one", "two") as failures,
    ):
        for _ in range(4):  # fifty times in make bench
            serving.client.unload_model("guest")
            assert serving.names() == ["one", "two"]
            assert code_of(lambda: serving.amount("guest"))[0] == "NOT_FOUND"
            serving.client.load_model("guest")
            assert serving.amount("guest") == 1
        assert failures == []


def test_a_changed_model_is_swapped_without_a_failed_call_and_a_bad_one_is_not(tmp_path: Path) -> None:
    with (
        live(tmp_path, settings=listing("adder", server=CONTROLLED), models=("adder",)) as serving,
        serving.load("adder") as failures,
    ):
        file = serving.models / "adder.onnx"
        for amount in (2, 3):
            write_adder(file, amount)
            serving.client.load_model("adder")
            assert serving.amount() == amount
        file.write_bytes(b"no model")
        code, text = code_of(lambda: serving.client.load_model("adder"))
        assert (code, "/" in text) == ("FAILED_PRECONDITION", False)
        assert "model 'adder' could not be loaded: adder.onnx" in text
        assert serving.amount() == 3
        assert failures == []


def test_only_what_the_settings_list_can_be_loaded_and_unloaded(tmp_path: Path) -> None:
    with live(tmp_path, settings=listing("adder", server=CONTROLLED), models=("adder", "other")) as serving:
        client = serving.client
        assert "model_repository" in client.get_server_metadata().extensions
        for name in ("other", "nobody", "../models/other", "", "/etc", "adder/1"):
            assert code_of(lambda: client.load_model(name))[0] == "NOT_FOUND", name  # noqa: B023
            assert code_of(lambda: client.unload_model(name))[0] == "NOT_FOUND", name  # noqa: B023
        for options in ({"config": "{}"}, {"config": "{}", "files": {"file:1/model.py": b"import os"}}):
            code, text = code_of(lambda: client.load_model("adder", **options))  # noqa: B023
            assert (code, "are not taken" in text) == ("INVALID_ARGUMENT", True)
        assert serving.names() == ["adder"]
        client.unload_model("adder")
        client.unload_model("adder")
        assert (serving.names(), client.is_server_ready()) == ([], True)
        with pytest.raises(InferenceServerException):
            client.load_model("adder", client_timeout=0.05)
        serving.until(lambda: serving.amount() == 1)  # though whoever asked for it has gone
        # The process from before the unload may take a moment to go.
        serving.until(lambda: len(stubs(serving.served, "adder")) == 1)
        (process,) = stubs(serving.served, "adder")
        os.kill(process, signal.SIGKILL)
        client.load_model("adder")
        assert serving.amount() == 1  # a model whose process died is back


def has_mapped(pid: int, library: str) -> bool:
    """Whether the process is that far: it reports to Triton before it imports the engine."""
    with suppress(OSError):
        return library in (Path("/proc") / str(pid) / "maps").read_text()
    return False


def test_a_new_version_that_hangs_is_given_up_and_the_old_one_serves(tmp_path: Path) -> None:
    settings = listing("adder", "other", server=f"{CONTROLLED}, limits: {{load_timeout_s: 10}}")
    with (
        live(tmp_path, settings=settings, models=("adder", "other")) as serving,
        serving.load("adder", "other") as failures,
    ):
        old = stubs(serving.served, "adder")
        write_adder(serving.models / "adder.onnx", 2)

        def stop_the_new_one() -> None:
            while not (new := stubs(serving.served, "adder") - old):
                time.sleep(0.005)
            (process,) = new
            # Looking at one process is quick: it must be caught before it is ready.
            while not has_mapped(process, "onnxruntime"):
                time.sleep(0.001)
            os.kill(process, signal.SIGSTOP)

        with ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(stop_the_new_one)
            code, text = code_of(lambda: serving.client.load_model("adder"))
            stopping.result(WAIT_S)
        assert (code, "model 'adder' did not load within 10 s" in text) == ("FAILED_PRECONDITION", True)
        assert (serving.amount(), stubs(serving.served, "adder")) == (1, old)
        serving.client.load_model("adder")
        assert serving.amount() == 2
        assert failures == []
        # At the end of the test a load hangs again: that does not keep the server from stopping.
        write_adder(serving.models / "adder.onnx", 3)
        old = stubs(serving.served, "adder")
        with suppress(InferenceServerException):
            serving.client.load_model("adder", client_timeout=0.5)
        stop_the_new_one()


def test_a_folder_is_followed(tmp_path: Path) -> None:
    with (
        live(tmp_path, watch=True, models=("adder", "other")) as serving,
        serving.load("other") as failures,
    ):
        models = serving.models
        write_adder(models / "new.onnx", 5)
        serving.until(lambda: serving.amount("new") == 5)
        write_adder(models / "adder.onnx", 2)
        serving.until(lambda: serving.amount() == 2)
        (models / "new.onnx").rename(models / "renamed.onnx")
        serving.until(lambda: serving.names() == ["adder", "other", "renamed"])
        assert serving.amount("renamed") == 5
        (models / "adder.onnx").write_bytes(b"no model")
        (models / "renamed.onnx").unlink()
        serving.until(lambda: serving.names() == ["adder", "other"])
        assert serving.amount() == 2
        write_adder(models / "adder.onnx", 3)
        serving.until(lambda: serving.amount() == 3)
        assert failures == []


def write_doubling_bundle(folder: Path) -> None:
    folder.mkdir()
    (folder / "manifest.yaml").write_text(
        """
        format_version: "2.1"
        executable_inputs: [{name: x, dtype: f32, shape: cn, dims: {c: 4}}]
        executable_outputs: [{name: y, dtype: f32, shape: cn, dims: {c: 4}}]
        batching: {compiled_batch_sizes: [1, 2]}
        """
    )
    weights.write(folder / "weights.safetensors", {}, {"argument_order": "[]", "axis_order": weights.PROGRAM_ORDER})
    for size in (1, 2):
        rows = f"tensor<{size}x4xf32>"
        body = f"%y = stablehlo.add %x, %x : {rows}\n  return %y : {rows}"
        (folder / f"model.b{size}.mlir").write_text(f"func.func @main(%x: {rows}) -> {rows} {{\n  {body}\n}}\n")


def test_a_renamed_bundle_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax", reason="the jax extra is not installed in this interpreter")
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    (cache / "triton").symlink_to(cache_folder() / "triton")  # the server itself need not be fetched again
    monkeypatch.setenv("NEREID_CACHE_DIR", str(cache))

    def programs() -> set[str]:
        kept = (path for path in cache.glob("*/*") if path.parent.name not in ("run", "triton"))
        return {path.name for path in kept if not path.name.endswith("-atime")}

    with live(tmp_path, watch=True) as serving:
        assert programs() == set()
        write_doubling_bundle(serving.models / "prod")
        serving.until(lambda: serving.names() == ["prod"])
        compiled = programs()
        assert len(compiled) >= 2
        (serving.models / "prod").rename(serving.models / "old")
        serving.until(lambda: serving.names() == ["old"])
        assert serving.client.infer("old", [input_tensor("x", ROW)]).as_numpy("y").tolist() == (2 * ROW).tolist()
        assert programs() == compiled


def test_a_model_that_is_still_being_written_is_left_alone(tmp_path: Path) -> None:
    with live(tmp_path, watch=True, models=("adder",)) as serving:
        write_adder(tmp_path / "complete.onnx", 7)
        data = (tmp_path / "complete.onnx").read_bytes()
        with (serving.models / "adder.onnx").open("wb") as file:
            for number in range(20):
                file.write(data[number * len(data) // 20 : (number + 1) * len(data) // 20])
                file.flush()
                assert serving.amount() == 1
                time.sleep(0.1)
        serving.until(lambda: serving.amount() == 7)
        shutil.copytree(serving.models, serving.models / ".hidden", ignore=shutil.ignore_patterns(".*"))
        write_adder(serving.models / "later.onnx")
        serving.until(lambda: "later" in serving.names())  # so it has been looked at
        assert serving.names() == ["adder", "later"]


def test_with_a_list_only_listed_models_appear_and_the_list_may_change(tmp_path: Path) -> None:
    http = ", http_addr: '127.0.0.1:0'"
    settings = listing("adder", "later", server=http)
    with live(tmp_path, settings=settings, watch=True, models=("adder", "unlisted")) as serving:
        assert (serving.names(), serving.http_says("later")) == (["adder"], 400)
        write_adder(serving.models / "later.onnx")
        serving.until(lambda: serving.names() == ["adder", "later"])
        serving.until(lambda: serving.http_says("later") == 200)
        (tmp_path / "nereid.yaml").write_text("server: [")
        time.sleep(0.5)
        (tmp_path / "nereid.yaml").write_text(listing("later", "unlisted", server=http))
        serving.until(lambda: serving.names() == ["later", "unlisted"])
        serving.until(lambda: serving.http_says("adder") == 400)
        code, _ = code_of(lambda: serving.client.load_model("adder"))
        assert code == "UNIMPLEMENTED"


def test_a_meta_model_follows_its_callees(tmp_path: Path) -> None:
    with live(tmp_path, watch=True, models=("adder", "other")) as serving:
        assert serving.names() == ["adder", "other"]
        write_adding_twice(serving.models / "twice")
        serving.until(lambda: serving.names() == ["other", "twice"])  # its callee is hidden from now on
        assert serving.amount("twice") == 2
        assert code_of(lambda: serving.amount("adder"))[0] == "NOT_FOUND"
        write_adder(serving.models / "adder.onnx", 3)
        serving.until(lambda: serving.amount("twice") == 6)
        write_adder(serving.models / "adder.onnx", 4, dtype=TensorProto.DOUBLE)  # another contract: it is told so

        def told() -> bool:
            try:
                serving.amount("twice")
            except InferenceServerException as error:
                return "'adder' input 'input' is float32[1, 4], expected float64[-1, 4]" in str(error.message())
            return False

        serving.until(told)
        shutil.rmtree(serving.models / "twice")
        serving.until(lambda: serving.names() == ["adder", "other"])


def test_a_listed_meta_model_brings_its_callees_and_takes_them_along(tmp_path: Path) -> None:
    settings = listing("twice", server=CONTROLLED).replace(", options: {max_batch_size: 8}", "")
    (tmp_path / "models").mkdir()
    write_adding_twice(tmp_path / "models" / "twice")
    with live(tmp_path, settings=settings, watch=True, models=("adder",)) as serving:
        assert (serving.names(), serving.amount("twice")) == (["twice"], 2)
        for ask in (serving.client.load_model, serving.client.unload_model):
            assert code_of(lambda ask=ask: ask("adder"))[0] == "NOT_FOUND"
        serving.client.unload_model("twice")
        assert serving.names() == []
        serving.client.load_model("twice")
        assert serving.amount("twice") == 2
        (tmp_path / "nereid.yaml").write_text(settings + listing("adder").partition("models:\n")[2])
        serving.until(lambda: serving.names() == ["adder", "twice"])
        assert serving.amount("adder") == 1
        code, text = code_of(lambda: serving.client.unload_model("adder"))
        assert (code, text) == ("FAILED_PRECONDITION", "model 'adder' is called by twice; unload that first")


def test_one_bundle_is_followed_too(tmp_path: Path) -> None:
    bundle = tmp_path / "alone"
    bundle.mkdir()
    write_adder(bundle / "model.onnx")
    (bundle / "model_inference.textproto").write_text("input_shape: [4]\noutput_shape: [4]\nmax_batch_size: 8\n")
    served = Served(tmp_path, str(bundle), "--bind", "127.0.0.1:0", "--watch")
    serving = Live(served, bundle)
    assert serving.amount("alone") == 1
    write_adder(bundle / "model.onnx", 2)
    serving.until(lambda: serving.amount("alone") == 2)
    serving.client.close()
    assert served.end()[0] == 0


def test_a_folder_may_be_empty_or_broken_at_the_start_of_watching(tmp_path: Path) -> None:
    with live(tmp_path, watch=True) as serving:
        assert (serving.names(), serving.client.is_server_ready()) == ([], True)
        (serving.models / "adder.onnx").write_bytes(b"no model")
        time.sleep(2)
        write_adder(serving.models / "adder.onnx")
        serving.until(lambda: serving.names() == ["adder"])


def test_calls_in_progress_fail_with_unavailable_when_triton_dies(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    write_adder(tmp_path / "models" / "adder.onnx")
    log = tmp_path / "log"
    served = Served(tmp_path, str(tmp_path / "models"), "--bind", "127.0.0.1:0", log=log)
    processes = served.descendants()
    (stub,) = stubs(served, "adder")
    os.kill(stub, signal.SIGSTOP)
    endings: list[Any] = []
    client = tritonclient.InferenceServerClient(served.state["address"])
    done = threading.Event()

    def answered(result: Any, error: Any) -> None:
        endings.append(error)
        if len(endings) == 3:
            done.set()

    for rows in (ROW, ROW, ROW[0]):  # the last one's way is through our service
        client.async_infer("adder", [input_tensor("input", rows)], callback=answered)
    time.sleep(0.5)
    (triton,) = (pid for pid in processes if b"tritonserver\0" in (Path("/proc") / str(pid) / "cmdline").read_bytes())
    os.kill(triton, signal.SIGKILL)
    assert done.wait(WAIT_S)
    client.close()
    deadline = time.monotonic() + WAIT_S
    while "tritonserver ended with code -9 while serving" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    processes |= served.descendants()
    code, _ = served.end()
    assert [error.status() for error in endings] == [str(grpc.StatusCode.UNAVAILABLE)] * 3
    assert (code, alive(processes), served.state_file.exists()) == (0, set(), False)
