from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from made_up import MANY, altered, damaged

from converters import manifest as manifests
from converters.manifest import Manifest, ManifestTensor
from converters.repository import config_text
from converters.yaml12 import load_yaml
from nereid_backend import dtypes
from nereid_backend.errors import ManifestError
from nereid_backend.spec import ModelSpec, TensorSpec


def tensor(name: Any = "x", shape: Any = "cn", dtype: Any = "f32", **more: Any) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": shape, "dims": {"c": 3}, **more}


def parse(has_hook: bool = False, **keys: Any) -> Manifest:
    raw = {"format_version": "2.1", "executable_inputs": [tensor()], "executable_outputs": [tensor("y")], **keys}
    return manifests.parse({k: v for k, v in raw.items() if v is not ...}, has_hook=has_hook)


def test_a_small_manifest_has_every_default() -> None:
    x, y = (ManifestTensor(name, "f32", "cn", {"c": 3}) for name in "xy")
    assert parse() == Manifest("", "model", (x,), (y,), (), (), (), (), (), "weights.safetensors", {})


def test_every_key_is_read() -> None:
    got = parse(
        name="m",
        description="free",
        batching={"compiled_batch_sizes": [4, 1]},
        weights_file="w.safetensors",
        provenance={"any": "thing"},
        nereid={},
        unknown_key=1,
    )
    assert (got.name, got.compiled_batch_sizes, got.weights_file) == ("m", (4, 1), "w.safetensors")


@pytest.mark.parametrize("version", [2, 2.0, "2", "2.0", 2.1, "2.1"])
def test_versions_2_and_2_1_are_read_as_number_and_as_text(version: Any) -> None:
    assert parse(format_version=version).kind == "model"


def test_letters_run_from_the_fastest_axis_and_the_wire_from_the_slowest() -> None:
    image = ManifestTensor("x", "u8", "chwn", {"c": 3, "h": 480, "w": 640})
    assert image.spec() == TensorSpec("x", "u8", (-1, 640, 480, 3), 0)
    sideways = ManifestTensor("x", "f32", "nc", {"c": 3})
    assert sideways.spec() == TensorSpec("x", "f32", (3, -1), 1)
    assert ManifestTensor("x", "f32", "", {}).spec() == TensorSpec("x", "f32", ())


