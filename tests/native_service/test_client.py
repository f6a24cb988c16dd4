"""The client against a made-up server that refuses as it is told, and against the real one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
from endings import write_slow
from fake_native_server import FULL, WAIT_S, Behaviour, Faked, answers, echo, refuse
from onnx import TensorProto, helper, save
from serving import WIRE_DTYPES, Served

from native_service import client as nereid
from native_service.client import AsyncClient, Client
from native_service.proto import inference_pb2 as pb

R16 = np.arange(16, dtype=np.float32)


def test_a_full_server_is_asked_again_until_it_has_room(faked: Faked) -> None:
    faked.behaviours = [FULL, FULL, echo]
    with Client(faked.address) as client:
        np.testing.assert_array_equal(client.infer("m", R16)["y"], R16)
    assert faked.behaviours == []
    # Each attempt sends the whole input.
    assert faked.messages[0] == faked.messages[1] == faked.messages[2]


def test_attempts_are_bounded(faked: Faked) -> None:
    faked.behaviours = [FULL] * 4
    with Client(faked.address, attempts=3) as client, pytest.raises(nereid.ServerFull, match="full"):
        client.infer("m", R16)
    assert len(faked.behaviours) == 1


def test_a_pause_that_the_caller_has_no_time_for_is_not_begun(faked: Faked) -> None:
    faked.behaviours = [refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after="600")]
    started = time.monotonic()
    with Client(faked.address) as client, pytest.raises(nereid.ServerFull) as caught:
        client.infer("m", R16, timeout_s=300)
    assert time.monotonic() - started < 200
    assert caught.value.retry_after_s == 600


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (refuse(grpc.StatusCode.RESOURCE_EXHAUSTED), nereid.TooLarge),
        (refuse(grpc.StatusCode.UNAVAILABLE, retry_after="0"), nereid.Unavailable),
        (refuse(grpc.StatusCode.INVALID_ARGUMENT), nereid.BadRequest),
        (refuse(grpc.StatusCode.NOT_FOUND), nereid.UnknownModel),
        (refuse(grpc.StatusCode.UNAUTHENTICATED), nereid.NotAllowed),
        (refuse(grpc.StatusCode.DEADLINE_EXCEEDED), nereid.TimedOut),
        (refuse(grpc.StatusCode.FAILED_PRECONDITION), nereid.ModelFailed),
        (refuse(grpc.StatusCode.DATA_LOSS), nereid.CallFailed),
    ],
)
def test_everything_else_is_told_and_not_tried_again(faked: Faked, behaviour: Behaviour, kind: type[Exception]) -> None:
    faked.behaviours = [behaviour, echo]
    with Client(faked.address) as client, pytest.raises(nereid.CallFailed, match=r"^no$") as caught:
        client.infer("m", R16)
    assert type(caught.value) is kind
    assert len(faked.behaviours) == 1


def test_a_call_that_has_answered_is_not_made_again(faked: Faked) -> None:
    def later(messages: Any, context: Any) -> Iterator[pb.CheckpointResponse]:
        yield pb.CheckpointResponse(chunk="line")
        yield from FULL(messages, context)

    faked.behaviours = [later, echo]
    with Client(faked.address) as client, pytest.raises(nereid.ServerFull):
        client.infer("m", R16)
    assert len(faked.behaviours) == 1


def chunk(**fields: Any) -> pb.CheckpointResponse:
    return pb.CheckpointResponse(output_chunk=pb.TensorChunk(**fields))


DONE = pb.CheckpointResponse(done=True)


@pytest.mark.parametrize(
    ("responses", "words"),
    [
        ([], "has no end"),
        ([chunk(tensor_name="z", shape=[1], data=b"1234"), DONE], "does not declare"),
        ([chunk(tensor_name="y", shape=[2], data=b"1234"), DONE], r"8 bytes for shape \[2\], got 4"),
        ([chunk(tensor_name="y", shape=[1], data=b"12345"), DONE], "and 5 bytes"),
        ([chunk(tensor_name="y", shape=[2], data=b"12"), chunk(tensor_name="y", shape=[1]), DONE], "one shape"),
    ],
)
def test_an_answer_that_is_not_whole_is_never_an_array(
    faked: Faked, responses: list[pb.CheckpointResponse], words: str
) -> None:
    faked.behaviours = [answers(*responses)]
    with Client(faked.address) as client, pytest.raises(nereid.AnswerBroken, match=words):
        client.infer("m", R16)


def test_a_key_goes_with_every_call(faked: Faked) -> None:
    faked.behaviours = [echo]
    with Client(faked.address, key="s3cret") as client:
        client.infer("m", R16)
    assert faked.metadata[0]["authorization"] == "Bearer s3cret"


def test_nobody_at_the_address_is_told_as_such() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(nereid.Unavailable, match=r"no server answers at 127.0.0.1:1"):
        client.models(timeout_s=WAIT_S)


def test_leaving_a_run_cancels_it(faked: Faked) -> None:
    faked.behaviours = [faked.forever]
    with Client(faked.address) as client:
        with client.run("m", R16) as run:
            assert next(run) == "begun"
        assert faked.over.wait(WAIT_S)
        with pytest.raises(nereid.CallCancelled):
            next(run)


def test_the_callers_time_bounds_a_run(faked: Faked) -> None:
    faked.behaviours = [faked.forever]
    with Client(faked.address) as client, pytest.raises(nereid.TimedOut):
        client.infer("m", R16, timeout_s=0.5)


@pytest.mark.parametrize("during", ["call", "pause"])
def test_cancelling_a_task_cancels_its_call(faked: Faked, during: str) -> None:
    faked.behaviours = [
        faked.forever if during == "call" else refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after="600")
    ]

    async def scenario() -> None:
        async with AsyncClient(faked.address) as client:
            task = asyncio.ensure_future(client.infer("m", R16))
            while not faked.messages:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            if during == "call":
                assert await asyncio.to_thread(faked.over.wait, WAIT_S)

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))


def test_importing_it_brings_neither_servers_nor_parsers() -> None:
    heavy = ["aiohttp", "pydantic", "yaml", "click", "watchfiles", "converters", "jax", "torch"]
    code = (
        "import sys, native_service.client\n"
        f"print([m for m in {heavy} if m in sys.modules]"
        " + [m for m in sys.modules if m.startswith('native_service.envoy')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# The real server.

SCRIPT = """import os, sys
data = sys.stdin.buffer.read()
for index in range(3):
    print("line", index)
