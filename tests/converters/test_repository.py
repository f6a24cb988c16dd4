from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from converters import durable, repository
from converters.prepared import Prepared
from nereid_backend import dtypes
from nereid_backend.errors import RepositoryError
from nereid_backend.spec import SPEC_FILE, ModelSpec, Program, TensorSpec

SPEC = ModelSpec(
    "m",
    "onnx",
    "onnxruntime_onnx",
    (TensorSpec("x", "f32", (-1, 4), 0),),
    (TensorSpec("y", "i64", (-1,), 0),),
    (Program("g.onnx"),),
    max_batch_size=8,
    coalesce=True,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.onnx"
    path.write_bytes(b"graph")
    return path


def prepared(source: Path, **changes: Any) -> Prepared:
    return Prepared(replace(SPEC, **changes), {"g.onnx": source})


def write(model: Prepared, target: Path, *, link: bool = False, force: bool = False) -> Path:
    return repository.write(model, target, link=link, force=force)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def parse(text: str) -> Any:
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_the_configuration_is_complete() -> None:
    expected = parse(
        """
        name: "m" backend: "python" platform: "onnxruntime_onnx" max_batch_size: 8
        input { name: "x" data_type: TYPE_FP32 dims: 4 }
        output { name: "y" data_type: TYPE_INT64 dims: 1 }
        instance_group { count: 1 kind: KIND_CPU }
        dynamic_batching { }
        """
    )
    assert parse(repository.config_text(SPEC)) == expected


def test_requests_wait_for_others_only_when_that_is_asked_for() -> None:
    assert repository.config(SPEC).dynamic_batching.max_queue_delay_microseconds == 0
    assert repository.config(SPEC, batch_delay_ms=7).dynamic_batching.max_queue_delay_microseconds == 7000


def test_requests_that_must_not_share_a_run_get_no_dynamic_batching() -> None:
    assert not parse(repository.config_text(replace(SPEC, coalesce=False))).HasField("dynamic_batching")


def test_variants_that_arrive_mixed_may_share_a_batch() -> None:
    images = replace(SPEC, inputs=(TensorSpec("x", "f32", (-1, -1), 0),))
    variants = replace(images, programs=(Program("a", 4, (3,)), Program("b", 4, (5,))))
    ragged = [parse(repository.config_text(s)).input[0].allow_ragged_batch for s in (images, variants)]
    assert ragged == [False, True]


@pytest.mark.parametrize("changes", [{"max_batch_size": 0}, {"max_batch_size": 1}])
def test_a_model_of_single_rows_has_nothing_to_batch(changes: dict[str, Any]) -> None:
    assert not parse(repository.config_text(replace(SPEC, coalesce=True, **changes))).HasField("dynamic_batching")


@pytest.mark.parametrize(("device", "gpus"), [("cuda", [0]), ("cuda:3", [3])])
def test_a_gpu_model_gets_its_gpu(device: str, gpus: list[int]) -> None:
    (group,) = parse(repository.config_text(replace(SPEC, device=device))).instance_group
    assert (type(group).Kind.Name(group.kind), list(group.gpus), group.count) == ("KIND_GPU", gpus, 1)


def test_a_model_without_triton_batching_has_its_full_shapes() -> None:
    spec = replace(SPEC, max_batch_size=0, coalesce=False, outputs=(TensorSpec("y", "f32", ()),))
    config = parse(repository.config_text(spec))
    assert ([list(t.dims) for t in (*config.input, *config.output)], config.max_batch_size) == ([[-1, 4], [1]], 0)


def test_a_type_triton_lacks_is_refused_by_name() -> None:
    spec = replace(SPEC, outputs=(TensorSpec("y", "f8_e5m2", (-1,), 0),))
    with pytest.raises(RepositoryError, match="tensor 'y' is f8_e5m2, which Triton has no type for"):
        repository.config_text(spec)


text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
tensor = st.builds(
    lambda name, dtype, row: TensorSpec(name, dtype, (-1, *row), 0),
    text,
    st.sampled_from([r.token for r in dtypes.TABLE if r.triton]),
    st.lists(st.integers(-1, 99).filter(bool), max_size=3),
)


@given(text, st.lists(tensor, max_size=3), st.lists(tensor, max_size=3), st.integers(0, 99), st.booleans())
def test_any_configuration_reads_back_as_the_same_message(
    name: str, inputs: list[TensorSpec], outputs: list[TensorSpec], size: int, coalesce: bool
) -> None:
    spec = replace(
        SPEC, name=name, inputs=tuple(inputs), outputs=tuple(outputs), max_batch_size=size, coalesce=coalesce
    )
    got = parse(repository.config_text(spec))
    assert got == repository.config(spec)
    assert [(t.name, list(t.dims)) for t in got.input] == [(t.name, list(spec.dims(t))) for t in inputs]


def test_a_model_is_a_directory_of_four_kinds_of_files(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "repository"
    assert write(prepared(source), target) == target / "m"
    assert tree(target) == {
        "m/config.pbtxt": repository.config_text(SPEC).encode(),
        "m/1/model.py": b"from nereid_backend.model import TritonPythonModel as TritonPythonModel\n",
        "m/1/nereid.json": SPEC.to_json().encode(),
        "m/1/g.onnx": b"graph",
    }
    assert ModelSpec.read(target / "m" / "1") == SPEC
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "source.onnx"]
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["repository"]


def test_a_copy_is_independent_of_its_source_and_a_link_is_not(source: Path, tmp_path: Path) -> None:
    write(prepared(source), tmp_path / "copied")
    write(prepared(source), tmp_path / "linked", link=True)
    with source.open("wb") as file:
        file.write(b"changed")
    assert (tmp_path / "copied" / "m" / "1" / "g.onnx").read_bytes() == b"graph"
    assert (tmp_path / "linked" / "m" / "1" / "g.onnx").read_bytes() == b"changed"


def test_a_link_across_file_systems_is_symbolic(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.chdir(tmp_path)
    write(Prepared(SPEC, {"g.onnx": Path("source.onnx")}), tmp_path / "r", link=True)
    placed = tmp_path / "r" / "m" / "1" / "g.onnx"
    assert (placed.is_symlink(), placed.read_bytes()) == (True, b"graph")


def test_a_link_to_a_link_reaches_the_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to("source.onnx")
    for link in (True, False):
        write(Prepared(SPEC, {"g.onnx": tmp_path / "alias"}), tmp_path / f"r{link}", link=link)
        placed = tmp_path / f"r{link}" / "m" / "1" / "g.onnx"
        assert (placed.is_symlink(), placed.read_bytes()) == (False, b"graph")


def test_an_existing_model_is_kept_without_force(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "r"
    write(prepared(source), target)
    before = tree(target)
    with pytest.raises(RepositoryError, match=r"exists; use --force to replace it"):
        write(prepared(source, max_batch_size=1), target)
    assert tree(target) == before


def test_force_replaces_the_whole_model(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "r"
    write(prepared(source), target)
    (target / "m" / "leftover").write_text("")
    write(prepared(source, max_batch_size=1), target, force=True)
    assert sorted(tree(target)) == ["m/1/g.onnx", "m/1/model.py", "m/1/nereid.json", "m/config.pbtxt"]
    assert ModelSpec.read(target / "m" / "1").max_batch_size == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r", "source.onnx"]


class PlainRenames:
    """A C library on a file system that knows no flags of renames."""

    def renameat2(self, *_: Any) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1


def test_force_on_a_file_system_without_exchange_replaces_too(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable.ctypes, "CDLL", lambda *_, **__: PlainRenames())
    for size in (8, 1):
        write(prepared(source, max_batch_size=size), tmp_path / "r", force=True)
        assert ModelSpec.read(tmp_path / "r" / "m" / "1").max_batch_size == size
    assert [p.name for p in (tmp_path / "r").iterdir()] == ["m"]


@pytest.mark.parametrize("kernel", ["with no-replace", "without"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_came_meanwhile_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, kind: str
) -> None:
    if kernel == "without":
        monkeypatch.setattr(durable.ctypes, "CDLL", lambda *_, **__: PlainRenames())
    paths = tmp_path / "fresh", tmp_path / "target"
    for path in paths:
        if kind == "folder":
            path.mkdir()
        (path / "file" if kind == "folder" else path).write_text(path.name)
    before = tree(tmp_path)
    with pytest.raises(OSError, match=r"exists|not empty"):
        durable.swap_in(*paths, replace=False)
    assert tree(tmp_path) == before
    paths[1].rename(tmp_path / "away")
    durable.swap_in(*paths, replace=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["away", "target"]


def test_a_failing_last_rename_puts_the_old_model_back(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(prepared(source), tmp_path / "r")
    before = tree(tmp_path / "r")

    rename = Path.rename

    def fail_into_place(self: Path, target: Any) -> Path:
        if self.name == "m" and "convert" in str(self.parent):
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(durable.ctypes, "CDLL", lambda *_, **__: PlainRenames())
    monkeypatch.setattr(Path, "rename", fail_into_place)
    with pytest.raises(RepositoryError, match="No space left on device"):
        write(prepared(source, max_batch_size=1), tmp_path / "r", force=True)
    assert tree(tmp_path / "r") == before


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_half_way_leaves_the_old_model_or_nothing(
    source: Path, tmp_path: Path, existing: bool, error: BaseException
) -> None:
    target = tmp_path / "r"
    if existing:
        write(prepared(source), target)
    before = tree(target)

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    expected = RepositoryError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        write(Prepared(SPEC, {"a": source, "b": fail}), target, force=True)
    assert tree(target) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r", "source.onnx"]


def test_a_missing_source_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match=r"cannot write .*m: No such file"):
        write(prepared(tmp_path / "missing"), tmp_path / "r")
    assert list((tmp_path / "r").iterdir()) == []


def test_a_repository_that_is_a_file_is_refused(source: Path) -> None:
    with pytest.raises(RepositoryError, match="cannot write"):
        write(prepared(source), source)


def test_what_killed_conversions_left_is_removed_and_live_ones_are_kept(source: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    dead = tmp_path / f".r-convert-{done.stdout.strip()}-abc"
    live, foreign = tmp_path / f".r-convert-{os.getpid()}-abc", tmp_path / ".other-convert-1-abc"
    named = tmp_path / ".r-convert-name-abc"
    for folder in (dead, live, foreign, named):
        (folder / "m").mkdir(parents=True)
    write(prepared(source), tmp_path / "r")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["r", "source.onnx", live.name, foreign.name, named.name]
    )


def test_a_kill_in_the_middle_leaves_nothing_inside_the_repository(source: Path, tmp_path: Path) -> None:
    write(prepared(source), tmp_path / "r")
    before = tree(tmp_path / "r")
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from converters import repository\n"
        "from converters.prepared import Prepared\n"
        "from nereid_backend.spec import ModelSpec\n"
        "folder = Path(sys.argv[1])\n"
        "spec = ModelSpec.read(folder / 'r' / 'm' / '1')\n"
        "die = lambda path: os.kill(os.getpid(), 9)\n"
        "repository.write(Prepared(spec, {'b': die}), folder / 'r', link=False, force=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -9
    assert tree(tmp_path / "r") == before
    assert len(list(tmp_path.glob(".r-convert-*"))) == 1
    write(prepared(source), tmp_path / "r", force=True)
    assert list(tmp_path.glob(".r-convert-*")) == []
    assert (tmp_path / "r" / "m" / "1" / SPEC_FILE).exists()


def test_a_folder_that_is_no_converted_model_is_never_replaced(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "r" / SPEC.name
    target.mkdir(parents=True)
    (target / "thesis.txt").write_text("the only copy")
    for force in (False, True):
        with pytest.raises(RepositoryError, match="is not a converted model; remove it yourself"):
            write(prepared(source), tmp_path / "r", force=force)
    assert (target / "thesis.txt").read_text() == "the only copy"


def test_the_folder_a_model_comes_from_is_never_replaced(source: Path, tmp_path: Path) -> None:
    inside = tmp_path / "r" / SPEC.name / "artifact"
    inside.parent.mkdir(parents=True)
    inside.write_bytes(source.read_bytes())
    with pytest.raises(RepositoryError, match="is where the model comes from; choose another output folder with -o"):
        write(prepared(inside), tmp_path / "r", force=True)
    assert inside.read_bytes() == source.read_bytes()


def ensemble(author: str, write_core: Callable[[Path], None] | None = None) -> Prepared:
    """An ensemble whose stages and whose own directory say who wrote them."""

    def sign(path: Path) -> None:
        path.write_text(author)

    parts = [
        Prepared(replace(SPEC, name=f"m__{part}"), {"author": source})
        for part, source in (("first", sign), ("core", write_core or sign))
    ]
    spec = replace(SPEC, stages=tuple(part.spec.contract for part in parts))
    return Prepared(spec, {"author": sign}, (), tuple(parts))


def authors(target: Path) -> list[str]:
    return [path.read_text() for path in sorted(target.glob("*/1/author"))]


def test_two_conversions_of_one_ensemble_at_once_never_mix(tmp_path: Path) -> None:
    inside, other_done = threading.Event(), threading.Event()

    def slowly(path: Path) -> None:
        inside.set()
        other_done.wait(0.5)  # as long as the other one needs, were it let in
        path.write_text("slow")

    def write_other() -> None:
        inside.wait()
        write(ensemble("other"), tmp_path / "r", force=True)
        other_done.set()

    write(ensemble("old"), tmp_path / "r")
    other = threading.Thread(target=write_other)
    other.start()
    write(ensemble("slow", slowly), tmp_path / "r", force=True)
    assert authors(tmp_path / "r") in (["slow"] * 3, ["other"] * 3)
    other.join()
    assert authors(tmp_path / "r") == ["other"] * 3


def test_an_ensemble_that_cannot_be_written_leaves_the_whole_old_one(tmp_path: Path) -> None:
    def fail(_: Path) -> None:
        raise OSError(28, "No space left on device")

    write(ensemble("old"), tmp_path / "r")
    with pytest.raises(RepositoryError, match="No space left on device"):
        write(ensemble("new", fail), tmp_path / "r", force=True)
    assert authors(tmp_path / "r") == ["old"] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["r"]
