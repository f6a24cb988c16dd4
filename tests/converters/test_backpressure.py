"""``nereid-convert --backpressure triton``: what is written, what is refused, and what Triton makes of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxruntime")

import endings
import numpy as np
from click.testing import CliRunner
from google.protobuf import text_format
from serving import input_tensor
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException

from converters.backpressure import bounded
from converters.cli import command
from converters.prepared import Prepared
from converters.repository import config
from nereid_backend.errors import BundleError
from nereid_backend.spec import ModelSpec, Script


def prepared(**fields: Any) -> Prepared:
    return Prepared(ModelSpec("m", "onnx", "onnxruntime_onnx", (), (), (), **{"max_batch_size": 4, **fields}), {})


@pytest.mark.parametrize(("instances", "capacity", "expected"), [(1, 16, (2, 14)), (1, 3, (2, 1)), (4, 6, (4, 2))])
def test_the_capacity_is_what_runs_and_what_waits(instances: int, capacity: int, expected: tuple[int, int]) -> None:
    model = bounded(prepared(instances=instances, coalesce=True), capacity)
    message = config(model.spec, model.most_waiting)
    waiting = message.dynamic_batching.default_queue_policy.max_queue_size
    assert (message.instance_group[0].count, waiting) == expected
    assert model.notes[0].startswith("Triton's own queue limit: ")
    assert ("each with its own memory" in model.notes[0]) == (instances == 1)


def test_without_it_there_is_no_queue_policy() -> None:
    assert not config(prepared(coalesce=True).spec).dynamic_batching.HasField("default_queue_policy")


@pytest.mark.parametrize(
    ("fields", "capacity", "words"),
    [
        ({}, 2, "needs a --queue-capacity of 3 or more"),
        ({"max_batch_size": 0}, 16, "a model with a batch axis"),
        ({"script": Script(children=2, time_limit_s=1, any_dtype=False)}, 16, "bounds its own processes"),
        ({"stages": (prepared().spec,)}, 16, "use nereid serve"),
    ],
)
def test_a_queue_that_triton_cannot_bound_is_refused(fields: dict[str, Any], capacity: int, words: str) -> None:
    with pytest.raises(BundleError, match=words):
        bounded(prepared(**fields), capacity)


def test_the_command_writes_it_and_warns(plus_one: Any, tmp_path: Path) -> None:
    path = plus_one(("batch", 4), path=tmp_path / "add_one.onnx")
    arguments = [str(path), "-o", str(tmp_path / "r"), "--backpressure", "triton", "--queue-capacity", "5"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0
    assert "UNAVAILABLE" in result.stderr
    text = (tmp_path / "r" / "add_one" / "config.pbtxt").read_text()
    written = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert written.dynamic_batching.default_queue_policy.max_queue_size == 3
    wrong = CliRunner().invoke(command, [str(path), "-o", str(tmp_path / "s"), "--queue-capacity", "5"])
    assert (wrong.exit_code, (tmp_path / "s").exists()) == (2, False)
    assert "goes with --backpressure triton" in wrong.stderr


@pytest.mark.triton
def test_triton_itself_refuses_what_is_too_much_and_answers_the_rest(triton: Any, client: Any, tmp_path: Path) -> None:
    endings.write_slow(tmp_path / "bounded.onnx", layers=12)
    model = triton.add(tmp_path / "bounded.onnx", max_batch_size=1, queue_capacity=4)
    row = np.ones((1, endings.WIDTH), np.float32)

    def ask(_: int) -> str:
        try:
            answer = client.infer(model, [input_tensor("input", row)]).as_numpy("output")
        except InferenceServerException as error:
            return f"{error.status()}: {error.message()}"
        return "right" if np.allclose(answer, endings.WIDTH + 1) else "wrong"

    with ThreadPoolExecutor(16) as pool:
        ends = list(pool.map(ask, range(64)))
    refused = [end for end in ends if end != "right"]
    assert 4 <= ends.count("right") < len(ends)
    assert all(end.startswith("StatusCode.UNAVAILABLE") and "Exceeds maximum queue size" in end for end in refused)
    assert ask(0) == "right"
