"""KServe's Python server: KServe v2 over gRPC, one worker, no batching. usage: kserve_server.py PORT"""

import sys

import grpc.aio
import kserve
import peer_models
import uvicorn

PORT = int(sys.argv[1])
LIMIT = str(64 * 1024 * 1024)
sys.argv = [sys.argv[0], "--grpc_max_receive_message_length", LIMIT, "--grpc_max_send_message_length", LIMIT]

# It listens on every interface and has no option for that; a benchmark stays on loopback.
_add_port, _configure = grpc.aio.Server.add_insecure_port, uvicorn.Config.__init__
grpc.aio.Server.add_insecure_port = lambda server, address: _add_port(server, address.replace("[::]", "127.0.0.1"))
uvicorn.Config.__init__ = lambda config, *given, **named: _configure(config, *given, **{**named, "host": "127.0.0.1"})


class Model(kserve.Model):
    def __init__(self, name):
        super().__init__(name)
        self.run = peer_models.load(name)
        self.ready = True

    def predict(self, payload, headers=None, response_headers=None):
        y = self.run(payload.inputs[0].as_numpy())
        output = kserve.InferOutput(name="output", shape=list(y.shape), datatype="FP32")
        output.set_data_from_numpy(y, binary_data=True)
        return kserve.InferResponse(response_id=payload.id or "", model_name=self.name, infer_outputs=[output])


models = [Model(name) for name in peer_models.WIDTHS]
quiet = {"enable_docs_url": False, "enable_latency_logging": False, "access_log_format": ""}
kserve.ModelServer(http_port=PORT + 1, grpc_port=PORT, workers=1, **quiet).start(models)
