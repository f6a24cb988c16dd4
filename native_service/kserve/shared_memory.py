"""System shared memory of clients on this host (``server.allow_shared_memory``): tensors that pass by the network.

Triton maps what clients register and reads and writes it while models run. Every call that names a region is checked
here first, because 2.51 adds offset and size without looking for an overflow.
"""

from __future__ import annotations

import asyncio
import logging
import math
import stat
from collections.abc import Sequence
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb

from native_service.edge.grpc import triton_call
from native_service.envoy.scripts import REGION
from native_service.triton.stubs import SHARED_MEMORY
from nereid_backend import dtypes
from nereid_backend.errors import BundleError, InvalidArgument, NotFound, OverLimit, short_repr
from nereid_backend.spec import ModelSpec

_LOG = logging.getLogger("nereid.service")

_OFFSET, _SIZE = "shared_memory_offset", "shared_memory_byte_size"
_MOST_REGIONS = 256
_LONGEST_NAME = 250
_IN_USE, _IN_USE_POLL_S = "currently in use", 0.01
# The server's own, those of other Tritons' models, and semaphores.
_RESERVED = ("nereid-", "triton_python_backend_shm_region", "sem.")


class _Region:
    """A registered region; ``going`` is set once no more calls may use it."""

    def __init__(self, asked: Any, identity: tuple[int, int]) -> None:
        """``asked``: the SystemSharedMemoryRegisterRequest that Triton has taken."""
        self.asked, self.identity = asked, identity
        self.key, self.byte_size = asked.key, asked.byte_size
        self.going = False


