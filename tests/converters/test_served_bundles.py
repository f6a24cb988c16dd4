"""Bundles on the real server: programs that are found again, and weights in every layout and after a migration."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from serving import Served, input_tensor

pytest.importorskip("jax")

from converters.migrate import migrate
from nereid_backend.cache import cache_folder

pytestmark = pytest.mark.triton

X = np.arange(16, dtype=np.float32).reshape(4, 4)
COMPILED = re.compile(r"Finished XLA compilation of jit\(nereid_program\) in (\S+) sec")
"""What JAX itself logs, to several places, when it is told to (JAX_LOG_COMPILES)."""


def test_a_restart_under_another_name_compiles_nothing_and_damage_only_costs_time(
    make_bundle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    (cache / "triton").symlink_to(cache_folder() / "triton")  # the server itself need not be fetched again
    monkeypatch.setenv("NEREID_CACHE_DIR", str(cache))
    monkeypatch.setenv("JAX_LOG_COMPILES", "1")
    models = tmp_path / "models"
    models.mkdir()
    make_bundle("models/first")

    def serve(name: str) -> tuple[Any, int, str]:
        """The answers of one run of the service, its number of compilations, and its log."""
        server = Served(tmp_path, str(models), "--bind", "127.0.0.1:0")
        try:
            with tritonclient.grpc.InferenceServerClient(server.state["address"]) as client:
                results = [client.infer(name, [input_tensor("x", X[:rows])]).as_numpy("y") for rows in (1, 3)]
        finally:
            code, output = server.end()
        assert code == 0, output
        return [result.tolist() for result in results], len(set(COMPILED.findall(output))), output

    answers, compiled, _ = serve("first")
    assert compiled == 2  # one per size, though the converter has tried them before the model process loads them
    (models / "first").rename(models / "second")
    assert serve("second")[:2] == (answers, 0)
    for entry in (cache / "programs").iterdir():
        entry.write_bytes(entry.read_bytes()[:-1] + b"?")
    again, compiled, output = serve("second")
    assert (again, compiled, output.count("is damaged; compiling it again")) == (answers, 2, 2)


def test_a_migrated_bundle_answers_as_before(make_bundle: Any, triton: Any, client: Any, tmp_path: Path) -> None:
    w = np.arange(16, dtype=np.float32).reshape(4, 4) / 8  # square: a wrong layout would fit
    legacy = make_bundle("legacy", tensors={"w": w.T.copy(), "b": np.zeros(4, np.float32)}, axis_order=None)
    copied, replaced = (Path(shutil.copytree(legacy, tmp_path / name)) for name in ("copied", "replaced"))
    migrate(copied, replace=False)
    migrate(replaced, replace=True)
    for bundle in (legacy, copied, replaced):
        model = triton.add(bundle)
        assert client.infer(model, [input_tensor("x", X)]).as_numpy("y").tolist() == (X @ w).tolist(), bundle.name
