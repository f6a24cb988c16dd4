"""Export of XGBoost models: a booster, or a model of XGBoost's scikit-learn interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from converters import by_onnx, xgboost_files
from converters.exporters.description import Exported
from converters.exporters.tables import Table, export_table
from nereid_backend.engines import Array
from nereid_backend.errors import ExportError


@dataclass(frozen=True, slots=True)
class XgboostModel:
    """A trained ``Booster``, ``XGBClassifier``, ``XGBRegressor`` or another; ``example_inputs`` are rows of its table.

    It takes ``input`` [rows, features], where NaN is missing, and gives ``probabilities`` and ``label``, or ``output``.
    ``max_batch_size``: the most rows of a run (default 32).
    """

    model: Any
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
        """See ``export_xgboost``."""
        options: dict[str, Any] = {"tolerance": tolerance, "provenance": provenance, "force": force}
        return export_table(
            _table(self.model, tolerance), directory, self.example_inputs, self.max_batch_size, **options
        )


def export_xgboost(
    model: Any,
    directory: Path | str,
    example_inputs: Any = None,
    *,
    max_batch_size: int | None = None,
    tolerance: float | None = None,
    provenance: Mapping[str, Any] | None = MappingProxyType({}),
    force: bool = False,
) -> Exported:
    """Write an XGBoost model as a nereid folder that agrees with it. See XgboostModel for the arguments.

    A training that stopped early is served up to its best round. ``tolerance`` is for scores, relative to a value and
    to the median of all (default 1e-5); labels are equal. Entries of ``provenance`` are added to what is collected;
    None writes none. Raises BundleError subclasses, also for a model that ONNX does not represent exactly (categories,
    dart, gblinear); then nothing is written.
    """
    described = XgboostModel(model, example_inputs, max_batch_size)
    return described.export(directory, tolerance=tolerance, provenance=provenance, force=force)


def _table(model: Any, tolerance: float | None) -> Table:
    source = xgboost_files.ensemble(_booster(model, type(model).__name__), "the model")
    converted = xgboost_files.convert(source, by_onnx.TOLERANCE if tolerance is None else tolerance)
    outputs = [port.name for port in converted.outputs or ()]

    def original(rows: Array) -> Mapping[str, Array]:
        if not hasattr(model, "get_booster"):
            return source.predictions(outputs, rows)
        if "label" in outputs:
            return {"probabilities": model.predict_proba(rows), "label": model.predict(rows)}
        return {"output": model.predict(rows)}

    def scores(rows: Array) -> Array | None:
        return original(rows)["probabilities"] if "label" in outputs else None

    return Table(
        converted,
        original,
        scores,
        sample=source.sample,
        code=type(model),
        packages=("xgboost", "xgboost-cpu", "onnxmltools"),
        facts={
            "source_framework": "xgboost",
            "converter": "nereid export_xgboost",
            "objective": source.objective,
            "rounds": source.rounds,
        },
    )


def _booster(model: Any, name: str) -> Any:
    """The Booster of a model, which has been trained. Raises ExportError."""
    xgboost = by_onnx.import_converter("xgboost", "XGBoost", xgboost_files.EXTRA)
    if isinstance(model, xgboost.Booster):
        return model
    if not hasattr(model, "get_booster"):
        raise ExportError(f"a model of type {name} was given, expected a Booster or a model of XGBoost")
    if model.missing is not None and not np.isnan(model.missing):
        raise ExportError(
            f"{name}: missing is {model.missing}, in what is served it is NaN; put NaN into the table in its place and "
            "train with missing=nan"
        )
    try:
        return model.get_booster()
    except Exception as error:  # NotFittedError, of scikit-learn where that is installed
        raise ExportError(f"{name} is not trained ({by_onnx.first_line(error)}); fit it first") from error
