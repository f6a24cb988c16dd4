from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from nereid_backend import dtypes
from nereid_backend.errors import BundleError

ROWS = pytest.mark.parametrize("row", dtypes.TABLE, ids=lambda row: row.token)
WIRE = pytest.mark.parametrize("row", [r for r in dtypes.TABLE if r.kserve], ids=lambda row: row.token)


def test_the_table_has_one_row_for_each_token_of_the_bundle_format() -> None:
    tokens = [
        "bool",
        "u8",
        "u16",
        "u32",
        "u64",
        "i8",
        "i16",
        "i32",
        "i64",
        "f16",
        "f32",
        "f64",
        "bf16",
        "f8_e5m2",
        "f8_e4m3",
    ]
    assert [row.token for row in dtypes.TABLE] == tokens


@pytest.mark.parametrize("column", ["token", "kserve", "triton", "numpy_name", "safetensors", "stablehlo", "onnx"])
def test_no_name_stands_for_two_types(column: str) -> None:
    names = [getattr(row, column) for row in dtypes.TABLE if getattr(row, column) is not None]
    assert sorted(set(names)) == sorted(names)


@ROWS
def test_a_row_is_found_by_each_of_its_names(row: dtypes.DType) -> None:
    found = [
        dtypes.by_token(row.token), dtypes.by_safetensors(row.safetensors), dtypes.by_stablehlo(row.stablehlo),
        dtypes.by_onnx(row.onnx), dtypes.by_numpy(row.numpy),
    ]  # fmt: skip
    assert found == [row] * 5
    assert row.kserve is None or dtypes.by_kserve(row.kserve) is row


@ROWS
def test_the_size_in_the_table_is_the_size_in_memory(row: dtypes.DType) -> None:
    assert (row.numpy.itemsize, row.numpy.name) == (row.size_bytes, row.numpy_name)


@ROWS
def test_a_type_has_a_kserve_name_exactly_when_it_has_a_triton_name(row: dtypes.DType) -> None:
    assert (row.kserve is None) == (row.triton is None) == row.token.startswith("f8_")


@WIRE
def test_kserve_names_mean_the_same_to_tritonclient(row: dtypes.DType) -> None:
    utils = pytest.importorskip("tritonclient.utils")
    # Older clients know BF16 as FP32 only.
    if row.token != "bf16" or np.dtype(utils.triton_to_np_dtype("BF16")) != np.float32:
        assert utils.np_to_triton_dtype(row.numpy) == row.kserve
        assert np.dtype(utils.triton_to_np_dtype(row.kserve)) == row.numpy


@WIRE
def test_triton_names_are_values_of_its_own_enum(row: dtypes.DType) -> None:
    model_config = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    assert row.triton == f"TYPE_{row.kserve}"
    assert row.triton in model_config.DataType.keys()  # noqa: SIM118 - an enum wrapper is no mapping


@ROWS
def test_onnx_names_are_the_ones_of_the_runtime(row: dtypes.DType) -> None:
    onnx = pytest.importorskip("onnx")
    enum = {"float": "FLOAT", "double": "DOUBLE"}.get(row.onnx, row.onnx.upper())
    tensor_type = onnx.TensorProto.DataType.Value(enum)
    assert np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor_type)).itemsize == row.size_bytes


@ROWS
def test_stablehlo_names_are_the_ones_jax_prints(row: dtypes.DType, export: Callable[..., bytes]) -> None:
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    text = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((3,), row.numpy)).as_text()
    assert f"tensor<3x{row.stablehlo}>" in text


@pytest.mark.parametrize(
    ("look_up", "what"),
    [
        (dtypes.by_token, "dtype"),
        (dtypes.by_kserve, "KServe datatype"),
        (dtypes.by_safetensors, "safetensors dtype"),
        (dtypes.by_stablehlo, "StableHLO element type"),
        (dtypes.by_onnx, "ONNX element type"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(look_up: Callable[[str], dtypes.DType], what: str) -> None:
    with pytest.raises(BundleError, match=rf"unknown {what} 'complex64'; known: \w+, \w+"):
        look_up("complex64")


def test_an_unknown_numpy_dtype_is_refused() -> None:
    with pytest.raises(BundleError, match="unknown numpy dtype 'complex64'"):
        dtypes.by_numpy(np.dtype(np.complex64))
