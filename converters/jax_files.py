"""Readers of lone StableHLO modules (``.mlir``) and of files written by ``jax.export`` (``.jax``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from converters.artifact import Artifact, positional_names
from nereid_backend import dtypes
from nereid_backend.engines import Port, import_library, jax_export, parse_device, stablehlo
from nereid_backend.engines.stablehlo import Argument
from nereid_backend.errors import BundleError, SignatureError

PLATFORM = "stablehlo"
EXPORT_PLATFORM = "jax_export"


def read_module(path: Path) -> Artifact:
    """Read a StableHLO module, text or portable artifact. Raises SignatureError, EngineMissing."""
    module = stablehlo.read_module(path)
    return Artifact(
        file=path.name,
        engine="stablehlo",
        platform=PLATFORM,
        directory=path.parent,
        files={path.name: path},
        inputs=_module_ports("input", module.arguments),
        outputs=_module_ports("output", module.results),
    )


def read_export(path: Path, device: str) -> Artifact:
    """Read a file of ``jax.export``. Raises SignatureError, BundleError, EngineMissing.

    Names are the keys of keyword arguments and of a returned dict, or else positions.
    """
    exported = jax_export.read(path)
    kind, _ = parse_device(device)
    if kind not in exported.platforms:
        raise BundleError(
            f"{path.name} was exported for {', '.join(exported.platforms)}, the model's device is {device}; export it "
            f"with platforms=[..., {kind!r}]"
        )
    if exported.nr_devices > 1:
        raise SignatureError(f"{path.name}: was exported for {exported.nr_devices} devices; export it for one")
    if exported.ordered_effects or exported.unordered_effects:
        raise SignatureError(f"{path.name}: has side effects (printing or callbacks); export it without them")
    return Artifact(
        file=path.name,
        engine="jax_export",
        platform=EXPORT_PLATFORM,
        directory=path.parent,
        files={path.name: path},
        inputs=_export_ports(path.name, "input", exported.in_tree, exported.in_avals),
        outputs=_export_ports(path.name, "output", exported.out_tree, exported.out_avals),
        sizes_from=1,  # each size is compiled anew
        trial_device="cpu" if "cpu" in exported.platforms else device,
    )


def _module_ports(role: str, arguments: Sequence[Argument]) -> tuple[Port, ...]:
    names = positional_names(role, len(arguments))
    return tuple(Port(name, a.dtype, a.shape) for name, a in zip(names, arguments, strict=True))


def _export_ports(label: str, role: str, tree: Any, avals: Sequence[Any]) -> tuple[Port, ...]:
    tree_util = import_library("jax_export").tree_util
    paths, _ = tree_util.tree_flatten_with_path(tree_util.tree_unflatten(tree, range(len(avals))))
    positions = positional_names(role, len(avals))
    names = [
        str(path[-1].key) if path and isinstance(path[-1], tree_util.DictKey) else position
        for (path, _), position in zip(paths, positions, strict=True)
    ]
    ports = []
    for name, aval in zip(names if len(set(names)) == len(names) else positions, avals, strict=True):
        try:
            dtype = dtypes.by_numpy(np.dtype(aval.dtype))
        except (BundleError, TypeError):
            raise SignatureError(
                f"{label}: {role} {name!r} is {aval.dtype}; only tensors of numbers are supported"
            ) from None
        shape = tuple(axis if isinstance(axis, int) else str(axis) for axis in aval.shape)
        if any(isinstance(axis, str) for axis in shape[1:]):
            raise SignatureError(
                f"{label}: {role} {name!r} has shape {list(shape)}; only the first axis may be symbolic, export one "
                "file per shape"
            )
        ports.append(Port(name, dtype.token, shape))
    return tuple(ports)
