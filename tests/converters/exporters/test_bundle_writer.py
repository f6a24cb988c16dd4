from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

jax = pytest.importorskip("jax")
jax_export = pytest.importorskip("jax.export")

from converters import weights as weights_files  # noqa: E402
from converters.exporters import TensorSpec, read_bundle_weights, write_bundle  # noqa: E402
from nereid_backend import dtypes  # noqa: E402
from nereid_backend.errors import BundleError, ExportError, SignatureError  # noqa: E402

W = np.arange(16, dtype=np.float32).reshape(4, 4) / 8  # square: a wrong layout has the right shape
X = np.arange(8, dtype=np.float32).reshape(2, 4)
ROWS = TensorSpec("x", "f32", (-1, 4), 0)
RESULT = TensorSpec("y", "f32", (-1, 4), 0)


def program(function: Any, *arrays: Any) -> bytes:
    shapes = [jax.ShapeDtypeStruct(np.shape(array), array.dtype) for array in arrays]
    exported = jax_export.export(jax.jit(function, keep_unused=True), platforms=["cpu"])(*shapes)
    return bytes(exported.mlir_module_serialized)


def linear(tmp_path: Path, **changes: Any) -> Path:
    arguments = {
        "executable_inputs": [ROWS],
        "executable_outputs": [RESULT],
        "modules": {2: program(lambda x, w: x @ w, X, W)},
        "weights": {"w": W},
        **changes,
    }
    write_bundle(tmp_path / "linear", **arguments)
    return tmp_path / "linear"


@pytest.mark.parametrize("layout", ["program", "legacy"])
def test_a_bundle_of_either_layout_reads_back_and_computes_the_same(tmp_path: Path, run: Any, layout: str) -> None:
    from converters.convert import prepare

    bundle = linear(tmp_path, layout=layout)
    assert read_bundle_weights(bundle)["w"].tolist() == W.tolist()
    (result,) = run(prepare(bundle), tmp_path / "repository", X)
    assert result.tolist() == (X @ W).tolist()
    header = weights_files.read(bundle / "weights.safetensors")
    version = yaml.safe_load((bundle / "manifest.yaml").read_text())["format_version"]
    assert (header.legacy, version) == ((True, "2.0") if layout == "legacy" else (False, "2.1"))


@pytest.mark.parametrize("layout", ["program", "legacy"])
def test_weights_of_every_type_and_rank_are_given_back_bit_by_bit(tmp_path: Path, layout: str) -> None:
    rng = np.random.default_rng(0)
    weights = {
        f"{row.token}/{len(shape)}": np.frombuffer(rng.bytes(int(np.prod(shape)) * row.size_bytes), row.numpy).reshape(
            shape
        )
        for row in dtypes.TABLE
        if row.token != "bool"
        for shape in ((), (3,), (2, 3), (4, 3, 2), (0, 2))
    }
    weights["bool/2"] = np.array([[True, False, True]])
    (tmp_path / "manifest.yaml").write_text(
        "format_version: '2.1'\nexecutable_inputs: []\nexecutable_outputs: []\nname: weights\n"
    )
    metadata = {} if layout == "legacy" else {"axis_order": "xla"}
    names = list(weights)
    stored = {name: array.T if layout == "legacy" else array for name, array in weights.items()}
    order = "[" + ", ".join(f'"{name}"' for name in names) + "]"
    weights_files.write(tmp_path / "weights.safetensors", stored, {"argument_order": order, **metadata})
    back = read_bundle_weights(tmp_path)
    assert list(back) == names
    for name, array in weights.items():
        got = back[name]
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes()), name
        assert got.flags.c_contiguous


def test_programs_of_any_form_are_written_for_readers_twelve_weeks_older(tmp_path: Path, run: Any) -> None:
    from jax.extend.mlir.dialects import stablehlo
    from jax.interpreters import mlir

    from converters.convert import prepare

    age = stablehlo.StablehloCompatibilityRequirement.WEEK_12
    version = stablehlo.get_version_from_compatibility_requirement(age)
    assert version != stablehlo.get_current_version()
    artifact = program(lambda x, w: x @ w, X, W)
    with mlir.make_ir_context() as context:
        parsed = stablehlo.deserialize_portable_artifact(context, artifact)
        text, old = str(parsed).encode(), stablehlo.serialize_portable_artifact(parsed, stablehlo.get_minimum_version())
    for form in (artifact, text):
        bundle = linear(tmp_path, modules={2: form}, force=True)
        assert f"StableHLO_v{version}".encode() in (bundle / "model.b2.mlir").read_bytes()[:64]
    (result,) = run(prepare(bundle), tmp_path / "repository", X)
    assert result.tolist() == (X @ W).tolist()
    bundle = linear(tmp_path, modules={2: old}, force=True)
    assert (bundle / "model.b2.mlir").read_bytes() == old


