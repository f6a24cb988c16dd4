"""``models.toml`` and ``models.json``: SnoozeML's settings files, turned into the settings of ``nereid.yaml``.

What else is in the folder is served as well. Models are loaded by their first call and leave after their idle time.
A key that we do not know is warned of, as the file may be older or newer than we are.
"""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from native_service import settings as own
from native_service.access import credentials
from native_service.access.roles import CLAIMS
from native_service.settings import ModelSettings, Settings
from native_service.settings.access import VariableName
from native_service.settings.errors import describe
from native_service.settings.section import NonBlank
from native_service.snooze import uploaded
from nereid_backend.errors import SettingsError, short_repr

_LOG = logging.getLogger("nereid.serve")

FILES = ("models.toml", "models.json")
DEFAULT_REST = "127.0.0.1:8080"
SERVER_NAME = "snooze-ml"
AUTO = "auto"
# Under these names the secrets of the file are kept where others come from the environment.
_KEY, _TOKEN_SECRET = "NEREID_MODELS_FILE_KEY_{}", "NEREID_MODELS_FILE_JWT_SECRET"
# What has no meaning here: a model is one process, whose calls share their runs, and nothing is routed.
_WITHOUT_EFFECT = ("autoscale_queue_threshold", "max_replicas", "routing_strategy")
_LARGEST_FILE_BYTES = 16 * 1024 * 1024


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="allow")


class ModelKeys(_Section):
    """What ``[defaults]``, an entry of ``[[models]]`` and an upload may say of a model."""

    idle_timeout_secs: Annotated[int, Field(ge=0, le=31 * 86_400)] | None = None
    """0 is never."""
    max_batch_size: Annotated[int, Field(gt=0, lt=2**31)] | None = None
    max_batch_delay_ms: Annotated[int, Field(ge=0, le=60_000)] | None = None
    device: NonBlank | None = None
    min_residency_secs: Annotated[int, Field(ge=0, le=86_400)] | None = None
    autoscale_queue_threshold: Annotated[int, Field(ge=0)] | None = None
    max_replicas: Annotated[int, Field(ge=0)] | None = None
    routing_strategy: Literal["least_queue", "round_robin", "random"] | None = None
    pinned: bool | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Those of ``models[].options`` that are said here."""
        given: dict[str, Any] = {
            "default_batch_size": self.max_batch_size,
            "batch_delay_ms": self.max_batch_delay_ms,
            "min_residency_s": None if self.min_residency_secs is None else float(self.min_residency_secs),
            "pinned": self.pinned,
        }
        found = {key: value for key, value in given.items() if value is not None}
        if self.idle_timeout_secs is not None:
            found["idle_timeout_s"] = float(self.idle_timeout_secs) or None
        return found

    @property
    def without_effect(self) -> list[str]:
        """The keys that are said here and change nothing."""
        return [key for key in _WITHOUT_EFFECT if getattr(self, key) is not None]

    @property
    def own_device(self) -> str | None:
        """``device`` as the settings have it; which devices there are is not looked at."""
        return "cpu" if self.device == AUTO else self.device


class _Defaults(ModelKeys):
    idle_timeout_secs: Annotated[int, Field(ge=0, le=31 * 86_400)] | None = 300
    max_batch_size: Annotated[int, Field(gt=0, lt=2**31)] | None = 16
    max_loaded_models: Annotated[int, Field(gt=0)] | None = None


class _Model(ModelKeys):
    id: NonBlank
    path: NonBlank
    description: str | None = None


def _role(text: str) -> str:
    if text not in CLAIMS:
        raise ValueError(f"must be one of {', '.join(CLAIMS)}")
    return CLAIMS[text].name.lower()


class _Key(_Section):
    role: Annotated[str, AfterValidator(_role)]
    key: str | None = None
    key_env: VariableName | None = None
    name: NonBlank | None = None


class _Jwt(_Section):
    secret: str | None = None
    secret_env: VariableName | None = None
    algorithm: Literal["HS256", "HS384", "HS512"] = "HS256"
    issuer: NonBlank | None = None
    audience: NonBlank | None = None
    leeway_secs: Annotated[int, Field(ge=0, le=3600)] = 60


class _Auth(_Section):
    enabled: bool = True
    protect_metrics: bool = False
    api_keys: Annotated[tuple[_Key, ...], Field(strict=False)] = ()
    jwt: _Jwt | None = None


class _File(_Section):
    defaults: _Defaults = _Defaults()
    models: Annotated[tuple[_Model, ...], Field(strict=False)] = ()
    streams: Annotated[tuple[Any, ...], Field(strict=False)] = ()
    auth: _Auth | None = None


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What is said beside the file. ``keys`` are roles and keys; the addresses are ``IP:PORT``."""

    bind: str | None = None
    rest: str | None = None
    http: str | None = None
    keys: Sequence[tuple[str, str]] = ()
    jwt_secret: str | None = None
    allow_insecure: bool = False


def find(folder: Path) -> Path | None:
    """The file of that kind in ``folder``, None when there is none. Raises SettingsError for two."""
    found = [folder / name for name in FILES if (folder / name).is_file()]
    if len(found) > 1:
        raise SettingsError(f"{folder} holds {' and '.join(FILES)}; keep one, or name one with --config")
    return found[0] if found else None


def load_any(path: Path, said: CommandLine) -> Settings:
    """The settings in ``path``, SnoozeML's file or nereid.yaml, as its name says. Raises SettingsError."""
    if path.suffix == ".toml" or path.name in FILES:
        return load(path, path.parent, said)
    settings = own.load(path)
    if settings.others is not None:  # else what is uploaded is not served
        settings = settings.model_copy(update={"models": _and_uploaded(settings.models, settings.server.folder)})
    return own.with_addresses(settings, said.bind, said.http, said.rest)


