from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from converters import migrate, weights
from converters.cli import migrate as command
from converters.manifest import read as read_manifest
from converters.migrate import LOCK, prove
from nereid_backend import dtypes, locks, safetensors
from nereid_backend.errors import ManifestError, NereidError, WeightsError

ORIGINAL, COPY = "weights.safetensors", "weights.T.safetensors"
MANIFEST = 'format_version: "2.0"  # by hand\n# the model of the paper\nexecutable_inputs: []\nexecutable_outputs: []\n'
SQUARE = np.arange(16, dtype=np.float32).reshape(4, 4) / 8
PROGRAM = {
    "w": SQUARE,
    "conv": np.arange(120, dtype=np.int16).reshape(2, 3, 4, 5),
    "b": np.arange(3.0),
    "s": np.array(2.5),
}


def legacy(folder: Path, tensors: dict[str, np.ndarray] | None = None, **metadata: str) -> Path:
    """A bundle whose weights are what Julia writes: reversed shapes, permuted data."""
    folder.mkdir(exist_ok=True)
    (folder / "manifest.yaml").write_text(MANIFEST)
    tensors = PROGRAM if tensors is None else tensors
    metadata = {"argument_order": json.dumps(list(tensors)), **metadata}
    weights.write(folder / ORIGINAL, {name: array.T for name, array in tensors.items()}, metadata)
    return folder


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return legacy(tmp_path / "bundle")


def in_use(bundle: Path) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """The file a conversion takes, the program-order weights it makes of it, and its remarks."""
    found, notes = weights.in_use(bundle, read_manifest(bundle / "manifest.yaml", has_hook=False).weights_file)
    path = found.path
    if found.needs_transpose:
        path = bundle.parent / "converted"
        found.writer()(path)
    tensors = safetensors.read(path).tensors
    return found.path.name, {name: tensors[name].tolist() for name in found.argument_order}, notes


def as_lists(tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: array.tolist() for name, array in tensors.items()}


def files(bundle: Path) -> set[str]:
    return {path.name for path in bundle.iterdir()} - {".cache"}


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)


def test_a_copy_leaves_the_original_and_one_more_line(bundle: Path) -> None:
    before = (bundle / ORIGINAL).read_bytes()
    migrate.migrate(bundle, replace=False)
    lines = MANIFEST.splitlines(keepends=True)
    assert (bundle / "manifest.yaml").read_text() == "".join([lines[0], f"weights_file: {COPY}\n", *lines[1:]])
    assert (bundle / ORIGINAL).read_bytes() == before
    assert files(bundle) == {"manifest.yaml", ORIGINAL, COPY}
    assert in_use(bundle) == (COPY, as_lists(PROGRAM), ())


def test_a_replacement_leaves_one_file_and_format_2_1(bundle: Path) -> None:
    migrate.migrate(bundle, replace=True)
    assert (bundle / "manifest.yaml").read_text() == MANIFEST.replace("2.0", "2.1")
    assert files(bundle) == {"manifest.yaml", ORIGINAL}
    assert in_use(bundle) == (ORIGINAL, as_lists(PROGRAM), ())
    assert not weights.read(bundle / ORIGINAL).needs_transpose


def test_a_copy_can_be_made_a_replacement_later(bundle: Path) -> None:
    migrate.migrate(bundle, replace=False)
    migrate.migrate(bundle, replace=True)
    assert (files(bundle), in_use(bundle)) == ({"manifest.yaml", ORIGINAL}, (ORIGINAL, as_lists(PROGRAM), ()))


@pytest.mark.parametrize("replace", [False, True])
def test_migrating_twice_changes_nothing(bundle: Path, replace: bool) -> None:
    migrate.migrate(bundle, replace=replace)
    before = {name: ((bundle / name).stat().st_ino, (bundle / name).read_bytes()) for name in files(bundle)}
    migrate.migrate(bundle, replace=replace)
    assert {name: ((bundle / name).stat().st_ino, (bundle / name).read_bytes()) for name in files(bundle)} == before


