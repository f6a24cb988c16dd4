"""Reader of models that other backends of Triton serve: NAME/{config.pbtxt, VERSION/model.onnx or model.pt}.

What config.pbtxt declares is what clients go on to see: names, datatypes, dims, batch size, instances, labels. The file
is opened by the engine that will run it, and checked against the declaration. Names and links in a repository of a
stranger lead nowhere outside the model's folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from converters import ensembles, kinds, torch_files, triton_config
from converters.artifact import Artifact, serve_as_is, serve_under
from converters.contract import Contract, ContractTensor
from converters.kinds import FileKind, Opening
from converters.prepared import Prepared
from converters.triton_config import CONFIG_FILE, Configured, ConfiguredTensor
from nereid_backend.dtypes import BYTES
from nereid_backend.engines import Port
from nereid_backend.errors import BundleError, SignatureError, TritonConfigError
from nereid_backend.spec import POSTPROCESS, PREPROCESS, SPEC_FILE, VARIABLE, BuiltinSpec, Hooks, ModelSpec, TensorSpec

DEFAULT_DEVICE = "cpu"
ENSEMBLE = "ensemble"
ALREADY_CONVERTED = (
    "is a model that nereid has converted already; tritonserver serves its repository as it is, and what it was made "
    "from can be converted again"
)
_LARGEST_LABELS_BYTES = 16 * 1024 * 1024
_VERSION = re.compile(r"[1-9][0-9]{0,17}")
# Triton looks for the first "__" only.
_INDEXED = re.compile(r"(?:(?!__).)*__([0-9]{1,4})")
_DICTIONARY = re.compile(r"Dict\[str, Tensor\]")

_FILES = {
    "model.onnx": "onnxruntime",
    "model.pt": "pytorch",
    "model.pt2": "pytorch",
    "model.plan": "tensorrt",
    "model.savedmodel": "tensorflow",
    "model.graphdef": "tensorflow",
    "model.xml": "openvino",
    "model.py": "python",
}
"""The backend that Triton takes from a file's name when config.pbtxt says nothing."""
_CONVERTED = ("onnxruntime", "pytorch")
_REFUSED = {
    "python": "its model.py is code for Triton's python backend and stays as it is; copy its folder into the new "
    "repository, where tritonserver runs it beside the others",
    "tensorrt": "a TensorRT plan runs only on the GPU and the version it was built for; convert the ONNX file it was "
    "built from",
    "tensorflow": "TensorFlow's files are converted from a nereid folder; put saved_model.pb and variables/ beside a "
    "model_inference.textproto and convert that folder with --allow-code",
    "openvino": "OpenVINO's files are not read; convert the ONNX file they were made from",
    "fil": "the forest is converted from its own file; give nereid convert the XGBoost (.json, .ubj) or skops file",
}


@dataclass(frozen=True, slots=True)
class TritonModel:
    """A Triton model before its file is opened; ``changed`` is what will be otherwise, in words."""

    directory: Path
    configured: Configured
    backend: str
    version: int
    file: Path
    kind: FileKind
    changed: tuple[str, ...]


def is_triton_model(path: Path) -> bool:
    """Whether the folder ``path`` is laid out as a model of a Triton repository."""
    if (path / CONFIG_FILE).is_file():
        return True
    return any((path / str(version) / file).exists() for version in _versions(path) for file in _FILES)


def configuration(directory: Path) -> Configured:
    """What a Triton model's folder declares, if anything. Raises BundleError subclasses."""
    if any((directory / str(version) / SPEC_FILE).is_file() for version in _versions(directory)):
        raise BundleError(ALREADY_CONVERTED)
    if not (directory / CONFIG_FILE).exists():
        return Configured()
    return triton_config.read(_inside(directory, CONFIG_FILE), directory.name)


def calls_of(directory: Path) -> tuple[str, ...] | None:
    """The models that an ensemble calls; None for every other model, also a broken one."""
    try:
        configured = configuration(directory)
    except (BundleError, OSError):
        return None
    return tuple({step.model: None for step in configured.steps}) if configured.backend == ENSEMBLE else None


