"""Triage: what conversion would say about models before it reads any weights or runs anything.

The same checks in the same words: manifests, headers of weights, signatures of programs, hooks and contracts are read
as ``convert`` reads them. Model files that only an engine can open are recognized, not opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from converters import (
    arity,
    bundle,
    discover,
    ensembles,
    folder,
    hooks,
    isolation,
    kinds,
    meta,
    repository,
    saved_model,
    script,
    snooze,
    triton_models,
)
from converters.arity import ArityReport
from converters.artifact import serve_as_is
from converters.convert import check_source, file_kind, model_name
from converters.kinds import FileKind, Opening
from converters.prepared import Prepared
from converters.weights import BundleWeights
from nereid_backend.records import record
from nereid_backend.scripts import CPP, PYTHON
from nereid_backend.snooze import ENGINE as SNOOZE
from nereid_backend.spec import ModelSpec, TensorSpec
from nereid_backend.user_code import USER_CODE

NOT_OPENED = "{} is not opened by a check; converting it reads it"


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """What the header of a bundle's weights says."""

    file: str
    tensors: int
    size_bytes: int
    layout: str


@dataclass(frozen=True, slots=True)
class Report:
    """What is known of one model. ``problem`` is what conversion would refuse it for, None when there is nothing.

    ``inputs`` and ``outputs`` are what clients see, in wire order; empty where only the engine can tell.
    ``max_batch_size`` and ``batch_sizes`` hold if its rows prove independent, which conversion tries. ``hooks`` names
    the built-ins and the code around the program. ``calls`` is None except for a meta model.
    """

    path: str
    name: str
    kind: str = "unknown"
    problem: str | None = None
    notes: tuple[str, ...] = ()
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    max_batch_size: int = 0
    batch_sizes: tuple[int, ...] = ()
    variants: tuple[tuple[int, ...], ...] = ()
    weights: WeightsFile | None = None
    hooks: tuple[str, ...] = ()
    calls: tuple[str, ...] | None = None
    arity: ArityReport | None = None

    @property
    def line(self) -> str:
        """As ``nereid check`` prints it."""
        if self.problem is not None:
            return one_line(f"error: {self.path}: {self.problem}")
        known = [self.kind]
        if self.inputs or self.outputs:
            known.append(f"{_listed(self.inputs)} -> {_listed(self.outputs)}")
        if self.batch_sizes:
            known.append(f"batch sizes: {', '.join(map(str, self.batch_sizes))}")
        if self.variants:
            known.append(f"variants: {len(self.variants)}")
        if self.weights is not None:
            known.append(f"{self.weights.tensors} weights of {self.weights.size_bytes} bytes in {self.weights.layout}")
        if self.hooks:
            known.append(f"hooks: {', '.join(self.hooks)}")
        if self.calls:
            known.append(f"calls: {', '.join(self.calls)}")
        return one_line(f"ok: {self.path}: {'; '.join(known)}")

    def to_json(self) -> dict[str, Any]:
        """As ``nereid check --json`` prints it."""
        return {"ok": self.problem is None, **asdict(self)}


