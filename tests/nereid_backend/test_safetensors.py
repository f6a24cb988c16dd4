from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converters.weights import write
from nereid_backend import dtypes
from nereid_backend.errors import WeightsError
from nereid_backend.safetensors import ALIGNMENT_BYTES, MAX_HEADER_BYTES, aligned_empty, read, read_header


def entry(shape: Any, start: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def file_of(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "w.safetensors"


@pytest.mark.parametrize("row", dtypes.TABLE, ids=lambda row: row.token)
def test_every_dtype_comes_back_bit_for_bit(path: Path, row: dtypes.DType) -> None:
    data = np.random.default_rng(0).bytes(15 * row.size_bytes)
    if row.token == "bool":
        data = bytes(b & 1 for b in data)
    array = np.frombuffer(data, row.numpy).reshape(3, 5)
    write(path, {"w": array}, {"note": "é"})
    loaded = read(path)
    assert loaded.metadata == {"note": "é"}
    assert list(loaded.tensors) == ["w"]
    got = loaded.tensors["w"]
    assert (got.dtype, got.shape, got.tobytes(), got.flags.writeable) == (row.numpy, (3, 5), data, True)


@given(
    st.dictionaries(
        st.text(max_size=6).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from([r.token for r in dtypes.TABLE]), st.lists(st.integers(0, 5), max_size=4)),
        max_size=5,
    )
)
def test_any_set_of_tensors_comes_back_and_starts_aligned(tmp_path_factory: Any, drawn: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "drawn.safetensors"
    rng = np.random.default_rng(0)
    arrays = {
        name: np.frombuffer(
            bytes(int(np.prod(shape, dtype=int)) * dtypes.by_token(token).size_bytes), dtypes.by_token(token).numpy
        ).reshape(shape)
        if token == "bool"
        else rng.integers(0, 100, shape).astype(dtypes.by_token(token).numpy)
        for name, (token, shape) in drawn.items()
    }
    write(path, arrays, {})
    header, loaded = read_header(path), read(path).tensors
    assert header.data_start % ALIGNMENT_BYTES == 0
    assert {n: (a.dtype, a.shape, a.tobytes()) for n, a in loaded.items()} == {
        n: (a.dtype, a.shape, a.tobytes()) for n, a in arrays.items()
    }
    multiples = [e.start for n, e in header.entries.items() if arrays[n].nbytes % ALIGNMENT_BYTES == 0]
    assert [start % ALIGNMENT_BYTES for start in multiples] == [0] * len(multiples)
    aligned = [n for n, e in header.entries.items() if e.start % ALIGNMENT_BYTES == 0 and loaded[n].nbytes]
    assert [loaded[n].ctypes.data % ALIGNMENT_BYTES for n in aligned] == [0] * len(aligned)


def test_tensors_are_views_of_one_buffer(path: Path) -> None:
    write(path, {"a": np.zeros(64, np.uint8), "b": np.ones(64, np.uint8)}, {})
    tensors = read(path).tensors
    assert tensors["b"].ctypes.data - tensors["a"].ctypes.data == 64


def test_strided_arrays_are_written_in_their_own_order(path: Path) -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    write(path, {"t": array.T, "s": array[:, ::2]}, {})
    assert {n: a.tolist() for n, a in read(path).tensors.items()} == {"t": array.T.tolist(), "s": [[0, 2], [3, 5]]}


def test_a_file_without_tensors_is_fine(path: Path) -> None:
    assert read(file_of(path, {})).tensors == {}


def test_tensors_without_elements_may_share_a_position(path: Path) -> None:
    header = {"a": entry([0, 3], 0, 0), "b": entry([2], 0, 8), "c": entry([0], 8, 8)}
    got = read(file_of(path, header, b"\0\0\x80?" * 2)).tensors
    assert {n: (a.shape, a.tolist()) for n, a in got.items()} == {
        "a": ((0, 3), []),
        "b": ((2,), [1, 1]),
        "c": ((0,), []),
    }


def test_a_header_padded_with_spaces_is_read(path: Path) -> None:
    text = json.dumps({"w": entry([], 0, 4)}).encode() + b"   "
    assert read(file_of(path, text, b"\0\0\0@")).tensors["w"].tolist() == 2.0


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 1000])
def test_an_aligned_buffer_is_aligned_and_of_the_size_asked_for(nbytes: int) -> None:
    buffers = [aligned_empty(nbytes) for _ in range(8)]
    assert [(b.nbytes, b.ctypes.data % ALIGNMENT_BYTES if nbytes else 0) for b in buffers] == [(nbytes, 0)] * 8


