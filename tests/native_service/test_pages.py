"""The Python of the pages for users runs as written, against the demo's models, and their settings are accepted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from serving import Served

from nereid_backend.scripts import frame

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
MODELS = ROOT / "nereid_backend" / "MODELS.md"
SERVING = ROOT / "native_service" / "SERVING.md"
SNOOZEML = ROOT / "native_service" / "SNOOZEML.md"


DIGITS = {
    "executable_inputs": [{"name": "pixels", "dtype": "f32", "shape": "cn", "dims": {"c": 64}}],
    "executable_outputs": [{"name": "probabilities", "dtype": "f32", "shape": "kn", "dims": {"k": 10}}],
}


def blocks(language: str, page: Path) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.triton
def test_the_clients_in_the_pages_classify_digits(
    demo_bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Served(tmp_path, str(demo_bundles), "--bind", "127.0.0.1:0")
    try:
        server.state_file.rename(tmp_path / "state.json")
        (tmp_path / "bundles").symlink_to(demo_bundles)
        monkeypatch.chdir(tmp_path)
        names: dict[str, Any] = {}
        stock, own = blocks("python", README)
        snoozing, *_ = blocks("python", SNOOZEML)
        exec(stock, names)
        names["client"].close()
        exec(own, names)
        exec(snoozing, names)
        (bench,) = re.findall(r"^    nereid (bench digits .*)$", README.read_text(), re.MULTILINE)
        shortly = ["--duration", "0.5", "--window", "0.5", "--warm-up", "0"]
        subprocess.run([sys.executable, "-m", "native_service.cli", *bench.split(), *shortly], check=True)
        assert "<svg" in Path("digits.html").read_text()
    finally:
        server.end()
    assert server.state["models"] == ["digits", "magika", "projection", "reader"]  # what the reader calls is hidden
    local = np.load(demo_bundles / "digits" / "local_jax.npy")
    np.testing.assert_allclose(names["probabilities"], local[:2], atol=1e-5)
    np.testing.assert_allclose(names["streamed"], local[:2], atol=1e-5)
    np.testing.assert_allclose(names["snoozed"], local[:2], atol=1e-5)


def test_the_pipeline_in_the_pages_is_the_one_of_the_demo() -> None:
    (pipeline,) = (block for block in blocks("python", MODELS) if "register_meta_model" in block)
    assert pipeline in (ROOT / "tests" / "demo" / "reader" / "hooks.py").read_text()


def test_the_script_in_the_pages_answers(tmp_path: Path) -> None:
    (script,) = (block for block in blocks("python", MODELS) if "NEREID_OUTPUT_PATH" in block)
    variables = {"NEREID_INPUT_SHAPE": "1,2", "NEREID_INPUT_DTYPE": "float32", "NEREID_OUTPUT_DTYPE": "float32"}
    variables["NEREID_OUTPUT_PATH"] = str(tmp_path / "output")
    data = np.array([1, 2], "<f4").tobytes()
    done = subprocess.run([sys.executable, "-c", script], env=variables, input=data, stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"got 2 numbers\n"
    assert frame.read(tmp_path / "output").array.tolist() == [[3, 5]]


def test_the_worker_in_the_pages_is_asked_what_it_takes(tmp_path: Path) -> None:
    from converters.convert import prepare

    (worker,) = (block for block in blocks("python", MODELS) if "def predict" in block)
    (tmp_path / "scores").mkdir()
    (tmp_path / "scores" / "snooze_model.py").write_text(worker)
    spec = prepare(tmp_path / "scores", allow_code=True).spec
    assert [(t.name, t.shape) for t in (*spec.inputs, *spec.outputs)] == [("features", (-1, 4)), ("scores", (-1, 2))]


def test_the_settings_in_the_pages_are_accepted(tmp_path: Path) -> None:
    from native_service import settings

    (block,) = blocks("yaml", README)
    (tmp_path / "bundles").mkdir()
    (tmp_path / "nereid.yaml").write_text(block)
    loaded = settings.load(tmp_path / "nereid.yaml")
    raw = yaml.safe_load(block)
    assert str(loaded.server.bind) == raw["server"]["bind_addr"]
    assert [model.name for model in loaded.models] == ["digits"]
    (on_demand,) = (block for block in blocks("yaml", SERVING) if "residency:" in block)
    added = yaml.safe_load(on_demand)
    (tmp_path / "nereid.yaml").write_text(
        yaml.safe_dump({"server": {**raw["server"], **added["server"]}, "models": added["models"]})
    )
    demanding = settings.load(tmp_path / "nereid.yaml")
    assert demanding.models[0].options.idle_timeout_s == 300
    assert demanding.server.residency.max_loaded_models == 4
    (protection,) = (block for block in blocks("yaml", SERVING) if "tls:" in block)
    (tmp_path / "nereid.yaml").write_text(
        yaml.safe_dump({**raw, "server": {**raw["server"], **yaml.safe_load(protection)["server"]}})
    )
    server = settings.load(tmp_path / "nereid.yaml").server
    assert server.tls is not None
    assert server.auth is not None


def test_the_hooks_in_the_pages_fit_and_run(tmp_path: Path) -> None:
    from converters import hooks, manifest
    from converters.prepared import Prepared
    from nereid_backend import user_code
    from nereid_backend.hooks import InvalidArgument, ModelHooks, NamedArray
    from nereid_backend.spec import ModelSpec, TensorSpec

    (code,) = (
        block
        for block in blocks("python", MODELS)
        if "import InvalidArgument, register_model" in block or "register_model(" in block
    )
    (declared,) = (block for block in blocks("yaml", MODELS) if "preprocess:" in block)
    (tmp_path / "hooks.py").write_text(code)
    preprocess = user_code.load(tmp_path, "digits", ModelHooks, "register_model").preprocess
    image = NamedArray("image", np.full((2, 64), 16, np.uint8))
    ((name, pixels),) = preprocess([image])
    assert (name, pixels.dtype, pixels.shape) == ("pixels", np.float32, (2, 64))
    with pytest.raises(InvalidArgument, match="from 0 to 16"):
        preprocess([NamedArray("image", image.array + np.uint8(1))])
    (inputs,) = re.findall(r"`(client_inputs: \[.*?\])`", MODELS.read_text())
    parsed = manifest.parse({"format_version": "2.1", **DIGITS, **yaml.safe_load(inputs)}, has_hook=True)
    header = b"{}      "
    (tmp_path / "weights.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    row = [TensorSpec("pixels", "f32", (-1, 64), 0)], [TensorSpec("probabilities", "f32", (-1, 10), 0)]
    digits = hooks.attach(Prepared(ModelSpec("digits", "stablehlo", "stablehlo", *row, ()), {}), parsed, tmp_path).spec
    assert [(t.name, t.dtype, t.shape) for t in digits.client_inputs] == [("image", "u8", (-1, 64))]
    (tmp_path / "hooks.py").unlink()
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n")
    (tmp_path / "labels.txt").write_text("negative\npositive\n")
    ids, logits = TensorSpec("input_ids", "i64", (-1, 8), 0), TensorSpec("logits", "f32", (-1, 2), 0)
    tensors = {
        "executable_inputs": [{"name": "input_ids", "dtype": "i64", "shape": "sn", "dims": {"s": 8}}],
        "executable_outputs": [{"name": "logits", "dtype": "f32", "shape": "cn", "dims": {"c": 2}}],
    }
    parsed = manifest.parse({"format_version": "2.1", **tensors, **yaml.safe_load(declared)}, has_hook=False)
    spec = ModelSpec("sentiment", "stablehlo", "stablehlo", (ids,), (logits,), ())
    got = hooks.attach(Prepared(spec, {}), parsed, tmp_path).spec
    assert [t.name for t in got.client_inputs] == ["texts", "text_lens"]
    assert [t.name for t in got.client_outputs] == ["logits", "probs", "label_id", "label"]
