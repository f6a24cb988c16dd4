from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from converters.convert import prepare  # noqa: E402
from converters.exporters import export_jax, read_bundle_weights  # noqa: E402
from nereid_backend.errors import ExportError, ManifestError  # noqa: E402

RNG = np.random.default_rng(7)
X = RNG.normal(size=(3, 4)).astype(np.float32)
W = RNG.normal(size=(4, 4)).astype(np.float32)


class Layer(NamedTuple):
    kernel: Any
    bias: Any


@pytest.fixture(params=[False, True], ids=["32-bit", "64-bit"])
def x64(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = jax.config.values["jax_enable_x64"]
    jax.config.update("jax_enable_x64", request.param)
    yield request.param
    jax.config.update("jax_enable_x64", before)


@pytest.fixture
def served(tmp_path: Path, run: Any) -> Any:
    """What a bundle gives once ``nereid-convert`` has written it into a repository, by output."""

    def outputs(bundle: Path, *inputs: np.ndarray) -> dict[str, np.ndarray]:
        prepared = prepare(bundle)
        results = run(prepared, tmp_path / "repository", *inputs)
        return dict(zip((tensor.name for tensor in prepared.spec.outputs), results, strict=True))

    return outputs


def tensors(bundle: Path) -> dict[str, list[Any]]:
    """Name, type and axes of the inputs and outputs as the manifest has them."""
    manifest = yaml.safe_load((bundle / "manifest.yaml").read_text())
    return {
        role: [(t["name"], t["dtype"], t["shape"]) for t in manifest[f"executable_{role}"]]
        for role in ("inputs", "outputs")
    }


def test_a_tree_of_parameters_becomes_named_weights_and_the_converted_bundle_computes_as_the_function(
    tmp_path: Path, served: Any
) -> None:
    params = {"layers": [Layer(W, np.ones(4, np.float32)), Layer(jnp.asarray(W.T), jnp.zeros(4))], "scale": 0.5}

    def network(params: Any, x: Any) -> Any:
        for layer in params["layers"]:
            x = jnp.tanh(x @ layer.kernel + layer.bias)
        return x * params["scale"]

    done = export_jax(network, params, X, tmp_path / "network", batch_sizes=[3, 1])
    names = ["layers/0/kernel", "layers/0/bias", "layers/1/kernel", "layers/1/bias"]
    assert list(read_bundle_weights(done.directory)) == names
    assert (done.batch_sizes, list(done.differences), done.notes) == ((1, 3), ["output"], ())
    result = served(done.directory, X)["output"]
    np.testing.assert_allclose(result, network(params, X), rtol=1e-5, atol=1e-6)


def convolutional(params: Any, image: Any) -> Any:
    dimensions = ("NHWC", "HWIO", "NHWC")
    x = jax.nn.relu(jax.lax.conv_general_dilated(image, params["first"], (2, 2), "SAME", dimension_numbers=dimensions))
    mean, variance = params["statistics"]
    x = x + (x - mean) / jnp.sqrt(variance + 1e-5)
    return jax.nn.softmax(x.mean((1, 2)) @ params["head"])


def attentive(params: Any, ids: Any) -> Any:
    x = params["embedding"][ids]
    query, key, value = (x @ weight for weight in params["projections"])
    scores = jnp.where(ids[:, None, :] > 0, query @ key.swapaxes(1, 2) / 4, -1e9)
    x = x + jax.nn.softmax(scores) @ value
    return (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5)


def recurrent(params: Any, sequence: Any) -> Any:
    def step(state: Any, x: Any) -> Any:
        state = jnp.tanh(x @ params["in"] + state @ params["back"])
        return state, state

    start = jnp.zeros((sequence.shape[0], 16))
    return jax.lax.scan(step, start, sequence.swapaxes(0, 1))[1].swapaxes(0, 1)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("function", "params", "examples"),
    [
        (
            convolutional,
            {"first": normal(3, 3, 3, 8), "statistics": (normal(8), np.abs(normal(8))), "head": normal(8, 5)},
            normal(4, 12, 12, 3),
        ),
        (
            attentive,
            {"embedding": normal(50, 16), "projections": list(normal(3, 16, 16))},
            RNG.integers(1, 50, (4, 7)).astype(np.int32),
        ),
        (recurrent, {"in": normal(6, 16), "back": normal(16, 16) / 8}, normal(4, 9, 6)),
    ],
    ids=["convolutional", "attentive", "recurrent"],
)
def test_networks_agree_with_the_function_run_step_by_step(
    tmp_path: Path, served: Any, function: Any, params: Any, examples: np.ndarray
) -> None:
    done = export_jax(function, params, examples, tmp_path / "network", batch_sizes=[1, 4])
    assert done.notes == ()  # rows are independent, and nothing was narrowed
    assert max(done.differences.values()) <= 1e-5
    with jax.disable_jit():
        expected = np.asarray(function(jax.tree_util.tree_map(jnp.asarray, params), examples))
    (result,) = served(done.directory, examples).values()
    assert np.abs(result - expected).max() <= 1e-5 * np.abs(expected).max()


