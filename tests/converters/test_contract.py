from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import MANY, damaged

from converters import contract as contracts
from converters.artifact import input_spec
from converters.contract import Contract, ContractTensor, parse
from converters.repository import config_text
from nereid_backend import dtypes
from nereid_backend.errors import ContractError
from nereid_backend.spec import ModelSpec

WIRE = {row.token: row.kserve for row in dtypes.TABLE if row.kserve}
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
dims = st.lists(st.integers(-1, 9).filter(bool), min_size=1, max_size=4).map(tuple)
tensors = st.lists(
    st.builds(ContractTensor, names, st.sampled_from(list(WIRE)), dims),
    min_size=1,
    max_size=3,
    unique_by=lambda t: t.name,
)
sizes = st.integers(0, 64)


@st.composite
def flat_contracts(draw: st.DrawFn) -> Contract:
    dtype = draw(st.sampled_from(list(WIRE)))
    has_input, has_output = draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    inputs = (ContractTensor("input", dtype, draw(dims)),) if has_input else ()
    return Contract(inputs, (ContractTensor("output", dtype, draw(dims) if has_output else None),), draw(sizes), True)


block_contracts = st.builds(Contract, tensors.map(tuple), tensors.map(tuple), sizes, st.just(False))


def blocks(contract: Contract, quote: str, separator: str) -> list[str]:
    parts = []
    for kind, listed in (("input", contract.inputs), ("output", contract.outputs)):
        for t in listed:
            fields = [
                f"name: {quote}{t.name}{quote}",
                f"data_type: {quote}{WIRE[t.dtype]}{quote}",
                f"dims: {list(t.dims)}",
            ]
            parts.append(separator.join([f"{kind} {{", *fields, "}"]))
    return parts


def flat(contract: Contract, quote: str) -> list[str]:
    lines = [f"input_shape: {list(t.dims)}" for t in contract.inputs]
    lines += [f"output_shape: {list(t.dims)}" for t in contract.outputs if t.dims is not None]
    return [*lines, f"data_type: {quote}{WIRE[contract.outputs[0].dtype]}{quote}"]


@given(flat_contracts() | block_contracts, st.booleans())
def test_both_notations_of_a_contract_mean_the_same(contract: Contract, one_line: bool) -> None:
    size = f"max_batch_size: {contract.max_batch_size}"
    body = flat(contract, '"') if contract.flat else blocks(contract, '"', " " if one_line else "\n")
    text_format = (" " if one_line else "\n").join([size, *body])
    body = flat(contract, "") if contract.flat else blocks(contract, "", "\n")
    lines = "\n".join(["# a comment", size, *body, "  # another"])
    assert (parse(text_format), parse(lines)) == (contract, contract)


def test_the_two_notations_of_the_upstream_examples() -> None:
    a, b = (ContractTensor(n, "f32", (4,)) for n in "ab")
    expected = Contract((a, b), (ContractTensor("sum", "i64", (-1, 2)),), 4, False)
    assert (
        parse(
            'max_batch_size: 4\ninput {\n  name: "a"\n  data_type: "FP32"\n  dims: [4]\n}\n'
            "input{\nname: b # second\ndims: [ 4 ]\n}\n"
            "output { \n  name: sum\n  data_type: INT64\n  dims: [-1, 2]\n}\n"
        )
        == expected
    )
    assert (
        parse(
            'max_batch_size: 4 input { name: "a" dims: 4 } input: < name: "b" dims: [4] >\n'
            'output [{ name: "sum", data_type: INT64, dims: -1 dims: 2 }]'
        )
        == expected
    )


def test_f14_a_flat_contract_with_a_batch() -> None:
    assert parse("input_shape: [16]\nmax_batch_size: 10\n") == Contract(
        (ContractTensor("input", "f32", (16,)),), (ContractTensor("output", "f32", None),), 10, True
    )


def test_f15_without_a_batch_the_shape_is_the_whole_shape() -> None:
    got = parse("input_shape: [10, 16]")
    assert (got.inputs[0].dims, got.max_batch_size) == ((10, 16), 0)


def test_f16_several_axes_may_be_variable() -> None:
    assert parse("input_shape: [-1, -1, 16]\nmax_batch_size: 4").inputs[0].dims == (-1, -1, 16)


def test_f17_the_datatype_defaults_to_fp32_in_blocks_and_flat() -> None:
    got = parse("input {\nname: a\ndims: [1]\n}\noutput {\nname: b\ndims: [1]\n}")
    assert [t.dtype for t in (*got.inputs, *got.outputs)] == ["f32", "f32"]
    assert parse("output_shape: [9]") == Contract((), (ContractTensor("output", "f32", (9,)),), 0, True)


def test_an_unquoted_datatype_is_the_same_as_a_quoted_one() -> None:
    assert parse("input_shape: [4] data_type: INT32") == parse("input_shape: [4]\ndata_type: 'INT32'")


