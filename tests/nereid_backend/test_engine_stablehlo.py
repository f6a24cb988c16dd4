from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")

from converters import weights as weights_files
from nereid_backend import dtypes
from nereid_backend.engines import jax_programs
from nereid_backend.engines.stablehlo import Argument, StableHloEngine, read_module
from nereid_backend.errors import DeviceMissing, EngineError, SignatureError, WeightsError
from nereid_backend.program_cache import ProgramCache
from nereid_backend.spec import ModelSpec, Program, TensorSpec, Weights

W = np.arange(24, dtype=np.float32).reshape(4, 3, 2) / 8
B = np.arange(6, dtype=np.float32).reshape(3, 2)
FILE = "weights.safetensors"


def affine(x: Any, w: Any, b: Any) -> Any:
    import jax.numpy as jnp

    return jnp.einsum("nc,cdk->ndk", x, w) + b


def spec(inputs: Any, outputs: Any, sizes: Any = (None,), weights: Any = (), **options: Any) -> ModelSpec:
    programs = tuple(Program("model.mlir" if s is None else f"model.b{s}.mlir", s) for s in sizes)
    return ModelSpec(
        "m", "stablehlo", "p", inputs, outputs, programs, Weights(FILE, tuple(weights)) if weights else None, **options
    )


@pytest.fixture
def bundle(tmp_path: Path, export: Callable[..., bytes], rows: Any) -> tuple[ModelSpec, Path]:
    for size in (1, 4):
        data = export(affine, ((size, 4), np.float32), (W.shape, W.dtype), (B.shape, B.dtype))
        (tmp_path / f"model.b{size}.mlir").write_bytes(data)
    # the file's own order is another one than the argument order
    weights_files.write(tmp_path / FILE, {"b": B, "w": W}, {"argument_order": json.dumps(["w", "b"])})
    return spec((rows("x", "f32", 4),), (rows("y", "f32", 3, 2),), (1, 4), ("w", "b")), tmp_path


def test_every_compiled_size_gives_the_exact_numbers(bundle: tuple[ModelSpec, Path]) -> None:
    engine = StableHloEngine.load(*bundle)
    for size in (4, 1, 4):
        x = np.random.default_rng(size).integers(-4, 5, (size, 4)).astype(np.float32)
        (y,) = engine.run([x])
        assert (y.dtype, y.shape) == (np.float32, (size, 3, 2))
        assert y.tolist() == (np.einsum("nc,cdk->ndk", x, W) + B).tolist()
    engine.close()


def test_the_weights_are_the_ones_of_the_file_after_it_is_gone(bundle: tuple[ModelSpec, Path]) -> None:
    engine = StableHloEngine.load(*bundle)
    (bundle[1] / FILE).unlink()
    assert engine.run([np.zeros((1, 4), np.float32)])[0].tolist() == [B.tolist()]


def test_results_stay_the_same_when_the_input_is_overwritten(bundle: tuple[ModelSpec, Path]) -> None:
    engine = StableHloEngine.load(*bundle)
    x = np.ones((4, 4), np.float32)
    (first,) = engine.run([x])
    before = first.tolist()
    x[:] = 100
    engine.run([x])
    assert first.tolist() == before


@pytest.mark.parametrize("row", dtypes.TABLE, ids=lambda row: row.token)
def test_any_bits_of_every_dtype_pass_a_program_as_input_and_as_weight(
    tmp_path: Path, export: Callable[..., bytes], row: dtypes.DType
) -> None:
    (tmp_path / "model.mlir").write_bytes(export(lambda x, w: (x[::-1], w), *[((64,), row.numpy)] * 2))
    rng = np.random.default_rng(0)
    data = [
        bytes(b & 1 for b in rng.bytes(64)) if row.token == "bool" else rng.bytes(64 * row.size_bytes) for _ in "xw"
    ]
    x, w = (np.frombuffer(d, row.numpy) for d in data)
    weights_files.write(tmp_path / FILE, {"w": w}, {"argument_order": '["w"]'})
    tensor = TensorSpec("x", row.token, (64,))
    got = StableHloEngine.load(spec((tensor,), (tensor, tensor), weights=["w"]), tmp_path).run([x])
    assert [(o.dtype, o.tobytes()) for o in got] == [(row.numpy, x[::-1].tobytes()), (row.numpy, data[1])]


