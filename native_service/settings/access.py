"""The sections ``server.tls`` and ``server.auth``: where certificates and keys are, never a secret itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from native_service.settings.section import NonBlank, Section


class TlsSettings(Section):
    """PEM files, relative to the settings file."""

    cert: NonBlank
    """The server's certificate and, behind it, those that lead to its authority."""
    key: NonBlank
    client_ca: NonBlank | None = None
    """Certificates of authorities; clients of bind_addr and http_infer_addr must show a certificate of one of
    them."""

    def below(self, folder: Path) -> Self:
        """The same with absolute paths."""
        files = {"cert": self.cert, "key": self.key, "client_ca": self.client_ca}
        return self.model_copy(update={name: _below(folder, file) for name, file in files.items()})


def _sha256(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", text.lower()):
        raise ValueError("must be a SHA-256 digest, 64 hexadecimal digits")
    return text.lower()


def _variable(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text):
        raise ValueError("must be the name of a variable of the environment: letters, digits and '_'")
    return text


VariableName = Annotated[str, AfterValidator(_variable)]


class KeySettings(Section):
    """A static key, from exactly one of a file, a variable of the environment, or as its digest."""

    name: NonBlank
    """Who has it; for people."""
    role: Literal["read_only", "inference", "admin"]
    key_file: NonBlank | None = None
    key_env: VariableName | None = None
    sha256: Annotated[str, AfterValidator(_sha256)] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(source is not None for source in (self.key_file, self.key_env, self.sha256)) != 1:
            raise ValueError("server.auth.keys: each key needs exactly one of key_file, key_env and sha256")
        return self


class JwtSettings(Section):
    """Tokens signed with a shared secret; ``exp`` is required."""

    secret_file: NonBlank | None = None
    secret_env: VariableName | None = None
    algorithm: Literal["HS256", "HS384", "HS512"] = "HS256"
    issuer: NonBlank | None = None
    audience: NonBlank | None = None
    leeway_s: Annotated[int, Field(ge=0, le=3600)] = 60
    """How far the clocks of who makes tokens and of this server may be apart."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.secret_file is None) == (self.secret_env is None):
            raise ValueError("server.auth.jwt needs exactly one of secret_file and secret_env")
        return self


class AuthSettings(Section):
    """Who may call. Without this section everybody may."""

    keys: Annotated[tuple[KeySettings, ...], Field(strict=False)] = ()
    jwt: JwtSettings | None = None
    metrics: Literal["public", "read_only", "inference", "admin"] = "read_only"
    """The role that ``/metrics`` asks for."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.keys and self.jwt is None:
            raise ValueError("server.auth needs keys or jwt; without either nobody could call")
        names = [key.name for key in self.keys]
        if len(set(names)) != len(names):
            raise ValueError("server.auth.keys must have unique names")
        return self

    def below(self, folder: Path) -> Self:
        """The same with absolute paths."""
        keys = tuple(key.model_copy(update={"key_file": _below(folder, key.key_file)}) for key in self.keys)
        jwt = self.jwt and self.jwt.model_copy(update={"secret_file": _below(folder, self.jwt.secret_file)})
        return self.model_copy(update={"keys": keys, "jwt": jwt})


def _below(folder: Path, file: str | None) -> str | None:
    return None if file is None else str(Path(folder, file))