class SharedMemory:
    """The regions of all clients. Each call of theirs is answered as Triton would."""

    def __init__(self, triton: Any, key: Sequence[tuple[str, str]]) -> None:
        """``triton`` is a grpc.aio channel to Triton itself, ``key`` the metadata that it wants with these calls."""
        self._triton, self._key = triton, key
        self._regions: dict[str, _Region] = {}
        self._registering = asyncio.Lock()

    async def register(self, request: Any, _context: Any) -> Any:
        name = request.name
        if not 0 < len(name) <= _LONGEST_NAME:
            raise InvalidArgument(f"a region's name has 1 to {_LONGEST_NAME} characters, got {short_repr(name)}")
        identity = _check_object(request.key, request.offset, request.byte_size)
        # To its end also when the caller goes: what Triton has is counted here.
        registering = asyncio.ensure_future(self._register(request, identity))
        registering.add_done_callback(_not_waited_for)
        return await asyncio.shield(registering)

    async def _register(self, request: Any, identity: tuple[int, int]) -> Any:
        async with self._registering:
            if len(self._regions) >= _MOST_REGIONS:
                await self._forget_abandoned()
            if len(self._regions) >= _MOST_REGIONS:
                raise OverLimit(f"{_MOST_REGIONS} regions are registered, more are not taken; unregister some")
            answer = await self._ask("SystemSharedMemoryRegister", request)
            self._regions[request.name] = _Region(request, identity)
            return answer

    async def restore(self) -> None:
        """Register everything with a Triton that knows nothing of it yet. What is there no more is forgotten."""
        async with self._registering:
            for name, region in list(self._regions.items()):
                try:
                    if _identity(region.key) == region.identity:
                        await self._ask("SystemSharedMemoryRegister", region.asked)
                        continue
                    why = "its object is gone"
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.ALREADY_EXISTS:
                        continue
                    why = error.details() or error.code().name
                _LOG.warning("region %s has to be registered again: %s", short_repr(name), why)
                if self._regions.get(name) is region:
                    del self._regions[name]

    async def unregister(self, request: Any, _context: Any) -> Any:
        """Forget one region, or all of them when the name is empty, once no call uses them."""
        for name in [request.name] if request.name else list(self._regions):
            await self._let_go(name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def status(self, request: Any, _context: Any) -> Any:
        answer = await self._ask("SystemSharedMemoryStatus", request)
        for name in [*answer.regions]:
            if name not in self._regions:  # ours
                del answer.regions[name]
        return answer

    def check(self, request: Any, spec: ModelSpec) -> None:
        """Raises NotFound, InvalidArgument unless every region that ``request`` names is there and large enough."""
        for tensor in (*request.inputs, *request.outputs):
            if REGION in tensor.parameters:
                self._check_place(tensor, spec)
        for tensor in request.inputs:
            if REGION in tensor.parameters:
                _check_size(tensor, spec)

    def _check_place(self, tensor: Any, spec: ModelSpec) -> None:
        name = tensor.parameters[REGION].string_param
        region = self._regions.get(name)
        where = f"model {spec.name!r} tensor {short_repr(tensor.name)}"
        if region is None or region.going:
            raise NotFound(f"{where}: no region {short_repr(name)} is registered")
        offset, size = (
            tensor.parameters[key].int64_param if key in tensor.parameters else 0 for key in (_OFFSET, _SIZE)
        )
        if offset < 0 or size < 0 or offset + size > region.byte_size:
            where = f"{where}: {size} bytes at {offset}"
            raise InvalidArgument(f"{where} are not in region {short_repr(name)} of {region.byte_size} bytes")

    async def _ask(self, method: str, request: Any) -> Any:
        return await triton_call(self._triton, method, type(request))(request, metadata=self._key)

    async def _let_go(self, name: str) -> None:
        region = self._regions.get(name)
        if region is None:
            return
        region.going = True
        try:
            # By the answer of its last call Triton has not let go of it yet.
            while self._regions.get(name) is region and not await self._unregistered(name):
                await asyncio.sleep(_IN_USE_POLL_S)
        finally:
            region.going = False
        if self._regions.get(name) is region:
            del self._regions[name]

    async def _unregistered(self, name: str) -> bool:
        """Whether Triton has forgotten the region; False while calls use it."""
        try:
            await self._ask("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name=name))
        except grpc.aio.AioRpcError as error:
            if _IN_USE not in (error.details() or ""):
                raise
            return False
        return True

    async def _forget_abandoned(self) -> None:
        """Let go the regions whose object is gone, as far as no call uses them: their clients have ended."""
        for name, region in list(self._regions.items()):
            gone = _identity(region.key) != region.identity
            if gone and await self._unregistered(name) and self._regions.get(name) is region:
                del self._regions[name]


def uses_region(request: Any) -> bool:
    """Whether any tensor of a ModelInferRequest lies in a region."""
    return any(REGION in tensor.parameters for tensor in (*request.inputs, *request.outputs))


def _check_size(tensor: Any, spec: ModelSpec) -> None:
    """Whether an input's region holds what its shape says: Triton reads as much as the region."""
    where = f"model {spec.name!r} input {short_repr(tensor.name)}"
    try:
        size_bytes = dtypes.by_kserve(tensor.datatype).size_bytes
    except BundleError as error:
        raise InvalidArgument(f"{where} cannot be in shared memory: {error}") from None
    expected, size = math.prod(tensor.shape) * size_bytes, tensor.parameters[_SIZE].int64_param
    if size != expected:
        raise InvalidArgument(f"{where} has {size} bytes in its region, its shape takes {expected}")


def _check_object(key: str, offset: int, byte_size: int) -> tuple[int, int]:
    """What identifies the shared memory object ``key``. Raises InvalidArgument, also when it is too small."""
    name = key.removeprefix("/")
    if not name or "/" in name or "\0" in name or name in (".", "..") or len(key) > _LONGEST_NAME:
        raise InvalidArgument(f"a key is the name of a shared memory object such as /weights, got {short_repr(key)}")
    if name.startswith(_RESERVED):
        raise InvalidArgument(f"the shared memory object {short_repr(key)} is not a client's; use another name")
    try:
        found = (SHARED_MEMORY / name).stat(follow_symlinks=False)
    except (OSError, ValueError):
        raise InvalidArgument(f"there is no shared memory object {short_repr(key)} on the server's host") from None
    if not stat.S_ISREG(found.st_mode) or not byte_size or offset + byte_size > found.st_size:
        raise InvalidArgument(f"{byte_size} bytes at {offset} are not in {short_repr(key)} of {found.st_size} bytes")
    return found.st_dev, found.st_ino


def _not_waited_for(registering: asyncio.Future[Any]) -> None:
    if not registering.cancelled():
        registering.exception()  # its caller may have gone


def _identity(key: str) -> tuple[int, int] | None:
    try:
        found = (SHARED_MEMORY / key.removeprefix("/")).stat(follow_symlinks=False)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino
