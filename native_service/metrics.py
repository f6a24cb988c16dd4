"""Triton's metrics with the calls in them that Envoy refused before Triton saw them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_FAILURES = "nv_inference_request_failure"
# nv_inference_request_failure{model="x",reason="REJECTED",version="1"} 0
_REJECTED = re.compile(rf'^{_FAILURES}{{(?=[^}}]*reason="REJECTED")[^}}]*?model="([^"]*)"[^}}]*}} (\S+)$')


def with_refusals(text: str, refusals: Mapping[str, int]) -> str:
    """``text`` in Prometheus' format, each model's REJECTED failures raised by its entry in ``refusals``.

    A model's name needs no escaping (settings). Triton shows the series, at zero, from a model's load on.
    """
    lines = []
    for line in text.split("\n"):
        match = _REJECTED.match(line)
        if match and refusals.get(match[1]):
            count = float(match[2]) + refusals[match[1]]
            line = f"{line[: match.start(2)]}{count:.15g}"
        lines.append(line)
    return "\n".join(lines)
