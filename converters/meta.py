"""Reader of meta models: bundles whose own Python code calls other models.

Their contracts are copied into its specification, so they are converted first.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from converters import repository
from converters.manifest import CONCURRENCY, MANIFEST_FILE, Manifest, ManifestTensor
from converters.prepared import Prepared, Source
from nereid_backend.dtypes import BYTES
from nereid_backend.errors import BundleError, ManifestError, UserCodeError
from nereid_backend.spec import SPEC_FILE, ModelSpec, TensorSpec
from nereid_backend.user_code import USER_CODE

PLATFORM = ENGINE = "meta"
DEFAULT_CONCURRENCY = 2
CODE_NOTE = f"its {USER_CODE} is run when the model is loaded; serve code only from people you trust"

_NOT_CODE = (MANIFEST_FILE, "model.jl")


def callees_in(folder: Path, names: Iterable[str]) -> dict[str, ModelSpec]:
    """Those of ``names`` that are in the repository ``folder``. Raises SpecError for one that cannot be read."""
    found = {}
    for name in names:
        if repository.is_name(name) and (folder / name / repository.VERSION / SPEC_FILE).is_file():
            found[name] = ModelSpec.read(folder / name / repository.VERSION)
    return found


def read(directory: Path, name: str, manifest: Manifest, callees: Mapping[str, ModelSpec]) -> Prepared:
    """Read and check a meta model that may call ``callees``. Raises BundleError subclasses."""
    if not (directory / USER_CODE).is_file():
        raise BundleError(
            f"the meta model has Julia code (model.jl), which Python cannot run; write a {USER_CODE} that calls "
            "nereid_backend.hooks.register_meta_model"
        )
    check_code(directory / USER_CODE)
    spec = ModelSpec(
        name=name,
        engine=ENGINE,
        platform=PLATFORM,
        inputs=tuple(map(_any_rows, manifest.client_inputs)),
        outputs=tuple(map(_any_rows, manifest.client_outputs)),
        programs=(),
        instances=manifest.options.get(CONCURRENCY, DEFAULT_CONCURRENCY),
        calls=tuple(contract_of(callee, name, callees) for callee in manifest.calls),
    )
    return Prepared(spec, files_for_code(directory), (CODE_NOTE,))


def check_code(path: Path) -> None:
    """Raise UserCodeError for a file that is not Python. Nothing is run."""
    try:
        ast.parse(path.read_bytes(), path.name)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f" line {line}" if line else ""
        raise UserCodeError(f"{path.name}{where}: is not Python ({getattr(error, 'msg', error)}); correct it") from None


def files_for_code(directory: Path) -> Mapping[str, Source]:
    """The files that the bundle's code may read beside itself: all but the manifest and hidden ones.

    Raises BundleError for a link to a folder, which may lead anywhere.
    """
    files: dict[str, Source] = {}
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in relative.parts)
        if path.is_symlink() and path.is_dir() and not hidden:
            raise BundleError(f"{relative} is a link to a folder, which the bundle's code would miss; copy it there")
        if hidden or not path.is_file() or str(relative) in _NOT_CODE:
            continue
        files[str(relative)] = path
    return files


def _any_rows(tensor: ManifestTensor) -> TensorSpec:
    """What clients send and get: the batch axes of a meta model's tensors need not agree, so they are just variable."""
    return replace(tensor.spec(), batch_axis=None)


def contract_of(callee: str, name: str, callees: Mapping[str, ModelSpec]) -> ModelSpec:
    """The contract of a model that the meta model ``name`` calls. Raises BundleError, ManifestError."""
    if callee == name:
        raise ManifestError(f"manifest 'meta.calls' lists the model itself ({name!r})")
    if callee not in callees:
        raise BundleError(
            f"the meta model calls {callee!r}, which is not among the converted models; convert it as well"
        )
    if callees[callee].calls is not None:
        raise BundleError(f"the meta model calls {callee!r}, which is a meta model too; call what that one calls")
    contract = callees[callee].contract
    if texts := [tensor.name for tensor in (*contract.inputs, *contract.outputs) if tensor.element is BYTES]:
        raise BundleError(f"the meta model calls {callee!r}, whose {texts} are texts (BYTES), which cannot be passed")
    return contract
