"""Warm calls of one row of 16 floats by SnoozeML's Infer and by KServe's ModelInfer at the same address.

The same bare .onnx, the same channel, messages made once, one client at a time. The ways take turns, call by call, so
that a drift of the machine falls on both. ``Infer with a hint`` goes through our service, as what Envoy does not turn.

usage: python snooze.py [--calls 1000]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from kserve_ways import medians_ms
from tritonclient.grpc import service_pb2

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from serving import Served, write_adder

from native_service.proto import snoozeml_pb2

ROW = np.zeros((1, 16), np.float32)
KSERVE, INFER, HINTED = "KServe ModelInfer", "Infer", "Infer with a hint"
# Of ModelInfer's median.
AT_MOST = 1.5


def ways(channel: Any) -> dict[str, Callable[[], Any]]:
    """By name, one call each way; all of them parse the answer."""
    theirs = service_pb2.ModelInferRequest(model_name="adder")
    theirs.inputs.add(name="input", datatype="FP32", shape=ROW.shape)
    theirs.raw_input_contents.append(ROW.tobytes())
    ours = snoozeml_pb2.ModelInferRequest(model_id="adder")
    ours.inputs.add(name="input", data_type=snoozeml_pb2.DATA_TYPE_FP32, shape=ROW.shape, raw_data=ROW.tobytes())
    hinted = snoozeml_pb2.ModelInferRequest(model_id="adder", inputs=ours.inputs, parameters={"hint": "any"})
    paths = {
        KSERVE: ("/inference.GRPCInferenceService/ModelInfer", theirs, service_pb2.ModelInferResponse),
        INFER: ("/snoozeml.v1.InferenceService/Infer", ours, snoozeml_pb2.ModelInferResponse),
        HINTED: ("/snoozeml.v1.InferenceService/Infer", hinted, snoozeml_pb2.ModelInferResponse),
    }
    found: dict[str, Callable[[], Any]] = {}
    for name, (path, request, response) in paths.items():
        call = channel.unary_unary(path, type(request).SerializeToString, response.FromString)
        found[name] = lambda call=call, request=request: call(request, timeout=30)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models").mkdir()
        write_adder(folder / "models" / "adder.onnx", width=16)
        served = Served(folder, str(folder / "models"), "--bind", "127.0.0.1:0")
        try:
            with grpc.insecure_channel(served.state["address"]) as channel:
                medians_ms(ways(channel), arguments.calls // 10)
                took = medians_ms(ways(channel), arguments.calls)
        finally:
            served.end()
    print(", ".join(f"{name} {ms:.2f} ms ({ms / took[KSERVE]:.2f}x)" for name, ms in took.items()))
    ratio = took[INFER] / took[KSERVE]
    print(f"Infer {ratio:.2f} of ModelInfer at the median, bar {AT_MOST}: {'met' if ratio <= AT_MOST else 'MISSED'}")
    return 0 if ratio <= AT_MOST else 1


if __name__ == "__main__":
    sys.exit(main())