def inspect(directory: Path, configured: Configured) -> TritonModel:
    """What is to be served of a Triton model's folder, without opening its file. Raises BundleError subclasses."""
    versions = _versions(directory)
    served = configured.served(versions)
    if not served:
        known = ", ".join(map(str, versions)) or "none"
        raise BundleError(f"no version folder is served (there are: {known}); add one, or correct version_policy")
    version = served[-1]
    backend = configured.backend or _backend(directory / str(version))
    if backend not in _CONVERTED:
        raise BundleError(_REFUSED.get(backend, f"the backend {backend!r} is not one of {', '.join(_CONVERTED)}"))
    file = _model_file(directory, version, backend, configured.file)
    name = "onnx" if backend == "onnxruntime" else "pt2" if file.suffix == ".pt2" else "torch"
    kind = next(kind for kind in kinds.FILE_KINDS if kind.name == name)
    changed = [*configured.changed]
    if version != 1:
        changed.append(f"version {version} is served as version 1; clients that name it must name 1 or none")
    if served[:-1]:
        changed.append(
            f"other versions ({', '.join(map(str, served[:-1][:9]))}) are left out: one is served; convert a copy of "
            "the folder that holds only that version, under another name"
        )
    return TritonModel(directory, configured, backend, version, file, kind, tuple(changed))


def read(
    directory: Path, name: str, device: str | None, opening: Opening, callees: Mapping[str, ModelSpec]
) -> Prepared:
    """Read a Triton model's folder; without ``device``, on the one it declares. Raises BundleError, EngineMissing.

    ``callees`` holds, by name, the models that an ensemble may call.
    """
    configured = configuration(directory)
    if configured.backend == ENSEMBLE:
        return ensembles.read(name, configured, callees)
    model = inspect(directory, configured)
    chosen = device or configured.device or DEFAULT_DEVICE
    changed = [*model.changed, *_device_notes(configured.device, device)]
    artifact = kinds.read(model.kind, model.file, replace(opening, device=chosen))
    for needed in artifact.files.values():
        if isinstance(needed, Path):
            _check_inside(directory, needed)
    if not configured.inputs and not configured.outputs and artifact.inputs is not None:
        prepared = serve_as_is(artifact, name, chosen, configured.max_batch_size or None)
        changed.append(f"{CONFIG_FILE} declares no tensors: they, and the batch size, come from {artifact.file}")
    else:
        prepared = _declared(model, artifact, name, chosen, changed)
    spec = replace(prepared.spec, threads=configured.threads, instances=configured.instances or 1)
    if spec.coalesce and spec.max_batch_size > 1 and not configured.dynamic_batching:
        changed.append("requests that wait together share a run; without dynamic_batching Triton ran them one by one")
    labels = {tensor.name: tensor.label_file for tensor in configured.outputs if tensor.label_file}
    return replace(
        prepared,
        spec=spec,
        files={**prepared.files, **_label_files(directory, labels, prepared)},
        notes=(*changed, *prepared.notes),
        labels=labels,
        taken_over=tuple(_taken_over(configured, spec)),
    )


def _declared(model: TritonModel, artifact: Artifact, name: str, device: str, changed: list[str]) -> Prepared:
    """Served under what config.pbtxt declares; adds to ``changed``."""
    configured = model.configured
    limit = configured.max_batch_size
    inputs = _completed("input", configured.inputs, artifact.inputs, limit, artifact.file)
    outputs = _completed("output", configured.outputs, artifact.outputs, limit, artifact.file)
    if model.backend == "pytorch":
        inputs, outputs = _in_order(inputs, outputs, model)
    elif artifact.inputs is not None and artifact.outputs is not None:
        inputs = _without_defaults(inputs, artifact.inputs, changed)
        artifact = replace(
            artifact,
            inputs=_named("input", inputs, artifact.inputs, artifact.file),
            outputs=_named("output", outputs, artifact.outputs, artifact.file),
        )
    for tensor in inputs:
        if tensor.optional:
            changed.append(f"input {tensor.name!r} is no longer optional: {artifact.file} has no default for it")
    contract = Contract(_model_side(inputs), _model_side(outputs), limit, flat=False)
    try:
        prepared = serve_under(artifact, name, device, contract)
    except BundleError as error:
        raise type(error)(f"{CONFIG_FILE} as its contract: {error}") from error
    spec = replace(prepared.spec, batch_may_be_omitted=False)
    return replace(prepared, spec=replace(spec, hooks=_reshapes(spec, inputs, outputs)))


# Files.


def _versions(directory: Path) -> list[int]:
    """The version folders, ascending; Triton passes over other names."""
    return sorted(int(entry.name) for entry in directory.iterdir() if _VERSION.fullmatch(entry.name) and entry.is_dir())


def _backend(version: Path) -> str:
    for file, backend in _FILES.items():
        if (version / file).exists():
            return backend
    raise BundleError(f"{CONFIG_FILE} names no backend, and version {version.name} holds none of {', '.join(_FILES)}")