@given(
    st.lists(st.sampled_from("acdefghijklmopqrstuvwxyzABN"), unique=True, max_size=5),
    st.sampled_from(["", "n", "b"]),
    st.data(),
)
def test_any_legal_shape_is_reversed_with_its_batch_axis(letters: list[str], batch: str, data: Any) -> None:
    letters.insert(data.draw(st.integers(0, len(letters))), batch)
    shape = "".join(letters)
    dims = {letter: index + 2 for index, letter in enumerate(shape) if letter not in "nb"}
    (got,) = parse(executable_inputs=[tensor(shape=shape, dims=dims)]).executable_inputs
    wire = tuple(dims.get(letter, -1) for letter in shape)[::-1]
    assert got.spec() == TensorSpec("x", "f32", wire, wire.index(-1) if batch else None)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"format_version": ...}, "missing 'format_version'"),
        ({"format_version": "3.0"}, "unsupported format_version '3.0'"),
        ({"format_version": None}, "unsupported format_version None"),
        ({"name": 7}, "'name' must be a string, got int 7"),
        ({"kind": 7}, "'kind' must be a string"),
        ({"kind": "graph"}, "unsupported kind 'graph'"),
        ({"executable_inputs": ...}, "missing 'executable_inputs'"),
        ({"executable_outputs": ...}, "missing 'executable_outputs'"),
        ({"executable_inputs": {}}, "'executable_inputs' must be a list"),
        ({"executable_inputs": ["x"]}, r"executable_inputs\[0\] must be a mapping, got str 'x'"),
        ({"executable_inputs": [tensor(name=...)]}, "missing string 'name'"),
        ({"executable_inputs": [tensor(name="")]}, "'name' is empty"),
        ({"executable_inputs": [tensor(dtype=3)]}, "missing string 'dtype'"),
        ({"executable_inputs": [tensor(dtype="float32")]}, "unknown dtype 'float32'; known: bool, u8"),
        ({"executable_inputs": [tensor(shape=["c"])]}, "missing string 'shape'"),
        ({"executable_inputs": [tensor(), tensor()]}, "duplicate tensor name 'x'"),
        ({"executable_inputs": [tensor(dims=[3])]}, "'dims' is not a mapping"),
        ({"executable_inputs": [tensor(shape="c3n")]}, "'3', which is not an ASCII letter"),
        ({"executable_inputs": [tensor(shape="cñ")]}, "not an ASCII letter"),
        ({"executable_inputs": [tensor(shape="ccn")]}, "duplicate axis letters"),
        ({"executable_inputs": [tensor(shape="nn")]}, "duplicate axis letters"),
        ({"executable_inputs": [tensor(shape="nb", dims={})]}, "more than one batch axis"),
        ({"executable_inputs": [tensor(dims={"cc": 3})]}, "'cc' is not a single ASCII letter"),
        ({"executable_inputs": [tensor(dims={1: 3})]}, "dims key 1 is not a single ASCII letter"),
        ({"executable_inputs": [tensor(dims={"c": 3, "n": 4})]}, "must not give the batch axis 'n' a size"),
        ({"executable_inputs": [tensor(dims={"c": 3.0})]}, "'c' must be an integer, got float"),
        ({"executable_inputs": [tensor(dims={"c": True})]}, "'c' must be an integer, got bool"),
        ({"executable_inputs": [tensor(dims={"c": 0})]}, "'c' must be > 0 or -1.* got 0"),
        ({"executable_inputs": [tensor(dims={"c": -2})]}, "'c' must be > 0 or -1.* got -2"),
        ({"executable_inputs": [tensor(dims={"c": 3, "d": 1})]}, "dims key 'd' is not in shape 'cn'"),
        ({"executable_inputs": [tensor(dims=None)]}, "axis 'c' but dims has no entry"),
        ({"executable_inputs": [tensor(), tensor("z", "c")]}, r"mixes batched and unbatched .*\['z'\]"),
        (
            {"executable_inputs": [tensor(dims={"c": -1})]},
            r"variable executable-input axis \['c'\] but no 'input_shapes'",
        ),
        ({"executable_inputs": [tensor(dtype="f8_e5m2")]}, "f8_e5m2: no KServe wire datatype"),
        ({"executable_outputs": [tensor(dtype="f8_e4m3")]}, "f8_e4m3: no KServe wire datatype"),
        ({"executable_inputs": [tensor(dims={"c": 2**31})]}, "'c' must be > 0 .*got 2147483648"),
        ({"executable_inputs": [tensor(dims={"c": 10**4000})]}, "'c' must be > 0 .*got 100"),
        ({"executable_inputs": [tensor(name="a\nb")]}, r"'name' 'a\\nb' has characters that cannot be printed"),
        ({"executable_inputs": [tensor(name="\ud800")]}, "has characters that cannot be printed"),
        ({"batching": {"compiled_batch_sizes": [2**31]}}, "list of positive integers"),
        ({"input_shapes": [{"c": 2**31}]}, "must be > 0 .*got 2147483648"),
        ({"batching": [1]}, "'batching' must be a mapping"),
        ({"batching": {"compiled_batch_sizes": 4}}, "list of positive integers"),
        ({"batching": {"compiled_batch_sizes": [0]}}, "list of positive integers"),
        ({"batching": {"compiled_batch_sizes": [True]}}, "list of positive integers"),
        ({"input_shapes": []}, "'input_shapes' must be a list of mappings"),
        ({"input_shapes": [{"c": 0}]}, "size of 'c' must be > 0 .*got 0"),
        ({"input_shapes": [{"c": 3}]}, "no executable input has a variable axis"),
        ({"client_inputs": [tensor()]}, "only valid when model.jl is present"),
        ({"weights_file": "../w.safetensors"}, "must be a file name inside the bundle"),
        ({"weights_file": "/etc/w"}, "must be a file name inside the bundle"),
        ({"weights_file": ".."}, "must be a file name inside the bundle"),
        ({"weights_file": ""}, "must be a file name inside the bundle"),
        ({"nereid": []}, "'nereid' must be a mapping"),
        ({"nereid": {"devise": "cpu"}}, r"unknown keys \['devise'\]"),
    ],
)
def test_a_broken_rule_is_named(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        parse(**keys)


VARIABLE = {"executable_inputs": [tensor(shape="whn", dims={"w": -1, "h": -1})]}


def test_variants_are_listed_by_the_sizes_of_their_variable_axes() -> None:
    got = parse(**VARIABLE, input_shapes=[{"w": 4, "h": 2}, {"h": 5, "w": 3}])
    assert (got.input_shapes, got.variant_keys) == (({"w": 4, "h": 2}, {"w": 3, "h": 5}), ((4, 2), (3, 5)))


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ([{"w": 4}], r"missing a size for variable axis \['h'\]"),
        ([{"w": 4, "h": 2, "c": 3}], r"names non-variable axes \['c'\]"),
        ([{"w": 4, "h": 2}, {"h": 2, "w": 4}], "duplicate entries"),
        ([3], "list of mappings"),
        ([{"w": True, "h": 2}], "must be > 0 .*got True"),
    ],
)
def test_variants_that_do_not_match_the_axes_are_refused(shapes: Any, words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        parse(**VARIABLE, input_shapes=shapes)


def test_client_tensors_are_allowed_beside_a_hook_and_may_hide_fp8() -> None:
    got = parse(
        has_hook=True, executable_inputs=[tensor(dtype="f8_e5m2")], client_inputs=[tensor("q", "q", dims={"q": -1})]
    )
    assert got.client_inputs == (ManifestTensor("q", "f32", "q", {"q": -1}),)


META: dict[str, Any] = {
    "kind": "meta",
    "executable_inputs": ...,
    "executable_outputs": ...,
    "name": "me",
    "client_inputs": [tensor()],
    "client_outputs": [tensor("y")],
    "meta": {"calls": ["a", "b"]},
}


def test_a_meta_manifest_lists_the_models_it_calls() -> None:
    assert parse(has_hook=True, **META).calls == ("a", "b")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"has_hook": False}, "requires a model.jl"),
        ({"client_inputs": ...}, "non-empty client_inputs"),
        ({"client_outputs": []}, "non-empty client_outputs"),
        ({"meta": ...}, "missing 'meta' mapping"),
        ({"meta": {}}, "'meta.calls' must be a list"),
        ({"meta": {"calls": [1]}}, "entries must be strings"),
        ({"meta": {"calls": ["a", "a"]}}, "duplicate entries in meta.calls"),
        ({"meta": {"calls": ["me"]}}, "lists itself"),
        ({"input_shapes": [{"c": 1}]}, "must not have 'input_shapes'"),
    ],
)
def test_a_broken_meta_rule_is_named(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        parse(**{"has_hook": True, **META, **keys})


@pytest.mark.parametrize("raw", [None, [], "text", 3, True])
def test_a_manifest_that_is_no_mapping_is_refused(raw: Any) -> None:
    with pytest.raises(ManifestError, match="manifest must be a mapping, got "):
        manifests.parse(raw, has_hook=False)


# From a file: YAML.

YAML = """
format_version: 2.0
executable_inputs:
  - {{name: {name}, dtype: f32, shape: {shape}, dims: {dims}}}
executable_outputs:
  - {{name: y, dtype: f32, shape: n}}
"""


@pytest.mark.parametrize(
    ("shape", "dims"), [("on", "{o: 3}"), ("no", "{o: 3}"), ("n", "{}"), ("yes", "{y: 1, e: 2, s: 3}"), ("off", "")]
)
def test_axis_letters_that_yaml_1_1_takes_for_booleans_stay_letters(tmp_path: Path, shape: str, dims: str) -> None:
    path = tmp_path / "manifest.yaml"
    path.write_text(YAML.format(name="x", shape=shape, dims=dims))
    if shape == "off":  # letters all the same: the repeated f is what is wrong
        with pytest.raises(ManifestError, match="shape 'off' has duplicate axis letters"):
            manifests.read(path, has_hook=False)
        return
    (x,) = manifests.read(path, has_hook=False).executable_inputs
    assert x.letters == shape


def test_booleans_of_yaml_1_2_are_still_booleans() -> None:
    assert load_yaml("[true, False, TRUE, on, no, y, 3, 2.1, ~]") == [True, False, True, "on", "no", "y", 3, 2.1, None]


def test_the_trap_is_closed_here_only() -> None:
    assert (load_yaml("on"), yaml.safe_load("on")) == ("on", True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a: [1", r"manifest\.yaml line 1: is not YAML"),
        (b"a: 1\nb: {\n", "is not YAML"),
        (b"\xff\xfe\xfa", "is not YAML"),
        (b"a: \x00", "is not YAML"),
        (b"a: !!python/object/apply:os.getcwd []", "is not YAML"),
        (b"? [a]\n: 1\n? {b: c}\n: 2", "is not YAML"),
        (b"a: 1\nb: 2024-99-99", r"manifest\.yaml line 2: is not YAML \(the value is no timestamp, quote it\)"),
        (b"a: !!int ", r"line 1: is not YAML \(the value is no int, quote it\)"),
        (b"a: !!bool maybe", "the value is no bool, quote it"),
        (b"a: [!!timestamp x]", "the value is no timestamp, quote it"),
        (b"a: 1\n---\nb: 2", "is not YAML"),
        (b"a: *b", "is not YAML"),
        (b"", "must be a mapping, got nothing"),
    ],
)
def test_a_file_that_is_no_manifest_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "manifest.yaml"
    path.write_bytes(content)
    with pytest.raises(ManifestError, match=words) as caught:
        manifests.read(path, has_hook=False)
    assert str(tmp_path) not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"manifest\.yaml: cannot be read \(No such file"):
        manifests.read(tmp_path / "manifest.yaml", has_hook=False)


