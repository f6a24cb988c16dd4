import itertools
import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from native_service.edge.infer_messages import Tensor
from native_service.nereid.checkpoint import CHUNK_BYTES, Budget, CheckpointReader, batched_shape, output_messages
from native_service.proto import inference_pb2 as pb
from native_service.settings import Limits
from nereid_backend.errors import InvalidArgument, NereidError, NotFound, OverLimit, ResourceExhausted
from nereid_backend.spec import ModelSpec, Program, TensorSpec

Spec = Callable[..., ModelSpec]


def meta(name: str = "adder") -> pb.CheckpointRequest:
    return pb.CheckpointRequest(meta=pb.CheckpointMeta(model_name=name, output_file="ignored.npz"))


def chunk(
    shape: Sequence[int], data: bytes = b"", *, end: bool = False, index: int = 0, name: str = ""
) -> pb.CheckpointRequest:
    tensor = pb.TensorChunk(tensor_name=name, shape=shape, data=data, end_of_tensor=end, chunk_index=index)
    return pb.CheckpointRequest(chunk=tensor)


EMPTY = pb.CheckpointRequest()


def read(model: ModelSpec, *messages: pb.CheckpointRequest, limits: Limits | None = None) -> dict[str, Tensor]:
    """What Triton would be asked, by input."""
    limits = limits or Limits()
    budget = Budget(limits.max_buffered_bytes)
    reader = CheckpointReader({model.name: model}, limits, budget)
    for message in messages:
        reader.receive(message)
    assert reader.finish() is model
    request = service_pb2.ModelInferRequest.FromString(reader.take_request())
    assert budget.used_bytes == 0
    assert request.model_name == model.name
    assert [t.datatype for t in request.inputs] == [t.element.kserve for t in model.inputs]
    pairs = zip(request.inputs, request.raw_input_contents, strict=True)
    return {t.name: Tensor(t.name, tuple(t.shape), data) for t, data in pairs}


@pytest.mark.parametrize(
    ("messages", "error", "words"),
    [
        ([], InvalidArgument, "stream is empty; the first message must be metadata"),
        ([chunk([16])], InvalidArgument, "first Checkpoint message must be metadata"),
        ([EMPTY], InvalidArgument, "first Checkpoint message has no payload"),
        ([meta("  ")], InvalidArgument, "model_name is required"),
        ([meta("nope")], NotFound, "'nope' is not served here (not in nereid.yaml)"),
        ([meta(), EMPTY], InvalidArgument, "message has no payload"),
        ([meta(), meta()], InvalidArgument, "only as the first message"),
        ([meta(), chunk([16], bytes(64), end=True), chunk([])], InvalidArgument, "after end_of_tensor"),
        ([meta(), chunk([])], InvalidArgument, "must carry the tensor's shape"),
        ([meta(), chunk([0, 15, 3])], InvalidArgument, "dimensions must be positive, got 0 at index 0"),
        ([meta(), chunk([-1, 16])], InvalidArgument, "dimensions must be positive, got -1"),
        ([meta(), chunk([11, 15])], InvalidArgument, "batch 11 is over the limit of 10"),
        ([meta(), chunk([1, 1, 16])], InvalidArgument, "expected rank 2 (or 1 without the batch dimension)"),
        ([meta(), chunk([1, 15])], InvalidArgument, "dimension 1 must be 16, got 15"),
        ([meta(), chunk([15])], InvalidArgument, "dimension 0 must be 16, got 15"),
        ([meta(), chunk([1, 16]), chunk([2, 16])], InvalidArgument, "first [1, 16], now [2, 16]"),
        ([meta()], InvalidArgument, "no tensor chunks"),
        ([meta(), chunk([1, 16], bytes(60))], InvalidArgument, "needs 64 bytes, got 60"),
        ([meta(), chunk([1, 16], bytes(60)), chunk([1, 16], bytes(8))], InvalidArgument, "got at least 68"),
    ],
)
def test_each_row_of_the_table_has_its_error(
    spec: Spec, messages: list[pb.CheckpointRequest], error: type[NereidError], words: str
) -> None:
    with pytest.raises(error) as caught:
        read(spec(), *messages)
    assert type(caught.value) is error
    assert words in str(caught.value)


def test_a_tensor_may_come_in_chunks_and_without_an_end_mark(spec: Spec) -> None:
    data = bytes(range(64))
    whole = read(spec(), meta(" adder "), chunk([1, 16], data[:24], index=7), chunk([1, 16], data[24:]))
    assert whole == {"input": Tensor("input", (1, 16), data)}


def test_a_left_out_batch_dimension_is_put_in(spec: Spec) -> None:
    assert read(spec(), meta(), chunk([16], bytes(64)))["input"].shape == (1, 16)


