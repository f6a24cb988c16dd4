"""``nereid bench`` as a process, against a made-up server."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from click.testing import CliRunner
from fake_native_server import WAIT_S, Faked, echo
from tritonclient.grpc import service_pb2

from native_service.bench import command
from native_service.bench.endpoint import KSERVE
from native_service.bench.target import Target
from native_service.client.errors import BadRequest
from nereid_backend.errors import NereidError

QUICK = ("--warm-up", "0", "--window", "0.2", "--duration", "0.4")
BATCHES_SEEN = 50


def start(*arguments: str | Path, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "native_service.cli", "bench", *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def bench(*arguments: str | Path, cwd: Path) -> tuple[int, str, str]:
    process = start(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def when(condition: Callable[[], object]) -> None:
    """Wait for it."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_every_load_is_measured_shown_and_written(faked: Faked, tmp_path: Path) -> None:
    outputs = [argument for ending in ("json", "csv", "html") for argument in ("--output", f"r.{ending}")]
    (tmp_path / "key").write_text("s3cret\n")
    options = ["--concurrency", "1,3", "--batch", "1,2", "--key-file", "key", *QUICK, *outputs]
    code, out, err = bench("m", "--address", faked.address, *options, cwd=tmp_path)
    assert (code, err) == (0, "")
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["ended"] == "complete"
    assert (result["model"], result["server"], result["protocol"]) == ("m", "fake 1", "kserve")
    loads = [(each["rows"], each["clients"]) for each in result["measurements"]]
    assert loads == [(1, 1), (1, 3), (2, 1), (2, 3)]
    for each in result["measurements"]:
        assert each["calls"] > 0
        assert each["failed"] == 0
        assert each["calls_per_second"] == pytest.approx(each["calls"] / each["seconds"], rel=0.01)
        assert 0 < each["latency_ms"]["p50"] <= each["latency_ms"]["p99"] <= each["latency_ms"]["most"]
    table = [line.split()[:2] for line in out.splitlines() if line.split()[:1] in (["1"], ["3"])]
    assert table == [[str(clients), str(rows)] for rows, clients in loads]
    with (tmp_path / "r.csv").open() as file:
        assert [(int(row["rows"]), int(row["clients"])) for row in csv.DictReader(file)] == loads
    page = (tmp_path / "r.html").read_text()
    assert page.count("<svg") == 4
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert {metadata["authorization"] for metadata in faked.metadata} == {"Bearer s3cret"}
    assert {tuple(request.inputs[0].shape) for request in faked.requests} >= {(2, 16)}


def test_triton_s_times_stand_beside_those_of_the_client(faked: Faked, tmp_path: Path) -> None:
    model = faked.statistics.model_stats.add(name="m")
    stats = model.inference_stats
    lock = threading.Lock()

    def count(request: Any, _context: Any) -> None:
        with lock:
            stats.success.count += 1
            stats.success.ns += 400_000
            stats.queue.ns += 300_000
            stats.compute_infer.ns += 100_000
            model.inference_count += request.inputs[0].shape[0]
            model.execution_count = stats.success.count // 2

    faked.infer = count
    options = ["--concurrency", "2", "--batch", "3", *QUICK, "--output", "r.json"]
    assert bench("m", "--address", faked.address, *options, cwd=tmp_path)[0] == 0
    (each,) = json.loads((tmp_path / "r.json").read_text())["measurements"]
    parts = each["triton_ms"]
    assert (parts["queue"], parts["model"], parts["in"]) == (pytest.approx(0.3), pytest.approx(0.1), 0)
    assert parts["outside"] == pytest.approx(each["latency_ms"]["mean"] - 0.4, abs=0.001)
    assert each["triton"]["rows_per_run"] == pytest.approx(6, rel=0.5)


def test_refusals_are_told_apart_from_answers(faked: Faked, tmp_path: Path) -> None:
    calls = iter(range(1_000_000))

    def refuse(_request: Any, context: Any) -> None:
        if (number := next(calls)) > 2 and number % 2:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"full: {number} waiting")

    faked.infer = refuse
    options = ["--concurrency", "2", *QUICK, "--output", "r.json"]
    code, out, _ = bench("m", "--address", faked.address, *options, cwd=tmp_path)
    (each,) = json.loads((tmp_path / "r.json").read_text())["measurements"]
    (failure,) = each["failures"]
    assert (code, failure["code"], failure["count"]) == (0, "RESOURCE_EXHAUSTED", each["failed"])
    assert f"{each['failed']} x RESOURCE_EXHAUSTED: full:" in out
    assert each["calls"] > 0


