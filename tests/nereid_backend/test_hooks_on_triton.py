"""Hooks inside the real tritonserver: Python files and built-ins, around a real program."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as tritonclient
from hooked_bundle import RAGGED_HOOKS, RAGGED_TENSORS, tensor, write_bundle
from serving import input_tensor
from tritonclient.utils import InferenceServerException

pytest.importorskip("jax")

pytestmark = pytest.mark.triton


@pytest.fixture
def doubling(tmp_path: Path) -> Callable[..., Path]:
    return lambda name, *arguments, **options: write_bundle(tmp_path / name, *arguments, **options)


AROUND = """
import time
from nereid_backend.hooks import InvalidArgument, NamedArray, register_model
from .offsets import BEFORE

def preprocess(inputs):
    ((_, x),) = inputs
    if (x == 99).any():
        raise InvalidArgument("99 is no measurement")
    if x[0, 0] == 96:
        raise InvalidArgument("96 is " + "très " * 5000 + "far")
    if (x == 98).any():
        raise KeyError("the secret path /srv")
    if (x == 97).any():
        raise SystemExit(3)
    return [NamedArray("x", x + BEFORE)]

def postprocess(outputs):
    return {"y": outputs[0].array * 10}

register_model(preprocess=preprocess, postprocess=postprocess)
"""


def infer(client: Any, model: str, output: str, **arrays: np.ndarray) -> np.ndarray:
    return client.infer(model, [input_tensor(n, a) for n, a in arrays.items()]).as_numpy(output)


def test_hooks_run_around_the_executable_and_fail_their_own_request_only(
    client: Any, triton: Any, doubling: Callable[..., Path]
) -> None:
    name = triton.add(doubling("around", AROUND, {"offsets.py": "import numpy as np\nBEFORE = np.float32(1)"}))
    assert infer(client, name, "y", x=np.array([[1, 2, 3, 4]], np.float32)).tolist() == [[40, 60, 80, 100]]
    outcome: dict[int, Any] = {}

    def call(value: int) -> None:
        with tritonclient.InferenceServerClient(triton.address) as own:
            try:
                outcome[value] = infer(own, name, "y", x=np.full((1, 4), value, np.float32))[0, 0].item()
            except InferenceServerException as error:
                outcome[value] = (error.status(), error.message())

    threads = [threading.Thread(target=call, args=(value,)) for value in (*range(12), 96, 97, 98, 99)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    details = "the server's log has the details"
    code, text = outcome.pop(96)
    assert (code, text[:11], text[-8:]) == ("StatusCode.INVALID_ARGUMENT", "96 is très ", "très far")
    assert outcome == {
        **{value: (value + 1) * 20.0 for value in range(12)},
        97: ("StatusCode.INTERNAL", f"preprocess of model 'around' failed with SystemExit; {details}"),
        98: ("StatusCode.INTERNAL", f"preprocess of model 'around' failed with KeyError; {details}"),
        99: ("StatusCode.INVALID_ARGUMENT", "99 is no measurement"),
    }


def test_tensors_without_the_batch_still_share_runs_of_the_executable(
    client: Any, triton: Any, doubling: Callable[..., Path]
) -> None:
    name = triton.add(doubling("scored", RAGGED_HOOKS, **RAGGED_TENSORS))
    query, keys = np.arange(4, dtype=np.float32), np.array([[1] * 4, [9] * 4, [5] * 4], np.float32)
    tensors = [input_tensor("query", query), input_tensor("keys", keys)]
    answer = client.infer(name, tensors)
    assert answer.as_numpy("best").tolist() == [8, 24, 16]
    assert answer.as_numpy("above").tolist() == [24]
    with pytest.raises(InferenceServerException, match="no keys") as caught:
        client.infer(name, [tensors[0], input_tensor("keys", keys[:0])])
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert client.get_model_metadata(name).platform == "ensemble"


def test_a_number_per_row_passes_between_the_processes(client: Any, triton: Any, doubling: Callable[..., Path]) -> None:
    name = triton.add(
        doubling(
            "summed",
            "from nereid_backend.hooks import register_model\n"
            "register_model(postprocess=lambda outputs: {'total': outputs[0].array.sum()})\n",
            function=lambda x: x.sum(1),
            executable_outputs=[tensor("y", "n")],
            client_outputs=[tensor("total", "")],
        )
    )
    assert infer(client, name, "total", x=np.arange(12, dtype=np.float32).reshape(3, 4)).tolist() == [66]


def packed(*texts: str, width: int = 0) -> dict[str, np.ndarray]:
    encoded = [text.encode() for text in texts]
    rows = np.zeros((len(texts), max(width, *map(len, encoded))), np.uint8)
    for row, text in zip(rows, encoded, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
    return {"texts": rows, "text_lens": np.array([[len(text)] for text in encoded], np.int32)}


def test_texts_of_any_length_go_in_and_labels_come_out(client: Any, triton: Any, doubling: Callable[..., Path]) -> None:
    pytest.importorskip("tokenizers", reason="the text extra is not installed in this interpreter")

    def program(ids: Any) -> Any:
        import jax.numpy as jnp

        # Score of a class: how often its token (4 or 5) occurs.
        return jnp.stack([(ids == 4).sum(1), (ids == 5).sum(1)], 1).astype(jnp.float32)

    name = triton.add(
        doubling(
            "sentiment",
            files={"vocab.txt": "[PAD]\n[UNK]\n[CLS]\n[SEP]\nbad\ngood\n", "labels.txt": "negative\npositive\n"},
            function=program,
            row=((16,), np.int64),
            executable_inputs=[tensor("input_ids", "sn", "i64", s=16)],
            executable_outputs=[tensor("logits", "cn", c=2)],
            nereid={
                "preprocess": [{"bert_text": {"vocab": "vocab.txt"}}],
                "postprocess": [
                    {"softmax": {"input": "logits", "output": "probs", "axis": "c"}},
                    {"argmax": {"input": "logits", "output": "label_id"}},
                    {"labels": {"input": "label_id", "output": "label", "file": "labels.txt"}},
                ],
            },
        )
    )
    outcome: dict[str, list[str]] = {}
    texts = ["Good.", "BAD bad good", "a good good film", "bad"]

    def call(text: str) -> None:
        with tritonclient.InferenceServerClient(triton.address) as own:
            label = infer(own, name, "label", **packed(text))
            outcome[text] = [bytes(row).rstrip(b"\0").decode() for row in label]

    threads = [threading.Thread(target=call, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcome == dict(zip(texts, [["positive"], ["negative"], ["positive"], ["negative"]], strict=True))
    tensors = [input_tensor(n, a) for n, a in packed("good", "bad").items()]
    answer = client.infer(name, tensors)
    assert answer.as_numpy("logits").tolist() == [[0, 1], [1, 0]]
    assert answer.as_numpy("label_id").tolist() == [[1], [0]]
    np.testing.assert_allclose(answer.as_numpy("probs")[0], [1 / (1 + np.e), np.e / (1 + np.e)], rtol=1e-6)
    wrong = packed("good")
    wrong["text_lens"][:] = 9
    with pytest.raises(InferenceServerException, match="'text_lens' must be 0 to 4") as caught:
        infer(client, name, "label", **wrong)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_texts_of_different_lengths_share_a_run(triton: Any, client: Any, doubling: Callable[..., Path]) -> None:
    """Triton itself batches equal shapes only."""
    name = triton.add(
        doubling(
            "ragged_rows",
            "import time\n"
            "from nereid_backend.hooks import register_model\n"
            "def preprocess(inputs):\n"
            "    time.sleep(0.05)\n"
            "    return {'x': inputs[0].array[:, :4]}\n"
            "register_model(preprocess=preprocess)\n",
            client_inputs=[tensor("x", "cn", c=-1)],
        )
    )
    widths = range(4, 16)

    def call(width: int) -> None:
        with tritonclient.InferenceServerClient(triton.address) as own:
            got = infer(own, name, "y", x=np.full((1, width), width, np.float32))
            assert got.tolist() == [[2 * width] * 4]

    before = client.get_inference_statistics(name).model_stats[0]
    threads = [threading.Thread(target=call, args=(width,)) for width in widths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = client.get_inference_statistics(name).model_stats[0]
    assert after.inference_count - before.inference_count == len(widths)
    assert after.execution_count - before.execution_count < len(widths) / 2


def test_detections_of_a_batch_come_padded_and_counted(client: Any, triton: Any, doubling: Callable[..., Path]) -> None:
    def program(x: Any) -> Any:
        import jax.numpy as jnp

        # Two proposals an image, apart; the row says how sure the program is of class 1 for each.
        logits = jnp.stack([jnp.zeros_like(x[:, :2]), x[:, :2]], -1)
        proposals = jnp.broadcast_to(jnp.asarray([[0, 0, 4, 4], [8, 8, 12, 16]], jnp.float32), (len(x), 2, 4))
        return logits, jnp.zeros((len(x), 2, 8), jnp.float32), proposals

    name = triton.add(
        doubling(
            "detector",
            function=program,
            executable_outputs=[
                tensor("logits", "ckn", c=2, k=2), tensor("deltas", "dkn", d=8, k=2), tensor("rois", "dkn", d=4, k=2)
            ],
            client_outputs=[tensor("detections", "dkn", d=6, k=3), tensor("counts", "n", "i32")],
            nereid={
                "postprocess": [
                    {"detection": {"logits": "logits", "deltas": "deltas", "proposals": "rois", "top": 3,
                                   "score_threshold": 0.5}}
                ]
            },
        )
    )  # fmt: skip
    answer = client.infer(name, [input_tensor("x", np.array([[1, 3, 0, 0], [-1, -1, 0, 0]], np.float32))])
    assert [output.name for output in answer.get_response().outputs] == ["detections", "counts"]
    assert answer.as_numpy("counts").tolist() == [[2], [0]]
    first = answer.as_numpy("detections")[0]
    assert first[:, :4].tolist() == [[8, 8, 12, 16], [0, 0, 4, 4], [0, 0, 0, 0]]
    np.testing.assert_allclose(first[:2, 4], 1 / (1 + np.exp([-3.0, -1.0])), rtol=1e-5)
    assert first[:2, 5].tolist() == [1, 1]
