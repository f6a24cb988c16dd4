import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType

import pytest
from aiohttp import ClientSession, UnixConnector, web

from native_service.edge.http_endpoints import HttpEndpoints, Metrics
from native_service.envoy.settings import Admitted
from native_service.telemetry.calls import Calls
from native_service.telemetry.exposition import Counted, Loads
from native_service.telemetry.metrics import Failed
from nereid_backend.spec import ModelSpec


def admitted(name: str, **how: bool) -> Admitted:
    return Admitted(ModelSpec(name, "fake", "fake", (), (), ()), 1, **how)


MODELS = {"m": admitted("m"), "away": admitted("away", away=True, required=False)}
LACKING = {**MODELS, "needed": admitted("needed", away=True)}
METRICS = """\
# TYPE nv_inference_request_failure counter
nv_inference_request_failure{model="m",reason="OTHER",version="1"} 3
nv_inference_request_failure{model="m",reason="REJECTED",version="1"} 1
nv_inference_request_failure{model="mm",reason="REJECTED",version="1"} 0
nv_inference_count{model="m",version="1"} 7
"""


@asynccontextmanager
async def endpoints(
    ready: bool | None = True, models: Mapping[str, Admitted] = MappingProxyType(MODELS)
) -> AsyncIterator[tuple[str, ClientSession, web.AppRunner]]:
    """The socket, a session that goes through it, and the Triton behind."""

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    application = web.Application()
    application.add_routes([web.get("/metrics", metrics)])
    triton = web.AppRunner(application)
    await triton.setup()
    await web.TCPSite(triton, "127.0.0.1", 0).start()

    async def is_ready() -> bool:
        if ready is None:
            raise ZeroDivisionError
        return ready

    async def counted() -> Counted:
        return Counted(Failed({("m", 8): 2}, {}), {("m", 3): 5}, {"m": 1}, 2, 7, {}, Calls(), 0, 100)

    metrics_address = f"127.0.0.1:{triton.addresses[0][1]}"
    with tempfile.TemporaryDirectory() as folder:
        socket = f"{folder}/http.sock"
        metrics_shown = Metrics(
            metrics_address,
            models=models,
            counted=counted,
            loads=lambda: Loads({}, {"m": 1.5}, {"m": 0, "away": 3}),
            more=lambda triton: f"series {len(triton.splitlines())}\n",
        )
        served = HttpEndpoints(socket, models=models, is_answering=is_ready, metrics=metrics_shown)
        await metrics_shown.start()
        await served.start()
        async with ClientSession("http://nereid", connector=UnixConnector(socket)) as session:
            yield socket, session, triton
        await served.stop()
        await metrics_shown.stop()
        await triton.cleanup()


@pytest.mark.parametrize(
    ("path", "ready", "status"),
    [
        ("/v2/health/live", True, 200),
        ("/v2/health/live", False, 200),
        ("/v2/health/ready", True, 200),
        ("/v2/health/ready", False, 400),
        ("/v2/models/m/ready", True, 200),
        ("/v2/models/m/ready", False, 400),
        ("/v2/models/m/versions/1/ready", True, 200),
        ("/v2/models/m/versions/2/ready", True, 400),
        ("/v2/models/x/ready", True, 400),
        ("/v2/models/away/ready", True, 400),
        ("/v2/models/m/infer", True, 404),
    ],
)
def test_each_path_has_its_status(path: str, ready: bool, status: int) -> None:
    async def scenario() -> None:
        async with endpoints(ready) as (_, session, _), session.get(path) as answer:
            assert answer.status == status

    asyncio.run(scenario())


def test_a_body_that_is_not_in_its_coding_is_not_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with endpoints() as (_, session, _):
            headers = {"Content-Encoding": "gzip"}
            async with session.get("/v2/health/live", data=b"junk", headers=headers) as answer:
                assert answer.status == 200

    asyncio.run(scenario())
    assert [record for record in caplog.records if record.exc_info is not None] == []


def test_a_required_model_that_is_away_takes_the_server_out_of_service_and_no_other_model() -> None:
    async def scenario() -> None:
        async with endpoints(models=LACKING) as (_, session, _):
            statuses = {}
            for path in ("health", "models/m", "models/needed"):
                async with session.get(f"/v2/{path}/ready") as answer:
                    statuses[path] = answer.status
            assert statuses == {"health": 400, "models/m": 200, "models/needed": 400}

    asyncio.run(scenario())


def test_metrics_are_triton_s_with_the_refusals_of_envoy() -> None:
    async def scenario() -> None:
        async with endpoints() as (_, session, triton):
            async with session.get("/metrics") as answer:
                assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
                expected = METRICS.replace('m",reason="REJECTED",version="1"} 1', 'm",reason="REJECTED",version="1"} 3')
                text = await answer.text()
                assert text.startswith(expected)
                assert 'nereid_model_restarts_total{model="away"} 3.0\n' in text
                assert text.endswith(f"\nseries {len(METRICS.splitlines())}\n")
            await triton.cleanup()
            async with session.get("/metrics") as answer:
                assert answer.status == 503

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "data", [b"GET /metrics HTTP/1.1\r\n\r\n", b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\n", b"\x16\x03\x01"]
)
def test_what_is_no_http_leaves_no_trace_in_the_log(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with endpoints() as (socket, _, _):
            reader, writer = await asyncio.open_unix_connection(socket)
            writer.write(data)
            assert (await reader.readline()).split()[1] == b"400"
            writer.close()

    asyncio.run(scenario())
    assert caplog.records == []


def test_a_question_that_fails_in_our_code_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with endpoints(ready=None) as (_, session, _), session.get("/v2/health/ready") as answer:
            assert answer.status == 500

    asyncio.run(scenario())
    assert "ZeroDivisionError" in caplog.text
