from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from native_service.telemetry.log_records import SECRETS, JsonFormatter, KindLimit, Secrets, TextFormatter
from native_service.telemetry.recent_failures import RecentFailures


def record(message: str, *args: Any, **extra: Any) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "nereid.x", "levelname": "WARNING", "msg": message, "args": args, **extra})


def test_a_json_line_holds_the_record_and_its_own_fields() -> None:
    try:
        raise ValueError("broken\nin two")
    except ValueError:
        text = JsonFormatter().format(
            record("it %s", "fails", fields={"model": "m", "duration_ms": 1.5}, exc_info=sys.exc_info(), created=0.25)
        )
    assert "\n" not in text
    shown = json.loads(text)
    assert shown.pop("exception").endswith("ValueError: broken\nin two")
    assert shown == {
        "time": "1970-01-01T00:00:00.250+00:00",
        "level": "WARNING",
        "logger": "nereid.x",
        "message": "it fails",
        "model": "m",
        "duration_ms": 1.5,
    }


def test_what_a_caller_chose_cannot_look_like_a_line_of_the_log() -> None:
    forged = "x\n2026-11-30 10:00:00,000 ERROR nereid.serve: all is lost\x1b[31m\r"
    first, second = TextFormatter().format(record("unknown input %s", forged)).split("\n")
    assert first.endswith("WARNING nereid.x: unknown input x")
    assert second == "    2026-11-30 10:00:00,000 ERROR nereid.serve: all is lost\\x1b[31m\\x0d"


def test_what_a_caller_chose_cannot_steer_the_terminal_that_shows_the_last_failures() -> None:
    failures = RecentFailures()
    failures.emit(record("unexpected input %s", "x\x1b[2J\nstate          ready"))
    assert [text for _, text in failures.lines] == ["unexpected input x\\x1b[2J state          ready"]


@pytest.mark.parametrize(
    "text",
    [
        "authorization: Bearer %s",
        "{'Authorization': 'Basic %s'}",
        "authorization: Token %s",
        '"x-api-key": "%s"',
        "(('x-api-key', '%s'),)",
        "api_key=%s&x=1",
        "called with bearer %s",
        "proxy-authorization=%s",
    ],
)
def test_what_stands_behind_the_name_of_a_secret_is_masked(text: str) -> None:
    secret = "eyJhbGciOi.J9-x_y/z+1="
    for formatter in (TextFormatter(), JsonFormatter()):
        shown = formatter.format(record(text % secret, fields={"headers": text % secret}))
        assert "***" in shown
        assert secret[:12] not in shown


@given(secret=st.text(min_size=4, max_size=40), before=st.text(max_size=20), after=st.text(max_size=20))
def test_a_text_that_was_told_to_be_secret_never_shows(secret: str, before: str, after: str) -> None:
    secrets = Secrets()
    secrets.hide(secret, "")
    shown = secrets.masked(before + secret + after)
    assert secret not in shown.replace("***", "\0") or secret in before + "\0" + after
    assert secrets.masked("nothing to hide here") == "nothing to hide here" or secret in "nothing to hide here"


def test_masking_leaves_ordinary_lines_alone() -> None:
    line = "model 'authorizer' has 3 tokens; api versions: 1, 2"
    assert SECRETS.masked(line) == line


@given(gaps_s=st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.1, 1.0, 30.0]), max_size=400))
def test_of_one_kind_only_some_pass_and_the_others_are_counted(gaps_s: list[float]) -> None:
    now = [0.0]
    limit = KindLimit(lambda: now[0])
    passed = 0
    for gap in gaps_s:
        now[0] += gap
        passed += limit.passes(record("x", kind="flood"))
        assert limit.passes(record("no kind"))
    told = limit.take_stopped()
    assert sum(each.args[0] for each in told) == len(gaps_s) - passed  # type: ignore[index, misc]
    assert passed <= 30 + now[0] / 0.5 + 1
    assert passed >= min(len(gaps_s), 30)
    assert limit.take_stopped() == []


def test_a_flood_of_one_kind_leaves_room_for_another() -> None:
    limit = KindLimit(lambda: 0.0)
    assert [limit.passes(record("x", kind="flood")) for _ in range(100)].count(False) > 0
    assert limit.passes(record("x", kind="drop"))
