"""Settings in JSON beside a saved model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nereid_backend.errors import ExportError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file. Raises ExportError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ExportError(
            f"{path.name} cannot be read as JSON ({type(error).__name__}); save the model again"
        ) from None
    if not isinstance(found, dict):
        raise ExportError(f"{path.name} is no JSON object; save the model again")
    return found
