"""Where a bundle comes from: versions, time, and the state of the git work tree that holds the code.

Nothing here fails an export: what cannot be found out is left out. The repository is only read.
"""

from __future__ import annotations

import inspect
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from converters.exporters.placement import PATCH_FILE
from nereid_backend.errors import ExportError

MAX_PATCH_BYTES = 20 * 2**20
_GIT_S = 30
_USER = re.compile(r"(?<=//)[^/@]*@")  # a remote's address may hold a password or token


@dataclass(frozen=True, slots=True)
class Provenance:
    """The manifest's ``provenance``, and the patch that makes the work tree of its commit (empty: none is needed)."""

    fields: Mapping[str, Any]
    patch: bytes = b""


def collect(code: Callable[..., Any] | Path, packages: tuple[str, ...], known: Mapping[str, Any]) -> Provenance:
    """The provenance of ``code`` or a model file: of the work tree that it is in, else of the working directory's.

    ``packages`` are distributions whose versions matter; entries of ``known`` win.
    """
    fields: dict[str, Any] = {
        "exported_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python_version": platform.python_version(),
    }
    for package in ("nereid-triton", *packages):
        try:
            fields[f"{package.replace('-', '_')}_version"] = version(package)
        except PackageNotFoundError:
            continue
    patch = b""
    for folder in (_folder(code), Path.cwd()):
        try:
            git, patch = _work_tree(folder) if folder is not None else ({}, b"")
        except (OSError, ValueError, subprocess.SubprocessError):  # no git, no work tree, no commit yet
            continue
        fields |= git
        if git:
            break
    return Provenance({**fields, **known}, patch)


def yaml_text(fields: Mapping[str, Any]) -> str:
    """A mapping that holds provenance as YAML. Raises ExportError."""
    try:
        return yaml.safe_dump(dict(fields), sort_keys=False, allow_unicode=True)
    except yaml.YAMLError as error:
        raise ExportError(f"provenance holds what YAML has no text for ({error}); give texts and numbers") from None


def _folder(code: Callable[..., Any] | Path) -> Path | None:
    if isinstance(code, Path):
        return code.parent
    try:
        file = inspect.getsourcefile(inspect.unwrap(code))
    except TypeError:  # an object that is called
        file = None
    return Path(file).parent if file is not None and Path(file).is_file() else None


def _work_tree(folder: Path) -> tuple[dict[str, Any], bytes]:
    """What the manifest says of the work tree that holds ``folder``, and its patch."""
    root = Path(_git(folder, "rev-parse", "--show-toplevel"))
    fields: dict[str, Any] = {
        "git_commit": _git(root, "rev-parse", "--verify", "HEAD"),
        "git_tree_sha1": _git(root, "rev-parse", "HEAD^{tree}"),
    }
    for key, arguments in {
        "git_branch": ("symbolic-ref", "--quiet", "--short", "HEAD"),
        "repo_remote": ("config", "--get", "remote.origin.url"),
    }.items():
        try:
            fields[key] = _USER.sub("", _git(root, *arguments))
        except subprocess.CalledProcessError:  # no branch, no remote
            continue
    changed = _git_bytes(root, "status", "--porcelain", "--untracked-files=normal")
    fields["git_dirty"] = bool(changed)
    try:
        patch = _patch(root) if changed else b""
    except (OSError, subprocess.SubprocessError):  # a file that cannot be read
        patch = b""
    if patch:
        fields["git_diff_file"] = PATCH_FILE
    return fields, patch


def _patch(root: Path) -> bytes:
    """The difference between HEAD and the work tree, files that git does not know yet included; empty when too large.

    Made with an index and objects of its own, so that the repository stays as it is.
    """
    listed = _git_bytes(root, "ls-files", "-z", "--modified", "--others", "--exclude-standard").split(b"\0")
    paths = [root / os.fsdecode(name) for name in listed if name]
    if sum(path.lstat().st_size for path in paths if os.path.lexists(path)) > MAX_PATCH_BYTES:
        return b""
    with tempfile.TemporaryDirectory() as scratch:
        index, objects = Path(scratch) / "index", Path(scratch) / "objects"
        objects.mkdir()
        own = {
            "GIT_INDEX_FILE": str(index),
            "GIT_OBJECT_DIRECTORY": str(objects),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(root / _git(root, "rev-parse", "--git-path", "objects")),
        }
        # With its time, by which git knows the files that may have changed in the second they were added in.
        shutil.copy2(root / _git(root, "rev-parse", "--git-path", "index"), index)
        _git_bytes(root, "add", "--all", environment=own)
        # Whatever the user's settings make of a difference: this one can be applied.
        plain = ("--binary", "--full-index", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color")
        prefixes = ("--src-prefix=a/", "--dst-prefix=b/")
        patch = _git_bytes(root, "diff", "--cached", *plain, *prefixes, "HEAD", environment=own)
    return patch if len(patch) <= MAX_PATCH_BYTES else b""


def _git(folder: Path, *arguments: str) -> str:
    return _git_bytes(folder, *arguments).decode().strip()


def _git_bytes(folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> bytes:
    # Inside a git hook these would name the hook's repository.
    inherited = {k: v for k, v in os.environ.items() if k not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")}
    done = subprocess.run(
        ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments],
        env={**inherited, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_GIT_S,
        check=True,
    )
    return done.stdout