def test_every_variant_and_size_shares_one_set_of_weights(
    tmp_path: Path, export: Callable[..., bytes], rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jax

    sizes = [(1, 3), (2, 3), (1, 5)]
    for n, width in sizes:
        data = export(lambda x, w: x.sum(1) * w, ((n, width), np.float32), ((), np.float32))
        (tmp_path / f"{n}x{width}").write_bytes(data)
    weights_files.write(tmp_path / FILE, {"w": np.array(7, np.float32)}, {"argument_order": '["w"]'})
    placed: list[Any] = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda array, device: placed.append(array) or put(array, device))
    programs = tuple(Program(f"{n}x{width}", n, (width,)) for n, width in sizes)
    model = ModelSpec(
        "m", "stablehlo", "p", (rows("x", "f32", -1),), (rows("y", "f32"),), programs, Weights(FILE, ("w",))
    )
    engine = StableHloEngine.load(model, tmp_path)
    assert [engine.run([np.ones(size, np.float32)])[0].tolist() for size in sizes] == [[21], [21, 21], [35]]
    assert len(placed) == 1


def test_64_bit_integers_are_not_narrowed(tmp_path: Path, export: Callable[..., bytes]) -> None:
    (tmp_path / "model.mlir").write_bytes(export(lambda x, w: x + w, ((2,), np.int64), ((), np.int64)))
    weights_files.write(tmp_path / FILE, {"w": np.array(2**40)}, {"argument_order": '["w"]'})
    import jax

    jax.config.update("jax_enable_x64", False)  # as in a fresh process; the export switched it on
    tensor = TensorSpec("x", "i64", (2,))
    (got,) = StableHloEngine.load(spec((tensor,), (tensor,), weights=["w"]), tmp_path).run([np.array([1, -(2**50)])])
    assert got.tolist() == [2**40 + 1, 2**40 - 2**50]


def test_several_results_come_in_program_order(tmp_path: Path, export: Callable[..., bytes]) -> None:
    (tmp_path / "model.mlir").write_bytes(export(lambda a, b: (a - b, a * b), ((), np.float32), ((), np.float32)))
    scalar = TensorSpec("s", "f32", ())
    engine = StableHloEngine.load(spec((scalar, scalar), (scalar, scalar)), tmp_path)
    assert [r.tolist() for r in engine.run([np.array(5, np.float32), np.array(2, np.float32)])] == [3, 10]


