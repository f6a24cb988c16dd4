"""The one dtype table.

A row joins the names one element type has in each format the project touches. Sources: the bundle
format's manifest tokens, KServe v2 ("Tensor Data Types"), Triton's ``model_config.proto``, the
safetensors header, StableHLO's printed types, ONNX Runtime's type strings, numpy with ml_dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nereid_backend.errors import BundleError


@dataclass(frozen=True, slots=True)
class DType:
    """One element type. ``kserve`` and ``triton`` are None when no wire type exists (FP8)."""

    token: str
    """Name in a manifest and in nereid.json."""
    kserve: str | None
    triton: str | None
    numpy_name: str
    """Name in numpy, or in ml_dtypes when numpy has no such type."""
    safetensors: str
    stablehlo: str
    onnx: str
    """Element type as ONNX Runtime prints it in ``tensor(...)``."""
    size_bytes: int
    in_numpy: bool = True

    def zeros(self, shape: Sequence[int]) -> np.ndarray[Any, Any]:
        """A new array of what rows are padded with: zeros, or empty texts."""
        return np.full(shape, b"", object) if self is BYTES else np.zeros(shape, self.numpy)

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype; ml_dtypes is imported only for the types numpy lacks."""
        if self.in_numpy:
            return np.dtype(self.numpy_name)
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, self.numpy_name))


TABLE: tuple[DType, ...] = (
    DType("bool", "BOOL", "TYPE_BOOL", "bool", "BOOL", "i1", "bool", 1),
    DType("u8", "UINT8", "TYPE_UINT8", "uint8", "U8", "ui8", "uint8", 1),
    DType("u16", "UINT16", "TYPE_UINT16", "uint16", "U16", "ui16", "uint16", 2),
    DType("u32", "UINT32", "TYPE_UINT32", "uint32", "U32", "ui32", "uint32", 4),
    DType("u64", "UINT64", "TYPE_UINT64", "uint64", "U64", "ui64", "uint64", 8),
    DType("i8", "INT8", "TYPE_INT8", "int8", "I8", "i8", "int8", 1),
    DType("i16", "INT16", "TYPE_INT16", "int16", "I16", "i16", "int16", 2),
    DType("i32", "INT32", "TYPE_INT32", "int32", "I32", "i32", "int32", 4),
    DType("i64", "INT64", "TYPE_INT64", "int64", "I64", "i64", "int64", 8),
    DType("f16", "FP16", "TYPE_FP16", "float16", "F16", "f16", "float16", 2),
    DType("f32", "FP32", "TYPE_FP32", "float32", "F32", "f32", "float", 4),
    DType("f64", "FP64", "TYPE_FP64", "float64", "F64", "f64", "double", 8),
    DType("bf16", "BF16", "TYPE_BF16", "bfloat16", "BF16", "bf16", "bfloat16", 2, in_numpy=False),
    DType("f8_e5m2", None, None, "float8_e5m2", "F8_E5M2", "f8E5M2", "float8e5m2", 1, in_numpy=False),
    DType("f8_e4m3", None, None, "float8_e4m3fn", "F8_E4M3", "f8E4M3FN", "float8e4m3fn", 1, in_numpy=False),
)

BYTES = DType("bytes", "BYTES", "TYPE_STRING", "object", "", "", "string", 0)
"""Texts of any length: an array of bytes objects. Beside the table, because no program but an ONNX graph takes them and
their size is in no shape; :func:`element`, :func:`by_onnx` and :func:`by_numpy` know it."""

_COLUMNS = ("token", "kserve", "triton", "numpy_name", "safetensors", "stablehlo", "onnx")
_BY: dict[str, dict[str, DType]] = {
    column: {getattr(row, column): row for row in TABLE if getattr(row, column) is not None} for column in _COLUMNS
}


def _lookup(column: str, kind: str, name: str) -> DType:
    try:
        return _BY[column][name]
    except KeyError:
        known = ", ".join(_BY[column])
        raise BundleError(f"unknown {kind} {name!r}; known: {known}") from None


def by_token(token: str) -> DType:
    """The row of a manifest token such as ``f32``. Raises BundleError."""
    return _lookup("token", "dtype", token)


def element(token: str) -> DType:
    """The row of a token in nereid.json: a manifest's, or that of BYTES. Raises BundleError."""
    return BYTES if token == BYTES.token else by_token(token)


def by_kserve(name: str) -> DType:
    """The row of a KServe datatype such as ``FP32``. Raises BundleError."""
    return _lookup("kserve", "KServe datatype", name)


def by_triton(name: str) -> DType:
    """The row of a ``data_type`` in config.pbtxt such as ``TYPE_FP32``. Raises BundleError."""
    if name == BYTES.triton:
        return BYTES
    return _lookup("triton", "Triton data_type", name)


def by_safetensors(name: str) -> DType:
    """The row of a safetensors header dtype such as ``F32``. Raises BundleError."""
    return _lookup("safetensors", "safetensors dtype", name)


def by_stablehlo(name: str) -> DType:
    """The row of a printed StableHLO element type such as ``f32``. Raises BundleError."""
    return _lookup("stablehlo", "StableHLO element type", name)


def by_onnx(name: str) -> DType:
    """The row of an ONNX element type such as ``float``. Raises BundleError."""
    if name == BYTES.onnx:
        return BYTES
    return _lookup("onnx", "ONNX element type", name)


def by_numpy_name(name: str) -> DType:
    """The row of a numpy or ml_dtypes name such as ``float32``. Raises BundleError."""
    return _lookup("numpy_name", "dtype", name)


def by_numpy(dtype: np.dtype[Any]) -> DType:
    """The row of a numpy or ml_dtypes dtype. Raises BundleError."""
    if dtype.kind == "O":
        return BYTES
    return _lookup("numpy_name", "numpy dtype", dtype.name)


def by_torch(name: str) -> DType:
    """The row of a torch dtype such as ``float32``; torch and ml_dtypes agree on names. Raises BundleError."""
    return _lookup("numpy_name", "torch dtype", name)
