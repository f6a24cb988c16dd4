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


def entries(folder: Path) -> list[ModelSettings]:
    """The settings of the uploaded models that are still in ``folder``."""
    found = []
    place = folder / FOLDER / _FILE
    try:
        known = _known(folder)
    except OSError as error:
        _LOG.warning("%s cannot be read (%s); uploaded models have default settings", place, error.strerror)
        return []
    for raw in known:
        try:
            model = ModelSettings.model_validate(raw)
        except ValidationError:
            _LOG.warning("%s: the entry %s cannot be used; that model has default settings", place, _name(raw))
            continue
        if _is_there(folder, raw):
            found.append(model)
    return found


def remember(folder: Path, model: ModelSettings) -> None:
    """Keep the settings of ``model``, instead of those of that name from before. Raises RepositoryError.

    Those of files that have gone are forgotten; what cannot be read here, as another version may, stays as it is.
    """
    from converters import durable

    place = folder / FOLDER
    fresh = place / f"{_FILE}.new"
    try:
        known = [each for each in _known(folder) if _name(each) != model.name and _is_there(folder, each)]
        place.mkdir(mode=0o700, exist_ok=True)
        durable.write_text(fresh, json.dumps([*known, model.model_dump()], indent=1) + "\n")
        fresh.replace(place / _FILE)
        durable.sync_directory(place)
    except OSError as error:
        raise RepositoryError(f"the settings of {model.name!r} cannot be kept ({error.strerror})") from None


def remember_pin(folder: Path, name: str, *, pinned: bool) -> None:
    """Keep whether ``name`` is pinned, if it is an uploaded model. Raises RepositoryError."""
    for model in entries(folder):
        if model.name == name and model.options.pinned != pinned:
            options = model.options.model_copy(update={"pinned": pinned})
            remember(folder, model.model_copy(update={"options": options}))


def _known(folder: Path) -> list[Any]:
    """What the file holds. Raises OSError."""
    path = folder / FOLDER / _FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (ValueError, RecursionError) as error:
        _LOG.warning("%s cannot be used (%s); uploaded models have default settings", path, type(error).__name__)
        return []
    return raw if isinstance(raw, list) else []


def _name(raw: Any) -> Any:
    return raw.get("name") if isinstance(raw, dict) else None


def _is_there(folder: Path, raw: Any) -> bool:
    """Whether the file of an entry is, or may be as the entry does not say which it is."""
    options = raw.get("options") if isinstance(raw, dict) else None
    path = options.get("path") if isinstance(options, dict) else None
    try:
        return not isinstance(path, str) or (folder / path).is_file()
    except (OSError, ValueError):
        return False
