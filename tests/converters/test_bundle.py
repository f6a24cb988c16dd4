from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")

from converters import bundle, weights
from nereid_backend.errors import BundleError, ManifestError, SignatureError, WeightsError
from nereid_backend.safetensors import read_header
from nereid_backend.spec import ModelSpec, Program, TensorSpec, Weights

W = np.arange(16, dtype=np.float32).reshape(4, 4) / 8
B = np.arange(4, dtype=np.float32)
X = np.arange(16, dtype=np.float32).reshape(4, 4)
EXPECTED = (X @ W + B).tolist()


def f32(name: str, shape: str, **dims: int) -> dict[str, Any]:
    return {"name": name, "dtype": "f32", "shape": shape, "dims": dims}


def read(folder: Path) -> Any:
    return bundle.read(folder, folder.name, "cpu")


def test_a_bundle_becomes_one_complete_specification(make_bundle: Callable[..., Path]) -> None:
    folder = make_bundle()
    prepared = read(folder)
    assert prepared.spec == ModelSpec(
        name="linear",
        engine="stablehlo",
        platform="stablehlo",
        inputs=(TensorSpec("x", "f32", (-1, 4), 0),),
        outputs=(TensorSpec("y", "f32", (-1, 4), 0),),
        programs=(Program("model.b1.mlir", 1), Program("model.b4.mlir", 4)),
        weights=Weights("weights.safetensors", ("w", "b")),
        max_batch_size=4,
        coalesce=True,
        device="cpu",
    )
    assert prepared.files == {n: folder / n for n in ("model.b1.mlir", "model.b4.mlir", "weights.safetensors")}
    assert prepared.notes == ()


def test_weights_in_program_order_are_used_as_they_are(make_bundle: Any, run: Any, tmp_path: Path) -> None:
    folder = make_bundle()
    prepared = read(folder)
    assert [o.tolist() for o in run(prepared, tmp_path / "repository", X)] == [EXPECTED]
    written = tmp_path / "repository" / "linear" / "1" / "weights.safetensors"
    assert written.read_bytes() == (folder / "weights.safetensors").read_bytes()


def test_a_legacy_square_weight_is_transposed(make_bundle: Any, run: Any, tmp_path: Path) -> None:
    folder = make_bundle(tensors={"w": W.T.copy(), "b": B}, axis_order=None, format_version="2.0")
    assert [o.tolist() for o in run(read(folder), tmp_path / "repository", X)] == [EXPECTED]
    written = read_header(tmp_path / "repository" / "linear" / "1" / "weights.safetensors")
    assert written.metadata == {"argument_order": '["w", "b"]', "axis_order": "xla"}


def test_the_same_square_file_marked_as_program_order_gives_the_untransposed_numbers(
    make_bundle: Any, run: Any, tmp_path: Path
) -> None:
    folder = make_bundle(tensors={"w": W.T.copy(), "b": B})
    assert [o.tolist() for o in run(read(folder), tmp_path / "repository", X)] == [(X @ W.T + B).tolist()]


def test_a_legacy_weight_of_three_axes_is_reversed(make_bundle: Any, run: Any, tmp_path: Path) -> None:
    w = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    folder = make_bundle(
        function=lambda x, w: (x[:, :, None, None] * w).sum(1),
        tensors={"w": w.T.copy()},
        axis_order=None,
        executable_outputs=[f32("y", "kdn", k=2, d=3)],
    )
    assert [o.tolist() for o in run(read(folder), tmp_path / "r", X)] == [np.einsum("nc,cdk->ndk", X, w).tolist()]


def test_legacy_weights_of_one_axis_need_no_new_file(make_bundle: Any) -> None:
    folder = make_bundle(function=lambda x, b: x + b, tensors={"b": B}, axis_order=None)
    assert read(folder).files["weights.safetensors"] == folder / "weights.safetensors"


