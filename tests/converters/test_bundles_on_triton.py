"""Bundles as clients of a real tritonserver meet them. ``make test`` runs this file on both numpy generations."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import WIRE_DTYPES, answered, random_tensors, raw_infer

from converters.convert import convert

pytestmark = pytest.mark.triton

WIDTH = 5


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of calls made at the same time; an error as its code and text."""
    results: list[Any] = [None] * len(calls)

    def make(index: int) -> None:
        try:
            results[index] = calls[index]()
        except grpc.RpcError as error:
            results[index] = error.code(), error.details()

    threads = [threading.Thread(target=make, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def refused(text: str) -> tuple[grpc.StatusCode, str]:
    return grpc.StatusCode.INVALID_ARGUMENT, text


def floats(address: str, model: str, **arrays: np.ndarray) -> Any:
    """The one output of a model of float32, by the nested list."""
    response = raw_infer(address, model, {n: ("FP32", list(a.shape), a.tobytes()) for n, a in arrays.items()})
    (output,) = response.outputs
    return np.frombuffer(response.raw_output_contents[0], np.float32).reshape(tuple(output.shape)).tolist()


@pytest.fixture(scope="module")
def reversing(
    triton: Any,
    tmp_path_factory: pytest.TempPathFactory,
    program_writer: Any,
    manifest_writer: Any,
    weights_writer: Any,
) -> str:
    """A bundle with one tensor of every wire dtype, each reversed along its rows, for 1 and 4 rows."""
    folder = tmp_path_factory.mktemp("bundles") / "reversing"
    folder.mkdir()
    for size in (1, 4):
        shapes = [((size, WIDTH), row.numpy) for row in WIRE_DTYPES]
        program_writer(folder / f"model.b{size}.mlir", lambda *tensors: [t[:, ::-1] for t in tensors], *shapes)
    tensors = [
        [{"name": f"{way}_{row.token}", "dtype": row.token, "shape": "cn", "dims": {"c": WIDTH}} for row in WIRE_DTYPES]
        for way in ("in", "out")
    ]
    manifest_writer(folder, executable_inputs=tensors[0], executable_outputs=tensors[1])
    weights_writer(folder, {})
    return triton.add(folder)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 4), random=st.randoms(use_true_random=False))
def test_random_bytes_of_every_dtype_survive_the_server_and_the_program(
    triton: Any, reversing: str, rows: int, random: Any
) -> None:
    sent = random_tensors(random.randbytes, rows, WIDTH)
    expected = {}
    for row in WIRE_DTYPES:
        kserve, shape, data = sent[f"in_{row.token}"]
        reversed_rows = np.frombuffer(data, f"V{row.size_bytes}").reshape(shape)[:, ::-1]
        expected[f"out_{row.token}"] = kserve, shape, reversed_rows.tobytes()
    assert answered(raw_infer(triton.address, reversing, sent)) == expected


def test_variants_are_told_apart_by_the_sizes_of_a_request(triton: Any, make_pool: Any) -> None:
    name = triton.add(make_pool())
    images = [np.full(shape, i, np.float32) for i, shape in enumerate([(1, 2, 4), (2, 5, 3), (1, 4, 4), (2, 2, 4)] * 4)]
    results = together([lambda image=image: floats(triton.address, name, img=image) for image in images])
    known = "compiled are img[-1, 2, 4], img[-1, 5, 3]"
    unknown = refused(f"model 'pool' has no program for img[-1, 4, 4]; {known}")
    assert results == [unknown if image.shape == (1, 4, 4) else [2 * image[0].sum()] * len(image) for image in images]
    with pytest.raises(grpc.RpcError) as caught:
        floats(triton.address, name, img=np.zeros((3, 2, 4), np.float32))
    code, text = refused("inference request batch-size must be <= 2 for 'pool'")
    assert (caught.value.code(), text in caught.value.details()) == (code, True)


