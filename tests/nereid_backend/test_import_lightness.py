from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = [
    "torch",
    "jax",
    "jaxlib",
    "onnxruntime",
    "grpc",
    "yaml",
    "google.protobuf",
    "ml_dtypes",
    "tritonclient",
    "click",
    "pydantic",
    "aiohttp",
    "onnx",
    "converters",
    "native_service",
]

PROGRAM = """
import json, sys, types
stub = types.ModuleType("triton_python_backend_utils")
sys.modules[stub.__name__] = stub
before = set(sys.modules)
import {module}
print(json.dumps([name for name in {heavy} if name in set(sys.modules) - before]))
"""


@pytest.mark.parametrize("module", ["nereid_backend", "nereid_backend.model"])
def test_a_stub_process_starts_without_any_engine_or_parser(module: str) -> None:
    program = PROGRAM.format(module=module, heavy=HEAVY)
    # -I: neither the environment nor the folder decides what is imported
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == []
