import asyncio
import logging
from pathlib import Path

import grpc
import pytest

from native_service.triton.errors import load_failure, status_of, without_paths
from native_service.triton.log import TritonLog


def test_information_is_quiet_and_what_models_print_is_not(caplog: pytest.LogCaptureFixture) -> None:
    log = TritonLog()
    with caplog.at_level(logging.INFO):
        log.logged("I1130 07:02:03.123456 12 model_lifecycle.cc:839] \"successfully loaded 'x'\"")
        log.logged("I1130 07:02:03.123456 12 server.cc:604] ")
        log.logged("+------+")
        log.logged("| Name |")
        log.logged("")
        log.logged("a model's own line")
        log.printed("another one")
        log.logged('W1130 07:02:03.123456 12 x.cc:1] "careful"')
        log.logged('W1130 07:02:03.123456 12 x.cc:1] "Unable to allocate pinned system memory"')
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "a model's own line"), ("INFO", "another one"), ("WARNING", "careful"),
    ]  # fmt: skip
    assert log.complaints == ("careful",)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "load failed for model 'x': version 1 is at UNAVAILABLE state: Internal: EngineMissing: jax is not"
            " installed\n\nAt:\n  /srv/models/x/1/model.py(7): initialize\n;",
            "EngineMissing: jax is not installed",
        ),
        ("load failed for model 'x': version 1 is at UNAVAILABLE state: Internal: Stub process 'x_0_0' is not healthy.",
         "its process ended while it was starting; its last words are in the log above"),
        ("failed to load 'x', no version in /a/b/c/models", "failed to load 'x', no version in models"),
        ("", "Triton gave no reason"),
    ],
)  # fmt: skip
def test_a_failed_load_is_told_without_paths_and_traceback(text: str, reason: str) -> None:
    assert load_failure(text) == reason


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cannot read /models/up.onnx", "cannot read up.onnx"),
        ("/srv/my models/.uploads/u/up.onnx is bad", "up.onnx is bad"),
        ("see '/opt/mod\u00e8les/x y/z.onnx': no", "see 'z.onnx': no"),
        ("file:/data/m/x", "file:x"),
        ("/a/b or /c/d", "b or d"),
        ("a/b of application/json, 1/2", "a/b of application/json, 1/2"),
    ],
)
def test_of_a_path_only_its_last_part_is_told(text: str, told: str) -> None:
    assert without_paths(text) == told


def test_a_traceback_of_a_model_is_one_record(caplog: pytest.LogCaptureFixture) -> None:
    log = TritonLog()
    lines = ["Traceback (most recent call last):", '  File "hooks.py", line 3', "    x = y", "NameError: y"]
    with caplog.at_level(logging.INFO):
        for line in ["before", *lines, "after"]:
            log.logged(line)
        for line in (lines[0], lines[1]):
            log.printed(line)
        log.logged("between")
        log.printed(lines[3])
    assert [record.getMessage() for record in caplog.records] == [
        "before", "\n".join(lines), "after", "between", "\n".join([*lines[:2], lines[3]]),
    ]  # fmt: skip


def test_the_details_of_a_failed_request_are_no_second_error(caplog: pytest.LogCaptureFixture) -> None:
    log = TritonLog()
    with caplog.at_level(logging.INFO):
        log.logged(
            'E1130 07:02:03.123456 12 model.py:127] "model \'m\' request a b failed\\nTraceback:\\n  \\"x\\"\\nNo\\n"'
        )
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("nereid.models", "INFO")
    assert record.getMessage() == "model 'm' request a b failed\nTraceback:\n  \"x\"\nNo"
    assert record.__dict__["fields"] == {"model": "m", "request_id": "a b", "source": "model.py:127"}


def test_complaints_of_triton_have_a_kind_by_their_place(caplog: pytest.LogCaptureFixture) -> None:
    log = TritonLog()
    for number in range(3):
        log.logged(f'E1130 07:02:03.123456 12 infer_handler.cc:{number % 2}] "malformed {number}"')
    assert [record.__dict__["kind"] for record in caplog.records] == [
        "infer_handler.cc:0", "infer_handler.cc:1", "infer_handler.cc:0",
    ]  # fmt: skip


@pytest.mark.parametrize("is_there", [False, True])
def test_a_triton_that_does_not_answer_is_told_without_our_sockets(tmp_path: Path, is_there: bool) -> None:
    async def scenario() -> None:
        async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        socket = tmp_path / "triton.sock"
        server = await asyncio.start_unix_server(hang_up, socket) if is_there else None
        async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/triton/Call")(b"")
        if server is not None:
            server.close()
        assert status_of(caught.value) == ("UNAVAILABLE", "the server behind this address does not answer, retry later")

    asyncio.run(scenario())
