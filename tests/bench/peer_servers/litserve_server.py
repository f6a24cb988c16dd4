"""LitServe: raw bodies, a worker process per model, batches that wait half a millisecond.

usage: litserve_server.py PORT
"""

import sys
from typing import Annotated

import litserve
import numpy as np
import peer_models
from fastapi import Body, Response

RAW = "application/octet-stream"


class Model(litserve.LitAPI):
    def __init__(self, name):
        super().__init__(
            api_path=f"/{name}", max_batch_size=min(32, peer_models.LARGEST_BATCH[name]), batch_timeout=0.0005
        )
        self.name = name

    def setup(self, device):
        self.run = peer_models.load(self.name)

    def decode_request(self, request: Annotated[bytes, Body(media_type=RAW)]):
        return peer_models.rows(self.name, request)

    def batch(self, inputs):
        self.sizes = [len(x) for x in inputs]
        return inputs[0] if len(inputs) == 1 else np.concatenate(inputs)

    def predict(self, x):
        return self.run(x)

    def unbatch(self, y):
        return np.split(y, np.cumsum(self.sizes)[:-1])

    def encode_response(self, y):
        return Response(content=y.tobytes(), media_type=RAW)


if __name__ == "__main__":
    apis = [Model(name) for name in peer_models.WIDTHS]
    server = litserve.LitServer(
        apis, accelerator="cpu", workers_per_device=1, timeout=60, max_payload_size=64 * 1024 * 1024
    )
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="error", access_log=False)
