"""Triton's counters over the unloads of its models and its own restarts, at each of which they begin at zero again."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

from native_service.telemetry.metrics import Tally

# nv_inference_count{model="x",version="1"} 12
_SAMPLE = re.compile(r'^([a-z_]+){[^}]*?model="([^"]*)"[^}]*} (\S+)$')
_HEAD = re.compile(r"^# (?:HELP|TYPE) ([a-z_]+) ?(.*)$")
_COUNTER = "counter"


@dataclass(slots=True)
class _Family:
    """A name's lines: what it is, and its samples by series."""

    heads: list[str]
    is_counter: bool = False
    samples: dict[str, str] = field(default_factory=dict)


class TritonCounters:
    """``complete`` at each look at Triton's text. What a model counts between the last look and its unload is lost."""

    def __init__(self) -> None:
        self._sums: Tally[str] = Tally()
        self._models: dict[str, str] = {}
        self._heads: dict[str, list[str]] = {}

    def complete(self, text: str, life: Hashable, models: Collection[str]) -> str:
        """``text`` in Prometheus' format, now that ``models`` are served by the Triton called ``life``.

        Their counters go on where they were, also while a model is not loaded; they end when it is not served.
        """
        families = _families(text)
        counts = {}
        for name, family in families.items():
            if family.is_counter:
                self._heads[name] = family.heads
                for series, line in family.samples.items():
                    if (match := _SAMPLE.match(line)) and match[1] == name and match[2] in models:
                        self._models[series] = match[2]
                        counts[series] = int(float(match[3]))
        sums = self._sums.total(life, counts)
        ended = [series for series, model in self._models.items() if model not in models]
        self._sums.forget(ended)
        for series in ended:
            del self._models[series]
        for series in self._models:
            name = series.partition("{")[0]
            family = families.setdefault(name, _Family(self._heads[name], is_counter=True))
            family.samples[series] = f"{series} {sums.get(series, 0)}"
        lines = (line for family in families.values() for line in (*family.heads, *family.samples.values()))
        return "".join(f"{line}\n" for line in lines)


def _families(text: str) -> dict[str, _Family]:
    found: dict[str, _Family] = {}
    last = ""
    for line in text.splitlines():
        if match := _HEAD.match(line):
            last = match[1]
            family = found.setdefault(last, _Family([]))
            family.heads.append(line)
            family.is_counter |= match[2] == _COUNTER
        elif line:
            series = line.rpartition(" ")[0]
            # A histogram's samples have longer names than their heads.
            name = series.partition("{")[0]
            name = last if last and name.startswith(f"{last}_") else name
            found.setdefault(name, _Family([])).samples[series] = line
    return found