def test_the_argument_order_decides_and_not_the_order_of_the_file(make_bundle: Any, run: Any, tmp_path: Path) -> None:
    first, second = np.full(4, 2, np.float32), np.full(4, 100, np.float32)
    folder = make_bundle(function=lambda x, p, q: x * p + q, tensors={"z": first, "a": second}, order=["z", "a"])
    assert [o.tolist() for o in run(read(folder), tmp_path / "r", X)] == [(X * 2 + 100).tolist()]


def test_a_bundle_without_weights_needs_an_empty_file(make_bundle: Any, run: Any, tmp_path: Path) -> None:
    folder = make_bundle(function=lambda x: x + 1, tensors={})
    assert [o.tolist() for o in run(read(folder), tmp_path / "r", X)] == [(X + 1).tolist()]
    (folder / "weights.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"weights\.safetensors: cannot be read \(No such file"):
        read(folder)


def test_another_weights_file_is_named_by_the_manifest(make_bundle: Any, run: Any, tmp_path: Path) -> None:
    folder = make_bundle(weights_file="weights.T.safetensors")
    (folder / "weights.safetensors").rename(folder / "weights.T.safetensors")
    prepared = read(folder)
    assert prepared.files["weights.safetensors"] == folder / "weights.T.safetensors"
    assert [o.tolist() for o in run(prepared, tmp_path / "r", X)] == [EXPECTED]


# Modules.


def test_every_size_that_is_there_is_compiled_declared_or_not(make_bundle: Any) -> None:
    assert read(make_bundle(sizes=(8, 1, 4), batching={"compiled_batch_sizes": [4]})).spec.batch_sizes == (1, 4, 8)
    assert read(make_bundle("bare", batching=None)).spec.batch_sizes == (1, 4)


def test_the_plain_module_is_ignored_beside_sized_ones(make_bundle: Any) -> None:
    folder = make_bundle()
    (folder / "model.mlir").write_text("not even a program")
    assert set(read(folder).files) == {"model.b1.mlir", "model.b4.mlir", "weights.safetensors"}


def test_files_that_only_look_like_modules_are_ignored(make_bundle: Any) -> None:
    folder = make_bundle()
    for name in ("model.b0.mlir", "model.b01.mlir", "model.bX.mlir", "model.b4.mlir.bak", "xmodel.b2.mlir"):
        (folder / name).write_text("")
    assert read(folder).spec.batch_sizes == (1, 4)


def test_a_declared_size_without_its_file_is_refused(make_bundle: Any) -> None:
    folder = make_bundle(batching={"compiled_batch_sizes": [1, 2, 4, 8]})
    with pytest.raises(BundleError, match=r"declares compiled batch sizes \[2, 8\] but there is no model\.b2\.mlir"):
        read(folder)


def test_a_bundle_without_a_module_is_refused(make_bundle: Any) -> None:
    folder = make_bundle(sizes=())
    with pytest.raises(BundleError, match=r"neither model\.mlir nor model\.b\{N\}\.mlir"):
        read(folder)


def test_sized_modules_without_a_batch_axis_are_refused(make_bundle: Any) -> None:
    folder = make_bundle(executable_inputs=[f32("x", "cr", c=4, r=4)], executable_outputs=[f32("y", "kr", k=4, r=4)])
    with pytest.raises(BundleError, match="no executable input has a batch axis"):
        read(folder)


def test_a_size_less_module_is_served_at_its_compiled_sizes_only(make_bundle: Any, run: Any, tmp_path: Path) -> None:
    folder = make_bundle(sizes=(None,))
    prepared = read(folder)
    spec = prepared.spec
    assert (spec.inputs, spec.outputs) == ((TensorSpec("x", "f32", (4, 4)),), (TensorSpec("y", "f32", (4, 4)),))
    assert (spec.programs, spec.max_batch_size, spec.coalesce) == ((Program("model.mlir"),), 0, False)
    assert [o.tolist() for o in run(prepared, tmp_path / "r", X)] == [EXPECTED]


def test_a_batch_axis_elsewhere_is_not_batched_by_triton(make_bundle: Any, run: Any, tmp_path: Path) -> None:
    folder = make_bundle(
        function=lambda x, w: w @ x,
        tensors={"w": W},
        x=lambda n: ((4, n), np.float32),
        executable_inputs=[f32("x", "nc", c=4)],
        executable_outputs=[f32("y", "nk", k=4)],
    )
    prepared = read(folder)
    spec = prepared.spec
    assert spec.inputs == (TensorSpec("x", "f32", (4, -1), 1),)
    assert (spec.max_batch_size, spec.coalesce, spec.batch_sizes) == (0, True, (1, 4))
    (note,) = prepared.notes
    assert note.startswith("requests run one by one: Triton batches along the first axis")
    assert [o.tolist() for o in run(prepared, tmp_path / "r", X)] == [(W @ X).tolist()]


def test_rows_elsewhere_that_influence_each_other_are_found(make_bundle: Any) -> None:
    folder = make_bundle(
        function=lambda x: x - x.mean(1, keepdims=True),
        tensors={},
        x=lambda n: ((4, n), np.float32),
        executable_inputs=[f32("x", "nc", c=4)],
        executable_outputs=[f32("y", "nk", k=4)],
    )
    prepared = read(folder)
    assert (prepared.spec.max_batch_size, prepared.spec.coalesce) == (0, False)
    assert "a row gives another result beside other rows" in prepared.notes[0]


def test_an_output_without_a_batch_axis_is_not_coalesced(make_bundle: Any) -> None:
    folder = make_bundle(function=lambda x: x.sum(0), tensors={}, executable_outputs=[f32("y", "k", k=4)])
    spec = read(folder).spec
    assert (spec.max_batch_size, spec.coalesce) == (0, False)


# Signatures.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"executable_inputs": [f32("x", "cn", c=5)]},
            r"model\.b1\.mlir: input 'x' is f32\[1, 5\] by the manifest \(wire order\), main has f32\[1, 4\]",
        ),
        (
            {"executable_inputs": [f32("x", "nc", c=4)], "batching": None, "sizes": (3,)},
            r"input 'x' is f32\[4, 3\] by the manifest .*main has f32\[3, 4\]",
        ),
        (
            {"executable_inputs": [{**f32("x", "cn", c=4), "dtype": "i32"}]},
            r"input 'x' is i32\[1, 4\] .*main has f32\[1, 4\]",
        ),
        ({"executable_outputs": [f32("y", "kn", k=7)]}, r"output 'y' is f32\[1, 7\] .*main has f32\[1, 4\]"),
        ({"executable_outputs": [f32("y", "n")]}, r"output 'y' is f32\[1\] .*main has f32\[1, 4\]"),
        (
            {"executable_outputs": [f32("y", "kn", k=4), f32("z", "kn", k=4)]},
            r"main gives 1 results, the manifest declares 2 outputs",
        ),
        (
            {"executable_inputs": [f32("x", "cn", c=4), f32("z", "cn", c=4)]},
            r"main takes 3 arguments, the manifest's 2 inputs and 2 weights make 4",
        ),
    ],
)
def test_a_signature_that_differs_from_the_manifest_is_refused_by_name(
    make_bundle: Any, options: dict[str, Any], words: str
) -> None:
    folder = make_bundle(**options)
    with pytest.raises(SignatureError, match=words):
        read(folder)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (
            {"w": W[:, :3].copy(), "b": B},
            r"weight 'w' is f32\[4, 3\] in weights\.safetensors \(program axis order\), main expects f32\[4, 4\]",
        ),
        ({"w": W.astype(np.float64), "b": B}, r"weight 'w' is f64\[4, 4\] .*main expects f32\[4, 4\]"),
        ({"w": W, "b": B.reshape(1, 4)}, r"weight 'b' is f32\[1, 4\] .*main expects f32\[4\]"),
        ({"w": W}, "1 inputs and 1 weights make 2.*a shortfall an unused weight"),
        ({"w": W, "b": B, "seed": B}, "main takes 3 arguments, the manifest's 1 inputs and 3 weights make 4"),
        ({"b": B, "w": W}, r"weight 'b' is f32\[4\]"),
    ],
)
def test_weights_that_do_not_fit_the_program_are_refused_by_name(
    make_bundle: Any, weights_writer: Any, tensors: dict[str, np.ndarray], words: str
) -> None:
    folder = make_bundle()
    weights_writer(folder, tensors)
    with pytest.raises(SignatureError, match=words):
        read(folder)


