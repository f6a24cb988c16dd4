"""Export of scikit-learn models: a fitted estimator or pipeline over a table of numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from converters import by_onnx, sklearn_files
from converters.exporters.description import Exported
from converters.exporters.tables import Table, export_table
from nereid_backend import dtypes
from nereid_backend.errors import ExportError

_NAME = "the estimator"


@dataclass(frozen=True, slots=True)
class SklearnModel:
    """A fitted estimator or pipeline; ``example_inputs`` are rows of its table.

    It takes ``input`` [rows, features] and gives ``probabilities`` and ``label``, or ``output``. ``max_batch_size``:
    the most rows of a run (default 32).
    """

    estimator: Any
    example_inputs: Any = None
    max_batch_size: int | None = None

    def export(
        self,
        directory: Path | str,
        *,
        tolerance: float | None = None,
        provenance: Mapping[str, Any] | None = MappingProxyType({}),
        force: bool = False,
    ) -> Exported:
        """See ``export_sklearn``."""
        options: dict[str, Any] = {"tolerance": tolerance, "provenance": provenance, "force": force}
        return export_table(
            _table(self.estimator, tolerance), directory, self.example_inputs, self.max_batch_size, **options
        )


def export_sklearn(
    estimator: Any,
    directory: Path | str,
    example_inputs: Any = None,
    *,
    max_batch_size: int | None = None,
    tolerance: float | None = None,
    provenance: Mapping[str, Any] | None = MappingProxyType({}),
    force: bool = False,
) -> Exported:
    """Write a scikit-learn model as a nereid folder that agrees with it. See SklearnModel for the arguments.

    ``tolerance`` is for scores, relative to a value and to the median of all (default 1e-5); labels are equal. Entries
    of ``provenance`` are added to what is collected; None writes none. Raises BundleError subclasses, also for a model
    that ONNX does not represent exactly; then nothing is written.
    """
    described = SklearnModel(estimator, example_inputs, max_batch_size)
    return described.export(directory, tolerance=tolerance, provenance=provenance, force=force)


def _table(model: Any, tolerance: float | None) -> Table:
    if hasattr(model, "get_booster"):
        raise ExportError(f"{type(model).__name__} is a model of XGBoost; export it with export_xgboost")
    converted = sklearn_files.convert(model, _NAME, tolerance=by_onnx.TOLERANCE if tolerance is None else tolerance)
    ((port,), outputs) = converted.inputs or (), [port.name for port in converted.outputs or ()]
    return Table(
        converted,
        original=_quietly(lambda rows: sklearn_files.predictions(model, outputs, rows, _NAME)),
        scores=_quietly(lambda rows: sklearn_files.scores(model, rows)),
        sample=_quietly(lambda rng: sklearn_files.sample(model, _NAME, dtypes.element(port.dtype).numpy, rng)),
        code=type(model),
        packages=("scikit-learn", "skl2onnx"),
        facts={
            "source_framework": "scikit-learn",
            "converter": "nereid export_sklearn",
            "estimator": type(sklearn_files.last_step(model)).__name__,
        },
    )


def _quietly(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``call`` without warnings: a model fitted to named columns is given a plain table."""

    def quiet(argument: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call(argument)

    return quiet
