from __future__ import annotations

import logging
import threading
import time

import pytest

from nereid_backend import progress

LOG = logging.getLogger("nereid.test")


def test_a_quick_step_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    threads = threading.active_count()
    with progress.told(LOG, "loading adder"):
        pass
    assert (caplog.messages, threading.active_count()) == (["loading adder"], threads)


def test_a_slow_step_is_told_again_in_growing_pauses(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_FIRST_S", 0.05)
    caplog.set_level(logging.INFO)
    with progress.told(LOG, "loading adder"):
        until = time.monotonic() + 60
        while len(caplog.messages) < 5 and time.monotonic() < until:
            time.sleep(0.01)
    first, *others = caplog.records
    assert first.getMessage() == "loading adder"
    assert {record.getMessage().partition(" (")[0] for record in others} == {"still loading adder"}
    told_s = [record.created - first.created for record in others]
    pauses_s = [later - earlier for earlier, later in zip([0, *told_s], told_s, strict=False)]
    assert pauses_s[3] > 2 * pauses_s[0]  # 0.05, 0.05, 0.1, 0.2
