"""Loads the Python file of a bundle: its own module per model, and what it registered."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from nereid_backend import hooks
from nereid_backend.errors import UserCodeError

USER_CODE = "hooks.py"
"""The Python file of a bundle."""

_T = TypeVar("_T")

_numbers = itertools.count(1)


def load(directory: Path, model: str, kind: type[_T], register: str) -> _T:
    """Run ``directory/hooks.py`` and return the ``kind`` it registered by calling ``register``. Raises UserCodeError.

    The module is a package of its own name, so files beside it can be imported as ``from . import other``, and two
    models never share a module.
    """
    hooks.registered.clear()
    _run(directory / USER_CODE, f"nereid_user_code_{next(_numbers)}", model)
    found = list(hooks.registered)
    hooks.registered.clear()
    if len(found) != 1 or not isinstance(found[0], kind):
        what = " and ".join(type(each).__name__ for each in found) or "nothing"
        raise UserCodeError(
            f"{USER_CODE} of model {model!r} must call {register} exactly once (see nereid_backend.hooks), it "
            f"registered {what}"
        )
    return found[0]


def _run(path: Path, name: str, model: str) -> ModuleType:
    location = importlib.util.spec_from_file_location(name, path, submodule_search_locations=[str(path.parent)])
    if location is None or location.loader is None:
        raise UserCodeError(f"{USER_CODE} of model {model!r} cannot be loaded as Python; convert the bundle again")
    module = importlib.util.module_from_spec(location)
    sys.modules[name] = module
    try:
        location.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        reason = (str(error).splitlines() or [""])[0]
        raise UserCodeError(
            f"{USER_CODE} of model {model!r} failed while it was loaded: {type(error).__name__}: {reason}"
        ) from error
    return module
