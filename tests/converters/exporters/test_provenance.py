from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("jax")

from converters.exporters import export_jax, provenance

CODE = "def model(params, x):\n    return x * 2\n"
X = np.ones((2, 3), np.float32)


def git(folder: Path, *arguments: str) -> str:
    # Neither the settings of this machine nor those of its user.
    nobody = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(
        ["git", *author, "-C", str(folder), *arguments], env={**os.environ, **nobody}, capture_output=True, check=True
    )
    return done.stdout.decode().strip()


@pytest.fixture
def work_tree(tmp_path: Path) -> Path:
    root = tmp_path / "work"
    (root / "models").mkdir(parents=True)
    git(tmp_path, "init", "-q", "-b", "trunk", str(root))
    (root / "models" / "model.py").write_text(CODE)
    (root / "gone.txt").write_text("old\n")
    (root / "table.bin").write_bytes(bytes(range(256)))
    (root / ".gitignore").write_text("*.secret\n")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    git(root, "remote", "add", "origin", "https://someone:token@example.org/models.git")
    return root


def exported(work_tree: Path, bundle: Path, **options: Any) -> dict[str, Any]:
    """The provenance of an export of the work tree's function."""
    names: dict[str, Any] = {}
    file = work_tree / "models" / "model.py"
    exec(compile(file.read_text(), str(file), "exec"), names)
    export_jax(names["model"], None, X, bundle, [1], **options)
    recorded: dict[str, Any] = yaml.safe_load((bundle / "manifest.yaml").read_text()).get("provenance", {})
    return recorded


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".git" not in path.parts and path.suffix != ".secret"
    }


def test_a_clean_work_tree_is_named_by_its_commit(work_tree: Path, tmp_path: Path) -> None:
    import jax

    recorded = exported(work_tree, tmp_path / "clean")
    assert recorded.pop("exported_at").endswith("+00:00")
    assert recorded == {
        **recorded,
        "git_commit": git(work_tree, "rev-parse", "HEAD"),
        "git_tree_sha1": git(work_tree, "rev-parse", "HEAD^{tree}"),
        "git_branch": "trunk",
        "git_dirty": False,
        "repo_remote": "https://example.org/models.git",
        "source_framework": "jax",
        "jax_version": jax.__version__,
        "python_version": ".".join(map(str, sys.version_info[:3])),
        "batch_sizes": [1],
    }
    assert not (tmp_path / "clean" / "working_tree.patch").exists()


def test_the_patch_of_a_changed_work_tree_makes_its_code_and_the_repository_stays_as_it_is(
    work_tree: Path, tmp_path: Path
) -> None:
    (work_tree / "models" / "model.py").write_text(CODE.replace("2", "3"))
    (work_tree / "gone.txt").unlink()
    (work_tree / "table.bin").write_bytes(bytes(reversed(range(256))))
    (work_tree / "new file.txt").write_text("no line end")
    (work_tree / "key.secret").write_text("secret")
    git(work_tree, "config", "diff.noprefix", "true")
    before = {path: path.read_bytes() for path in (work_tree / ".git").rglob("*") if path.is_file()}
    recorded = exported(work_tree, tmp_path / "changed")
    assert {path: path.read_bytes() for path in (work_tree / ".git").rglob("*") if path.is_file()} == before
    assert (recorded["git_dirty"], recorded["git_diff_file"]) == (True, "working_tree.patch")
    git(tmp_path, "clone", "-q", str(work_tree), str(tmp_path / "again"))
    git(tmp_path / "again", "checkout", "-q", recorded["git_commit"])
    git(tmp_path / "again", "apply", "--binary", str(tmp_path / "changed" / "working_tree.patch"))
    assert files(tmp_path / "again") == files(work_tree)


def test_a_change_of_the_commits_own_second_is_in_the_patch(work_tree: Path, tmp_path: Path) -> None:
    # As on a slow disk: git tells by the time of its index that such a file must be read.
    second = 1_700_000_000
    file, index = work_tree / "models" / "model.py", work_tree / ".git" / "index"
    git(work_tree, "config", "core.trustctime", "false")
    for path in (file, index):
        os.utime(path, (second, second))
    git(work_tree, "add", "--renormalize", "models")
    file.write_text(CODE.replace("2", "3"))
    for path in (file, index):
        os.utime(path, (second, second))
    recorded = exported(work_tree, tmp_path / "changed")
    assert (recorded["git_dirty"], recorded.get("git_diff_file")) == (True, "working_tree.patch")
    assert b"+    return x * 3" in (tmp_path / "changed" / "working_tree.patch").read_bytes()


def test_a_patch_beyond_the_limit_is_left_out(work_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "MAX_PATCH_BYTES", 1000)
    (work_tree / "data.bin").write_bytes(bytes(1001))
    recorded = exported(work_tree, tmp_path / "large")
    assert (recorded["git_dirty"], "git_diff_file" in recorded) == (True, False)
    assert not (tmp_path / "large" / "working_tree.patch").exists()


@pytest.mark.parametrize("missing", ["git", "work tree", "commit"])
def test_an_export_needs_no_git(work_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.chdir(tmp_path)
    if missing == "git":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        (work_tree / ".git").rename(tmp_path / "put away")
        if missing == "commit":
            git(tmp_path, "init", "-q", str(work_tree))
    recorded = exported(work_tree, tmp_path / "plain")
    assert "jax_version" in recorded
    assert not [key for key in recorded if key.startswith("git")]


def test_given_entries_win_and_none_writes_none(work_tree: Path, tmp_path: Path) -> None:
    assert exported(work_tree, tmp_path / "given", provenance={"git_branch": "mine", "run": 7}).items() >= {
        ("git_branch", "mine"), ("run", 7), ("git_dirty", False),
    }  # fmt: skip
    assert exported(work_tree, tmp_path / "none", provenance=None) == {}
