"""The regions of clients before a Triton that only keeps what it was asked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.shared_memory import SharedMemory as Object
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from native_service.kserve.shared_memory import SharedMemory
from nereid_backend.errors import NotFound, OverLimit
from nereid_backend.spec import ModelSpec

Spec = Callable[..., ModelSpec]


class Triton:
    """A channel to it. ``uses`` is how often it will still find a region in use, ``pause_s`` what an answer takes."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.uses = 0
        self.pause_s = 0.0

    def unary_unary(self, method: str, **_: Any) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, metadata: Any) -> None:
            assert metadata == (("key", "secret"),)
            verb = method.rpartition("/")[2].removeprefix("SystemSharedMemory")
            if verb == "Unregister" and self.uses:
                self.uses -= 1
                raise in_use(request.name)
            self.asked.append((verb, request.name))
            await asyncio.sleep(self.pause_s)

        return call


def in_use(region: str) -> grpc.aio.AioRpcError:
    text = f"Cannot unregister shared memory region '{region}', it is currently in use."
    return grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), text)


@pytest.fixture
def key() -> Iterator[str]:
    memory = Object(name=f"test-{os.getpid()}-object", create=True, size=4096)
    yield f"/{memory.name}"
    memory.close()
    memory.unlink()


def request_in(region: str) -> Any:
    request = pb.ModelInferRequest(model_name="adder")
    tensor = request.inputs.add(name="input", datatype="FP32", shape=[1, 16])
    tensor.parameters["shared_memory_region"].string_param = region
    tensor.parameters["shared_memory_byte_size"].int64_param = 64
    return request


def test_a_region_goes_after_its_last_call_and_no_new_one_may_use_it_until_then(spec: Spec, key: str) -> None:
    async def scenario() -> None:
        triton = Triton()
        memory = SharedMemory(triton, (("key", "secret"),))
        await memory.register(pb.SystemSharedMemoryRegisterRequest(name="r", key=key, byte_size=4096), None)
        memory.check(request_in("r"), spec())
        triton.uses = 1_000_000
        forgetting = [
            asyncio.create_task(memory.unregister(pb.SystemSharedMemoryUnregisterRequest(name=name), None))
            for name in ("r", "")
        ]
        await asyncio.sleep(0.05)
        assert triton.asked == [("Register", "r")]
        with pytest.raises(NotFound, match="no region 'r' is registered"):
            memory.check(request_in("r"), spec())
        triton.uses = 0
        await asyncio.gather(*forgetting)
        assert {*triton.asked} == {("Register", "r"), ("Unregister", "r")}
        with pytest.raises(NotFound):
            memory.check(request_in("r"), spec())

    asyncio.run(scenario())


def test_whoever_stops_waiting_for_a_region_leaves_it_registered(spec: Spec, key: str) -> None:
    async def scenario() -> None:
        triton = Triton()
        memory = SharedMemory(triton, (("key", "secret"),))
        await memory.register(pb.SystemSharedMemoryRegisterRequest(name="r", key=key, byte_size=4096), None)
        triton.uses = 1_000_000
        forgetting = memory.unregister(pb.SystemSharedMemoryUnregisterRequest(name="r"), None)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(forgetting, 0.05)
        memory.check(request_in("r"), spec())
        assert triton.asked == [("Register", "r")]

    asyncio.run(scenario())


def test_a_region_whose_caller_goes_before_the_answer_is_known_all_the_same(spec: Spec, key: str) -> None:
    async def scenario() -> None:
        triton = Triton()
        triton.pause_s = 0.1
        memory = SharedMemory(triton, (("key", "secret"),))
        register = memory.register(pb.SystemSharedMemoryRegisterRequest(name="r", key=key, byte_size=4096), None)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(register, 0.02)
        await asyncio.sleep(0.3)
        memory.check(request_in("r"), spec())
        await memory.unregister(pb.SystemSharedMemoryUnregisterRequest(), None)
        assert triton.asked == [("Register", "r"), ("Unregister", "r")]

    asyncio.run(scenario())


def test_a_call_that_never_ends_on_an_abandoned_region_keeps_nobody_from_registering(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr("native_service.kserve.shared_memory._MOST_REGIONS", 1)
        triton = Triton()
        memory = SharedMemory(triton, (("key", "secret"),))
        gone = Object(name=f"test-{os.getpid()}-gone", create=True, size=4096)
        asked = pb.SystemSharedMemoryRegisterRequest(name="r", key=f"/{gone.name}", byte_size=4096)
        await memory.register(asked, None)
        gone.close()
        gone.unlink()
        triton.uses = 1_000_000
        other = pb.SystemSharedMemoryRegisterRequest(name="other", key=key, byte_size=4096)
        async with asyncio.timeout(10):
            with pytest.raises(OverLimit, match="1 regions are registered"):
                await memory.register(other, None)
            triton.uses = 0
            await memory.register(other, None)

    asyncio.run(scenario())
