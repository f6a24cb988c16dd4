"""The files that Envoy reads: checked by itself, put in place by a rename, and followed until it has taken them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from native_service.envoy import access as envoy_access
from native_service.envoy import config as envoy_config
from native_service.envoy.admin import EnvoyAdmin
from native_service.envoy.settings import (
    CLUSTERS_FILE,
    DYNAMIC_FOLDER,
    HTTP_INFER_ROUTES_FILE,
    HTTP_ROUTES_FILE,
    REST_ROUTES_FILE,
    ROUTES_FILE,
    TOKENS_FILE,
    Admitted,
    EnvoySettings,
    Json,
)
from native_service.settings.access import TlsSettings
from nereid_backend.errors import EnvoyUnavailable

_VALIDATE_TIMEOUT_S = 30.0
_UPDATE_TIMEOUT_S, _UPDATE_POLL_S = 10.0, 0.01
_READS = {
    CLUSTERS_FILE: r"^cluster_manager\.cds\.update_(success|rejected)$",
    ROUTES_FILE: r"^http\.public\.rds\.public\.update_(success|rejected)$",
    HTTP_ROUTES_FILE: r"^http\.http\.rds\.http\.update_(success|rejected)$",
    HTTP_INFER_ROUTES_FILE: r"^http\.http_infer\.rds\.http_infer\.update_(success|rejected)$",
    REST_ROUTES_FILE: r"^http\.rest\.rds\.rest\.update_(success|rejected)$",
    TOKENS_FILE: r"^extension_config_discovery\.http_filter\..*\.config_(reload|fail|conflict)$",
}


class EnvoyFiles:
    """Those in the run directory ``folder``, for one Envoy."""

    def __init__(self, program: Path, folder: Path, environment: Mapping[str, str]) -> None:
        """``program`` is Envoy, which checks them with ``environment``."""
        self._program, self._folder, self._environment = program, folder, environment
        # What Envoy has taken of each file, as far as that is certain.
        self._taken: dict[str, Json] = {}
        self._token_secrets = 0

    async def validate(self, settings: EnvoySettings, models: Sequence[Admitted]) -> None:
        """Let Envoy itself check what would be served. Raises EnvoyUnavailable with its complaint."""
        path = self._folder / "envoy-check.json"
        put(path, envoy_config.validation(settings, models))
        try:
            process = await asyncio.create_subprocess_exec(
                *(str(self._program), "--mode", "validate", "--config-path", path.name, "--log-level", "error"),
                cwd=self._folder,
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
        except OSError as error:
            raise EnvoyUnavailable(f"Envoy cannot be asked to check its files ({error.strerror})") from None
        try:
            async with asyncio.timeout(_VALIDATE_TIMEOUT_S):
                output, _ = await process.communicate()
        except TimeoutError:
            raise EnvoyUnavailable(
                f"{self._program.name} did not check its files within {_VALIDATE_TIMEOUT_S:g} s"
            ) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            lines = output.decode(errors="replace").strip().splitlines() or ["it gave no reason"]
            raise EnvoyUnavailable(f"{self._program.name} refuses the generated configuration: {lines[-1]}")

    async def replace(self, admin: EnvoyAdmin, file: str, content: Json) -> None:
        """Put ``content`` in force. Raises EnvoyUnavailable when Envoy does not take it."""
        if self._taken.get(file) == content:
            return
        before = await admin.counters(_READS[file])
        self.write(file, content)
        deadline = time.monotonic() + _UPDATE_TIMEOUT_S
        while time.monotonic() < deadline:
            now = await admin.counters(_READS[file])
            if changed := [name for name, count in now.items() if count > before.get(name, 0)]:
                if any(name.endswith("rejected") for name in changed):
                    raise EnvoyUnavailable(f"Envoy refuses the new {file}; it goes on with the old one")
                self._taken[file] = content
                return
            await asyncio.sleep(_UPDATE_POLL_S)
        raise EnvoyUnavailable(f"Envoy did not read the new {file} within {_UPDATE_TIMEOUT_S:g} s")

    def write(self, file: str, content: Json) -> None:
        """Put ``content`` there, whether or not Envoy takes it. Raises EnvoyUnavailable."""
        self._taken.pop(file, None)
        beside, folder = self._folder / file, self._folder / DYNAMIC_FOLDER
        folder.mkdir(exist_ok=True)
        put(beside, content)
        beside.replace(folder / file)

    def new_token_secret_file(self) -> str:
        """The name of a file for another secret."""
        self._token_secrets += 1
        return f"{self._token_secrets}-{envoy_access.TOKEN_SECRET_FILE}"

    def write_token_secret(self, settings: EnvoySettings) -> None:
        """With it a token can be made."""
        credentials = settings.access.credentials
        if credentials is None or credentials.tokens is None:
            return
        secret = self._folder / settings.token_secret_file
        secret.touch(mode=0o600)
        secret.write_text(envoy_access.token_secret_file(credentials.tokens))

    def write_certificates(self, tls: TlsSettings | None) -> None:
        """Have Envoy read the files of ``tls``, also when only what they hold is another."""
        if tls is None:
            return
        folder = self._folder / envoy_access.TLS_FOLDER
        folder.mkdir(exist_ok=True)
        for file, content in envoy_access.secret_files(tls).items():
            beside = self._folder / file
            put(beside, content)
            # The rename is what Envoy watches for; it then reads the user's files, too.
            beside.replace(folder / file)


def put(path: Path, content: Json) -> None:
    """Write ``content``. Raises EnvoyUnavailable, as without room on the disk."""
    try:
        path.write_text(json.dumps(content))
    except OSError as error:
        raise EnvoyUnavailable(f"{path.name} for Envoy cannot be written ({error.strerror}); check the disk") from None
