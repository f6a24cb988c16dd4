"""Bundles with shape variants: one program per entry of ``input_shapes`` and batch size, one set of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")

from converters import bundle
from nereid_backend.errors import BundleError, SignatureError
from nereid_backend.spec import Program, TensorSpec


def centred_total(x: Any, scale: Any) -> Any:
    return scale * (x - x.mean(0)).sum((1, 2))


def read(folder: Path, **options: Any) -> Any:
    return bundle.read(folder, folder.name, "cpu", **options)


def test_each_variant_has_its_programs_by_the_sizes_on_the_wire(make_pool: Any) -> None:
    prepared = read(make_pool())
    assert prepared.spec.programs == (
        Program("model.v0.b1.mlir", 1, (2, 4)),
        Program("model.v0.b2.mlir", 2, (2, 4)),
        Program("model.v1.b1.mlir", 1, (5, 3)),
        Program("model.v1.b2.mlir", 2, (5, 3)),
    )
    assert prepared.spec.inputs == (TensorSpec("img", "f32", (-1, -1, -1), 0),)
    assert (prepared.spec.max_batch_size, prepared.spec.coalesce, prepared.notes) == (2, True, ())
    assert set(prepared.files) == {p.file for p in prepared.spec.programs} | {"weights.safetensors"}


@pytest.mark.parametrize("shape", [(1, 2, 4), (2, 2, 4), (1, 5, 3), (2, 5, 3)])
def test_every_program_runs_with_the_one_set_of_weights(
    make_pool: Any, run: Any, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    image = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    assert [o.tolist() for o in run(read(make_pool()), tmp_path / "r", image)] == [(2 * image.sum((1, 2))).tolist()]


def test_variants_may_be_compiled_for_different_sizes(make_pool: Any) -> None:
    spec = read(make_pool(sizes=((1, 4), (2,)))).spec
    assert (spec.max_batch_size, spec.batch_sizes) == (4, (1, 2, 4))
    assert [spec.at_variant(v).batch_sizes for v in spec.variants] == [(1, 4), (2,)]


def test_the_largest_size_alone_may_be_served(make_pool: Any) -> None:
    spec = read(make_pool(sizes=((1, 4), (2, 1))), batch_sizes="largest").spec
    assert [p.file for p in spec.programs] == ["model.v0.b4.mlir", "model.v1.b2.mlir"]


@pytest.mark.parametrize("sizes", [((None,), (None,)), ((1, 2), (None,))])
def test_a_size_less_module_makes_every_program_exact(make_pool: Any, sizes: Any) -> None:
    spec = read(make_pool(sizes)).spec
    assert (spec.max_batch_size, spec.coalesce, spec.batch_sizes) == (0, False, ())
    assert [t.batch_axis for t in (*spec.inputs, *spec.outputs)] == [None, None]
    rows = [3, 3] if sizes[0] == (None,) else [1, 2, 3]
    assert [p.variant[-2:] for p in spec.programs] == [(2, 4)] * (len(rows) - 1) + [(5, 3)]
    assert spec.inputs[0].shape == ((3, -1, -1) if rows == [3, 3] else (-1, -1, -1))


def test_one_variant_whose_rows_depend_on_each_other_keeps_all_apart(make_pool: Any) -> None:
    prepared = read(make_pool(functions=(..., centred_total)))
    assert (prepared.spec.max_batch_size, prepared.spec.coalesce) == (0, False)
    assert prepared.notes == (
        "requests run one by one, without padding, at exactly [1, 2] rows: variant [5, 3]: a row gives another result "
        "beside other rows",
    )


@pytest.mark.parametrize(
    ("sizes", "manifest", "error", "words"),
    [
        (((1, 2), ()), {}, BundleError, r"neither model\.v1\.mlir nor model\.v1\.b\{N\}\.mlir.*each entry of input_sh"),
        (
            ((1, 2), (1,)),
            {"batching": {"compiled_batch_sizes": [1, 2]}},
            BundleError,
            r"declares compiled batch sizes \[2\] but there is no model\.v1\.b2\.mlir",
        ),
        (
            ((1,), (1,)),
            {"input_shapes": [{"w": 4, "h": 2}, {"w": 5, "h": 3}]},
            SignatureError,
            r"model\.v1\.b1\.mlir: input 'img' is f32\[1, 3, 5\] by the manifest .* main has f32\[1, 5, 3\]",
        ),
    ],
)
def test_variants_that_do_not_fit_their_manifest_are_refused_by_name(
    make_pool: Any, sizes: Any, manifest: Any, error: type[Exception], words: str
) -> None:
    folder = make_pool(sizes=sizes, **manifest)
    with pytest.raises(error, match=words):
        read(folder)


def test_modules_beyond_the_listed_variants_are_ignored(make_pool: Any) -> None:
    folder = make_pool()
    for name in ("model.b1.mlir", "model.mlir", "model.v2.b1.mlir", "model.v00.b1.mlir"):
        (folder / name).write_text("not a program")
    assert len(read(folder).spec.programs) == 4


class Counts:
    """How often some functions were called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.calls: dict[str, int] = {}

    def count(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            return original(*arguments, **options)

        self._monkeypatch.setattr(owner, name, counted)


def test_the_trial_reads_the_weights_once_and_compiles_what_decides(
    make_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nereid_backend import safetensors
    from nereid_backend.engines.jax_programs import Compiler

    counts = Counts(monkeypatch)
    counts.count(safetensors, "read")
    counts.count(Compiler, "program")
    prepared = read(make_pool(((1, 2, 4), (1, 2, 4))))
    assert (prepared.spec.coalesce, len(prepared.spec.programs)) == (True, 6)
    assert counts.calls == {"read": 1, "program": 3}  # sizes 1 and 2 of one variant, size 2 of the other


def test_legacy_weights_are_transposed_once(make_bundle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from converters import weights
    from converters.convert import convert

    counts = Counts(monkeypatch)
    counts.count(weights, "write_reversed")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    matrix = np.arange(16, dtype=np.float32).reshape(4, 4)
    folder = make_bundle(axis_order=None, tensors={"w": matrix.T, "b": matrix[0]})
    for name, links in (("linked", True), ("copied", False)):
        if not links:
            monkeypatch.setattr(Path, "hardlink_to", failing)
        prepared = convert(folder, tmp_path / name)
        written = read_bundle_weights_of(tmp_path / name / "linear" / "1" / "weights.safetensors")
        np.testing.assert_array_equal(written["w"], matrix)
        del prepared  # what was made for the trial goes with it
        assert list((tmp_path / "scratch").iterdir()) == []
    assert counts.calls == {"write_reversed": 2}


def failing(*_arguments: Any) -> None:
    raise OSError("another file system")


def read_bundle_weights_of(path: Path) -> Any:
    from nereid_backend import safetensors

    return safetensors.read(path).tensors
