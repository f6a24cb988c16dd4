"""The demo: make models, convert them, serve them, and drive them with stock clients.

usage: python run.py [--serve]     (--serve: leave the server up until Ctrl-C)
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton
from make_models import MAGIKA

from native_service.proto import inference_pb2 as nereid

ROOT = Path(__file__).resolve().parents[2]
BUNDLES, REPOSITORY = ROOT / "bundles", ROOT / "triton_models"
COMMANDS = Path(sys.executable).parent
START_TIMEOUT_S = 120
CHUNK_BYTES = 65_536


def main() -> int:
    run(sys.executable, str(Path(__file__).with_name("make_models.py")), str(BUNDLES))
    run(str(COMMANDS / "nereid-convert"), str(BUNDLES), "-o", str(REPOSITORY), "--force")
    if "--serve" in sys.argv[1:]:
        return subprocess.call([str(COMMANDS / "nereid"), "serve", str(BUNDLES), "--http", "127.0.0.1:8080"])
    with tempfile.TemporaryDirectory() as scratch:
        state_file = Path(scratch) / "state.json"
        command = [str(COMMANDS / "nereid"), "serve", str(BUNDLES), "--bind", "127.0.0.1:0", "--state", str(state_file)]
        print("$", " ".join(["nereid", *command[1:]]), flush=True)
        server = subprocess.Popen(command)
        try:
            rows = drive(wait_until_ready(server, state_file))
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(60)
    print(f"\n{'model':<12}{'engine':<22}{'requests':>9}{'p50 ms':>9}{'p99 ms':>9}  result")
    for row in rows:
        print("{:<12}{:<22}{:>9}{:>9.2f}{:>9.2f}  {}".format(*row))
    print(f"nereid serve exited with {code}")
    return code


def run(*command: str) -> None:
    print("$", " ".join([Path(command[0]).name, *command[1:]]), flush=True)
    subprocess.run(command, check=True)


def wait_until_ready(server: subprocess.Popen[bytes], state_file: Path) -> dict[str, Any]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not state_file.exists():
        if server.poll() is not None:
            raise SystemExit(f"nereid serve ended with {server.returncode} before it was ready")
        if time.monotonic() > deadline:
            raise SystemExit(f"nereid serve was not ready within {START_TIMEOUT_S} s")
        time.sleep(0.1)
    state: dict[str, Any] = json.loads(state_file.read_text())
    return state


def drive(state: dict[str, Any]) -> list[tuple[Any, ...]]:
    held_out = np.load(BUNDLES / "held_out.npz")
    client = triton.InferenceServerClient(state["address"])
    return [
        digits(client, held_out["images"], held_out["labels"]),
        magika(client),
        projection(state["address"], held_out["images"]),
        reader(client),
    ]


def infer(client: Any, model: str, name: str, array: np.ndarray, output: str) -> np.ndarray:
    tensor = triton.InferInput(name, list(array.shape), triton_datatype(array))
    tensor.set_data_from_numpy(array)
    return client.infer(model, [tensor]).as_numpy(output)


def triton_datatype(array: np.ndarray) -> str:
    return {"float32": "FP32", "int32": "INT32"}[array.dtype.name]


def digits(client: Any, images: np.ndarray, labels: np.ndarray) -> tuple[Any, ...]:
    answers, times = timed(lambda image: infer(client, "digits", "pixels", image[None], "probabilities"), images)
    got = np.concatenate(answers)
    accuracy = np.mean(got.argmax(1) == labels)
    difference = np.abs(got - np.load(BUNDLES / "digits" / "local_jax.npy")).max()
    if accuracy < 0.9 or difference > 1e-5:
        raise SystemExit(f"digits: accuracy {accuracy:.3f}, largest difference from local JAX {difference:.1e}")
    result = f"accuracy {accuracy:.3f} on held-out digits, largest difference from local JAX {difference:.1e}"
    return "digits", "stablehlo (jax)", len(times), *percentiles(times), result


def magika(client: Any) -> tuple[Any, ...]:
    """Classify this repository's own files by content, as the magika package prepares them."""
    config = json.loads((files("magika") / MAGIKA / "config.min.json").read_text())
    paths = sorted(p for p in [*ROOT.iterdir(), *(ROOT / "converters").iterdir(), *BUNDLES.glob("*/*")] if p.is_file())
    paths = [p for p in paths if p.stat().st_size >= 8]
    rows = [magika_features(path.read_bytes(), config) for path in paths]
    answers, times = timed(lambda row: infer(client, "magika", "bytes", row[None], "target_label"), rows)
    names = []
    for path, answer in zip(paths, answers, strict=True):
        label = config["target_labels_space"][int(answer[0].argmax())]
        names.append(label)
        print(f"  {path.relative_to(ROOT)!s:<40} {label:<14} {answer[0].max():.3f}")
    python = [name for path, name in zip(paths, names, strict=True) if path.suffix == ".py"]
    if not python or set(python) != {"python"}:
        raise SystemExit(f"magika: python sources were classified as {sorted(set(python))}")
    result = f"{len(paths)} files, {len(python)} of {len(python)} python sources recognised"
    return "magika", "onnx (onnxruntime)", len(times), *percentiles(times), result


