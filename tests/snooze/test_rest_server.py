"""The REST server before fakes: what becomes of errors, who may change models, and uploads that meet or go away."""

from __future__ import annotations

import asyncio
import gzip
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import snoozeml
from aiohttp import ClientSession, FormData, UnixConnector, web
from snoozeml.exceptions import map_http_error

from native_service.edge.half_sent import HalfSent
from native_service.kserve import http
from native_service.nereid.checkpoint import Budget
from native_service.settings import Limits, ModelOptions, ModelSettings, OtherModels, ServerSettings
from native_service.snooze import rest, uploaded
from native_service.snooze.uploaded import FOLDER
from native_service.telemetry.calls import Calls
from nereid_backend.errors import (
    AlreadyExists,
    BundleError,
    EngineError,
    EnvoyUnavailable,
    ModelLoadError,
    ModelLoading,
    NereidError,
    OverLimit,
    RepositoryError,
    ResourceExhausted,
)
from nereid_backend.spec import ModelSpec


class World:
    """A model ``m``, and whatever is uploaded; ``fail`` is raised by whatever is asked for."""

    def __init__(self, folder: Path, **server: Any) -> None:
        self.settings = ServerSettings(
            **{"bind_addr": "127.0.0.1:0", "ml_backends_path": str(folder), "allow_model_control": True, **server}
        )
        self.fail: BaseException | None = None
        self.fail_to_pin: BaseException | None = None
        self.pinned: set[str] = set()
        self.is_there = True
        self.budget = Budget(2**20)
        self.gate = asyncio.Event()
        self.gate.set()
        self.adopted: list[tuple[ModelSettings, bytes]] = []
        self.adopting = 0
        self.others: OtherModels | None = OtherModels()
        self.served = {"m": self._model(ModelSettings(name="m", device="cpu", queue_capacity=1))}

    @staticmethod
    def _model(model: ModelSettings) -> Any:
        spec = ModelSpec(model.name, "fake", "fake", (), (), (), max_batch_size=4)
        return SimpleNamespace(source=SimpleNamespace(name=model.name, settings=model, path=Path("m.onnx")), spec=spec)

    async def do(self, _name: str) -> None:
        if self.fail is not None:
            raise self.fail

    async def pin(self, name: str) -> None:
        await self.do(name)
        if self.fail_to_pin is not None:
            raise self.fail_to_pin

    load = unload = unpin = do

    async def refresh(self) -> None:
        await self.do("")

    def states(self) -> dict[str, Any]:
        idle = {"state": "idle", "last_used_s": None, "memory_bytes": 0, "idle_timeout_s": None}
        return {name: SimpleNamespace(**idle, pinned=name in self.pinned, hidden=False) for name in self.served}

    def settings_for(self, name: str) -> ModelSettings | None:
        return None if self.others is None else self.others.named(name)

    async def adopt(self, model: ModelSettings, file: Path, *, overwrite: bool) -> ModelSettings:
        self.adopting += 1
        await self.gate.wait()
        await self.do(model.name)
        self.adopted.append((model, file.read_bytes()))
        self.served[model.name] = self._model(model)
        return model

    async def is_ready(self) -> bool:
        return self.is_there

    @property
    def front(self) -> Any:
        inference = SimpleNamespace(calls=Calls(), half_sent=HalfSent())
        return SimpleNamespace(
            inference=inference,
            budget=self.budget,
            limits=Limits(max_message_bytes=2**16),
            snooze=SimpleNamespace(counted=inference.calls.watched),
            is_ready=self.is_ready,
        )


async def _no_metrics(_request: web.Request) -> web.Response:
    return web.Response(text="metrics")


@asynccontextmanager
async def serving(world: World) -> AsyncIterator[ClientSession]:
    catalogue: Any = SimpleNamespace(models=world.served, served=world.served)
    server = rest.RestServer(
        world.settings,
        catalogue=catalogue,
        control=world,  # type: ignore[arg-type]
        residency=world,  # type: ignore[arg-type]
        front=world.front,
        metrics=_no_metrics,
    )
    with tempfile.TemporaryDirectory() as folder:
        await server.start(f"{folder}/rest.sock")
        try:
            async with ClientSession("http://rest", connector=UnixConnector(f"{folder}/rest.sock")) as client:
                yield client
        finally:
            await server.stop()


Scenario = Callable[[World, ClientSession], Awaitable[None]]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    def start(scenario: Scenario, **server: Any) -> None:
        async def inside() -> None:
            world = World(tmp_path, **server)
            async with serving(world) as client:
                await scenario(world, client)

        asyncio.run(inside())

    return start


