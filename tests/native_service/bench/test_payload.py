"""Requests made from a model's metadata."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import WIRE_DTYPES
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor

from native_service.bench import payload
from native_service.bench.payload import Inputs, Tensor
from native_service.client.errors import BadRequest
from native_service.proto import inference_pb2
from nereid_backend import dtypes

ROWS = Inputs("m", (Tensor("x", "FP32", (-1, 3)),), 8)
FREE = Inputs("m", (Tensor("ids", "INT64", (-1, -1)), Tensor("mask", "INT64", (-1, -1))), 8)
NO_ROWS = Inputs("m", (Tensor("x", "FP32", (3,)),), 0)


def arrays_of(request: Any) -> dict[str, np.ndarray]:
    message = service_pb2.ModelInferRequest.FromString(request)
    assert message.model_name == "m"
    return {
        tensor.name: np.frombuffer(data, dtypes.by_kserve(tensor.datatype).numpy).reshape(tensor.shape)
        for tensor, data in zip(message.inputs, message.raw_input_contents, strict=True)
    }


def made(inputs: Inputs, rows: int = 1, shapes: Any = None, arrays: Any = None, *, native: bool = False) -> list[Any]:
    return payload.requests(inputs, rows, shapes or {}, arrays or {}, native=native)


@pytest.mark.parametrize("element", WIRE_DTYPES, ids=lambda row: row.token)
def test_every_element_type_is_made_up_in_its_size(element: dtypes.DType) -> None:
    assert element.kserve is not None
    one, *others = made(Inputs("m", (Tensor("x", element.kserve, (-1, 4, 2)),), 8), 5)
    assert arrays_of(one)["x"].shape == (5, 4, 2)
    assert all(request != one for request in others)
    assert others


def test_texts_are_made_up() -> None:
    message = service_pb2.ModelInferRequest.FromString(made(Inputs("m", (Tensor("x", "BYTES", (-1, 2)),), 8), 3)[0])
    texts = deserialize_bytes_tensor(message.raw_input_contents[0])
    assert (list(message.inputs[0].shape), len(texts)) == ([3, 2], 6)
    assert all(text.isalpha() for text in texts)


def test_whole_numbers_are_small_enough_for_any_vocabulary() -> None:
    values = np.concatenate([arrays_of(request)["ids"] for request in made(FREE, 8, {"ids": (50,), "mask": (50,)})])
    assert (values.min() >= 0, values.max() < 100) == (True, True)


@given(st.integers(1, 12), st.integers(1, 8))
def test_rows_of_a_file_are_sent_in_turn_and_from_the_start_again(held: int, rows: int) -> None:
    array = np.arange(held * 3, dtype=np.float32).reshape(held, 3)
    requests = made(ROWS, rows, arrays={"x": array})
    sent = np.concatenate([arrays_of(request)["x"] for request in requests])
    np.testing.assert_array_equal(sent, array[np.arange(len(sent)) % held])
    assert len(sent) % held == 0


def test_one_row_of_a_file_needs_no_axis_for_rows() -> None:
    (request,) = made(ROWS, 2, arrays={"x": np.ones(3, np.float32)})
    assert arrays_of(request)["x"].shape == (2, 3)


def test_an_input_that_no_file_brings_is_made_up() -> None:
    inputs = Inputs("m", (*ROWS.tensors, Tensor("z", "INT8", (-1, 1))), 8)
    sent = arrays_of(made(inputs, 1, arrays={"x": np.ones((1, 3), np.float32)})[0])
    assert (sent["x"].tolist(), sent["z"].shape) == ([[1, 1, 1]], (1, 1))


def test_texts_of_a_file_are_sent_as_they_are() -> None:
    request = made(Inputs("m", (Tensor("x", "BYTES", (-1,)),), 8), 2, arrays={"x": np.array(["über", "a"])})[0]
    message = service_pb2.ModelInferRequest.FromString(request)
    assert deserialize_bytes_tensor(message.raw_input_contents[0]).tolist() == ["über".encode(), b"a"]


def test_a_checkpoint_carries_the_same_bytes() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    (messages,) = made(ROWS, 2, arrays={"x": array}, native=True)
    meta, chunk = map(inference_pb2.CheckpointRequest.FromString, messages)
    assert (meta.meta.model_name, chunk.chunk.data, list(chunk.chunk.shape)) == ("m", array.tobytes(), [2, 3])


def test_different_requests_are_bounded_by_their_bytes() -> None:
    large = Inputs("m", (Tensor("x", "FP32", (-1, 8 * 1024 * 1024)),), 8)
    assert len(made(large)) == 2


@pytest.mark.parametrize(
    ("inputs", "rows", "shapes", "arrays", "words"),
    [
        (FREE, 1, {"ids": (4,)}, {}, r"'mask' has the shape \[-1, -1\]; say .* --shape mask:N"),
        (FREE, 1, {"ids": (4, 4), "mask": (4,)}, {}, r"takes the shape \[-1\] \(without the rows\), got \[4, 4\]"),
        (ROWS, 1, {"y": (4,)}, {}, "no input 'y'; it has: x"),
        (ROWS, 1, {}, {"y": np.ones(3)}, "no input 'y'; it has: x"),
        (ROWS, 9, {}, {}, "up to 8 rows in a request, got --batch 9"),
        (NO_ROWS, 2, {}, {}, "no rows in a request, got --batch 2"),
        (ROWS, 1, {}, {"x": np.ones((1, 4), np.float32)}, r"takes the shape \[3\] .*got \[4\]"),
        (ROWS, 1, {}, {"x": np.ones((0, 3), np.float32)}, "has no rows"),
        (ROWS, 1, {}, {"x": np.ones((1, 3), np.float64)}, "must be float32, got float64"),
        (Inputs("m", (Tensor("x", "BYTES", (-1,)),), 8), 1, {}, {"x": np.ones(1)}, "takes texts"),
        (Inputs("m", (Tensor("x", "FP64", (-1, 1 << 40)),), 8), 1, {}, {}, "at most 1073741824 can be sent"),
    ],
)
def test_what_does_not_fit_the_model_is_told(inputs: Inputs, rows: int, shapes: Any, arrays: Any, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        made(inputs, rows, shapes, arrays)


def described(*shapes: tuple[int, ...]) -> Any:
    tensors = [{"name": f"x{number}", "datatype": "FP32", "shape": shape} for number, shape in enumerate(shapes)]
    return service_pb2.ModelMetadataResponse(name="m", inputs=tensors)


@pytest.mark.parametrize(
    ("shapes", "max_batch_size", "at_most"),
    [
        ([(-1, 3)], 8, 8),
        ([(-1, 3)], None, None),
        ([(-1, 3)], 0, None),
        ([(-1, 3), (2,)], 0, 0),
        ([(2, 3)], None, 0),
        ([()], None, 0),
    ],
)
def test_a_free_first_axis_is_for_rows_unless_the_configuration_says_so(
    shapes: list[tuple[int, ...]], max_batch_size: int | None, at_most: int | None
) -> None:
    config = None if max_batch_size is None else service_pb2.ModelConfigResponse().config
    if config is not None:
        config.max_batch_size = max_batch_size or 0
    assert payload.of_metadata(described(*shapes), config).rows_at_most == at_most
