"""Fixtures shared by all tests: small models made on the spot, and one real tritonserver for the session."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Two shared cores: how long one example takes says nothing.
hypothesis.settings.register_profile("nereid", deadline=None)
hypothesis.settings.load_profile("nereid")
# For tests of what anyone may write: pytest --hypothesis-profile=thorough -k made_up
hypothesis.settings.register_profile("thorough", max_examples=10_000, deadline=None)


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compiled programs and run folders of tests live apart; the fetched tritonserver is shared with other runs."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


class RealTriton:
    """A running tritonserver and its repository. ``load`` takes what a test wrote into ``repository``."""

    def __init__(self, repository: Path) -> None:
        self.repository = repository
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: Any = None
        self._prefix = f"nereid-test-{os.getpid()}-"
        self.printed: list[str] = []
        """What the model processes wrote to stdout and stderr."""

    def start(self) -> None:
        from native_service.triton import embedded as embedded_triton
        from native_service.triton.process import TritonServer

        handler = logging.Handler()
        handler.emit = lambda record: self.printed.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("nereid.models").addHandler(handler)
        logging.getLogger("nereid.models").setLevel(logging.INFO)
        self._thread.start()
        install = self._do(embedded_triton.find())
        self._server = TritonServer(install, self.repository, shared_memory_prefix=self._prefix)
        self._do(self._server.start())

    def stop(self) -> None:
        if self._server is not None:
            self._do(self._server.stop())
        # Nobody else sweeps here what replaced models have left, as `nereid serve` does at its end.
        for region in Path("/dev/shm").glob(f"{self._prefix}*"):
            region.unlink(missing_ok=True)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def load(self, model: str, timeout_s: float = 120) -> str:
        self._do(self._server.load(model, timeout_s))
        return model

    def add(self, source: Path, **options: Any) -> str:
        """Convert ``source`` into the repository and load it; the model's name."""
        from converters.convert import convert

        return self.load(convert(source, self.repository, force=True, **options).spec.name)

    @property
    def address(self) -> str:
        address: str = self._server.addresses.grpc
        return address

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealTriton]:
    server = RealTriton(tmp_path_factory.mktemp("repository"))
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def client(triton: RealTriton) -> Iterator[Any]:
    import tritonclient.grpc

    with tritonclient.grpc.InferenceServerClient(triton.address) as client:
        yield client


@pytest.fixture(scope="session")
def demo_bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of the demo."""
    bundles = tmp_path_factory.mktemp("demo") / "bundles"
    program = Path(__file__).with_name("demo") / "make_models.py"
    subprocess.run([sys.executable, program, bundles], check=True)
    return bundles
