"""Script folders on disk: what goes into the repository, their environments, C++ programs."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from converters.convert import convert, prepare
from nereid_backend import locks
from nereid_backend.errors import BundleError
from nereid_backend.scripts import environment
from nereid_backend.spec import ModelSpec

FLAT = "input_shape: [4]\noutput_shape: [4]\nmax_batch_size: 8\n"
NO_INDEX = "--no-index\n"

CPP_ADD = r"""
#include <cstdio>
#include <cstdlib>
#include <vector>
#include "one.h"

int main() {
    std::vector<float> values;
    float value;
    while (std::fread(&value, sizeof value, 1, stdin) == 1) values.push_back(value + ONE);
    std::FILE* file = std::fopen(std::getenv("NEREID_OUTPUT_PATH"), "wb");
    std::fprintf(file, "float32 %s\n", std::getenv("NEREID_INPUT_SHAPE"));
    std::fwrite(values.data(), sizeof value, values.size(), file);
    return std::fclose(file);
}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEREID_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def script_folder(folder: Path, *, contract: str = FLAT, requirements: str = "", **files: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "main.py").write_text("print(1)\n")
    (folder / "requirements.txt").write_text(requirements)
    (folder / "model_inference.textproto").write_text(contract)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def write_wheel(folder: Path, name: str, text: str) -> None:
    """The smallest wheel that pip installs: one module."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", text)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_the_whole_folder_is_written_and_says_that_it_runs_code(tmp_path: Path) -> None:
    source = script_folder(tmp_path / "m")
    (source / "data" / "deep").mkdir(parents=True)
    (source / "data" / "deep" / "table.csv").write_text("1,2\n")
    tool = source / "tool"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    for ignored in ("venv", ".git", "__pycache__"):
        (source / ignored).mkdir()
        (source / ignored / "x").write_text("")
    prepared = convert(source, tmp_path / "repository")
    written = tmp_path / "repository" / "m" / "1" / "folder"
    files = {path.relative_to(written).as_posix() for path in written.rglob("*") if path.is_file()}
    assert files == {"main.py", "requirements.txt", "model_inference.textproto", "data/deep/table.csv", "tool"}
    assert (written / "tool").stat().st_mode & stat.S_IXUSR
    assert (written.parent / "model.py").read_text().startswith("from nereid_backend.scripts.model import")
    assert "runs as a program of this user" in prepared.notes[0]
    assert ModelSpec.read(written.parent) == prepared.spec
    assert (prepared.spec.platform, prepared.spec.script.children, prepared.spec.script.preload) == ("python", 16, ())


@pytest.mark.parametrize(
    ("contract", "words"),
    [
        ("input_shape: [4]", "needs a declared output; add output_shape"),
        ('input { name: "a" dims: [1] } input { name: "b" dims: [1] } output { name: "c" dims: [1] }', "2 and 1"),
        (FLAT + "time_limit_s: -1", "time_limit_s must be >= 1"),
        (FLAT + "warm: maybe", "warm must be true or false|line 4"),
    ],
)
def test_a_contract_a_program_cannot_have_is_refused(tmp_path: Path, contract: str, words: str) -> None:
    with pytest.raises(BundleError, match=words):
        prepare(script_folder(tmp_path / "m", contract=contract))


@pytest.mark.parametrize(
    "notation", ["warm: true\ntime_limit_s: 60\n", "warm: true  # by lines\ntime_limit_s: 60\ndata_type: 'FP32'\n"]
)
def test_warm_and_the_time_limit_are_read_in_both_notations(tmp_path: Path, notation: str) -> None:
    text = (
        "from __future__ import annotations\nimport json, os.path as p\nfrom decimal import Decimal\n"
        "try:\n    import tomllib\nexcept ImportError:\n    import own\n"
        "from . import sibling\nimport own.part\ndef f():\n    import random\n"
    )
    source = script_folder(tmp_path / "m", contract=FLAT + notation, **{"own.py": ""})
    (source / "main.py").write_text(text)
    script = prepare(source).spec.script
    assert script is not None
    assert (script.preload, script.time_limit_s) == (("json", "os.path", "decimal", "tomllib"), 60)


def test_warm_belongs_to_scripts(tmp_path: Path) -> None:
    source = tmp_path / "m"
    source.mkdir()
    (source / "model.onnx").write_bytes(b"")
    (source / "model_inference.textproto").write_text(FLAT + "warm: true\n")
    with pytest.raises(BundleError, match="warm is for script folders, this is a onnx folder"):
        prepare(source)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(:\n", "main.py is not Python"),
        ("print 'two'\n", "main.py is not Python"),
        ("\0", "main.py is not Python"),
    ],
)
def test_a_script_that_cannot_be_parsed_is_refused(tmp_path: Path, text: str, words: str) -> None:
    source = script_folder(tmp_path / "m")
    (source / "main.py").write_text(text)
    with pytest.raises(BundleError, match=words):
        prepare(source)


def test_links_that_lead_nowhere_or_in_a_circle_are_refused(tmp_path: Path) -> None:
    source = script_folder(tmp_path / "m")
    (source / "sub").mkdir()
    (source / "sub" / "broken").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BundleError, match="sub/broken is neither"):
        prepare(source)
    (source / "sub" / "broken").unlink()
    (source / "sub" / "up").symlink_to(source)
    with pytest.raises(BundleError, match="links back"):
        prepare(source)


# Environments.


def test_an_environment_is_built_once_and_found_by_its_content(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "nereid.environments")
    write_wheel(tmp_path / "wheels", "tiny", "value = 41\n")
    requirements = f"{NO_INDEX}--find-links {tmp_path / 'wheels'}\ntiny==1.0\n"
    first = environment.prepare(script_folder(tmp_path / "a", requirements=requirements))
    built = [record.message for record in caplog.records]
    assert any("tiny" in line for line in built)
    assert subprocess.check_output([first, "-c", "import tiny; print(tiny.value)"]) == b"41\n"
    caplog.clear()
    assert environment.prepare(script_folder(tmp_path / "b", requirements=requirements)) == first
    assert caplog.records == []
    assert environment.prepare(script_folder(tmp_path / "c")) != first


def test_a_read_only_folder_is_served_from(tmp_path: Path) -> None:
    source = script_folder(tmp_path / "m")
    before = {path: path.stat().st_mtime_ns for path in source.rglob("*")}
    for path in (*source.rglob("*"), source):
        path.chmod(0o500 if path.is_dir() else 0o400)
    convert(source, tmp_path / "repository")
    assert {path: path.stat().st_mtime_ns for path in source.rglob("*")} == before


def test_requirements_that_cannot_be_installed_say_why_and_what_to_do(tmp_path: Path, cache: Path) -> None:
    source = script_folder(tmp_path / "m", requirements=NO_INDEX + "not-there-at-all==9\n")
    with pytest.raises(BundleError, match=r"not-there-at-all.*PIP_FIND_LINKS"):
        prepare(source)
    # Nothing of it is taken for an environment afterwards.
    with pytest.raises(BundleError, match="not-there-at-all"):
        prepare(source)


def test_a_build_that_was_killed_is_begun_again(tmp_path: Path) -> None:
    source = script_folder(tmp_path / "m")
    python = environment.prepare(source)
    (python.parents[1] / "complete").unlink()
    python.unlink()
    assert environment.prepare(source) == python
    assert python.exists()


def test_an_environment_nobody_has_used_for_a_month_goes_with_the_next_build(tmp_path: Path) -> None:
    folders = {
        name: script_folder(tmp_path / name, requirements=f"# {name}\n")
        for name in ("old", "recent", "used", "unfinished", "again")
    }
    paths = {name: environment.prepare(folder).parents[1] for name, folder in folders.items()}
    month_s = 30 * 24 * 3600
    for name, path in paths.items():
        os.close(environment._in_use.pop(path))  # whoever asked for it has ended
        unused_s = month_s - 60 if name == "recent" else month_s + 60
        if name == "unfinished":
            (path / "complete").unlink()
        for file in (path / "complete", path):
            if file.exists():
                os.utime(file, times=(time.time() - unused_s,) * 2)
    user = locks.try_share(paths["used"] / "complete")
    assert user is not None
    environment.prepare(folders["again"])
    assert paths["old"].exists()  # only a build looks
    environment.prepare(script_folder(tmp_path / "new", requirements="# new\n"))
    os.close(user)
    assert {name for name, path in paths.items() if path.exists()} == {"recent", "used", "again"}
    assert environment.prepare(folders["old"]).exists()


def test_two_builders_make_one_environment(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "nereid.environments")
    source = script_folder(tmp_path / "m")
    path = environment.prepare(source).parents[1]
    shutil.rmtree(path)
    lock = locks.wait_lock(path.with_suffix(".lock"))
    found: list[Path] = []
    builder = threading.Thread(target=lambda: found.append(environment.prepare(source)))
    builder.start()
    while not any("waiting for another process" in record.message for record in caplog.records):
        assert builder.is_alive()
    assert not path.exists()
    os.close(lock)
    builder.join()
    assert found == [path / "bin" / "python"]


@pytest.mark.parametrize("line", ["-e .", "./project", "file:///x", "--editable=../y"])
def test_projects_whose_changes_would_go_unseen_are_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(BundleError, match="a project on this machine"):
        prepare(script_folder(tmp_path / "m", requirements=line + "\n"))


def test_files_that_requirements_name_belong_to_the_key(tmp_path: Path) -> None:
    source = script_folder(tmp_path / "m", requirements="-r more.txt\n", **{"more.txt": "# nothing\n"})
    first = environment.prepare(source)
    (source / "more.txt").write_text("# nothing else\n")
    assert environment.prepare(source) != first
    (source / "more.txt").unlink()
    with pytest.raises(BundleError, match=r"more\.txt cannot be read"):
        environment.prepare(source)


def test_files_that_requirements_name_may_have_blanks_and_a_quote_left_open_is_told(tmp_path: Path) -> None:
    more = {"more of it.txt": "-e here\n", "c#.txt": "-e there\n"}
    for requirements, words in (
        ('-r "more of it.txt"  # all\n', r"more of it\.txt: '-e here'"),
        ("-r c#.txt", r"c#\.txt: '-e there'"),
        ('-r "more', "the quotes"),
    ):
        source = script_folder(tmp_path / f"m{len(list(tmp_path.iterdir()))}", requirements=requirements, **more)
        with pytest.raises(BundleError, match=words):
            prepare(source)


def test_a_folder_without_requirements_is_told_to_have_an_empty_file(tmp_path: Path) -> None:
    source = script_folder(tmp_path / "m")
    (source / "requirements.txt").unlink()
    with pytest.raises(BundleError, match=r"main\.py needs requirements\.txt"):
        prepare(source)
    with pytest.raises(BundleError, match=r"empty when main\.py needs nothing"):
        environment.prepare(source)


def test_a_program_is_passed_what_is_named_and_no_secret(tmp_path: Path) -> None:
    server = {"PATH": "/bin", "AWS_SECRET": "s", "LC_ALL": "C", "LICENSE": "l", "NEREID_PASS_ENVIRONMENT": "LICENSE, X"}
    assert environment.child_variables(server, Path("/env/bin/python")) == {
        "PATH": "/env/bin:/bin",
        "LC_ALL": "C",
        "LICENSE": "l",
    }


# C++.


def cpp_folder(folder: Path, **files: str) -> Path:
    folder.mkdir()
    (folder / "model_inference.textproto").write_text(FLAT)
    for name, text in {"main.cpp": CPP_ADD, "one.h": "#define ONE 1\n", **files}.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_a_cpp_program_is_compiled_once(tmp_path: Path, cache: Path) -> None:
    source = cpp_folder(tmp_path / "m")
    source.chmod(0o500)
    prepared = convert(source, tmp_path / "repository")
    program = tmp_path / "repository" / "m" / "1" / "folder" / "model"
    output = tmp_path / "out"
    variables = {"NEREID_OUTPUT_PATH": str(output), "NEREID_INPUT_SHAPE": "1,1"}
    subprocess.run([program], env=variables, input=b"\0\0\x80?", check=True)
    assert output.read_bytes() == b"float32 1,1\n\0\0\0@"
    assert prepared.spec.platform == "cpp_subprocess"
    built = list((cache / "programs").glob("[0-9a-f]*[0-9a-f]"))
    prepare(source)
    assert list((cache / "programs").glob("[0-9a-f]*[0-9a-f]")) == built
    source.chmod(0o700)
    (source / "one.h").write_text("#define ONE 2\n")
    prepare(source)
    assert len(list((cache / "programs").glob("[0-9a-f]*[0-9a-f]"))) == 2


def test_a_build_script_goes_before_the_compiler_and_a_ready_program_before_both(tmp_path: Path) -> None:
    script = "printf '#!/bin/sh\\necho built\\n' > model; chmod +x model\n"
    source = cpp_folder(tmp_path / "m", **{"build.sh": script})
    files = prepare(source).files
    assert subprocess.check_output([files["folder/model"]]) == b"built\n"
    assert not (source / "model").exists()
    (source / "model").write_text("#!/bin/sh\necho ready\n")
    with pytest.raises(BundleError, match=r"not executable; chmod \+x"):
        prepare(source)
    (source / "model").chmod(0o755)
    assert subprocess.check_output([prepare(source).files["folder/model"]]) == b"ready\n"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo the reason >&2; exit 3", "build.sh failed with exit code 3: the reason"),
        ("true", "it made no executable file 'model'"),
    ],
)
def test_a_build_that_fails_says_what_was_printed(tmp_path: Path, script: str, words: str) -> None:
    with pytest.raises(BundleError, match=words):
        prepare(cpp_folder(tmp_path / "m", **{"build.sh": script}))


def test_warm_is_not_for_cpp(tmp_path: Path) -> None:
    source = cpp_folder(tmp_path / "m")
    (source / "model_inference.textproto").write_text(FLAT + "warm: true\n")
    with pytest.raises(BundleError, match=r"warm is for main\.py"):
        prepare(source)


def test_the_command_shows_the_build_and_the_warning(tmp_path: Path, cache: Path) -> None:
    source = script_folder(tmp_path / "m")
    command = [sys.executable, "-m", "converters.cli", str(source), "-o", str(tmp_path / "repository")]
    code = "import sys; from converters.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *command[3:]], capture_output=True, text=True, check=True)
    assert "building the environment" in done.stderr
    assert "main.py runs as a program of this user" in done.stderr
