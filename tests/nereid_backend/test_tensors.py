from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereid_backend import dtypes, tensors
from nereid_backend.errors import BundleError
from nereid_backend.spec import TensorSpec
from nereid_backend.tensors import Capsule, TensorAccess

NUMPY_2 = int(np.__version__.split(".")[0]) >= 2
PLAIN = [row for row in dtypes.TABLE if row.kserve and row.token != "bf16"]


def filled(row: dtypes.DType, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2, shape).astype(row.numpy)


@pytest.mark.parametrize("row", PLAIN, ids=lambda row: row.token)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)])
@pytest.mark.parametrize("writeable", [True, False])
def test_an_exported_array_is_read_by_numpy_without_a_copy(
    row: dtypes.DType, shape: tuple[int, ...], writeable: bool
) -> None:
    array = filled(row, *shape)
    array.flags.writeable = writeable
    got = np.from_dlpack(Capsule(array))
    assert (got.dtype, got.shape, got.tolist()) == (array.dtype, array.shape, array.tolist())
    assert not array.size or np.shares_memory(got, array)


@given(st.sampled_from([row.token for row in PLAIN]), st.lists(st.integers(0, 4), max_size=5))
def test_any_shape_is_exported(token: str, shape: list[int]) -> None:
    array = filled(dtypes.by_token(token), *shape)
    got = np.from_dlpack(Capsule(array))
    assert (got.shape, got.tobytes()) == (array.shape, array.tobytes())


def test_an_export_lives_as_long_as_its_consumer_and_no_longer() -> None:
    gc.collect()
    before = len(tensors._exported)
    array = np.arange(12, dtype=np.float32)
    expected = array.tolist()
    consumers = [np.from_dlpack(Capsule(array)) for _ in range(3)]
    del array
    gc.collect()
    assert (len(tensors._exported) - before, consumers[2].tolist()) == (3, expected)
    consumers.clear()
    gc.collect()
    assert len(tensors._exported) == before


def test_a_bf16_export_is_read_by_jax() -> None:
    pytest.importorskip("jax")
    import jax.dlpack

    array = np.array([[1.5, -2], [3e38, 0]], dtypes.by_token("bf16").numpy)
    got = np.asarray(jax.dlpack.from_dlpack(Capsule(array), copy=True))
    assert (got.dtype, got.tobytes()) == (array.dtype, array.tobytes())


def test_a_bf16_export_is_read_by_torch() -> None:
    torch = pytest.importorskip("torch", reason="the torch extra is not installed in this interpreter")
    array = np.array([[1.5, -2], [3e38, 0]], dtypes.by_token("bf16").numpy)
    got = torch.from_dlpack(Capsule(array))
    assert (got.dtype, got.view(torch.int16).numpy().tobytes()) == (torch.bfloat16, array.tobytes())


def test_a_producer_says_it_is_on_the_cpu() -> None:
    assert Capsule(np.zeros(1)).__dlpack_device__() == (1, 0)


@pytest.mark.parametrize("row", [*PLAIN, dtypes.by_token("bf16")], ids=lambda row: row.token)
@pytest.mark.parametrize("layout", ["plain", "strided", "reversed", "read-only", "scalar", "empty"])
def test_an_output_of_any_layout_arrives_exact(pb_utils: Any, row: dtypes.DType, layout: str) -> None:
    array = {
        "plain": lambda a: a,
        "strided": lambda a: a[:, ::2].T,
        "reversed": lambda a: a[::-1],
        "read-only": lambda a: a,
        "scalar": lambda a: a[0, 0].reshape(()),
        "empty": lambda a: a[:0],
    }[layout](filled(row, 4, 6))
    if layout == "read-only":
        array.flags.writeable = False
    before = len(tensors._exported)
    tensor = TensorAccess(pb_utils).writer(TensorSpec("y", row.token, (-1,)))(array)
    sent = tensor._array
    assert (tensor.name(), sent.dtype, sent.shape, sent.tobytes()) == ("y", row.numpy, array.shape, array.tobytes())
    assert len(tensors._exported) == before


@pytest.mark.parametrize("row", PLAIN, ids=lambda row: row.token)
def test_an_input_is_a_view_of_the_servers_memory(pb_utils: Any, request_of: Any, row: dtypes.DType) -> None:
    request = request_of(x=filled(row, 2, 3))
    ((got,),) = TensorAccess(pb_utils).request_reader([TensorSpec("x", row.token, (2, 3))])([request])
    assert (got.dtype, got.tolist()) == (row.numpy, request.arrays["x"].tolist())
    assert np.shares_memory(got, request.arrays["x"])


@pytest.mark.parametrize("shape", [(2, 3), (0,), ()])
def test_a_bf16_input_is_a_copy_of_its_own_dtype(pb_utils: Any, request_of: Any, shape: tuple[int, ...]) -> None:
    row = dtypes.by_token("bf16")
    request = request_of(x=filled(row, *shape))
    ((got,),) = TensorAccess(pb_utils).request_reader([TensorSpec("x", "bf16", shape)])([request])
    assert (got.dtype, got.shape, got.tobytes()) == (row.numpy, shape, request.arrays["x"].tobytes())
    assert not np.shares_memory(got, request.arrays["x"])


@pytest.mark.parametrize(("version", "way"), [("1.26.4", "plain"), ("2.0.0", "dlpack"), ("10.1", "dlpack")])
def test_the_numpy_generation_alone_picks_the_way(version: str, way: str) -> None:
    """Each way is silently wrong or deadly on the other generation, so neither may be touched there."""
    used: list[str] = []

    class Tensor:
        def __init__(self, name: str, array: np.ndarray) -> None:
            used.append("plain")

        @classmethod
        def from_dlpack(cls, name: str, producer: Any) -> None:
            used.append("dlpack")

        def as_numpy(self) -> np.ndarray:
            used.append("plain")
            return np.zeros(2, np.float32)

        def __dlpack__(self, **options: Any) -> Any:
            used.append("dlpack")
            return Capsule(np.zeros(2, np.float32)).__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    access = TensorAccess(SimpleNamespace(Tensor=Tensor), version)
    access.writer(TensorSpec("y", "f32", (2,)))(np.zeros(2, np.float32))
    access.reader(TensorSpec("x", "f32", (2,)))(Tensor.__new__(Tensor))
    assert used == [way, way]


@pytest.mark.parametrize(
    ("numpy_version", "server_version", "fits"),
    [
        ("1.26.4", "", True),
        ("2.4.0", "", False),
        ("2.4.0", "2.51.0", False),
        ("2.4.0", "2.52.0", True),
        ("2.4.0", "3.0.0", True),
    ],
)
def test_texts_are_refused_where_they_would_end_the_process(
    numpy_version: str, server_version: str, fits: bool
) -> None:
    texts = TensorSpec("words", "bytes", (-1,))
    utils = SimpleNamespace(Tensor=lambda _name, array: array)
    access = TensorAccess(utils, numpy_version, server_version)
    if fits:
        assert access.writer(texts)([b"a"]) == [b"a"]
        return
    for make in (access.reader, access.writer):
        with pytest.raises(BundleError, match=r"'words' holds texts \(BYTES\), which Triton before 2.52 cannot"):
            make(texts)


def test_a_consumed_export_calls_its_deleter_once(dlpack_take: Callable[[Any], np.ndarray]) -> None:
    before = set(tensors._exported)
    got = dlpack_take(Capsule(np.arange(3, dtype=np.int16)))
    assert (got.tolist(), set(tensors._exported)) == ([0, 1, 2], before)