def test_what_a_function_does_not_use_stays_an_argument(tmp_path: Path, served: Any) -> None:
    def model(params: Any, x: Any, unused: Any) -> Any:
        return x @ params["w"]

    params = {"never": np.ones(2, np.float32), "w": W}
    done = export_jax(model, params, (X, np.zeros((3, 2), np.int32)), tmp_path / "model", batch_sizes=[3])
    assert tensors(done.directory)["inputs"] == [("x", "f32", "an"), ("unused", "i32", "an")]
    assert list(read_bundle_weights(done.directory)) == ["never", "w"]
    assert np.allclose(served(done.directory, X, np.ones((3, 2), np.int32))["output"], X @ W, rtol=1e-5)


def test_an_array_in_several_places_is_stored_once(tmp_path: Path, served: Any) -> None:
    table = jnp.asarray(RNG.normal(size=(10, 4)), jnp.float32)
    params = {"embedding": table, "head": {"kernel": table}}

    def model(params: Any, ids: Any) -> Any:
        return params["embedding"][ids].sum(1) @ params["head"]["kernel"].T

    ids = np.array([[1, 9], [0, 4], [3, 3]], np.int32)
    done = export_jax(model, params, ids, tmp_path / "tied", batch_sizes=[3])
    assert list(read_bundle_weights(done.directory)) == ["embedding"]
    np.testing.assert_allclose(served(done.directory, ids)["output"], model(params, ids), rtol=1e-5)


@jax.tree_util.register_pytree_node_class
class Block:
    """A module as equinox and flax have them: a tree of its arrays and of what else it holds, and a function."""

    def __init__(self, kernel: Any, activation: Any, inner: Any = None) -> None:
        self.kernel, self.activation, self.inner = kernel, activation, inner

    def __call__(self, x: Any) -> Any:
        x = self.activation(x @ self.kernel)
        return x if self.inner is None else self.inner(x)

    def tree_flatten(self) -> Any:
        return (self.kernel, self.activation, self.inner), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Any:
        return cls(*children)


def test_a_module_with_a_shared_part_is_exported_by_its_function_and_the_part_is_stored_once(
    tmp_path: Path, served: Any
) -> None:
    shared = Block(jnp.asarray(W), jnp.tanh)
    model = [Block(jnp.asarray(W.T), jax.nn.relu, shared), shared]

    def apply(model: Any, x: Any) -> Any:
        return jax.vmap(model[1])(jax.vmap(model[0])(x))

    done = export_jax(apply, model, X, tmp_path / "shared", batch_sizes=[3])
    assert list(read_bundle_weights(done.directory)) == ["0/0", "0/2/0"]
    np.testing.assert_allclose(served(done.directory, X)["output"], apply(model, X), rtol=1e-5, atol=1e-6)


def test_integer_buffers_and_several_outputs_keep_their_types_and_names(tmp_path: Path, served: Any) -> None:
    params = {"offsets": np.array([1, 2, 3, 4], np.int8), "keep": np.array([True, False, True, True])}

    def model(params: Any, x: Any) -> Any:
        return {"shifted": x + params["offsets"], "mask": params["keep"] & (x > 0), "half": x.astype(jnp.bfloat16)}

    x = np.array([[-1, 0, 5, 100], [1, 2, 3, 4]], np.int32)
    done = export_jax(model, params, x, tmp_path / "integers", batch_sizes=[1, 2])
    assert [(name, dtype) for name, dtype, _ in tensors(done.directory)["outputs"]] == [
        ("half", "bf16"), ("mask", "bool"), ("shifted", "i32"),
    ]  # fmt: skip
    got = served(done.directory, x)
    assert got["shifted"].tolist() == (x + params["offsets"]).tolist()
    assert got["mask"].tolist() == ((x > 0) & params["keep"]).tolist()
    assert {array.dtype for array in read_bundle_weights(done.directory).values()} == {np.dtype("i1"), np.dtype("?")}


