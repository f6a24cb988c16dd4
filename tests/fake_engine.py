"""Models of the real tritonserver whose engine is a few lines of a test."""

from __future__ import annotations

from typing import Any

from converters import repository
from converters.prepared import Prepared
from nereid_backend.spec import ModelSpec, Program, TensorSpec

# A model.py that serves its spec with an engine defined on the spot.
FAKE_ENGINE = """
import sys, time, types
import numpy as np
from nereid_backend import engines, dtypes
from nereid_backend.errors import InvalidArgument

class Engine:
    @classmethod
    def load(cls, spec, directory):
        return cls()
    def close(self):
        pass
    def run(self, inputs):
        {body}

module = types.ModuleType("fake_engine")
module.Engine = Engine
sys.modules["fake_engine"] = module
engines.ENGINES["fake"] = engines.EngineEntry("fake_engine", "Engine", "numpy", "fake", "made by a test")
from nereid_backend.model import TritonPythonModel
"""


def write_fake(
    triton: Any, name: str, body: str, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], **options: Any
) -> str:
    """A model whose engine's ``run`` is ``body``, loaded into the server."""
    spec = ModelSpec(name, "fake", "fake", inputs, outputs, (Program("none"),), **options)
    path = repository.write(Prepared(spec, {}), triton.repository, link=False, force=True)
    (path / "1" / "model.py").write_text(FAKE_ENGINE.format(body=body))
    return triton.load(name)
