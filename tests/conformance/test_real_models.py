"""Models that packages ship and models of the shared fixtures, converted and asked on the real server."""

from __future__ import annotations

import importlib.util
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import input_tensor

FIXTURES = Path(__file__).resolve().parents[3] / "shared" / "fixtures"

FRAME, CONTEXT, RATE = 512, 64, 16_000
FIRST_VALUES = [0.1233, 0.1325, 0.0540]
"""What both flavours of silero-vad 6.2.3 say of the first frames of a 220 Hz tone."""


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")


needs_fixtures = pytest.mark.skipif(not FIXTURES.exists(), reason="../shared/fixtures is not beside this checkout")


def tone(frames: int) -> np.ndarray:
    seconds = np.arange(FRAME * frames) / RATE
    return (0.5 * np.sin(2 * np.pi * 220 * seconds)).astype(np.float32).reshape(frames, FRAME)


@needs("silero_vad")
@pytest.mark.triton
def test_silero_vad_in_onnx_passes_its_state_in_and_out(triton: Any, client: Any) -> None:
    triton.add(Path(str(files("silero_vad") / "data" / "silero_vad.onnx")))
    state, before = np.zeros((2, 1, 128), np.float32), np.zeros((1, CONTEXT), np.float32)
    said = []
    for frame in tone(20):
        arrays = {"input": np.concatenate([before, frame[None]], axis=1), "state": state, "sr": np.array([RATE])}
        answer = client.infer("silero_vad", [input_tensor(name, array) for name, array in arrays.items()])
        state, before = answer.as_numpy("stateN"), frame[None, -CONTEXT:]
        said.append(float(answer.as_numpy("output").item()))
    np.testing.assert_allclose(said[:3], FIRST_VALUES, atol=1e-4)
    assert state.any()


@needs("silero_vad", "torch")
@pytest.mark.triton
def test_silero_vad_in_torchscript_takes_its_rate_as_a_number(triton: Any, client: Any, tmp_path: Path) -> None:
    folder = tmp_path / "silero_script"
    folder.mkdir()
    (folder / "silero_vad.pt").write_bytes((files("silero_vad") / "data" / "silero_vad.jit").read_bytes())
    (folder / "model_inference.textproto").write_text(
        """input { name: "x" data_type: "FP32" dims: [1, 512] }
           input { name: "sr" data_type: "INT64" dims: [1] }
           output { name: "speech" data_type: "FP32" dims: [1, 1] }"""
    )
    triton.add(folder)
    said = []
    for frame in tone(3):
        tensors = [input_tensor("x", frame[None]), input_tensor("sr", np.array([RATE]))]
        said.append(float(client.infer("silero_script", tensors).as_numpy("speech").item()))
    np.testing.assert_allclose(said, FIRST_VALUES, atol=1e-4)


@needs("magika")
@pytest.mark.triton
def test_magika_tells_python_from_html(triton: Any, client: Any) -> None:
    folder = files("magika") / "models" / "standard_v3_3"
    config = json.loads((folder / "config.min.json").read_text())
    triton.add(Path(str(folder / "model.onnx")), name="magika")
    begin, end, pad = config["beg_size"], config["end_size"], config["padding_token"]

    def features(text: str) -> list[int]:
        """The first and the last bytes, stripped and padded, as magika's own reader takes them."""
        data = text.encode().strip()
        head, tail = list(data[:begin]), list(data[-end:])
        return [*head, *[pad] * (begin - len(head)), *[pad] * (end - len(tail)), *tail]

    html = "<!DOCTYPE html><html><head><title>A page</title></head><body><p>Hello</p></body></html>\n" * 20
    rows = np.array([features(Path(__file__).read_text()), features(html)], np.int32)
    scores = client.infer("magika", [input_tensor("bytes", rows)]).as_numpy("target_label")
    labels = [config["target_labels_space"][index] for index in scores.argmax(axis=1)]
    assert labels == ["python", "html"]


@needs_fixtures
@pytest.mark.triton
@pytest.mark.parametrize("name", ["iris_logreg", "iris_forest"])
def test_a_snoozeml_onnx_file_predicts_what_its_estimator_did(name: str, triton: Any, client: Any) -> None:
    case = json.loads((FIXTURES / "snoozeml" / "expected.json").read_text())["models"][name]
    triton.add(FIXTURES / "snoozeml" / case["file"])
    rows = np.array(case["input"]["data"], np.float32).reshape(case["input"]["shape"])
    answer = client.infer(name, [input_tensor(case["io"]["input"][0], rows)])
    for output, value in case["expected"].items():
        wanted = np.array(value["data"]).reshape(value["shape"])
        np.testing.assert_allclose(answer.as_numpy(output), wanted, atol=case["atol"])


@needs_fixtures
@needs("tensorflow", "tf2onnx")
@pytest.mark.triton
@pytest.mark.filterwarnings("ignore")
def test_tfadd_is_served_without_tensorflow(triton: Any, client: Any) -> None:
    triton.add(FIXTURES / "nereid-ml-backends" / "tfadd", allow_code=True)
    for case in json.loads((FIXTURES / "nereid-ml-backends" / "tfadd" / "expected.json").read_text())["cases"]:
        (given,), (wanted,) = case["inputs"].values(), case["outputs"].values()
        rows = np.array(given["data"], np.float32).reshape(given["shape"])
        answer = client.infer("tfadd", [input_tensor("input", rows)])
        np.testing.assert_array_equal(answer.as_numpy("output"), np.reshape(wanted["data"], wanted["shape"]))