WATCHED = """
import time
from nereid_backend.model import TritonPythonModel as Model

class TritonPythonModel(Model):
    def initialize(self, args):
        super().initialize(args)
        self.shapes, run = [], self._engine.run
        self._engine.run = lambda inputs: self.shapes.append(inputs[0].shape) or run(inputs)

    def execute(self, requests):
        time.sleep(0.05)
        self.shapes.clear()
        responses = super().execute(requests)
        with open({log!r}, "a") as file:
            file.write(repr((len(requests), self.shapes)) + chr(10))
        return responses
"""


def test_variants_that_arrive_mixed_share_a_call_and_by_variant_a_run(
    triton: Any, make_pool: Any, tmp_path: Path
) -> None:
    name = convert(make_pool(sizes=((1, 8), (1, 8))), triton.repository, name="watched").spec.name
    log = tmp_path / "calls"
    (triton.repository / name / "1" / "model.py").write_text(WATCHED.format(log=str(log)))
    triton.load(name)
    shapes = [(1, 2, 4), (1, 5, 3)] * 12
    results = together(
        [lambda shape=shape: floats(triton.address, name, img=np.ones(shape, np.float32)) for shape in shapes]
    )
    assert results == [[2 * np.prod(shape)] for shape in shapes]
    calls = [ast.literal_eval(line) for line in log.read_text().splitlines()]
    assert sum(requests for requests, _ in calls) == len(shapes)
    assert all(len(runs) <= 2 for _, runs in calls), "a variant ran twice in one call"
    assert max(requests for requests, runs in calls if len(runs) == 2) > 2, "no mixed call ever shared a run"


def matrix_times(x: Any, w: Any) -> Any:
    return w @ x


def test_rows_that_are_not_on_the_first_axis_are_padded_where_they_are(triton: Any, make_bundle: Any) -> None:
    w = np.arange(16, dtype=np.float32).reshape(4, 4)
    name = triton.add(
        make_bundle(
            "sideways",
            function=matrix_times,
            tensors={"w": w},
            x=lambda n: ((4, n), np.float32),
            executable_inputs=[{"name": "x", "dtype": "f32", "shape": "nc", "dims": {"c": 4}}],
            executable_outputs=[{"name": "y", "dtype": "f32", "shape": "nk", "dims": {"k": 4}}],
        )
    )
    x = np.arange(20, dtype=np.float32).reshape(4, 5)
    arrays = [np.ascontiguousarray(x[:, :count]) for count in (1, 2, 3, 4, 5)]
    results = together([lambda array=array: floats(triton.address, name, x=array) for array in arrays])
    too_many = refused("5 rows are more than the largest compiled batch size 4; send fewer rows")
    assert results == [*[(w @ array).tolist() for array in arrays[:4]], too_many]


def test_a_bundle_that_must_not_be_coalesced_runs_each_request_at_its_exact_size(triton: Any, make_bundle: Any) -> None:
    name = triton.add(
        make_bundle(
            "summing",
            function=lambda x: x.sum(0),
            tensors={},
            executable_outputs=[{"name": "y", "dtype": "f32", "shape": "k", "dims": {"k": 4}}],
        )
    )
    arrays = [np.full((rows, 4), value, np.float32) for value, rows in enumerate((1, 4, 2, 1, 4, 8), 1)]
    results = together([lambda array=array: floats(triton.address, name, x=array) for array in arrays])
    text = "model 'summing' has no program for {} rows and its batches cannot be padded; send one of [1, 4]"
    assert results == [
        refused(text.format(len(array))) if len(array) in (2, 8) else array.sum(0).tolist() for array in arrays
    ]


def test_the_largest_size_alone_serves_every_number_of_rows(triton: Any, make_bundle: Any) -> None:
    name = triton.add(make_bundle("largest", function=lambda x: x + 1, tensors={}), batch_sizes="largest")
    assert sorted(p.name for p in (triton.repository / name / "1").glob("*.mlir")) == ["model.b4.mlir"]
    assert [floats(triton.address, name, x=np.zeros((n, 4), np.float32)) for n in (1, 4)] == [
        [[1] * 4] * n for n in (1, 4)
    ]
