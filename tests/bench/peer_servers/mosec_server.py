"""mosec: raw bodies, a worker process per model, batches of 32 that wait a millisecond (PEER_BATCH=1), or none.

usage: mosec_server.py --address 127.0.0.1 --port PORT ...
"""

import os

import numpy as np
import peer_models
from mosec import Runtime, Server, Worker

BATCHES = os.environ["PEER_BATCH"] == "1"


def worker(name):
    batches = BATCHES and name != "mib4"

    class Model(Worker):
        resp_mime_type = "application/octet-stream"

        def __init__(self):
            self.run = peer_models.load(name)

        def deserialize(self, data):
            return peer_models.rows(name, data)

        def serialize(self, data):
            return data.tobytes()

        def forward(self, data):
            if not batches:
                return self.run(data)
            y = self.run(data[0] if len(data) == 1 else np.concatenate(data))
            return np.split(y, np.cumsum([len(x) for x in data])[:-1])

    # It starts its workers by their names.
    Model.__name__ = Model.__qualname__ = f"model_{name}"
    return Model, (1, 32, 1) if batches else (1,)


found = {name: worker(name) for name in peer_models.WIDTHS}
globals().update({model.__name__: model for model, _ in found.values()})

if __name__ == "__main__":
    server = Server()
    server.register_runtime({f"/{name}": [Runtime(model, *options)] for name, (model, options) in found.items()})
    server.run()