def test_weights_in_program_order_are_left_alone(tmp_path: Path) -> None:
    bundle = legacy(tmp_path / "bundle", axis_order="xla")
    before = (bundle / ORIGINAL).read_bytes()
    assert migrate.migrate(bundle, replace=True) == f"{ORIGINAL} is in program order already"
    assert ((bundle / ORIGINAL).read_bytes(), (bundle / "manifest.yaml").read_text()) == (before, MANIFEST)


@pytest.mark.parametrize("row", dtypes.TABLE, ids=lambda row: row.token)
def test_every_dtype_and_every_bit_pattern_is_kept(tmp_path: Path, row: dtypes.DType) -> None:
    data = np.random.default_rng(0).bytes(210 * row.size_bytes)
    if row.token == "bool":
        data = bytes(byte & 1 for byte in data)
    array = np.frombuffer(data, row.numpy).reshape(5, 7, 6)
    bundle = legacy(tmp_path / "bundle", {"w": array, "none": np.zeros((2, 0, 3), row.numpy)})
    migrate.migrate(bundle, replace=True)
    tensors = safetensors.read(bundle / ORIGINAL).tensors
    assert (tensors["w"].shape, tensors["w"].tobytes(), tensors["none"].shape) == ((5, 7, 6), data, (2, 0, 3))


def test_another_weights_file_and_its_own_metadata_are_kept(tmp_path: Path) -> None:
    bundle = legacy(tmp_path / "bundle", note="by hand")
    (bundle / ORIGINAL).rename(bundle / "best.safetensors")
    text = MANIFEST + "weights_file: best.safetensors # of 12 runs\n"
    (bundle / "manifest.yaml").write_text(text)
    migrate.migrate(bundle, replace=False)
    assert in_use(bundle) == ("best.T.safetensors", as_lists(PROGRAM), ())
    migrate.migrate(bundle, replace=True)
    assert (bundle / "manifest.yaml").read_text() == text.replace("2.0", "2.1")
    assert in_use(bundle) == ("best.safetensors", as_lists(PROGRAM), ())
    assert safetensors.read_header(bundle / "best.safetensors").metadata["note"] == "by hand"


def test_files_keep_their_permissions(bundle: Path) -> None:
    (bundle / ORIGINAL).chmod(0o640)
    (bundle / "manifest.yaml").chmod(0o604)
    migrate.migrate(bundle, replace=True)
    assert [(bundle / name).stat().st_mode & 0o777 for name in (ORIGINAL, "manifest.yaml")] == [0o640, 0o604]


# Staleness.


def changed(bundle: Path) -> dict[str, np.ndarray]:
    text = (bundle / "manifest.yaml").read_text()
    tensors = {name: array + 1 for name, array in PROGRAM.items()}
    legacy(bundle, tensors)
    (bundle / "manifest.yaml").write_text(text)
    return tensors


def test_an_original_that_has_changed_is_used_until_the_copy_is_made_again(bundle: Path) -> None:
    migrate.migrate(bundle, replace=False)
    tensors = changed(bundle)
    file, found, (note,) = in_use(bundle)
    assert (file, found, "run nereid migrate again" in note) == (ORIGINAL, as_lists(tensors), True)
    migrate.migrate(bundle, replace=False)
    assert in_use(bundle) == (COPY, as_lists(tensors), ())


def test_a_changed_original_is_what_a_replacement_keeps(bundle: Path) -> None:
    migrate.migrate(bundle, replace=False)
    tensors = changed(bundle)
    migrate.migrate(bundle, replace=True)
    assert in_use(bundle) == (ORIGINAL, as_lists(tensors), ())


