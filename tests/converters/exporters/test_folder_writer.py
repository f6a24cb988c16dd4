from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper  # noqa: E402

from converters.contract import Contract, ContractTensor, contract_of, text_of  # noqa: E402
from converters.contract import parse as parse_contract  # noqa: E402
from converters.convert import prepare  # noqa: E402
from converters.exporters.comparison import prove, sizes_to_try, trials_of  # noqa: E402
from converters.exporters.folder_writer import write_folder  # noqa: E402
from nereid_backend.errors import BundleError, ContractError, ExportError, NereidError  # noqa: E402

ROWS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
SUMS = Contract(
    (ContractTensor("x", "f32", (3,)), ContractTensor("scale", "f32", (1,))),
    (ContractTensor("sum", "f32", (1,)),),
    8,
    flat=False,
)


def sums(path: Path, *, add: float = 0.0) -> None:
    """A graph whose second input and whose output are one number per row."""
    batch: Any = "batch"
    nodes = [
        helper.make_node("ReduceSum", ["x", "axes"], ["total"], keepdims=0),
        helper.make_node("Mul", ["total", "scale"], ["scaled"]),
        helper.make_node("Add", ["scaled", "more"], ["sum"]),
    ]
    graph = helper.make_graph(
        nodes,
        "sums",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 3]),
            helper.make_tensor_value_info("scale", TensorProto.FLOAT, [batch]),
        ],
        [helper.make_tensor_value_info("sum", TensorProto.FLOAT, [batch])],
        [
            helper.make_tensor("axes", TensorProto.INT64, [1], [1]),
            helper.make_tensor("more", TensorProto.FLOAT, [], [add]),
        ],
    )
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_served_as_its_contract_says_and_names_its_origin(tmp_path: Path, run: Any) -> None:
    def proof(prepared: Any) -> None:
        examples = [ROWS, np.ones(5, np.float32)]
        trials = trials_of(
            lambda inputs: [inputs[0].sum(1) * inputs[1]],
            prepared.spec.inputs,
            examples,
            sizes_to_try(prepared.spec),
        )
        assert {len(trial.inputs[0]) for trial in trials} == {1, 3, 8}
        assert prove(prepared, trials, None)["sum"] < 1e-6

    write_folder(
        tmp_path / "sums",
        SUMS,
        {"model.onnx": sums},
        provenance={"exported_at": "now"},
        patch=b"difference",
        proof=proof,
    )
    assert yaml.safe_load((tmp_path / "sums" / "provenance.yaml").read_text()) == {"exported_at": "now"}
    assert (tmp_path / "sums" / "working_tree.patch").read_bytes() == b"difference"
    prepared = prepare(tmp_path / "sums")
    assert (prepared.spec.max_batch_size, prepared.spec.coalesce, contract_of(prepared.spec)) == (8, True, SUMS)
    (result,) = run(prepared, tmp_path / "repository", ROWS, np.full(5, 2, np.float32))
    np.testing.assert_allclose(result, 2 * ROWS.sum(1), rtol=1e-5)


def test_a_folder_that_differs_or_does_not_fit_its_file_is_not_written_and_the_old_one_stays(tmp_path: Path) -> None:
    write_folder(tmp_path / "sums", SUMS, {"model.onnx": sums})
    before = (tmp_path / "sums" / "model.onnx").read_bytes()

    def proof(prepared: Any) -> None:
        raise ExportError("it differs")

    new = {"model.onnx": lambda path: sums(path, add=1.0)}
    with pytest.raises(ExportError, match="it differs"):
        write_folder(tmp_path / "sums", SUMS, new, force=True, proof=proof)
    wrong = Contract((ContractTensor("x", "i32", (3,)), SUMS.inputs[1]), SUMS.outputs, 8, flat=False)
    with pytest.raises(BundleError, match="input 'x' is i32 by the contract"):
        write_folder(tmp_path / "sums", wrong, new, force=True)
    assert (tmp_path / "sums" / "model.onnx").read_bytes() == before
    assert names(tmp_path) == ["sums"]


def test_only_what_an_export_wrote_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "sums"
    write_folder(target, SUMS, {"model.onnx": sums}, provenance={"loss": 1.5})
    with pytest.raises(ExportError, match=r"exists; replace it with force=True"):
        write_folder(target, SUMS, {"model.onnx": sums})
    write_folder(target, SUMS, {"model.onnx": lambda path: sums(path, add=1.0)}, force=True)
    assert names(target) == ["model.onnx", "model_inference.textproto"]
    (target / "labels.txt").touch()
    with pytest.raises(ExportError, match=r"holds labels.txt, which no export writes"):
        write_folder(target, SUMS, {"model.onnx": sums}, force=True)
    (tmp_path / "mine").mkdir()
    with pytest.raises(ExportError, match="is not a nereid folder"):
        write_folder(tmp_path / "mine", SUMS, {"model.onnx": sums}, force=True)


def test_a_folder_never_gets_a_file_that_python_could_import(tmp_path: Path) -> None:
    with pytest.raises(NereidError, match=r"several backends|which Python could run as code"):
        write_folder(
            tmp_path / "sums",
            SUMS,
            {"model.onnx": sums, "main.py": lambda path: path.touch(), "requirements.txt": lambda path: path.touch()},
        )
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ['quo"te', "back\\slash", "sharp#", "brace{", "dot.dot/:0", "\u00e9\u4e2d"])
def test_a_contract_reads_back_whatever_a_graph_calls_its_tensors(name: str) -> None:
    contract = Contract((ContractTensor(name, "bf16", (-1, 4)),), (ContractTensor("y", "i64", (1,)),), 0, flat=False)
    assert parse_contract(text_of(contract)) == contract


@pytest.mark.parametrize("dtype", ["bytes", "f8_e4m3"])
def test_a_contract_of_a_type_that_folders_have_not_is_refused(dtype: str) -> None:
    contract = Contract((ContractTensor("x", dtype, (1,)),), (ContractTensor("y", "i64", (1,)),), 0, flat=False)
    with pytest.raises(ContractError, match="is not supported"):
        text_of(contract)
