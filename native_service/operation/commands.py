"""The commands that ask a running server: ``nereid status``, ``nereid models`` and ``nereid reload``.

Exit codes: 0 it is well, 3 it runs but is not ready (or a model of it is not), 1 an error, 2 wrong usage. A reload
that could not be applied as a whole exits with 1.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

import click

from native_service.operation import running_servers
from nereid_backend import progress

_NOT_READY = 3
_READY, _IDLE = "ready", "idle"
_LOG = logging.getLogger("nereid.commands")

_server = click.argument("server", required=False)
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text for people.")
_SERVER_HELP = """

    SERVER is its address, settings file, folder of models, state file or process id; it may be left out when only one
    server runs.
    """


def _with_server(text: str) -> str:
    return text + _SERVER_HELP


@click.command(help=_with_server("Show how a running server is. Exit code 0 when it is ready, 3 when not."))
@_server
@_as_json
def status(server: str | None, as_json: bool) -> None:
    found = running_servers.pick(server).status
    click.echo(json.dumps(found, indent=2) if as_json else _status_text(found))
    sys.exit(0 if found["state"] == _READY else _NOT_READY)


@click.command(
    help=_with_server("List the models of a running server. Exit code 0 when all are ready or idle, 3 when not.")
)
@_server
@_as_json
def models(server: str | None, as_json: bool) -> None:
    found = running_servers.pick(server).ask("/models")
    click.echo(json.dumps(found, indent=2) if as_json else _models_text(found))
    sys.exit(0 if all(model["state"] in (_READY, _IDLE) for model in found) else _NOT_READY)


@click.command(
    help=_with_server(
        "Let a running server read its settings again and look at its models. What can change does, without a lost "
        "call; a file or a model with a mistake changes nothing. Exit code 0 when the server is as the file says now."
    )
)
@_server
@_as_json
def reload(server: str | None, as_json: bool) -> None:
    found = running_servers.pick(server)
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    _LOG.setLevel(logging.INFO)
    with progress.told(_LOG, f"reloading {found.name}"):
        outcome = found.order("/reload")
    if as_json:
        click.echo(json.dumps(outcome, indent=2))
    else:
        for line in outcome["applied"]:
            click.echo(line)
        for line in (*outcome["failed"], *outcome["refused"]):
            click.echo(f"error: {line}", err=True)
        if not any(outcome.values()):
            click.echo("nothing has changed")
    sys.exit(1 if outcome["failed"] or outcome["refused"] else 0)


def _status_text(found: dict[str, Any]) -> str:
    processes = [f"{name} {its['pid']} ({_memory(its['memory_bytes'])})" for name, its in found["processes"].items()]
    permits, restarts = found["permits"], found["restarts"]
    rows = [
        ("state", found["state"]),
        ("up", _duration(found["uptime_s"])),
        *((key, address) for key, address in found["addresses"].items() if address),
        *((key, found[key]) for key in ("settings", "folder", "state_file") if found[key]),
        ("versions", ", ".join(f"{name} {its}" for name, its in found["versions"].items() if its)),
        ("processes", ", ".join(processes)),
        ("memory", f"{_memory(found['memory_bytes'])} with all models"),
        ("models", ", ".join(f"{count} {state}" for state, count in found["models"].items()) or "none"),
        ("permits", f"{permits['in_use']} of {permits['total']} in use"),
        ("restarts", ", ".join(f"{name} {count}" for name, count in restarts.items())),
        *(("failure", f"{failure['at']} {failure['text']}") for failure in found["failures"]),
    ]
    return "\n".join(f"{key:<15}{value}" for key, value in rows)


def _models_text(found: Sequence[dict[str, Any]]) -> str:
    rows = [("NAME", "ENGINE", "DEVICE", "STATE", "CALLS", "BATCH", "RESTARTS", "MEMORY", "COLD STARTS", "LOADED")]
    for model in found:
        rows.append(
            (
                model["name"] + (" (hidden)" if model["hidden"] else ""),
                model["engine"] or "-",
                model["device"] or "-",
                model["state"] + (", pinned" if model["pinned"] else ""),
                "-" if model["queue_capacity"] is None else f"{_or_dash(model['in_use'])}/{model['queue_capacity']}",
                _batch(model),
                str(model["restarts"]),
                _memory(model["memory_bytes"]),
                f"{model['cold_starts']} ({model['cold_start_last_s']:.1f} s)" if model["cold_starts"] else "-",
                model["loaded_at"] or "-",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"{model['name']}: {model['reason']}" for model in found if model["reason"]]
    return "\n".join(lines)


def _batch(model: dict[str, Any]) -> str:
    if model["batch_sizes"]:
        return ",".join(map(str, model["batch_sizes"]))
    return f"up to {model['max_batch_size']}" if model["max_batch_size"] else "-"


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)


def _memory(count: int) -> str:
    return f"{count / 2**20:.0f} MiB" if count else "-"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
