"""Models of other backends of Triton: what stays, what changes, what is refused; and the same answers as before."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_up
import numpy as np
import pytest
from hypothesis import event, given

pytest.importorskip("onnxruntime")

from converters import discover, repository, triton_config
from converters.convert import convert, prepare
from nereid_backend.errors import BundleError, SignatureError, TritonConfigError
from nereid_backend.spec import ModelSpec, TensorSpec

X = np.arange(12, dtype=np.float32).reshape(3, 4)
FP32 = "data_type: TYPE_FP32"
ONE_TO_ONE = f'backend: "onnxruntime" input {{ name: "x" {FP32} dims: 4 }} output {{ name: "y" {FP32} dims: 4 }} '
BATCHED = ONE_TO_ONE + "max_batch_size: 8 "


@pytest.fixture
def make_model(tmp_path: Path, plus_one: Any) -> Callable[..., Path]:
    """A model folder of a Triton repository; its file, unless ``write`` makes another one, says y = x + 1."""

    def make(config: str | None, name: str = "m", version: int = 1, write: Any = None) -> Path:
        folder = tmp_path / "repository" / name
        place = folder / str(version)
        place.mkdir(parents=True)
        if config is not None:
            (folder / "config.pbtxt").write_text(config)
        if write is None:
            plus_one(("rows", 4), path=place / "model.onnx")
        else:
            write(place)
        return folder

    return make


def from_onnx(path: Path, **arrays: np.ndarray) -> dict[str, np.ndarray]:
    """What the file itself answers, by ONNX Runtime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, arrays), strict=True))


def test_a_model_keeps_names_types_dims_and_batch_size(make_model: Any, tmp_path: Path, run: Any) -> None:
    folder = make_model(BATCHED + "dynamic_batching {} instance_group { kind: KIND_CPU count: 2 }")
    assert discover.find(folder.parent) == [folder]
    prepared = prepare(folder)
    spec = prepared.spec
    assert (spec.name, spec.engine, spec.platform) == ("m", "onnx", "onnxruntime_onnx")
    assert spec.inputs == (TensorSpec("x", "f32", (-1, 4), 0),)
    assert spec.outputs == (TensorSpec("y", "f32", (-1, 4), 0),)
    assert (spec.max_batch_size, spec.coalesce, spec.instances, spec.device) == (8, True, 2, "cpu")
    assert prepared.notes == ()
    assert prepared.taken_over == (
        "input x FP32 [4]",
        "output y FP32 [4]",
        "max_batch_size 8",
        "dynamic_batching",
        "2 instances on cpu",
    )
    (answer,) = run(prepared, tmp_path / "r", X)
    np.testing.assert_array_equal(answer, from_onnx(folder / "1" / "model.onnx", x=X)["y"])


def test_tensors_bind_by_name_and_outputs_may_be_a_part(
    make_model: Any, make_onnx: Any, tmp_path: Path, run: Any
) -> None:
    def write(place: Path) -> None:
        values = [(name, 1, ["n", 4]) for name in "abcd"]
        nodes = [("Sub", ["a", "b"], ["c"]), ("Mul", ["a", "b"], ["d"])]
        make_onnx(nodes, values[:2], values[2:], place / "model.onnx")

    tensors = "".join(f'input {{ name: "{name}" {FP32} dims: 4 }} ' for name in "ba")
    config = f'platform: "onnxruntime_onnx" max_batch_size: 4 {tensors} output {{ name: "d" {FP32} dims: 4 }}'
    folder = make_model(config, write=write)
    prepared = prepare(folder)
    assert [t.name for t in prepared.spec.outputs] == ["d"]
    feed = {"a": X, "b": X * 2 + 1}
    (answer,) = run(prepared, tmp_path / "r", *(feed[tensor.name] for tensor in prepared.spec.inputs))
    np.testing.assert_array_equal(answer, from_onnx(folder / "1" / "model.onnx", **feed)["d"])


