"""nereid.yaml: what is served, where, and within which limits.

The keys and rules of upstream's file are kept as they are; ours are ``server.limits``, ``server.tls``, ``server.auth``,
``server.http_infer_addr``, ``server.rest_addr``, ``server.name``, ``server.log_format``, ``server.allow_*``,
``models[].options`` and ``others``. Unknown keys are errors and relative paths are relative to the file.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import AfterValidator, AliasChoices, Field, ValidationError, model_validator

from native_service.settings.access import AuthSettings, TlsSettings
from native_service.settings.errors import describe
from native_service.settings.section import NonBlank, Section, not_blank
from nereid_backend.errors import SettingsError, short_repr

DEFAULT_FILE = "nereid.yaml"
DEFAULT_BIND = "127.0.0.1:50051"
DEFAULT_CAPACITY = 16
DEFAULT_SIGNATURE = "serving_default"
NAME_RULE = "may hold letters, digits, '_', '.' and '-' only"

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_DEVICE = re.compile(r"cuda(?::([0-9]{1,4}))?")


class Address(NamedTuple):
    """An IP address and a TCP port; port 0 asks for any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback


def parse_address(text: str) -> Address:
    """``127.0.0.1:50051`` or ``[::1]:50051``. Raises ValueError for anything else, host names included."""
    host, colon, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        ip = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        ip = None
    # Brackets are for IPv6 and only for it, so that the port's colon is never in doubt.
    if not colon or ip is None or bracketed != (ip.version == 6) or not re.fullmatch(r"[0-9]{1,5}", port):
        raise ValueError("must be IP:port such as 127.0.0.1:50051 or [::1]:50051, not a host name")
    if int(port) > 65535:
        raise ValueError("must have a port from 0 to 65535")
    return Address(str(ip), int(port))


def _address_text(text: str) -> str:
    return str(parse_address(not_blank(text)))


def _model_name(text: str) -> str:
    # The name becomes a folder and a gRPC service name; Triton 2.70 and newer refuse other characters as well.
    if not _NAME.fullmatch(not_blank(text)) or set(text) == {"."}:
        raise ValueError(NAME_RULE)
    return text


def _device(text: str) -> str:
    if text == "cpu":
        return text
    match = _DEVICE.fullmatch(text)
    if match is None:
        raise ValueError("must be cpu, cuda or cuda:N")
    return f"cuda:{int(match.group(1) or 0)}"


AddressText = Annotated[str, AfterValidator(_address_text)]


class Limits(Section):
    """Bounds on what one caller may cost; exceeding one is a clear error for that caller."""

    max_message_bytes: Annotated[int, Field(gt=0, lt=2**31)] = 4 * 1024 * 1024
    """Largest single message of a Checkpoint call, and largest JSON of a request over HTTP."""
    max_request_bytes: Annotated[int, Field(gt=0, le=1024 * 1024 * 1024)] = 128 * 1024 * 1024
    """Largest ModelInfer request, over gRPC or HTTP, and Checkpoint input, all tensors together; a connection may
    buffer that much."""
    max_tensor_bytes: Annotated[int, Field(gt=0)] = 64 * 1024 * 1024
    """Largest input tensor of a Checkpoint call, all chunks together."""
    max_buffered_bytes: Annotated[int, Field(gt=0)] = 1024 * 1024 * 1024
    """Most tensor bytes that our service holds for all calls of Checkpoint and over HTTP: what waits for the rest of
    its tensor, and what a slow client has not read. Envoy may hold as much beside, or four of the largest requests if
    that is more."""
    max_chunks: Annotated[int, Field(gt=0)] = 65_536
    """Most chunks of one Checkpoint call."""
    max_upload_bytes: Annotated[int, Field(gt=0)] = 1024 * 1024 * 1024
    """Largest model file that is uploaded."""
    load_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 300.0
    """Longest conversion, and longest load in Triton, of one model."""


class ResidencySettings(Section):
    """What may be in Triton at a time. A model that has to go for another is loaded again by its next call."""

    max_loaded_models: Annotated[int, Field(gt=0)] | None = None
    """Of those that callers may call; None is any number."""
    memory_budget_bytes: Annotated[int, Field(gt=0)] | None = None
    """What the processes of all models may hold together, pages that they share counted once; None is no bound."""
    min_residency_s: Annotated[float, Field(ge=0, le=86_400)] = 10.0
    """How long a model stays, once loaded, before it may have to go for another."""