def test_types_of_64_bits_are_what_jax_makes_of_them_in_this_process(tmp_path: Path, served: Any, x64: bool) -> None:
    params = {"w": W.astype(np.float64), "step": np.int64(3)}

    def model(params: Any, x: Any, ids: Any) -> Any:
        return x @ params["w"], ids + params["step"]

    x, ids = X.astype(np.float64), np.array([[2**40], [1], [2]]) if x64 else np.array([[7], [1], [2]])
    done = export_jax(model, params, (x, ids), tmp_path / "wide", batch_sizes=[3])
    types = ["f64", "i64"] if x64 else ["f32", "i32"]
    assert [dtype for _, dtype, _ in tensors(done.directory)["inputs"]] == types
    assert ("jax_enable_x64 is off, so 'x' of float64 is float32" in " ".join(done.notes)) == (not x64)
    got = served(done.directory, x if x64 else X, ids if x64 else ids.astype(np.int32))
    np.testing.assert_allclose(got["output_0"], x @ params["w"], rtol=1e-12 if x64 else 1e-5)
    assert got["output_1"].tolist() == (ids + 3).tolist()


def test_the_settings_of_jax_are_the_callers_again_after_an_export(tmp_path: Path, x64: bool) -> None:
    export_jax(lambda _, x: x + 1, None, X, tmp_path / "plain", batch_sizes=[1])
    assert jax.config.values["jax_enable_x64"] == x64
    assert jnp.zeros(1).dtype == (np.float64 if x64 else np.float32)


def test_a_random_key_travels_as_its_data_as_an_input_a_weight_and_an_output(tmp_path: Path, served: Any) -> None:
    def noisy(params: Any, x: Any, key: Any) -> Any:
        noise = jax.random.normal(key, x.shape) + jax.random.normal(params["key"], x.shape)
        return {"noisy": x + noise, "next": jax.random.split(key, 1)[0]}

    params, key = {"key": jax.random.key(3)}, jax.random.key(5)
    done = export_jax(noisy, params, (X, key), tmp_path / "noisy", batch_sizes=None)
    assert tensors(done.directory)["inputs"] == [("x", "f32", "ac"), ("key", "u32", "a")]
    got, want = served(done.directory, X, np.asarray(jax.random.key_data(key))), noisy(params, X, key)
    np.testing.assert_allclose(got["noisy"], want["noisy"], rtol=1e-5)
    assert got["next"].tolist() == jax.random.key_data(want["next"]).tolist()


def test_a_key_per_row_is_batched_and_one_for_all_rows_is_refused(tmp_path: Path) -> None:
    def per_row(_: Any, x: Any, keys: Any) -> Any:
        return x + jax.vmap(lambda key: jax.random.normal(key, (4,)))(keys)

    done = export_jax(per_row, None, (X, jax.random.split(jax.random.key(0), 3)), tmp_path / "rows")
    assert tensors(done.directory)["inputs"][1] == ("keys", "u32", "an")
    with pytest.raises(ManifestError, match="mixes batched and unbatched"):
        export_jax(
            lambda _, x, key: x + jax.random.normal(key, (4,)), None, (X, jax.random.key(0)), tmp_path / "one",
            axes={"key": "k"},
        )  # fmt: skip


def test_a_key_that_the_function_holds_itself_is_part_of_the_program(tmp_path: Path, served: Any) -> None:
    key = jax.random.key(1)
    done = export_jax(lambda _, x: x + jax.random.normal(key, (4,)), None, X, tmp_path / "held", batch_sizes=[3])
    assert read_bundle_weights(done.directory) == {}
    np.testing.assert_allclose(served(done.directory, X)["output"], X + jax.random.normal(key, (4,)), rtol=1e-5)


def test_a_function_that_gives_something_else_each_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"output 'output' .* differs from the model on the example inputs at batch"):
        export_jax(lambda _, x: x + np.float32(np.random.rand()), None, X, tmp_path / "dice")
    assert list(tmp_path.iterdir()) == []


