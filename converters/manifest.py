"""manifest.yaml of the bundle format (2.0 and 2.1): parse, then validate.

A tensor's ``shape`` is a string of axis letters in Julia order, the first letter varying fastest; ``n`` or ``b``
marks the batch axis. The wire and the program use the reverse order, so only the list of sizes is reversed here,
never the bytes. Rules and their order follow ReactantServer.jl's manifest parser; unknown keys are ignored there and
here.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from converters.weights import is_file_name
from converters.yaml12 import load_yaml
from nereid_backend import dtypes
from nereid_backend.errors import BundleError, ManifestError, short_repr
from nereid_backend.spec import MAX_SIZE, POSTPROCESS, PREPROCESS, VARIABLE, TensorSpec

MANIFEST_FILE = "manifest.yaml"
DEFAULT_WEIGHTS_FILE = "weights.safetensors"
VERSIONS = ("2", "2.0", "2.1")
BATCH_LETTERS = frozenset("nb")
CONCURRENCY = "concurrency"
HOOK_PROCESSES = "hook_processes"
MOST_PROCESSES = 64
CLIENT_AXIS_ORDER, AXIS_ORDERS = "client_axis_order", ("julia", "wire")
EXPORTED_FILES = "exported_files"
"""SHA-256 by name of what an export put beside the programs, so that it knows what it may replace."""
_OPTIONS = (CONCURRENCY, PREPROCESS, POSTPROCESS, HOOK_PROCESSES, CLIENT_AXIS_ORDER, EXPORTED_FILES)


@dataclass(frozen=True, slots=True)
class ManifestTensor:
    """One tensor entry. ``letters`` and ``dims`` are in Julia order, as written."""

    name: str
    dtype: str
    letters: str
    dims: Mapping[str, int]

    @property
    def batch_axis(self) -> int | None:
        """The batch axis on the wire, counted from the slowest."""
        wire = self.letters[::-1]
        return next((i for i, letter in enumerate(wire) if letter in BATCH_LETTERS), None)

    @property
    def variable_letters(self) -> tuple[str, ...]:
        return tuple(letter for letter in self.letters if self.dims.get(letter) == VARIABLE)

    def at(self, sizes: Mapping[str, int]) -> ManifestTensor:
        """The tensor with the variable axes that ``sizes`` names set to its values."""
        fixed = {letter: sizes[letter] for letter in self.variable_letters if letter in sizes}
        return replace(self, dims={**self.dims, **fixed})

    def spec(self) -> TensorSpec:
        """The tensor in wire order."""
        shape = tuple(self.dims.get(letter, VARIABLE) for letter in reversed(self.letters))
        return TensorSpec(self.name, self.dtype, shape, self.batch_axis)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A validated manifest. ``client_*`` are empty when the manifest leaves them out."""

    name: str
    kind: str
    executable_inputs: tuple[ManifestTensor, ...]
    executable_outputs: tuple[ManifestTensor, ...]
    client_inputs: tuple[ManifestTensor, ...]
    client_outputs: tuple[ManifestTensor, ...]
    compiled_batch_sizes: tuple[int, ...]
    input_shapes: tuple[Mapping[str, int], ...]
    calls: tuple[str, ...]
    weights_file: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """The mapping under ``nereid:``, this project's own key."""

    @property
    def has_builtins(self) -> bool:
        return any(self.options.get(stage) for stage in (PREPROCESS, POSTPROCESS))

    @property
    def variant_keys(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of the variable input axes of each entry of ``input_shapes``, in input and axis order."""
        letters = [letter for tensor in self.executable_inputs for letter in tensor.variable_letters]
        return tuple(tuple(entry[letter] for letter in letters) for entry in self.input_shapes)


def read(path: Path, *, has_hook: bool) -> Manifest:
    """Read and validate a file. ``has_hook``: the bundle carries a hook file. Raises ManifestError."""
    try:
        raw = load_yaml(path.read_bytes())
    except OSError as error:
        raise ManifestError(f"{path.name}: cannot be read ({error.strerror})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not UTF-8 text"
        raise ManifestError(f"{path.name}{where}: is not YAML ({problem}); correct the line") from None
    except RecursionError:
        raise ManifestError(f"{path.name}: is nested too deeply; write it flat") from None
    return parse(raw, has_hook=has_hook)


def parse(raw: Any, *, has_hook: bool) -> Manifest:
    """Validate a manifest already loaded from YAML. Raises ManifestError naming the first broken rule."""
    if not isinstance(raw, Mapping):
        raise ManifestError(f"manifest must be a mapping, got {_kind(raw)}")
    if "format_version" not in raw:
        raise ManifestError("manifest is missing 'format_version'; write format_version: \"2.1\"")
    version = raw["format_version"]
    if not isinstance(version, str | int | float):
        raise ManifestError(f'manifest has unsupported format_version {short_repr(version)}; write "2.1"')
    name, kind = raw.get("name", ""), raw.get("kind", "model")
    if not isinstance(name, str):
        raise ManifestError(f"manifest 'name' must be a string, got {_kind(name)}")
    if not isinstance(kind, str):
        raise ManifestError(f"manifest 'kind' must be a string, got {_kind(kind)}")
    options = _options(raw.get("nereid", {}))
    clients = {key: _tensors(raw, key, required=False) for key in ("client_inputs", "client_outputs")}
    if options.get(CLIENT_AXIS_ORDER) == "wire":
        clients = {k: tuple(replace(t, letters=t.letters[::-1]) for t in tensors) for k, tensors in clients.items()}
    manifest = Manifest(
        name=name,
        kind=kind,
        executable_inputs=_tensors(raw, "executable_inputs", required=kind != "meta"),
        executable_outputs=_tensors(raw, "executable_outputs", required=kind != "meta"),
        client_inputs=clients["client_inputs"],
        client_outputs=clients["client_outputs"],
        compiled_batch_sizes=_batch_sizes(raw.get("batching")),
        input_shapes=_input_shapes(raw.get("input_shapes")),
        calls=_calls(raw.get("meta")) if kind == "meta" else (),
        weights_file=_weights_file(raw.get("weights_file", DEFAULT_WEIGHTS_FILE)),
        options=options,
    )
    _validate(manifest, str(version), has_hook or manifest.has_builtins)
    return manifest


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {short_repr(value)}"


def _tensors(raw: Mapping[str, Any], key: str, *, required: bool) -> tuple[ManifestTensor, ...]:
    if raw.get(key) is None:
        if required:
            raise ManifestError(f"manifest is missing '{key}'")
        return ()
    entries = raw[key]
    if not isinstance(entries, list):
        raise ManifestError(f"manifest '{key}' must be a list, got {_kind(entries)}")
    tensors = tuple(_tensor(entry, f"{key}[{i}]") for i, entry in enumerate(entries))
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise ManifestError(f"manifest '{key}': duplicate tensor name {tensor.name!r}")
        seen.add(tensor.name)
    return tensors


def _tensor(raw: Any, where: str) -> ManifestTensor:
    if not isinstance(raw, Mapping):
        raise ManifestError(f"{where} must be a mapping, got {_kind(raw)}")
    for key in ("name", "dtype", "shape"):
        if not isinstance(raw.get(key), str):
            raise ManifestError(f"{where} is missing string '{key}', got {_kind(raw.get(key))}")
    name, letters = raw["name"], raw["shape"]
    if not name:
        raise ManifestError(f"{where} 'name' is empty")
    if not name.isprintable():
        raise ManifestError(f"{where} 'name' {short_repr(name)} has characters that cannot be printed; rename it")
    where = f"{where} {name!r}"
    dims = raw.get("dims")
    dims = {} if dims is None else dims
    if not isinstance(dims, Mapping):
        raise ManifestError(f"{where}: 'dims' is not a mapping, got {_kind(dims)}")
    _check_shape(letters, dims, where)
    try:
        dtypes.by_token(raw["dtype"])
    except BundleError as error:
        raise ManifestError(f"{where}: {error}") from None
    return ManifestTensor(name, raw["dtype"], letters, dict(dims))


def _check_shape(letters: str, dims: Mapping[Any, Any], where: str) -> None:
    """The rules in the format's own order, so that ``nn`` reports the duplicate and ``nb`` the batch rule."""
    for letter in letters:
        if letter not in string.ascii_letters:
            raise ManifestError(f"{where}: shape {letters!r} has {letter!r}, which is not an ASCII letter")
    if len(set(letters)) != len(letters):
        raise ManifestError(f"{where}: shape {letters!r} has duplicate axis letters")
    if len(BATCH_LETTERS & set(letters)) > 1:
        raise ManifestError(f"{where}: shape {letters!r} has more than one batch axis (n and b both mark it)")
    for key, size in dims.items():
        if not isinstance(key, str) or len(key) != 1 or key not in string.ascii_letters:
            raise ManifestError(f"{where}: dims key {short_repr(key)} is not a single ASCII letter")
        if key in BATCH_LETTERS:
            raise ManifestError(f"{where}: dims must not give the batch axis {key!r} a size")
        if type(size) is not int:
            raise ManifestError(f"{where}: dims {key!r} must be an integer, got {_kind(size)}")
        if size == 0 or not VARIABLE <= size <= MAX_SIZE:
            raise ManifestError(f"{where}: dims {key!r} must be > 0 or -1, at most {MAX_SIZE}, got {short_repr(size)}")
    for key in dims:
        if key not in letters:
            raise ManifestError(f"{where}: dims key {key!r} is not in shape {letters!r}")
    for letter in letters:
        if letter not in BATCH_LETTERS and letter not in dims:
            raise ManifestError(f"{where}: shape has axis {letter!r} but dims has no entry for it")


def _batch_sizes(raw: Any) -> tuple[int, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, Mapping):
        raise ManifestError(f"manifest 'batching' must be a mapping, got {_kind(raw)}")
    sizes = raw.get("compiled_batch_sizes")
    sizes = [] if sizes is None else sizes
    if not isinstance(sizes, list) or not all(type(size) is int and 0 < size <= MAX_SIZE for size in sizes):
        raise ManifestError(
            f"manifest 'batching.compiled_batch_sizes' must be a list of positive integers, got {short_repr(sizes)}"
        )
    return tuple(sizes)


def _input_shapes(raw: Any) -> tuple[Mapping[str, int], ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list) or not raw or not all(isinstance(entry, Mapping) for entry in raw):
        raise ManifestError(f"manifest 'input_shapes' must be a list of mappings, got {_kind(raw)}")
    for entry in raw:
        for letter, size in entry.items():
            if type(size) is not int or not 0 < size <= MAX_SIZE:
                raise ManifestError(
                    f"manifest 'input_shapes': size of {short_repr(letter)} must be > 0 (and <= {MAX_SIZE}), got "
                    f"{short_repr(size)}"
                )
    return tuple(dict(entry) for entry in raw)


def _calls(raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, Mapping):
        raise ManifestError("manifest of kind meta is missing 'meta' mapping")
    calls = raw.get("calls")
    if not isinstance(calls, list):
        raise ManifestError(f"manifest 'meta.calls' must be a list, got {_kind(calls)}")
    if not all(isinstance(call, str) for call in calls):
        raise ManifestError(f"manifest 'meta.calls' entries must be strings, got {short_repr(calls)}")
    return tuple(calls)


def _weights_file(raw: Any) -> str:
    if not isinstance(raw, str) or not is_file_name(raw):
        raise ManifestError(f"manifest 'weights_file' must be a file name inside the bundle, got {_kind(raw)}")
    return raw


def _options(raw: Any) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise ManifestError(f"manifest 'nereid' must be a mapping, got {_kind(raw)}")
    if unknown := sorted(str(key) for key in raw if key not in _OPTIONS):
        raise ManifestError(f"manifest 'nereid' has unknown keys {unknown}; known: {', '.join(_OPTIONS)}")
    for stage in (PREPROCESS, POSTPROCESS):
        declared = raw.get(stage, [])
        if not isinstance(declared, list):
            raise ManifestError(f"manifest 'nereid.{stage}' must be a list, got {_kind(declared)}")
        for index, entry in enumerate(declared):
            if not isinstance(entry, Mapping) or len(entry) != 1 or not isinstance(next(iter(entry)), str):
                raise ManifestError(
                    f"manifest 'nereid.{stage}[{index}]' must be one name with its options, as in "
                    f"{{trim: {{output: y, count: n}}}}; got {_kind(entry)}"
                )
    if raw.get(CLIENT_AXIS_ORDER, "julia") not in AXIS_ORDERS:
        raise ManifestError(
            f"manifest 'nereid.{CLIENT_AXIS_ORDER}' must be one of {', '.join(AXIS_ORDERS)}, got "
            f"{_kind(raw[CLIENT_AXIS_ORDER])}"
        )
    files = raw.get(EXPORTED_FILES, {})
    if not isinstance(files, Mapping) or not all(isinstance(name, str) and is_file_name(name) for name in files):
        raise ManifestError(f"manifest 'nereid.{EXPORTED_FILES}' must have file names as keys, got {_kind(files)}")
    return dict(raw)


def _validate(manifest: Manifest, version: str, has_hook: bool) -> None:
    if version not in VERSIONS:
        raise ManifestError(f"manifest has unsupported format_version {version!r}; known: {', '.join(VERSIONS)}")
    if manifest.kind not in ("model", "meta"):
        raise ManifestError(f"manifest has unsupported kind {manifest.kind!r}; known: model, meta")
    if manifest.kind == "meta":
        _validate_meta(manifest, has_hook)
    else:
        _validate_model(manifest, has_hook)
    _validate_wire(manifest)


def _validate_meta(manifest: Manifest, has_hook: bool) -> None:
    if manifest.has_builtins:
        raise ManifestError("manifest 'nereid' declares hooks, which a model of kind meta has none of; drop them")
    if not has_hook:
        raise ManifestError("manifest of kind meta requires a model.jl (or hooks.py) beside it")
    if not manifest.client_inputs or not manifest.client_outputs:
        raise ManifestError("manifest of kind meta needs non-empty client_inputs and non-empty client_outputs")
    if len(set(manifest.calls)) != len(manifest.calls):
        raise ManifestError(f"manifest has duplicate entries in meta.calls: {list(manifest.calls)}")
    if manifest.name in manifest.calls:
        raise ManifestError(f"manifest 'meta.calls' lists itself ({manifest.name!r})")
    if manifest.input_shapes:
        raise ManifestError("manifest of kind meta must not have 'input_shapes'")
    _check_processes(manifest, CONCURRENCY)


def _check_processes(manifest: Manifest, key: str) -> None:
    count = manifest.options.get(key, 1)
    if type(count) is not int or not 0 < count <= MOST_PROCESSES:
        raise ManifestError(
            f"manifest 'nereid.{key}' must be an integer from 1 to {MOST_PROCESSES}, got {_kind(count)}"
        )


def _validate_model(manifest: Manifest, has_hook: bool) -> None:
    if CONCURRENCY in manifest.options:
        raise ManifestError(f"manifest 'nereid.{CONCURRENCY}' is for kind meta only")
    _check_processes(manifest, HOOK_PROCESSES)
    if HOOK_PROCESSES in manifest.options and not has_hook:
        raise ManifestError(f"manifest 'nereid.{HOOK_PROCESSES}' is for bundles with hooks only")
    if (manifest.client_inputs or manifest.client_outputs) and not has_hook:
        raise ManifestError(
            "client_inputs and client_outputs are only valid when model.jl is present (here: hooks.py, or built-ins "
            "declared under nereid.preprocess or nereid.postprocess)"
        )
    inputs = manifest.executable_inputs
    unbatched = [tensor.name for tensor in inputs if tensor.batch_axis is None]
    if unbatched and len(unbatched) != len(inputs):
        raise ManifestError(f"manifest mixes batched and unbatched executable inputs; without batch axis: {unbatched}")
    variable = {letter for tensor in inputs for letter in tensor.variable_letters}
    if not manifest.input_shapes:
        if variable:
            raise ManifestError(
                f"manifest has a variable executable-input axis {sorted(variable)} but no 'input_shapes'; list the "
                "sizes that are compiled"
            )
        return
    if not variable:
        raise ManifestError("manifest has 'input_shapes' but no executable input has a variable axis")
    for entry in manifest.input_shapes:
        if missing := sorted(variable - set(entry)):
            raise ManifestError(
                f"manifest 'input_shapes' entry {short_repr(dict(entry))} is missing a size for variable axis {missing}"
            )
        if extra := sorted(set(map(str, entry)) - variable):
            raise ManifestError(
                f"manifest 'input_shapes' entry {short_repr(dict(entry))} names non-variable axes {extra}"
            )
    keys = manifest.variant_keys
    if len(set(keys)) != len(keys):
        raise ManifestError("manifest 'input_shapes' has duplicate entries")


def _validate_wire(manifest: Manifest) -> None:
    """What clients see must have a KServe datatype; FP8 may only hide behind a client spec."""
    for tensor in (
        *(manifest.client_inputs or manifest.executable_inputs),
        *(manifest.client_outputs or manifest.executable_outputs),
    ):
        if dtypes.by_token(tensor.dtype).kserve is None:
            raise ManifestError(
                f"tensor {tensor.name!r} has dtype {tensor.dtype}: no KServe wire datatype; convert it in the program "
                "or in a hook"
            )
