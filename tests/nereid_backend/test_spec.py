from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import MANY, altered

from nereid_backend import dtypes
from nereid_backend.errors import SpecError
from nereid_backend.spec import FORMAT_VERSION, SPEC_FILE, ModelSpec, Program, TensorSpec, Weights

names = st.text(min_size=1, max_size=8)


@st.composite
def tensor_specs(draw: st.DrawFn) -> TensorSpec:
    shape = tuple(draw(st.lists(st.integers(-1, 9).filter(bool), max_size=4)))
    axis = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
    return TensorSpec(
        draw(names), draw(st.sampled_from([row.token for row in dtypes.TABLE])), shape, axis, draw(st.just("") | names)
    )


specs = st.builds(
    ModelSpec,
    name=names,
    engine=names,
    platform=names,
    inputs=st.lists(tensor_specs(), max_size=3).map(tuple),
    outputs=st.lists(tensor_specs(), max_size=3).map(tuple),
    programs=st.lists(st.builds(Program, names, st.none() | st.integers(1, 64)), max_size=3).map(tuple),
    weights=st.none() | st.builds(Weights, names, st.lists(names, max_size=3).map(tuple)),
    max_batch_size=st.integers(0, 64),
    coalesce=st.booleans(),
    batch_may_be_omitted=st.booleans(),
    device=st.sampled_from(["cpu", "cuda:1"]),
    threads=st.none() | st.integers(1, 8),
)

MINIMAL = ModelSpec(
    "m", "onnx", "p", (TensorSpec("x", "f32", (-1, 4), 0),), (TensorSpec("y", "f32", (-1,), 0),), (Program("m.onnx"),)
)


@given(specs)
def test_a_spec_reads_back_as_it_was_written(spec: ModelSpec) -> None:
    assert ModelSpec.from_json(spec.to_json()) == spec


def test_a_spec_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / SPEC_FILE).write_text(MINIMAL.to_json())
    assert ModelSpec.read(tmp_path) == MINIMAL


@given(tensor_specs(), st.integers(1, 9))
def test_the_batch_axis_is_put_in_and_taken_out_at_its_place(tensor: TensorSpec, size: int) -> None:
    if tensor.batch_axis is None:
        assert (tensor.row_shape, tensor.at_batch(size)) == (tensor.shape, tensor.shape)
        return
    full = list(tensor.row_shape)
    full.insert(tensor.batch_axis, size)
    assert tensor.at_batch(size) == tuple(full)


def test_a_tensor_without_dimensions_beside_the_batch_has_triton_dims_of_one() -> None:
    per_row, per_request = TensorSpec("x", "f32", (-1,), 0), TensorSpec("x", "f32", ())
    batched = ModelSpec("m", "e", "p", (per_row,), (), (), max_batch_size=4)
    single = ModelSpec("m", "e", "p", (per_request,), (), ())
    assert (batched.dims(per_row), batched.is_scalar(per_row)) == ((1,), True)
    assert (single.dims(per_request), single.is_scalar(per_request)) == ((1,), True)
    assert (single.dims(per_row), single.is_scalar(per_row)) == ((-1,), False)


def test_compiled_sizes_are_ascending_whatever_the_order_of_programs() -> None:
    spec = ModelSpec("m", "e", "p", (), (), (Program("c", 8), Program("a", 1), Program("b", 4)))
    assert spec.batch_sizes == (1, 4, 8)


def changed(**keys: Any) -> str:
    return json.dumps({**json.loads(MINIMAL.to_json()), **keys})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "must hold one JSON object, got list"),
        ("{}", f"format_version None, this runtime reads {FORMAT_VERSION}"),
        (changed(format_version=2), "format_version 2, this runtime reads 1"),
        (changed(format_version="1"), "format_version '1'"),
        (changed(priority=3), r"unknown keys \['priority'\] in ModelSpec"),
        (changed(programs=[{"file": "f", "size": 3}]), r"unknown keys \['size'\] in Program"),
        (changed(inputs=[{"name": "x", "dtype": "f32", "shape": [1], "unit": "m"}]), r"unknown keys \['unit'\]"),
        (changed(weights={"file": "w", "argument_order": [], "sha": ""}), r"unknown keys \['sha'\] in Weights"),
        (changed(inputs=[{"name": "x", "dtype": "f32"}]), "incomplete or malformed .*shape"),
        (changed(inputs=[{"name": "x", "dtype": "f99", "shape": []}]), "unknown dtype 'f99'"),
        (changed(inputs=3), "incomplete or malformed"),
        (changed(programs=[3]), "incomplete or malformed"),
        (changed(weights=3), "incomplete or malformed"),
        (json.dumps({"format_version": FORMAT_VERSION}), "incomplete or malformed"),
    ],
)
def test_anything_but_a_written_spec_is_refused_with_what_to_do(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        ModelSpec.from_json(text)
    assert "convert the bundle again" in str(caught.value)


@given(st.text(max_size=40) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["format_version", "inputs", "outputs", "programs", "weights", "name"]), inner),
    max_leaves=8,
).map(json.dumps))  # fmt: skip
def test_made_up_json_raises_nothing_but_spec_errors(text: str) -> None:
    with pytest.raises(SpecError):
        ModelSpec.from_json(text)