def test_axes_are_named_as_told_or_in_the_order_of_the_alphabet(tmp_path: Path) -> None:
    x, y = TensorSpec("x", "f32", (-1, 3, 2), 0), TensorSpec("y", "f32", (3, -1), 1)
    module = program(lambda x: x.sum(2).T, np.zeros((4, 3, 2), np.float32))
    write_bundle(
        tmp_path / "sums", executable_inputs=[x], executable_outputs=[y], modules={4: module}, axes={"y": "kb"}
    )
    manifest = yaml.safe_load((tmp_path / "sums" / "manifest.yaml").read_text())
    assert manifest["executable_inputs"] == [{"name": "x", "dtype": "f32", "shape": "acn", "dims": {"a": 2, "c": 3}}]
    assert manifest["executable_outputs"] == [{"name": "y", "dtype": "f32", "shape": "bk", "dims": {"k": 3}}]


def test_variable_axes_share_a_letter_where_they_have_the_same_sizes(tmp_path: Path) -> None:
    def inputs(rows: int, wide: int, high: int) -> list[np.ndarray]:
        return [np.zeros((rows, *shape), np.float32) for shape in ((wide, 3), (wide, high, wide), (wide,))]

    names, shapes = ("a", "b", "c"), ((-1, -1, 3), (-1, -1, -1, -1), (-1, -1))
    variants = {(4, 4, 5, 4, 4): (4, 5), (6, 6, 5, 6, 6): (6, 5), (4, 4, 7, 4, 4): (4, 7)}
    programs = {
        key: {rows: program(lambda a, b, c: a.sum((1, 2)) + b.sum((1, 2, 3)) + c.sum(1), *inputs(rows, *sizes))
              for rows in (1, 2)}
        for key, sizes in variants.items()
    }  # fmt: skip
    prepared = write_bundle(
        tmp_path / "sums",
        executable_inputs=[TensorSpec(name, "f32", shape, 0) for name, shape in zip(names, shapes, strict=True)],
        executable_outputs=[TensorSpec("y", "f32", (-1,), 0)],
        modules=programs,
        axes={"c": "nw"},
    )
    manifest = yaml.safe_load((tmp_path / "sums" / "manifest.yaml").read_text())
    assert [tensor["shape"] for tensor in manifest["executable_inputs"]] == ["awn", "tswn", "wn"]
    assert manifest["input_shapes"] == [
        {"w": 4, "s": 5, "t": 4}, {"w": 6, "s": 5, "t": 6}, {"w": 4, "s": 7, "t": 4}
    ]  # fmt: skip
    assert prepared.spec.variants == tuple(variants)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"weights": {}}, SignatureError, "takes 2 arguments"),
        ({"weights": {"w": W.astype(np.float64)}}, SignatureError, "weight 'w' is f64"),
        ({"axes": {"z": "cn"}}, ExportError, "'z'.*it has x, y"),
        ({"axes": {"x": "nhc"}}, ExportError, "axes of 'x' are 'nhc'"),
        ({"axes": {"x": "kc"}}, ExportError, "axes of 'x' are 'kc'"),
        ({"layout": "julia"}, ExportError, "'program' or 'legacy'"),
        ({"weights": {"__metadata__": W}}, ExportError, "rename it"),
        ({"provenance": {"loss": np.float32(1)}}, ExportError, "give texts and numbers"),
        ({"modules": {(4,): {1: b""}, (5,): {2: b""}}}, ExportError, "give every variant the same"),
        ({"modules": {(4,): {1: b""}}}, ExportError, "the inputs have 0 variable axes"),
        (
            {
                "executable_inputs": [TensorSpec("x", "f32", (-1, -1), 0), TensorSpec("z", "f32", (-1, -1), 0)],
                "modules": {(4, 5): {1: b""}, (5, 5): {1: b""}},
                "axes": {"x": "ns", "z": "ns"},
            },
            ExportError,
            "two variable axes 's' whose sizes differ",
        ),
        ({"modules": {}}, BundleError, "neither model.mlir nor"),
        ({"modules": {2: b"junk"}}, SignatureError, "not a StableHLO module"),
    ],
)
def test_what_the_format_or_the_programs_refuse_leaves_nothing(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        linear(tmp_path, **changes)
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_that_fails_its_proof_leaves_the_one_before(tmp_path: Path) -> None:
    def refuse(_prepared: Any) -> None:
        raise ExportError("it differs")

    bundle = linear(tmp_path)
    with pytest.raises(ExportError, match="it differs"):
        linear(tmp_path, weights={"w": W + 1}, force=True, proof=refuse)
    assert read_bundle_weights(bundle)["w"].tolist() == W.tolist()
    assert list(tmp_path.iterdir()) == [bundle]


def test_only_bundles_are_replaced_and_only_when_asked(tmp_path: Path) -> None:
    bundle = linear(tmp_path)
    with pytest.raises(ExportError, match=r"exists; replace it with force=True"):
        linear(tmp_path)
    linear(tmp_path, weights={"w": W + 1}, force=True)
    assert read_bundle_weights(bundle)["w"].tolist() == (W + 1).tolist()
    (bundle / "hooks.py").write_text("work of days")
    with pytest.raises(ExportError, match=r"holds hooks.py, which no export writes"):
        linear(tmp_path, force=True)
    assert (bundle / "hooks.py").read_text() == "work of days"
    (bundle / "manifest.yaml").unlink()
    with pytest.raises(ExportError, match="is not a bundle"):
        linear(tmp_path, force=True)