class ModelOptions(Section):
    """What upstream's file has no key for."""

    max_batch_size: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """For a bare file with a symbolic first axis."""
    default_batch_size: Annotated[int, Field(gt=0, lt=2**31)] = 32
    """The same, for those that can be batched and without an error for others."""
    batch_delay_ms: Annotated[int, Field(ge=0, le=60_000)] = 0
    """How long a request waits for others to share its run."""
    path: NonBlank | None = None
    """The model's file or folder where it is not called as the model, relative to ml_backends_path."""
    description: str | None = None
    """For people."""
    batch_sizes: Literal["all", "largest"] = "all"
    """Which compiled batch sizes of a bundle to load; the largest alone means fewer programs and more padding."""
    allow_code: bool = False
    """Open a file that runs code of its own while it is read: a .pt2 archive, a pickle."""
    time_limit_s: Annotated[float, Field(ge=0.1, le=31 * 86_400)] | None = None
    """Longest call, waiting included; then it ends, and a run that goes on ends with its process. None is for ever."""
    required: bool = True
    """Whether the server counts as ready only while this model can answer."""
    load: Literal["start", "first_request"] = "start"
    """When the model is loaded first."""
    idle_timeout_s: Annotated[float, Field(ge=0.1, le=31 * 86_400)] | None = None
    """So long after its last call the model is unloaded, and loaded again by the next one; None is never."""
    min_residency_s: Annotated[float, Field(ge=0, le=86_400)] | None = None
    """How long it stays, once loaded, before it may have to go for another; None is as server.residency says."""
    pinned: bool = False
    """Whether it stays in Triton whatever else needs room, also without calls."""


class ModelSettings(Section):
    """One served model; ``name`` is also its folder's name below ``ml_backends_path``."""

    name: Annotated[str, AfterValidator(_model_name)]
    device: Annotated[str, AfterValidator(_device)]
    queue_capacity: Annotated[int, Field(gt=0)]
    """Calls running and waiting together; one more is refused at once."""
    backend: NonBlank | None = None
    signature: NonBlank = DEFAULT_SIGNATURE
    """Upstream's key for TensorFlow models; another value is refused when the model is converted."""
    options: ModelOptions = ModelOptions()


class OtherModels(Section):
    """How models are served that are in the folder and not in the list."""

    device: Annotated[str, AfterValidator(_device)] = "cpu"
    queue_capacity: Annotated[int, Field(gt=0)] = DEFAULT_CAPACITY
    options: ModelOptions = ModelOptions()

    def named(self, name: str) -> ModelSettings:
        """The settings of the model ``name``. Raises ValidationError for what cannot be a name."""
        return ModelSettings(name=name, device=self.device, queue_capacity=self.queue_capacity, options=self.options)


