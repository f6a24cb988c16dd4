"""Models that were another backend's, in the real tritonserver: the answers of their own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import infer, input_tensor
from tritonclient.grpc import InferRequestedOutput
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.triton

FP32 = "data_type: TYPE_FP32"


def model_folder(folder: Path, version: int, config: str) -> Path:
    """Its version folder, for the model's file."""
    (folder / str(version)).mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    return folder / str(version)


def test_a_torchscript_model_that_moved_over_answers_what_its_file_does(
    triton: Any, client: Any, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")

    class Module(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, image: Any, shift: Any) -> Any:
            return image.sum(1) - shift[:, None], image * 2

    folder = tmp_path / "moved_torch"
    config = f"""
        platform: "pytorch_libtorch" max_batch_size: 8 dynamic_batching {{ preferred_batch_size: 4 }}
        input [ {{ name: "shift" {FP32} dims: 1 reshape {{ shape: [] }} }},
                {{ name: "image" {FP32} dims: [2, -1] reshape {{ shape: [-1, 2] }} }} ]
        output [ {{ name: "SCORES__1" {FP32} dims: [1, -1, 2] reshape {{ shape: [-1, 2] }} label_filename: "names" }},
                 {{ name: "SUM__0" {FP32} dims: 2 }} ]"""
    module = torch.jit.trace(Module(), (torch.ones(2, 3, 2), torch.ones(2)))
    module.save(str(model_folder(folder, 4, config) / "model.pt"))
    (folder / "names").write_text("cat\ndog\nbird\ncow\n")
    triton.add(folder)

    shift, image = np.array([[1], [2], [3]], np.float32), np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    total, scores = module(torch.from_numpy(image.reshape(3, -1, 2)), torch.from_numpy(shift[:, 0]))
    answer = infer(client, "moved_torch", shift=shift, image=image)
    np.testing.assert_array_equal(answer["SUM__0"], total)
    np.testing.assert_array_equal(answer["SCORES__1"], np.asarray(scores)[:, None])

    best = [InferRequestedOutput("SCORES__1", class_count=2)]
    inputs = [input_tensor("image", image), input_tensor("shift", shift)]
    classes = client.infer("moved_torch", inputs, outputs=best).as_numpy("SCORES__1")
    assert [text.decode().split(":")[1:] for text in classes[1]] == [["3", "cow"], ["2", "bird"]]
    with pytest.raises(InferenceServerException, match=r"\[-1,2,-1\]"):
        infer(client, "moved_torch", shift=shift, image=image.reshape(3, 4, 1))


def test_an_onnx_model_that_moved_over_answers_what_its_file_does(
    triton: Any, client: Any, tmp_path: Path, make_onnx: Any
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    config = f"""
        backend: "onnxruntime" default_model_filename: "graph.onnx"
        input {{ name: "b" {FP32} dims: [2, 4] }} input {{ name: "a" {FP32} dims: [-1, 4] }}
        output {{ name: "d" {FP32} dims: [-1, 4] }}"""
    file = model_folder(tmp_path / "moved_onnx", 1, config) / "graph.onnx"
    values = [("a", 1, [2, 4]), ("b", 1, [2, 4]), ("c", 1, [2, 4]), ("d", 1, [2, 4])]
    make_onnx([("Sub", ["a", "b"], ["c"]), ("Div", ["a", "b"], ["d"])], values[:2], values[2:], file)
    triton.add(tmp_path / "moved_onnx")
    a, b = np.arange(8, dtype=np.float32).reshape(2, 4), np.full((2, 4), 3, np.float32)
    (expected,) = onnxruntime.InferenceSession(str(file)).run(["d"], {"a": a, "b": b})
    answer = infer(client, "moved_onnx", b=b, a=a)
    assert [*answer] == ["d"]
    np.testing.assert_array_equal(answer["d"], expected)
