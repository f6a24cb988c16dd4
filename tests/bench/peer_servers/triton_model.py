"""What somebody would write by hand for Triton's python backend: gather, run, split; nothing is checked."""

import json
import sys

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        sys.path.insert(0, config["parameters"]["folder"]["string_value"])
        import peer_models

        self.run = peer_models.load(config["parameters"]["model"]["string_value"])

    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "input").as_numpy() for request in requests]
        y = self.run(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
        responses, start = [], 0
        for array in arrays:
            output = pb_utils.Tensor("output", y[start : start + len(array)])
            responses.append(pb_utils.InferenceResponse([output]))
            start += len(array)
        return responses