W = entry([2], 0, 8)


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"w": W}, 4, "describes 8 data bytes, the file has 4; it is truncated"),
        ({"w": W}, 12, "describes 8 data bytes, the file has 12"),
        ({"w": entry([3], 0, 8)}, 8, r"'w' has 8 bytes, its shape \[3\] of F32 needs 12"),
        ({"w": entry([2], 4, 12)}, 12, "'w' starts at byte 4, expected 0"),
        ({"a": W, "b": entry([1], 12, 16)}, 16, "'b' starts at byte 12, expected 8"),
        ({"a": W, "b": entry([2], 4, 12)}, 12, "'b' starts at byte 4, expected 8"),
        ({"a": W, "b": W}, 8, "starts at byte 0, expected 8"),
        ({"w": entry([-2], 0, 8)}, 8, "non-negative integers"),
        ({"w": entry([2], -8, 0)}, 8, "non-negative integers"),
        ({"w": entry([2], 8, 0)}, 8, "'w' has -8 bytes"),
        ({"w": entry([2.0], 0, 8)}, 8, "non-negative integers"),
        ({"w": entry([True, 2], 0, 8)}, 8, "non-negative integers"),
        ({"w": entry("22", 0, 8)}, 8, "malformed"),
        ({"w": entry([2], 0, 8, "C64")}, 8, "unknown safetensors dtype 'C64'"),
        ({"w": entry([2], 0, 8, ["F32"])}, 8, "malformed"),
        ({"w": {"dtype": "F32", "shape": [2]}}, 8, "malformed"),
        ({"w": {**W, "data_offsets": [0, 8, 9]}}, 8, "malformed"),
        ({"w": 7}, 8, "malformed"),
        ({"w": None}, 8, "malformed"),
        ([], 0, "not an object"),
        (b'{"w": {}', 0, "malformed"),
        (b"\xff\xfe\xfd", 0, "malformed"),
        (
            b'{"w": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}, '
            b'"w": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
            8,
            "a name appears twice",
        ),
        (b'{"w": {"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}}', 8, "a name appears twice"),
        (b"[" * 200_000, 0, "malformed"),
        ({"__metadata__": 5}, 0, "__metadata__"),
        ({"__metadata__": {"argument_order": ["w"]}, "w": W}, 8, "__metadata__"),
        ({"w": entry([2**70, 0], 0, 0)}, 0, "'w'"),
        ({"w": entry([2**40, 2**40, 0], 0, 0)}, 0, "'w'"),
        ({"w": entry([1] * 70, 0, 4)}, 4, "'w'"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(path: Path, header: Any, data: int, words: str) -> None:
    with pytest.raises(WeightsError, match=words) as caught:
        read(file_of(path, header, bytes(data)))
    assert str(caught.value).startswith("w.safetensors: ")
    assert str(path.parent) not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "length"),
    [(b"", 0), (b"\1\0\0", 1), (b"\x10" + bytes(7), 16), (b"\xff" * 8 + b"{}", 2**64 - 1)],
)
def test_a_header_longer_than_the_file_is_refused_with_both_sizes(path: Path, content: bytes, length: int) -> None:
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=f"the header says {length} bytes but the file has {len(content)}"):
        read_header(path)


def test_a_header_over_the_formats_limit_is_refused_without_reading_it(path: Path) -> None:
    with path.open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
    os.truncate(path, MAX_HEADER_BYTES + 100)  # sparse
    with pytest.raises(WeightsError, match=f"the header says {MAX_HEADER_BYTES + 1} bytes"):
        read_header(path)


def test_a_missing_file_and_a_folder_are_refused(path: Path) -> None:
    with pytest.raises(WeightsError, match=r"cannot be read \(No such file"):
        read(path)
    path.mkdir()
    with pytest.raises(WeightsError, match=r"cannot be read \(Is a directory|the header says"):
        read(path)


def test_the_header_is_read_without_the_data(path: Path) -> None:
    write(path, {"b": np.zeros((2, 3), np.int16), "a": np.zeros(16, np.float32)}, {"k": "v"})
    header = read_header(path)
    assert header.metadata == {"k": "v"}
    assert {n: (e.dtype.token, e.shape, e.start, e.end) for n, e in header.entries.items()} == {
        "a": ("f32", (16,), 0, 64),
        "b": ("i16", (2, 3), 64, 76),
    }
    assert (header.data_bytes, header.data_start + header.data_bytes) == (76, path.stat().st_size)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 20) | st.sampled_from(["F32", "U8", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "w", "__metadata__"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(
    st.binary(max_size=64)
    | st.tuples(json_values, st.binary(max_size=16)).map(
        lambda pair: len(json.dumps(pair[0])).to_bytes(8, "little") + json.dumps(pair[0]).encode() + pair[1]
    )
)
def test_random_content_raises_nothing_but_weights_errors(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "random.safetensors"
    path.write_bytes(content)
    try:
        tensors = read(path).tensors
    except WeightsError as error:
        assert str(error).startswith("random.safetensors: ")  # noqa: PT017 - most random files end here, not all
    else:
        assert sum(t.nbytes for t in tensors.values()) <= len(content)