@pytest.mark.parametrize(
    ("dims", "limit", "sent", "expected"),
    [
        ((-1, 16), 8, (4, 10, 16), (4, 10, 16)),
        ((-1, 16), 8, (9, 10, 16), None),
        ((-1, 16), 8, (4, 10, 15), None),
        ((-1, 16), 8, (10, 16), (1, 10, 16)),
        ((10, 16), 0, (10, 16), (10, 16)),
        ((10, 16), 0, (1, 10, 16), None),
        ((-1, -1, 16), 4, (2, 5, 7, 16), (2, 5, 7, 16)),
        ((-1, -1, 16), 4, (2, 5, 7, 15), None),
    ],
)
def test_the_batch_rules(
    spec: Spec, dims: tuple[int, ...], limit: int, sent: tuple[int, ...], expected: tuple[int, ...] | None
) -> None:
    model = spec(dims=dims, max_batch_size=limit)
    if expected is not None:
        assert batched_shape(model, model.inputs[0], sent) == expected
        return
    with pytest.raises(InvalidArgument):
        batched_shape(model, model.inputs[0], sent)


def test_the_element_size_is_the_declared_type_s(spec: Spec) -> None:
    model = spec(dtype="i64", dims=(2,))
    assert read(model, meta(), chunk([2], bytes(16)))["input"].shape == (1, 2)
    with pytest.raises(InvalidArgument, match="needs 16 bytes, got 8"):
        read(model, meta(), chunk([2], bytes(8)))


def test_a_model_without_input_ignores_what_is_sent(spec: Spec) -> None:
    model = spec(inputs=0)
    limits = Limits()
    reader = CheckpointReader({"adder": model}, limits, Budget(1))
    assert reader.needs_input
    reader.receive(meta())
    assert not reader.needs_input
    assert reader.finish() is model
    assert service_pb2.ModelInferRequest.FromString(reader.take_request()) == service_pb2.ModelInferRequest(
        model_name="adder"
    )


@pytest.mark.parametrize("name", ["", "input", "something else"])
def test_the_name_of_a_model_s_only_input_does_not_matter(spec: Spec, name: str) -> None:
    assert read(spec(), meta(), chunk([16], bytes(64), name=name)) == {"input": Tensor("input", (1, 16), bytes(64))}


A, B = bytes(range(64)), bytes(range(64, 128))
PIECES = [("input0", A[:24]), ("input0", A[24:]), ("input1", B[:40]), ("input1", B[40:])]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1), (0, 2, 1, 3), (2, 0, 3, 1)])
def test_several_inputs_come_by_name_in_any_order_and_interleaved(spec: Spec, order: tuple[int, ...]) -> None:
    chunks = [
        chunk([16] if name == "input0" else [1, 16], data, name=name) for name, data in (PIECES[i] for i in order)
    ]
    assert read(spec(inputs=2), meta(), *chunks) == {
        "input0": Tensor("input0", (1, 16), A),
        "input1": Tensor("input1", (1, 16), B),
    }


