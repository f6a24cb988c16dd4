from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereid_backend import engines
from nereid_backend.engines import ENGINES, EngineEntry, engine_class, import_library, parse_device
from nereid_backend.errors import BundleError, EngineMissing


@pytest.mark.parametrize("name", list(ENGINES))
def test_a_registered_engine_is_found_and_offers_the_whole_protocol(name: str) -> None:
    cls = engine_class(name)
    assert cls.__name__ == ENGINES[name].class_name
    assert [hasattr(cls, method) for method in ("load", "check_device", "run", "close")] == [True] * 4


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BundleError, match=f"unknown engine 'xgboost'; known: {', '.join(ENGINES)}"):
        engine_class("xgboost")


def test_a_missing_library_names_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EngineEntry("m", "C", "a_library_nobody_has", "rare", "d")
    monkeypatch.setitem(ENGINES, "rare", entry)
    with pytest.raises(EngineMissing, match=re.escape("pip install 'nereid-triton[rare]'")) as caught:
        import_library("rare")
    assert "engine 'rare' needs a_library_nobody_has" in str(caught.value)


@pytest.mark.parametrize("name", [name for name, entry in ENGINES.items() if entry.extra])
def test_an_engine_without_its_library_says_so_at_load_and_at_check(name: str, monkeypatch: Any) -> None:
    from nereid_backend.spec import ModelSpec, Program

    entry = ENGINES[name]
    cls = engine_class(name)
    broken = EngineEntry(entry.module, entry.class_name, "a_library_nobody_has", entry.extra, "")
    monkeypatch.setitem(engines.ENGINES, name, broken)
    for call in (
        lambda: cls.load(ModelSpec("m", name, "p", (), (), (Program("f"),)), Path()),
        lambda: cls.check_device("cpu"),
    ):
        with pytest.raises(EngineMissing, match=re.escape(f"[{entry.extra}]")):
            call()


@pytest.mark.parametrize(
    ("text", "parsed"), [("cpu", ("cpu", 0)), ("cuda", ("cuda", 0)), ("cuda:0", ("cuda", 0)), ("cuda:12", ("cuda", 12))]
)
def test_devices_are_cpu_cuda_and_cuda_with_an_index(text: str, parsed: tuple[str, int]) -> None:
    assert parse_device(text) == parsed


@pytest.mark.parametrize(
    "text", ["", "metal", "cpu:0", "cuda:", "cuda:abc", "cuda:-1", "cuda:1:2", "CUDA", " cpu", "cpu:"]
)
def test_another_device_is_refused_with_the_choices(text: str) -> None:
    with pytest.raises(BundleError, match=f"unknown device {text!r}; use cpu, cuda or cuda:<index>"):
        parse_device(text)


@given(st.text(max_size=10))
def test_made_up_devices_raise_nothing_but_bundle_errors(text: str) -> None:
    try:
        kind, index = parse_device(text)
    except BundleError:
        assert text not in ("cpu", "cuda")
    else:
        assert (kind in ("cpu", "cuda"), index >= 0) == (True, True)


@pytest.mark.parametrize("name", list(ENGINES))
def test_every_engine_checks_the_cpu_quietly(name: str) -> None:
    if importlib.util.find_spec(ENGINES[name].library) is None:
        pytest.skip(f"{ENGINES[name].library} is not installed in this interpreter")
    assert engine_class(name).check_device("cpu") is None
