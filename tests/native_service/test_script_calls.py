"""Pieces of script calls that need no server: cutting lines, and counts in the metrics."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from native_service.nereid.script_calls import Counts, _Lines, with_script_counts


def cut(lines: _Lines, *parts: bytes) -> list[str]:
    return [line for part in parts for line in lines.split(part)] + list(lines.rest())


@given(st.data())
def test_lines_are_the_same_however_their_bytes_arrive(data: Any) -> None:
    texts = data.draw(st.lists(st.text(st.characters(blacklist_characters="\n\r", codec="utf-8")), max_size=8))
    raw = "\n".join(texts).encode()
    at = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=5)))
    parts = [raw[i:j] for i, j in zip([0, *at], [*at, len(raw)], strict=True)]
    expected = texts[:-1] if texts and not texts[-1] else texts  # nothing after the last newline is no line
    assert cut(_Lines("p: "), *parts) == [f"p: {text}" for text in expected]


def test_line_ends_of_both_kinds_are_taken_off_and_no_byte_stops_a_stream() -> None:
    assert cut(_Lines(""), b"a\r\nb\n\xff\n") == ["a", "b", "\ufffd"]


def test_an_endless_line_comes_in_pieces() -> None:
    pieces = cut(_Lines(""), *[b"x" * 700_000] * 5)
    assert "".join(pieces) == "x" * 3_500_000
    assert max(map(len, pieces)) <= 1024 * 1024


def test_what_triton_counts_wrongly_is_replaced_for_scripts_only() -> None:
    text = "\n".join(
        [
            "# TYPE nv_inference_request_success counter",
            'nv_inference_request_success{model="s",version="1"} 9',
            'nv_inference_request_success{model="other",version="1"} 9',
            'nv_inference_request_failure{model="s",reason="BACKEND",version="1"} 0',
            'nv_inference_request_failure{model="s",reason="OTHER",version="1"} 0',
            'nv_inference_count{model="s",version="1"} 9',
            'nv_inference_queue_duration_us{model="s",version="1"} 9',
            "",
        ]
    )
    counts = {"s": Counts(success=3, rows=5, duration_us=7, failures={"BACKEND": 2})}
    assert [line.rpartition(" ")[2] for line in with_script_counts(text, counts).split("\n")] == (
        ["counter", "3", "9", "2", "0", "5", "9", ""]
    )