@pytest.mark.parametrize(
    ("names", "results"),
    [
        ((("y", 1), ("x", 4)), (("whole", 1), ("parts", 4))),  # by the arguments' names
        ((("IN__1", 1), ("IN__0", 4)), (("OUT__1", 4), ("OUT__0", 1))),  # by index
        ((("first", 4), ("second", 1)), (("a", 1), ("b", 4))),  # as they are declared
    ],
)
def test_torchscript_gets_its_tensors_where_triton_puts_them(
    make_model: Any, tmp_path: Path, run: Any, names: Any, results: Any
) -> None:
    torch = pytest.importorskip("torch")

    class Module(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any, y: Any) -> Any:
            return x.sum(1, keepdim=True) - 2 * y, x * y

    # What torch.jit.script would make, without the test's own source being read.
    module = torch.jit.trace(Module(), (torch.ones(2, 4), torch.ones(2, 1)))
    tensors = [f'input {{ name: "{name}" {FP32} dims: {width} }} ' for name, width in names]
    tensors += [f'output {{ name: "{name}" {FP32} dims: {width} }} ' for name, width in results]
    config = 'backend: "pytorch" max_batch_size: 8 ' + "".join(tensors)
    folder = make_model(config, write=lambda place: module.save(str(place / "model.pt")))
    prepared = prepare(folder)
    by_width = {4: X, 1: X[:, :1] + 5}
    answers = run(prepared, tmp_path / "r", *(by_width[tensor.shape[1]] for tensor in prepared.spec.inputs))
    expected = module(torch.from_numpy(by_width[4]), torch.from_numpy(by_width[1]))
    assert [output.shape[1] for output in prepared.spec.outputs] == [1, 4]
    for answer, wanted in zip(answers, expected, strict=True):
        np.testing.assert_allclose(answer, wanted, rtol=1e-6)


def test_texts_are_taken_over(make_model: Any, make_onnx: Any, tmp_path: Path, run: Any) -> None:
    tensors = [(name, 8, ["n", 1]) for name in "xy"]
    folder = make_model(
        'backend: "onnxruntime" max_batch_size: 4 input { name: "x" data_type: TYPE_STRING dims: 1 } '
        'output { name: "y" data_type: TYPE_STRING dims: 1 }',
        write=lambda place: make_onnx([("Identity", ["x"], ["y"])], tensors[:1], tensors[1:], place / "model.onnx"),
    )
    (answer,) = run(prepare(folder), tmp_path / "r", np.array([[b"a"], ["ä".encode()]], object))
    assert answer.tolist() == [[b"a"], ["ä".encode()]]


def test_one_number_a_row_travels_as_a_column(make_model: Any, make_onnx: Any) -> None:
    reshaped = "dims: 1 reshape { shape: [] }"
    folder = make_model(
        f'backend: "onnxruntime" max_batch_size: 4 input {{ name: "x" {FP32} {reshaped} }} '
        f'output {{ name: "y" {FP32} {reshaped} }}',
        write=lambda place: make_onnx(
            [("Neg", ["x"], ["y"])], [("x", 1, ["n"])], [("y", 1, ["n"])], place / "model.onnx"
        ),
    )
    spec = prepare(folder).spec
    assert (spec.inputs[0].shape, spec.dims(spec.inputs[0]), spec.hooks) == ((-1,), (1,), None)


def test_a_reshape_is_what_clients_see(make_model: Any) -> None:
    folder = make_model(
        f'backend: "onnxruntime" max_batch_size: 8 input {{ name: "x" {FP32} dims: [2, 2] reshape {{ shape: 4 }} }} '
        f'output {{ name: "y" {FP32} dims: [1, 4, 1] reshape {{ shape: 4 }} }}'
    )
    prepared = prepare(folder)
    spec = prepared.spec
    assert (spec.inputs[0].shape, spec.outputs[0].shape) == ((-1, 4), (-1, 4))
    assert [tensor.shape for tensor in (*spec.client_inputs, *spec.client_outputs)] == [(-1, 2, 2), (-1, 1, 4, 1)]
    assert "reshape of x, y" in prepared.taken_over


def test_what_config_leaves_open_comes_from_the_file(make_model: Any) -> None:
    bare = prepare(make_model(None, "bare"))
    assert (bare.spec.inputs[0].shape, bare.spec.max_batch_size) == ((-1, 4), 32)
    assert any("declares no tensors" in note for note in bare.notes)
    half = prepare(make_model(f'max_batch_size: 3 input {{ name: "x" {FP32} dims: 4 }}', "half"))
    assert (half.spec.outputs, half.spec.max_batch_size) == ((TensorSpec("y", "f32", (-1, 4), 0),), 3)
    whole = prepare(make_model(f"{ONE_TO_ONE.replace('dims: 4', 'dims: [-1, 4]')}", "whole"))
    assert (whole.spec.inputs[0], whole.spec.max_batch_size) == (TensorSpec("x", "f32", (-1, 4)), 0)


