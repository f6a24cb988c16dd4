"""A converted script folder on a bare tritonserver, with no service of ours in front of it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import input_tensor
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.triton

DOUBLING = """
import array, os, sys, time
x = array.array("f", sys.stdin.buffer.read())
if x[0] < 0:
    sys.stderr.write("negative\\n" * 50_000 + "the last line")
    sys.exit(5)
time.sleep(x[0])
with open(os.environ["NEREID_OUTPUT_PATH"], "wb") as file:
    file.write(f"float32 {os.environ['NEREID_INPUT_SHAPE']}\\n".encode())
    file.write(array.array("f", [2 * v for v in x]).tobytes())
"""


@pytest.fixture(scope="module")
def doubling(triton: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("scripts") / "doubling"
    folder.mkdir()
    (folder / "main.py").write_text(DOUBLING)
    (folder / "requirements.txt").write_text("")
    (folder / "model_inference.textproto").write_text("input_shape: [2]\noutput_shape: [2]\nmax_batch_size: 4\n")
    return str(triton.add(folder, children=3))


def infer(client: Any, model: str, *values: float, **options: Any) -> list[list[float]]:
    tensor = input_tensor("input", np.array([values], np.float32))
    result: list[list[float]] = client.infer(model, [tensor], **options).as_numpy("output").tolist()
    return result


def test_it_answers(client: Any, doubling: str) -> None:
    assert infer(client, doubling, 0, 4) == [[0, 8]]


def test_a_failure_is_told_as_far_as_a_client_can_read_it(client: Any, doubling: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        infer(client, doubling, -1, 0)
    assert caught.value.status() == "StatusCode.INTERNAL"
    text = caught.value.message()
    assert text.startswith("model 'doubling': it ended with exit code 5; stderr: ")
    assert text.endswith("negative\nthe last line")
    assert 4000 < len(text.encode()) < 6100


def test_a_link_that_nobody_opened_is_refused(client: Any, doubling: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        infer(client, doubling, 0, 4, parameters={"nereid_link": "0" * 32})
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_as_many_children_run_as_the_specification_says(client: Any, doubling: str) -> None:
    times: list[float] = []

    def call() -> None:
        begin = time.perf_counter()
        infer(client, doubling, 1, 0)
        times.append(time.perf_counter() - begin)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The fourth waits for one of the others, each of which takes at least a second.
    assert max(times) > 2
    assert sum(times) < 4 * max(times)
