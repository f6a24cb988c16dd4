"""What is remembered of uploaded models beside their files: the settings they came with, for the next start.

They lie in a hidden folder of the folder of models, where files are also put until they are complete and converted.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from native_service.settings import ModelSettings
from nereid_backend.errors import RepositoryError

_LOG = logging.getLogger("nereid.serve")

FOLDER = ".nereid-uploads"
_FILE = "models.json"


def entries(folder: Path) -> list[dict[str, Any]]:
    """The settings of the uploaded models that are still in ``folder``, as ``models`` of the settings has them."""
    return [model.model_dump() for model in _known(folder) if (folder / str(model.options.path)).is_file()]


def remember(folder: Path, model: ModelSettings) -> None:
    """Keep the settings of ``model``, instead of those of that name from before. Raises RepositoryError."""
    from converters import durable

    known = {each.name: each for each in _known(folder)} | {model.name: model}
    place = folder / FOLDER
    fresh = place / f"{_FILE}.new"
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        durable.write_text(fresh, json.dumps([each.model_dump() for each in known.values()], indent=1) + "\n")
        fresh.replace(place / _FILE)
        durable.sync_directory(place)
    except OSError as error:
        raise RepositoryError(f"the settings of {model.name!r} cannot be kept ({error.strerror})") from None


def _known(folder: Path) -> list[ModelSettings]:
    path = folder / FOLDER / _FILE
    try:
        return [ModelSettings.model_validate(raw) for raw in json.loads(path.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, ValidationError) as error:
        _LOG.warning("%s cannot be used (%s); uploaded models have default settings", path, type(error).__name__)
        return []