def test_latency_of_an_open_loop_counts_from_when_a_call_was_due(faked: Faked, tmp_path: Path) -> None:
    """A server that stands still makes all the calls slow that were due meanwhile, not only those it had."""
    stall_s, stalled = 1.0, threading.Event()
    calls = iter(range(1_000_000))

    def stall(_request: Any, _context: Any) -> None:
        if next(calls) == BATCHES_SEEN:
            stalled.set()
            time.sleep(stall_s)
            stalled.clear()
        while stalled.is_set():
            time.sleep(0.001)

    faked.infer = stall
    options = ["--rate", "100", "--arrival", "constant", "--outstanding", "2", "--warm-up", "0", "--window", "1"]
    code, *_ = bench("m", "--address", faked.address, *options, "--duration", "4", "--output", "r.json", cwd=tmp_path)
    (each,) = json.loads((tmp_path / "r.json").read_text())["measurements"]
    assert code == 0
    assert each["client"]["held"] > 0
    # A hundred calls were due in the second: the mean one of them was late by half of it. Two were open.
    assert each["latency_ms"]["mean"] * each["calls"] > 0.3 * 1e3 * stall_s * 100


def test_a_rate_beyond_the_server_is_said_to_be_so(faked: Faked, tmp_path: Path) -> None:
    faked.infer = lambda request, context: time.sleep(0.05)
    options = ["--rate", "2000", "--outstanding", "10", *QUICK, "--output", "r.json"]
    code, out, _ = bench("m", "--address", faked.address, *options, cwd=tmp_path)
    assert code == 0
    assert "the server does not keep up with 2000 calls/s" in out
    (each,) = json.loads((tmp_path / "r.json").read_text())["measurements"]
    assert each["client"]["waiting_at_end"] > 0


def test_checkpoint_calls_are_made_too(faked: Faked, tmp_path: Path) -> None:
    faked.behaviours = Endless(echo)
    options = ["--protocol", "native", "--concurrency", "2", *QUICK, "--output", "r.json"]
    assert bench("m", "--address", faked.address, *options, cwd=tmp_path)[0] == 0
    (each,) = json.loads((tmp_path / "r.json").read_text())["measurements"]
    assert (each["calls"] > 0, each["failed"]) == (True, 0)


def test_several_processes_share_the_load(faked: Faked, tmp_path: Path) -> None:
    options = ["--processes", "2", "--connections", "2", "--concurrency", "3", *QUICK, "--output", "r.json"]
    assert bench("m", "--address", faked.address, *options, cwd=tmp_path)[0] == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["client"]["processes"], result["client"]["connections"]) == (2, 4)
    assert result["measurements"][0]["calls"] > 0


def test_rows_of_a_file_are_what_is_sent(faked: Faked, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(3 * 16, dtype=np.float32).reshape(3, 16))
    options = ["--input", "x.npy", "--batch", "2", "--concurrency", "1", *QUICK]
    assert bench("m", "--address", faked.address, *options, cwd=tmp_path)[0] == 0
    firsts = {float(np.frombuffer(request.raw_input_contents[0], np.float32)[0]) for request in faked.requests}
    assert firsts == {0.0, 16.0, 32.0}


def test_a_deadline_travels_with_every_call(faked: Faked, tmp_path: Path) -> None:
    left: list[float] = []
    faked.infer = lambda request, context: left.append(context.time_remaining())
    options = ["--deadline", "30", "--concurrency", "1", *QUICK]
    assert bench("m", "--address", faked.address, *options, cwd=tmp_path)[0] == 0
    under_load = left[2:]  # before them the ones that are looked at
    assert under_load
    assert all(0 < seconds < 40 for seconds in under_load)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_measured_is_shown_and_written_when_interrupted(faked: Faked, tmp_path: Path, number: int) -> None:
    options = ["--concurrency", "1,2", "--warm-up", "0", "--window", "3600", "--output", "r.json"]
    process = start("m", "--address", faked.address, *options, cwd=tmp_path)
    when(lambda: len(faked.requests) > 20)
    process.send_signal(number)
    out, err = process.communicate(timeout=WAIT_S * 3)
    assert (process.returncode, err.splitlines()[-1]) == (130, "error: interrupted after 0 of 2 loads")
    assert "interrupted after" in out
    (each,) = json.loads((tmp_path / "r.json").read_text())["measurements"]
    assert each["calls"] > 0