def test_a_legacy_weight_of_another_shape_is_told_with_its_layout(make_bundle: Any, weights_writer: Any) -> None:
    folder = make_bundle()
    weights_writer(folder, {"w": np.zeros((3, 4), np.float32), "b": B}, axis_order=None)
    with pytest.raises(
        SignatureError, match=r"weight 'w' is f32\[4, 3\] in weights\.safetensors \(legacy axis order\)"
    ):
        read(folder)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "no argument_order but the file holds 2 tensors"),
        ({"argument_order": "w, b"}, "must be a JSON list of names, got 'w, b'"),
        ({"argument_order": '{"w": 1}'}, "must be a JSON list of names"),
        ({"argument_order": "[1, 2]"}, "must be a JSON list of names"),
        ({"argument_order": '["w", "b", "c"]'}, r"argument_order names \['c'\], which the file does not hold"),
        ({"argument_order": '["w", "b", "w"]'}, "names a tensor twice"),
        ({"argument_order": '["w"]'}, r"tensors \['b'\] are not in argument_order"),
        ({"argument_order": '["w", "b"]', "axis_order": "julia"}, "axis_order is 'julia', expected 'xla' or none"),
    ],
)
def test_weights_whose_order_is_unknown_are_refused(tmp_path: Path, metadata: dict[str, str], words: str) -> None:
    weights.write(tmp_path / "w.safetensors", {"w": W, "b": B}, metadata)
    with pytest.raises(WeightsError, match=rf"^w\.safetensors: .*{words}"):
        weights.read(tmp_path / "w.safetensors")


