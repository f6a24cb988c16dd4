"""The command ``nereid``. A subcommand's code is imported when that subcommand is used.

Exit codes: 0 done or stopped by a signal, 1 an error that is told in one line each, 2 wrong usage.
"""

from __future__ import annotations

import importlib
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from nereid_backend.errors import NereidError

if TYPE_CHECKING:
    from native_service.settings import Settings

_STDERR = 2
# name -> (module, the click command in it, the one line of `nereid --help`)
_ELSEWHERE = {
    "bench": ("native_service.bench.command", "bench", "Put load on a model of a running server."),
    "check": ("converters.cli", "check", "Say what conversion would refuse, without reading weights."),
    "convert": ("converters.cli", "command", "Turn bundles into a Triton model repository."),
    "doctor": ("native_service.operation.doctor", "doctor", "Check this machine and say what to do about it."),
    "export": ("converters.exporters.command", "export", "Write a model of a Python file as a bundle."),
    "infer": ("native_service.client.infer_command", "infer", "Run a model of a running server on arrays from files."),
    "migrate": ("converters.cli", "migrate", "Bring weights of bundles to program order."),
    "models": ("native_service.operation.commands", "models", "List the models of a running server."),
    "reload": ("native_service.operation.commands", "reload", "Let a running server read its settings again."),
    "status": ("native_service.operation.commands", "status", "Show how a running server is."),
}


class _LateGroup(click.Group):
    """Knows the names of commands that live in other packages, and imports one when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_ELSEWHERE})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module, attribute, _ = _ELSEWHERE[cmd_name]
        try:
            command: click.Command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise _missing(cmd_name, error) from None
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        # click's own would import every command for its help line.
        own = {name: command.get_short_help_str() for name, command in self.commands.items()}
        rows = {**own, **{name: line for name, (_, _, line) in _ELSEWHERE.items()}}
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows.items()))


def _missing(what: str, error: ModuleNotFoundError) -> NereidError:
    return NereidError(f"{what} needs {error.name}; pip install 'nereid-triton[serve]'")


@click.group(cls=_LateGroup)
@click.version_option(package_name="nereid-triton", prog_name="nereid")
def nereid() -> None:
    """Package machine-learning models for NVIDIA Triton and serve them."""


@nereid.command(short_help="Serve a folder of bundles, or what a settings file lists.")
@click.argument("path", required=False, type=click.Path(path_type=Path))
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (default: ./nereid.yaml).")
@click.option("--tritonserver", type=click.Path(path_type=Path), help="Server to run (default: found or fetched).")
@click.option("--envoy", type=click.Path(path_type=Path), help="Envoy to run (default: the installed one).")
@click.option("--bind", metavar="IP:PORT", help="Address of the service (default: 127.0.0.1:50051).")
@click.option("--http", metavar="IP:PORT", help="Address of health and metrics over HTTP (default: off).")
@click.option("--rest", metavar="IP:PORT", help="Address of SnoozeML's REST (default: off; 8080 with models.toml).")
@click.option("--allow-code", is_flag=True, help="Open models in PATH that run code of their own: you trust them.")
@click.option("--state", type=click.Path(path_type=Path), help="Write addresses and pid here, as JSON, once ready.")
@click.option("--watch", is_flag=True, help="Follow the folder: models come, change and go while others are served.")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="Of the log on stderr (default: text).")
@click.option("--verbose", is_flag=True, help="Log what Triton logs, too.")
def serve(
    path: Path | None,
    config: Path | None,
    tritonserver: Path | None,
    envoy: Path | None,
    bind: str | None,
    http: str | None,
    rest: str | None,
    allow_code: bool,
    state: Path | None,
    watch: bool,
    log_format: str | None,
    verbose: bool,
) -> None:
    """Serve the bundles in the folder PATH, or what a settings file lists.

    A folder may hold settings of its own, SnoozeML's models.toml or models.json.

    A compiled program is code: serve only bundles you trust.
    """
    if path is not None and config is not None:
        raise click.UsageError("PATH and --config exclude each other")
    if allow_code and path is None:
        raise click.UsageError("--allow-code goes with PATH; a settings file says it for each model")

    def read() -> tuple[Settings, Path | None]:
        from native_service import settings
        from native_service.snooze import models_file

        file = models_file.find(path) if path is not None else config or Path(settings.DEFAULT_FILE)
        if file is not None and allow_code:
            raise NereidError(f"--allow-code is for a folder without settings; {file.name} says it for each model")
        if file is not None:
            return models_file.load_any(file, models_file.CommandLine(bind, rest, http)), file
        bound = bind or settings.DEFAULT_BIND
        return settings.for_folder(Path(str(path)), bind=bound, http=http, rest=rest, allow_code=allow_code), None

    run_server(read, log_format, verbose, tritonserver=tritonserver, envoy=envoy, state_file=state, watch=watch)


def run_server(
    read: Callable[[], tuple[Settings, Path | None]], log_format: str | None = None, verbose: bool = False, **more: Any
) -> NoReturn:
    """Serve, and end the process with the code of that.

    ``read`` gives the settings and the file that they come from, None for a folder alone; it is asked again when they
    are reloaded. ``more`` are options of the supervisor.
    """
    # From here on a signal means "stop", also while the libraries below are being imported.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    import asyncio

    try:
        from native_service import supervisor

        if more.get("watch"):
            import watchfiles  # noqa: F401 - used much later, where nobody could be told
    except ModuleNotFoundError as error:
        raise _missing("serving", error) from None

    _log_to_stderr(verbose, log_format or "text")
    chosen, file = read()
    if log_format is None and chosen.server.log_format != "text":
        _log_to_stderr(verbose, chosen.server.log_format)
    reread = None if file is None else lambda: read()[0]
    options = supervisor.Options(reread=reread, settings_file=file, **more)
    sys.exit(asyncio.run(supervisor.serve(chosen, options, announce=_announce)))


def _leave(_number: int, _frame: Any) -> None:
    raise SystemExit(0)


def _announce(text: str) -> None:
    click.echo(text)
    sys.stdout.flush()


def _log_to_stderr(verbose: bool, log_format: str) -> None:
    from native_service.telemetry.log_output import BackgroundHandler
    from native_service.telemetry.log_records import FORMATTERS

    handler = BackgroundHandler(_STDERR)
    handler.setFormatter(FORMATTERS[log_format]())
    logging.basicConfig(handlers=[handler], force=True)
    logging.getLogger("nereid").setLevel(logging.DEBUG if verbose else logging.INFO)


def _complain(text: str) -> None:
    """Say why the command ends, in the form of the log."""
    formatters = [handler.formatter for handler in logging.getLogger().handlers]
    if any(type(formatter).__name__ == "JsonFormatter" for formatter in formatters):
        logging.getLogger("nereid").error("%s", text)
    else:
        click.echo(f"error: {text}", err=True)


def main() -> None:
    """Entry point of the command."""
    run_command(nereid, "nereid")


def run_command(command: click.Command, name: str) -> None:
    """Run ``command`` as the process ``name``: what goes wrong is told in one line each."""
    try:
        command(prog_name=name, obj="isolated")
    except NereidError as error:
        _flush()
        for line in str(error).splitlines():
            _complain(line)
        sys.exit(1)
    except Exception as error:  # the edge of the process
        logging.getLogger("nereid").error("unexpected", exc_info=True)
        _flush()
        _complain(f"{type(error).__name__}: {error} (please report it with the lines above)")
        sys.exit(1)


def _flush() -> None:
    """What ends the command is the last line."""
    for handler in logging.getLogger().handlers:
        handler.flush()


if __name__ == "__main__":
    main()
