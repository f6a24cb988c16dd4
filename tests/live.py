"""A running ``nereid serve`` whose models come and go, and clients that load it meanwhile."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as tritonclient
from serving import Served, alive, input_tensor, write_adder
from tritonclient.utils import InferenceServerException

ROW = np.arange(4, dtype=np.float32)[None]
WAIT_S = 60
_PAUSE_S = 0.005


class Live:
    """A served folder that changes, and a client of it."""

    def __init__(self, served: Served, models: Path) -> None:
        self.served, self.models = served, models
        self.client = tritonclient.InferenceServerClient(served.state["address"])

    def amount(self, name: str = "adder") -> float:
        """What the model adds."""
        answer = self.client.infer(name, [input_tensor("input", ROW)]).as_numpy("output")
        return float((answer - ROW)[0, 0])

    def names(self) -> list[str]:
        return [model.name for model in self.client.get_model_repository_index().models]

    def http_says(self, name: str) -> int:
        """The status of the model's readiness over HTTP."""
        try:
            with urllib.request.urlopen(
                f"http://{self.served.state['http']}/v2/models/{name}/ready", timeout=10
            ) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while True:
            with suppress(InferenceServerException):
                if condition():
                    return
            assert self.served.process.poll() is None, self.served.process.communicate()[0]
            assert time.monotonic() < deadline, "not reached"
            time.sleep(0.05)

    @contextmanager
    def load(self, *names: str) -> Iterator[list[Exception]]:
        """Two clients per model ask all the time, and leave processors to what is tested.

        The failures, and at the end the proof that they did ask.
        """
        failures: list[Exception] = []
        answered = dict.fromkeys(names, 0)
        over = threading.Event()

        def ask(name: str) -> None:
            with tritonclient.InferenceServerClient(self.served.state["address"]) as client:
                while not over.is_set():
                    try:
                        client.infer(name, [input_tensor("input", ROW)])
                        answered[name] += 1
                    except InferenceServerException as error:
                        failures.append(error)
                    over.wait(_PAUSE_S)

        with ThreadPoolExecutor(2 * len(names)) as pool:
            for name in names * 2:
                pool.submit(ask, name)
            try:
                yield failures
            finally:
                over.set()
        assert min(answered.values()) > 20


@contextmanager
def live(
    folder: Path, *, settings: str | None = None, watch: bool = False, models: tuple[str, ...] = ()
) -> Iterator[Any]:
    """``settings``: text of the ``server`` and ``models`` sections, bind_addr and folder aside."""
    (folder / "models").mkdir(exist_ok=True)
    for name in models:
        write_adder(folder / "models" / f"{name}.onnx")
    arguments = [str(folder / "models"), "--bind", "127.0.0.1:0"]
    if settings is not None:
        (folder / "nereid.yaml").write_text(settings)
        arguments = ["--config", str(folder / "nereid.yaml")]
    served = Served(folder, *arguments, *(["--watch"] if watch else []))
    live = Live(served, folder / "models")
    try:
        yield live
    finally:
        live.client.close()
        processes = served.descendants()
        code, output = served.end()
        print(output)
    assert (code, alive(processes)) == (0, set())


def listing(*names: str, server: str = "") -> str:
    options = "options: {max_batch_size: 8}"
    rows = "".join(f"  - {{name: {name}, device: cpu, queue_capacity: 4, {options}}}\n" for name in names)
    return f"server: {{bind_addr: '127.0.0.1:0', ml_backends_path: models{server}}}\nmodels:\n{rows}"


CONTROLLED = ", allow_model_control: true"


def code_of(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        call()
    return str(caught.value.status()).removeprefix("StatusCode."), str(caught.value.message())


def stubs(served: Served, model: str) -> set[int]:
    found = set()
    for pid in served.descendants():
        with suppress(OSError):
            if f"/{model}/1/model.py\0".encode() in (Path("/proc") / str(pid) / "cmdline").read_bytes():
                found.add(pid)
    return found


def write_adding_twice(folder: Path) -> None:
    """A meta model over ``adder`` whatever the rows of that hold."""
    folder.mkdir()
    (folder / "hooks.py").write_text(
        "from nereid_backend.hooks import register_meta_model\n"
        "def run(inputs, call):\n"
        "    (once,) = call('adder', {'input': inputs[0].array})\n"
        "    return call('adder', {'input': once.array})\n"
        "register_meta_model(run=run)\n"
    )
    tensor = "dtype: f32, shape: an, dims: {a: -1}"
    (folder / "manifest.yaml").write_text(
        "format_version: '2.1'\nkind: meta\nmeta: {calls: [adder]}\n"
        f"client_inputs: [{{name: input, {tensor}}}]\nclient_outputs: [{{name: output, {tensor}}}]\n"
    )