def test_a_server_that_goes_ends_the_scan_and_what_was_measured_stays(faked: Faked, tmp_path: Path) -> None:
    options = ["--concurrency", "1,2", "--warm-up", "0", "--window", "0.5", "--duration", "3600"]
    process = start("m", "--address", faked.address, *options, "--output", "r.json", cwd=tmp_path)
    when(lambda: len(faked.requests) > 20)
    faked.stop()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("error: stopped after 0 of 2 loads: no call succeeded for")
    assert "UNAVAILABLE" in out
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["ended"].startswith("stopped after 0 of 2 loads")
    assert result["measurements"][0]["calls"] > 0


@pytest.fixture
def handlers() -> Iterator[None]:
    """The command takes SIGTERM for itself."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope"], "the server has no model 'nope'; it has: m, other"),
        (["m", "--batch", "9"], "model 'm' takes up to 8 rows in a request, got --batch 9"),
        (["m", "--shape", "x:3"], "model 'm' input 'x' takes the shape [16] (without the rows), got [3]"),
        (["m", "--input", "none.npy"], "none.npy: cannot be read"),
        (["m", "--key-file", "none"], "none: cannot be read"),
        (["m", "--input", "x=text"], "needs an .npy file"),
        (["m", "--input", "text"], "must be float32"),
        (["m", "--concurrency", "0"], "whole numbers above 0"),
        (["m", "--concurrency", "1,x"], "whole numbers above 0"),
        (["m", "--rate", "nan"], "numbers above 0"),
        (["m", "--rate", "1", "--concurrency", "1"], "exclude each other"),
        (["m", "--shape", "x"], "as in tokens:128"),
        (["m", "--output", "r.txt"], "must end in .json, .csv or .html, got r.txt"),
        (["m", "--output", "no/r.json"], "cannot be written"),
    ],
)
@pytest.mark.usefixtures("handlers")
def test_what_cannot_be_measured_is_one_message(
    faked: Faked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("hello")
    result = CliRunner().invoke(command.bench, [*arguments, "--address", faked.address])
    told = str(result.exception) if isinstance(result.exception, NereidError) else result.output
    assert words in told
    assert result.exit_code == (1 if isinstance(result.exception, NereidError) else 2)


def test_nobody_at_the_address_is_told_in_one_line(tmp_path: Path) -> None:
    code, out, err = bench("m", "--address", "127.0.0.1:1", cwd=tmp_path)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("error: no server answers at 127.0.0.1:1; is it running there?")


def test_a_model_that_fails_is_told_before_any_load(faked: Faked, tmp_path: Path) -> None:
    faked.infer = lambda request, context: context.abort(grpc.StatusCode.INTERNAL, "it broke")
    assert bench("m", "--address", faked.address, cwd=tmp_path) == (1, "", "error: it broke\n")
    assert len(faked.requests) == 1


class Endless(list[Any]):
    """Gives the same behaviour to every call."""

    def __init__(self, behaviour: Any) -> None:
        super().__init__([behaviour])

    def pop(self, index: Any = -1) -> Any:
        return self[0]


def test_a_server_without_statistics_is_measured_from_outside(tmp_path: Path) -> None:
    """KServe's other servers have neither ModelConfig nor ModelStatistics."""
    server = Faked(only=("ModelMetadata", "ModelInfer"))
    try:
        code, out, _ = bench("m", "--address", server.address, "--concurrency", "1", *QUICK, cwd=tmp_path)
    finally:
        server.stop()
    assert code == 0
    assert "(unknown)" in out


def test_a_file_without_a_name_is_for_the_only_input() -> None:
    connection = SimpleNamespace(
        describe=lambda model: (
            service_pb2.ModelMetadataResponse(
                name=model, inputs=[{"name": name, "datatype": "FP32", "shape": [-1, 2]} for name in ("x", "y")]
            ),
            None,
        )
    )
    assert len(Target(connection, "m", KSERVE, {}, None).requests(1)) > 1
    with pytest.raises(BadRequest, match="inputs x, y; say which"):
        Target(connection, "m", KSERVE, {}, np.ones((1, 2), np.float32))
