"""Programs that JAX compiles for one device, kept in the cache of compiled programs."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nereid_backend.engines import import_library, parse_device
from nereid_backend.errors import DeviceMissing, EngineError, SignatureError
from nereid_backend.program_cache import ProgramCache, processor_features

_LOG = logging.getLogger("nereid.jax")

COMPILATION = 1
"""Part of every cached program's key: raised when an engine makes something else of the same artifact."""


def read_artifact(path: Path) -> bytes:
    """The content of an artifact. Raises SignatureError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SignatureError(f"{path.name}: cannot be read ({error.strerror})") from None


class Compiler:
    """Compiles artifacts for one device, or takes them from the cache of compiled programs."""

    def __init__(self, jax: Any, device: Any) -> None:
        self._jax, self._device = jax, device
        self._sharding = jax.sharding.SingleDeviceSharding(device)
        self._cache = ProgramCache.open()
        self._target = _target(jax, device)

    def lower(self, function: Callable[..., Any], arguments: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> Any:
        """``function`` lowered for arguments of these shapes and dtypes, numpy arrays or arrays on the device."""
        structs = [self._jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding) for shape, dtype in arguments]
        return self._jax.jit(function).lower(*structs)

    def program(self, name: str, content: bytes, lower: Callable[[], Any]) -> Callable[..., Any]:
        """What ``lower`` gives, compiled. ``content`` decides it; ``name`` is for messages. Raises EngineError."""
        key = hashlib.sha256(self._target + content).hexdigest()
        return self._cached(name, key) or self._compiled(name, key, lower)

    def _cached(self, name: str, key: str) -> Callable[..., Any] | None:
        from jax.experimental import serialize_executable

        if (entry := self._cache.read(key)) is None:
            return None
        try:
            # The cache's folder is private to this user, which makes its pickles as trustworthy as this code.
            executable, in_tree, out_tree = pickle.loads(entry)  # noqa: S301
            program: Callable[..., Any] = serialize_executable.deserialize_and_load(
                executable, in_tree, out_tree, self._device.client, [self._device]
            )
        except Exception as error:  # noqa: BLE001 - whatever an entry does, the artifact can be compiled again
            _LOG.warning("%s: its cached program cannot be loaded (%s); compiling it again", name, first_line(error))
            return None
        return program

    def _compiled(self, name: str, key: str, lower: Callable[[], Any]) -> Callable[..., Any]:
        from jax.experimental import serialize_executable

        try:
            program: Callable[..., Any] = lower().compile()
        except (ValueError, TypeError, RuntimeError) as error:
            raise EngineError(f"{name}: does not compile: {first_line(error)}") from error
        try:
            entry = pickle.dumps(serialize_executable.serialize(program))
        except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
            _LOG.info("%s: its compiled program cannot be cached (%s)", name, first_line(error))
        else:
            self._cache.write(key, entry)
        return program


def _target(jax: Any, device: Any) -> bytes:
    """What besides the artifact decides a compiled program: code generators, device, and for the CPU its own kind."""
    import jaxlib

    facts = [COMPILATION, jax.__version__, jaxlib.__version__, np.__version__, sys.version_info[:2]]
    facts += [device.platform, device.device_kind, device.id, device.client.platform_version]
    facts += [os.environ.get("XLA_FLAGS")]
    if device.platform == "cpu":
        # XLA generates code for the features of this processor and splits loops for this number of threads.
        facts += [*processor_features(), os.environ.get("NPROC"), len(os.sched_getaffinity(0))]
    return repr(facts).encode()


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its class."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def open_device(engine: str, device: str) -> tuple[Any, Any]:
    """jax, set up, and its device of that name. Raises EngineMissing, DeviceMissing, BundleError."""
    jax = import_library(engine)
    _configure(jax, device)
    return jax, _find_device(jax, device)


def _configure(jax: Any, device: str) -> None:
    """What must be set before jax is first used for a model on ``device``."""
    # Without 64-bit mode JAX narrows i64 and f64 arguments silently.
    jax.config.update("jax_enable_x64", True)
    # A CUDA build of jax would otherwise take the first GPU for a model that asks for the CPU.
    jax.config.update("jax_platforms", "cpu" if parse_device(device)[0] == "cpu" else "cuda,cpu")


def _find_device(jax: Any, device: str) -> Any:
    """The jax device of a device's name. Raises DeviceMissing, BundleError."""
    kind, index = parse_device(device)
    try:
        found = jax.devices(kind)
    except RuntimeError:
        found = []
    if index >= len(found):
        raise DeviceMissing(
            f"device {device!r} is not there: jax sees {len(found)} {kind} device(s); use another device, or install "
            "a jax built for it"
        )
    return found[index]