def test_an_optional_input_with_a_value_in_the_graph_is_left_out(
    make_model: Any, make_onnx: Any, tmp_path: Path, run: Any
) -> None:
    def write(place: Path) -> None:
        values = [("x", 1, ["n", 4]), ("factor", 1, [1]), ("y", 1, ["n", 4])]
        path = place / "model.onnx"
        make_onnx([("Mul", ["x", "factor"], ["y"])], values[:2], values[2:], path, {"factor": np.float32([3])})

    folder = make_model(BATCHED + f'input {{ name: "factor" {FP32} dims: 1 optional: true }}', write=write)
    prepared = prepare(folder)
    assert [tensor.name for tensor in prepared.spec.inputs] == ["x"]
    assert any("optional input 'factor' is left out" in note for note in prepared.notes)
    (answer,) = run(prepared, tmp_path / "r", X)
    np.testing.assert_array_equal(answer, from_onnx(folder / "1" / "model.onnx", x=X)["y"])


@pytest.mark.parametrize(
    ("policy", "served", "left_out"),
    [
        ("", 7, False),
        ("version_policy { latest { num_versions: 2 } }", 7, True),
        ("version_policy { all {} }", 7, True),
        ("version_policy { specific { versions: [1, 3] } }", 3, True),
    ],
)
def test_the_newest_of_the_served_versions_is_taken(
    make_model: Any, make_onnx: Any, tmp_path: Path, run: Any, policy: str, served: int, left_out: bool
) -> None:
    folder = make_model(BATCHED + policy)
    for version in (3, 7):

        def write(place: Path, number: int = version) -> None:
            values = [("x", 1, ["n", 4]), ("y", 1, ["n", 4])]
            constants = {"number": np.float32(number)}
            make_onnx([("Mul", ["x", "number"], ["y"])], values[:1], values[1:], place / "model.onnx", constants)

        (folder / str(version)).mkdir()
        write(folder / str(version))
    (folder / "007").mkdir()  # Triton passes over what is no number
    prepared = prepare(folder)
    (answer,) = run(prepared, tmp_path / "r", X)
    np.testing.assert_array_equal(answer, X * served)
    assert any(f"version {served} is served as version 1" in note for note in prepared.notes)
    assert any("other versions" in note for note in prepared.notes) is left_out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("dynamic_batching { max_queue_delay_microseconds: 500 }", "max_queue_delay_microseconds is left out"),
        ("dynamic_batching { default_queue_policy { max_queue_size: 3 } }", "queue_capacity"),
        ("", "without dynamic_batching Triton ran them one by one"),
        ("optimization { graph { level: 1 } }", "optimization is left out"),
        ("response_cache { enable: true }", "response_cache is left out"),
        ('parameters { key: "k" value { string_value: "v" } }', "parameter 'k' is left out"),
        ("instance_group { kind: KIND_CPU } instance_group { kind: KIND_GPU }", "instance_group 2 is left out"),
        ("instance_group { kind: KIND_CPU rate_limiter { priority: 1 } }", "rate_limiter is left out"),
        ("", "leaves the device to Triton"),
    ],
)
def test_what_is_not_taken_over_is_told(make_model: Any, more: str, words: str) -> None:
    assert any(words in note for note in prepare(make_model(BATCHED + more)).notes)


def test_the_device_is_the_declared_one_unless_another_is_asked_for(make_model: Any) -> None:
    folder = make_model(BATCHED + "instance_group { kind: KIND_GPU gpus: [1, 2] count: 2 }")
    prepared = prepare(folder)
    assert (prepared.spec.device, prepared.spec.instances) == ("cuda:1", 2)
    assert any("instances on other GPUs (2) are left out" in note for note in prepared.notes)
    asked = prepare(folder, device="cpu")
    assert (asked.spec.device, asked.spec.instances) == ("cpu", 2)
    assert any("the device is cpu, as asked; config.pbtxt says cuda:1" in note for note in asked.notes)


def test_threads_of_the_old_backend_are_taken_over(make_model: Any) -> None:
    folder = make_model(BATCHED + 'parameters { key: "intra_op_thread_count" value { string_value: "3" } }')
    assert prepare(folder).spec.threads == 3


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('backend: "python"', "model.py is code for Triton's python backend .*; copy its folder"),
        ('platform: "tensorrt_plan"', "TensorRT plan .*; convert the ONNX file"),
        ('platform: "tensorflow_savedmodel"', "nereid folder.*; put saved_model.pb"),
        ('backend: "vllm"', "the backend 'vllm' is not one of onnxruntime, pytorch"),
        (BATCHED + "sequence_batching {}", "sequence_batching is not taken over: .*state"),
        (BATCHED + "model_transaction_policy { decoupled: true }", "decoupled model"),
        (BATCHED + 'batch_input { target_name: "n" }', "batch_input is not taken over"),
        (BATCHED + 'model_operations { op_library_filename: "evil.so" }', "model_operations is not taken over"),
        (BATCHED + "version_policy { specific { versions: 5 } }", r"no version folder is served \(there are: 1\)"),
        (BATCHED + 'default_model_filename: "other.onnx"', "version 1 does not hold other.onnx"),
        (BATCHED.replace('"y"', '"z"'), "the graph has no output 'z'; it has y"),
        (BATCHED.replace('"x"', '"z"'), "the graph has no input 'z'; it has x"),
        (BATCHED.replace("FP32", "INT32", 1), "is i32 by the contract, the graph's 'x' is f32"),
        (BATCHED.replace("dims: 4", "dims: 5", 1), "correct the contract"),
        (BATCHED + f'input {{ name: "x" {FP32} dims: 4 }}', "an input is declared twice"),
    ],
)
def test_what_cannot_be_taken_over_is_refused_with_the_next_step(make_model: Any, config: str, words: str) -> None:
    with pytest.raises(BundleError, match=words):
        prepare(make_model(config))


def test_a_dictionary_and_texts_of_torch_are_refused(make_model: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Module(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, tensors: Any) -> Any:
            return tensors["a"] * 2

    module = torch.jit.trace(Module(), ({"a": torch.ones(2, 4)},), strict=False)
    config = 'backend: "pytorch" max_batch_size: 2 input { name: "a" data_type: TYPE_FP32 dims: 4 } '
    config += 'output { name: "o" data_type: TYPE_FP32 dims: 4 }'
    folder = make_model(config, write=lambda place: module.save(str(place / "model.pt")))
    with pytest.raises(BundleError, match="forward takes a dictionary; wrap it"):
        prepare(folder)
    (folder / "config.pbtxt").write_text(config.replace("TYPE_FP32", "TYPE_STRING"))
    with pytest.raises(BundleError, match="TYPE_STRING, which torch has no tensors of"):
        prepare(folder)


# Repositories of strangers.


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('default_model_filename: "../../secret.onnx"', "is no name of a file in the model's folder"),
        ('default_model_filename: "/etc/passwd"', "is no name of a file"),
        ('default_model_filename: ".."', "is no name of a file"),
        ('default_model_filename: "a\\000b"', "is no name of a file"),
        (f'default_model_filename: "{"a" * 300}"', "is no name of a file"),
        ('default_model_filename: "2/model.onnx"', "names a folder"),
        ('name: "../m"', "Triton wants them equal"),
        ('name: "other"', "Triton wants them equal"),
        ("instance_group { kind: KIND_CPU count: 2000000000 }", "instance_group.count must be <= 64"),
        ("max_batch_size: -1", "max_batch_size must be >= 0"),
        ('input { name: "\\n" data_type: TYPE_FP32 dims: 4 }', "one that can be printed"),
        ('input { name: "q" data_type: 77 dims: 4 }', "data_type 77 is no type of tensors"),
        ('input { name: "q" dims: 4 }', "is no type of tensors"),
        ('input { name: "q" data_type: TYPE_FP32 dims: 0 }', "dimensions are -1 or from 1"),
        (f'input {{ name: "q" {FP32} {"dims: 1 " * 40}}}', "lists 40 dimensions; 32 are possible"),
        (f'input {{ name: "q" {FP32} dims: 4 reshape {{ shape: 5 }} }}', "holds other elements"),
        ("{" * 10_000, "is not what Triton reads"),
        ("surprise: 1", "is not what Triton reads"),
        ("#" * (1024 * 1024 + 1), "is larger than 1048576 bytes"),
    ],
)
def test_a_hostile_config_is_one_short_refusal(make_model: Any, config: str, words: str) -> None:
    folder = make_model('backend: "onnxruntime" ' + config)
    with pytest.raises(BundleError, match=words) as raised:
        prepare(folder)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("/etc/passwd", "no name of a file in the model's folder"),
        ("../secret.txt", "no name of a file in the model's folder"),
        ("link.txt", "link.txt is a link out of the model's folder"),
        ("deeper/pipe", "deeper/pipe is not a file"),
        ("model.onnx", "'model.onnx' is a file of the model; rename it"),
        ("large.txt", "large.txt is larger than 16777216 bytes"),
    ],
)
def test_labels_come_from_the_models_folder_only(make_model: Any, label: str, words: str) -> None:
    folder = make_model(BATCHED.replace("output {", f'output {{ label_filename: "{label}" '))
    (folder.parent / "secret.txt").write_text("secret\n")
    (folder / "link.txt").symlink_to(folder.parent / "secret.txt")
    (folder / "model.onnx").write_text("label\n")
    (folder / "deeper").mkdir()
    os.mkfifo(folder / "deeper" / "pipe")
    with (folder / "large.txt").open("wb") as file:
        file.truncate(16 * 1024 * 1024 + 1)
    with pytest.raises(BundleError, match=words):
        prepare(folder)