@MANY
@given(st.builds(ModelSpec.to_json, specs).map(json.loads).flatmap(altered))
def test_a_made_up_value_is_a_spec_error_or_one_that_reads_back(raw: dict[str, Any]) -> None:
    try:
        got = ModelSpec.from_json(json.dumps(raw))
    except SpecError:
        return
    assert ModelSpec.from_json(got.to_json()) == got
    assert all(len(got.dims(tensor)) >= 1 for tensor in got.inputs)
    assert [got.at_variant(variant).name for variant in got.variants] == [got.name] * len(got.variants)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"name": 3}, "name must be of type str, got 3"),
        ({"max_batch_size": True}, "max_batch_size must be of type int, got True"),
        ({"max_batch_size": 4.0}, r"max_batch_size must be of type int, got 4\.0"),
        ({"max_batch_size": -1}, "max_batch_size must be from 0 to 2147483647, got -1"),
        ({"coalesce": 1}, "coalesce must be of type bool, got 1"),
        ({"threads": "2"}, "threads must be of type int, got '2'"),
        ({"weights": {"file": "w", "argument_order": "wb"}}, "weights.argument_order must be a list, got 'wb'"),
        ({"weights": {"file": "w", "argument_order": [1]}}, r"weights.argument_order\[0\] must be of type str, got 1"),
        ({"inputs": [{"name": "x", "dtype": "f32", "shape": ["4"]}]}, r"inputs\[0\]\.shape\[0\] must be of type int"),
        (
            {"inputs": [{"name": "x", "dtype": "f32", "shape": [-2]}]},
            "shape of 'x' must be of sizes from -1 to 2147483647",
        ),
        (
            {"inputs": [{"name": "x", "dtype": "f32", "shape": [4], "batch_axis": 1}]},
            "batch_axis of 'x' must be below 1",
        ),
        ({"inputs": [{"name": "x", "dtype": "f32", "shape": [4], "batch_axis": -1}]}, "batch_axis of 'x'"),
        ({"programs": [{"file": "f", "batch_size": 0}]}, "batch_size of 'f' must be from 1 to 2147483647, got 0"),
        ({"programs": [{"file": "f", "variant": [3]}]}, "variant of 'f' must be 0 sizes, as of every program"),
        ({"programs": {}}, "programs must be a list"),
        ({"inputs": [3]}, r"inputs\[0\] must be an object, got 3"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_found(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        ModelSpec.from_json(changed(**keys))


IMAGES = ModelSpec(
    "m", "e", "p",
    (TensorSpec("a", "f32", (-1, -1, 3), 0), TensorSpec("b", "f32", (-1, 7, -1), 2)), (),
    (Program("v0", 4, (5, 6)), Program("v1", 1, (2, 9)), Program("v2", 2, (2, 9))),
)  # fmt: skip


def test_programs_for_some_variable_sizes_only_are_refused() -> None:
    raw = json.loads(IMAGES.to_json())
    raw["programs"][1]["variant"] = []
    with pytest.raises(SpecError, match="variant of 'v1' must be 2 sizes, as of every program"):
        ModelSpec.from_json(json.dumps(raw))


def test_a_variant_alone_has_its_own_programs_and_fixed_axes() -> None:
    assert IMAGES.variable_axes == ((0, 1), (1, 0))
    assert IMAGES.variants == ((5, 6), (2, 9))
    alone = IMAGES.at_variant((2, 9))
    assert [t.shape for t in alone.inputs] == [(-1, 2, 3), (9, 7, -1)]
    assert (alone.programs, alone.batch_sizes) == ((Program("v1", 1), Program("v2", 2)), (1, 2))


def test_a_missing_spec_is_refused_without_the_servers_path(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cannot read nereid\.json \(No such file") as caught:
        ModelSpec.read(tmp_path)
    assert str(tmp_path) not in str(caught.value)


def test_a_spec_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / SPEC_FILE).write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(SpecError, match="convert the bundle again"):
        ModelSpec.read(tmp_path)