def form(model_id: str = "up") -> FormData:
    body = FormData({"model_id": model_id})
    body.add_field("file", b"DATA", filename="m.onnx")
    return body


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry_after"),
    [
        (ResourceExhausted("all models are busy", 7), 503, snoozeml.ResourceExhaustedError, 7),
        (ResourceExhausted("too many changes"), 503, snoozeml.ResourceExhaustedError, 5),
        (ResourceExhausted("out of memory: no"), 503, snoozeml.OutOfMemoryError, 5),
        (ModelLoading("Model 'm' is currently loading"), 503, snoozeml.ModelLoadingError, None),
        (ModelLoadError("model 'm' could not be loaded"), 500, snoozeml.RuntimeInferenceError, None),
        (EngineError("no"), 500, snoozeml.RuntimeInferenceError, None),
        (OverLimit("too large"), 413, snoozeml.SnoozeError, None),
        (AlreadyExists("there"), 409, snoozeml.SnoozeError, None),
        (EnvoyUnavailable("away"), 503, snoozeml.SnoozeError, None),
        (ZeroDivisionError("secret"), 500, snoozeml.RuntimeInferenceError, None),
    ],
)
def test_an_error_is_the_one_that_the_sdk_knows(
    run: Callable[..., None], error: Exception, status: int, kind: type[Exception], retry_after: int | None
) -> None:
    async def scenario(world: World, client: ClientSession) -> None:
        world.fail = error
        async with client.post("/v1/models/m/load") as answer:
            assert answer.status == status
            body = await answer.text()
            mapped = map_http_error(answer.status, body, dict(answer.headers), model_id="m")
        assert isinstance(mapped, kind)
        assert mapped.retry_after == retry_after
        told = json.loads(body)["error"]
        assert told == (
            str(error) if isinstance(error, NereidError) else "internal error; the server's log has the details"
        )

    run(scenario)


@pytest.mark.parametrize("path", ["m/load", "m/unload", "m/pin", "m/unpin", "refresh", "upload"])
def test_models_are_changed_only_where_the_settings_let_callers(run: Callable[..., None], path: str) -> None:
    async def scenario(_world: World, client: ClientSession) -> None:
        data = form() if path == "upload" else None
        async with client.post(f"/v1/models/{path}", data=data) as answer:
            assert answer.status == 501
            assert "server.allow_model_control" in (await answer.json())["error"]

    run(scenario, allow_model_control=False)


def test_a_server_of_listed_models_takes_no_others(run: Callable[..., None]) -> None:
    async def scenario(world: World, client: ClientSession) -> None:
        world.others = None
        async with client.post("/v1/models/upload", data=form()) as answer:
            assert answer.status == 501
        assert world.adopted == []

    run(scenario)


def test_a_server_that_is_not_ready_says_so(run: Callable[..., None]) -> None:
    async def scenario(world: World, client: ClientSession) -> None:
        for world.is_there, status in ((True, 200), (False, 503)):
            async with client.get("/health/ready") as answer:
                assert (answer.status, (await answer.json())["status"] == "ready") == (status, world.is_there)
        async with client.get("/health/live") as answer:
            assert (answer.status, await answer.json()) == (200, {"status": "live"})

    run(scenario)


def test_of_uploads_that_come_at_once_some_are_asked_to_come_later(run: Callable[..., None]) -> None:
    async def scenario(world: World, client: ClientSession) -> None:
        world.gate.clear()
        first = [asyncio.create_task(client.post("/v1/models/upload", data=form(f"up{n}"))) for n in range(2)]
        await until(lambda: world.adopting == 2)
        async with client.post("/v1/models/upload", data=form()) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
        world.gate.set()
        assert [(await each).status for each in first] == [200, 200]
        async with client.post("/v1/models/upload", data=form()) as answer:
            assert answer.status == 200
        assert [content for _, content in world.adopted] == [b"DATA"] * 3

    run(scenario)