def test_a_difference_on_rows_that_nobody_exported_with_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from converters.exporters import jax_functions

    seen = {row.tobytes() for row in X}

    class Overfitted(jax_functions._Function):
        """Its program is right for the examples only."""

        def original(self) -> Any:
            run = super().original()

            def right(inputs: Any) -> Any:
                known = all(row.tobytes() in seen for row in inputs[0])
                return [result if known else result + np.float32(0.1) for result in run(inputs)]

            return right

    monkeypatch.setattr(jax_functions, "_Function", Overfitted)
    with pytest.raises(ExportError, match="inputs that were not exported with at batch size 1 by"):
        export_jax(lambda _, x: x @ W, None, X, tmp_path / "overfitted")


def test_every_batch_size_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from converters.exporters import comparison

    sizes = []
    prove = comparison.prove

    def spy(prepared: Any, trials: Any, tolerance: Any) -> Any:
        sizes.extend(len(trial.inputs[0]) for trial in trials)
        return prove(prepared, trials, tolerance)

    monkeypatch.setattr(comparison, "prove", spy)
    export_jax(lambda _, x: x * 2, None, X, tmp_path / "double", batch_sizes=[1, 2, 8])
    assert {size: sizes.count(size) for size in sizes} == {1: 3 + 2, 2: 2 + 2, 8: 1 + 2}


def test_every_tensor_has_the_axes_and_the_batch_that_it_is_given_or_none(tmp_path: Path, served: Any) -> None:
    def model(params: Any, image: Any, gain: Any) -> Any:
        return {"mean": image.mean((0, 1)) * gain[:, 0], "wide": gain.T, "table": params + 0}

    images, gain = normal(5, 6, 2), normal(2, 3)
    done = export_jax(
        model, W, {"image": images, "gain": gain}, tmp_path / "means", [2], axes={"image": "hwn", "wide": "cb"}
    )
    # Mappings are trees of sorted keys.
    assert tensors(done.directory)["inputs"] == [("gain", "f32", "an"), ("image", "f32", "nwh")]
    assert tensors(done.directory)["outputs"] == [("mean", "f32", "n"), ("table", "f32", "ac"), ("wide", "f32", "bc")]
    got, want = served(done.directory, gain, images), model(W, images, gain)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6)


def test_inputs_may_be_trees_and_one_array_may_stand_for_two(tmp_path: Path, served: Any) -> None:
    def model(_: Any, batch: Any, shift: Any) -> Any:
        return batch["ids"] * 2 + batch["mask"] - shift

    ones = jnp.ones((2, 3), jnp.int32)
    done = export_jax(model, None, ({"ids": ones, "mask": ones}, ones), tmp_path / "tree", batch_sizes=[2])
    assert [name for name, _, _ in tensors(done.directory)["inputs"]] == ["batch/ids", "batch/mask", "shift"]
    a, b, c = (np.full((2, 3), value, np.int32) for value in (5, 7, 11))
    assert served(done.directory, a, b, c)["output"].tolist() == (a * 2 + b - c).tolist()


def pooled(params: Any, tokens: Any, mask: Any) -> Any:
    hidden = jnp.tanh(tokens @ params) * mask[..., None]
    return {"mean": hidden.sum(1) / mask.sum(1, keepdims=True), "hidden": hidden}


def sequences(length: int) -> tuple[np.ndarray, np.ndarray]:
    return normal(3, length, 4), RNG.integers(1, 3, (3, length)).astype(np.float32)


@pytest.mark.parametrize("sizes", [[1, 3], None])
def test_examples_of_several_shapes_make_programs_for_each_with_one_set_of_weights(
    tmp_path: Path, served: Any, sizes: Any
) -> None:
    done = export_jax(pooled, W, sequences(5), tmp_path / "pooled", sizes, variants=[sequences(2), sequences(9)])
    manifest = yaml.safe_load((done.directory / "manifest.yaml").read_text())
    assert manifest["input_shapes"] == [{"s": 5}, {"s": 2}, {"s": 9}]
    batch = "n" if sizes else "c"
    assert tensors(done.directory)["inputs"] == [
        ("tokens", "f32", f"as{batch}"),
        ("mask", "f32", f"s{batch if sizes else 'a'}"),
    ]
    assert list(read_bundle_weights(done.directory)) == ["weight"]
    files = [f"model.v{variant}.{'b1.' if sizes else ''}mlir" for variant in range(3)]
    assert set(files) <= {path.name for path in done.directory.iterdir()}
    for length in (2, 9):
        tokens, mask = sequences(length)
        expected = pooled(W, tokens, mask)
        got = served(done.directory, tokens, mask)
        for name in ("mean", "hidden"):
            np.testing.assert_allclose(got[name], expected[name], rtol=1e-4, atol=1e-5)