def test_an_empty_weights_file_needs_no_argument_order(tmp_path: Path) -> None:
    weights.write(tmp_path / "w.safetensors", {}, {})
    assert weights.read(tmp_path / "w.safetensors").argument_order == ()


def test_the_header_gives_shapes_in_program_order_for_both_layouts(tmp_path: Path) -> None:
    tensor = {"w": np.zeros((2, 3, 4), np.int8)}
    for axis_order, shape in (({"axis_order": "xla"}, (2, 3, 4)), ({}, (4, 3, 2))):
        weights.write(tmp_path / "w", tensor, {"argument_order": json.dumps(["w"]), **axis_order})
        got = weights.read(tmp_path / "w")
        assert (got.shapes, got.dtypes, got.legacy, got.needs_transpose) == (
            (shape,),
            ("i8",),
            not axis_order,
            not axis_order,
        )


# What this version does not serve.


def test_julia_hooks_are_refused_with_what_to_write(make_bundle: Any) -> None:
    folder = make_bundle()
    (folder / "model.jl").write_text("")
    with pytest.raises(BundleError, match=r"Julia hooks \(model\.jl\).*write a hooks\.py .*register_model.*or declare"):
        read(folder)


def test_meta_models_are_refused_by_name(make_bundle: Any) -> None:
    x, y = f32("x", "cn", c=4), f32("y", "kn", k=4)
    meta = make_bundle("meta", kind="meta", meta={"calls": []}, client_inputs=[x], client_outputs=[y])
    with pytest.raises(ManifestError, match=r"requires a model\.jl"):
        read(meta)


def test_a_damaged_module_is_refused_by_name(make_bundle: Any) -> None:
    folder = make_bundle()
    (folder / "model.b4.mlir").write_bytes(b"ML\xefR\x0dStableHLO_v1.0.0\x00" + bytes(100))
    with pytest.raises(SignatureError, match=r"^model\.b4\.mlir: is not a StableHLO module"):
        read(folder)