if data == b"fail":
    print("no good", file=sys.stderr)
    sys.exit(3)
with open(os.environ["NEREID_OUTPUT_PATH"], "wb") as file:
    file.write(f"float32 {len(data)}\\n".encode() + bytes(4 * len(data)))
"""


def write_every_dtype(path: Path) -> None:
    floats = {"bf16": "BFLOAT16", "f16": "FLOAT16", "f32": "FLOAT", "f64": "DOUBLE", "bool": "BOOL"}
    tokens = [row.token for row in WIRE_DTYPES]
    integers = {"u": "UINT", "i": "INT"}
    types = {t: getattr(TensorProto, floats.get(t) or integers[t[0]] + t[1:]) for t in tokens}
    tensors = [
        [helper.make_tensor_value_info(f"{word}_{token}", types[token], ["n", 4]) for token in tokens]
        for word in ("in", "out")
    ]
    nodes = [helper.make_node("Identity", [f"in_{token}"], [f"out_{token}"]) for token in tokens]
    graph = helper.make_graph(nodes, "graph", *tensors)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("client")
    (models := folder / "models").mkdir()
    write_every_dtype(models / "dtypes.onnx")
    write_slow(models / "slow.onnx")
    (models / "job").mkdir()
    (models / "job" / "main.py").write_text(SCRIPT)
    (models / "job" / "requirements.txt").write_text("")
    (models / "job" / "model_inference.textproto").write_text("input_shape: [-1]\noutput_shape: [-1]\n")
    names = ("dtypes", "slow", "job")
    rows = "".join(f"  - {{name: {name}, device: cpu, queue_capacity: 1}}\n" for name in names)
    (folder / "nereid.yaml").write_text(
        f"server: {{bind_addr: '127.0.0.1:0', ml_backends_path: models}}\nmodels:\n{rows}"
    )
    server = Served(folder, "--config", str(folder / "nereid.yaml"))
    yield server
    print(server.end()[1])


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.state["address"]) as client:
        yield client


@pytest.mark.triton
def test_the_list_and_the_health_of_models(client: Client) -> None:
    assert client.models() == ["dtypes", "slow", "job"]
    assert (client.health(), client.health("slow"), client.health("nope")) == (True, True, False)
    with pytest.raises(nereid.UnknownModel, match="nope"):
        client.infer("nope", R16)


@pytest.mark.triton
def test_every_dtype_comes_back_as_it_was_sent(client: Client) -> None:
    draw = np.random.default_rng(3)
    inputs = {}
    for row in WIRE_DTYPES:
        raw = draw.integers(0, 2 if row.token == "bool" else 256, (3, 4 * row.size_bytes), np.uint8)
        inputs[f"in_{row.token}"] = raw.view(row.numpy)
    outputs = client.infer("dtypes", inputs)
    assert list(outputs) == [name.replace("in_", "out_") for name in inputs]
    for name, array in inputs.items():
        output = outputs[name.replace("in_", "out_")]
        assert (output.dtype, output.shape, output.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert outputs["out_bf16"].dtype == ml_dtypes.bfloat16


@pytest.mark.triton
def test_what_does_not_fit_is_told_before_or_by_the_server(client: Client) -> None:
    with pytest.raises(nereid.BadRequest, match=r"input 'input' must be float32, got float64; convert it"):
        client.infer("slow", R16.astype(np.float64))
    with pytest.raises(nereid.BadRequest, match=r"takes the inputs \['input'\], got \['other'\]"):
        client.infer("slow", {"other": R16})
    with pytest.raises(nereid.BadRequest, match="give a mapping"):
        client.infer("dtypes", R16)
    with pytest.raises(nereid.BadRequest, match=r"must be 16, got 15"):
        client.infer("slow", R16[:15])
    with pytest.raises(nereid.BadRequest, match="must be float32"):
        client.infer("slow", ["a"] * 16)
    assert client.infer("slow", list(range(16)))["output"].shape == (1, 1)


@pytest.mark.triton
def test_callers_of_a_full_model_wait_for_their_turn(served: Served) -> None:
    async def scenario() -> None:
        async with AsyncClient(served.state["address"], attempts=60) as client:
            results = await asyncio.gather(*(client.infer("slow", R16, timeout_s=60) for _ in range(3)))
        assert len({outputs["output"].tobytes() for outputs in results}) == 1

    asyncio.run(scenario())


@pytest.mark.triton
def test_the_lines_of_a_program_come_before_its_result(client: Client) -> None:
    with client.run("job", b"12345") as job:
        assert list(job) == ["line 0", "line 1", "line 2"]
        assert job.exit_code == 0
        np.testing.assert_array_equal(job.outputs()["output"], np.zeros(5, np.float32))


@pytest.mark.triton
def test_a_program_that_fails_gives_its_exit_code_and_last_words(served: Served) -> None:
    async def scenario() -> None:
        async with AsyncClient(served.state["address"]) as client, await client.run("job", b"fail") as job:
            lines = [line async for line in job]
            assert sorted(lines) == ["line 0", "line 1", "line 2", "stderr: no good"]
            with pytest.raises(nereid.ProgramFailed, match="exit code 3") as caught:
                await job.outputs()
            assert (caught.value.exit_code, sorted(caught.value.last_lines)) == (3, sorted(lines))

    asyncio.run(scenario())
