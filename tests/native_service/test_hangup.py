from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import pytest

from native_service.operation import hangup
from native_service.operation.hangup import Hangup


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says whether there is a terminal."""
    return lambda there: monkeypatch.setattr(hangup, "_terminal_is_there", lambda: there)


def test_signals_before_it_is_ready_are_one_reload_then_and_one_during_a_reload_is_another(
    terminal: Callable[[bool], None],
) -> None:
    terminal(False)
    done: list[str] = []

    async def scenario() -> None:
        may_end = asyncio.Event()

        async def reload() -> None:
            done.append("begins")
            await may_end.wait()
            done.append("ends")
            if len(done) == 2:
                raise ValueError("nobody planned for this")

        its = Hangup(lambda: done.append("stopped"))
        its.received()
        its.received()
        await asyncio.sleep(0)
        assert done == []
        its.will(reload)
        await asyncio.sleep(0.01)
        its.received()
        its.received()
        await asyncio.sleep(0.01)
        assert done == ["begins"]
        may_end.set()
        await asyncio.sleep(0.01)

    asyncio.run(scenario())
    assert done == ["begins", "ends", "begins", "ends"]


@pytest.mark.parametrize(("nohup", "expected"), [(False, ["stopped"]), (True, ["reloaded"])])
def test_the_end_of_its_terminal_ends_the_server_but_not_under_nohup(
    terminal: Callable[[bool], None], nohup: bool, expected: list[str]
) -> None:
    done: list[str] = []

    async def scenario() -> None:
        async def reload() -> None:
            done.append("reloaded")

        terminal(True)
        its = Hangup(lambda: done.append("stopped"))
        its.will(reload)
        terminal(False)
        its.received()
        await asyncio.sleep(0.01)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    try:
        asyncio.run(scenario())
    finally:
        signal.signal(signal.SIGHUP, before)
    assert done == expected