def test_a_new_export_in_program_order_puts_an_end_to_the_copy(bundle: Path) -> None:
    migrate.migrate(bundle, replace=False)
    new = {name: array + 1 for name, array in PROGRAM.items()}
    weights.write(bundle / ORIGINAL, new, {"argument_order": json.dumps(list(new)), "axis_order": "xla"})
    migrate.migrate(bundle, replace=False)
    assert (files(bundle), in_use(bundle)) == ({"manifest.yaml", ORIGINAL}, (ORIGINAL, as_lists(new), ()))


def test_a_copied_bundle_with_new_times_is_not_stale(bundle: Path, tmp_path: Path) -> None:
    migrate.migrate(bundle, replace=False)
    os.utime(bundle / ORIGINAL, (1, 1))
    assert in_use(bundle) == (COPY, as_lists(PROGRAM), ())


def test_a_copy_without_its_original_is_complete(bundle: Path) -> None:
    migrate.migrate(bundle, replace=False)
    (bundle / ORIGINAL).unlink()
    assert in_use(bundle) == (COPY, as_lists(PROGRAM), ())
    migrate.migrate(bundle, replace=True)
    assert (files(bundle), in_use(bundle)) == ({"manifest.yaml", ORIGINAL}, (ORIGINAL, as_lists(PROGRAM), ()))


# Proof.


