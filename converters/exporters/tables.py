"""Export of models of a table of numbers, by way of ONNX.

What is stored is the ONNX graph in a nereid folder, not the library's own file: it is compared where the model is at
hand, it is data (a pickle is code), and a server needs neither the library nor its version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from converters import artifact, by_onnx, contract
from converters.artifact import Artifact
from converters.exporters import comparison
from converters.exporters.comparison import Trial
from converters.exporters.description import Exported
from converters.exporters.folder_writer import MODEL_STEM, write_folder
from converters.exporters.provenance import Provenance, collect
from converters.prepared import Prepared
from nereid_backend.engines import Array
from nereid_backend.spec import ModelSpec

UNSEEN_ROWS = 1000
# At sizes below the largest, where one run holds few rows.
_RUNS = 16


@dataclass(frozen=True, slots=True)
class Table:
    """A model and its conversion.

    ``original`` is what the model itself predicts for rows, by the names that it is served under; ``scores`` what it
    takes its labels from ([n, classes], or [n] around zero), None when there are none. ``sample`` draws rows
    [n, features] such as the conversion was compared on. ``code``, ``packages`` and ``facts`` are for the provenance.
    """

    converted: Artifact
    original: Callable[[Array], Mapping[str, Array]]
    scores: Callable[[Array], Array | None]
    sample: Callable[[np.random.Generator], Array]
    code: Callable[..., Any]
    packages: tuple[str, ...]
    facts: Mapping[str, Any]


def export_table(
    table: Table,
    directory: Path | str,
    example_inputs: Any,
    max_batch_size: int | None,
    *,
    tolerance: float | None,
    provenance: Mapping[str, Any] | None,
    force: bool,
) -> Exported:
    """Write ``table`` as a nereid folder, run beside the model on the examples and on 1,000 rows drawn anew.

    Raises BundleError subclasses, EngineMissing; then nothing is written.
    """
    served = artifact.serve_as_is(table.converted, MODEL_STEM, "cpu", max_batch_size).spec
    rng = np.random.default_rng(1)  # the conversion was compared on the rows of 0
    drawn = table.sample(rng)
    unseen = drawn[rng.permutation(len(drawn))[:UNSEEN_ROWS]]
    rows = {"rows that were not exported with": unseen}
    if example_inputs is not None:
        (rows["example inputs"],) = comparison.examples_of(served, example_inputs)
    origin = Provenance({})
    if provenance is not None:
        packages = (*table.packages, "onnx", "onnxruntime", "numpy")
        origin = collect(table.code, packages, {**table.facts, **provenance})
    differences: dict[str, float] = {}
    notes = list(table.converted.notes)

    def proof(prepared: Prepared) -> None:
        trials: list[Trial] = []
        for what, some in rows.items():
            told = _told_apart(table, some)
            if not told.all():
                left_out = len(some) - int(told.sum())
                notes.append(f"of the {len(some)} {what}, {left_out} were left out: two classes score the same")
            trials += _trials(table, prepared.spec, what, some[told])
        differences.update(comparison.prove(prepared, trials, tolerance))

    prepared = write_folder(
        Path(directory),
        contract.contract_of(served),
        table.converted.files,
        provenance=origin.fields,
        patch=origin.patch,
        force=force,
        proof=proof,
    )
    return Exported(Path(directory), (), differences, (*notes, *prepared.notes))


def _told_apart(table: Table, rows: Array) -> Array:
    """[n] whether the label of a row hangs on more than rounding."""
    scores = table.scores(rows)
    return np.ones(len(rows), bool) if scores is None else ~by_onnx.ties(scores)


def _trials(table: Table, spec: ModelSpec, what: str, rows: Array) -> Iterator[Trial]:
    if not len(rows):
        return
    by_name = table.original(rows)
    expected = [
        np.reshape(by_name[tensor.name], (len(rows), *tensor.shape[1:])).astype(tensor.element.numpy)
        for tensor in spec.outputs
    ]
    for size in comparison.sizes_to_try(spec):
        step = size or len(rows)
        runs = None if step in (spec.max_batch_size, len(rows)) else _RUNS
        for start in range(0, len(rows), step)[:runs]:
            part = slice(start, start + step)
            at = "" if size is None else f" at batch size {size}"
            yield Trial(f"{what}{at}", [rows[part]], [array[part] for array in expected])