def test_an_upload_whose_client_has_gone_is_taken_or_refused_as_a_whole(
    run: Callable[..., None], tmp_path: Path
) -> None:
    async def scenario(world: World, client: ClientSession) -> None:
        world.gate.clear()
        call = asyncio.create_task(client.post("/v1/models/upload", data=form()))
        await until(lambda: world.adopting == 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        world.gate.set()
        await until(lambda: bool(world.adopted))
        assert world.adopted[0][1] == b"DATA"  # its file was there to the end
        await until(lambda: [path.name for path in (tmp_path / FOLDER).iterdir()] == ["models.json"])

    run(scenario)


def test_a_disk_that_fails_is_not_the_caller_s_mistake(run: Callable[..., None]) -> None:
    async def scenario(world: World, client: ClientSession) -> None:
        world.fail = RepositoryError("model 'up' cannot be put in place (No space left on device)")
        async with client.post("/v1/models/upload", data=form()) as answer:
            assert (answer.status, (await answer.json())["error"]) == (500, str(world.fail))

    run(scenario)


def test_a_broken_file_is_the_caller_s_mistake_and_shows_no_path(run: Callable[..., None], tmp_path: Path) -> None:
    async def scenario(world: World, client: ClientSession) -> None:
        world.fail = BundleError(f"cannot load {tmp_path}/{FOLDER}/upload-x/up.onnx: it is broken")
        async with client.post("/v1/models/upload", data=form()) as answer:
            text = (await answer.json())["error"]
            assert (answer.status, text) == (400, "the file cannot be served: cannot load up.onnx: it is broken")
        assert [*(tmp_path / FOLDER).iterdir()] == []

    run(scenario)


def test_a_pin_of_an_uploaded_model_is_remembered_for_the_next_start(run: Callable[..., None], tmp_path: Path) -> None:
    async def scenario(world: World, client: ClientSession) -> None:
        async def asked(order: str) -> int:
            async with client.post(f"/v1/models/m/{order}") as answer:
                return answer.status

        assert await asked("pin") == 200
        assert uploaded.entries(tmp_path) == []  # the settings say what is pinned of other models
        (tmp_path / "m.onnx").touch()
        options = ModelOptions(path="m.onnx", description="mine")
        uploaded.remember(tmp_path, ModelSettings(name="m", device="cpu", queue_capacity=1, options=options))
        for order, fail, pinned in (
            ("pin", None, True),
            ("unpin", None, False),
            ("pin", ResourceExhausted("no"), False),
        ):
            world.fail = fail
            assert await asked(order) == (200 if fail is None else 503)
            (model,) = uploaded.entries(tmp_path)
            assert model.options == options.model_copy(update={"pinned": pinned})

    run(scenario)


def test_an_upload_in_the_place_of_a_pinned_model_is_pinned(run: Callable[..., None]) -> None:
    async def scenario(world: World, client: ClientSession) -> None:
        world.pinned = {"m"}
        for fields in ({}, {"pinned": "false"}):
            data = form("m")
            data.add_fields(("overwrite", "true"), *fields.items())
            async with client.post("/v1/models/upload", data=data) as answer:
                assert answer.status == 200
        assert [model.options.pinned for model, _ in world.adopted] == [True, False]

    run(scenario)


def test_an_upload_that_cannot_be_pinned_is_there_and_says_so(run: Callable[..., None]) -> None:
    async def scenario(world: World, client: ClientSession) -> None:
        world.fail_to_pin = ResourceExhausted("all models are busy", 5)
        data = form()
        data.add_field("pinned", "true")
        async with client.post("/v1/models/upload", data=data) as answer:
            assert (answer.status, (await answer.json())["pinned"]) == (200, False)
        assert [model.name for model, _ in world.adopted] == ["up"]

    run(scenario)


def told_by_aiohttp(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.exc_info is not None]


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br"])
def test_a_body_in_a_coding_that_it_is_not_in_costs_no_line_of_the_log(
    run: Callable[..., None], caplog: pytest.LogCaptureFixture, coding: str
) -> None:
    async def scenario(world: World, client: ClientSession) -> None:
        headers = {"Content-Encoding": coding}
        async with client.get("/health/live", data=b"junk", headers=headers) as answer:
            assert answer.status == 200
        for path in ("upload", "m/infer"):
            kind = {"Content-Type": "multipart/form-data; boundary=b"}
            async with client.post(f"/v1/models/{path}", data=b"junk", headers={**headers, **kind}) as answer:
                assert (answer.status, "odin" in (await answer.json())["error"]) == (400, True)
        assert world.adopted == []

    run(scenario)
    assert told_by_aiohttp(caplog) == []


def test_a_little_body_that_becomes_much_is_cut_at_the_limit(run: Callable[..., None]) -> None:
    async def scenario(world: World, client: ClientSession) -> None:
        data, headers = gzip.compress(bytes(100 * 2**20)), {"Content-Encoding": "gzip"}
        async with client.post("/v1/models/m/infer", data=data, headers=headers) as answer:
            assert (answer.status, "max_message_bytes" in (await answer.json())["error"]) == (413, True)
        async with client.post("/v1/models/m/infer", data=gzip.compress(b"{}"), headers=headers) as answer:
            assert "inputs" in (await answer.json())["error"]
        assert world.budget.used_bytes == 0

    run(scenario)


@pytest.mark.parametrize("server", [rest, http])
def test_a_body_that_is_not_http_s_is_the_caller_s_mistake(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    """As aiohttp's parser in Python tells it; the one in C answers by itself."""
    error = web.RequestPayloadError("b'ZZ' is no size of a chunk")

    async def reads(_request: Any) -> Any:
        raise error

    answer = asyncio.run(server._errors_told(SimpleNamespace(match_info={}), reads))
    assert (answer.status, json.loads(answer.text)) == (400, {"error": http.NO_BODY})
    server._LOG.error("unhandled", exc_info=error)
    assert told_by_aiohttp(caplog) == []
