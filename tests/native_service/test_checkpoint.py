import itertools
import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from native_service.checkpoint import CHUNK_BYTES, Budget, CheckpointInput, CheckpointReader, batched_shape
from native_service.checkpoint import output_chunks as cut
from native_service.proto import inference_pb2 as pb
from native_service.settings import Limits
from nereid_backend.errors import InvalidArgument, NereidError, NotFound, ResourceExhausted
from nereid_backend.spec import ModelSpec, Program, TensorSpec

Spec = Callable[..., ModelSpec]


def meta(name: str = "adder") -> pb.CheckpointRequest:
    return pb.CheckpointRequest(meta=pb.CheckpointMeta(model_name=name, output_file="ignored.npz"))


def chunk(shape: Sequence[int], data: bytes = b"", *, end: bool = False, index: int = 0) -> pb.CheckpointRequest:
    return pb.CheckpointRequest(chunk=pb.TensorChunk(shape=shape, data=data, end_of_tensor=end, chunk_index=index))


EMPTY = pb.CheckpointRequest()


def read(model: ModelSpec, *messages: pb.CheckpointRequest, limits: Limits | None = None) -> CheckpointInput:
    limits = limits or Limits()
    reader = CheckpointReader({model.name: model}, limits, Budget(limits.max_buffered_bytes))
    for message in messages:
        reader.receive(message)
    return reader.finish()


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
    assert (whole.shape, bytes(whole.data)) == ((1, 16), data)


def test_a_left_out_batch_dimension_is_put_in(spec: Spec) -> None:
    assert read(spec(), meta(), chunk([16], bytes(64))).shape == (1, 16)


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
    assert read(model, meta(), chunk([2], bytes(16))).shape == (1, 2)
    with pytest.raises(InvalidArgument, match="needs 16 bytes, got 8"):
        read(model, meta(), chunk([2], bytes(8)))


def test_a_model_without_input_ignores_what_is_sent(spec: Spec) -> None:
    model = spec(inputs=0)
    limits = Limits()
    reader = CheckpointReader({"adder": model}, limits, Budget(1))
    assert reader.needs_input
    reader.receive(meta())
    assert not reader.needs_input
    assert reader.finish().tensor is None


def test_a_model_with_two_inputs_is_sent_to_kserve(spec: Spec) -> None:
    with pytest.raises(InvalidArgument, match=r"2 inputs and Checkpoint carries one.*ModelInfer"):
        read(spec(inputs=2), meta())


def test_a_tensor_over_the_limit_is_refused_before_any_byte_is_kept(spec: Spec) -> None:
    limits, budget = Limits(max_tensor_bytes=64), Budget(1000)
    reader = CheckpointReader({"adder": spec()}, limits, budget)
    reader.receive(meta())
    with pytest.raises(InvalidArgument, match="is 128 bytes, the limit of this server is 64"):
        reader.receive(chunk([2, 16], bytes(64)))
    assert budget.used_bytes == 0


def test_a_shape_of_astronomic_size_is_refused(spec: Spec) -> None:
    with pytest.raises(InvalidArgument, match="limit of this server"):
        read(spec(dims=(-1, -1), max_batch_size=0), meta(), chunk([2**62, 2**62]))


def test_endless_empty_chunks_are_refused(spec: Spec) -> None:
    with pytest.raises(InvalidArgument, match="may send 3 chunks"):
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
    assert (whole.shape, bytes(whole.data)) == (shape, payload)


@given(size=st.one_of(st.integers(0, 5), st.integers(0, 3).map(lambda n: n * CHUNK_BYTES), st.integers(0, 300_000)))
def test_output_chunks_join_to_the_tensor(size: int) -> None:
    data = bytes(size)
    chunks = list(cut("output", (size,), data))
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