COMPLETE: list[dict[str, Any]] = [
    {
        "format_version": "2.1",
        "name": "m",
        "kind": "model",
        "executable_inputs": [tensor(shape="whn", dims={"w": -1, "h": -1}), tensor("mask", "wn", "u8", dims={"w": -1})],
        "executable_outputs": [tensor("y", "kn", dims={"k": -1}), tensor("z", "n", "bf16", dims=None)],
        "client_inputs": [tensor("q", "q", dims={"q": -1})],
        "batching": {"compiled_batch_sizes": [1, 4]},
        "input_shapes": [{"w": 4, "h": 2}, {"w": 3, "h": 5}],
        "weights_file": "w.safetensors",
        "provenance": {"any": ["thing"]},
        "nereid": {},
    },
    {
        "format_version": 2.0,
        "name": "me",
        "kind": "meta",
        "client_inputs": [tensor()],
        "client_outputs": [tensor("y", "", dims={})],
        "meta": {"calls": ["a", "b"]},
    },
]


def read_in_full(got: Manifest) -> None:
    """Everything a reader does with a manifest that was accepted."""
    tensors = (*got.executable_inputs, *got.executable_outputs, *got.client_inputs, *got.client_outputs)
    assert {t.dtype for t in tensors} <= {row.token for row in dtypes.TABLE}
    for sizes in got.input_shapes or ({},):
        specs = [t.at(sizes).spec() for t in got.executable_inputs]
        variable = [n for spec in specs for axis, n in enumerate(spec.shape) if axis != spec.batch_axis and n == -1]
        assert variable == []
    assert len(set(got.variant_keys)) == len(got.input_shapes)
    served = tuple(
        tuple(t.spec() for t in client or executable)
        for client, executable in (
            (got.client_inputs, got.executable_inputs),
            (got.client_outputs, got.executable_outputs),
        )
    )
    sizes = got.compiled_batch_sizes
    spec = ModelSpec("m", "e", "p", *served, (), max_batch_size=max(sizes, default=0), coalesce=bool(sizes))
    assert ModelSpec.from_json(spec.to_json()) == spec
    assert config_text(spec)


