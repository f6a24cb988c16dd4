"""The image and what runs beside it, as far as that goes without a container engine: linted, and the same steps done.

docker/README.md says what nobody has executed here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from serving import checkpoint, chunk, meta, write_adder

from native_service import settings
from nereid_backend.cache import cache_folder

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
INSTRUCTIONS = re.sub(r"\\\n\s*", "", (DOCKER / "Dockerfile").read_text()).splitlines()
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SCRIPTS = Path(sysconfig.get_path("scripts"))
UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def instruction(word: str) -> list[str]:
    """The arguments of each ``word`` of the Dockerfile."""
    return [line.removeprefix(f"{word} ") for line in INSTRUCTIONS if line.startswith(f"{word} ")]


def tool(name: str) -> str:
    path = SCRIPTS / name
    if not path.exists():
        pytest.skip(f"{name} is not installed (the dev extra brings it)")
    return str(path)


def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run([tool("hadolint"), DOCKER / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_compose_file_follows_its_schema_and_names_what_is_there() -> None:
    command = [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", DOCKER / "compose.yaml"]
    subprocess.run(command, check=True, capture_output=True)
    build = COMPOSE["services"]["nereid"]["build"]
    assert (DOCKER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    assert (DOCKER / f"engines-{build['args']['ENGINES']}.txt").is_file()
    for service in COMPOSE["services"].values():
        mounts = [volume.split(":")[0] for volume in service["volumes"]]
        for source in mounts:
            assert source in COMPOSE["volumes"] or (DOCKER / source).exists() or source == "../bundles", source
        # A tag of a version, not one that moves.
        assert "build" in service or re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_prometheus_asks_where_the_settings_listen(tmp_path: Path) -> None:
    (tmp_path / "bundles").mkdir()
    written = tmp_path / "nereid.yaml"
    written.write_text((DOCKER / "nereid.yaml").read_text().replace('"/bundles"', '"bundles"'))
    server = settings.load(written).server
    [job] = yaml.safe_load((DOCKER / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert server.http is not None
    assert job["static_configs"] == [{"targets": [f"nereid:{server.http.port}"]}]
    assert {f"127.0.0.1:{port}:{port}" for port in (server.bind.port, server.http.port)} == set(
        COMPOSE["services"]["nereid"]["ports"]
    )
    assert instruction("EXPOSE") == [f"{server.bind.port} {server.http.port}"]


def test_grafana_finds_its_source_and_its_dashboard() -> None:
    grafana = COMPOSE["services"]["grafana"]
    mounts = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    [source] = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    [provider] = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/nereid.yaml").read_text())["providers"]
    assert provider["options"]["path"] == mounts["./grafana/dashboards"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/nereid.json"
    assert source["url"] == "http://prometheus:9090"
    uids = [panel["datasource"]["uid"] for panel in dashboard()["panels"]]
    assert uids == [source["uid"]] * len(uids)


def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((DOCKER / "grafana/dashboards/nereid.json").read_text())
    return board


def queries() -> list[str]:
    """Every query of the dashboard, Grafana's variables filled in."""
    board = dashboard()
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    for variable in board["templating"]["list"]:
        found.append(re.sub(r"label_values\((.*), (\w+)\)", r"count by (\2) (\1)", variable["definition"]))
    return [query.replace("$__rate_interval", "1m").replace("$model", ".*") for query in found]


def selectors(node: Any) -> Iterator[Any]:
    """Every selector of a series in a parsed query."""
    if hasattr(node, "matchers"):
        yield node
    for part in ("lhs", "rhs", "expr", "vector_selector"):
        if getattr(node, part, None) is not None:
            yield from selectors(getattr(node, part))
    for argument in getattr(node, "args", None) or ():
        yield from selectors(argument)


