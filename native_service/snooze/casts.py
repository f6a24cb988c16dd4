"""Values between FP32, which SnoozeML's clients send and read, and the types of a model.

Into a model nothing is lost silently: an integer type takes whole numbers in its range, a float type what it can hold
but for rounding, BOOL takes 0 and 1. On the way out values are rounded to FP32, whatever their size: its clients read
all bytes as FP32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nereid_backend import dtypes
from nereid_backend.dtypes import DType
from nereid_backend.errors import InvalidArgument

Array = np.ndarray[Any, Any]

FP32 = dtypes.by_token("f32")
DATA_TYPES = {
    1: FP32,
    **{number: dtypes.by_token(token) for number, token in enumerate(("f16", "bf16", "i32", "i64", "u8", "bool"), 2)},
}
"""``snoozeml.v1.DataType`` by number; 0, unspecified, is FP32."""
NUMBERS = {element: number for number, element in DATA_TYPES.items()}


def from_fp32(array: Array, element: DType, where: str) -> Array:
    """FP32 ``array`` as ``element``; ``where`` names the tensor. Raises InvalidArgument."""
    if element is FP32:
        return array
    target = element.numpy
    if element.token == "bool":  # noqa: S105 - a dtype's name
        if not ((array == 0) | (array == 1)).all():
            raise InvalidArgument(f"{where} takes BOOL: send 0 and 1 only")
        return array.astype(target)
    if target.kind in "iu":
        # Powers of two, so FP32 has them exactly; the largest integers themselves it may not have.
        bits = 8 * element.size_bytes - (target.kind == "i")
        least = -(2.0**bits) if target.kind == "i" else 0.0
        if not ((array >= least) & (array < 2.0**bits) & (array == np.trunc(array))).all():
            raise InvalidArgument(f"{where} takes {element.kserve}: send whole numbers in its range only")
        return array.astype(target)
    with np.errstate(over="ignore"):
        cast = array.astype(target)
    if element.size_bytes < FP32.size_bytes and (np.isinf(cast) & np.isfinite(array)).any():
        raise InvalidArgument(f"{where} takes {element.kserve}: a value is too large for it")
    return cast


def to_fp32(array: Array) -> Array:
    """``array`` rounded to FP32; what is too large becomes infinite."""
    if array.dtype == FP32.numpy:
        return array
    with np.errstate(over="ignore"):
        return array.astype(FP32.numpy)
