"""Many models into one repository: what a run with a report still has to do, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from converters import convert as conversion
from converters import report
from converters.discover import calls_of
from converters.prepared import Prepared
from converters.report import CONVERTED, CONVERTING, REFUSED, Entry, Report
from nereid_backend.spec import ModelSpec

_TRY_AGAIN = "correct that and run the command again"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one model; ``refused`` is "" when it was converted."""

    taken_over: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    refused: str = ""


class Conversions:
    """Conversions into ``output``. Without a report file all of them are to be done."""

    def __init__(
        self, output: Path, options: Mapping[str, Any], report_file: Path | None, *, force: bool, dry_run: bool
    ) -> None:
        """``options`` are those of ``convert``. Raises ReportError."""
        self._output, self._options = output, options
        self._force, self._dry_run = force, dry_run
        self._report = None if report_file is None else Report(report_file)
        self._callees: dict[str, ModelSpec] = {}

    def target(self, source: Path) -> Path:
        """The folder that ``source`` is converted to."""
        return self._output / (self._options["name"] or conversion.model_name(source))

    def undone(self, sources: Sequence[Path]) -> list[Path]:
        """Those of ``sources`` that are missing, changed or were refused; they are begun. Raises ReportError."""
        if self._report is None:
            return [*sources]
        # A meta model carries its callees' contracts, which may have changed.
        undone = [
            source
            for source in sources
            if self._force or calls_of(source) is not None or not self._report.is_done(self._planned(source))
        ]
        if not self._dry_run:
            for source in undone:
                self._report.begin(self._planned(source))
            self._report.save()
        return undone

    def convert(self, source: Path) -> Prepared:
        """Convert one model, or only try to in a dry run. Raises NereidError subclasses."""
        ours = self._report is not None and self._report.is_ours(self._planned(source))
        prepared = conversion.convert(
            source,
            self._output,
            **self._options,
            force=self._force or ours,
            callees=self._callees,
            dry_run=self._dry_run,
        )
        if self._dry_run:  # else they are in the repository
            self._callees[prepared.spec.name] = prepared.spec
        return prepared

    def note(self, source: Path, outcome: Outcome) -> None:
        """Write what became of one model into the report. Raises ReportError."""
        if self._report is None or self._dry_run:
            return
        entry = replace(self._planned(source), taken_over=outcome.taken_over, changed=outcome.changed)
        if outcome.refused:
            refused, _, next_step = outcome.refused.rpartition("; ")
            entry = replace(entry, status=REFUSED, refused=refused or next_step)
            entry = replace(entry, next_step=next_step if refused else _TRY_AGAIN)
        else:
            entry = replace(entry, status=CONVERTED, output_digest=report.output_digest(Path(entry.output)))
            entry = replace(entry, next_step=f"serve it: tritonserver --model-repository={self._output}")
        self._report.note(entry)
        self._report.save()

    def _planned(self, source: Path) -> Entry:
        target = self.target(source)
        digest = report.source_digest(source, self._options)
        return Entry(target.name, str(source.absolute()), str(target.absolute()), CONVERTING, digest)