def test_two_engines_with_the_same_entry_name_do_not_mix(tmp_path: Path, export: Callable[..., bytes]) -> None:
    tensor = TensorSpec("x", "f32", (2,))
    found = []
    for name, function in (("a", lambda x: x + 1), ("b", lambda x: x * 10)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.mlir").write_bytes(export(function, ((2,), np.float32)))
        found.append(StableHloEngine.load(spec((tensor,), (tensor,)), tmp_path / name))
    x = np.array([1, 2], np.float32)
    assert [engine.run([x])[0].tolist() for engine in found] == [[2, 3], [10, 20]]


def test_a_batch_axis_elsewhere_picks_the_program(tmp_path: Path, export: Callable[..., bytes]) -> None:
    for size in (1, 3):
        (tmp_path / f"model.b{size}.mlir").write_bytes(export(lambda x: x.sum(0), ((2, size), np.float32)))
    tensors = (TensorSpec("x", "f32", (2, -1), 1),), (TensorSpec("y", "f32", (-1,), 0),)
    engine = StableHloEngine.load(spec(*tensors, (1, 3)), tmp_path)
    assert [engine.run([np.ones((2, n), np.float32)])[0].tolist() for n in (1, 3)] == [[2], [2, 2, 2]]


def test_a_device_that_is_not_there_is_refused_with_how_many_there_are(bundle: tuple[ModelSpec, Path]) -> None:
    import jax

    if any(device.platform != "cpu" for device in jax.devices()):
        pytest.skip("this machine has an accelerator")
    with pytest.raises(DeviceMissing, match=r"device 'cuda:7' is not there: jax sees 0 cuda device\(s\)"):
        StableHloEngine.check_device("cuda:7")
    from dataclasses import replace

    with pytest.raises(DeviceMissing, match="device 'cuda' is not there"):
        StableHloEngine.load(replace(bundle[0], device="cuda"), bundle[1])
    StableHloEngine.check_device("cpu")  # and the CPU still works afterwards


def test_a_damaged_weights_file_is_refused_at_load(bundle: tuple[ModelSpec, Path]) -> None:
    path = bundle[1] / FILE
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(WeightsError, match="truncated"):
        StableHloEngine.load(*bundle)


def test_a_failing_program_is_an_engine_error_with_one_line(bundle: tuple[ModelSpec, Path]) -> None:
    engine = StableHloEngine.load(*bundle)
    engine._weights = [*engine._weights[:1], np.zeros((9, 9), np.float32)]
    with pytest.raises(EngineError, match="the StableHLO program failed") as caught:
        engine.run([np.zeros((1, 4), np.float32)])
    assert "\n" not in str(caught.value)


def test_a_module_tells_its_own_signature(tmp_path: Path, export: Callable[..., bytes]) -> None:
    data = export(lambda x, w: (x.astype("bfloat16"), w > 0), ((2, 3), np.float64), ((), np.uint8))
    path = tmp_path / "model.mlir"
    path.write_bytes(data)
    module = read_module(path)
    assert module.data == data
    assert module.arguments == (Argument("f64", (2, 3)), Argument("u8", ()))
    assert module.results == (Argument("bf16", (2, 3)), Argument("bool", ()))


TEXT = "func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {{ {body} return %a : tensor<2xf32> }}"


def test_text_and_bytecode_of_mlir_are_read_too(tmp_path: Path, export: Callable[..., bytes]) -> None:
    path = tmp_path / "model.mlir"
    path.write_text(TEXT.format(body=""))
    tensor = TensorSpec("x", "f32", (2,))
    assert read_module(path).arguments == (Argument("f32", (2,)),)
    (got,) = StableHloEngine.load(spec((tensor,), (tensor,)), tmp_path).run([np.array([1, 2], np.float32)])
    assert got.tolist() == [1, 2]
    from jax.extend.mlir import ir
    from jax.interpreters import mlir

    with mlir.make_ir_context() as context, path.open("wb") as file:
        ir.Module.parse(TEXT.format(body=""), context).operation.write_bytecode(file)
    assert read_module(path).arguments == (Argument("f32", (2,)),)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no function 'main'|is not a StableHLO module"),
        (b"garbage", "is not a StableHLO module"),
        (bytes(range(256)), "is not a StableHLO module"),
        (b"ML\xefR\x0dStableHLO_v1.0.0\x00garbage", "is not a StableHLO module"),
        (b"ML\xefRgarbage", "is not a StableHLO module"),
        (TEXT.format(body="").replace("main", "other").encode(), "has no function 'main'"),
        (
            b"func.func @main(%a: tensor<?xf32>) -> tensor<?xf32> { return %a : tensor<?xf32> }",
            r"argument 0 is tensor<\?xf32>; export one static program",
        ),
        (
            b"func.func @main(%a: tensor<2xf32>, %b: tensor<*xf32>) -> tensor<2xf32> { return %a : tensor<2xf32> }",
            "argument 1",
        ),
        (
            b"func.func @main(%a: tuple<tensor<2xf32>>) -> tuple<tensor<2xf32>> { return %a : tuple<tensor<2xf32>> }",
            "argument 0 is tuple<tensor<2xf32>>, only tensors are supported",
        ),
        (
            b"func.func @main(%a: tensor<2xcomplex<f32>>) -> tensor<2xcomplex<f32>> "
            b"{ return %a : tensor<2xcomplex<f32>> }",
            "complex<f32>",
        ),
        (
            b"module attributes {mhlo.num_partitions = 2 : i32} { " + TEXT.format(body="").encode() + b" }",
            r"is sharded \(mhlo\.num_partitions > 1\)",
        ),
        (
            b"module attributes {mhlo.num_replicas = 4 : i32} { " + TEXT.format(body="").encode() + b" }",
            r"is sharded \(mhlo\.num_replicas > 1\)",
        ),
    ],
)
def test_a_file_that_is_no_servable_program_is_refused_by_name(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.b1.mlir"
    path.write_bytes(content)
    with pytest.raises(SignatureError, match=words) as caught:
        read_module(path)
    assert str(caught.value).startswith("model.b1.mlir: ")
    assert str(tmp_path) not in str(caught.value)


def test_a_truncated_artifact_is_refused(tmp_path: Path, export: Callable[..., bytes]) -> None:
    data = export(lambda x: x + 1, ((2,), np.float32))
    path = tmp_path / "model.mlir"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(SignatureError, match="is not a StableHLO module that this jax can read"):
        read_module(path)


def test_a_missing_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SignatureError, match=r"model\.mlir: cannot be read \(No such file"):
        read_module(tmp_path / "model.mlir")


def test_an_export_for_several_platforms_is_refused(tmp_path: Path, export: Callable[..., bytes]) -> None:
    path = tmp_path / "model.mlir"
    path.write_bytes(export(lambda x: x + 1, ((2,), np.float32), platforms=["cpu", "cuda"]))
    with pytest.raises(SignatureError, match="was exported for several platforms"):
        read_module(path)


