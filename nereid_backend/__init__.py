"""The runtime inside Triton's stub process: spec, dtypes, batching, weights, engines, model.

Importing this package loads the standard library and numpy only.
"""

from nereid_backend.errors import NereidError
from nereid_backend.spec import ModelSpec, Program, TensorSpec, Weights

__all__ = ["ModelSpec", "NereidError", "Program", "TensorSpec", "Weights"]
__version__ = "0.1.0"
