"""torch's linear layers: products with weights [out, in], as torch keeps them, in the form that XLA runs fastest.

XLA folds the transposition of the weights into the product, which then takes two to four times as long for a few rows.
Turned around, the product of the weights and the transposed rows, it takes no longer than with weights [in, out]; the
barriers keep XLA from turning it back. From some hundred rows on both are the same (tests/bench/linear.py measures).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

FEW_ROWS = 128


def lowerings(torch: Any) -> dict[Any, Callable[..., Any]]:
    """By an operator of torch, its form in JAX; the operators are to be kept by ``run_decompositions``."""
    return {torch.ops.aten.linear.default: linear}


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """[..., out] of ``x`` [..., in], ``weight`` [out, in] and ``bias`` [out]."""
    result = product(x, weight)
    return result if bias is None else result + bias


def product(x: Any, weight: Any) -> Any:
    """``x`` [..., in] times the transposed ``weight`` [out, in]."""
    rows = math.prod(x.shape[:-1])
    if rows > FEW_ROWS:
        return x @ weight.T
    keep = importlib.import_module("jax.lax").optimization_barrier
    turned = keep(weight @ keep(x.reshape(rows, x.shape[-1]).T))
    return turned.T.reshape(*x.shape[:-1], weight.shape[0])