def test_every_variant_is_compared(tmp_path: Path) -> None:
    def odd_for_long_ones(params: Any, tokens: Any, mask: Any) -> Any:
        return pooled(params, tokens, mask)["mean"] + (np.float32(np.random.rand()) if tokens.shape[1] == 9 else 0)

    with pytest.raises(ExportError, match=r"the example inputs at batch size 1 of variant \[9, 9\] by"):
        export_jax(odd_for_long_ones, W, sequences(5), tmp_path / "odd", variants=[sequences(9)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        (sequences(5), "inputs of the same shapes"),
        (
            (sequences(2)[0], np.ones((3, 2), np.int32)),
            r"input 'mask' is f32\[-1, 5\] in one variant and 'mask', i32\[",
        ),
        (sequences(2)[0][:, :, 0], r"have \[1, 2\] inputs"),
        ((sequences(2)[0], sequences(2)[1][..., None]), "only sizes may differ"),
    ],
)
def test_variants_that_are_no_other_shapes_of_one_model_are_refused(tmp_path: Path, variant: Any, words: str) -> None:
    with pytest.raises(ExportError, match=words):
        export_jax(lambda _, tokens, mask=1: tokens, None, sequences(5), tmp_path / "model", variants=[variant])
    assert list(tmp_path.iterdir()) == []


def test_linear_algebra_is_served_and_told_to_need_a_reader_as_new(
    tmp_path: Path, served: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    positive = X[:, :, None] * X[:, None] + np.eye(4, dtype=np.float32)
    done = export_jax(lambda _, x: jnp.linalg.cholesky(x), None, positive, tmp_path / "root", batch_sizes=[3])
    assert any("readers must be as new as this jax" in note for note in done.notes)
    assert "failed to legalize" not in capfd.readouterr().err
    (root,) = served(done.directory, positive).values()
    np.testing.assert_allclose(root @ root.swapaxes(1, 2), positive, rtol=1e-4, atol=1e-5)


def test_a_module_without_batch_sizes_takes_the_shapes_of_the_examples(tmp_path: Path) -> None:
    done = export_jax(lambda _, x, n: x[0] * n, None, (X, np.float32(3)), tmp_path / "fixed", batch_sizes=None)
    assert sorted(path.name for path in done.directory.glob("*.mlir")) == ["model.mlir"]
    assert [tensor.shape for tensor in prepare(done.directory).spec.inputs] == [(3, 4), ()]


@pytest.mark.parametrize(
    ("function", "examples", "options", "words"),
    [
        (lambda _, x: x @ x.T, X, {}, r"grows with the batch along the axes \[0, 1\]"),
        (lambda _, x: x, X[:0], {}, "give each the same, not none"),
        (lambda _, x, y: x, (X, X[:2]), {}, r"\{'x': 3, 'y': 2\} rows"),
        (lambda _, x: x, np.array(["a"]), {}, "input 'x' is <U1"),
        (lambda _, x: x, np.float32(1), {}, "no axis 0 for the batch"),
        (lambda _, x: None, X, {}, "returns no array"),
        (lambda _, x: x, X, {"input_names": ["a", "b"]}, "the function has 1 inputs"),
        (lambda _, x: x, X, {"axes": {"z": "n"}}, "it has x, output"),
        (lambda _, x: x, X, {"batch_sizes": [0]}, "expected positive integers"),
        (lambda _, x: x, X, {"batch_sizes": None, "axes": {"x": "nc"}}, "there are no batch sizes"),
        (lambda _, x: (jax.debug.print("{}", x), x)[1], X, {}, "leave out printing"),
        (lambda _, x: x if x.sum() > 0 else -x, X, {}, "cannot be traced .*jax.lax.cond instead of branches"),
        (lambda _, x: np.sin(x), X, {}, "cannot be traced .*use jax.numpy instead of numpy"),
        (lambda _, x: x[x > 0], X, {}, "cannot be traced .*jnp.where"),
    ],
)
def test_what_cannot_become_a_bundle_is_told_and_leaves_nothing(
    tmp_path: Path, function: Any, examples: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ExportError, match=words):
        export_jax(function, None, examples, tmp_path / "model", **options)
    assert list(tmp_path.iterdir()) == []