def damage_value(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def swap_square(path: Path) -> None:
    """The trap: a square weight that was not transposed fits in every way but its values."""
    tensors, metadata = safetensors.read(path).tensors, safetensors.read_header(path).metadata
    weights.write(path, {**tensors, "w": tensors["w"].T}, metadata)


def rewrite(change: Callable[[dict[str, Any], dict[str, str]], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        tensors, metadata = dict(safetensors.read(path).tensors), dict(safetensors.read_header(path).metadata)
        change(tensors, metadata)
        weights.write(path, tensors, metadata)

    return apply


DAMAGES = {
    "one bit": damage_value,
    "square": swap_square,
    "dtype": rewrite(lambda tensors, _: tensors.update(w=tensors["w"].view(np.int32))),
    "shape": rewrite(lambda tensors, _: tensors.update(conv=tensors["conv"].reshape(2, 3, 5, 4))),
    "name": rewrite(lambda tensors, _: tensors.update(b2=tensors.pop("b"))),
    "metadata": rewrite(lambda _, metadata: metadata.update(note="new")),
    "layout": rewrite(lambda _, metadata: metadata.pop("axis_order")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_copy_that_differs_in_anything_is_no_proved_copy(bundle: Path, damage: Callable[[Path], None]) -> None:
    migrate.migrate(bundle, replace=False)
    with safetensors.opened(bundle / ORIGINAL) as source:
        prove(source, bundle / COPY)
        damage(bundle / COPY)
        with pytest.raises(WeightsError, match=rf"^{COPY}: .*is not used"):
            prove(source, bundle / COPY)


def right(header: safetensors.Header, name: str) -> np.ndarray:
    array = PROGRAM[name]
    return array if "axis_order" in header.metadata else array.T


@pytest.mark.parametrize("reader", ["first", "second"])
def test_each_reader_alone_finds_a_wrong_value(bundle: Path, monkeypatch: pytest.MonkeyPatch, reader: str) -> None:
    migrate.migrate(bundle, replace=False)
    damage_value(bundle / COPY)
    # The other reader is made to see nothing wrong.
    if reader == "second":
        monkeypatch.setattr(safetensors.OpenFile, "tensor", lambda file, name: right(file.header, name))
    else:
        monkeypatch.setattr(migrate._Plain, "tensor", lambda _, name: PROGRAM[name])
    with safetensors.opened(bundle / ORIGINAL) as source, pytest.raises(WeightsError, match="is not the original's"):
        prove(source, bundle / COPY)


def test_a_damaged_copy_is_made_again_and_never_replaces_the_original(bundle: Path) -> None:
    migrate.migrate(bundle, replace=False)
    swap_square(bundle / COPY)
    migrate.migrate(bundle, replace=True)
    assert in_use(bundle) == (ORIGINAL, as_lists(PROGRAM), ())


def test_a_copy_that_goes_bad_while_it_replaces_the_original_is_taken_back(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (bundle / ORIGINAL).read_bytes()
    replace = Path.replace

    def bad_disk(self: Path, target: Path) -> Path:
        if target == bundle / ORIGINAL and self.read_bytes() != before:
            swap_square(bundle / COPY)  # the same file by its other name
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", bad_disk)
    with pytest.raises(WeightsError, match="is not the original's"):
        migrate.migrate(bundle, replace=True)
    assert (bundle / ORIGINAL).read_bytes() == before
    assert in_use(bundle)[:2] == (ORIGINAL, as_lists(PROGRAM))


def test_an_export_that_arrives_during_a_migration_is_not_lost(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    migrate.migrate(bundle, replace=False)
    link = os.link
    new: dict[str, np.ndarray] = {}

    def meanwhile(*arguments: Any) -> None:
        (bundle / ORIGINAL).unlink()
        new.update(changed(bundle))
        link(*arguments)

    monkeypatch.setattr(os, "link", meanwhile)
    with pytest.raises(WeightsError, match=f"{ORIGINAL} changed while it was migrated; try again"):
        migrate.migrate(bundle, replace=True)
    assert in_use(bundle)[:2] == (ORIGINAL, as_lists(new))
    monkeypatch.undo()
    migrate.migrate(bundle, replace=True)
    assert (files(bundle), in_use(bundle)) == ({"manifest.yaml", ORIGINAL}, (ORIGINAL, as_lists(new), ()))


def test_a_file_that_is_no_copy_is_not_written_over(bundle: Path) -> None:
    (bundle / COPY).write_bytes((bundle / ORIGINAL).read_bytes())
    with pytest.raises(WeightsError, match=rf"{COPY} is there but is no copy of {ORIGINAL}; rename or remove it"):
        migrate.migrate(bundle, replace=False)
    assert (files(bundle), in_use(bundle)) == ({"manifest.yaml", ORIGINAL, COPY}, (ORIGINAL, as_lists(PROGRAM), ()))


def test_a_migration_while_a_bundle_is_converted_is_noticed(bundle: Path, tmp_path: Path) -> None:
    found = weights.read(bundle / ORIGINAL)  # legacy, to be transposed
    migrate.migrate(bundle, replace=True)
    with pytest.raises(WeightsError, match="changed while the bundle was converted; convert it again"):
        found.writer()(tmp_path / "written")


@pytest.mark.parametrize(
    "origin",
    ["", "[]", "{}", '{"file": "../x", "size_bytes": 1, "mtime_ns": 1, "sha256": ""}', "[" * 100_000],
    ids=["empty", "list", "no keys", "path", "deep"],
)
def test_an_origin_that_no_migration_wrote_is_refused(tmp_path: Path, origin: str) -> None:
    bundle = legacy(tmp_path / "bundle", migrated_from=origin)
    with pytest.raises(WeightsError, match=r"metadata migrated_from is .*which no migration wrote"):
        migrate.migrate(bundle, replace=False)


# Kills, locks, disks.


@pytest.mark.parametrize("mode", ["copy", "replace"])
def test_a_bundle_loads_wherever_its_migration_is_killed_and_the_next_one_ends_it(bundle: Path, mode: str) -> None:
    script = Path(__file__).with_name("kill_migrations.py")
    done = subprocess.run(
        [sys.executable, str(script), str(bundle), mode], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    print(result)
    # The folder went through every state of the sequence: a half copy, the copy, the line, and so on.
    assert result["states"] >= {"copy": 6, "replace": 12}[mode]


def test_every_file_is_on_the_disk_before_it_gets_its_name(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash of the machine, as far as it can be seen from here: sync the file, rename it, sync the folder."""
    log: list[tuple[str, int]] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        log.append(("sync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        log.append(("rename", self.stat().st_ino))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    migrate.migrate(bundle, replace=True)
    renames = [place for place, (what, _) in enumerate(log) if what == "rename"]
    assert len(renames) == 5  # the copy, the manifest three times, the swap
    for place in renames:
        assert ("sync", log[place][1]) in log[:place]
        assert log[place + 1] == ("sync", bundle.stat().st_ino)
    assert log[-1] == ("sync", bundle.stat().st_ino)  # of the extra name's removal


def test_a_second_migration_waits_for_the_first(bundle: Path) -> None:
    (bundle / ".cache").mkdir()
    with locks.locked(bundle / ".cache" / LOCK):
        second = threading.Thread(target=migrate.migrate, args=(bundle,), kwargs={"replace": True})
        second.start()
        second.join(0.3)
        assert (second.is_alive(), files(bundle)) == (True, {"manifest.yaml", ORIGINAL})
    second.join(60)
    assert in_use(bundle) == (ORIGINAL, as_lists(PROGRAM), ())


@pytest.mark.parametrize("what", ["write", "link"])
def test_a_disk_without_space_or_hard_links(bundle: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    if what == "link":
        monkeypatch.setattr(os, "link", refuse)
        migrate.migrate(bundle, replace=True)
        assert (files(bundle), in_use(bundle)) == ({"manifest.yaml", ORIGINAL}, (ORIGINAL, as_lists(PROGRAM), ()))
        return
    before = (bundle / ORIGINAL).read_bytes()
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(WeightsError, match=r"cannot be migrated \(No space left on device\); it loads as before"):
        migrate.migrate(bundle, replace=True)
    assert ((bundle / ORIGINAL).read_bytes(), files(bundle)) == (before, {"manifest.yaml", ORIGINAL})


@pytest.mark.parametrize("file", ["manifest.yaml", ORIGINAL])
def test_a_bundle_without_one_of_its_files_is_refused(bundle: Path, file: str) -> None:
    (bundle / file).unlink()
    with pytest.raises(NereidError, match=rf"{file}: cannot be read \(No such file"):
        migrate.migrate(bundle, replace=False)


def test_a_manifest_that_cannot_be_edited_is_told_and_the_bundle_still_loads(bundle: Path) -> None:
    (bundle / "manifest.yaml").write_text("format_version: 2.0\nweights_file: a\n" + MANIFEST)
    shutil.copyfile(bundle / ORIGINAL, bundle / "a")
    with pytest.raises((ManifestError, WeightsError)):
        migrate.migrate(bundle, replace=True)
    assert in_use(bundle)[1] == as_lists(PROGRAM)


# The command.


def test_the_command_takes_bundles_and_folders_of_them(tmp_path: Path) -> None:
    legacy(tmp_path / "a")
    legacy(tmp_path / "b")
    result = invoke("--copy", tmp_path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line.partition(": ")[0] for line in result.stdout.splitlines()] == [
        str(tmp_path / "a"),
        str(tmp_path / "b"),
    ]
    assert [in_use(tmp_path / name)[0] for name in "ab"] == [COPY, COPY]


def test_one_bundle_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    legacy(tmp_path / "a")
    (tmp_path / "a" / ORIGINAL).write_bytes(b"")
    legacy(tmp_path / "b")
    result = invoke("--replace", tmp_path / "a", tmp_path / "b")
    (line,) = result.stderr.splitlines()
    assert (result.exit_code, line.startswith(f"error: {tmp_path / 'a'}: {ORIGINAL}: the header says")) == (1, True)
    assert in_use(tmp_path / "b")[0] == ORIGINAL


def test_the_command_wants_one_of_the_two_ways(bundle: Path) -> None:
    result = invoke(bundle)
    assert (result.exit_code, "choose --copy or --replace" in result.stderr) == (2, True)