def _model_file(directory: Path, version: int, backend: str, named: str) -> Path:
    names = [named] if named else [file for file, its_backend in _FILES.items() if its_backend == backend]
    folder = directory / str(version)
    file = next((name for name in names if (folder / name).exists()), None)
    if file is None:
        raise BundleError(f"version {version} does not hold {' or '.join(names)}; put it there")
    if (folder / file).is_dir():  # an ONNX model and its external data
        file = f"{file}/{file}"
    return _inside(directory, f"{version}/{file}")


def _inside(directory: Path, relative: str) -> Path:
    """A file of the model's folder. Raises BundleError for what is none, or leads out of the folder."""
    path = directory / relative
    if not path.is_file():
        raise BundleError(f"{relative} is not a file; put it there")
    _check_inside(directory, path)
    return path


def _check_inside(directory: Path, path: Path) -> None:
    if not path.resolve().is_relative_to(directory.resolve()):
        raise BundleError(f"{path.relative_to(directory)} is a link out of the model's folder; copy the file there")


def _label_files(directory: Path, labels: dict[str, str], prepared: Prepared) -> dict[str, Path]:
    files = {}
    for output, name in labels.items():
        if name in prepared.files:
            raise TritonConfigError(f"output {output!r}: label_filename {name!r} is a file of the model; rename it")
        path = _inside(directory, name)
        if path.stat().st_size > _LARGEST_LABELS_BYTES:
            raise BundleError(f"{name} is larger than {_LARGEST_LABELS_BYTES} bytes, too large for labels")
        files[name] = path
    return files


# Tensors.


def _completed(
    role: str, declared: Sequence[ConfiguredTensor], ports: Sequence[Port] | None, limit: int, file: str
) -> list[ConfiguredTensor]:
    """The declared tensors, or those of the file where none is declared."""
    if declared:
        return [*declared]
    if ports is None:
        raise TritonConfigError(f"{CONFIG_FILE} declares no {role}s, and {file} does not tell them; declare them")
    tensors = []
    for port in ports:
        shape = tuple(size if isinstance(size, int) else VARIABLE for size in port.shape[1 if limit else 0 :])
        tensors.append(ConfiguredTensor(port.name, port.dtype, shape, shape))
    return tensors


