"""The models of the SnoozeML fixtures on the real server, against what their own libraries gave for them.

Skipped where the fixtures are not beside the checkout.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import infer

FIXTURES = Path(__file__).resolve().parents[3] / "shared" / "fixtures" / "snoozeml"

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(not FIXTURES.exists(), reason="../shared/fixtures is not beside this checkout"),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("xgboost", "onnxmltools")),
        reason="the xgboost extra is not installed in this interpreter",
    ),
]

MODELS = {
    "iris_logreg": ("float_input", "output", "output"),
    "iris_forest": ("input", "probs", "probs"),
    "diabetes_reg": ("input", "output", "predict"),
    "cancer_bin": ("input", "output", "booster_predict"),
    "iris_multi": ("input", "output", "booster_predict"),
}
"""By name: its input, its output, and what the fixtures call that."""


def array(told: Any) -> np.ndarray:
    return np.array(told["data"], np.float32).reshape(told["shape"])


@pytest.mark.parametrize("name", MODELS)
def test_a_fixture_gives_what_its_own_library_gave(triton: Any, client: Any, name: str) -> None:
    takes, gives, called = MODELS[name]
    fixture = json.loads((FIXTURES / "expected.json").read_text())["models"][name]
    triton.add(FIXTURES / fixture["file"])
    rows, expected = array(fixture["input"]), array(fixture["expected"][called])
    answer = infer(client, name, **{takes: rows})
    assert [*answer] == [gives]
    np.testing.assert_allclose(answer[gives], expected.reshape(len(rows), -1), atol=max(fixture["atol"], 1e-6))
