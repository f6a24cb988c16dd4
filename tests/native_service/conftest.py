"""A fake Triton that answers ModelInfer in this process; our gRPC server before it, alone or behind a real Envoy."""

from __future__ import annotations

import asyncio
import mmap
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from fake_native_server import Faked
from tritonclient.grpc import service_pb2

from native_service.edge.grpc import Inference
from native_service.edge.half_sent import HalfSent
from native_service.edge.regions import Regions
from native_service.envoy import install as envoy_install
from native_service.envoy.access import OPEN, Access
from native_service.envoy.settings import Admitted
from native_service.front import Front
from native_service.kserve.grpc import KServeService
from native_service.nereid.grpc import NativeServer, NereidService
from native_service.run_directory import RunDirectory
from native_service.settings import Limits, ServerSettings
from native_service.telemetry import metrics
from native_service.telemetry.metrics import Refusals
from nereid_backend.errors import EnvoyUnavailable
from nereid_backend.spec import ModelSpec, TensorSpec

Answer = Callable[[Any, Any], Awaitable[Any]]
UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


@pytest.fixture
def faked() -> Iterator[Faked]:
    server = Faked()
    yield server
    server.stop()


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
        self.metadata: list[dict[str, Any]] = []
        self.deadlines: list[float | None] = []
        self.cancelled = 0
        self.outputs: tuple[str, ...] = ("output",)
        self.behave: Answer | None = None
        self.entered = asyncio.Event()
        self.regions: dict[str, mmap.mmap] = {}
        self.used_regions: Counter[str] = Counter()

    async def infer(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.deadlines.append(context.time_remaining())
        self.entered.set()
        named = (t.parameters["shared_memory_region"].string_param for t in (*request.inputs, *request.outputs))
        regions = [name for name in named if name]
        self.used_regions.update(regions)
        try:
            return await (self.behave or self._add_one)(request, context)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.used_regions.subtract(regions)

    async def _add_one(self, request: Any, _context: Any) -> Any:
        response = service_pb2.ModelInferResponse(model_name=request.model_name)
        # Triton gives outputs in no promised order: the fake turns it round.
        for index, name in reversed(list(enumerate(self.outputs))):
            values = np.zeros(1, "<f4")
            shape = [1]
            if request.inputs:
                values = np.frombuffer(self._input(request), "<f4") + 1 + index
                shape = list(request.inputs[0].shape)
            response.outputs.add(name=name, datatype="FP32", shape=shape)
            data = values.astype("<f4").tobytes()
            places = [o.parameters["shared_memory_region"].string_param for o in request.outputs if o.name == name]
            if any(places):
                self.regions[places[0]][: len(data)] = data
            response.raw_output_contents.append(b"" if any(places) else data)
        return response

    def _input(self, request: Any) -> bytes:
        place = request.inputs[0].parameters
        if region := place["shared_memory_region"].string_param:
            return self.regions[region][: place["shared_memory_byte_size"].int64_param]
        return bytes(request.raw_input_contents[0])

    async def never(self, _request: Any, _context: Any) -> Any:
        await asyncio.sleep(3600)

    def fail(self, code: grpc.StatusCode, text: str) -> Answer:
        async def answer(_request: Any, context: Any) -> Any:
            await context.abort(code, text)

        return answer


class FakeServer:
    """What the front asks of a TritonServer, with FakeTriton answering."""

    def __init__(self, triton: FakeTriton) -> None:
        self.triton = triton
        self.server = grpc.aio.server(options=UNLIMITED)
        self.addresses: Any = None
        self.channel: Any = None
        self.restarts = 0

    async def __aenter__(self) -> FakeServer:
        calls = {
            "ModelInfer": (self.triton.infer, service_pb2.ModelInferRequest, service_pb2.ModelInferResponse),
            "ModelReady": (self._ready, service_pb2.ModelReadyRequest, service_pb2.ModelReadyResponse),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(call, request.FromString, response.SerializeToString)
            for name, (call, request, response) in calls.items()
        }
        service = "inference.GRPCInferenceService"
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.addresses = SimpleNamespace(grpc=f"127.0.0.1:{port}")
        self.channel = grpc.aio.insecure_channel(self.addresses.grpc, options=UNLIMITED)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.server.stop(0)
        self.triton.regions.clear()

    async def is_ready(self) -> bool:
        return True

    def restart(self) -> None:
        """As if a new Triton had taken its place: it knows no region."""
        self.restarts += 1
        self.triton.regions.clear()

    async def share_memory(self, name: str, size_bytes: int) -> None:
        with Path("/dev/shm", name).open("r+b") as file:
            self.triton.regions[name] = mmap.mmap(file.fileno(), size_bytes)

    async def unshare_memory(self, name: str) -> bool:
        """Like the real one it says yes to what it does not know, and no while a request runs on it."""
        if self.triton.used_regions[name] == 0:
            self.triton.regions.pop(name, None)
        return name not in self.triton.regions

    async def _ready(self, _request: Any, _context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=True)


class Service:
    """The running pair, and a channel to its front."""

    def __init__(
        self, server: FakeServer, native: NativeServer, channel: Any, refusals: Refusals, half_sent: HalfSent
    ) -> None:
        self.half_sent = half_sent
        self.server = server
        self.triton = server.triton
        self.native = native
        self.channel = channel
        self.refusals = refusals


@asynccontextmanager
async def running(
    *specs: ModelSpec, limits: Limits | None = None, region_prefix: str | None = None
) -> AsyncIterator[Service]:
    """Our gRPC server directly before the fake Triton: no Envoy, no permits; shared memory when it has a prefix."""
    limits = limits or Limits()
    triton = FakeTriton()
    async with FakeServer(triton) as back:
        refusals = Refusals()
        inference = Inference(back.channel, refusals)
        regions = None if region_prefix is None else Regions(region_prefix, back)
        handlers = (
            NereidService(specs, inference, limits, regions=regions).handler,
            KServeService(specs, inference, back.channel, back.is_ready).handler,
        )
        native = NativeServer(handlers, [spec.name for spec in specs], limits.max_request_bytes)
        port = await native.start("127.0.0.1:0")
        native.set_serving(True)
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield Service(back, native, channel, refusals, inference.half_sent)
        finally:
            await native.stop(0)
            if regions is not None:
                await regions.close()


class Fronted:
    """The whole front with a fake Triton behind it, and a channel to the public address."""

    def __init__(self, server: FakeServer, front: Front, address: str, channel: Any, folder: Path) -> None:
        self.folder = folder
        """The run directory."""
        self.server = server
        self.triton = server.triton
        self.front = front
        self.address = address
        self.channel = channel

    @property
    def http(self) -> str:
        """Where KServe v2 over HTTP is."""
        return f"http://{self.front.http_infer}"

    async def permits_in_use(self, model: str = "adder") -> int:
        return (await self.front.admin.permits_in_use())[model]

    async def failures(self) -> dict[tuple[str, str], float]:
        """By model and reason, what would be shown where Triton has counted nothing; zeros are left out."""
        failed = (await self.front.counted()).failed
        models = {model for model, _ in (*failed.by_status, *failed.by_reason)}
        cells = [(model, reason) for model in models for reason in metrics.REASONS]
        return {cell: count for cell in cells if (count := failed.beside(*cell, 0))}


@asynccontextmanager
async def fronted(
    folder: Path,
    *specs: ModelSpec,
    capacity: int = 2,
    limits: Limits | None = None,
    bind: str = "127.0.0.1:0",
    http: str | None = None,
    access: Access = OPEN,
) -> AsyncIterator[Fronted]:
    triton = FakeTriton()
    run = RunDirectory.open(folder)
    try:
        async with FakeServer(triton) as back:
            front = Front(envoy_install.find(), run, back, access)  # type: ignore[arg-type]
            settings = ServerSettings(
                bind_addr=bind,
                http_addr=http,
                http_infer_addr="127.0.0.1:0",
                ml_backends_path=".",
                limits=limits or Limits(),
            )
            try:
                address = str(await front.start([Admitted(spec, capacity) for spec in specs], settings))
                async with grpc.aio.insecure_channel(address) as channel:
                    yield Fronted(back, front, address, channel, run.path)
            finally:
                await front.stop()
    finally:
        run.close()


class FakeFront:
    """What a catalogue asks of the front: keeps the capacity of each model it was told to serve, or refuses to.

    ``asked`` is of the last it was told, taken or not: the real one keeps a part of what it could not do.
    """

    def __init__(self) -> None:
        self.models: dict[str, int] = {}
        self.asked: dict[str, int] = {}
        self.refuses = False

    async def start(self, models: Sequence[Admitted], _server: Any, _control: Any) -> None:
        await self.set_models(models)

    async def set_models(self, models: Sequence[Admitted]) -> None:
        self.asked = {model.spec.name: model.capacity for model in models}
        if self.refuses:
            raise EnvoyUnavailable("no such luck")
        self.models = self.asked


@pytest.fixture
def front() -> FakeFront:
    return FakeFront()


@pytest.fixture
def fronting(tmp_path: Path) -> Callable[..., Any]:
    return partial(fronted, tmp_path)


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