def magika_features(content: bytes, config: dict[str, Any]) -> np.ndarray:
    begin, end, block = config["beg_size"], config["end_size"], config["block_size"]
    head, tail = content[:block].lstrip()[:begin], content[-block:].rstrip()[-end:]
    features = np.full(begin + end, config["padding_token"], np.int32)
    features[: len(head)] = np.frombuffer(head, np.uint8)
    if tail:
        features[-len(tail) :] = np.frombuffer(tail, np.uint8)
    return features


def projection(address: str, images: np.ndarray) -> tuple[Any, ...]:
    with grpc.insecure_channel(address) as channel:
        checkpoint = channel.stream_stream(
            "/inference.Nereid/Checkpoint",
            request_serializer=nereid.CheckpointRequest.SerializeToString,
            response_deserializer=nereid.CheckpointResponse.FromString,
        )
        answers, times = timed(lambda image: read_tensor(checkpoint(stream("projection", image[None]))), images)
    difference = np.abs(np.concatenate(answers) - np.load(BUNDLES / "projection" / "local_sklearn.npy")).max()
    if difference > 1e-3:
        raise SystemExit(f"projection: largest difference from scikit-learn {difference:.1e}")
    result = f"Checkpoint stream, largest difference from scikit-learn {difference:.1e}"
    return "projection", "onnx (nereid folder)", len(times), *percentiles(times), result


def reader(client: Any) -> tuple[Any, ...]:
    """Read strips of digits with the two-stage pipeline."""
    held_out = json.loads((BUNDLES / "strips.json").read_text())
    strips = np.asarray(held_out["strips"], np.float32)
    answers, times = timed(lambda strip: infer(client, "reader", "strip", strip, "digits"), strips)
    right = sum(answer.tolist() == text for answer, text in zip(answers, held_out["texts"], strict=True))
    if right < 0.6 * len(strips):
        raise SystemExit(f"reader: only {right} of {len(strips)} strips were read without a mistake")
    result = f"{right} of {len(strips)} strips of digits read without a mistake"
    return "reader", "meta (two bundles)", len(times), *percentiles(times), result


def stream(model: str, array: np.ndarray) -> Iterator[Any]:
    yield nereid.CheckpointRequest(meta=nereid.CheckpointMeta(model_name=model))
    data = array.tobytes()
    for index, start in enumerate(range(0, len(data), CHUNK_BYTES)):
        chunk = nereid.TensorChunk(
            tensor_name="input",
            shape=array.shape,
            data=data[start : start + CHUNK_BYTES],
            chunk_index=index,
            end_of_tensor=start + CHUNK_BYTES >= len(data),
        )
        yield nereid.CheckpointRequest(chunk=chunk)


def read_tensor(responses: Any) -> np.ndarray:
    data, shape, exit_code = b"", None, None
    for response in responses:
        if response.HasField("output_chunk"):
            data += response.output_chunk.data
            shape = list(response.output_chunk.shape)
        if response.done:
            exit_code = response.exit_code
    if exit_code != 0:
        raise SystemExit(f"Checkpoint ended with exit code {exit_code}")
    return np.frombuffer(data, np.float32).reshape(shape)


def timed(call: Callable[[Any], np.ndarray], items: Any) -> tuple[list[np.ndarray], list[float]]:
    answers, times = [], []
    for item in items:
        start = time.perf_counter()
        answers.append(call(item))
        times.append((time.perf_counter() - start) * 1e3)
    return answers, times


def percentiles(times_ms: list[float]) -> tuple[float, float]:
    return float(np.percentile(times_ms, 50)), float(np.percentile(times_ms, 99))


if __name__ == "__main__":
    sys.exit(main())
