from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from native_service.edge.infer_messages import Tensor, read_outputs, write_request
from nereid_backend.errors import EngineError
from nereid_backend.spec import TensorSpec

names = st.text(min_size=1, max_size=8)
shapes = st.lists(st.integers(0, 2**62), max_size=4)
tensors = st.lists(st.tuples(names, shapes, st.binary(max_size=300)), max_size=4)


@given(model=names, inputs=tensors)
def test_a_written_request_is_what_protobuf_reads(model: str, inputs: list[tuple[str, list[int], bytes]]) -> None:
    spec = TensorSpec("any", "i16", (-1,), 0)
    expected = service_pb2.ModelInferRequest(model_name=model)
    for name, shape, data in inputs:
        expected.inputs.add(name=name, datatype="INT16", shape=shape)
        expected.raw_input_contents.append(data)
    written = write_request(model, [(spec, Tensor(name, shape, memoryview(data))) for name, shape, data in inputs])
    assert service_pb2.ModelInferRequest.FromString(written) == expected


def response(outputs: list[tuple[str, list[int], bytes]]) -> service_pb2.ModelInferResponse:
    message = service_pb2.ModelInferResponse(model_name="m", model_version="1", id="an id")
    for name, shape, data in outputs:
        message.outputs.add(name=name, datatype="FP32", shape=shape).parameters["p"].double_param = 1.5
        message.raw_output_contents.append(data)
    message.parameters["q"].int64_param = -1
    return message


@given(outputs=tensors)
def test_the_outputs_are_read_as_protobuf_wrote_them(outputs: list[tuple[str, list[int], bytes]]) -> None:
    read = read_outputs(response(outputs).SerializeToString())
    assert [(t.name, list(t.shape), bytes(t.data)) for t in read] == outputs


def test_a_tensor_s_bytes_are_not_copied() -> None:
    message = response([("y", [4], np.arange(4, dtype="<f4").tobytes())]).SerializeToString()
    [tensor] = read_outputs(message)
    assert isinstance(tensor.data, memoryview)
    assert tensor.data.obj is message


@given(outputs=tensors, cut=st.integers(0, 400), noise=st.binary(max_size=20))
def test_what_is_no_answer_raises_our_error_only(
    outputs: list[tuple[str, list[int], bytes]], cut: int, noise: bytes
) -> None:
    damaged = response(outputs).SerializeToString()[:cut] + noise
    with suppress(EngineError):
        read_outputs(damaged)


def test_an_output_without_bytes_is_an_error() -> None:
    message = response([("y", [1], b"abcd")])
    del message.raw_output_contents[:]
    with pytest.raises(EngineError, match="outputs that carry no bytes"):
        read_outputs(message.SerializeToString())