def test_an_input_that_has_ended_leaves_the_others_open(spec: Spec) -> None:
    first = [chunk([16], A, name="input0", end=True), chunk([16], B, name="input1", end=True)]
    assert read(spec(inputs=2), meta(), *first).keys() == {"input0", "input1"}
    with pytest.raises(InvalidArgument, match="model 'adder' input 'input0': a chunk came after end_of_tensor=true"):
        read(spec(inputs=2), meta(), *first, chunk([16], name="input0"))


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([], "no tensor chunks were sent for model 'adder'"),
        ([chunk([16], A)], "no input ''; tensor_name must be one of ['input0', 'input1']"),
        ([chunk([16], A, name="x")], "no input 'x'; tensor_name must be one of ['input0', 'input1']"),
        ([chunk([16], A, name="input1")], "needs the inputs ['input0', 'input1']; not sent: ['input0']"),
        ([chunk([15], A, name="input1")], "input 'input1': dimension 0 must be 16, got 15"),
        (
            [chunk([16], A, name="input0"), chunk([16], A, name="input1"), chunk([1, 16], name="input1")],
            "input 'input1': the shape changed within the request: first [16], now [1, 16]",
        ),
        (
            [chunk([16], A, name="input0"), chunk([16], B[:60], name="input1")],
            "input 'input1': shape [16] needs 64 bytes, got 60",
        ),
        (
            [chunk([2, 16], A + A, name="input0"), chunk([16], B, name="input1")],
            "all inputs must have as many rows, got {'input0': 2, 'input1': 1}",
        ),
    ],
)
def test_what_is_wrong_about_several_inputs_is_said(spec: Spec, chunks: list[pb.CheckpointRequest], words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read(spec(inputs=2), meta(), *chunks)
    assert words in str(caught.value)


def test_all_inputs_together_are_bounded_like_a_modelinfer_request(spec: Spec) -> None:
    both = [chunk([16], A, name="input0"), chunk([16], B, name="input1")]
    assert read(spec(inputs=2), meta(), *both, limits=Limits(max_request_bytes=128))
    with pytest.raises(OverLimit, match=r"are 128 bytes or more, .* is 127 \(server.limits.max_request_bytes\)"):
        read(spec(inputs=2), meta(), *both, limits=Limits(max_request_bytes=127))


def test_a_tensor_over_the_limit_is_refused_before_any_byte_is_kept(spec: Spec) -> None:
    limits, budget = Limits(max_tensor_bytes=64), Budget(1000)
    reader = CheckpointReader({"adder": spec()}, limits, budget)
    reader.receive(meta())
    with pytest.raises(OverLimit, match="is 128 bytes, the limit of this server is 64"):
        reader.receive(chunk([2, 16], bytes(64)))
    assert budget.used_bytes == 0


def test_a_shape_of_astronomic_size_is_refused(spec: Spec) -> None:
    with pytest.raises(OverLimit, match="limit of this server"):
        read(spec(dims=(-1, -1), max_batch_size=0), meta(), chunk([2**62, 2**62]))


def test_endless_empty_chunks_are_refused(spec: Spec) -> None:
    with pytest.raises(OverLimit, match="may send 3 chunks"):
        read(spec(), meta(), *[chunk([16])] * 4, limits=Limits(max_chunks=3))


def test_all_calls_share_one_budget_and_give_it_back(spec: Spec) -> None:
    limits, budget = Limits(), Budget(100)
    first, second = (CheckpointReader({"adder": spec()}, limits, budget) for _ in range(2))
    for reader in (first, second):
        reader.receive(meta())
    first.receive(chunk([16], bytes(64)))
    with pytest.raises(ResourceExhausted, match="retry later"):
        second.receive(chunk([16], bytes(64)))
    first.close()
    second.receive(chunk([16], bytes(64)))
    second.close()
    second.close()
    assert budget.used_bytes == 0


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@given(shape=shapes, cuts=st.lists(st.integers(0, 5000), max_size=5), data=st.data())
def test_any_cutting_gives_the_same_tensor(shape: tuple[int, ...], cuts: list[int], data: st.DataObject) -> None:
    model = ModelSpec("adder", "fake", "fake", (TensorSpec("input", "f32", (-1,) * len(shape)),), (), ())
    size = 4 * math.prod(shape)
    payload = data.draw(st.binary(min_size=size, max_size=size))
    edges = [0, *sorted(min(cut, size) for cut in cuts), size]
    pieces = [payload[a:b] for a, b in itertools.pairwise(edges)]
    whole = read(model, meta(), *(chunk(shape, piece) for piece in pieces))
    assert whole["input"] == Tensor("input", shape, payload)


@given(size=st.one_of(st.integers(0, 5), st.integers(0, 3).map(lambda n: n * CHUNK_BYTES), st.integers(0, 300_000)))
def test_output_chunks_join_to_the_tensor(size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    messages = list(output_messages(Tensor("output", (size,), memoryview(data))))
    responses = [pb.CheckpointResponse.FromString(message) for message in messages]
    assert [r.SerializeToString() for r in responses] == messages  # as protobuf itself would write them
    chunks = [r.output_chunk for r in responses]
    assert b"".join(c.data for c in chunks) == data
    assert [c.chunk_index for c in chunks] == list(range(len(chunks)))
    assert [c.end_of_tensor for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(list(c.shape) == [size] and c.tensor_name == "output" for c in chunks)
    assert all(len(c.data) == CHUNK_BYTES for c in chunks[:-1])
    assert len(chunks) == max(1, math.ceil(size / CHUNK_BYTES))


@pytest.mark.parametrize(("max_batch_size", "sent"), [(0, [1]), (8, [2, 1]), (8, [1])])
def test_a_scalar_travels_as_a_dimension_of_one(max_batch_size: int, sent: list[int]) -> None:
    scalar = TensorSpec("x", "f32", (-1,) if max_batch_size else (), 0 if max_batch_size else None)
    model = ModelSpec("m", "fake", "fake", (scalar,), (scalar,), (Program("f"),), max_batch_size=max_batch_size)
    full = tuple(sent) if len(sent) == 2 or not max_batch_size else (1, *sent)
    assert batched_shape(model, scalar, sent) == full
