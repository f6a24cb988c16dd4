"""The keys and the token secret that ``server.auth`` points to, read once at the start.

Of a key only the digest is kept. Variables of the environment are taken out of it as they are read: models and
programs started from here run other people's code.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from native_service.access import roles
from native_service.access.roles import NAMES, Role
from native_service.settings.access import AuthSettings, JwtSettings, KeySettings
from native_service.telemetry.log_records import SECRETS
from nereid_backend.errors import SettingsError

_LOG = logging.getLogger("nereid.serve")

LONGEST_KEY = 512
_LONGEST_FILE = 64 * 1024
_SHORTEST_SECRET = 16
_taken: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What a token must satisfy; ``secret`` signs it."""

    secret: bytes = field(repr=False)
    algorithm: str
    issuer: str | None
    audience: str | None
    leeway_s: int = 60


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who may call: the role of each key by its SHA-256 in hexadecimal digits, and the rules for tokens."""

    keys: Mapping[str, Role]
    tokens: TokenRules | None = None
    metrics: Role = roles.HTTP[roles.METRICS]
    """What ``/metrics`` asks for."""


def read(auth: AuthSettings) -> Credentials:
    """Raises SettingsError with one line per key that cannot be had."""
    keys: dict[str, Role] = {}
    problems: list[str] = []
    for key in auth.keys:
        try:
            digest = _digest(key)
        except SettingsError as error:
            problems.append(str(error))
            continue
        if keys.get(digest, NAMES[key.role]) is not NAMES[key.role]:
            problems.append(f"{_name(key)} is the key of another name as well; make a new one")
        keys[digest] = NAMES[key.role]
    tokens = None
    try:
        tokens = None if auth.jwt is None else _token_rules(auth.jwt)
    except SettingsError as error:
        problems.append(str(error))
    if problems:
        raise SettingsError("\n".join(problems))
    return Credentials(keys, tokens, Role[auth.metrics.upper()])


def warn_when_others_may_read(path: Path, what: str) -> None:
    """Tell of a secret that every user of this machine can read."""
    if path.stat().st_mode & stat.S_IROTH:
        _LOG.warning("%s %s can be read by every user of this machine; chmod 600 it", what, path)


def _name(key: KeySettings) -> str:
    return f"server.auth.keys: key {key.name!r}"


def _digest(key: KeySettings) -> str:
    if key.sha256 is not None:
        return key.sha256
    text = _secret(_name(key), key.key_file, key.key_env)
    if len(text) > LONGEST_KEY or not all("!" <= character <= "~" for character in text):
        raise SettingsError(f"{_name(key)} must be up to {LONGEST_KEY} visible ASCII characters without blanks")
    return hashlib.sha256(text.encode()).hexdigest()


def _token_rules(jwt: JwtSettings) -> TokenRules:
    secret = _secret("server.auth.jwt: the secret", jwt.secret_file, jwt.secret_env)
    return TokenRules(secret.encode(), jwt.algorithm, jwt.issuer, jwt.audience, jwt.leeway_s)


def _secret(what: str, file: str | None, variable: str | None) -> str:
    """Without the white space around it, as SnoozeML's client uses it."""
    if file is not None:
        text, where = _file(what, Path(file)), file
    else:
        text, where = _variable(what, str(variable)), str(variable)
    text = text.strip()
    if not text:
        raise SettingsError(f"{what} is empty in {where}")
    SECRETS.hide(text)
    if len(text) < _SHORTEST_SECRET:
        _LOG.warning("%s has fewer than %d characters and may be guessed", what, _SHORTEST_SECRET)
    return text


def _file(what: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_LONGEST_FILE + 1)
        warn_when_others_may_read(path, "the file")
        text = data.decode()
    except OSError as error:
        raise SettingsError(f"{what} cannot be read from {path} ({error.strerror})") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{what} in {path} is not UTF-8 text") from None
    if len(data) > _LONGEST_FILE:
        raise SettingsError(f"{what} in {path} is larger than {_LONGEST_FILE} bytes; is it the right file?")
    return text


def remember(variable: str, text: str) -> None:
    """``text`` is what ``variable`` stands for in settings, though it came by another way than the environment."""
    SECRETS.hide(text)
    _taken[variable] = text


def _variable(what: str, name: str) -> str:
    value = os.environ.pop(name, None)
    if value is not None:
        _taken[name] = value
    if name not in _taken:
        raise SettingsError(f"{what} needs the variable {name} in the environment, which is not set")
    return _taken[name]