class ServerSettings(Section):
    """Addresses, the folder of models, limits."""

    bind_addr: AddressText
    ml_backends_path: NonBlank
    http_addr: Annotated[AddressText | None, Field(validation_alias=AliasChoices("http_addr", "metrics_addr"))] = None
    """Health and metrics over HTTP; None is off."""
    http_infer_addr: AddressText | None = None
    """KServe v2 over HTTP; None is off."""
    rest_addr: AddressText | None = None
    """SnoozeML's REST, health and metrics included; None is off."""
    name: Annotated[NonBlank, Field(max_length=128)] = "nereid"
    """What ServerMetadata calls this server; some clients look for ``snooze-ml``."""
    allow_insecure: bool = False
    """Whether an address that other machines reach may do without TLS or without knowing its callers."""
    allow_model_control: bool = False
    """Whether callers may load and unload the models that are listed here."""
    allow_shared_memory: bool = False
    """Whether callers may register shared memory of this host, which Triton then reads and writes."""
    log_format: Literal["text", "json"] = "text"
    """What the lines of the log are."""
    tls: TlsSettings | None = None
    auth: AuthSettings | None = None
    limits: Limits = Limits()
    residency: ResidencySettings = ResidencySettings()

    @model_validator(mode="before")
    @classmethod
    def _one_http_key(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and "http_addr" in raw and "metrics_addr" in raw:
            raise ValueError("http_addr and metrics_addr are two names of one key; keep http_addr")
        return raw

    @model_validator(mode="after")
    def _addresses(self) -> ServerSettings:
        taken: dict[Address, str] = {}
        for key, address in self.addresses.items():
            if address in taken and address.port:
                raise ValueError(f"{key} must differ from {taken[address]}, both are {address}")
            taken[address] = key
            missing = self._unprotected(key)
            if not address.is_loopback and missing and not self.allow_insecure:
                raise ValueError(
                    f"{key} {address} is reachable from other machines without {' and '.join(missing)}; "
                    "add that, use 127.0.0.1, or accept it with server.allow_insecure: true in the settings file"
                )
            if self.allow_shared_memory and not address.is_loopback and key != "http_addr":
                raise ValueError(f"allow_shared_memory is for callers on this host only; {key} must be 127.0.0.1")
        return self

    def _unprotected(self, key: str) -> list[str]:
        """What ``key`` would need before strangers may reach it: nobody listens in, and callers are known."""
        known = self.auth is not None or (
            key != "http_addr" and self.tls is not None and self.tls.client_ca is not None
        )
        return [*([] if self.tls else ["server.tls"]), *([] if known else ["server.auth"])]

    @property
    def bind(self) -> Address:
        return parse_address(self.bind_addr)

    @property
    def http(self) -> Address | None:
        return None if self.http_addr is None else parse_address(self.http_addr)

    @property
    def http_infer(self) -> Address | None:
        return None if self.http_infer_addr is None else parse_address(self.http_infer_addr)

    @property
    def rest(self) -> Address | None:
        return None if self.rest_addr is None else parse_address(self.rest_addr)

    @property
    def addresses(self) -> dict[str, Address]:
        """Every address that is listened on, by its key."""
        known = {
            "bind_addr": self.bind,
            "http_addr": self.http,
            "http_infer_addr": self.http_infer,
            "rest_addr": self.rest,
        }
        return {key: address for key, address in known.items() if address is not None}

    @property
    def folder(self) -> Path:
        """``ml_backends_path``, absolute."""
        return Path(self.ml_backends_path)


class Settings(Section):
    """Everything ``nereid serve`` is told."""

    server: ServerSettings
    models: Annotated[tuple[ModelSettings, ...], Field(strict=False)]
    others: OtherModels | None = None
    """None: what is not in ``models`` is not served."""

    def serves(self, name: str) -> bool:
        """Whether a model of that name is served when it is there."""
        return self.others is not None or any(model.name == name for model in self.models)

    @model_validator(mode="after")
    def _models(self) -> Settings:
        if not self.models and self.others is None:
            raise ValueError("models must list at least one model")
        seen: set[str] = set()
        for model in self.models:
            if model.name in seen:
                raise ValueError(f"models must have unique names, {model.name!r} appears twice")
            seen.add(model.name)
        return self


def load(path: Path) -> Settings:
    """Read and check ``path``. Raises SettingsError with one line per problem."""
    raw = _read(path)
    try:
        settings = Settings.model_validate(raw)
    except ValidationError as error:
        raise SettingsError("\n".join(describe(path, error))) from None
    folder = Path(path.absolute().parent, settings.server.ml_backends_path)
    absolute = str(directory(folder, f"{path}: server.ml_backends_path"))
    here, server = path.absolute().parent, settings.server
    server = server.model_copy(
        update={
            "ml_backends_path": absolute,
            "tls": server.tls and server.tls.below(here),
            "auth": server.auth and server.auth.below(here),
        }
    )
    return settings.model_copy(update={"server": server})


def for_folder(
    path: Path,
    *,
    bind: str = DEFAULT_BIND,
    http: str | None = None,
    rest: str | None = None,
    allow_code: bool = False,
) -> Settings:
    """Settings without a file: every bundle in ``path``, on the CPU, ``DEFAULT_CAPACITY`` calls each."""
    folder = directory(path.absolute(), "PATH")
    server = _server({"bind_addr": bind, "http_addr": http, "rest_addr": rest, "ml_backends_path": str(folder)})
    return Settings(server=server, models=(), others=OtherModels(options=ModelOptions(allow_code=allow_code)))


def with_addresses(settings: Settings, bind: str | None, http: str | None, rest: str | None = None) -> Settings:
    """``settings`` with the addresses of the command line in the place of the file's. Raises SettingsError."""
    if bind is None and http is None and rest is None:
        return settings
    old = settings.server
    changed = {
        "bind_addr": bind or old.bind_addr,
        "http_addr": http or old.http_addr,
        "rest_addr": rest or old.rest_addr,
    }
    return settings.model_copy(update={"server": _server({**old.model_dump(), **changed})})


def _server(raw: dict[str, Any]) -> ServerSettings:
    try:
        return ServerSettings.model_validate(raw)
    except ValidationError as error:
        raise SettingsError("\n".join(describe(Path("command line"), error))) from None


def _read(path: Path) -> dict[Any, Any]:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        what_to_do = "name a file with --config, or a folder of bundles"
        raise SettingsError(f"{path}: cannot be read ({error.strerror}); {what_to_do}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path}: is not UTF-8 text") from None
    except RecursionError:
        raise SettingsError(f"{path}: is nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "syntax error"
        raise SettingsError(f"{path}: is not YAML{where} ({problem})") from None
    except (ValueError, LookupError, AttributeError):  # PyYAML's own, for 2024-99-99 or !!int before a word
        raise SettingsError(f"{path}: is not YAML (a date, a number or a tag that is none); quote the value") from None
    if raw is None:
        raise SettingsError(f"{path}: is empty; it needs the keys server and models")
    if not isinstance(raw, dict):
        raise SettingsError(f"{path}: must hold a mapping with server and models, got {type(raw).__name__}")
    return raw


def directory(folder: Path, what: str) -> Path:
    """``folder`` without links in its path. Raises SettingsError, about ``what``, unless it is one."""
    try:
        return _checked_directory(folder)
    except (OSError, ValueError, RuntimeError) as error:  # also a null byte, or links in a circle
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"{what} must be a directory, got {short_repr(str(folder))} ({reason})") from None


def _checked_directory(folder: Path) -> Path:
    resolved = folder.resolve(strict=True)
    if not resolved.is_dir():
        raise NotADirectoryError(20, "not a directory")
    return resolved
