"""Files with a signature of their own inside the real tritonserver."""

from __future__ import annotations

import importlib.util
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import input_tensor
from tritonclient.utils import InferenceServerException

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed"),
]

X = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def program() -> Any:
    """y = x w + b for 1 to 8 rows, by torch.export."""
    import torch

    torch.manual_seed(0)  # the compiler's cache knows a model by its weights, too
    layer = torch.nn.Linear(4, 2).eval()
    batch = torch.export.Dim("batch", min=1, max=8)
    return torch.export.export(layer, (torch.ones(2, 4),), dynamic_shapes={"input": {0: batch}})


def expected(program: Any) -> np.ndarray:
    import torch

    return np.asarray(program.module()(torch.from_numpy(X)).detach())


def test_an_exported_program_is_served(program: Any, triton: Any, client: Any, tmp_path: Path) -> None:
    import torch

    torch.export.save(program, str(tmp_path / "exported.pt2"))
    triton.add(tmp_path / "exported.pt2", allow_code=True)
    answer = client.infer("exported", [input_tensor("input", X)])
    np.testing.assert_allclose(answer.as_numpy("output"), expected(program), rtol=1e-5, atol=1e-6)


def test_a_jax_export_is_served(triton: Any, client: Any, tmp_path: Path) -> None:
    import jax
    from jax import export

    jax.config.update("jax_enable_x64", True)
    (rows,) = export.symbolic_shape("rows")
    shape = jax.ShapeDtypeStruct((rows, 4), np.float32)
    exported = export.export(jax.jit(lambda x: {"sum": x.sum(1), "twice": x * 2}), platforms=["cpu", "cuda"])(shape)
    (tmp_path / "jaxed.jax").write_bytes(exported.serialize())
    triton.add(tmp_path / "jaxed.jax", max_batch_size=4)
    answer = client.infer("jaxed", [input_tensor("input", X)])
    np.testing.assert_array_equal(answer.as_numpy("twice"), X * 2)
    np.testing.assert_array_equal(answer.as_numpy("sum"), X.sum(1, keepdims=True))


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not there, and AOTInductor compiles with it")
def test_an_aotinductor_package_is_served_and_checks_what_it_is_given(
    program: Any, triton: Any, client: Any, tmp_path: Path
) -> None:
    """One compilation for the whole suite: it takes up to half a minute the first time."""
    import torch

    from converters.convert import prepare
    from nereid_backend.engines.pt2 import AotInductorEngine, check_machine
    from nereid_backend.errors import BundleError, DeviceMissing, EngineError, InvalidArgument

    folder = tmp_path / "compiled"
    folder.mkdir()
    package = folder / "model.pt2"
    options = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13's compiler uses what its own pytree deprecates
        torch._inductor.aoti_compile_and_package(program, package_path=str(package), inductor_configs=options)
    contract = folder / "model_inference.textproto"
    contract.write_text("input_shape: [4]\noutput_shape: [2]\nmax_batch_size: 8")

    with pytest.raises(BundleError, match="--allow-code"):
        prepare(folder)
    with pytest.raises(DeviceMissing, match="compiled for cpu, the model's device is cuda"):
        check_machine(package, "cuda")
    prepared = prepare(folder, allow_code=True)
    assert (prepared.spec.engine, prepared.spec.coalesce, prepared.notes) == ("aotinductor", True, ())
    assert prepared.spec.batch_sizes == (2, 4, 8)
    engine = AotInductorEngine.load(prepared.spec, folder)
    for wrong in (X[:, :3], np.repeat(X, 3, axis=0), X.astype(np.float64)):
        with pytest.raises(InvalidArgument, match="the AOTInductor package refused the input"):
            engine.run([np.ascontiguousarray(wrong)])
    engine.close()
    with pytest.raises(EngineError, match="was closed"):
        engine.run([X])

    triton.add(folder, allow_code=True)
    answer = client.infer("compiled", [input_tensor("input", X)])
    np.testing.assert_allclose(answer.as_numpy("output"), expected(program), rtol=1e-5, atol=1e-6)
    alone = client.infer("compiled", [input_tensor("input", X[:1])])
    np.testing.assert_allclose(alone.as_numpy("output"), expected(program)[:1], rtol=1e-5, atol=1e-6)
    with pytest.raises(InferenceServerException, match=r"\[-1,4\]"):
        client.infer("compiled", [input_tensor("input", X[:, :3].copy())])
