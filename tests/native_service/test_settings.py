from pathlib import Path

import pytest

from native_service import settings
from nereid_backend.errors import SettingsError

GOOD = """
server:
  bind_addr: "127.0.0.1:50051"
  ml_backends_path: models
models:
  - {name: model3, device: cpu, queue_capacity: 4}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "nereid.yaml"


def load(file: Path, text: str) -> settings.Settings:
    file.write_text(text)
    return settings.load(file)


def problem(file: Path, text: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load(file, text)
    return str(caught.value)


def test_a_valid_file_gives_frozen_settings_with_a_path_relative_to_the_file(file: Path) -> None:
    loaded = load(file, GOOD)
    assert loaded.server.folder == file.parent / "models"
    assert loaded.server.bind == settings.Address("127.0.0.1", 50051)
    assert loaded.server.http is None
    [model] = loaded.models
    assert (model.name, model.device, model.queue_capacity, model.backend, model.signature) == (
        "model3", "cpu", 4, None, "serving_default",
    )  # fmt: skip


def test_duplicate_names_are_refused(file: Path) -> None:
    text = GOOD + "  - {name: model3, device: cpu, queue_capacity: 1}\n"
    assert problem(file, text) == f"{file}: models must have unique names, 'model3' appears twice"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("queue_capacity: 4", "queue_capacity: 0", "models[0].queue_capacity must be greater than 0, got 0"),
        ("queue_capacity: 4", "queue_capacity: '4'", "models[0].queue_capacity must be a whole number, got '4'"),
        ("queue_capacity: 4", "queue_capacity: true", "models[0].queue_capacity must be a whole number, got True"),
        ("device: cpu", "device: metal", "models[0].device must be cpu, cuda or cuda:N, got 'metal'"),
        ("device: cpu", "device: cuda:abc", "models[0].device must be cpu, cuda or cuda:N, got 'cuda:abc'"),
        ("name: model3", "name: ' '", "models[0].name must not be blank, got ' '"),
        ("name: model3", "name: a/b", "models[0].name may hold letters, digits, '_', '.' and '-' only, got 'a/b'"),
        ("name: model3", "name: ..", "models[0].name may hold letters, digits, '_', '.' and '-' only, got '..'"),
        ("device: cpu, ", "", "models[0].device is required; add it"),
        ("name: model3, ", "", "models[0].name is required; add it"),
        (", queue_capacity: 4", "", "models[0].queue_capacity is required; add it"),
        ("  ml_backends_path: models\n", "", "server.ml_backends_path is required; add it"),
        ('  bind_addr: "127.0.0.1:50051"\n', "", "server.bind_addr is required; add it"),
        ("queue_capacity: 4", "queue_capacity: 4, colour: red",
         "models[0].colour is not a known key; remove it or check the spelling"),
        ("127.0.0.1:50051", "localhost:50051",
         "server.bind_addr must be IP:port such as 127.0.0.1:50051 or [::1]:50051, not a host name,"
         " got 'localhost:50051'"),
        ("127.0.0.1:50051", "127.0.0.1:70000", "server.bind_addr must have a port from 0 to 65535, got"
         " '127.0.0.1:70000'"),
        ("127.0.0.1:50051", " ", "server.bind_addr must not be blank, got ' '"),
        ("models:\n  - {name: model3, device: cpu, queue_capacity: 4}", "models: []",
         "models must list at least one model"),
    ],
)  # fmt: skip
def test_each_broken_rule_is_one_line(file: Path, old: str, new: str, message: str) -> None:
    assert problem(file, GOOD.replace(old, new)) == f"{file}: {message}"


@pytest.mark.parametrize(("written", "meant"), [("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")])
def test_a_device_is_normalised(file: Path, written: str, meant: str) -> None:
    assert load(file, GOOD.replace("device: cpu", f"device: '{written}'")).models[0].device == meant


@pytest.mark.parametrize("key", ["http_addr", "metrics_addr"])
def test_the_http_address_has_two_names(file: Path, key: str) -> None:
    loaded = load(file, GOOD.replace("models\n", f'models\n  {key}: "127.0.0.1:8002"\n', 1))
    assert loaded.server.http == settings.Address("127.0.0.1", 8002)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ('http_addr: "127.0.0.1:1"\n  metrics_addr: "127.0.0.1:2"',
         "http_addr and metrics_addr are two names of one key; keep http_addr"),
        ('http_addr: "127.0.0.1:50051"', "http_addr must differ from bind_addr, both are 127.0.0.1:50051"),
        ('http_addr: "[::1]:1"\n  http_infer_addr: "[::1]:1"',
         "http_infer_addr must differ from http_addr, both are [::1]:1"),
        ('metrics_addr: ""', "server.metrics_addr must not be blank, got ''"),
    ],
)  # fmt: skip
def test_a_wrong_http_address_is_refused(file: Path, extra: str, message: str) -> None:
    assert problem(file, GOOD.replace("models\n", f"models\n  {extra}\n", 1)) == f"{file}: {message}"


def test_shared_memory_is_for_callers_on_this_host(file: Path) -> None:
    text = GOOD.replace("models\n", "models\n  allow_shared_memory: true\n", 1)
    assert load(file, text).server.allow_shared_memory
    text = text.replace("127.0.0.1", "0.0.0.0").replace("models\n", "models\n  allow_insecure: true\n", 1)
    assert "allow_shared_memory is for callers on this host only; bind_addr must be 127.0.0.1" in problem(file, text)


def test_an_address_for_everybody_needs_an_explicit_yes(file: Path) -> None:
    text = GOOD.replace("127.0.0.1", "0.0.0.0")
    assert "allow_insecure: true" in problem(file, text)
    http = GOOD.replace("models\n", "models\n  http_infer_addr: '0.0.0.0:8000'\n", 1)
    assert "http_infer_addr 0.0.0.0:8000 is reachable from other machines" in problem(file, http)
    loaded = load(file, text.replace("models\n", "models\n  allow_insecure: true\n", 1))
    assert loaded.server.bind.host == "0.0.0.0"


PROTECTED = (
    "models\n  tls: {cert: tls/c.pem, key: tls/k.pem%s}\n  auth: {keys: [{name: a, role: admin, key_file: k}]}\n"
)


def test_an_address_for_everybody_needs_no_yes_with_tls_and_keys(file: Path) -> None:
    text = GOOD.replace("127.0.0.1", "0.0.0.0")
    server = load(file, text.replace("models\n", PROTECTED % "", 1)).server
    assert server.tls is not None
    assert server.auth is not None
    assert (server.tls.cert, server.tls.client_ca) == (str(file.parent / "tls/c.pem"), None)
    assert server.auth.keys[0].key_file == str(file.parent / "k")
    moved = settings.with_addresses(load(file, text.replace("models\n", PROTECTED % "", 1)), "0.0.0.0:1", None)
    assert moved.server.auth == server.auth


@pytest.mark.parametrize(
    ("left", "missing"),
    [
        ("", "server.tls and server.auth"),
        ("  tls: {cert: c, key: k}\n", "server.auth"),
        ("  auth: {jwt: {secret_env: S}}\n", "server.tls"),
        ("  auth: {jwt: {secret_env: S}}\n  http_addr: 0.0.0.0:1\n", "server.tls"),
    ],
)
def test_the_refusal_of_an_open_address_says_what_is_missing(file: Path, left: str, missing: str) -> None:
    text = GOOD.replace("127.0.0.1", "0.0.0.0").replace("models\n", f"models\n{left}", 1)
    assert f"is reachable from other machines without {missing}; add that, use 127.0.0.1," in problem(file, text)


def test_certificates_of_clients_protect_the_calls_but_not_the_metrics(file: Path) -> None:
    text = GOOD.replace("127.0.0.1", "0.0.0.0")
    tls = "models\n  tls: {cert: c, key: k, client_ca: a}\n"
    assert load(file, text.replace("models\n", tls, 1)).server.auth is None
    both = text.replace("models\n", f"{tls}  http_addr: 0.0.0.0:1\n", 1)
    assert "http_addr 0.0.0.0:1 is reachable from other machines without server.auth;" in problem(file, both)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("auth: {}", "server.auth needs keys or jwt; without either nobody could call"),
        ("auth: {keys: [{name: a, role: boss, key_file: k}]}", "server.auth.keys[0].role"),
        ("auth: {keys: [{name: a, role: admin}]}", "each key needs exactly one of key_file, key_env and sha256"),
        ("auth: {keys: [{name: a, role: admin, key: 5ecret}]}", "server.auth.keys[0].key is not a known key"),
        ("auth: {keys: [{name: a, role: admin, sha256: 5ecret}]}", "must be a SHA-256 digest, 64 hexadecimal digits"),
        (
            "auth: {keys: [{name: a, role: admin, key_env: 5ecret}]}",
            "must be the name of a variable of the environment",
        ),
        ("auth: {jwt: {secret: 5ecret, secret_env: A}}", "server.auth.jwt.secret is not a known key"),
        ("auth: {jwt: {secret_file: a, secret_env: A}}", "needs exactly one of secret_file and secret_env"),
        ("auth: {jwt: {secret_env: A, algorithm: none}}", "server.auth.jwt.algorithm"),
        ("auth: {keys: 5ecret}", "server.auth.keys must be a list"),
        ("auth: {keys: [{name: a, role: 5ecret, key_file: k}]}", "server.auth.keys[0].role"),
        ("auth: {keys: [{name: a, role: admin, key_file: [5ecret]}]}", "server.auth.keys[0].key_file must be text"),
        ("tls: {cert: a}", "server.tls.key is required; add it"),
    ],
)
def test_a_wrong_section_of_access_is_told_and_no_key_is_shown(file: Path, section: str, message: str) -> None:
    told = problem(file, GOOD.replace("models\n", f"models\n  {section}\n", 1))
    assert message in told
    assert "5ecret" not in told


def test_ipv6_addresses_stand_in_brackets(file: Path) -> None:
    assert load(file, GOOD.replace("127.0.0.1", "[::1]")).server.bind == settings.Address("::1", 50051)
    assert "IP:port" in problem(file, GOOD.replace("127.0.0.1", "::1"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; it needs the keys server and models"),
        ("- a", "must hold a mapping with server and models, got list"),
        ("server: [", "is not YAML at line 1, column 10"),
        ("server: !!python/object:os.system {}", "is not YAML at line 1"),
        ("server: !!int ", "is not YAML (a date, a number or a tag that is none); quote the value"),
        ("server: 2024-99-99", "is not YAML (a date, a number or a tag that is none); quote the value"),
    ],
)
def test_what_is_not_a_mapping_in_yaml_is_refused(file: Path, text: str, message: str) -> None:
    assert problem(file, text).startswith(f"{file}: {message}")


def test_every_problem_gets_its_own_line(file: Path) -> None:
    text = GOOD.replace("device: cpu", "device: tpu").replace("bind_addr", "bind_adr")
    assert problem(file, text).splitlines() == [
        f"{file}: server.bind_addr is required; add it",
        f"{file}: server.bind_adr is not a known key; remove it or check the spelling",
        f"{file}: models[0].device must be cpu, cuda or cuda:N, got 'tpu'",
    ]


def test_a_missing_file_and_a_missing_folder_are_told_apart(file: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        settings.load(tmp_path / "none.yaml")
    assert "server.ml_backends_path must be a directory" in problem(
        file, GOOD.replace("ml_backends_path: models", "ml_backends_path: other")
    )
    assert "server.ml_backends_path must be a directory" in problem(
        file, GOOD.replace("ml_backends_path: models", "ml_backends_path: nereid.yaml")
    )


def test_a_folder_needs_no_file(tmp_path: Path) -> None:
    made = settings.for_folder(tmp_path)
    assert (made.server.bind_addr, made.server.http_addr, made.models) == ("127.0.0.1:50051", None, ())
    with pytest.raises(SettingsError, match="must be a directory"):
        settings.for_folder(tmp_path / "none")


def test_the_command_line_overrides_the_addresses_and_is_checked_like_the_file(file: Path) -> None:
    loaded = load(file, GOOD)
    assert settings.with_addresses(loaded, "127.0.0.1:0", None).server.bind.port == 0
    assert settings.with_addresses(loaded, None, None) is loaded
    with pytest.raises(SettingsError, match=r"command line: bind_addr must be IP:port"):
        settings.with_addresses(loaded, "nowhere", None)


def test_code_of_models_in_a_folder_is_opened_when_the_command_says_so(tmp_path: Path) -> None:
    for allowed in (False, True):
        others = settings.for_folder(tmp_path, allow_code=allowed).others
        assert others is not None
        assert others.named("worker").options.allow_code is allowed
