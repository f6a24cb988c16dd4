"""Files that know their own signature: torch.export archives, jax.export files, lone StableHLO modules."""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from converters.convert import model_name, prepare
from converters.discover import find
from converters.kinds import FILE_KINDS
from nereid_backend.errors import BundleError, NereidError, SignatureError
from nereid_backend.spec import Program, TensorSpec

CONTRACT = "model_inference.textproto"
X = np.arange(12, dtype=np.float32).reshape(3, 4)

needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture
def jax_file(tmp_path: Path) -> Callable[..., Path]:
    """A file of jax.export; an argument's shape may begin with "b", a symbolic axis."""

    def write(function: Any, *shapes: Any, platforms: Any = ("cpu",), name: str = "m.jax", **keywords: Any) -> Path:
        import jax
        from jax import export

        jax.config.update("jax_enable_x64", True)
        scope = export.SymbolicScope()

        def struct(shape: Any) -> Any:
            axes = [export.symbolic_shape(n, scope=scope)[0] if isinstance(n, str) else n for n in shape]
            return jax.ShapeDtypeStruct(tuple(axes), np.float32)

        keywords = {key: struct(shape) for key, shape in keywords.items()}
        exported = export.export(jax.jit(function), platforms=platforms)(*map(struct, shapes), **keywords)
        path = tmp_path / name
        path.write_bytes(exported.serialize())
        return path

    return write


@pytest.fixture
def pt2_file(tmp_path: Path) -> Callable[..., Path]:
    """A torch.export archive of ``forward``; axis 0 of every argument is symbolic unless ``fixed``."""

    def write(forward: Any, *arguments: Any, fixed: bool = False, name: str = "m.pt2", rows: Any = None) -> Path:
        import torch

        module = type("Module", (torch.nn.Module,), {"forward": forward})()
        batch = torch.export.Dim("batch", max=rows)
        shapes = None if fixed else tuple({0: batch} for _ in arguments)
        path = tmp_path / name
        torch.export.save(torch.export.export(module, arguments, dynamic_shapes=shapes), str(path))
        return path

    return write


@pytest.fixture
def forwards() -> Any:
    class Forwards:
        def both(self, x: Any, y: Any) -> Any:
            return {"sum": x + y, "largest": x.max(1).values}

        def centred(self, x: Any) -> Any:
            return x - x.mean(0)

        def scaled(self, x: Any, k: Any) -> Any:
            return x * k

    return Forwards


def in_folder(path: Path, contract: str) -> Path:
    folder = path.parent / "folder"
    folder.mkdir()
    path.rename(folder / path.name)
    (folder / CONTRACT).write_text(contract)
    return folder


# torch.export.


@needs_torch
def test_an_exported_program_is_served_under_its_own_names(
    pt2_file: Any, forwards: Any, run: Any, tmp_path: Path
) -> None:
    import torch

    path = pt2_file(forwards.both, torch.ones(3, 4), torch.ones(3, 4), rows=6)
    prepared = prepare(path, allow_code=True)
    spec = prepared.spec
    assert (spec.name, spec.engine, spec.max_batch_size, spec.coalesce) == ("m", "torch_export", 6, True)
    assert spec.inputs == (TensorSpec("x", "f32", (-1, 4), 0), TensorSpec("y", "f32", (-1, 4), 0))
    assert spec.outputs == (TensorSpec("sum", "f32", (-1, 4), 0), TensorSpec("largest", "f32", (-1,), 0))
    total, largest = run(prepared, tmp_path / "r", X, X * 2)
    np.testing.assert_array_equal(total, X * 3)
    np.testing.assert_array_equal(largest, X.max(1))


@needs_torch
def test_an_exported_program_under_a_contract_binds_by_name_and_may_be_renamed(
    pt2_file: Any, forwards: Any, run: Any, tmp_path: Path
) -> None:
    import torch

    path = pt2_file(lambda self, x, y: x - 2 * y, torch.ones(3, 4), torch.ones(3, 4))
    contract = """max_batch_size: 8
        input { name: "y" dims: [4] } input { name: "x" dims: [4] }
        output { name: "difference" dims: [4] }"""
    prepared = prepare(in_folder(path, contract), allow_code=True)
    inputs = {tensor.name: X if tensor.name == "x" else X + 1 for tensor in prepared.spec.inputs}
    (difference,) = run(prepared, tmp_path / "r", *inputs.values())
    np.testing.assert_array_equal(difference, X - 2 * (X + 1))
    assert [tensor.name for tensor in prepared.spec.outputs] == ["difference"]


