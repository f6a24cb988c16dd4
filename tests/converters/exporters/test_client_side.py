from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("jax")

from converters.convert import prepare
from converters.exporters import ClientSide, TensorSpec, export_jax
from nereid_backend.errors import BundleError, ExportError, ManifestError

RNG = np.random.default_rng(3)
W = RNG.normal(size=(4, 3)).astype(np.float32)
X = RNG.uniform(size=(2, 4)).astype(np.float32)
LABELS = b"low\nmiddle\nhigh\n"

CODE = """
import numpy as np
from nereid_backend.hooks import register_model
from .scales import SCALE

def preprocess(inputs):
    ((_, levels),) = inputs
    return {"x": levels.astype(np.float32) / SCALE}

register_model(preprocess=preprocess)
"""

CLASSES = ClientSide(
    postprocess=[
        {"softmax": {"input": "logits", "output": "probs"}},
        {"argmax": {"input": "logits", "output": "best"}},
        {"labels": {"input": "best", "output": "label", "file": "labels.txt"}},
    ],
    files={"labels.txt": LABELS},
    example={"x": X},
)


def classify(params: Any, x: Any) -> Any:
    return {"logits": x @ params}


def probabilities(x: np.ndarray) -> np.ndarray:
    shares = np.exp(x @ W)
    return shares / shares.sum(1, keepdims=True)


def export(bundle: Path, client: ClientSide, **options: Any) -> Any:
    return export_jax(classify, W, X, bundle, [1, 2], client=client, provenance=None, **options)


def levels(folder: Path, scale: int = 8, code: str = CODE, **changes: Any) -> ClientSide:
    """Clients send bytes, which a Python hook turns into what the program takes."""
    (folder / "my_hooks.py").write_text(code)
    sent = (X * scale).astype(np.uint8)
    return ClientSide(
        **{
            "inputs": [TensorSpec("levels", "u8", (-1, 4), 0)],
            "files": {"hooks.py": folder / "my_hooks.py", "scales.py": f"SCALE = {scale}\n".encode()},
            "example": {"levels": sent},
            "expected": {"logits": sent.astype(np.float32) / scale @ W},
            **changes,
        }
    )


def test_built_in_hooks_and_their_files_become_part_of_the_bundle_and_are_run_on_the_example(tmp_path: Path) -> None:
    client = CLASSES
    expected = {"probs": probabilities(X), "best": (X @ W).argmax(1)}
    done = export(tmp_path / "classes", ClientSide(client.inputs, client.outputs, (), client.postprocess, client.files,
                                                   client.example, expected))  # fmt: skip
    assert (done.directory / "labels.txt").read_bytes() == LABELS
    assert list(done.differences) == ["logits", "probs", "best"]
    assert done.notes == ()
    spec = prepare(done.directory).spec
    assert [tensor.name for tensor in spec.client_outputs] == ["logits", "probs", "best", "label"]
    assert [tensor.name for tensor in spec.outputs] == ["logits"]


def test_python_hooks_and_client_specs_are_exported_under_the_names_that_clients_see(tmp_path: Path) -> None:
    done = export(tmp_path / "levels", levels(tmp_path), axes={"levels": "nf"})
    assert (done.directory / "hooks.py").read_text() == CODE
    manifest = yaml.safe_load((done.directory / "manifest.yaml").read_text())
    assert manifest["client_inputs"] == [{"name": "levels", "dtype": "u8", "shape": "fn", "dims": {"f": 4}}]
    assert max(done.differences.values()) < 1e-5


def test_hooks_around_tensors_that_do_not_carry_the_batch_are_run_as_the_stages_they_become(tmp_path: Path) -> None:
    code = """
import numpy as np
from nereid_backend.hooks import register_model

def preprocess(inputs):
    named = dict(inputs)
    return {"x": named["keys"] * named["query"]}

register_model(preprocess=preprocess)
"""
    query = np.array([1, 2, 3, 4], np.float32)
    client = levels(
        tmp_path,
        code=code,
        inputs=[TensorSpec("query", "f32", (4,)), TensorSpec("keys", "f32", (-1, 4), 0)],
        example={"query": query, "keys": X},
        expected={"logits": X * query @ W},
    )
    done = export(tmp_path / "ranked", client)
    assert [stage.spec.name for stage in prepare(done.directory).stages][1] == "ranked__core"
    with pytest.raises(
        ExportError, match="output 'logits' of the bundle differs from the model on the clients' example"
    ):
        export(tmp_path / "wrong", levels(tmp_path, code=code, inputs=client.inputs, example=client.example))


def test_hooks_get_processes_of_their_own_when_asked_for(tmp_path: Path) -> None:
    done = export(tmp_path / "classes", replace(CLASSES, hook_processes=3, expected={"probs": probabilities(X)}))
    assert [stage.spec.instances for stage in prepare(done.directory).stages] == [3, 1, 3]
    assert max(done.differences.values()) < 1e-5


@pytest.mark.parametrize(
    ("code", "changes", "error", "words"),
    [
        (CODE + "oops\n", {}, ExportError, r"hooks.py of model 'levels' failed .*NameError: name 'oops'"),
        (CODE.replace("/ SCALE", "/ SCALE[0]"), {}, ExportError, "TypeError: 'int' object is not subscriptable"),
        (CODE.replace("np.float32", "np.float64"), {}, ExportError, "preprocess result.*'x'"),
        (CODE, {"example": {}}, ExportError, "there is no example; give what a client sends"),
        (CODE, {"example": {"level": X}}, ExportError, r"example has \['level'\], clients send \['levels'\]"),
        (CODE, {"example": {"levels": X}}, ExportError, "'levels' is float32"),
        (CODE, {"example": {"levels": np.zeros((3, 4), np.uint8)}}, ExportError, "3 rows"),
        (CODE, {"expected": {"scores": X}}, ExportError, r"expected names \['scores'\]; clients get \['logits'\]"),
        (CODE, {"expected": {"logits": X @ W}}, ExportError, "differs from the model on the clients' example"),
        (CODE, {"files": {}}, ManifestError, "only valid when"),
        (CODE, {"hook_processes": 65}, ManifestError, "'nereid.hook_processes' must be an integer from 1 to 64"),
        (CODE, {"files": {"../hooks.py": b""}}, ExportError, "no name for a file beside"),
        (CODE, {"files": {"weights.safetensors": b""}}, ExportError, "no name for a file beside"),
        (CODE, {"files": {"hooks.py": "nowhere.py"}}, ExportError, "from nowhere.py, which is no file"),
        (CODE, {"preprocess": [{"bert": {}}]}, BundleError, "unknown built-in 'bert'"),
    ],
)
def test_a_client_side_that_cannot_work_is_told_and_leaves_nothing(
    tmp_path: Path, code: str, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    (tmp_path / "bundles").mkdir()
    with pytest.raises(error, match=words):
        export(tmp_path / "bundles" / "levels", levels(tmp_path, code=code, **changes))
    assert list((tmp_path / "bundles").iterdir()) == []


def test_a_replacement_removes_the_files_of_the_export_before_but_none_that_were_edited(tmp_path: Path) -> None:
    bundle = export(tmp_path / "classes", CLASSES).directory
    export(bundle, levels(tmp_path), force=True)
    assert not (bundle / "labels.txt").exists()
    (bundle / "hooks.py").write_text(CODE + "# work of days\n")
    with pytest.raises(ExportError, match=r"holds hooks.py, which no export writes"):
        export(bundle, levels(tmp_path), force=True)
    assert (bundle / "hooks.py").read_text() == CODE + "# work of days\n"
