"""Many models in one command: the report, what a second run does, and a dry run."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("onnxruntime")

from converters.cli import command
from nereid_backend.spec import ModelSpec

CONFIG = (
    'backend: "onnxruntime" max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: 4 } '
    'output { name: "y" data_type: TYPE_FP32 dims: 4 } instance_group { kind: KIND_CPU } dynamic_batching {}'
)


class Deployment:
    """A Triton repository of the models good, other and plan, and the command on it."""

    def __init__(self, folder: Path, plus_one: Any) -> None:
        self.source, self.output, self.report = folder / "old", folder / "new", folder / "report.json"
        for name in ("good", "other"):
            (self.source / name / "1").mkdir(parents=True)
            (self.source / name / "config.pbtxt").write_text(CONFIG)
            plus_one(("rows", 4), path=self.source / name / "1" / "model.onnx")
        (self.source / "plan" / "1").mkdir(parents=True)
        (self.source / "plan" / "config.pbtxt").write_text('platform: "tensorrt_plan"')

    def convert(self, *options: Any) -> Result:
        arguments = [self.source, "-o", self.output, "--report", self.report, *options]
        return CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)

    def entries(self) -> dict[str, dict[str, Any]]:
        return {entry["name"]: entry for entry in json.loads(self.report.read_text())["models"]}

    def written(self) -> dict[str, int]:
        """When each model was put in its place."""
        return {path.name: path.stat().st_ino for path in self.output.iterdir()}


@pytest.fixture
def deployment(tmp_path: Path, plus_one: Any) -> Deployment:
    return Deployment(tmp_path, plus_one)


def test_the_report_says_what_became_of_each_model(deployment: Deployment) -> None:
    result = deployment.convert()
    assert result.exit_code == 1
    entries = deployment.entries()
    assert {name: entry["status"] for name, entry in entries.items()} == {
        "good": "converted",
        "other": "converted",
        "plan": "refused",
    }
    good, plan = entries["good"], entries["plan"]
    assert (good["source"], good["output"]) == (str(deployment.source / "good"), str(deployment.output / "good"))
    assert good["taken_over"][:3] == ["input x FP32 [4]", "output y FP32 [4]", "max_batch_size 8"]
    assert (good["changed"], good["refused"]) == ([], "")
    assert good["next_step"] == f"serve it: tritonserver --model-repository={deployment.output}"
    assert plan["refused"].startswith("a TensorRT plan runs only on the GPU")
    assert plan["next_step"] == "convert the ONNX file it was built from"
    assert not list(deployment.report.parent.glob(".report*"))


def test_a_second_run_does_what_is_missing_or_changed(deployment: Deployment, plus_one: Any) -> None:
    deployment.convert()
    before = deployment.written()
    again = deployment.convert()
    assert deployment.written() == before
    assert again.stdout.splitlines() == [
        f"{deployment.source / name}: unchanged since it was converted to {deployment.output / name}"
        for name in ("good", "other")
    ]

    (deployment.source / "good" / "config.pbtxt").write_text(CONFIG.replace("max_batch_size: 8", "max_batch_size: 16"))
    shutil.rmtree(deployment.source / "plan")
    assert deployment.convert().exit_code == 0
    changed = deployment.written()
    assert (changed["good"] != before["good"], changed["other"]) == (True, before["other"])
    assert ModelSpec.read(deployment.output / "good" / "1").max_batch_size == 16

    shutil.rmtree(deployment.output / "other")
    (deployment.output / "good" / "config.pbtxt").write_text("# edited")
    deployment.convert()
    assert {path.name for path in deployment.output.iterdir()} == {"good", "other"}
    assert "# edited" not in (deployment.output / "good" / "config.pbtxt").read_text()
    assert "unchanged" not in deployment.convert("--force").stdout


def test_other_options_are_another_conversion(deployment: Deployment) -> None:
    deployment.convert()
    assert "unchanged" not in deployment.convert("--backpressure", "triton").stdout
    assert "max_queue_size" in (deployment.output / "good" / "config.pbtxt").read_text()


def test_what_others_have_written_stays(deployment: Deployment) -> None:
    deployment.convert()
    deployment.report.unlink()
    before = deployment.written()
    for _ in range(2):  # a first refusal must not make it ours
        result = deployment.convert()
        assert (result.exit_code, deployment.written()) == (1, before)
        assert f"{deployment.output / 'good'} exists; use --force to replace it" in result.stderr
    (deployment.source / "good" / "config.pbtxt").write_text('platform: "tensorrt_plan"')
    assert deployment.convert("--force").exit_code == 1
    assert deployment.written()["good"] == before["good"]


def test_a_refused_model_is_tried_again_and_its_old_conversion_stays_ours(deployment: Deployment) -> None:
    deployment.convert()
    before = deployment.written()
    config = deployment.source / "good" / "config.pbtxt"
    config.write_text(CONFIG.replace('"y"', '"z"'))
    for _ in range(2):
        assert "the graph has no output 'z'" in deployment.convert().stderr
        assert deployment.written() == before
    config.write_text(CONFIG)
    deployment.convert()
    assert deployment.entries()["good"]["status"] == "converted"


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(deployment: Deployment, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    result = deployment.convert("--dry-run")
    assert (result.exit_code, sorted(tmp_path.rglob("*"))) == (1, before)
    lines = result.stdout.splitlines()
    good, other = deployment.output / "good", deployment.output / "other"
    assert lines[0] == f"{deployment.source / 'good'} would become {good} (engine onnx, batch sizes: up to 8)"
    assert "  as before: input x FP32 [4]" in lines
    assert result.stderr.startswith(f"error: {deployment.source / 'plan'}: a TensorRT plan")
    deployment.convert()
    (deployment.source / "other" / "config.pbtxt").write_text(CONFIG.replace("8", "2"))
    report = deployment.report.read_text()
    lines = deployment.convert("--dry-run").stdout.splitlines()
    assert lines[0].startswith(f"{deployment.source / 'good'}: unchanged")
    assert lines[1] == f"{deployment.source / 'other'} would become {other} (engine onnx, batch sizes: up to 2)"
    assert deployment.report.read_text() == report


def test_a_dry_run_meets_what_stands_in_the_way(deployment: Deployment) -> None:
    (deployment.output / "good").mkdir(parents=True)
    assert f"{deployment.output / 'good'} is not a converted model" in deployment.convert("--dry-run").stderr


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"nereid_conversion_report": 1, "models": [{}]}', "\0" * 99])
def test_a_file_that_is_no_report_is_left_alone(deployment: Deployment, content: str) -> None:
    deployment.report.write_text(content)
    result = deployment.convert()
    assert (result.exit_code, deployment.report.read_text(), deployment.output.exists()) == (1, content, False)
    assert "is not a report that this version of nereid convert wrote; name another file" in result.stderr


def test_a_report_that_cannot_be_written_stops_before_anything_is_converted(deployment: Deployment) -> None:
    deployment.report = deployment.report.with_name("nowhere") / "report.json"
    result = deployment.convert()
    assert (result.exit_code, deployment.output.exists()) == (1, False)
    assert "cannot write the report" in result.stderr


KILLED = """
import os, signal, sys, converters.repository as repository
from converters.cli import main
write = repository.write
def killed(prepared, *rest, **options):
    done = write(prepared, *rest, **options)
    if prepared.spec.name == "good":
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return done
repository.write = killed
main()
"""


def test_a_killed_run_is_taken_up_where_it_ended(deployment: Deployment) -> None:
    """Killed between putting a model in its place and noting it, which is when its own work is hardest to know."""
    arguments = [str(deployment.source), "-o", str(deployment.output), "--report", str(deployment.report)]
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while not (deployment.output / "good").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert {name: entry["status"] for name, entry in deployment.entries().items()} == dict.fromkeys(
        ("good", "other", "plan"), "converting"
    )
    shutil.rmtree(deployment.source / "plan")
    result = deployment.convert()
    assert (result.exit_code, result.stderr) == (0, "")
    assert {name: deployment.entries()[name]["status"] for name in ("good", "other")} == {
        "good": "converted",
        "other": "converted",
    }


def test_a_file_behind_a_link_counts_as_the_models(plus_one: Any, tmp_path: Path) -> None:
    from converters.report import source_digest

    folder = tmp_path / "m"
    folder.mkdir()
    (tmp_path / "elsewhere").write_text("a")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "loop").symlink_to(folder)
    (folder / "broken").symlink_to(tmp_path / "nowhere")
    before = source_digest(folder, {})
    assert source_digest(folder, {}) == before
    (tmp_path / "elsewhere").write_text("ab")
    assert source_digest(folder, {}) != before
    (folder / "link").unlink()
    assert source_digest(folder, {"device": "cuda"}) != source_digest(folder, {})


def test_the_move_in_the_readme_works_as_written(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = Path(__file__).parents[2] / "converters" / "README.md"
    _, _, text = readme.read_text().partition("## Move from another Triton\n")
    (block,) = re.findall(r"^```sh\n(.*?)^```", text.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    shutil.rmtree(deployment.source / "plan")
    deployment.source.rename(tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    dry, real = (line.split() for line in block.splitlines())
    assert (dry[0], real[0]) == ("nereid-convert", "nereid-convert")
    assert CliRunner().invoke(command, dry[1:]).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models"]
    assert CliRunner().invoke(command, real[1:]).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "triton_models").iterdir()) == ["good", "other"]
    entries = json.loads((tmp_path / "moved.json").read_text())["models"]
    assert {"status", "taken_over", "changed", "refused", "next_step"} <= entries[0].keys()