def _model_side(tensors: Sequence[ConfiguredTensor]) -> tuple[ContractTensor, ...]:
    return tuple(ContractTensor(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)


def _without_defaults(
    inputs: list[ConfiguredTensor], ports: Sequence[Port], changed: list[str]
) -> list[ConfiguredTensor]:
    """``inputs`` without the optional ones that the graph has a value for."""
    known = {port.name for port in ports}
    left_out = [tensor.name for tensor in inputs if tensor.optional and tensor.name not in known]
    changed += [f"optional input {name!r} is left out: the graph's own value holds always" for name in left_out]
    return [tensor for tensor in inputs if tensor.name not in left_out]


def _named(role: str, tensors: Sequence[ConfiguredTensor], ports: Sequence[Port], file: str) -> tuple[Port, ...]:
    """The ports of ``tensors``, by name as Triton binds them; outputs may be a part of the graph's."""
    by_name = {port.name: port for port in ports}
    if unknown := [tensor.name for tensor in tensors if tensor.name not in by_name]:
        raise SignatureError(
            f"{file}: the graph has no {role} {unknown[0]!r}; it has {', '.join(by_name)}: correct {CONFIG_FILE}"
        )
    if role == "input" and len(tensors) < len(by_name):
        missing = by_name.keys() - {tensor.name for tensor in tensors}
        raise SignatureError(f"{file}: the graph's input {min(missing)!r} is not declared in {CONFIG_FILE}; add it")
    return tuple(by_name[tensor.name] for tensor in tensors)


def _in_order(
    inputs: list[ConfiguredTensor], outputs: list[ConfiguredTensor], model: TritonModel
) -> tuple[list[ConfiguredTensor], list[ConfiguredTensor]]:
    """Both as torch takes and gives them: by the names of arguments, by ``NAME__INDEX``, or as they are declared."""
    if texts := [tensor.name for tensor in (*inputs, *outputs) if tensor.dtype == BYTES.token]:
        raise BundleError(f"{texts[0]!r} is TYPE_STRING, which torch has no tensors of; encode the texts as numbers")
    arguments = torch_files.forward_arguments(model.file) if model.kind.name == "torch" else {}
    if any(_DICTIONARY.search(kind) for kind in arguments.values()):
        raise BundleError(f"{model.file.name}: forward takes a dictionary; wrap it in a module that takes tensors")
    names = [*arguments]
    if all(tensor.name in arguments for tensor in inputs):
        inputs = _sorted("input", inputs, [names.index(tensor.name) for tensor in inputs])
    else:
        inputs = _by_index("input", inputs)
    return inputs, _by_index("output", outputs)


def _by_index(role: str, tensors: list[ConfiguredTensor]) -> list[ConfiguredTensor]:
    matches = [_INDEXED.fullmatch(tensor.name) for tensor in tensors]
    if not all(matches):
        return tensors
    return _sorted(role, tensors, [int(match[1]) for match in matches if match])


def _sorted(role: str, tensors: list[ConfiguredTensor], places: Sequence[int]) -> list[ConfiguredTensor]:
    if sorted(places) != [*range(len(places))]:
        raise TritonConfigError(f"the names of the {role}s give them the places {[*places]}; they must be 0, 1, ...")
    return [tensor for _, tensor in sorted(zip(places, tensors, strict=True), key=lambda pair: pair[0])]


def on_the_wire(tensors: Sequence[ConfiguredTensor], limit: int) -> tuple[TensorSpec, ...]:
    """Declared tensors as clients see them; ``limit`` is max_batch_size."""
    return tuple(
        TensorSpec(t.name, t.dtype, (VARIABLE, *t.dims) if limit else t.dims, 0 if limit else None) for t in tensors
    )


def _reshapes(spec: ModelSpec, inputs: Sequence[ConfiguredTensor], outputs: Sequence[ConfiguredTensor]) -> Hooks | None:
    """Hooks for tensors whose dims on the wire are not the model's shape, None when there are none."""
    before, client_inputs = _reshaped(PREPROCESS, spec, spec.inputs, inputs)
    after, client_outputs = _reshaped(POSTPROCESS, spec, spec.outputs, outputs)
    return Hooks(client_inputs, client_outputs, before, after) if before or after else None


def _reshaped(
    stage: str, spec: ModelSpec, tensors: Sequence[TensorSpec], configured: Sequence[ConfiguredTensor]
) -> tuple[tuple[BuiltinSpec, ...], tuple[TensorSpec, ...]]:
    """The hooks of one side, and what its tensors are to clients."""
    by_name = {tensor.name: tensor for tensor in configured}
    hooks, clients = [], []
    for tensor in tensors:
        declared = by_name[tensor.name]
        # A single number per row, [1] on the wire, needs none: Triton has no rank 0, so it travels like that anyway.
        if declared.dims == declared.shape or (declared.dims, declared.shape) == ((1,), ()):
            clients.append(tensor)
            continue
        sides = (declared.dims, declared.shape) if stage == PREPROCESS else (declared.shape, declared.dims)
        options = {
            "tensor": tensor.name,
            "before": [*sides[0]],
            "after": [*sides[1]],
            "rows": spec.max_batch_size > 0,
        }
        hooks.append(BuiltinSpec("reshape_input" if stage == PREPROCESS else "reshape_output", options))
        clients += on_the_wire([declared], spec.max_batch_size)
    return tuple(hooks), tuple(clients)


# What the report says.


def _device_notes(configured: str | None, asked: str | None) -> list[str]:
    if configured is None and asked is None:
        return [f"{CONFIG_FILE} leaves the device to Triton: it is {DEFAULT_DEVICE}; choose with --device"]
    if configured is not None and asked not in (None, configured):
        return [f"the device is {asked}, as asked; {CONFIG_FILE} says {configured}"]
    return []


def _taken_over(configured: Configured, spec: ModelSpec) -> Iterator[str]:
    for role, tensors in (("input", spec.client_inputs), ("output", spec.client_outputs)):
        for tensor in tensors:
            yield f"{role} {tensor.name} {tensor.element.kserve} {list(spec.dims(tensor))}"
    yield f"max_batch_size {spec.max_batch_size}"
    if configured.dynamic_batching and spec.coalesce:
        yield "dynamic_batching"
    if spec.batch_sizes:
        yield f"batch sizes {', '.join(map(str, spec.batch_sizes))}"
    if configured.device == spec.device or configured.instances:
        yield f"{spec.instances} instance{'s' if spec.instances > 1 else ''} on {spec.device}"
    if spec.threads:
        yield f"{spec.threads} threads"
    if spec.hooks is not None:
        reshaped = [str(hook.options["tensor"]) for hook in (*spec.hooks.preprocess, *spec.hooks.postprocess)]
        yield f"reshape of {', '.join(reshaped)}"
    for output in configured.outputs:
        if output.label_file:
            yield f"labels of {output.name} ({output.label_file})"
