import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession, web

from native_service.http_endpoints import HttpEndpoints
from native_service.settings import Address
from nereid_backend.errors import SettingsError

LOOPBACK = Address("127.0.0.1", 0)


@asynccontextmanager
async def endpoints(ready: bool = True) -> AsyncIterator[tuple[Address, web.AppRunner]]:
    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(text="nv_inference_count 3\n")

    application = web.Application()
    application.add_routes([web.get("/metrics", metrics)])
    triton = web.AppRunner(application)
    await triton.setup()
    await web.TCPSite(triton, "127.0.0.1", 0).start()

    async def is_ready() -> bool:
        return ready

    port = triton.addresses[0][1]
    served = HttpEndpoints(LOOPBACK, models=["m"], is_ready=is_ready, metrics=f"127.0.0.1:{port}")
    yield await served.start(), triton
    await served.stop()
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
        ("/v2/models/m/infer", True, 404),
    ],
)
def test_each_path_has_its_status(path: str, ready: bool, status: int) -> None:
    async def scenario() -> None:
        async with (
            endpoints(ready) as (address, _),
            ClientSession() as session,
            session.get(f"http://{address}{path}") as answer,
        ):
            assert answer.status == status

    asyncio.run(scenario())


def test_metrics_are_triton_s() -> None:
    async def scenario() -> None:
        async with endpoints() as (address, triton), ClientSession() as session:
            async with session.get(f"http://{address}/metrics") as answer:
                assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
                assert await answer.text() == "nv_inference_count 3\n"
            await triton.cleanup()
            async with session.get(f"http://{address}/metrics") as answer:
                assert answer.status == 503

    asyncio.run(scenario())


def test_a_port_somebody_has_is_one_message() -> None:
    async def scenario() -> None:
        async with endpoints() as (address, _):
            second = HttpEndpoints(address, models=[], is_ready=lambda: asyncio.sleep(0, True), metrics="127.0.0.1:1")
            with pytest.raises(SettingsError, match=r"server.http_addr 127.0.0.1:\d+ cannot be bound"):
                await second.start()

    asyncio.run(scenario())
