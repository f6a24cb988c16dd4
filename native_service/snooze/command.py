"""The command ``snooze``: ``snooze serve`` as SnoozeML's SDK starts it, which starts our server.

The SDK never reads what we print, and shows what is on stderr when we end early. A key on the command line is seen by
every user of the machine who lists processes, but never in a log or a message of ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from native_service import cli

if TYPE_CHECKING:
    from native_service.settings import Settings

_LOCALHOST, _LOOPBACK = "localhost", "127.0.0.1"
DEMO = "demo"
# The SDK kills what has not ended after 5 s; calls in progress have so long, and then Triton.
_GRACE_S = 1.5


@click.group()
@click.version_option(package_name="nereid-triton", prog_name="snooze")
def snooze() -> None:
    """Serve models to SnoozeML's clients."""


@snooze.command(short_help="Serve a folder of models.")
@click.option("--host", default=_LOOPBACK, help="IP address of both services (default: 127.0.0.1).")
@click.option("--port", default=8080, type=click.IntRange(0, 65535), help="Port of REST (default: 8080).")
@click.option("--models-dir", default="models", type=click.Path(path_type=Path), help="Folder (default: ./models).")
@click.option("--grpc-port", default=50051, type=click.IntRange(0, 65535), help="Port of gRPC (default: 50051).")
@click.option("--no-grpc", is_flag=True, help="gRPC on a free port of this machine only.")
@click.option("--demo", is_flag=True, help="Add a model `demo`, which doubles its input.")
@click.option(
    "--config", type=click.Path(path_type=Path), help="Settings (default: models.toml or .json in the folder)."
)
@click.option("--api-key", "keys", multiple=True, metavar="ROLE:KEY", help="A key: others see it among the processes.")
@click.option("--jwt-secret", help="Secret of tokens: others see it among the processes.")
@click.option("--allow-insecure", is_flag=True, help="Let other machines in without TLS or without keys.")
@click.option("--state", type=click.Path(path_type=Path), help="Write addresses and pid here, as JSON, once ready.")
@click.option("--verbose", is_flag=True, help="Log what Triton logs, too.")
def serve(
    host: str,
    port: int,
    models_dir: Path,
    grpc_port: int,
    no_grpc: bool,
    demo: bool,
    config: Path | None,
    keys: tuple[str, ...],
    jwt_secret: str | None,
    allow_insecure: bool,
    state: Path | None,
    verbose: bool,
) -> None:
    """Serve the models in a folder over gRPC and REST until SIGTERM. They are loaded by their first call."""
    host = _LOOPBACK if host == _LOCALHOST else host
    parsed = [_role_and_key(text) for text in keys]
    bind = _address(_LOOPBACK, 0) if no_grpc else _address(host, grpc_port)

    def read() -> tuple[Settings, Path | None]:
        from native_service.snooze import demo_model, models_file

        if demo:
            demo_model.write(models_dir, DEMO)
        said = models_file.CommandLine(
            bind, _address(host, port), keys=parsed, jwt_secret=jwt_secret, allow_insecure=allow_insecure
        )
        file = config or models_file.find(models_dir)
        return models_file.load(file, models_dir, said), file

    cli.run_server(read, verbose=verbose, state_file=state, grace_s=_GRACE_S)


def _role_and_key(text: str) -> tuple[str, str]:
    from native_service.access.roles import CLAIMS

    role, colon, key = text.partition(":")
    if not colon or not key.strip() or role not in CLAIMS:
        # Whatever it is, it is not repeated: it may be a key without a role.
        raise click.UsageError(f"--api-key must be ROLE:KEY with one of the roles {', '.join(CLAIMS)}")
    return role, key


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def main() -> None:
    """Entry point of the command."""
    cli.run_command(snooze, "snooze")


if __name__ == "__main__":
    main()