def test_an_export_with_symbolic_sizes_is_refused(tmp_path: Path) -> None:
    import jax
    import jax.export

    shape = jax.export.symbolic_shape("n, 4")
    exported = jax.export.export(jax.jit(lambda x: x + 1), platforms=["cpu"])(jax.ShapeDtypeStruct(shape, np.float32))
    path = tmp_path / "model.mlir"
    path.write_bytes(exported.mlir_module_serialized)
    with pytest.raises(SignatureError, match="export one static program per batch size"):
        read_module(path)


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A cache of this test's own, and one item for every compilation from now on, counted by JAX itself."""
    import jax.monitoring

    monkeypatch.setenv("NEREID_CACHE_DIR", str(tmp_path / "cache"))
    events: list[str] = []

    def count(event: str, _seconds: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    return events


def answer(spec: ModelSpec, folder: Path) -> Any:
    engine = StableHloEngine.load(spec, folder)
    try:
        return [engine.run([np.ones((size, 4), np.float32)])[0].tolist() for size in (1, 4)]
    finally:
        engine.close()


def test_a_second_start_compiles_nothing_also_under_another_name_and_in_another_place(
    bundle: tuple[ModelSpec, Path], tmp_path: Path, compiled: list[str]
) -> None:
    first = answer(*bundle)
    assert len(compiled) == 2  # one per size
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in [*tmp_path.glob("*.mlir"), tmp_path / FILE]:
        path.rename(moved / path.name)
    assert answer(replace(bundle[0], name="renamed"), moved) == first
    assert len(compiled) == 2


def test_other_weights_need_no_other_program(bundle: tuple[ModelSpec, Path], compiled: list[str]) -> None:
    answer(*bundle)
    weights_files.write(bundle[1] / FILE, {"b": B + 1, "w": W}, {})
    expected = [(np.einsum("nc,cdk->ndk", np.ones((n, 4), np.float32), W) + B + 1).tolist() for n in (1, 4)]
    assert (answer(*bundle), len(compiled)) == (expected, 2)


def test_another_artifact_under_the_same_name_is_compiled(
    bundle: tuple[ModelSpec, Path], export: Callable[..., bytes], compiled: list[str]
) -> None:
    answer(*bundle)
    data = export(lambda x, w, b: affine(x, w, b) * 2, ((4, 4), np.float32), (W.shape, W.dtype), (B.shape, B.dtype))
    (bundle[1] / "model.b4.mlir").write_bytes(data)
    assert answer(*bundle)[1] == ((np.einsum("nc,cdk->ndk", np.ones((4, 4), np.float32), W) + B) * 2).tolist()
    assert len(compiled) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
        lambda data: bytes(len(data)),
    ],
    ids=["empty", "truncated", "one bit", "zeros"],
)
def test_a_damaged_entry_is_compiled_again_and_told(
    bundle: tuple[ModelSpec, Path],
    tmp_path: Path,
    compiled: list[str],
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[bytes], bytes],
) -> None:
    first = answer(*bundle)
    for entry in (tmp_path / "cache" / "programs").iterdir():
        entry.write_bytes(damage(entry.read_bytes()))
    assert (answer(*bundle), len(compiled)) == (first, 4)
    assert [record.message.endswith("is damaged; compiling it again") for record in caplog.records] == [True, True]
    assert (answer(*bundle), len(compiled)) == (first, 4)


def test_an_entry_that_is_whole_but_no_program_is_compiled_again(
    bundle: tuple[ModelSpec, Path], tmp_path: Path, compiled: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    first = answer(*bundle)
    folder = tmp_path / "cache" / "programs"
    for entry, content in zip(folder.iterdir(), (b"no pickle", pickle.dumps((b"no program", 1, 2))), strict=True):
        ProgramCache(folder).write(entry.name, content)
    assert (answer(*bundle), len(compiled)) == (first, 4)
    assert ["cannot be loaded" in record.message for record in caplog.records] == [True, True]
    assert (answer(*bundle), len(compiled)) == (first, 4)


@pytest.mark.parametrize("fact", ["XLA_FLAGS", "NPROC", "jax", "numpy", "processor", "recipe"])
def test_a_program_made_for_something_else_is_not_taken(
    bundle: tuple[ModelSpec, Path], compiled: list[str], monkeypatch: pytest.MonkeyPatch, fact: str
) -> None:
    import jax

    answer(*bundle)
    if fact in ("XLA_FLAGS", "NPROC"):
        monkeypatch.setenv(fact, "")
    elif fact == "processor":
        monkeypatch.setattr(jax_programs, "processor_features", lambda: ["flags: none"])
    elif fact == "recipe":
        monkeypatch.setattr(jax_programs, "COMPILATION", 0)
    else:
        monkeypatch.setattr({"jax": jax, "numpy": np}[fact], "__version__", "0")
    answer(*bundle)
    assert len(compiled) == 4


def test_a_deleted_cache_costs_only_the_time_to_compile(
    bundle: tuple[ModelSpec, Path], tmp_path: Path, compiled: list[str]
) -> None:
    first = answer(*bundle)
    shutil.rmtree(tmp_path / "cache")
    assert (answer(*bundle), len(compiled)) == (first, 4)


def test_without_a_cache_everything_is_compiled(
    bundle: tuple[ModelSpec, Path], tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEREID_PROGRAM_CACHE", "off")
    answer(*bundle)
    answer(*bundle)
    assert (len(compiled), (tmp_path / "cache").exists()) == (4, False)
