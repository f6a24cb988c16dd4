import asyncio
import errno
import os
import signal
import time
from pathlib import Path

import pytest

from native_service.children import processes
from native_service.triton import embedded as embedded_triton
from native_service.triton.addresses import SOCKET_SUFFIX
from native_service.triton.process import TritonServer
from nereid_backend.errors import ModelLoadError, TritonUnavailable


@pytest.fixture
def server(tritonserver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TritonServer:
    install = asyncio.run(embedded_triton.find(tritonserver))
    return TritonServer(install, tmp_path, shared_memory_prefix="nereid-test-1-")


def is_gone(pid: int | None) -> bool:
    try:
        os.kill(pid or 0, 0)
    except ProcessLookupError:
        return True
    return False


def test_it_starts_loads_and_stops(server: TritonServer) -> None:
    async def scenario() -> None:
        async with server:
            await server.start()
            assert await server.is_ready()
            await server.load("fine", 5)
            addresses = {server.addresses.grpc, server.addresses.metrics}
            assert len(addresses) == 2
            assert all(address.startswith("127.0.0.1:") for address in addresses)
            pid = server.pid
        assert is_gone(pid)
        assert not await server.is_ready()

    asyncio.run(scenario())


def test_grpc_can_be_a_socket_of_the_file_system(tritonserver: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        install = await embedded_triton.find(tritonserver)
        path = str(tmp_path / f"triton{SOCKET_SUFFIX}")
        async with TritonServer(install, tmp_path, shared_memory_prefix="nereid-test-1-", grpc_socket=path) as server:
            await server.start()
            assert server.addresses.grpc == f"unix:{path}"
            assert Path(path).is_socket()
            assert await server.is_ready()

    asyncio.run(scenario())


def test_the_command_line_keeps_everything_on_loopback(server: TritonServer) -> None:
    async def scenario() -> list[str]:
        async with server:
            await server.start()
            return (Path("/proc") / str(server.pid) / "cmdline").read_text().split("\0")

    arguments = asyncio.run(scenario())
    for kind in ("grpc", "metrics"):
        assert f"--{kind}-address=127.0.0.1" in arguments
    assert "--allow-http=false" in arguments
    assert "--model-control-mode=explicit" in arguments
    assert "--disable-auto-complete-config" in arguments
    assert "--backend-config=python,shm-region-prefix-name=nereid-test-1-" in arguments


@pytest.mark.parametrize("own", [None, "glibc.malloc.tcache_count=0"])
def test_weights_lie_in_huge_pages_unless_the_operator_tunes_malloc_himself(
    tritonserver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if own is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", own)

    async def scenario() -> list[str]:
        install = await embedded_triton.find(tritonserver)
        async with TritonServer(install, tmp_path, shared_memory_prefix="nereid-test-1-") as server:
            await server.start()
            return (Path("/proc") / str(server.pid) / "environ").read_text().split("\0")

    assert f"GLIBC_TUNABLES={own or 'glibc.malloc.hugetlb=1'}" in asyncio.run(scenario())


def test_a_model_that_fails_is_one_short_line_and_the_server_lives(server: TritonServer) -> None:
    async def scenario() -> None:
        async with server:
            await server.start()
            with pytest.raises(ModelLoadError) as caught:
                await server.load("broken", 5)
            assert str(caught.value) == "model 'broken' could not be loaded: EngineMissing: jax is not installed"
            await server.load("fine", 5)

    asyncio.run(scenario())


def test_processes_that_have_just_been_loaded_are_not_those_that_triton_has_given_up(
    server: TritonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("native_service.triton.process._GIVES_UP_S", 60)
    monkeypatch.setattr("native_service.triton.process._LATEST_WORD_S", 120)

    async def scenario() -> None:
        async with server:
            await server.start()
            await server.load("fine", 5)
            child = await asyncio.create_subprocess_exec("sleep", "60")
            monkeypatch.setattr(server._record, "processes_of", lambda model: [child.pid] if model == "fine" else [])
            assert server.kill_given_up("fine", call_s=0) == []
            monkeypatch.setattr("native_service.triton.process._GIVES_UP_S", 0)
            assert server.kill_given_up("fine", call_s=60) == []  # begun before the load
            assert child.returncode is None
            assert server.kill_given_up("fine", call_s=0) == [child.pid]
            assert await child.wait() == -signal.SIGKILL

    asyncio.run(scenario())


def test_the_process_of_a_load_that_hangs_is_killed_at_its_deadline_and_the_server_lives(server: TritonServer) -> None:
    async def scenario() -> None:
        async with server:
            await server.start()
            for _ in range(2):
                with pytest.raises(ModelLoadError, match=r"model 'hangs' did not load within 0\.5 s"):
                    await server.load("hangs", 0.5)
            await server.load("fine", 5)
            await server.unload("fine")

    asyncio.run(scenario())


def test_the_end_of_a_model_whose_unload_failed_is_no_death(server: TritonServer) -> None:
    async def scenario() -> None:
        async with server:
            await server.start()
            await server.load("clinging", 20)
            (pid,) = server.processes_of("clinging")
            assert server.find_dead() == frozenset()
            with pytest.raises(ModelLoadError, match="model 'clinging' could not be unloaded: no such luck"):
                await server.unload("clinging")
            assert is_gone(pid)
            assert server.find_dead() == frozenset()

    asyncio.run(scenario())


def test_a_load_that_nothing_ends_is_not_tried_again(server: TritonServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("native_service.triton.process._LET_GO_S", 0.2)

    async def scenario() -> None:
        await server.start()
        with pytest.raises(ModelLoadError, match=r"model 'stuck' did not load within 0\.2 s"):
            await server.load("stuck", 0.2)
        with pytest.raises(ModelLoadError, match="an earlier load still hangs; restart the server"):
            await server.load("stuck", 60)
        await server.load("fine", 5)
        started = time.monotonic()
        await server.stop()
        assert time.monotonic() - started < 2

    asyncio.run(scenario())


def test_stopping_during_a_load_does_not_wait_for_it(server: TritonServer) -> None:
    async def scenario() -> None:
        await server.start()
        load = asyncio.create_task(server.load("hangs", 60))
        await asyncio.sleep(0.2)
        started = time.monotonic()
        await server.stop()
        assert time.monotonic() - started < 2
        with pytest.raises(TritonUnavailable, match="while loading 'hangs'"):
            await load

    asyncio.run(scenario())


def test_a_load_whose_channel_is_closed_is_told_as_the_end_of_the_server(server: TritonServer) -> None:
    async def scenario() -> None:
        async with server:
            await server.start()
            load = asyncio.create_task(server.load("hangs", 60))
            await asyncio.sleep(0.2)
            await server.channel.close()
            with pytest.raises(TritonUnavailable, match="stopped answering while loading 'hangs'"):
                await load

    asyncio.run(scenario())


def test_a_server_that_dies_during_a_load_says_its_last_words(server: TritonServer) -> None:
    async def scenario() -> None:
        async with server:
            await server.start()
            with pytest.raises(TritonUnavailable) as caught:
                await server.load("dies", 5)
            assert str(caught.value) == "tritonserver ended with code 7 while loading 'dies': out of luck"

    asyncio.run(scenario())


def test_a_server_that_does_not_start_says_why(server: TritonServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server._environment["FAKE_TRITON"] = "refuses"

    async def scenario() -> None:
        with pytest.raises(TritonUnavailable) as caught:
            await server.start()
        assert str(caught.value) == ("tritonserver ended with code 1 while starting: failed to start: no such luck")
        await server.stop()

    asyncio.run(scenario())


def test_a_port_taken_meanwhile_is_tried_again(server: TritonServer, tmp_path: Path) -> None:
    note = tmp_path / "note"
    server._environment |= {"FAKE_TRITON": "port-taken-once", "FAKE_TRITON_NOTE": str(note)}

    async def scenario() -> None:
        async with server:
            await server.start()
            assert note.exists()
            await server.load("fine", 5)

    asyncio.run(scenario())


def test_a_server_that_ignores_sigterm_is_killed(server: TritonServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("native_service.triton.process._STOP_GRACE_S", 0.3)
    server._environment["FAKE_TRITON"] = "ignores-sigterm"

    async def scenario() -> None:
        await server.start()
        pid = server.pid
        await server.stop()
        assert is_gone(pid)

    asyncio.run(scenario())


def test_whoever_stops_a_server_may_have_less_patience(server: TritonServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("native_service.triton.process._STOP_GRACE_S", 3600)
    server._environment["FAKE_TRITON"] = "ignores-sigterm"

    async def scenario() -> None:
        await server.start()
        pid = server.pid
        async with asyncio.timeout(60):
            await server.stop(0.3)
        assert is_gone(pid)

    asyncio.run(scenario())


def test_an_end_nobody_asked_for_is_reported(server: TritonServer) -> None:
    async def scenario() -> None:
        async with server:
            await server.start()
            os.kill(server.pid or 0, 9)
            assert await server.wait() == "tritonserver ended with code -9 while serving"

    asyncio.run(scenario())


def test_a_machine_that_allows_no_further_process_is_told_and_tried_again(
    server: TritonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def scenario() -> None:
        async with server:
            await server.start()
            await server.drop()
            with monkeypatch.context() as short:
                short.setattr(processes, "start", refuse)
                with pytest.raises(TritonUnavailable, match=r"cannot be started \(Too many open files"):
                    await server.restart()
            await server.restart()
            await server.load("fine", 5)

    asyncio.run(scenario())
