"""Nereid folders: detection (F19, F20), ONNX binding, TorchScript with a trial run."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from converters import folder, trial
from converters.discover import find, is_model
from converters.folder import detect
from converters.kinds import Opening
from nereid_backend.errors import BundleError, ContractError, SignatureError
from nereid_backend.spec import ModelSpec, Program, TensorSpec

CONTRACT = "model_inference.textproto"
F32, I64, DOUBLE = 1, 7, 11


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., Path]:
    def make(*names: str, contract: str = "input_shape: [4]\nmax_batch_size: 8\n", name: str = "m") -> Path:
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        for file in names:
            if file.endswith("/"):
                (path / file).mkdir()
            else:
                (path / file).write_text(contract if file == CONTRACT else "")
        return path

    return make


@pytest.mark.parametrize(
    ("names", "backend"),
    [
        ((CONTRACT, "a.pt"), "torch"),
        ((CONTRACT, "a.onnx"), "onnx"),
        ((CONTRACT, "a.onnx", "a.onnx.data", "README.md"), "onnx"),
        (("main.py", "requirements.txt"), "python"),
        ((CONTRACT, "main.py", "requirements.txt"), "python"),
        ((CONTRACT, "main.py", "requirements.txt", "weights.pkl", "a.pt2"), "python"),
        ((CONTRACT, "a.pt2"), "pt2"),
        ((CONTRACT, "saved_model.pb", "variables/"), "tensorflow"),
        ((CONTRACT, "main.cpp"), "cpp"),
        ((CONTRACT, "model"), "cpp"),
    ],
)
def test_f19_a_folder_is_told_by_its_files(files: Any, names: tuple[str, ...], backend: str) -> None:
    assert detect(files(*names)) == backend


@pytest.mark.parametrize(
    ("names", "hint"),
    [
        ((), "it holds no model file and no model_inference.textproto"),
        ((CONTRACT,), r"model_inference.textproto needs one model file beside it \(\.pt, \.onnx, .*main\.py with"),
        ((CONTRACT, "saved_model.pb"), "saved_model.pb with variables/"),
        (("a.pt",), "a.pt needs model_inference.textproto beside it"),
        (("main.py",), r"main.py needs requirements.txt beside it \(it may be empty\)"),
    ],
)
def test_f19_a_folder_that_fits_nothing_is_told_what_is_missing(files: Any, names: tuple[str, ...], hint: str) -> None:
    with pytest.raises(BundleError, match=f"neither a bundle .*: .*{hint}"):
        detect(files(*names))


def test_f19_a_folder_that_fits_several_asks_for_one(files: Any) -> None:
    path = files(CONTRACT, "a.pt", "a.onnx")
    with pytest.raises(BundleError, match=r"matches several backends \(torch, onnx\); set backend"):
        detect(path)
    assert (detect(path, "onnx"), detect(path, "torch"), detect(path, "rust")) == ("onnx", "torch", "torch")


def test_a_script_beside_a_model_file_may_be_passed_over_by_name(files: Any) -> None:
    path = files(CONTRACT, "main.py", "requirements.txt", "a.pt2")
    assert (detect(path), detect(path, "pt2")) == ("python", "pt2")


def test_f19_a_named_backend_is_held_against_the_files(files: Any) -> None:
    path = files(CONTRACT, "a.pt")
    with pytest.raises(BundleError, match=r"backend 'onnx' was asked for, but the folder does not hold .* one \.onnx"):
        detect(path, "onnx")
    with pytest.raises(BundleError, match="unknown backend 'caffe'; known: torch, onnx, pt2, jax, xgboost, "):
        detect(path, "caffe")
    assert detect(path, "cxx") == "cxx"


@pytest.mark.parametrize("backend", ["torch", "onnx"])
@pytest.mark.parametrize("count", [0, 2])
def test_f20_a_folder_holds_exactly_one_model_file(files: Any, backend: str, count: int) -> None:
    suffix = {"torch": ".pt", "onnx": ".onnx"}[backend]
    path = files(CONTRACT, *[f"{i}{suffix}" for i in range(count)])
    words = rf"exactly one {suffix} file, found 0{suffix}, 1{suffix}" if count else f"does not hold .*{suffix}"
    with pytest.raises(BundleError, match=words):
        folder.read(path, "m", Opening("cpu"), backend)


@pytest.mark.parametrize(
    ("names", "backend", "words"),
    [
        ((CONTRACT,), "cxx", r"cxx folders are not supported; export the model as \.onnx"),
        ((CONTRACT, "saved_model.pb", "variables/"), None, "TensorFlow runs it while it is converted"),
    ],
)
def test_a_kind_that_cannot_be_served_says_what_can(files: Any, names: Any, backend: Any, words: str) -> None:
    with pytest.raises(BundleError, match=words):
        folder.read(files(*names), "m", Opening("cpu"), backend)


def test_a_model_without_a_declared_input_is_refused(files: Any) -> None:
    with pytest.raises(BundleError, match="a torch model needs a declared input"):
        folder.read(files(CONTRACT, "a.pt", contract="output_shape: [4]"), "m", Opening("cpu"), None)


# Discovery.


def test_models_below_a_folder_are_found_by_name_and_hidden_ones_skipped(files: Any, tmp_path: Path) -> None:
    for name in ("b", "a", ".hidden"):
        files(CONTRACT, "x.pt", name=name)
    files("notes.txt", name="text")
    files("manifest.yaml", name="c")
    (tmp_path / "d.onnx").write_text("")
    (tmp_path / "e.txt").write_text("")
    assert find(tmp_path) == [tmp_path / n for n in ("a", "b", "c", "d.onnx")]
    assert find(tmp_path / "a") == [tmp_path / "a"]
    assert (find(tmp_path / "missing"), find(tmp_path / "e.txt"), find(tmp_path / "text")) == ([], [], [])
    assert (is_model(tmp_path / "d.onnx"), is_model(tmp_path / "e.txt")) == (True, False)


def test_what_may_not_be_looked_into_does_not_hide_the_models_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("lost+found", "model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.yaml").touch()
    stat = os.stat

    def guarded(path: Any, *arguments: Any, **options: Any) -> Any:  # tests may run as root, who may look anywhere
        if str(path).startswith(str(tmp_path / "lost+found") + "/"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", guarded)
    assert find(tmp_path) == [tmp_path / "model"]
    assert "lost+found is passed over" in caplog.text


# ONNX under a contract.


@pytest.fixture
def difference(make_onnx: Any, files: Any) -> Callable[..., Path]:
    """d = first - second and p = first * second over graph inputs ``first`` and ``second``."""

    def make(contract: str, shape: Any = ("n", 2), kind: int = F32) -> Path:
        path = files(CONTRACT, contract=contract)
        values = [(n, kind, list(shape)) for n in ("first", "second", "d", "p")]
        make_onnx(
            [("Sub", ["first", "second"], ["d"]), ("Mul", ["first", "second"], ["p"])],
            values[:2],
            values[2:],
            path / "g.onnx",
        )
        return path

    return make


def blocks(
    *names: str, outputs: tuple[str, ...] = ("d", "p"), dtype: str = "FP32", dims: str = "[2]", size: int = 4
) -> str:
    parts = [f"max_batch_size: {size}"]
    for kind, listed in (("input", names), ("output", outputs)):
        parts += [f'{kind} {{ name: "{n}" data_type: "{dtype}" dims: {dims} }}' for n in listed]
    return "\n".join(parts)


A, B = np.array([[1, 2]], np.float32), np.array([[10, 20]], np.float32)


@pytest.mark.parametrize(
    ("names", "inputs", "bindings"),
    [
        (("second", "first"), (B, A), ["", ""]),  # by name, in the contract's order
        (("first", "second"), (A, B), ["", ""]),
        (("left", "right"), (A, B), ["first", "second"]),  # by position
        (("second", "other"), (A, B), ["first", "second"]),  # one known name is not enough
    ],
)
def test_contract_and_graph_bind_by_name_or_else_by_position(
    difference: Any, run: Any, tmp_path: Path, names: Any, inputs: Any, bindings: list[str]
) -> None:
    prepared = folder.read(difference(blocks(*names)), "m", Opening("cpu"), None)
    assert [(t.name, t.binding, t.shape) for t in prepared.spec.inputs] == [
        (n, b, (-1, 2)) for n, b in zip(names, bindings, strict=True)
    ]
    assert [o.tolist() for o in run(prepared, tmp_path / "r", *inputs)] == [[[-9, -18]], [[10, 40]]]
    assert (prepared.spec.coalesce, prepared.spec.max_batch_size, prepared.notes) == (True, 4, ())


def test_outputs_bind_by_name_too(difference: Any, run: Any, tmp_path: Path) -> None:
    prepared = folder.read(difference(blocks("first", "second", outputs=("p", "d"))), "m", Opening("cpu"), None)
    assert [o.tolist() for o in run(prepared, tmp_path / "r", A, B)] == [[[10, 40]], [[-9, -18]]]


@pytest.mark.parametrize(
    ("contract", "shape", "words"),
    [
        (blocks("first"), ("n", 2), "the graph has 2 inputs (first, second), the contract declares 1"),
        (blocks("a", "b", outputs=("d",)), ("n", 2), "the graph has 2 outputs (d, p), the contract declares 1"),
        (
            blocks("first", "second", dtype="INT64"),
            ("n", 2),
            "input 'first' is i64 by the contract, the graph's 'first' is f32",
        ),
        (
            blocks("first", "second", dims="[3]"),
            ("n", 2),
            "has shape [-1, 3] by the contract, the graph's 'first' is [-1, 2]",
        ),
        (blocks("first", "second", dims="[4, 2]"), ("n", 2), "has shape [-1, 4, 2] by the contract"),
        (blocks("first", "second", size=0), ("n", 2), "has shape [2] by the contract, the graph's 'first' is [-1, 2]"),
        (blocks("first", "second"), (2, 2), "the graph takes exactly [2] rows, the contract says max_batch_size 4"),
    ],
)
def test_a_contract_that_differs_from_the_graph_is_refused_by_name(
    difference: Any, contract: str, shape: Any, words: str
) -> None:
    import re

    with pytest.raises(SignatureError, match=re.escape(words)):
        folder.read(difference(contract, shape), "m", Opening("cpu"), None)


def test_a_graph_of_one_fixed_batch_is_served_at_that_size(difference: Any) -> None:
    spec = folder.read(difference(blocks("first", "second"), (4, 2)), "m", Opening("cpu"), None).spec
    assert (spec.programs, spec.max_batch_size) == ((Program("g.onnx", 4),), 4)


def test_a_contract_without_batch_takes_the_whole_shape(difference: Any, run: Any, tmp_path: Path) -> None:
    prepared = folder.read(difference(blocks("first", "second", dims="[-1, 2]", size=0)), "m", Opening("cpu"), None)
    spec = prepared.spec
    assert (spec.inputs[0], spec.max_batch_size, spec.coalesce) == (TensorSpec("first", "f32", (-1, 2)), 0, False)
    assert run(prepared, tmp_path / "r", A, B)[0].tolist() == [[-9, -18]]


def test_a_flat_contract_learns_its_output_from_the_graph(files: Any, make_onnx: Any) -> None:
    path = files(CONTRACT, contract="input_shape: [2]\nmax_batch_size: 4")
    make_onnx([("Cast", ["x"], ["y"])], [("x", F32, ["n", 2])], [("y", I64, ["n", 2])], path / "g.onnx", to=I64)
    spec = folder.read(path, "m", Opening("cpu"), None).spec
    assert spec.outputs == (TensorSpec("output", "i64", (-1, 2), 0, "y"),)


# TorchScript and what a trial run learns.


@pytest.fixture
def scripted(files: Any, tmp_path: Path) -> Callable[..., Path]:
    torch = pytest.importorskip("torch", reason="the torch extra is not installed in this interpreter")

    def make(forward: str, contract: str) -> Path:
        path = files(CONTRACT, contract=contract)
        source = tmp_path / "scripted.py"
        source.write_text(f"import torch\n\n\nclass M(torch.nn.Module):\n    {forward}\n")
        found = importlib.util.spec_from_file_location(f"scripted_{tmp_path.name}", source)
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.save(torch.jit.script(module.M()), str(path / "m.pt"))
        return path

    return make


FLAT = "input_shape: [4]\nmax_batch_size: 8\n"


def learned(path: Path) -> tuple[Any, ...]:
    prepared = folder.read(path, "m", Opening("cpu"), None)
    return prepared.spec.outputs, prepared.spec.coalesce, prepared.notes


def test_an_open_output_is_learned_from_a_trial_run(scripted: Any) -> None:
    path = scripted("def forward(self, x): return x[:, :3].double()", FLAT)
    assert folder.read(path, "m", Opening("cpu"), None).spec == ModelSpec(
        "m",
        "torchscript",
        "pytorch_libtorch",
        (TensorSpec("input", "f32", (-1, 4), 0),),
        (TensorSpec("output", "f64", (-1, 3), 0),),
        (Program("m.pt"),),
        None,
        8,
        True,
        True,
    )


@pytest.mark.parametrize(
    ("forward", "output"),
    [
        ("def forward(self, x): return x.sum(1)", (-1,)),
        ("def forward(self, x): return x.squeeze(0) if x.size(0) == 1 else x", (-1, 4)),  # F18: the batch left out
        ("def forward(self, x): return x.unsqueeze(2)", (-1, 4, 1)),
    ],
)
def test_the_learned_shape_has_the_batch_in_front(scripted: Any, forward: str, output: tuple[int, ...]) -> None:
    assert learned(scripted(forward, FLAT))[0] == (TensorSpec("output", "f32", output, 0),)


def test_an_axis_that_follows_the_input_is_learned_as_variable(scripted: Any) -> None:
    path = scripted("def forward(self, x): return x + 1", "input_shape: [-1]\nmax_batch_size: 4")
    assert learned(path) == ((TensorSpec("output", "f32", (-1, -1), 0),), True, ())


def test_rows_that_influence_each_other_are_never_coalesced(scripted: Any) -> None:
    outputs, coalesce, notes = learned(scripted("def forward(self, x): return x - x.mean(0)", FLAT))
    assert (outputs, coalesce) == ((TensorSpec("output", "f32", (-1, 4), 0),), False)
    assert notes == ("requests run one by one: a row gives another result beside other rows",)


def test_rows_that_influence_each_other_less_than_rounding_between_kernels_are_told_apart(scripted: Any) -> None:
    path = scripted("def forward(self, x): return x + 0.001 * x.sum(0)", FLAT)
    assert learned(path)[1:] == (False, ("requests run one by one: a row gives another result beside other rows",))


def test_a_model_of_one_row_at_a_time_is_never_coalesced(scripted: Any) -> None:
    _, coalesce, notes = learned(scripted("def forward(self, x): return x.reshape(1, 4)", FLAT))
    assert (coalesce, len(notes)) == (False, 1)
    assert notes[0].startswith("requests run one by one: several rows at once fail (the TorchScript module failed: ")


def test_an_output_of_one_entry_for_all_rows_is_never_coalesced(scripted: Any) -> None:
    _, coalesce, notes = learned(scripted("def forward(self, x): return x.sum(0, keepdim=True)", FLAT))
    assert (coalesce, "not one entry per row" in notes[0]) == (False, True)


def test_an_output_whose_rows_are_not_told_apart_is_never_coalesced(scripted: Any) -> None:
    """[2] for one row passes as a left-out batch axis, [6] for three rows does not."""
    path = scripted("def forward(self, x): return x[:, :2].reshape(-1)", blocks("x", outputs=("y",), dims="[2]"))
    assert learned(path)[1:] == (
        False,
        ("requests run one by one: 3 rows give an output 'y' of shape [6], not one entry per row",),
    )


def test_dims_of_one_are_also_how_a_contract_declares_one_number_per_row(scripted: Any) -> None:
    path = scripted("def forward(self, x): return x.sum(1)", blocks("x", outputs=("y",), dims="[1]"))
    assert learned(path) == ((TensorSpec("y", "f32", (-1,), 0),), True, ())
    path = scripted("def forward(self, x): return x.sum(1, keepdim=True)", blocks("x", outputs=("y",), dims="[1]"))
    assert learned(path) == ((TensorSpec("y", "f32", (-1, 1), 0),), True, ())


def test_a_batch_axis_left_out_of_one_row_does_not_keep_rows_apart(scripted: Any) -> None:
    path = scripted("def forward(self, x): return x.squeeze(0) if x.size(0) == 1 else x", FLAT)
    assert learned(path)[1:] == (True, ())


def test_noise_is_no_reason_to_share_a_run(scripted: Any) -> None:
    assert learned(scripted("def forward(self, x): return x + torch.rand_like(x)", FLAT))[1] is False


def test_a_batch_of_one_has_nothing_to_coalesce(scripted: Any) -> None:
    assert learned(scripted("def forward(self, x): return x + 1", "input_shape: [4]\nmax_batch_size: 1"))[1:] == (
        False,
        (),
    )


def test_integer_input_is_small_enough_for_an_embedding(scripted: Any) -> None:
    path = scripted(
        "def forward(self, x): return torch.ones(2, 3)[x]", "input_shape: [4]\ndata_type: INT64\nmax_batch_size: 8"
    )
    assert learned(path)[:2] == ((TensorSpec("output", "f32", (-1, 4, 3), 0),), True)


@pytest.mark.parametrize(
    ("forward", "cause"),
    [
        ("def forward(self, x): return x.reshape(7)", "shape"),
        ("def forward(self, x):\n        assert bool((x > 100).all()), 'too cold'\n        return x", "too cold"),
        (
            "def forward(self, x):\n        if bool((x < 100).all()):\n"
            "            raise ValueError('too cold')\n        return x",
            "too cold",
        ),
    ],
)
def test_a_failing_trial_run_asks_for_a_full_declaration(scripted: Any, forward: str, cause: str) -> None:
    with pytest.raises(
        BundleError,
        match=f"a trial run failed .*{cause}.*; correct the model, or declare the output's shape and datatype",
    ):
        folder.read(scripted(forward, FLAT), "m", Opening("cpu"), None)


def test_a_model_declared_in_full_may_fail_on_made_up_input(scripted: Any) -> None:
    outputs, coalesce, notes = learned(
        scripted(
            "def forward(self, x):\n        assert bool((x > 100).all()), 'too cold'\n        return x",
            blocks("x", outputs=("y",)),
        )
    )
    assert (outputs, coalesce) == ((TensorSpec("y", "f32", (-1, 2), 0),), False)
    assert (len(notes), "too cold" in notes[0]) == (1, True)


@pytest.mark.parametrize(
    ("forward", "contract", "words"),
    [
        (
            "def forward(self, x): return x",
            FLAT + "output_shape: [5]",
            r"shape \[4\] per row in a trial run, the contract says \[5\]",
        ),
        (
            "def forward(self, x): return x.long()",
            blocks("x", outputs=("y",)),
            "output 'y' is INT64 in a trial run, the contract says FP32",
        ),
        ("def forward(self, x): return x, x", FLAT, "the model returns 2 outputs, the contract declares 1"),
        ("def forward(self, x): return x", blocks("x"), "the model returns 1 outputs, the contract declares 2"),
        ("def forward(self, x): return torch.view_as_complex(x.reshape(-1, 2, 2))", FLAT, "complex64"),
        ("def forward(self, x): return x.to(torch.float8_e5m2)", FLAT, r"trial run failed .*torch\.float8_e5m2"),
    ],
)
def test_a_model_that_gives_something_else_than_declared_is_refused(
    scripted: Any, forward: str, contract: str, words: str
) -> None:
    with pytest.raises(BundleError, match=words):
        folder.read(scripted(forward, contract), "m", Opening("cpu"), None)


def test_a_trial_runs_on_the_cpu_whatever_the_device(scripted: Any) -> None:
    path = scripted("def forward(self, x): return x", FLAT)
    assert folder.read(path, "m", Opening("cuda:1"), None).spec.device == "cuda:1"


def test_the_engine_is_closed_when_a_trial_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Engine:
        @classmethod
        def load(cls, spec: ModelSpec, directory: Path) -> Engine:
            events.append(spec.device)
            return cls()

        def run(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
            raise ZeroDivisionError

        def close(self) -> None:
            events.append("closed")

    monkeypatch.setattr(trial, "engine_class", lambda name: Engine)
    spec = ModelSpec("m", "fake", "p", (), (), (), device="cuda")
    with pytest.raises(ZeroDivisionError):
        trial.learn(spec, Path(), [])
    assert events == ["cpu", "closed"]


def test_a_contract_error_names_its_file(files: Any) -> None:
    with pytest.raises(ContractError, match=r"^model_inference\.textproto: output_shape"):
        folder.read(files(CONTRACT, "m.pt", contract="output_shape: [0]"), "m", Opening("cpu"), None)
