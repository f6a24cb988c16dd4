from __future__ import annotations

import re
from pathlib import Path

import pytest

from nereid_backend import user_code
from nereid_backend.errors import UserCodeError
from nereid_backend.hooks import MetaModel

IMPORT = "from nereid_backend.hooks import register_meta_model\n"


def load(folder: Path, text: str, model: str = "m") -> MetaModel:
    (folder / "hooks.py").write_text(text)
    return user_code.load(folder, model, MetaModel, "register_meta_model")


def test_the_registered_function_is_what_runs(tmp_path: Path) -> None:
    meta = load(tmp_path, IMPORT + "register_meta_model('any name', run=lambda inputs, call: inputs)")
    assert meta.run(["a"], None) == ["a"]  # type: ignore[arg-type, list-item]


def test_two_models_have_modules_of_their_own_and_import_files_beside_them(tmp_path: Path) -> None:
    runs = []
    for model in ("a.b", "a-b"):
        folder = tmp_path / model
        folder.mkdir()
        (folder / "label.py").write_text(f"LABEL = {model!r}")
        text = IMPORT + "from .label import LABEL\nregister_meta_model(run=lambda inputs, call: LABEL)"
        runs.append(load(folder, text, model).run)
    assert [run([], None) for run in runs] == ["a.b", "a-b"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "registered nothing"),
        (IMPORT + "register_meta_model(run=print)\n" * 2, "registered MetaModel and MetaModel"),
        (
            IMPORT + "register_meta_model(run=None)",
            "TypeError: register_meta_model needs a function as run, got NoneType",
        ),
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
    ],
)
def test_a_file_that_does_not_say_what_it_runs_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserCodeError, match=re.escape(said)) as caught:
        load(tmp_path, text)
    assert "'m'" in str(caught.value)
    assert load(tmp_path, IMPORT + "register_meta_model(run=print)").run is print  # nothing is left of the bad file
