"""``models.toml`` and ``models.json``: what becomes of them in our settings, and what is said of wrong ones."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import snoozeml
from snoozeml.config import GlobalDefaultsConfig

from native_service.access import credentials
from native_service.access.roles import Role
from native_service.settings import Settings
from native_service.snooze import models_file, uploaded
from native_service.snooze.models_file import CommandLine
from nereid_backend.errors import RepositoryError, SettingsError

Read = Callable[..., Settings]

KEY = "sk-somebody-elses-secret"
ROW = {"device": "cpu", "queue_capacity": 1}


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """The settings that a file of the text given stands for, beside what is said on the command line."""

    def load(text: str, name: str = "models.toml", **said: object) -> Settings:
        (tmp_path / name).write_text(text)
        return models_file.load(tmp_path / name, tmp_path, CommandLine(**said))  # type: ignore[arg-type]

    return load


def problem(read: Read, text: str, name: str = "models.toml") -> str:
    with pytest.raises(SettingsError) as caught:
        read(text, name)
    return str(caught.value)


def test_what_the_sdk_writes_is_read_in_both_formats(tmp_path: Path) -> None:
    config = snoozeml.SnoozeConfig(defaults=GlobalDefaultsConfig(max_loaded_models=3, min_residency_secs=2))
    config.add_model("plain", "plain.onnx")
    config.add_model(
        "odd", "other/odd.onnx", description="two words", max_batch_size=64, max_batch_delay_ms=7, idle_timeout_secs=5,
        min_residency_secs=9,
    )  # fmt: skip
    config.add_model("kept", "kept.onnx", pinned=True, idle_timeout_secs=0, device="cuda")
    config.add_api_key("admin", key=KEY, name="me")
    config.add_api_key("ro", key=f"{KEY}-ro")
    for name in models_file.FILES:
        read = models_file.load(config.save(tmp_path / name), tmp_path, CommandLine())
        plain, odd, kept = read.models
        assert (plain.name, plain.device, plain.options.path) == ("plain", "cpu", "plain.onnx")
        assert (plain.options.load, plain.options.idle_timeout_s, plain.options.default_batch_size) == (
            "first_request", 300.0, 16,
        )  # fmt: skip
        assert (odd.options.path, odd.options.description, odd.options.idle_timeout_s) == (
            "other/odd.onnx", "two words", 5.0,
        )  # fmt: skip
        assert (odd.options.default_batch_size, odd.options.batch_delay_ms) == (64, 7)
        assert (kept.options.pinned, kept.options.idle_timeout_s, kept.device) == (True, None, "cuda:0")
        assert read.others is not None
        assert read.others.options == plain.options.model_copy(update={"path": None})
        assert read.server.residency.max_loaded_models == 3
        assert [model.options.min_residency_s for model in read.models] == [2.0, 9.0, 2.0]
        assert str(read.server.rest) == models_file.DEFAULT_REST
        assert read.server.allow_model_control
        assert read.server.auth is not None
        digests = credentials.read(read.server.auth).keys
        assert digests == {
            hashlib.sha256(KEY.encode()).hexdigest(): Role.ADMIN,
            hashlib.sha256(f"{KEY}-ro".encode()).hexdigest(): Role.READ_ONLY,
        }
        assert KEY not in repr(read)
        (tmp_path / name).unlink()


def test_code_runs_from_folders_that_are_listed_and_from_nothing_else(read: Read, tmp_path: Path) -> None:
    (tmp_path / "worker").mkdir()
    (tmp_path / "net.pkl").write_bytes(b"")
    entry = "[[models]]\nid = '{0}'\npath = '{0}'\n"
    found = read(entry.format("worker") + entry.format("net.pkl"))
    assert [model.options.allow_code for model in found.models] == [True, False]
    assert found.others is not None
    assert not found.others.options.allow_code


def test_without_a_file_the_folder_is_served_to_everybody(tmp_path: Path) -> None:
    read = models_file.load(None, tmp_path, CommandLine(bind="127.0.0.1:1", rest="127.0.0.1:2"))
    assert (str(read.server.bind), str(read.server.rest), read.server.auth, read.models) == (
        "127.0.0.1:1", "127.0.0.1:2", None, (),
    )  # fmt: skip


def test_tokens_and_the_role_of_metrics_come_over(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "  fixture-secret ")
    text = (
        "[auth]\nprotect_metrics = true\n"
        '[auth.jwt]\nsecret_env = "MY_SECRET"\nalgorithm = "HS512"\nissuer = "me"\nleeway_secs = 5'
    )
    for protect, role in ((text, Role.ADMIN), (text.replace("true", "false"), Role.PUBLIC)):
        auth = read(protect).server.auth
        assert auth is not None
        known = credentials.read(auth)
        assert known.metrics is role
        assert known.tokens == credentials.TokenRules(b"fixture-secret", "HS512", "me", None, 5)


def test_keys_of_the_command_line_are_let_in_beside_those_of_the_file(read: Read) -> None:
    text = f'[[auth.api_keys]]\nrole = "inference"\nkey = "{KEY}"\n[auth]\n'
    auth = read(text, keys=[("admin", "sk-of-the-command-line")], jwt_secret="secret-of-the-line").server.auth
    assert auth is not None
    known = credentials.read(auth)
    assert sorted(known.keys.values()) == [Role.INFERENCE, Role.ADMIN]
    assert known.tokens is not None
    assert known.tokens.secret == b"secret-of-the-line"


def test_one_key_may_be_said_twice_but_not_with_two_roles(read: Read) -> None:
    text = f'[[auth.api_keys]]\nrole = "admin"\nkey = "{KEY}"\n'
    auth = read(text, keys=[("admin", KEY)]).server.auth
    assert auth is not None
    assert [role.name for role in credentials.read(auth).keys.values()] == ["ADMIN"]
    auth = read(text, keys=[("inference", KEY)]).server.auth
    assert auth is not None
    with pytest.raises(SettingsError, match="is the key of another name as well"):
        credentials.read(auth)


def test_auth_that_is_switched_off_lets_everybody_in(read: Read) -> None:
    assert read(f'[auth]\nenabled = false\n[[auth.api_keys]]\nrole = "admin"\nkey = "{KEY}"').server.auth is None


def test_a_variable_that_is_not_set_stops_the_start(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_THERE", raising=False)
    auth = read('[[auth.api_keys]]\nrole = "admin"\nkey_env = "NOT_THERE"\n').server.auth
    assert auth is not None
    with pytest.raises(SettingsError, match="needs the variable NOT_THERE in the environment, which is not set"):
        credentials.read(auth)


def test_brokers_are_refused_and_unknown_keys_warned_of(read: Read, caplog: pytest.LogCaptureFixture) -> None:
    text = problem(read, '[[streams]]\nname = "x"\nbroker = "redis"\n')
    assert "[[streams]] is not supported: nereid reads no message broker" in text
    with caplog.at_level(logging.INFO):
        read(
            "colour = 1\n[defaults]\nfast = true\nmax_replicas = 2\n"
            '[[models]]\nid = "a"\npath = "a"\nsize = 3\nrouting_strategy = "random"\n'
        )
    told = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert told[:3] == [
        "colour is not a known key; it is passed over",
        "defaults.fast is not a known key; it is passed over",
        "models[0].size is not a known key; it is passed over",
    ]
    assert [line.partition(" has no effect here")[0] for line in told[3:]] == [
        "max_replicas of the defaults", "routing_strategy of model 'a'",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[defaults", "is not TOML (Expected ']' at the end of a table declaration"),
        ("[[models]]\nid = 1\npath = 'a'", "models[0].id must be text, got 1"),
        ("[[models]]\nid = 'a'", "models[0].path is required; add it"),
        ("[[models]]\nid = 'a/b'\npath = 'x'", "models[0].name may hold letters, digits"),
        ("[[models]]\nid = 'a'\npath = 'x'\n[[models]]\nid = 'a'\npath = 'y'", "'a' appears twice"),
        ("[defaults]\nidle_timeout_secs = -1", "defaults.idle_timeout_secs must be at least 0, got -1"),
        ("[[auth.api_keys]]\nrole = 'admin'", "[[auth.api_keys]] 1 needs exactly one of key and key_env"),
        ("[[auth.api_keys]]\nrole = 'boss'\nkey = 'x'", "auth.api_keys[0].role must be one of read_only"),
        ("[auth]\nenabled = true", "server.auth needs keys or jwt"),
        (f"[auth]\napi_keys = ['{KEY}']", "auth.api_keys[0] must be a mapping"),
        (f"[[auth.api_keys]]\nrole = 'admin'\nkey = ['{KEY}']", "auth.api_keys[0].key must be text"),
        (f"[auth]\njwt = '{KEY}'", "auth.jwt must be a mapping"),
        (f"[auth]\napi_keys = '{KEY}'", "auth.api_keys must be a list"),
        (f"[[auth.api_keys]]\nrole = '{KEY}'\nkey = 'admin'", "auth.api_keys[0].role must be one of read_only"),
        (f"[auth]\nenabled = '{KEY}'", "auth.enabled must be true or false"),
        (f"auth = '{KEY}'", "auth must be a mapping"),
        ("[defaults]\nmax_batch_size = 2147483648", "defaults.max_batch_size must be less than 2147483648"),
    ],
)
def test_a_wrong_file_is_told_in_one_line_without_a_secret(read: Read, text: str, message: str) -> None:
    told = problem(read, text)
    assert message in told
    assert len(told.splitlines()) == 1
    assert KEY not in told


def test_a_file_that_is_no_json_is_told_with_its_line(read: Read) -> None:
    assert "is not JSON at line 2" in problem(read, '{\n"models": [}', "models.json")


def test_two_files_in_a_folder_are_one_too_many(tmp_path: Path) -> None:
    assert models_file.find(tmp_path) is None
    for name in models_file.FILES:
        (tmp_path / name).write_text("{}")
    with pytest.raises(SettingsError, match=r"models\.toml and models\.json; keep one"):
        models_file.find(tmp_path)


def test_an_uploaded_model_has_its_settings_again_after_a_restart(read: Read, tmp_path: Path) -> None:
    others = read("").others
    assert others is not None
    given = others.options.model_copy(update={"path": "up.onnx", "idle_timeout_s": 9.0, "description": "mine"})
    model = others.named("up").model_copy(update={"options": given})
    uploaded.remember(tmp_path, model)
    assert read("").models == ()  # its file is not there
    (tmp_path / "up.onnx").write_bytes(b"")
    assert read("").models == (model,)
    # What the file says of it counts more.
    assert read("[[models]]\nid = 'up'\npath = 'up.onnx'").models[0].options.idle_timeout_s == 300.0
    # In nereid.yaml, where what is not listed is served.
    yaml = {"server": {"bind_addr": "127.0.0.1:0", "ml_backends_path": "."}, "models": []}
    for others, found in (({"others": {}}, (model,)), ({"models": [{**ROW, "name": "listed"}]}, ())):
        (tmp_path / "nereid.yaml").write_text(json.dumps({**yaml, **others}))
        its = models_file.load_any(tmp_path / "nereid.yaml", CommandLine())
        assert tuple(each for each in its.models if each.name != "listed") == found
    (tmp_path / uploaded.FOLDER / "models.json").write_text(json.dumps([{"name": 1}]))
    assert read("").models == ()


def test_what_is_remembered_of_others_stays_and_of_files_that_have_gone_does_not(read: Read, tmp_path: Path) -> None:
    others = read("").others
    assert others is not None

    def remember(name: str) -> None:
        options = others.options.model_copy(update={"path": f"{name}.onnx"})
        uploaded.remember(tmp_path, others.named(name).model_copy(update={"options": options}))

    for name in ("first", "gone", "second"):
        (tmp_path / f"{name}.onnx").touch()
        remember(name)
    (tmp_path / "gone.onnx").unlink()
    place = tmp_path / uploaded.FOLDER / "models.json"
    twice = json.loads(place.read_text())
    place.write_text(json.dumps(twice + twice))
    assert [model.name for model in read("").models] == ["first", "second"]
    newer = {"name": "newer", "a_key_of_another_version": [1]}
    place.write_text(json.dumps([*twice, newer]))
    assert [model.name for model in read("").models] == ["first", "second"]
    remember("first")
    kept = json.loads(place.read_text())
    assert [each["name"] for each in kept] == ["second", "newer", "first"]
    assert newer in kept
    place.rename(place.with_name("kept"))
    place.mkdir()
    assert read("").models == ()
    with pytest.raises(RepositoryError, match="cannot be kept"):
        remember("first")
    place.rmdir()
    for junk in ("{", "5", "[[]]", '[{"name": "x", "options": {"path": "\\u0000"}}]'):
        place.write_text(junk)
        assert read("").models == ()
        remember("first")
        assert [model.name for model in read("").models] == ["first"]
