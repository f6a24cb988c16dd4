from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_up
import numpy as np
import pytest
from hypothesis import given
from made_up import MANY

pytest.importorskip("jax")

from converters import bundle, hooks, manifest, repository
from converters.migrate import migrate
from converters.prepared import Prepared
from nereid_backend.errors import BundleError, ManifestError, RepositoryError, UserCodeError
from nereid_backend.spec import BuiltinSpec, ModelSpec, Program, TensorSpec

HOOKS = "from nereid_backend.hooks import register_model\nregister_model()\n"


def tensor(name: str, shape: str, dtype: str = "f32", **dims: int) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": shape, "dims": dims}


def read(folder: Path) -> Any:
    return bundle.read(folder, folder.name, "cpu")


def declare(*post: dict[str, Any], **manifest: Any) -> dict[str, Any]:
    return {"nereid": {"postprocess": list(post), **manifest.pop("nereid", {})}, **manifest}


SOFTMAX = {"softmax": {"input": "y", "output": "probs"}}
ARGMAX = {"argmax": {"input": "probs", "output": "best", "axis": -1}}
LABELS = {"labels": {"input": "best", "output": "label", "file": "labels.txt"}}


def test_what_clients_see_follows_from_the_declared_hooks(make_bundle: Callable[..., Path]) -> None:
    folder = make_bundle(**declare(SOFTMAX, ARGMAX, LABELS))
    (folder / "labels.txt").write_text("nought\none\ntwo\nthree\n")
    prepared = read(folder)
    spec = prepared.spec
    assert spec.client_inputs == spec.inputs == (TensorSpec("x", "f32", (-1, 4), 0),)
    assert spec.client_outputs == (
        TensorSpec("y", "f32", (-1, 4), 0),
        TensorSpec("probs", "f32", (-1, 4), 0),
        TensorSpec("best", "i32", (-1,), 0),
        TensorSpec("label", "u8", (-1, -1), 0),
    )
    assert spec.hooks is not None
    assert spec.hooks.postprocess[0] == BuiltinSpec("softmax", {"input": "y", "output": "probs", "axis": 1})
    assert (spec.max_batch_size, spec.coalesce, spec.hooks.code) == (4, True, ())
    assert prepared.files["labels.txt"] == folder / "labels.txt"
    assert ModelSpec.from_json(spec.to_json()) == spec
    assert prepared.notes == ()


def test_client_outputs_choose_and_order_what_is_sent(make_bundle: Callable[..., Path]) -> None:
    outputs = [tensor("best", "n", "i32"), tensor("probs", "kn", k=4)]
    folder = make_bundle(**declare(SOFTMAX, {"argmax": {"input": "y", "output": "best"}}, client_outputs=outputs))
    assert [t.name for t in read(folder).spec.client_outputs] == ["best", "probs"]


def test_an_axis_may_be_a_letter_of_the_manifest(make_bundle: Callable[..., Path]) -> None:
    folder = make_bundle(**declare({"softmax": {"input": "y", "output": "y", "axis": "k"}}))
    assert read(folder).spec.hooks.postprocess[0].options["axis"] == 1


