"""Readers of torch's files: TorchScript ``.pt``, and ``.pt2`` archives told apart by content."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

from converters.artifact import Artifact, positional_names
from nereid_backend import dtypes
from nereid_backend.engines import Port, import_library, pt2, torchscript
from nereid_backend.errors import BundleError, SignatureError, short_repr

PLATFORM = "pytorch_libtorch"
EXPORT_PLATFORM = "pytorch_export"
_CODE = re.compile(r"/code/.*\.py$")
# Of all that torch registers, these take the name of a file. As bare words: the code may give its modules other names.
_FILE_OPERATORS = re.compile(rb"\b(save|from_file|load_tensor)\b")


def read_script(path: Path, *, allow_code: bool) -> Artifact:
    """Read a TorchScript file, which tells neither shapes nor dtypes. Raises SignatureError, BundleError."""
    if not allow_code and (found := _reaches_files(path)):
        raise BundleError(
            f"{path.name}: its code says {found!r}, which reaches files of this machine when it runs; if you trust it, "
            "allow it with --allow-code (in nereid.yaml: options: {allow_code: true})"
        )
    return _artifact(path, "torchscript", PLATFORM)


def forward_arguments(path: Path) -> dict[str, str]:
    """The arguments of a TorchScript file's ``forward`` in order, types by names. Raises SignatureError."""
    module = torchscript.load_module(import_library("torchscript"), path, "cpu")
    return {argument.name: str(argument.type) for argument in torchscript.forward_arguments(module)}


def _reaches_files(path: Path) -> str | None:
    """The first name in a TorchScript file's code that reads or writes files, before anything of it has run."""
    try:
        with zipfile.ZipFile(path) as archive:
            code = [archive.read(entry) for entry in archive.infolist() if _CODE.search(entry.filename)]
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        raise SignatureError(
            f"{path.name}: is not a TorchScript file, or is damaged; save it with torch.jit.save"
        ) from None
    found = next((match for text in code if (match := _FILE_OPERATORS.search(text))), None)
    return None if found is None else found[0].decode()


def read_archive(path: Path, device: str) -> Artifact:
    """Read a ``.pt2`` archive, which runs code from it. Raises SignatureError, DeviceMissing, EngineMissing."""
    kind = archive_kind(path)
    if kind == "aotinductor":
        built_for = pt2.compiled_for(path).get("AOTI_DEVICE_KEY", "cpu")
        pt2.check_machine(path, device.partition(":")[0])
        # A package for any number of rows refuses a single one: its checks begin at 2, whatever the export said.
        trial_device = "cpu" if built_for == "cpu" else device
        return _artifact(path, kind, EXPORT_PLATFORM, sizes_from=2, trial_device=trial_device)
    program = pt2.load_program(import_library(kind), path)
    inputs, outputs = _ports(program, path.name)
    return _artifact(path, kind, EXPORT_PLATFORM, inputs=inputs, outputs=outputs, max_rows=_max_rows(program, inputs))


def archive_kind(path: Path) -> str:
    """The engine of a ``.pt2`` archive, by the files in it. Raises SignatureError."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile):
        raise SignatureError(f"{path.name}: is not a .pt2 archive, or is damaged; export it again") from None
    compiled = any("/data/aotinductor/" in name for name in names)
    programs = [name for name in names if "/models/" in name and name.endswith(".json")]
    if compiled and not programs:
        return "aotinductor"
    if len(programs) == 1 and not compiled:
        return "torch_export"
    if any("/code/" in name for name in names):
        raise SignatureError(f"{path.name}: holds TorchScript; name it .pt")
    raise SignatureError(
        f"{path.name}: holds {len(programs)} exported programs{' and compiled ones' if compiled else ''}; save one "
        "with torch.export.save or aoti_compile_and_package"
    )


def _artifact(path: Path, engine: str, platform: str, **known: Any) -> Artifact:
    return Artifact(path.name, engine, platform, path.parent, {path.name: path}, **known)


def _ports(program: Any, label: str) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    """Inputs by the names of forward's arguments, outputs by the keys of the dict it returns, if it does."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature = program.graph_signature
    outputs = signature.user_outputs
    names = _output_names(program.call_spec.out_spec, len(outputs))
    try:
        return (
            tuple(_port(label, "input", str(name), values.get(name)) for name in signature.user_inputs),
            tuple(_port(label, "output", n, values.get(o)) for n, o in zip(names, outputs, strict=True)),
        )
    except TypeError:  # an unhashable constant
        raise SignatureError(f"{label}: takes or gives something else than tensors; export it with tensors") from None


def _output_names(out_spec: Any, count: int) -> list[str]:
    from torch.utils import _pytree as pytree

    paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(count)), out_spec))
    keys = [path[0].key for path, _ in paths if len(path) == 1 and isinstance(path[0], pytree.MappingKey)]
    if keys and len(keys) == count:
        return [str(key) for key in keys]
    return positional_names("output", count)


def _port(label: str, role: str, name: str, value: Any) -> Port:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise SignatureError(
            f"{label}: {role} {name!r} is no tensor ({short_repr(value)}); export the model with tensors only"
        )
    token = str(value.dtype).removeprefix("torch.")
    try:
        dtype = dtypes.by_torch(token)
    except BundleError as error:
        raise SignatureError(f"{label}: {role} {name!r}: {error}") from None
    return Port(name, dtype.token, tuple(axis if isinstance(axis, int) else str(axis) for axis in value.shape))


def _max_rows(program: Any, inputs: tuple[Port, ...]) -> int | None:
    """The largest first axis the program was exported for."""
    ranges = {str(symbol): limits for symbol, limits in program.range_constraints.items()}
    uppers = [ranges[axis].upper for port in inputs if port.shape and (axis := port.shape[0]) in ranges]
    finite = [int(upper) for upper in uppers if getattr(upper, "is_Integer", isinstance(upper, int))]
    return min(finite) if finite else None
