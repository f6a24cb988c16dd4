"""Hooks at the public address of ``nereid serve``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as tritonclient
from hooked_bundle import RAGGED_HOOKS, RAGGED_TENSORS, write_bundle
from serving import Served, input_tensor
from tritonclient.utils import InferenceServerException

pytest.importorskip("jax")

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("hooks") / "bundles" / "scored", RAGGED_HOOKS, **RAGGED_TENSORS)


@pytest.fixture(scope="module")
def served(bundle: Path) -> Iterator[Served]:
    server = Served(bundle.parents[1], str(bundle.parent), "--bind", "127.0.0.1:0", "--watch")
    yield server
    code, output = server.end()
    assert code == 0, output
    assert "hooks.py is run" in output


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with tritonclient.InferenceServerClient(served.state["address"]) as client:
        yield client


def test_a_model_of_several_processes_is_one_model_to_clients(served: Served, client: Any) -> None:
    tensors = [
        input_tensor("query", np.arange(4, dtype=np.float32)),
        input_tensor("keys", np.array([[1] * 4, [9] * 4], np.float32)),
    ]
    answer = client.infer("scored", tensors)
    assert (answer.as_numpy("best").tolist(), answer.as_numpy("above").tolist()) == ([8, 24], [24])
    assert served.state["models"] == ["scored"]
    assert [model.name for model in client.get_model_repository_index().models] == ["scored"]
    metadata = client.get_model_metadata("scored")
    shapes = {tensor.name: list(tensor.shape) for tensor in (*metadata.inputs, *metadata.outputs)}
    assert shapes == {"query": [4], "keys": [-1, 4], "best": [-1], "above": [-1]}


@pytest.mark.parametrize("stage", ["scored__core", "scored__preprocess", "scored__postprocess"])
def test_the_processes_behind_a_model_cannot_be_called(client: Any, stage: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.infer(stage, [input_tensor("x", np.zeros((1, 4), np.float32))])
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    assert not client.is_model_ready(stage)


def test_the_error_of_a_hook_keeps_its_code_and_text(client: Any) -> None:
    tensors = [input_tensor("query", np.zeros(4, np.float32)), input_tensor("keys", np.zeros((0, 4), np.float32))]
    with pytest.raises(InferenceServerException, match="no keys") as caught:
        client.infer("scored", tensors)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_changed_hooks_answer_after_a_moment_and_no_call_fails_meanwhile(bundle: Path, client: Any) -> None:
    tensors = [
        input_tensor("query", np.zeros(4, np.float32)),
        input_tensor("keys", np.ones((1, 4), np.float32)),
    ]
    assert client.infer("scored", tensors).as_numpy("best").tolist() == [2]
    changed = RAGGED_HOOKS.replace('arrays["keys"] + arrays["query"]', '100 * arrays["keys"]')
    (bundle / "hooks.py").write_text(changed)
    deadline = time.monotonic() + 60
    while (best := client.infer("scored", tensors).as_numpy("best").tolist()) != [200]:
        assert best == [2]
        assert time.monotonic() < deadline, "the changed hooks never answered"
        time.sleep(0.05)
