"""KServe v2 over HTTP through Envoy before a fake Triton: permits, limits, what goes wrong."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest

from native_service.access import roles
from native_service.access.credentials import Credentials
from native_service.edge import half_sent
from native_service.envoy.access import Access
from native_service.envoy.scripts import KSERVE
from native_service.kserve.http import ROUTES
from native_service.proto import inference_pb2 as pb
from native_service.settings import Limits
from nereid_backend.spec import ModelSpec

# The client of the tests may stand still while it sends.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")

Fronting = Callable[..., Any]
Spec = Callable[..., ModelSpec]

ROW = np.arange(16, dtype=np.float32)
MIB = 1024 * 1024
INFER = "/v2/models/adder/infer"


def body(array: np.ndarray = ROW[None], **more: Any) -> dict[str, Any]:
    tensor = {"name": "input", "shape": [*array.shape], "datatype": "FP32", "data": array.tolist()}
    return {"inputs": [tensor], **more}


def binary(array: np.ndarray = ROW[None]) -> dict[str, Any]:
    """``data`` and ``headers`` of a request whose tensor follows the JSON."""
    tensor = {"name": "input", "shape": [*array.shape], "datatype": "FP32"}
    tensor["parameters"] = {"binary_data_size": array.nbytes}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return {"data": head + array.tobytes(), "headers": {"Inference-Header-Content-Length": str(len(head))}}


@asynccontextmanager
async def session(service: Any) -> Any:
    async with aiohttp.ClientSession(
        service.http, auto_decompress=False, skip_auto_headers=["Accept-Encoding"]
    ) as client:
        yield client


async def refused(client: Any, path: str = INFER, **request: Any) -> tuple[int, str]:
    """The status and the text of a request that fails."""
    async with client.post(path, **request) as answer:
        raw = await answer.json()
        assert raw.keys() == {"error"}
        return answer.status, raw["error"]


async def outputs(client: Any, path: str = INFER, **request: Any) -> Any:
    async with client.post(path, **request) as answer:
        assert answer.status == 200, await answer.text()
        return (await answer.json())["outputs"]


def told(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """What the log says of each call that failed."""
    return [record.__dict__["fields"] for record in caplog.records if record.name == "nereid.calls"]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.01)


def test_http_and_grpc_share_the_permits_of_a_model(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec(), capacity=2) as service, session(service) as client:
            service.triton.behave = service.triton.never
            waiting = [asyncio.create_task(client.post(INFER, json=body())) for _ in range(2)]
            await until(lambda: permits_are(service, 2))
            async with client.post(INFER, json=body()) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
                assert await answer.json() == {"error": "model queue full, retry later"}
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await service.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(b"\x0a\x05adder")
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            # The connections of those that went are closed: their permits come back, and the model may skip them.
            await until(lambda: permits_are(service, 0))
            assert service.triton.cancelled == 2
            service.triton.behave = None
            assert (await outputs(client, json=body()))[0]["data"] == (ROW + 1).tolist()
            assert (await service.failures())["adder", "REJECTED"] == 2

    asyncio.run(scenario())


async def permits_are(service: Any, count: int) -> bool:
    return await service.permits_in_use() == count


def test_tensors_travel_as_json_or_as_bytes_and_the_batch_may_be_left_out(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec()) as service, session(service) as client:
            expected = {"name": "output", "datatype": "FP32", "shape": [1, 16], "data": (ROW + 1).tolist()}
            assert await outputs(client, json=body()) == [expected]
            assert await outputs(client, "/v2/models/adder/versions/1/infer", json=body(ROW)) == [expected]
            async with client.post(INFER, **binary()) as answer:
                length = int(answer.headers["Inference-Header-Content-Length"])
                raw = await answer.read()
            assert json.loads(raw[:length])["outputs"][0]["parameters"] == {"binary_data_size": 64}
            assert raw[length:] == (ROW + 1).tobytes()

    asyncio.run(scenario())


def test_parameters_and_the_id_reach_triton_and_come_back(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec()) as service, session(service) as client:
            more = {"id": "the id", "parameters": {"priority": 1, "name": "x", "flag": True, "share": 0.5}}
            await outputs(client, json=body(**more))
            [request] = service.triton.requests
            assert request.id == "the id"
            assert {name: str(value).strip() for name, value in request.parameters.items()} == {
                "priority": "int64_param: 1",
                "name": 'string_param: "x"',
                "flag": "bool_param: true",
                "share": "double_param: 0.5",
            }

    asyncio.run(scenario())


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_bodies_may_be_compressed_both_ways(
    fronting: Fronting, spec: Spec, coding: str, pack: Callable[[bytes], bytes]
) -> None:
    async def scenario() -> None:
        async with fronting(spec(dims=(-1,))) as service, session(service) as client:
            array = np.arange(MIB, dtype=np.float32)[None]
            request = binary(array)
            request["data"] = pack(request["data"])
            request["headers"] |= {"Content-Encoding": coding, "Accept-Encoding": coding}
            async with client.post(INFER, **request) as answer:
                assert answer.headers["Content-Encoding"] == coding
                raw = zlib.decompress(await answer.read(), 47)
            length = int(answer.headers["Inference-Header-Content-Length"])
            assert raw[length:] == (array + 1).tobytes()
            async with client.post(INFER, json=body(), headers={"Accept-Encoding": f"{coding};q=0, br"}) as answer:
                assert "Content-Encoding" not in answer.headers

    asyncio.run(scenario())


def test_what_is_over_a_limit_is_refused_by_its_name(
    fronting: Fronting, spec: Spec, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        limits = Limits(max_request_bytes=4 * MIB, max_message_bytes=MIB)
        async with fronting(spec(dims=(-1,)), limits=limits) as service, session(service) as client:
            fits = np.zeros((1, MIB - 1024), np.float32)
            async with client.post(INFER, **binary(fits)) as answer:
                assert answer.status == 200
            over = "the request is over the limit of this server, 4194304 bytes (server.limits.max_request_bytes)"
            status, text = await refused(client, **binary(np.zeros((1, MIB), np.float32)))
            assert (status, text) == (413, f"{over}; send less at once")
            request = binary(np.zeros((1, 64 * MIB), np.float32))
            request["data"] = zlib.compress(request["data"])
            request["headers"]["Content-Encoding"] = "deflate"
            assert len(request["data"]) < MIB
            status, text = await refused(client, **request)
            assert (status, text) == (413, f"{over}; send less at once")
            status, text = await refused(client, json=body(np.zeros((1, MIB // 2), np.float32)))
            assert (status, "(server.limits.max_message_bytes); send tensors as binary data" in text) == (413, True)
            request = binary(np.zeros((1, MIB // 2), np.float32))
            request["data"] = request["data"].replace(b"binary_data_output", b"binary_data_otherw")
            status, text = await refused(client, **request)
            assert (status, "too large for JSON" in text) == (413, True)
            assert await outputs(client, json=body())
            assert [fields["code"] for fields in told(caplog)] == ["RESOURCE_EXHAUSTED"] * 4

    asyncio.run(scenario())


def test_who_holds_a_part_of_the_budget_and_sends_nothing_makes_room_for_others(
    fronting: Fronting, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_sent, "_CROWDED_PATIENCE_S", 0.5)

    async def stalling() -> Any:
        for _ in range(5):
            yield bytes(MIB)
        await asyncio.sleep(60)

    async def uploading() -> Any:
        yield pb.CheckpointRequest(meta=pb.CheckpointMeta(model_name="adder"))
        async for data in stalling():
            yield pb.CheckpointRequest(chunk=pb.TensorChunk(shape=[1, 2 * MIB], data=data))

    async def scenario() -> None:
        limits = Limits(max_buffered_bytes=9 * MIB)
        async with fronting(spec(dims=(2 * MIB,)), limits=limits) as service, session(service) as client:
            idle = service.channel.stream_stream(f"/{KSERVE}/ModelStreamInfer")()
            await idle.wait_for_connection()
            assert (await refused(client, data=stalling()))[0] == 429
            checkpoint = service.channel.stream_stream(
                "/inference.Nereid/Checkpoint", pb.CheckpointRequest.SerializeToString
            )
            assert await checkpoint(uploading()).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (await service.front.counted()).buffered_bytes == 0
            assert not idle.done()
            idle.cancel()

    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(bounded())


def test_all_requests_together_hold_a_bounded_number_of_bytes(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        limits = Limits(max_buffered_bytes=3 * MIB)
        async with fronting(spec(dims=(-1,)), capacity=8, limits=limits) as service, session(service) as client:
            service.triton.behave = service.triton.never
            large = binary(np.zeros((1, MIB // 2), np.float32))
            waiting = asyncio.create_task(client.post(INFER, **large))
            await until(lambda: permits_are(service, 1))
            async with client.post(INFER, **large) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
                assert "(server.limits.max_buffered_bytes)" in (await answer.json())["error"]
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await until(lambda: permits_are(service, 0))
            service.triton.behave = None

            async def fits() -> bool:
                async with client.post(INFER, **binary(np.zeros((1, MIB // 4), np.float32))) as answer:
                    return answer.status == 200

            await until(fits)  # its bytes are given back a little after its permit

    asyncio.run(scenario())


TENSOR = {"name": "input", "shape": [1, 16], "datatype": "FP32"}
BAD = {
    "no JSON": (b'{"inputs": [', "is not JSON"),
    "a list": (b"[]", "must be a JSON object"),
    "nested without end": (b'{"inputs": ' + b"[" * 100_000, "is not JSON"),
    "a number of many digits": (b'{"id": ' + b"1" * 10_000 + b"}", "is not JSON"),
    "no UTF-8": (b'{"id": "\xff"}', "is not JSON"),
    "a lone surrogate": (b'{"id": "\\ud800"}', "id is missing or of a wrong type"),
    "inputs no list": ({"inputs": {}}, "inputs must be a list"),
    "no name": ({"inputs": [{}]}, "name is missing"),
    "no shape": ({"inputs": [{"name": "input", "datatype": "FP32"}]}, "shape must be a list"),
    "a shape of words": ({"inputs": [{**TENSOR, "shape": ["1", 16], "data": []}]}, "shape must be a list"),
    "a size past 64 bits": ({"inputs": [{**TENSOR, "shape": [2**64], "data": []}]}, "shape must be a list"),
    "sizes past 64 bits": ({"inputs": [{**TENSOR, "shape": [2**40, 2**40], "data": []}]}, "takes another number"),
    "a million sizes": ({"inputs": [{**TENSOR, "shape": [9] * 1_000_000, "data": []}]}, "takes another number"),
    "no values": ({"inputs": [TENSOR]}, "in exactly one of data, binary_data_size and shared_memory_region"),
    "too few values": ({"inputs": [{**TENSOR, "data": [1.0] * 15}]}, "has 15 values"),
    "ragged values": ({"inputs": [{**TENSOR, "data": [[1.0] * 15, 1.0]}]}, "mixes lists and values"),
    "words": ({"inputs": [{**TENSOR, "data": ["1"] * 16}]}, "does not take values of the kinds ['str']"),
    "an unknown type": ({"inputs": [{**TENSOR, "datatype": "FP7", "data": [1.0] * 16}]}, "unknown KServe datatype"),
    "too large for its type": ({"inputs": [{**TENSOR, "datatype": "INT8", "data": [128] * 16}]}, "INT8 cannot hold"),
    "bytes that are not there": (
        {"inputs": [{**TENSOR, "parameters": {"binary_data_size": 64}}]},
        "binary_data_size is 64, 0 bytes are left",
    ),
    "a parameter that is a list": (body(parameters={"x": []}), "parameter 'x' has a value that cannot be sent"),
    "no rows": (body(np.zeros((0, 16), np.float32)), "has no rows; send at least one"),
    "a very long name": (body(id="x" * 20_000), "bytes of names, shapes, ids and parameters"),
}


def test_bad_requests_are_told_what_is_wrong_and_harm_nobody(
    fronting: Fronting, spec: Spec, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with fronting(spec()) as service, session(service) as client:
            for what, (sent, said) in BAD.items():
                status, text = await refused(client, data=sent if isinstance(sent, bytes) else json.dumps(sent))
                assert (status, said in text) == (400, True), (what, text)
            for length in ("x", "-1", "99", "1" * 400, "²"):
                header = {"Inference-Header-Content-Length": length}
                status, text = await refused(client, data=b"{}", headers=header)
                assert (status, "Content-Length is" in text) == (400, True), text
            for coding, data in (("br", b"x"), ("gzip", b"x"), ("gzip", gzip.compress(b"{}")[:-9])):
                assert (await refused(client, data=data, headers={"Content-Encoding": coding}))[0] == 400
            doubled = gzip.compress(b"{}") * 2
            assert (await refused(client, data=doubled, headers={"Content-Encoding": "gzip"}))[0] == 400
            assert not service.triton.requests
            assert await outputs(client, json=body())
            assert (await service.failures())["adder", "OTHER"] == len(BAD) + 9
            lines = told(caplog)
            assert {(its["model"], its["surface"], its["code"]) for its in lines} == {
                ("adder", "assisted", "INVALID_ARGUMENT")
            }
            assert len({its["request_id"] for its in lines}) == len(lines) == len(BAD) + 9

    asyncio.run(scenario())


def test_random_bytes_are_answered_or_closed_and_the_next_client_is_served(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        chance = random.Random(1)
        async with fronting(spec()) as service, session(service) as client:
            address = service.front.http_infer
            for _ in range(50):
                reader, writer = await asyncio.open_connection(address.host, address.port)
                head = chance.choice([b"", b"POST /v2/models/adder/infer HTTP/1.1\r\nHost: x\r\n", b"GET /v2"])
                with suppress(ConnectionError):
                    writer.write(head + chance.randbytes(200))
                    writer.write_eof()
                    async with asyncio.timeout(10):
                        await reader.read()
                writer.close()
            assert await outputs(client, json=body())

    asyncio.run(scenario())


def test_each_path_needs_the_role_of_the_call_that_it_means() -> None:
    for (verb, path), method in ROUTES.items():
        named = re.sub(r"{\w+}", "NAME", path)
        role = roles.HTTP.get(roles.HttpCall(verb, named), roles.Role.ADMIN)
        assert role is roles.RPCS[f"/{KSERVE}/{method}"], path


def test_callers_over_http_need_a_key_with_the_role(
    fronting: Fronting, spec: Spec, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        keys = {hashlib.sha256(name.encode()).hexdigest(): role for name, role in roles.NAMES.items()}
        access = Access(credentials=Credentials(keys))
        async with fronting(spec(), access=access) as service, session(service) as client:
            for key, expected in (({}, 401), ({"x-api-key": "x"}, 401), ({"x-api-key": "read_only"}, 403)):
                for path in (INFER, "/v2//models/adder/infer", "/v2/x/../models/adder/infer?a=b"):
                    async with client.post(path, json=body(), headers=key) as answer:
                        assert answer.status == expected, path
            assert not service.triton.requests
            assert await outputs(client, json=body(), headers={"authorization": "Bearer inference"})
            async with client.get("/v2/health/ready") as answer:
                assert answer.status == 200
            async with client.post("/v2/systemsharedmemory/unregister", headers={"x-api-key": "inference"}) as answer:
                assert answer.status == 403

            async def is_told() -> bool:
                return len(told(caplog)) == 10

            await until(is_told)
            codes = Counter(its["code"] for its in told(caplog))
            assert codes == {"UNAUTHENTICATED": 6, "PERMISSION_DENIED": 4}

    asyncio.run(scenario())


def test_what_is_not_served_or_not_offered_is_told_in_json(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec()) as service, session(service) as client:
            assert (await refused(client, "/v2/models/nope/infer", json=body()))[0] == 404
            assert (await refused(client, "/v2/models/a%20b/versions/2/infer", json=body()))[0] == 404
            assert (await refused(client, "/v2/models/adder/versions/2/infer", json=body()))[0] == 404
            assert (await refused(client, "/nothing"))[0] == 404
            assert (await refused(client, "/v2/models/adder"))[0] == 405
            status, text = await refused(client, "/v2/repository/models/adder/unload")
            assert (status, "(server.allow_model_control)" in text) == (501, True)
            assert (await refused(client, "/v2/logging", data=b"{}"))[0] == 501
            service.triton.behave = service.triton.fail(grpc.StatusCode.UNAVAILABLE, "Stub is not healthy.")
            status, text = await refused(client, json=body())
            assert (status, text) == (503, "the model's process has died, retry later")

    asyncio.run(scenario())


def test_a_client_that_reads_slowly_holds_its_answer_and_no_permit(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec(dims=(-1,)), capacity=1) as service, session(service) as client:
            address = service.front.http_infer
            request = binary(np.zeros((1, 8 * MIB), np.float32))
            reader, writer = await asyncio.open_connection(address.host, address.port, limit=1024)
            [(name, length)] = request["headers"].items()
            lines = [
                f"POST {INFER} HTTP/1.1",
                "Host: x",
                f"{name}: {length}",
                f"Content-Length: {len(request['data'])}",
            ]
            writer.write("\r\n".join([*lines, "", ""]).encode() + request["data"])
            assert await reader.readexactly(12) == b"HTTP/1.1 200"
            await until(lambda: permits_are(service, 0))
            assert await outputs(client, json=body())
            writer.close()

    asyncio.run(scenario())