@MANY
@given(st.sampled_from(COMPLETE).flatmap(lambda raw: altered(raw, times=3)), st.booleans())
def test_made_up_manifests_raise_nothing_but_manifest_errors(raw: dict[str, Any], has_hook: bool) -> None:
    try:
        got = manifests.parse(raw, has_hook=has_hook)
    except ManifestError:
        return
    read_in_full(got)


YAML_WORDS = [
    "[",
    "]",
    "{",
    "}",
    ": ",
    "\n- ",
    "*a",
    "&a ",
    "<<: ",
    "!!int ",
    "? ",
    "|\n",
    ">",
    "%",
    "@",
    "~",
    "'",
    '"',
    "\t",
    "\0",
]


@MANY
@given(st.sampled_from(COMPLETE).map(yaml.safe_dump).flatmap(lambda text: damaged(text, YAML_WORDS)))
def test_made_up_files_raise_nothing_but_manifest_errors(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "made_up_manifest.yaml"
    path.write_text(text, encoding="utf-8")
    try:
        got = manifests.read(path, has_hook=True)
    except ManifestError as error:
        short = len(str(error)) < 1000
        assert short
        return
    read_in_full(got)


@pytest.mark.parametrize("key", ["format_version", "name", "kind", "batching", "executable_inputs", "weights_file"])
def test_a_small_file_full_of_aliases_is_refused_with_a_short_message(tmp_path: Path, key: str) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 8)}]" for i in range(1, 12)]
    valid = {"format_version": '"2.1"', "executable_inputs": "[]", "executable_outputs": "[]"}
    fields = [f"{name}: {text}" for name, text in {**valid, key: "*a11"}.items()]
    path = tmp_path / "manifest.yaml"
    path.write_text("\n".join([*lines, *fields]))
    with pytest.raises(ManifestError) as caught:
        manifests.read(path, has_hook=False)
    assert len(str(caught.value)) < 1000
