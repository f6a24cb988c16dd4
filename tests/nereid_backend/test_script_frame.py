"""The file a program leaves its answer in."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereid_backend import dtypes
from nereid_backend.errors import NereidError, OutputError, OutputRefused
from nereid_backend.scripts import frame

ON_THE_WIRE = [row for row in dtypes.TABLE if row.kserve]


@given(st.data())
def test_every_dtype_and_shape_comes_back_as_written(data: Any) -> None:
    element = data.draw(st.sampled_from(ON_THE_WIRE))
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    size = element.size_bytes
    for length in shape:
        size *= length
    raw = data.draw(st.binary(min_size=size, max_size=size))
    read = frame.parse(f"{element.numpy_name} {','.join(map(str, shape))}\n".encode() + raw)
    assert (read.element, read.shape, bytes(read.data)) == (element, shape, raw)
    assert read.array.shape == shape


@pytest.mark.parametrize("header", ["  float32   2 \r", "float32 2 and more words", "float32 ,2,", "float32\t2"])
def test_headers_are_read_as_nereid_server_does(header: str) -> None:
    assert frame.parse(header.encode() + b"\n" + bytes(8)).shape == (2,)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "does not begin with a line"),
        (b"x" * 5000 + b"\n", "does not begin with a line"),
        (b"float32\n", "expected '<dtype>"),
        (b"float33 1\n1234", "expected '<dtype>"),
        (b"float32 1.5\n1234", "expected '<dtype>"),
        (b"\xff 1\n1234", "expected '<dtype>"),
        (b"float32 ,\n", "at least one"),
        (b"float32 0\n", "at least 1"),
        (b"float32 -1\n1234", "at least 1"),
        (b"float8_e5m2 1\n1", "no KServe datatype"),
        (b"float32 2\n1234", "4 bytes, float32 \\[2\\] needs 8"),
        (b"float32 1\n12345", "5 bytes"),
        (b"float32 99999999999999999999,99999999999\n", "needs"),
    ],
)
def test_a_malformed_file_says_what_is_wrong(content: bytes, words: str) -> None:
    with pytest.raises(OutputError, match=words):
        frame.parse(content)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(content: bytes) -> None:
    with contextlib.suppress(NereidError):
        frame.parse(content)


@pytest.mark.parametrize("kind", ["nothing", "folder", "link", "pipe"])
def test_only_a_file_is_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "out"
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        (tmp_path / "real").write_bytes(b"float32 1\n1234")
        path.symlink_to(tmp_path / "real")
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(OutputRefused):
        frame.read(path)
