"""Uploads: what is taken from a multipart body, what is refused, and that nothing of a refused one is left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import FormData, MultipartWriter, web
from aiohttp.test_utils import TestClient, TestServer

from native_service.snooze import upload
from native_service.snooze.uploaded import FOLDER
from nereid_backend.errors import NereidError

# aiohttp warns of part headers that are damaged.
pytestmark = pytest.mark.filterwarnings("ignore::aiohttp.BadContentDispositionHeader")

MOST_BYTES = 100_000
DATA = bytes(range(256)) * 20


class Taken:
    """What the uploads of a test became."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uploads: list[upload.Upload] = []
        self.contents: list[bytes] = []

    async def answer(self, request: web.Request) -> web.Response:
        try:
            async with upload.received(request, self.folder, MOST_BYTES) as taken:
                self.uploads.append(taken)
                self.contents.append(taken.file.read_bytes())
        except NereidError as error:
            return web.json_response([error.code, str(error)], status=400)
        return web.Response()


Sending = Callable[..., tuple[str, str] | None]


@pytest.fixture
def taken(tmp_path: Path) -> Taken:
    return Taken(tmp_path)


@pytest.fixture
def send(taken: Taken) -> Sending:
    """The code and the text that an upload ends with; None when it was taken. Nothing is left of either."""

    def sending(data: Any, **request: Any) -> tuple[str, str] | None:
        async def scenario() -> tuple[str, str] | None:
            application = web.Application()
            application.add_routes([web.post("/", taken.answer)])
            async with TestClient(TestServer(application)) as client, client.post("/", data=data, **request) as answer:
                assert answer.status in (200, 400)
                if answer.status == 200:
                    return None
                code, text = await answer.json()
                return code, text

        ended = asyncio.run(scenario())
        left = [*(taken.folder / FOLDER).iterdir()] if (taken.folder / FOLDER).exists() else []
        assert left == []
        assert [path.name for path in taken.folder.iterdir()] in ([], [FOLDER])
        return ended

    return sending


def form(*parts: tuple[str, str], filename: str = "net.onnx", data: bytes = DATA, first: bool = False) -> FormData:
    body = FormData()

    def add_file() -> None:
        body.add_field("file", data, filename=filename, content_type="application/octet-stream")

    if first:
        add_file()
    for name, text in parts:
        body.add_field(name, text)
    if not first:
        add_file()
    return body


@pytest.mark.parametrize("first", [False, True], ids=["file last", "file first"])
def test_parts_come_in_any_order(send: Sending, taken: Taken, first: bool) -> None:
    options = (
        *(("model_id", "m.1"), ("description", "größer"), ("pinned", "true"), ("overwrite", "true")),
        *(("max_batch_size", "8"), ("max_batch_delay_ms", "3"), ("idle_timeout_secs", "60"), ("device", "cpu")),
        *(("min_residency_secs", "1"), ("autoscale_queue_threshold", "2"), ("max_replicas", "3")),
        ("routing_strategy", "random"),
    )
    assert send(form(*options, first=first)) is None
    [its] = taken.uploads
    assert (its.model_id, its.file.name, its.overwrite, its.description) == ("m.1", "m.1.onnx", True, "größer")
    assert its.keys.options == {
        "default_batch_size": 8, "batch_delay_ms": 3, "pinned": True, "idle_timeout_s": 60.0, "min_residency_s": 1.0,
    }  # fmt: skip
    assert taken.contents == [DATA]


@pytest.mark.parametrize(
    ("filename", "file"),
    [
        ("net.onnx", "net.onnx"),
        ("trees.xgb.json", "trees.xgb.json"),
        ("trees.json", "trees.xgb.json"),
        ("models.json", "models.xgb.json"),
        ("../../etc/net.onnx", "net.onnx"),
    ],
)
def test_without_an_id_the_model_is_called_as_its_file(send: Sending, taken: Taken, filename: str, file: str) -> None:
    # As the SDK's library writes it; aiohttp's own client would not send such a name.
    data = f'--b\r\nContent-Disposition: form-data; name="file"; filename="{filename}"\r\n\r\nx\r\n--b--\r\n'
    assert send(data.encode(), headers={"Content-Type": "multipart/form-data; boundary=b"}) is None
    [its] = taken.uploads
    assert (its.file.name, its.model_id) == (file, file.partition(".")[0])
    assert its.file.parent.parent == taken.folder / FOLDER
    assert its.keys.options == {}