def test_a_python_file_travels_with_the_files_beside_it_and_the_user_is_told(
    make_bundle: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_bundle(client_inputs=[tensor("pixels", "dn", "u8", d=-1)])
    (folder / "hooks.py").write_text(HOOKS)
    (folder / "model.jl").write_text("# the Julia hooks it replaces")
    (folder / "tables").mkdir()
    (folder / "tables" / "gain.npy").write_bytes(b"")
    prepared = read(folder)
    assert prepared.spec.client_inputs == (TensorSpec("pixels", "u8", (-1, -1), 0),)
    assert prepared.spec.inputs == (TensorSpec("x", "f32", (-1, 4), 0),)
    assert sorted(prepared.files) == [
        "hooks.py", "model.b1.mlir", "model.b4.mlir", "tables/gain.npy", "weights.safetensors",
    ]  # fmt: skip
    assert any("hooks.py is run" in note for note in prepared.notes)
    written = repository.write(prepared, tmp_path / "r", link=False, force=False)
    assert "pixels" in (written / "config.pbtxt").read_text()
    assert (written / "1" / "tables" / "gain.npy").is_file()


def test_a_file_that_is_not_python_is_refused_without_being_run(make_bundle: Callable[..., Path]) -> None:
    folder = make_bundle()
    (folder / "hooks.py").write_text("def f(:\n")
    with pytest.raises(UserCodeError, match=r"hooks\.py line 1"):
        read(folder)
    (folder / "hooks.py").write_text("raise RuntimeError('run at convert time')")
    read(folder)


RAGGED = [tensor("query", "q", "u8", q=-1), tensor("x", "cn", c=4)]
STAGES = ["linear__core", "linear__postprocess", "linear__preprocess"]


def test_tensors_without_the_batch_put_the_hooks_into_processes_around_a_batched_executable(
    make_bundle: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_bundle(client_inputs=RAGGED)
    (folder / "hooks.py").write_text(HOOKS)
    prepared = read(folder)
    assert (prepared.spec.max_batch_size, prepared.files) == (0, {})
    before, core, after = (stage.spec for stage in prepared.stages)
    assert (core.name, core.max_batch_size, core.hooks, core.batch_sizes) == ("linear__core", 4, None, (1, 4))
    assert [t.name for t in (*before.client_inputs, *before.client_outputs)] == ["query", "x", "x"]
    assert (before.hooks.code, after.hooks.code) == (("preprocess",), ("postprocess",))
    assert (before.engine, before.instances, before.max_batch_size) == ("identity", 2, 0)
    assert sorted(prepared.stages[1].files) == ["model.b1.mlir", "model.b4.mlir", "weights.safetensors"]
    assert sorted(prepared.stages[0].files) == sorted(prepared.stages[2].files) == ["hooks.py"]
    written = repository.write(prepared, tmp_path / "r", link=False, force=False)
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["linear", *STAGES]
    assert ModelSpec.read(written / "1") == prepared.spec
    assert [step.model_name for step in repository.config(prepared.spec).ensemble_scheduling.step] == [
        "linear__preprocess", "linear__core", "linear__postprocess",
    ]  # fmt: skip


def test_processes_for_hooks_can_be_asked_for(make_bundle: Callable[..., Path]) -> None:
    prepared = read(make_bundle(**declare(SOFTMAX, nereid={"hook_processes": 3})))
    assert [stage.spec.instances for stage in prepared.stages] == [3, 1, 3]


def test_a_model_that_replaces_an_ensemble_takes_its_stages_away(
    make_bundle: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_bundle(client_inputs=RAGGED)
    (folder / "hooks.py").write_text(HOOKS)
    target = tmp_path / "r"
    with_stages = read(folder)
    repository.write(with_stages, target, link=False, force=False)
    with pytest.raises(RepositoryError, match="exists; use --force"):
        repository.write(with_stages, target, link=False, force=False)
    repository.write(with_stages, target, link=False, force=True)
    assert sorted(path.name for path in target.iterdir()) == ["linear", *STAGES]
    (target / "linear__other").mkdir()
    repository.write(read(make_bundle("plain")), target, link=False, force=True)
    (folder / "hooks.py").unlink()
    (folder / "manifest.yaml").write_text((folder.parent / "plain" / "manifest.yaml").read_text())
    repository.write(read(folder), target, link=False, force=True)
    assert sorted(path.name for path in target.iterdir()) == ["linear", "linear__other", "plain"]


def test_a_stage_never_takes_the_place_of_another_model(make_bundle: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_bundle(client_inputs=RAGGED)
    (folder / "hooks.py").write_text(HOOKS)
    repository.write(read(make_bundle("linear__core")), tmp_path / "r", link=False, force=False)
    with pytest.raises(RepositoryError, match="linear__core is another model"):
        repository.write(read(folder), tmp_path / "r", link=False, force=True)
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["linear__core"]


def test_code_keeps_its_own_files_and_none_of_the_executable(make_bundle: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_bundle(axis_order=None)
    (folder / "hooks.py").write_text(HOOKS)
    (folder / "data").mkdir()
    for own in ("codebook.safetensors", "data/table.csv"):
        (folder / own).write_text("own")
    migrate(folder, replace=False)
    assert (folder / "weights.T.safetensors").exists()
    placed = set(read(folder).files)
    programs = {path.name for path in folder.glob("*.mlir")}
    assert placed == {"hooks.py", "codebook.safetensors", "data/table.csv", "weights.safetensors", *programs}
    (tmp_path / "elsewhere").mkdir()
    (folder / "more").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match="more is a link to a folder"):
        read(folder)


def test_a_stage_is_replaced_with_its_ensemble_only(make_bundle: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_bundle(client_inputs=RAGGED)
    (folder / "hooks.py").write_text(HOOKS)
    repository.write(read(folder), tmp_path / "r", link=False, force=False)
    core = (tmp_path / "r" / "linear__core" / "1" / "nereid.json").read_text()
    with pytest.raises(RepositoryError, match="linear__core is a part of the model 'linear'"):
        repository.write(read(make_bundle("linear__core")), tmp_path / "r", link=False, force=True)
    assert (tmp_path / "r" / "linear__core" / "1" / "nereid.json").read_text() == core


def test_a_number_per_row_is_a_column_between_the_processes(make_bundle: Callable[..., Path]) -> None:
    folder = make_bundle(
        function=lambda x, w, b: (x @ w + b).sum(1),
        executable_outputs=[tensor("y", "n")],
        client_outputs=[tensor("total", "")],
    )
    (folder / "hooks.py").write_text(HOOKS)
    _, core, after = (stage.spec for stage in read(folder).stages)
    assert (core.dims(core.outputs[0]), after.dims(after.client_inputs[0])) == ((1,), (-1, 1))
    assert (after.inputs[0].shape, after.hooks.preprocess) == ((-1,), (BuiltinSpec("drop_column", {"names": ["y"]}),))


def test_letters_in_wire_order_are_told_and_can_be_declared(make_bundle: Callable[..., Path]) -> None:
    wire = {"client_inputs": [tensor("texts", "nc", "u8", c=-1)]}
    odd, declared = make_bundle("odd", **wire), make_bundle("told", nereid={"client_axis_order": "wire"}, **wire)
    for folder in (odd, declared):
        (folder / "hooks.py").write_text(HOOKS)
    assert read(odd).spec.client_inputs[0].batch_axis == 1
    assert any("'texts' has its batch letter first" in note for note in read(odd).notes)
    assert read(declared).spec.client_inputs == (TensorSpec("texts", "u8", (-1, -1), 0),)
    assert not any("batch letter" in note for note in read(declared).notes)


@pytest.mark.parametrize(
    ("post", "words"),
    [
        ({"sofmax": {}}, r"'nereid\.postprocess\[0\]': unknown built-in 'sofmax'; known: argmax, bert_text"),
        ({"softmax": {"input": "y"}}, r"postprocess\[0\]' softmax: Softmax has no 'output'"),
        ({"softmax": None}, "Softmax has no 'input'"),
        ({"softmax": {"input": "y", "output": "p", "temperature": 2}}, r"unknown keys \['temperature'\] in Softmax"),
        ({"softmax": {"input": "y", "output": 3}}, "output must be of type str, got 3"),
        ({"softmax": 3}, "must be an object, got 3"),
        ({"softmax": {"input": "y", "output": "p", "axis": "z"}}, "axis 'z' is no letter of an executable tensor 'y'"),
        ({"softmax": {"input": ["y" * 900], "output": "p", "axis": "z"}}, r"tensor \['y{1,200}\.\.\."),
        ({"softmax": {"input": "y", "output": "p", "axis": "z" * 900}}, r"axis 'z{1,200}\.\.\."),
        ({"softmax": {"input": "y", "output": "p", "axis": "n"}}, r"axis 0 is none of 'y', .* with the batch at 0"),
        ({"softmax": {"input": "y", "output": "p", "axis": 5}}, "axis 5 is none of 'y'"),
        ({"softmax": {"input": "logits", "output": "p"}}, r"softmax: there is no tensor 'logits', only \['y'\]"),
        ({"bert_text": {"vocab": "vocab.txt"}}, "bert_text belongs under preprocess"),
        ({"trim": {"output": "y", "count": "y"}}, "trim: count 'y' must hold one integer"),
        ({"labels": {"input": "y", "output": "l", "file": "labels.txt"}}, "labels: 'y' is f32; it needs integers"),
        ({"a": {}, "b": {}}, "must be one name with its options"),
        ("softmax", "must be one name with its options"),
    ],
)
def test_a_hook_that_does_not_fit_is_refused_by_name(make_bundle: Callable[..., Path], post: Any, words: str) -> None:
    with pytest.raises(BundleError, match=words):
        read(make_bundle(**declare(post)))


@pytest.mark.parametrize(
    ("client", "words"),
    [
        ({"client_outputs": [tensor("z", "kn", k=4)]}, r"client_outputs has 'z', which no hook makes; .*'probs'"),
        ({"client_outputs": [tensor("probs", "kn", "f64", k=4)]}, r"'probs' is f64\[-1, 4\].*make it f32\[-1, 4\]"),
        ({"client_outputs": [tensor("probs", "kn", k=3)]}, r"'probs' is f32\[-1, 3\]"),
        ({"client_outputs": [tensor("probs", "nk", k=4)]}, r"'probs' is f32\[4, -1\] with the batch at axis 1"),
        ({"client_inputs": [tensor("z", "cn", c=4)]}, r"client_inputs has 'z', which no hook takes"),
        ({"client_inputs": []}, None),
    ],
)
def test_client_specs_that_do_not_fit_the_hooks_are_refused(
    make_bundle: Callable[..., Path], client: dict[str, Any], words: str | None
) -> None:
    folder = make_bundle(**declare(SOFTMAX, **client))
    if words is None:
        read(folder)
        return
    with pytest.raises(BundleError, match=words):
        read(folder)


@pytest.mark.parametrize("name", ["model.py", "nereid.json", "numpy.py"])
def test_a_file_of_a_built_in_never_becomes_code(make_bundle: Callable[..., Path], name: str) -> None:
    folder = make_bundle(**declare(SOFTMAX, ARGMAX, {"labels": {**LABELS["labels"], "file": name}}))
    (folder / name).write_text("print('I run')\n")
    with pytest.raises(BundleError, match=rf"{name},.* rename it"):
        read(folder)


@pytest.mark.parametrize("name", ["../labels.txt", "missing.txt", "", "/etc/passwd", "."])
def test_a_hook_reads_files_of_the_bundle_only(make_bundle: Callable[..., Path], name: str) -> None:
    argmax = {"argmax": {"input": "y", "output": "best"}}
    with pytest.raises(BundleError, match=r"labels: .* is no file of the bundle"):
        read(make_bundle(**declare(argmax, {"labels": {"input": "best", "output": "label", "file": name}})))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"postprocess": {"trim": {}}}, "'nereid.postprocess' must be a list"),
        ({"client_axis_order": "row"}, "'nereid.client_axis_order' must be one of julia, wire, got str 'row'"),
        ({"exported_files": ["vocab.txt"]}, "'nereid.exported_files' must have file names as keys, got list"),
        ({"exported_files": {"../vocab.txt": ""}}, "'nereid.exported_files' must have file names as keys, got dict"),
        ({"hook_processes": 0, "postprocess": [SOFTMAX]}, "'nereid.hook_processes' must be an integer from 1 to 64"),
        ({"hook_processes": 2}, "'nereid.hook_processes' is for bundles with hooks only"),
        ({"postproces": []}, r"unknown keys \['postproces'\]; known: .*postprocess"),
    ],
)
def test_our_own_key_of_a_manifest_is_checked(
    make_bundle: Callable[..., Path], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ManifestError, match=words):
        read(make_bundle(nereid=options))


# Texts.


def text_bundle(make_bundle: Callable[..., Path], **options: Any) -> Path:
    def program(ids: Any, mask: Any) -> Any:
        return (ids * mask).sum(1).astype(np.float32)

    folder = make_bundle(
        sizes=(1, 4),
        function=lambda x: program(x, x),
        tensors={},
        x=lambda n: ((n, 16), np.int64),
        executable_inputs=[tensor("input_ids", "sn", "i64", s=16)],
        executable_outputs=[tensor("score", "n")],
        nereid={"preprocess": [{"bert_text": {"vocab": "vocab.txt", **options}}]},
    )
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n")
    return folder


def test_texts_take_the_place_of_token_ids(make_bundle: Callable[..., Path]) -> None:
    prepared = read(text_bundle(make_bundle))
    assert prepared.spec.client_inputs == (
        TensorSpec("texts", "u8", (-1, -1), 0),
        TensorSpec("text_lens", "i32", (-1,), 0),
    )
    options = prepared.spec.hooks.preprocess[0].options
    assert (options["buckets"], options["max_length"], options["dtype"]) == ([16], 16, "i64")
    assert "vocab.txt" in prepared.files


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ids": "tokens"}, "there is no tensor 'tokens'"),
        ({"buckets": [8]}, r"'input_ids' is compiled for, which are \[16\]; got \[8\]"),
        ({"buckets": [16, 8]}, "ascending"),
        ({"max_length": 17}, "max_length must be 2 to 16, got 17"),
        ({"max_length": 2, "query": "query"}, "max_length must be 3 to 16"),
        ({"vocab": "words.txt"}, "'words.txt' is no file of the bundle"),
    ],
)
def test_text_options_that_do_not_fit_the_executable_are_refused(
    make_bundle: Callable[..., Path], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(BundleError, match=words):
        read(text_bundle(make_bundle, **options))


def test_texts_are_padded_to_the_compiled_shape_variants(make_bundle: Callable[..., Path], program_writer: Any) -> None:
    folder = make_bundle(
        sizes=(),
        tensors={},
        executable_inputs=[tensor("input_ids", "sn", "i64", s=-1)],
        executable_outputs=[tensor("score", "n", "i64")],
        input_shapes=[{"s": 8}, {"s": 4}],
        batching=None,
        nereid={"preprocess": [{"bert_text": {"vocab": "vocab.txt"}}]},
    )
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n")
    for index, tokens in enumerate((8, 4)):
        program_writer(folder / f"model.v{index}.b2.mlir", lambda ids: ids.sum(1), ((2, tokens), np.int64))
    spec = read(folder).spec
    assert spec.hooks.preprocess[0].options["buckets"] == [4, 8]
    assert spec.client_inputs[0] == TensorSpec("texts", "u8", (-1, -1), 0)


def test_a_vocabulary_without_the_special_tokens_is_refused(make_bundle: Callable[..., Path]) -> None:
    folder = text_bundle(make_bundle)
    (folder / "vocab.txt").write_text("the\n[PAD]\n")
    with pytest.raises(BundleError, match=r"vocab\.txt lacks \['\[UNK\]', '\[CLS\]', '\[SEP\]'\]"):
        read(folder)
    (folder / "vocab.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(BundleError, match="cannot be read as UTF-8 text"):
        read(folder)


EVERYTHING = {
    "nereid": {
        "client_axis_order": "julia",
        "hook_processes": 2,
        "exported_files": {"vocab.txt": "0" * 64},
        "preprocess": [
            {"bert_text": {"vocab": "vocab.txt", "buckets": [8], "max_length": 8, "query": "q", "ids": "ids"}}
        ],
        "postprocess": [
            {"softmax": {"input": "logits", "output": "probs", "axis": "c"}},
            {"argmax": {"input": "logits", "output": "best", "axis": -1}},
            {"labels": {"input": "best", "output": "label", "file": "labels.txt"}},
            {"trim": {"output": "probs", "count": "count", "axis": 1}},
            {"detection": {"logits": "scores", "deltas": "deltas", "proposals": "rois", "delta_weights": [1, 1, 2, 2]}},
        ],
    },
    "client_inputs": [tensor("q", "q", "u8", q=-1), tensor("texts", "tn", "u8", t=-1), tensor("text_lens", "n", "i32")],
    "client_outputs": [tensor("label", "ln", "u8", l=-1), tensor("detections", "dkn", d=6, k=100)],
}


@MANY
@given(made_up.altered(EVERYTHING, 2))
def test_made_up_hooks_raise_nothing_but_our_own_errors(raw: Any) -> None:
    inputs = [tensor("ids", "sn", "i64", s=8)]
    outputs = [
        tensor("logits", "cn", c=2), tensor("count", "n", "i32"), tensor("scores", "ckn", c=2, k=3),
        tensor("deltas", "dkn", d=8, k=3), tensor("rois", "dkn", d=4, k=3),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n")
        (folder / "labels.txt").write_text("a\nb\n")
        rest = {"format_version": "2.1", "executable_inputs": inputs, "executable_outputs": outputs}
        try:
            parsed = manifest.parse({**rest, **raw}, has_hook=False)
            tensors = [tuple(t.spec() for t in side) for side in (parsed.executable_inputs, parsed.executable_outputs)]
            spec = ModelSpec("m", "stablehlo", "p", *tensors, (Program("f", 8),), max_batch_size=8, coalesce=True)
            prepared = hooks.attach(Prepared(spec, {}), parsed, folder)
            for each in (prepared, *prepared.stages):
                repository.config_text(each.spec)
        except BundleError as error:
            text = str(error)
        else:
            text = ""
    assert ("\n" in text, len(text) < 600) == (False, True)