def _and_uploaded(listed: tuple[ModelSettings, ...], folder: Path) -> tuple[ModelSettings, ...]:
    """``listed`` and, with the options they came with, the uploaded models that are not in it."""
    names = {model.name for model in listed}
    found = {model.name: model for model in uploaded.entries(folder) if model.name not in names}
    return (*listed, *found.values())


def load(path: Path | None, folder: Path, said: CommandLine) -> Settings:
    """The settings for the models in ``folder`` from the file ``path``, or from what is ``said`` alone.

    Raises SettingsError with a line per problem; no text has a secret in it.
    """
    source = Path("command line") if path is None else path
    read = _File() if path is None else _read(path)
    if read.streams:
        raise SettingsError(
            f"{source}: [[streams]] is not supported: nereid reads no message broker; remove it and call the models "
            "over gRPC or REST"
        )
    folder = own.directory(folder.absolute(), "the folder of models")
    defaults = read.defaults
    others = {
        "device": defaults.own_device or "cpu",
        "options": {"load": "first_request", **defaults.options},
    }
    listed = [_entry(model, others, folder) for model in read.models]
    raw = {"server": _server(read, folder, said), "models": listed, "others": others}
    try:
        settings = Settings.model_validate(raw)
    except ValidationError as error:
        raise SettingsError("\n".join(describe(source, error))) from None
    return settings.model_copy(update={"models": _and_uploaded(settings.models, folder)})


def _entry(model: _Model, others: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    options = {**others["options"], **model.options, "path": model.path, "description": model.description}
    # A worker folder runs its own code, and there is no other key to say that it may.
    options["allow_code"] = (folder / model.path).is_dir()
    return {
        "name": model.id,
        "device": model.own_device or others["device"],
        "queue_capacity": own.DEFAULT_CAPACITY,
        "options": options,
    }


def _server(read: _File, folder: Path, said: CommandLine) -> dict[str, Any]:
    return {
        "bind_addr": said.bind or own.DEFAULT_BIND,
        "http_addr": said.http,
        "rest_addr": said.rest or DEFAULT_REST,
        "ml_backends_path": str(folder),
        "allow_model_control": True,
        "allow_insecure": said.allow_insecure,
        "name": SERVER_NAME,
        "residency": {"max_loaded_models": read.defaults.max_loaded_models},
        "auth": _auth(read.auth or _Auth(enabled=False), said),
    }


def _auth(auth: _Auth, said: CommandLine) -> dict[str, Any] | None:
    """The section ``server.auth``; its secrets are kept beside it."""
    keys, tokens = (list(auth.api_keys), auth.jwt) if auth.enabled else ([], None)
    keys += [_Key(role=role, key=key) for role, key in said.keys]
    if said.jwt_secret is not None:
        tokens = (tokens or _Jwt()).model_copy(update={"secret": said.jwt_secret, "secret_env": None})
    if not auth.enabled and not keys and tokens is None:
        return None
    shown: dict[str, Any] = {
        "keys": [_key(key, number) for number, key in enumerate(keys, start=1)],
        "metrics": "admin" if auth.protect_metrics else "public",
    }
    if tokens is not None:
        variable = _variable("[auth.jwt]", "secret", tokens.secret, tokens.secret_env, _TOKEN_SECRET)
        its = {"algorithm": tokens.algorithm, "issuer": tokens.issuer, "audience": tokens.audience}
        shown["jwt"] = {"secret_env": variable, "leeway_s": tokens.leeway_secs, **its}
    return shown


def _key(key: _Key, number: int) -> dict[str, Any]:
    name = f"[[auth.api_keys]] {number}" if key.name is None else key.name
    variable = _variable(f"[[auth.api_keys]] {number}", "key", key.key, key.key_env, _KEY.format(number))
    return {"name": name, "role": key.role, "key_env": variable}


def _variable(where: str, what: str, text: str | None, variable: str | None, private: str) -> str:
    """The variable that stands for a secret given as ``text`` or in ``variable``."""
    if (text is None) == (variable is None):
        raise SettingsError(f"{where} needs exactly one of {what} and {what}_env")
    if variable is not None:
        return variable
    credentials.remember(private, str(text))
    return private


def _read(path: Path) -> _File:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE_BYTES + 1)
        text = data.decode()
        raw = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path}: is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        where = f" at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        kind = "JSON" if path.suffix == ".json" else "TOML"
        reason = getattr(error, "msg", None) or "nested too deeply or a wrong value"
        told = reason if kind == "JSON" else str(error)
        raise SettingsError(f"{path}: is not {kind}{where} ({told})") from None
    if not isinstance(raw, dict):
        raise SettingsError(f"{path}: must hold a mapping, got {short_repr(type(raw).__name__)}")
    try:
        read = _File.model_validate(raw)
    except ValidationError as error:
        raise SettingsError("\n".join(describe(path, error))) from None
    for key in _unknown(read, ""):
        _LOG.warning("%s: %s is not a known key; it is passed over", path, key)
    for whose, section in (("the defaults", read.defaults), *((f"model {each.id!r}", each) for each in read.models)):
        for key in section.without_effect:
            _LOG.warning("%s: %s of %s has no effect here: each model has one process, which batches", path, key, whose)
    return read


def _unknown(section: BaseModel, where: str) -> Iterator[str]:
    yield from (f"{where}{key}" for key in section.model_extra or ())
    for name in type(section).model_fields:
        value = getattr(section, name)
        for number, each in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(each, BaseModel):
                index = f"[{number}]" if isinstance(value, tuple) else ""
                yield from _unknown(each, f"{where}{name}{index}.")