class Container:
    """``nereid`` with the arguments of the image, from the wheel of the files it copies, as the first process."""

    def __init__(self, folder: Path) -> None:
        source = folder / "source"
        for line in instruction("COPY"):
            *names, target = line.split()
            if names[0].startswith("--from"):
                continue
            for name in names:
                place = source / target / Path(name).name if target.endswith("/") else source / target
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
                place.parent.mkdir(parents=True, exist_ok=True)
                copy(ROOT / name, place)
        wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        subprocess.run([*wheel, "--wheel-dir", folder / "wheels", "."], cwd=source, check=True)
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
        [built] = (folder / "wheels").glob("nereid_triton-*.whl")
        python = folder / "venv" / "bin" / "python"
        install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
        subprocess.run([*install, built], check=True)
        # What the image installs from the index is here already; only nereid is to come from the wheel.
        (site / "rest.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self.bin, self.cache = folder / "venv" / "bin", folder / "cache"
        (folder / "bundles").mkdir()
        write_adder(folder / "bundles" / "digits.onnx")
        self.settings = folder / "nereid.yaml"
        text = (DOCKER / "nereid.yaml").read_text().replace('"/bundles"', '"bundles"')
        text = re.sub(r'"0\.0\.0\.0:\d+"', '"127.0.0.1:0"', text)
        self.settings.write_text(text + "    options: {max_batch_size: 8}\n")
        self.environment = {
            **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "NEREID_CACHE_DIR": str(self.cache),
        }
        # tritonserver is in the image; here it is the fetched one.
        self.cache.mkdir(mode=0o700)
        (self.cache / "triton").symlink_to(cache_folder() / "triton")

    def start(self) -> subprocess.Popen[str]:
        entry, command = (json.loads(instruction(word)[0]) for word in ("ENTRYPOINT", "CMD"))
        arguments = [str(self.settings) if word == "/etc/nereid/nereid.yaml" else word for word in command]
        return subprocess.Popen(
            [*UNSHARE, *entry, *arguments],
            env=self.environment,
            cwd=self.cache,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def is_healthy(self) -> bool:
        check = json.loads(instruction("HEALTHCHECK")[0].partition("CMD ")[2])
        done = subprocess.run([self.bin / check[0], *check[1:]], env=self.environment, capture_output=True)
        return done.returncode == 0

    def state(self) -> dict[str, Any]:
        done = subprocess.run([self.bin / "nereid", "status", "--json"], env=self.environment, capture_output=True)
        return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Container:
    if subprocess.run([*UNSHARE, "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine allows no process namespaces of one's own")
    return Container(tmp_path_factory.mktemp("container"))


@pytest.mark.triton
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_image_s_command_serves_as_the_first_process_and_ends_with_0(
    container: Container, number: signal.Signals
) -> None:
    assert not container.is_healthy()
    process = container.start()
    try:
        deadline = time.monotonic() + 90
        while not container.is_healthy():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "not healthy in time"
            time.sleep(0.2)
        state = container.state()
        assert state["pid"] == 1
        address, http = state["addresses"]["address"], state["addresses"]["http"]
        served = SimpleNamespace(state={"address": address})
        answers = checkpoint(served, [meta("digits"), chunk([4], bytes(16))])  # type: ignore[arg-type]
        assert answers[-1].done
        shown = urllib.request.urlopen(f"http://{http}/metrics", timeout=10).read().decode()
        _check_dashboard(shown)
        (first,) = _children(process.pid)
        os.kill(first, number)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert not container.is_healthy()
    lines = [line for line in output.splitlines() if not line.startswith("nereid is ready")]
    # The start may have something to say about this machine.
    assert {json.loads(line)["level"] for line in lines} <= {"INFO", "WARNING"}


def _check_dashboard(shown: str) -> None:
    """Every query asks for series that are there, by labels that they have."""
    promql = pytest.importorskip("promql_parser")
    labels: dict[str, set[str]] = {}
    # By the names as they are written: Prometheus' parser in Python gives Triton's counters other ones.
    for name, inside in re.findall(r"^([a-z_]+)(?:\{(.*)\})? \S+$", shown, re.MULTILINE):
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', inside))
    for query in queries():
        for selector in selectors(promql.parse(query)):
            assert selector.name in labels, query
            asked = {matcher.name for matcher in selector.matchers.matchers}
            asked |= {word for by in re.findall(r"by \((.*?)\)", query) for word in by.split(", ")} & {"model"}
            assert asked <= labels[selector.name], query


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
