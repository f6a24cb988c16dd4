"""A tritonserver of a few lines, started as a program: answers what the supervisor asks and misbehaves on request.

A model's name says how it behaves: ``hangs`` loads until its process is killed, ``stuck`` whatever is killed,
``broken`` fails with Triton's own words, ``clinging`` has a process that ends though its unload fails, ``dies`` takes
the server down. ``FAKE_TRITON`` in the environment:
``port-taken-once`` (then FAKE_TRITON_NOTE is a file that says it happened), ``refuses`` (exits with an error),
``ignores-sigterm``.
"""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread

import grpc
from tritonclient.grpc import service_pb2 as pb

STOP = Event()
STUBS: list[subprocess.Popen[bytes]] = []
options = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:] if "=" in argument)
mode = os.environ.get("FAKE_TRITON", "")


def log(level: str, text: str) -> None:
    print(f'{level}1130 07:02:03.123456 12 fake.cc:1] "{text}"', file=sys.stderr, flush=True)


def load(request: pb.RepositoryModelLoadRequest, context: grpc.ServicerContext) -> pb.RepositoryModelLoadResponse:
    protocols, _, key = options.get("grpc-restricted-protocol", "").partition("=")
    header = "triton-grpc-protocol-" + protocols.partition(":")[2]
    if key and dict(context.invocation_metadata()).get(header) != key:
        context.abort(grpc.StatusCode.UNAVAILABLE, f"This protocol is restricted, expecting header '{header}'")
    if request.model_name == "hangs":
        print("waiting for godot", flush=True)
        script = Path(options["model-repository"], "hangs", "1", "model.py")
        subprocess.run([sys.executable, "-c", "import time; time.sleep(3600)", script])
        reason = "load failed for model 'hangs': version 1 is at UNAVAILABLE state: Internal: Stub process 'hangs_0_0'"
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{reason} is not healthy.")
    if request.model_name == "clinging":
        script = Path(options["model-repository"], "clinging", "1", "model.py")
        STUBS.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", script]))
    if request.model_name == "stuck":
        time.sleep(3600)
    if request.model_name == "dies":
        log("E", "out of luck")
        os._exit(7)
    if request.model_name == "broken":
        context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            "load failed for model 'broken': version 1 is at UNAVAILABLE state: Internal: EngineMissing: jax is not"
            " installed\n\nAt:\n  /srv/models/broken/1/model.py(7): initialize\n;",
        )
    return pb.RepositoryModelLoadResponse()


def unload(request: pb.RepositoryModelUnloadRequest, context: grpc.ServicerContext) -> pb.RepositoryModelUnloadResponse:
    if request.model_name == "clinging":
        STUBS[0].kill()
        STUBS.pop(0).wait()
        context.abort(grpc.StatusCode.INTERNAL, "no such luck")
    return pb.RepositoryModelUnloadResponse()


def method(call: object, request: type, response: type) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(call, request.FromString, response.SerializeToString)


class Metrics(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"nv_inference_count 0\n")

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    if mode == "refuses":
        log("E", "failed to start: no such luck")
        sys.exit(1)
    if mode == "port-taken-once" and not Path(os.environ["FAKE_TRITON_NOTE"]).exists():
        Path(os.environ["FAKE_TRITON_NOTE"]).touch()
        log("E", f"failed to start GRPC service: Unavailable - Socket '{options['grpc-address']}' already in use")
        sys.exit(1)
    if mode == "ignores-sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: STOP.set())
    server = grpc.server(ThreadPoolExecutor(8))
    handlers = {
        "ServerLive": method(lambda _r, _c: pb.ServerLiveResponse(live=True),
                             pb.ServerLiveRequest, pb.ServerLiveResponse),
        "ServerReady": method(lambda _r, _c: pb.ServerReadyResponse(ready=True),
                              pb.ServerReadyRequest, pb.ServerReadyResponse),
        "RepositoryModelUnload": method(unload, pb.RepositoryModelUnloadRequest, pb.RepositoryModelUnloadResponse),
        "RepositoryModelLoad": method(load, pb.RepositoryModelLoadRequest, pb.RepositoryModelLoadResponse),
        "ModelInfer": method(lambda r, _c: pb.ModelInferResponse(model_name=r.model_name),
                             pb.ModelInferRequest, pb.ModelInferResponse),
    }  # fmt: skip
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),))
    server.add_insecure_port(f"{options['grpc-address']}:{options['grpc-port']}")
    metrics = HTTPServer((options["metrics-address"], int(options["metrics-port"])), Metrics)
    Thread(target=metrics.serve_forever, daemon=True).start()
    server.start()
    log("I", "started")
    while not STOP.wait(0.02):
        pass
    os._exit(0)


main()
