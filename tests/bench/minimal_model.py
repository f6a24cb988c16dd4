"""The yardstick of overhead.py: the least model.py somebody would write by hand around the same engine.

It trusts everything: no output checks, no error per request, no cancellation, no reused buffer.
"""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from nereid_backend.engines.stablehlo import StableHloEngine
from nereid_backend.spec import ModelSpec

SIZES = (1, 8, 32)


class TritonPythonModel:
    def initialize(self, args):
        directory = Path(args["model_repository"]) / args["model_version"]
        spec = ModelSpec.from_json((directory / "nereid.json").read_text())
        self.engine = StableHloEngine.load(spec, directory)
        for size in SIZES:
            self.engine.run([np.zeros((size, 64), np.float32)])
        json.loads(args["model_config"])

    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(r, "pixels").as_numpy() for r in requests]
        batch = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        rows = len(batch)
        size = next(s for s in SIZES if s >= rows)
        if size > rows:
            batch = np.concatenate([batch, np.zeros((size - rows, 64), np.float32)])
        (result,) = self.engine.run([batch])
        responses, start = [], 0
        for array in arrays:
            output = pb_utils.Tensor("probabilities", result[start : start + len(array)])
            responses.append(pb_utils.InferenceResponse([output]))
            start += len(array)
        return responses