@needs_torch
def test_a_bfloat16_program_keeps_its_dtype(pt2_file: Any) -> None:
    import torch

    path = pt2_file(lambda self, x: [x + 1, x > 0], torch.ones(3, 4, dtype=torch.bfloat16), fixed=True)
    spec = prepare(path, allow_code=True).spec
    assert [(t.name, t.dtype, t.shape) for t in (*spec.inputs, *spec.outputs)] == [
        ("x", "bf16", (3, 4)), ("output_0", "bf16", (3, 4)), ("output_1", "bool", (3, 4)),
    ]  # fmt: skip


@needs_torch
def test_a_pt2_archive_is_not_opened_before_somebody_allows_its_code(pt2_file: Any, tmp_path: Path) -> None:
    import torch

    path = pt2_file(lambda self, x: x, torch.ones(3, 4))
    with pytest.raises(BundleError, match=r"m\.pt2: .*runs code.*--allow-code .*allow_code: true"):
        prepare(path)


@needs_torch
@pytest.mark.parametrize(
    ("forward", "arguments", "words"),
    [("scaled", ("x", 3), "'3' is no tensor"), ("centred", ("x",), None)],
)
def test_what_a_program_cannot_be_served_as_is_said(
    pt2_file: Any, forwards: Any, forward: str, arguments: Any, words: str | None
) -> None:
    import torch

    tensors = [torch.ones(3, 4) if a == "x" else a for a in arguments]
    path = pt2_file(getattr(forwards, forward), *tensors, fixed=words is not None)
    if words is not None:
        with pytest.raises(SignatureError, match=words):
            prepare(path, allow_code=True)
        return
    prepared = prepare(path, allow_code=True)
    assert prepared.spec.coalesce is False
    assert prepared.notes == ("requests run one by one: a row gives another result beside other rows",)


@needs_torch
def test_more_rows_than_the_program_was_exported_for_are_refused(pt2_file: Any) -> None:
    import torch

    path = pt2_file(lambda self, x: x, torch.ones(3, 4), rows=6)
    with pytest.raises(BundleError, match=r"--max-batch-size 7 is more than the 6 rows"):
        prepare(path, allow_code=True, max_batch_size=7)
    with pytest.raises(BundleError, match=r"max_batch_size 7 is more than the 6 rows"):
        prepare(in_folder(path, "input_shape: [4]\noutput_shape: [4]\nmax_batch_size: 7"), allow_code=True)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        (None, "is not a .pt2 archive"),
        (["m/models/a.json", "m/models/b.json"], "holds 2 exported programs"),
        (["m/models/a.json", "m/data/aotinductor/x.so"], "holds 1 exported programs and compiled ones"),
        (["m/code/__torch__.py"], "holds TorchScript; name it .pt"),
        (["hello"], "holds 0 exported programs"),
    ],
)
def test_a_pt2_archive_is_told_by_what_it_holds(tmp_path: Path, members: Any, words: str) -> None:
    path = tmp_path / "m.pt2"
    if members is None:
        path.write_text("hello")
    else:
        with zipfile.ZipFile(path, "w") as archive:
            for member in members:
                archive.writestr(member, "{}")
    with pytest.raises(SignatureError, match=words):
        prepare(path, allow_code=True)


@needs_torch
@pytest.mark.parametrize("part", ["models/model.json", "weights/model_weights_config.json"])
def test_a_damaged_program_is_a_signature_error(pt2_file: Any, part: str, tmp_path: Path) -> None:
    import torch

    path = pt2_file(lambda self, x: x, torch.ones(3, 4), name="whole.pt2")
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(tmp_path / "m.pt2", "w") as damaged:
        for name in whole.namelist():
            damaged.writestr(name, b"{}" if name.endswith(part) else whole.read(name))
    with pytest.raises(SignatureError, match=r"is not a program that torch .* can load"):
        prepare(tmp_path / "m.pt2", allow_code=True)


# jax.export and .mlir.


@needs_jax
def test_a_jax_export_with_a_symbolic_batch_is_compiled_for_a_few_sizes(
    jax_file: Any, run: Any, tmp_path: Path
) -> None:
    path = jax_file(lambda x, *, scale: {"y": x * scale, "sum": x.sum(1)}, ("b", 4), scale=("b", 4))
    prepared = prepare(path, max_batch_size=6)
    spec = prepared.spec
    assert (spec.engine, spec.max_batch_size, spec.coalesce) == ("jax_export", 6, True)
    assert spec.programs == tuple(Program("m.jax", size) for size in (1, 2, 4, 6))
    assert spec.inputs == (TensorSpec("input_0", "f32", (-1, 4), 0), TensorSpec("scale", "f32", (-1, 4), 0))
    assert {tensor.name for tensor in spec.outputs} == {"y", "sum"}
    outputs = dict(zip([t.name for t in spec.outputs], run(prepared, tmp_path / "r", X, X), strict=True))
    np.testing.assert_array_equal(outputs["y"], X * X)
    np.testing.assert_array_equal(outputs["sum"], X.sum(1))


