"""A fake Triton that answers ModelInfer in this process, and the native server in front of it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from native_service.nereid_grpc import NativeServer, NereidService, ServedModel
from native_service.permits import Permits
from native_service.settings import Address, Limits
from nereid_backend.spec import ModelSpec, TensorSpec

Answer = Callable[[Any, Any], Awaitable[Any]]


def model_spec(
    name: str = "adder",
    *,
    dims: tuple[int, ...] = (16,),
    max_batch_size: int = 10,
    dtype: str = "f32",
    inputs: int = 1,
    outputs: int = 1,
) -> ModelSpec:
    """A model with ``inputs`` and ``outputs`` tensors of ``dims`` behind a batch axis when it takes batches."""
    shape = (-1, *dims) if max_batch_size else dims
    axis = 0 if max_batch_size else None

    def tensors(word: str, count: int) -> tuple[TensorSpec, ...]:
        names = [word] if count == 1 else [f"{word}{index}" for index in range(count)]
        return tuple(TensorSpec(n, dtype, shape, axis) for n in names)

    return ModelSpec(
        name, "fake", "fake", tensors("input", inputs), tensors("output", outputs), (), max_batch_size=max_batch_size
    )


class FakeTriton:
    """Adds 1 to float32 inputs, once per output; ``behave`` replaces that. Keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.deadlines: list[float | None] = []
        self.cancelled = 0
        self.outputs: tuple[str, ...] = ("output",)
        self.behave: Answer | None = None
        self.entered = asyncio.Event()

    async def infer(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        self.deadlines.append(context.time_remaining())
        self.entered.set()
        try:
            return await (self.behave or self._add_one)(request, context)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _add_one(self, request: Any, _context: Any) -> Any:
        response = service_pb2.ModelInferResponse(model_name=request.model_name)
        # Triton gives outputs in no promised order: the fake turns it round.
        for index, name in reversed(list(enumerate(self.outputs))):
            values = np.zeros(1, "<f4")
            shape = [1]
            if request.inputs:
                values = np.frombuffer(request.raw_input_contents[0], "<f4") + 1 + index
                shape = list(request.inputs[0].shape)
            response.outputs.add(name=name, datatype="FP32", shape=shape)
            response.raw_output_contents.append(values.astype("<f4").tobytes())
        return response

    async def never(self, _request: Any, _context: Any) -> Any:
        await asyncio.sleep(3600)

    def fail(self, code: grpc.StatusCode, text: str) -> Answer:
        async def answer(_request: Any, context: Any) -> Any:
            await context.abort(code, text)

        return answer


class Service:
    """The running pair, and a channel to its front."""

    def __init__(
        self, triton: FakeTriton, native: NativeServer, address: Address, channel: Any, models: list[ServedModel]
    ) -> None:
        self.triton = triton
        self.native = native
        self.address = address
        self.channel = channel
        self.models = {model.spec.name: model for model in models}


@asynccontextmanager
async def running(*specs: ModelSpec, capacity: int = 2, limits: Limits | None = None) -> AsyncIterator[Service]:
    limits = limits or Limits()
    triton = FakeTriton()
    back = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(
        triton.infer,
        service_pb2.ModelInferRequest.FromString,
        service_pb2.ModelInferResponse.SerializeToString,
    )
    service_name = "inference.GRPCInferenceService"
    back.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service_name, {"ModelInfer": handler}),))
    port = back.add_insecure_port("127.0.0.1:0")
    await back.start()
    models = [ServedModel(spec, Permits(capacity)) for spec in specs]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as to_triton:
        native = NativeServer(
            NereidService(models, to_triton, limits), [spec.name for spec in specs], Address("127.0.0.1", 0), limits
        )
        address = await native.start()
        await native.set_serving(True)
        try:
            async with grpc.aio.insecure_channel(str(address)) as channel:
                yield Service(triton, native, address, channel, models)
        finally:
            await native.stop(0)
            await back.stop(0)


@pytest.fixture
def serving() -> Callable[..., Any]:
    return running


@pytest.fixture
def spec() -> Callable[..., ModelSpec]:
    return model_spec


@pytest.fixture
def tritonserver(tmp_path: Path) -> Path:
    """A program that behaves like tritonserver where the supervisor looks; see fake_tritonserver.py."""
    program = tmp_path / "fake" / "bin" / "tritonserver"
    program.parent.mkdir(parents=True)
    source = Path(__file__).with_name("fake_tritonserver.py").read_text()
    program.write_text(f"#!{sys.executable}\n{source}")
    program.chmod(0o755)
    return program