def one_line(text: str) -> str:
    """``text`` as it is, or escaped where paths or libraries' words have line ends or bytes that are no text."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def check_all(sources: Sequence[Path], *, in_child: bool) -> Iterator[Report]:
    """A report for each model, meta models last because theirs need their callees'. Raises nothing for a bad one.

    ``in_child``: read in a child process, so that a file which ends its reader is one bad report; for commands only,
    since it forks.
    """
    calls = {source: discover.calls_of(source) for source in sources}
    callees: dict[str, ModelSpec] = {}
    for which in ([s for s in sources if calls[s] is None], [s for s in sources if calls[s] is not None]):
        for answer in isolation.each(
            which, lambda source: _written(check(source, callees)), _ended, in_child=in_child, quiet=True
        ):
            report = record(Report, json.loads(answer))
            if report.problem is None and report.calls is None:
                # All that a caller's check asks about; without tensors, nothing is known of them.
                callees[report.name] = ModelSpec(report.name, "", "", report.inputs, report.outputs, ())
            yield report


def check(source: Path, callees: Mapping[str, ModelSpec] = MappingProxyType({})) -> Report:
    """Check one model in this process. Raises nothing for a bad one, but MLIR can end the process (``check_all``).

    ``callees`` holds, by name, the models that a meta model may call.
    """
    report = Report(str(source), model_name(source))
    try:
        check_source(source, report.name)
        for known in _checked(report, source, callees):
            report = known  # what is known when something raises
    except Exception as error:  # noqa: BLE001 - one bad model is one report
        return replace(report, problem=isolation.problem_of(error))
    return report


def _checked(report: Report, source: Path, callees: Mapping[str, ModelSpec]) -> Iterator[Report]:
    """The report as it grows. Raises what conversion would."""
    if discover.is_bundle(source):
        yield from _bundle(report, source, callees)
    elif discover.is_triton_model(source):
        yield from _triton_model(report, source, callees)
    elif source.is_dir():
        yield from _folder(report, source)
    else:
        kind = file_kind(source)
        report = replace(report, kind=f"{kind.name} file")
        yield report
        yield _file(report, source, kind)


def _bundle(report: Report, directory: Path, callees: Mapping[str, ModelSpec]) -> Iterator[Report]:
    report = replace(report, kind="bundle")
    yield report
    manifest = bundle.read_manifest(directory)
    if manifest.kind == "meta":
        report = replace(report, kind="meta model", calls=manifest.calls)
        yield report
        yield _described(report, meta.read(directory, report.name, manifest, callees))
        return
    parts = bundle.read_parts(directory, manifest)
    report = replace(report, weights=_weights(parts.weights), arity=arity.of(report.name, parts))
    yield report
    yield _described(report, hooks.attach(bundle.compare(parts, report.name, "cpu"), manifest, directory))


def _folder(report: Report, directory: Path) -> Iterator[Report]:
    report = replace(report, kind="folder")
    yield report
    found = folder.recognize(directory)
    report = replace(report, kind=f"{found.backend} folder")
    yield report
    if found.backend in (PYTHON, CPP):
        spec, _ = script.inspect(directory, report.name, "cpu", found.backend, found.contract)
        yield _described(report, Prepared(spec, {}))
    elif found.backend == SNOOZE:
        snooze.inspect(directory, found.contract)
        yield replace(report, notes=(kinds.needs_consent(report.name, snooze.RUNS_CODE),))
    elif found.kind is None or found.file is None:
        yield replace(report, notes=(kinds.needs_consent(saved_model.FILE, saved_model.RUNS_CODE),))
    else:
        yield replace(report, notes=_not_opened(found.file, found.kind))


def _triton_model(report: Report, directory: Path, callees: Mapping[str, ModelSpec]) -> Iterator[Report]:
    report = replace(report, kind="Triton model")
    yield report
    configured = triton_models.configuration(directory)
    if configured.backend == triton_models.ENSEMBLE:
        report = replace(report, kind="Triton ensemble", calls=triton_models.calls_of(directory))
        yield report
        yield _described(report, ensembles.read(report.name, configured, callees))
        return
    found = triton_models.inspect(directory, configured)
    limit = found.configured.max_batch_size
    yield replace(
        report,
        kind=f"Triton {found.backend} model",
        notes=(*found.changed, *_not_opened(found.file, found.kind)),
        inputs=triton_models.on_the_wire(found.configured.inputs, limit),
        outputs=triton_models.on_the_wire(found.configured.outputs, limit),
        max_batch_size=limit,
    )


def _file(report: Report, path: Path, kind: FileKind) -> Report:
    if kind.no_weights:
        artifact = kinds.read(kind, path, Opening("cpu"))
        return _described(report, serve_as_is(artifact, report.name, "cpu", None))
    return replace(report, notes=_not_opened(path, kind))


def _not_opened(path: Path, kind: FileKind) -> tuple[str, ...]:
    if kind.runs_code is not None:
        return (kinds.needs_consent(path.name, kind.runs_code),)
    return (NOT_OPENED.format(path.name),)


def _described(report: Report, prepared: Prepared) -> Report:
    """``report`` with what the model is. Raises RepositoryError where Triton could not be told."""
    repository.check(prepared)
    spec = prepared.spec
    around = spec.hooks
    used: Iterable[str] = ()
    if around is not None:
        used = [
            *(hook.name for hook in (*around.preprocess, *around.postprocess)),
            *([USER_CODE] if around.code else []),
        ]
    return replace(
        report,
        notes=prepared.notes,
        inputs=spec.client_inputs,
        outputs=spec.client_outputs,
        max_batch_size=spec.max_batch_size,
        batch_sizes=spec.batch_sizes,
        variants=tuple(variant for variant in spec.variants if variant),
        hooks=tuple(used),
    )


def _listed(tensors: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{tensor.name} {tensor.dtype}{list(tensor.shape)}" for tensor in tensors) or "nothing"


def _weights(header: BundleWeights) -> WeightsFile:
    return WeightsFile(header.path.name, len(header.argument_order), header.size_bytes, header.layout)


def _ended(source: Path, problem: str) -> str:
    return _written(Report(str(source), model_name(source), problem=problem))


def _written(report: Report) -> str:
    return json.dumps(asdict(report))