@pytest.mark.parametrize("what", ["1/model.onnx", "config.pbtxt", "1"])
def test_links_out_of_the_folder_are_refused_and_the_folder_may_be_one(
    make_model: Any, tmp_path: Path, what: str
) -> None:
    folder = make_model(BATCHED)
    (folder / what).rename(tmp_path / "elsewhere")
    (folder / what).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match="is a link out of the model's folder; copy the file there"):
        prepare(folder)
    (folder / what).unlink()
    (tmp_path / "elsewhere").rename(folder / what)
    folder.rename(tmp_path / "kept")
    folder.symlink_to(tmp_path / "kept")
    assert prepare(folder).spec.name == "m"


CONFIG = """name: "m"
platform: "onnxruntime_onnx"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 2, -1 ] reshape { shape: [ -1, 2 ] } optional: true } ]
output [ { name: "y" data_type: TYPE_STRING dims: [ -1 ] label_filename: "l" } ]
instance_group [ { count: 2 kind: KIND_GPU gpus: [ 0, 1 ] } ]
version_policy: { specific: { versions: [ 1, 2 ] } }
dynamic_batching { preferred_batch_size: [ 4 ] }
parameters { key: "intra_op_thread_count" value: { string_value: "4" } }
"""
WORDS = ["-1", "99999999999", "{", "]", "TYPE_BF16", '"', "sequence_batching {}", "dims", "\ud800", "0", "shape: []"]


@given(made_up.damaged(CONFIG, WORDS))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        triton_config.parse(text, "m")
    except TritonConfigError as error:
        event(str(error)[:20])


# The other way round.


def test_a_converted_repository_is_told_apart(make_model: Any, tmp_path: Path) -> None:
    convert(make_model(BATCHED), tmp_path / "out")
    with pytest.raises(BundleError, match="nereid has converted already; tritonserver serves its repository as it is"):
        prepare(tmp_path / "out" / "m")


def test_labels_and_tensors_stand_in_the_new_config(make_model: Any, tmp_path: Path) -> None:
    folder = make_model(BATCHED.replace("output {", 'output { label_filename: "labels.txt" '))
    (folder / "labels.txt").write_text("a\nb\n")
    prepared = convert(folder, tmp_path / "out")
    written = tmp_path / "out" / "m"
    config = (written / "config.pbtxt").read_text()
    assert config == repository.config_text(ModelSpec.read(written / "1"), labels=prepared.labels)
    assert 'label_filename: "1/labels.txt"' in config
    assert (written / "1" / "labels.txt").read_text() == "a\nb\n"
    assert "labels of y (labels.txt)" in prepared.taken_over


def test_signature_errors_name_the_graph(make_model: Any) -> None:
    folder = make_model(BATCHED.replace("dims: 4", "dims: [4, 4]", 1))
    with pytest.raises(SignatureError, match=r"config.pbtxt as its contract: model.onnx: input 'x' has shape"):
        prepare(folder)