@pytest.mark.parametrize(
    "model_id", ["", "..", "../x", "a/b", "a\\b", ".hidden", "a b", "ü", "a\0b", "x" * 129, "upload", "refresh"]
)
def test_an_id_that_is_no_plain_name_is_refused(send: Sending, model_id: str) -> None:
    ended = send(form(("model_id", model_id)))
    assert ended is not None
    assert ended[0] == "INVALID_ARGUMENT"
    assert "1 to 128 letters, digits" in ended[1]


@pytest.mark.parametrize("filename", ["m.pkl", "m.joblib", "m.py", "m.pt", "m.pt2", "m.skops", "m.so", "m", ".onnx"])
def test_files_that_may_run_code_or_are_unknown_are_refused(send: Sending, filename: str) -> None:
    ended = send(form(("model_id", "m"), filename=filename))
    if filename == ".onnx":  # which only lacks a name
        assert ended is None
        return
    assert ended is not None
    assert ended[0] == "UNIMPLEMENTED"
    assert "send .onnx or .xgb.json" in ended[1]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([("colour", "red")], "part 'colour' is not known; expected max_batch_size"),
        ([("model_id", "a"), ("model_id", "b")], "part 'model_id' comes twice"),
        ([("max_batch_size", "many")], "part 'max_batch_size' must be a whole number, got 'many'"),
        ([("max_batch_size", "0")], "max_batch_size must be greater than 0"),
        ([("idle_timeout_secs", "-1")], "part 'idle_timeout_secs' must be a whole number"),
        ([("routing_strategy", "best")], "routing_strategy is not valid"),
        ([("pinned", "yes")], "part 'pinned' must be true or false, got 'yes'"),
        ([("description", "x" * 5000)], "part 'description' is longer than 4096 bytes"),
        ([("file", "x")], "part 'file' comes twice"),
    ],
)
def test_wrong_parts_are_told(send: Sending, parts: list[tuple[str, str]], message: str) -> None:
    ended = send(form(*parts))
    assert ended is not None
    assert ended[0] == "INVALID_ARGUMENT"
    assert message in ended[1]


def test_what_is_no_upload_is_told(send: Sending) -> None:
    assert send(b"{}", headers={"Content-Type": "application/json"}) == (
        "INVALID_ARGUMENT", "an upload must be multipart/form-data",
    )  # fmt: skip
    no_file = FormData({"model_id": "m"}, default_to_multipart=True)
    assert send(no_file) == ("INVALID_ARGUMENT", "the upload has no part 'file'")
    inner = MultipartWriter("form-data")
    inner.append("x")
    outer = MultipartWriter("form-data")
    outer.append(inner).set_content_disposition("form-data", name="file")
    ended = send(outer)
    assert ended is not None
    assert ended[0] == "INVALID_ARGUMENT"


def test_a_file_over_the_limit_is_refused_by_its_name(send: Sending, taken: Taken) -> None:
    assert send(form(data=bytes(MOST_BYTES))) is None
    assert send(form(data=bytes(MOST_BYTES + 1))) == (
        "RESOURCE_EXHAUSTED", f"the file is over the limit, {MOST_BYTES} bytes (server.limits.max_upload_bytes)",
    )  # fmt: skip


def test_bytes_that_are_no_multipart_are_refused(send: Sending) -> None:
    chance = random.Random(7)
    whole = (
        b'--b\r\nContent-Disposition: form-data; name="model_id"\r\n\r\nm\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="m.onnx"\r\n\r\nDATA\r\n--b--\r\n'
    )
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    assert send(whole, headers=headers) is None
    damaged = [whole[: chance.randrange(len(whole) - 30)] for _ in range(10)]
    damaged += [chance.randbytes(200), b"", b"--b\r\n" + b"x: y\r\n" * 2000, b"--b\r\nx: " + b"y" * 100_000]
    damaged += [b"--b\r\n\r\n\r\n--b--\r\n", b"--b--\r\n"]
    for data in damaged:
        ended = send(data, headers=headers)
        assert ended is not None, data
        assert ended[0] == "INVALID_ARGUMENT", data
    assert send(whole, headers={"Content-Type": "multipart/form-data"}) is not None


def test_what_a_killed_server_left_of_an_upload_goes_with_the_next(send: Sending, taken: Taken) -> None:
    (taken.folder / FOLDER / "upload-999999999-x").mkdir(parents=True)
    assert send(form()) is None


def test_who_stops_sending_is_given_up(send: Sending, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_SILENCE_S", 0.1)

    async def body() -> Any:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="m.onnx"\r\n\r\nDATA'
        await asyncio.sleep(30)

    ended = send(body(), headers={"Content-Type": "multipart/form-data; boundary=b"})
    assert ended is not None
    assert ended[0] == "DEADLINE_EXCEEDED"
    assert "the upload stands still" in ended[1]
