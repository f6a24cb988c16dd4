"""TensorFlow SavedModel folders by way of ONNX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from converters import by_onnx
from converters.convert import prepare
from nereid_backend.errors import BundleError, SignatureError

CONTRACT = "model_inference.textproto"
X = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    tensorflow = pytest.importorskip("tensorflow", reason="the tensorflow extra is not installed")
    pytest.importorskip("tf2onnx", reason="the tensorflow extra is not installed")

    def save(contract: str, function: Any, **inputs: Any) -> Path:
        module = tensorflow.Module()
        specs = {name: tensorflow.TensorSpec(shape, dtype, name=name) for name, (shape, dtype) in inputs.items()}
        module.call = tensorflow.function(lambda **tensors: function(tensorflow, **tensors))
        signatures = {"serving_default": module.call.get_concrete_function(**specs)}
        folder = tmp_path / "m"
        tensorflow.saved_model.save(module, str(folder), signatures=signatures)
        (folder / CONTRACT).write_text(contract)
        return folder

    return save


BOTH = """max_batch_size: 8
input { name: "b" dims: [4] }
input { name: "a" dims: [4] }
output { name: "difference" dims: [4] }
output { name: "largest" dims: [1] }"""


@pytest.mark.filterwarnings("ignore")
def test_a_signature_is_served_by_its_names_and_agrees_with_tensorflow(saved: Any, run: Any, tmp_path: Path) -> None:
    def both(tf: Any, a: Any, b: Any) -> Any:
        return {"difference": a - 2 * b, "largest": tf.reduce_max(tf.nn.softmax(a), axis=1, keepdims=True)}

    folder = saved(BOTH, both, a=([None, 4], "float32"), b=([None, 4], "float32"))
    with pytest.raises(BundleError, match=r"saved_model\.pb: TensorFlow runs it .*--allow-code"):
        prepare(folder)
    prepared = prepare(folder, allow_code=True)
    assert (prepared.spec.engine, prepared.spec.coalesce) == ("onnx", True)
    assert prepared.notes == ("agrees with TensorFlow on 8 made-up batches",)
    inputs = {tensor.name: X if tensor.name == "a" else X + 1 for tensor in prepared.spec.inputs}
    names = [tensor.name for tensor in prepared.spec.outputs]
    outputs = dict(zip(names, run(prepared, tmp_path / "r", *inputs.values()), strict=True))
    np.testing.assert_allclose(outputs["difference"], X - 2 * (X + 1), atol=1e-5)
    powers = np.exp(X - X.max(axis=1, keepdims=True))
    softmax = powers / powers.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(outputs["largest"][:, 0], softmax.max(axis=1), atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_an_unknown_signature_names_those_there_are(saved: Any) -> None:
    folder = saved("input_shape: [4]\noutput_shape: [4]", lambda tf, x: {"y": x + 1}, x=([None, 4], "float32"))
    with pytest.raises(BundleError, match="has no signature 'predict'; it has serving_default"):
        prepare(folder, allow_code=True, signature="predict")


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_saved_model_is_refused(saved: Any) -> None:
    folder = saved("input_shape: [4]\noutput_shape: [4]", lambda tf, x: {"y": x + 1}, x=([None, 4], "float32"))
    (folder / "saved_model.pb").write_bytes(b"hello")
    with pytest.raises(SignatureError, match=r"saved_model\.pb: cannot be loaded by TensorFlow"):
        prepare(folder, allow_code=True)


def test_without_tensorflow_the_message_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / CONTRACT).write_text("input_shape: [4]\noutput_shape: [4]")
    (tmp_path / "saved_model.pb").touch()
    (tmp_path / "variables").mkdir()

    def absent(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(by_onnx.importlib, "import_module", absent)
    with pytest.raises(BundleError, match=r"converted with tensorflow, .*pip install 'nereid-triton\[tensorflow\]'"):
        prepare(tmp_path, name="m", allow_code=True)