BLOCK = 'input { name: "a" dims: [1] } output { name: "b" dims: [1] } '


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "needs input_shape, output_shape, or input and output blocks"),
        ("max_batch_size: 3", "needs input_shape"),
        ("input_shape: 4 4", "expected|input_shape must be integers in brackets"),
        ("input_shape: 16", None),
        ("output_shape: [4", "output_shape"),
        ("output_shape: [a]", "output_shape must be integers in brackets such as"),
        ("output_shape: [1.5]", "output_shape must be integers"),
        ("output_shape: []", "shape is empty|output_shape is empty"),
        ("output_shape: [0]", "output_shape has 0; dimensions are -1 or >= 1"),
        ("output_shape: [99999999999999999999]", "output_shape has 99999999999999999999"),
        ("output_shape: [-2]", "output_shape has -2"),
        ("input_shape: [4]\ninput_shape: [5]", "input_shape is given twice"),
        ("input_shape: [4]\nmax_batch_size: -1", "max_batch_size must be >= 0 .*got -1"),
        ("input_shape: [4]\nmax_batch_size: two", "max_batch_size must be an integer"),
        ("input_shape: [4]\nmax_batch_size: 3000000000", "max_batch_size"),
        ("input_shape: [4]\ndata_type: TYPE_FP32", "data_type 'TYPE_FP32' is not supported; known: BOOL"),
        ("input_shape: [4]\ndata_type: BYTES", "data_type 'BYTES' is not supported"),
        ("input_shape: [4]\nmax_batchsize: 3", "unknown key 'max_batchsize'; known here: input_shape"),
        ("input_shape: [4]\nplatform: onnx", "unknown key 'platform'"),
        ("input_shape [4]", "expected 'key: value'"),
        ("input_shape: [4]\n}", "closing brace without a block"),
        (BLOCK + "input_shape: [1]", "input_shape belongs to the flat form"),
        (BLOCK + "data_type: FP32", "data_type belongs to the flat form"),
        ('input { name: "a" dims: [1] }', "at least one input block and one output block"),
        ('output { name: "a" dims: [1] }', "at least one input block and one output block"),
        ('input { name: "a" } output { name: "b" dims: [1] }', "input 'a' has no dims"),
        ('input { dims: [1] } output { name: "b" dims: [1] }', "an input block has no name"),
        ('input { name: "a" dims: [] } output { name: "b" dims: [1] }', "empty"),
        (BLOCK + BLOCK, "input name 'a' is declared twice"),
        ("input {\nname: a\ndims: [1]\nshape: [2]\n}", "unknown key 'shape'; known here: name, data_type, dims"),
        ("input {\nname: a\ninput {\n}\n}", "a block inside a block"),
        ("input {\nname: a\ndims: [1]\n", "a block is not closed"),
        ('input { name: "a\\tb" dims: [1] } output { name: "b" dims: [1] }', "characters that cannot be printed"),
        ("input { name: a dims: [1] }", "not valid text format"),
    ],
)
def test_a_contract_that_breaks_a_rule_is_refused_with_the_rule(text: str, words: str | None) -> None:
    if words is None:  # text format's own way to write a list of one
        assert parse(text).inputs == (ContractTensor("input", "f32", (16,)),)
        return
    with pytest.raises(ContractError, match=words):
        parse(text)


def test_a_file_is_named_in_the_message_without_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "model_inference.textproto"
    for content, words in (
        (b"output_shape: [0]", "output_shape has 0"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (None, "cannot be read"),
    ):
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        with pytest.raises(ContractError, match=rf"^model_inference\.textproto: .*{words}") as caught:
            contracts.read(path)
        assert str(tmp_path) not in str(caught.value)
    path.write_text("output_shape: [2]")
    assert contracts.read(path).outputs[0].dims == (2,)


WORDS = [
    "input {", "output {", "}", "input_shape: ", "output_shape: ", "dims: ", "name: ", "data_type: ",
    "max_batch_size: ", "[1, 2]", "[", "]", "a", '"a"', "FP32", "3", "-1", "\n", " ", "#", ":", "'", "<", ">", ";", ",",
    "\\", "0x1p", "1e9", "99999999999999999999", "\u2028", "\0",
]  # fmt: skip
CONTRACTS = [
    'max_batch_size: 4\ninput {\n  name: "a"\n  dims: [4]\n}\noutput { \n  name: s\n data_type: INT64\n dims: [2]\n}\n',
    'max_batch_size: 4 input { name: "a" dims: 4 } output [{ name: "sum", data_type: INT64, dims: -1 dims: 2 }]',
    "# flat\ninput_shape: [-1, 16]\noutput_shape: [ 4 ]\ndata_type: FP64\nmax_batch_size: 10\n",
]


@MANY
@given(
    st.text(max_size=30)
    | st.lists(st.sampled_from(WORDS), max_size=25).map("".join)
    | st.sampled_from(CONTRACTS).flatmap(lambda text: damaged(text, WORDS))
)
def test_made_up_text_raises_nothing_but_contract_errors(text: str) -> None:
    try:
        got: Any = parse(text)
    except ContractError:
        return
    assert got.outputs
    served = (tuple(input_spec(t, got.max_batch_size) for t in tensors) for tensors in (got.inputs, got.outputs))
    spec = ModelSpec("m", "e", "p", *served, (), max_batch_size=got.max_batch_size)
    assert ModelSpec.from_json(spec.to_json()) == spec
    assert config_text(spec)