@needs_jax
def test_a_second_start_of_a_jax_export_compiles_nothing(
    jax_file: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jax.monitoring

    monkeypatch.setenv("NEREID_CACHE_DIR", str(tmp_path / "cache"))
    compiled: list[str] = []

    def count(event: str, _seconds: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    prepared = prepare(jax_file(lambda x: x * 3, ("b", 4)), max_batch_size=4)
    first = run(prepared, tmp_path / "first", X[:2])
    jax.clear_caches()
    compiled.clear()
    np.testing.assert_array_equal(run(prepared, tmp_path / "second", X[:2]), first)
    assert compiled == []


@needs_jax
def test_a_jax_export_whose_rows_are_not_independent_takes_exact_sizes_only(jax_file: Any) -> None:
    prepared = prepare(jax_file(lambda x: x - x.mean(0), ("b", 4)), max_batch_size=4)
    assert (prepared.spec.max_batch_size, prepared.spec.coalesce, prepared.spec.batch_sizes) == (4, False, (1, 2, 4))
    assert prepared.notes[0].startswith("requests run one by one, without padding, at exactly [1, 2, 4] rows: ")


@needs_jax
@pytest.mark.parametrize(
    ("shapes", "options", "words"),
    [
        ([(3, "b")], {}, r"only the first axis may be symbolic"),
        ([(3, 4)], {"platforms": ("cuda",)}, "was exported for cuda, the model's device is cpu"),
    ],
)
def test_a_jax_export_that_cannot_be_served_says_why(jax_file: Any, shapes: Any, options: Any, words: str) -> None:
    with pytest.raises(BundleError, match=words):
        prepare(jax_file(lambda x: x + 1, *shapes, **options))


@needs_jax
def test_a_damaged_jax_export_is_refused_and_never_crashes(jax_file: Any, tmp_path: Path) -> None:
    whole = jax_file(lambda x: x + 1, (3, 4), name="whole.jax").read_bytes()
    rng = np.random.default_rng(0)
    damaged = tmp_path / "m.jax"
    for number in range(20):
        data = bytearray(whole)
        for place in rng.integers(0, len(data), 3):
            data[place] ^= int(rng.integers(1, 256))
        damaged.write_bytes(bytes(data[: len(data) // 2]) if number % 2 else bytes(data))
        try:
            prepare(damaged)
        except NereidError:
            continue


@needs_jax
def test_a_lone_module_of_text_is_served_at_its_own_shapes(run: Any, tmp_path: Path) -> None:
    import jax

    shape = jax.ShapeDtypeStruct((3, 4), np.float32)
    path = tmp_path / "m.mlir"
    path.write_text(jax.jit(lambda x, y: (x + y, x.sum())).lower(shape, shape).as_text())
    prepared = prepare(path)
    assert [(t.name, t.shape) for t in (*prepared.spec.inputs, *prepared.spec.outputs)] == [
        ("input_0", (3, 4)), ("input_1", (3, 4)), ("output_0", (3, 4)), ("output_1", ()),
    ]  # fmt: skip
    total, scalar = run(prepared, tmp_path / "r", X, X)
    np.testing.assert_array_equal(total, X * 2)
    assert scalar == X.sum()


@needs_jax
def test_a_module_under_a_contract_has_its_names_and_pads_to_its_size(tmp_path: Path) -> None:
    import jax

    path = tmp_path / "m.mlir"
    path.write_text(jax.jit(lambda x: x * 2).lower(jax.ShapeDtypeStruct((8, 4), np.float32)).as_text())
    spec = prepare(in_folder(path, "input_shape: [4]\noutput_shape: [4]\nmax_batch_size: 8")).spec
    assert (spec.programs, spec.max_batch_size, spec.coalesce) == ((Program("m.mlir", 8),), 8, True)
    assert (spec.inputs, spec.outputs) == (
        (TensorSpec("input", "f32", (-1, 4), 0),), (TensorSpec("output", "f32", (-1, 4), 0),),
    )  # fmt: skip


@needs_jax
def test_a_module_of_one_size_whose_rows_depend_on_each_other_is_not_padded(tmp_path: Path) -> None:
    import jax

    path = tmp_path / "m.mlir"
    path.write_text(jax.jit(lambda x: x - x.mean(0)).lower(jax.ShapeDtypeStruct((8, 4), np.float32)).as_text())
    spec = prepare(in_folder(path, "input_shape: [4]\noutput_shape: [4]\nmax_batch_size: 8")).spec
    assert (spec.max_batch_size, spec.coalesce, spec.batch_sizes) == (8, False, (8,))


@needs_jax
@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ('%r, %u = "stablehlo.infeed"(%t) : (!stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)', "infeed"),
        ('%u = "stablehlo.outfeed"(%x, %t) : (tensor<2xf32>, !stablehlo.token) -> !stablehlo.token', "outfeed"),
        (
            '%u = "stablehlo.send"(%x, %t) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 2>, '
            "is_host_transfer = true} : (tensor<2xf32>, !stablehlo.token) -> !stablehlo.token",
            "send",
        ),
        (
            '%r, %u = "stablehlo.recv"(%t) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 3>, '
            "is_host_transfer = true} : (!stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)",
            "recv",
        ),
        (
            "%r = stablehlo.custom_call @xla_ffi_python_cpu_callback(%x) : (tensor<2xf32>) -> tensor<2xf32>",
            r"a call of the host \(xla_ffi_python_cpu_callback\)",
        ),
    ],
)
@pytest.mark.parametrize("inner", [False, True])
def test_a_module_that_waits_for_the_host_is_refused_before_it_runs(
    tmp_path: Path, operation: str, kind: str, inner: bool
) -> None:
    body = f"%t = stablehlo.create_token : !stablehlo.token\n{operation}\n"
    function = "func.func {}(%x: tensor<2xf32>) -> tensor<2xf32> {{\n{}return %x : tensor<2xf32>\n}}\n"
    main = "%0 = func.call @inner(%x) : (tensor<2xf32>) -> tensor<2xf32>\n" if inner else body
    path = tmp_path / "m.mlir"
    path.write_text(function.format("public @main", main) + (function.format("private @inner", body) if inner else ""))
    with pytest.raises(SignatureError, match=rf"m\.mlir: has {kind}, which waits for a program on the host"):
        prepare(path)


# Finding and naming.


def test_files_that_stand_alone_are_found_and_others_are_not(tmp_path: Path) -> None:
    for name in ("a.onnx", "b.pt2", "c.jax", "d.mlir", "e.pt", "notes.txt", ".hidden.onnx", ".onnx"):
        (tmp_path / name).touch()
    assert [(path.name, model_name(path)) for path in find(tmp_path)] == [
        ("a.onnx", "a"), ("b.pt2", "b"), ("c.jax", "c"), ("d.mlir", "d"),
    ]  # fmt: skip


def test_a_file_without_a_signature_asks_for_a_contract(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as archive:
        archive.writestr("m/code/__torch__.py", "")
    with pytest.raises(BundleError, match=r"m\.pt does not say what it takes.*model_inference\.textproto"):
        prepare(tmp_path / "m.pt")


def test_no_two_kinds_share_a_name_or_an_ending() -> None:
    names = [kind.name for kind in FILE_KINDS]
    endings = [suffix for kind in FILE_KINDS for suffix in kind.suffixes]
    assert (len(set(names)), len(set(endings))) == (len(names), len(endings))


@needs_torch
@pytest.mark.parametrize(
    ("statement", "word"),
    [
        ("torch.save(x, '{}')", "save"),
        ("x = x + torch.from_file('{}', shared=True, size=4, dtype=torch.float32)", "from_file"),
    ],
)
def test_torchscript_that_reaches_files_does_not_run_before_somebody_allows_it(
    tmp_path: Path, statement: str, word: str
) -> None:
    import torch

    reached = tmp_path / "reached"
    module: Any = type(word, (torch.jit.ScriptModule,), {})()
    module.define(f"def forward(self, x):\n  {statement.format(reached)}\n  return x * 2\n")
    module.save(str(tmp_path / "m.pt"))
    folder = in_folder(tmp_path / "m.pt", "input_shape: [4]\noutput_shape: [4]\nmax_batch_size: 4\n")
    with pytest.raises(BundleError, match=rf"m\.pt: its code says '{word}', .*--allow-code .*allow_code: true"):
        prepare(folder)
    assert not reached.exists()
    prepare(folder, allow_code=True)
    assert reached.exists()
