"""Keys, tokens, roles and certificates at the public address: a real Envoy before a fake Triton."""

import asyncio
import errno
import hashlib
import json
import logging
import os
import re
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest
import trustme
from aiohttp import ClientSession, TCPConnector
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2

from native_service.access import certificates, credentials, roles
from native_service.access.credentials import Credentials, TokenRules
from native_service.access.roles import Role
from native_service.envoy import access as envoy_access
from native_service.envoy.access import Access
from native_service.kserve import http as kserve_http
from native_service.proto import inference_pb2, snoozeml_pb2
from native_service.settings.access import AuthSettings, TlsSettings
from native_service.telemetry.log_records import FORMATTERS
from nereid_backend.errors import EnvoyUnavailable, SettingsError
from nereid_backend.spec import ModelSpec

Fronting = Callable[..., Any]
Spec = Callable[..., ModelSpec]
KSERVE = "/inference.GRPCInferenceService/"
KEYS = {"read_only": "the key of a reader", "inference": "sk-inference-" + "x" * 90, "admin": "key/+=of.an~admin"}
KEYS = {name: key.replace(" ", "-") for name, key in KEYS.items()}
SECRET = "a secret that signs tokens, long enough for all three algorithms: 64"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def known(tokens: TokenRules | None = None) -> Access:
    return Access(credentials=Credentials({digest(key): roles.NAMES[name] for name, key in KEYS.items()}, tokens))


def rules(algorithm: str = "HS256", issuer: str | None = None, audience: str | None = None) -> TokenRules:
    return TokenRules(SECRET.encode(), algorithm, issuer, audience)


def token(algorithm: str = "HS256", secret: str = SECRET, lifetime_s: float | None = 60, **claims: Any) -> str:
    expiry = {} if lifetime_s is None else {"exp": int(time.time() + lifetime_s)}
    return jwt.encode({"role": "inference", **expiry, **claims}, secret, algorithm)


def bearer(text: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {text}"),)


async def ask(channel: Any, path: str, metadata: Any = (), data: bytes = b"") -> tuple[str, str]:
    """The code and the text of a call to ``path``."""
    try:
        await channel.unary_unary(path)(data, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


def infer_request(shape: tuple[int, ...] = (1, 16)) -> bytes:
    request = service_pb2.ModelInferRequest(model_name="adder")
    request.inputs.add(name="input", datatype="FP32", shape=shape)
    request.raw_input_contents.append(bytes(64))
    data: bytes = request.SerializeToString()
    return data


async def infer(channel: Any, metadata: Any = (), shape: tuple[int, ...] = (1, 16)) -> tuple[str, str]:
    return await ask(channel, KSERVE + "ModelInfer", metadata, infer_request(shape))


def test_every_method_of_every_protocol_has_a_role() -> None:
    files = (service_pb2.DESCRIPTOR, inference_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR, snoozeml_pb2.DESCRIPTOR)
    services = [service for file in files for service in file.services_by_name.values()]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert set(roles.RPCS) - {"/grpc.health.v1.Health/List"} == methods - {"/grpc.health.v1.Health/List"}


def test_a_call_over_http_needs_the_role_of_the_method_it_becomes() -> None:
    for (method, path), name in kserve_http.ROUTES.items():
        call = roles.HttpCall(method, re.sub(r"\{\w+\}", "NAME", path))
        assert roles.HTTP.get(call, Role.ADMIN) == roles.RPCS[f"/inference.GRPCInferenceService/{name}"], call


@pytest.mark.parametrize("shape", [(1, 16), (16,)], ids=["native", "service"])
def test_each_call_needs_its_role_on_every_way(fronting: Fronting, spec: Spec, shape: tuple[int, ...]) -> None:
    async def scenario() -> None:
        async with fronting(spec(), access=known()) as service:
            assert (await infer(service.channel, shape=shape))[0] == "UNAUTHENTICATED"
            for name, key in KEYS.items():
                for metadata in (bearer(key), (("x-api-key", key),)):
                    code, text = await infer(service.channel, metadata, shape)
                    assert (code, text) == (
                        ("PERMISSION_DENIED", "the role of this key or token does not allow this call")
                        if name == "read_only"
                        else ("OK", "")
                    )
            assert len(service.triton.requests) == 4
            # What Triton and our service would only log does not travel on.
            assert not {"authorization", "x-api-key"} & {name for seen in service.triton.metadata for name in seen}

    asyncio.run(scenario())


def test_the_table_of_roles_is_what_callers_meet(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec(), access=known()) as service:
            for path, needed in {**roles.RPCS, "/inference.Nereid/Nothing": Role.ADMIN, "/x.Y/Z?a": Role.ADMIN}.items():
                if path.endswith("Watch"):
                    continue  # has no end
                for role in Role:
                    name = role.name.lower()
                    metadata = bearer(KEYS[name]) if role else ()
                    code, _ = await ask(service.channel, path, metadata)
                    refused = {"UNAUTHENTICATED", "PERMISSION_DENIED"}
                    expected = "PERMISSION_DENIED" if role else "UNAUTHENTICATED"
                    assert (code == expected) if role < needed else (code not in refused), (path, role, code)

    asyncio.run(scenario())


def test_a_stranger_is_told_so_in_a_proper_answer_of_grpc(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec(), access=known()) as service:
            for metadata, text in {
                (): "this call needs a key or a token: authorization or x-api-key",
                bearer("nobody-s"): "the key or token is not known here",
                bearer(digest(KEYS["admin"])): "the key or token is not known here",
                bearer(KEYS["admin"] * 100): "the key or token is not known here",
                (("x-api-key", "x"),): "the key or token is not known here",
                (("authorization", "Basic YTpi"),): "authorization must be Bearer and a key or a token",
                (("authorization", ""),): "authorization must be Bearer and a key or a token",
                # Bearer decides.
                (*bearer("nobody-s"), ("x-api-key", KEYS["admin"])): "the key or token is not known here",
            }.items():
                assert await infer(service.channel, metadata) == ("UNAUTHENTICATED", text)
            upload = service.channel.stream_stream("/inference.Nereid/Checkpoint")()
            assert await upload.code() is grpc.StatusCode.UNAUTHENTICATED
            assert service.triton.requests == []

    asyncio.run(scenario())


@pytest.mark.parametrize("algorithm", ["HS256", "HS384", "HS512"])
def test_a_token_is_as_good_as_a_key_of_its_role(fronting: Fronting, spec: Spec, algorithm: str) -> None:
    async def scenario() -> None:
        async with fronting(spec(), access=known(rules(algorithm))) as service:
            assert await infer(service.channel, bearer(KEYS["inference"])) == ("OK", "")
            for claims in (
                {},
                {"role": "user"},
                {"role": None, "roles": ["read_only", "administrator"]},
                {"roles": ["ro"]},
            ):
                assert await infer(service.channel, bearer(token(algorithm, **claims))) == ("OK", "")
            assert await infer(service.channel, bearer(token(algorithm, lifetime_s=-50))) == ("OK", "")
            for claims in (
                {"role": "ro"},
                {"role": "boss"},
                {"role": None},
                {"role": 3},
                {"role": [], "roles": "admin"},
            ):
                assert (await infer(service.channel, bearer(token(algorithm, **claims))))[0] == "PERMISSION_DENIED"

    asyncio.run(scenario())


def test_a_token_that_breaks_a_rule_is_refused_with_the_reason(fronting: Fronting, spec: Spec) -> None:
    unsigned = token().rsplit(".", 1)[0] + "."
    none = jwt.encode({"role": "admin", "exp": int(time.time() + 60)}, None, algorithm="none")
    fine = {"iss": "lab", "aud": "nereid"}
    bad = {
        "expired": token(lifetime_s=-70, **fine),
        "without exp": token(lifetime_s=None, **fine),
        "not yet": token(nbf=int(time.time() + 90), **fine),
        "another secret": token(secret="b" * 64, **fine),
        "another algorithm": token("HS512", **fine),
        "another issuer": token(**{**fine, "iss": "bal"}),
        "another audience": token(**{**fine, "aud": "other"}),
        "no audience": token(iss="lab"),
        "unsigned": unsigned,
        "none": none,
        "junk behind": token(**fine) + "!!",
        "padded": token(**fine) + "=",
    }

    async def scenario() -> None:
        async with fronting(spec(), access=known(rules("HS256", "lab", "nereid"))) as service:
            assert await infer(service.channel, bearer(token(**fine))) == ("OK", "")
            told = {what: await infer(service.channel, bearer(text)) for what, text in bad.items()}
            assert {code for code, _ in told.values()} == {"UNAUTHENTICATED"}
            assert told["expired"][1] == "the token is refused: Jwt is expired"
            # The path is not a place for tokens.
            path = f"{KSERVE}RepositoryIndex?access_token={token(role='admin', **fine)}"
            assert (await ask(service.channel, path))[0] == "UNAUTHENTICATED"

    asyncio.run(scenario())


def test_no_secret_is_in_the_log_or_in_what_envoy_tells_of_itself(
    fronting: Fronting, spec: Spec, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)

    async def scenario() -> str:
        async with fronting(spec(), access=known(rules())) as service:
            for text in (*KEYS.values(), token(), token(secret="c" * 64)):
                await infer(service.channel, bearer(text))
            for file in service.folder.rglob("*"):
                if file.is_file() and file.name != "token-secret.json":
                    data = file.read_bytes()
                    assert not [secret for secret in (*KEYS.values(), SECRET) if secret.encode() in data], file
            assert (service.folder / "token-secret.json").stat().st_mode & 0o077 == 0
            return str(await service.front.admin._ask("GET", "/config_dump"))

    dump = asyncio.run(scenario())
    encoded = json.loads(envoy_access.token_secret_file(rules()))["keys"][0]["k"]
    assert digest(KEYS["admin"]) in dump
    assert not [secret for secret in (*KEYS.values(), SECRET, encoded) if secret in dump or secret in caplog.text]


def test_health_over_http_is_open_and_metrics_need_a_reader(fronting: Fronting, spec: Spec) -> None:
    async def scenario() -> None:
        async with fronting(spec(), access=known(), http="127.0.0.1:0") as service, ClientSession() as session:
            for path, key, status in [
                ("/v2/health/live", None, 503),  # nothing listens behind it in this test
                ("/metrics", None, 401),
                ("/metrics", "nobody-s", 401),
                ("/metrics", KEYS["read_only"], 503),
                ("/v2/models/adder/ready", None, 401),
                ("/v2/models/adder/versions/1/ready?x", KEYS["read_only"], 503),
                ("/v2/models/adder/load", KEYS["inference"], 403),
                ("/v2/models/a%2Fb/ready", KEYS["inference"], 403),
                ("/v2/models/adder/ready/../load", KEYS["inference"], 403),
            ]:
                headers = {} if key is None else {"X-API-Key": key}
                async with session.get(f"http://{service.front.http}{path}", headers=headers) as answer:
                    assert answer.status == status, path

    asyncio.run(scenario())


class Authority:
    """A made-up certificate authority and files it signs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.ca = trustme.CA()
        self.ca.cert_pem.write_to_path(str(folder / "ca.pem"))

    @property
    def root(self) -> bytes:
        return self.ca.cert_pem.bytes()

    def server(self, **options: Any) -> TlsSettings:
        """Files of a certificate for 127.0.0.1, put in the place of those from before."""
        made = self.ca.issue_cert("127.0.0.1", "localhost", **options)
        chain = b"".join(pem.bytes() for pem in made.cert_chain_pems)
        for name, data in (("cert.pem", chain), ("key.pem", made.private_key_pem.bytes())):
            (self.folder / name).write_bytes(data)
            (self.folder / name).chmod(0o600)
        return TlsSettings(cert=str(self.folder / "cert.pem"), key=str(self.folder / "key.pem"))

    def client(self) -> Any:
        """Channel credentials with a certificate of this authority."""
        made = self.ca.issue_cert("someone@example.org")
        key, chain = made.private_key_pem.bytes(), made.cert_chain_pems[0].bytes()
        return key, chain


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "tls")


async def infer_with(address: str, credentials: Any) -> tuple[str, str]:
    async with grpc.aio.secure_channel(address, credentials) as channel:
        return await infer(channel)


def test_calls_are_encrypted_and_clear_text_is_not_answered(
    fronting: Fronting, spec: Spec, authority: Authority, tmp_path: Path
) -> None:
    async def scenario() -> None:
        access = Access(tls=authority.server())
        async with fronting(spec(), access=access, http="127.0.0.1:0") as service:
            assert await infer_with(service.address, grpc.ssl_channel_credentials(authority.root)) == ("OK", "")
            stranger = Authority(tmp_path / "other").root
            assert (await infer_with(service.address, grpc.ssl_channel_credentials(stranger)))[0] == "UNAVAILABLE"
            assert (await infer(service.channel))[0] == "UNAVAILABLE"
            trusting = ssl.create_default_context(cadata=authority.root.decode())
            async with (
                ClientSession(connector=TCPConnector(ssl=trusting)) as session,
                session.get(f"https://{service.front.http}/metrics") as answer,
            ):
                assert answer.status == 503

    asyncio.run(scenario())


def test_with_a_client_authority_only_its_clients_are_answered(
    fronting: Fronting, spec: Spec, authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other")

    async def scenario() -> None:
        tls = authority.server().model_copy(update={"client_ca": str(other.folder / "ca.pem")})
        async with fronting(spec(), access=Access(tls=tls)) as service:
            fine = grpc.ssl_channel_credentials(authority.root, *other.client())
            assert await infer_with(service.address, fine) == ("OK", "")
            for pair in ((), authority.client()):
                code, _ = await infer_with(service.address, grpc.ssl_channel_credentials(authority.root, *pair))
                assert code == "UNAVAILABLE"

    asyncio.run(scenario())


def test_a_renewed_certificate_is_used_without_a_restart(
    fronting: Fronting, spec: Spec, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "_LOOK_EVERY_S", 0.05)

    def shown(address: str) -> str:
        host, _, port = address.rpartition(":")
        return ssl.get_server_certificate((host, int(port)))

    async def scenario() -> None:
        async with fronting(spec(), access=Access(tls=authority.server())) as service:
            before = await asyncio.to_thread(shown, service.address)
            trusting = grpc.ssl_channel_credentials(authority.root)
            async with grpc.aio.secure_channel(service.address, trusting) as channel:
                assert await infer(channel) == ("OK", "")
                pid = service.front.envoy_pid
                authority.server()
                async with asyncio.timeout(30):
                    while await asyncio.to_thread(shown, service.address) == before:
                        await asyncio.sleep(0.05)
                # Connections from before go on.
                assert await infer(channel) == ("OK", "")
                assert service.front.envoy_pid == pid
            # Half of a renewal changes nothing.
            (authority.folder / "key.pem").write_bytes(Authority(tmp_path / "other").ca.private_key_pem.bytes())
            await asyncio.sleep(1)
            assert await infer_with(service.address, trusting) == ("OK", "")

    asyncio.run(scenario())


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(SettingsError) as caught:
        call()
    return str(caught.value)


def test_files_that_cannot_work_are_told_in_one_line(authority: Authority, tmp_path: Path) -> None:
    tls = authority.server()
    certificates.check(tls)
    other = Authority(tmp_path / "other").server()
    gone = tls.model_copy(update={"cert": str(tmp_path / "none.pem")})
    assert refusal(lambda: certificates.check(gone)) == (
        f"server.tls.cert {gone.cert} cannot be read (No such file or directory)"
    )
    mixed = tls.model_copy(update={"key": other.key})
    assert refusal(lambda: certificates.check(mixed)) == (
        f"server.tls.key {other.key} is not the key of the certificate {tls.cert}"
    )
    text = tmp_path / "text"
    text.write_text("no certificate")
    for broken in ({"cert": str(text)}, {"key": str(text)}, {"client_ca": str(text)}):
        assert "PEM" in refusal(lambda: certificates.check(tls.model_copy(update=broken)))  # noqa: B023
    old = authority.server(not_after=datetime.now(UTC) - timedelta(days=1))
    assert refusal(lambda: certificates.check(old)) == f"server.tls.cert {old.cert} has expired; renew it"
    early = authority.server(not_before=datetime.now(UTC) + timedelta(days=1))
    assert "is not valid yet" in refusal(lambda: certificates.check(early))


def test_a_renewal_that_fails_for_the_moment_is_tried_again(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "_LOOK_EVERY_S", 0.02)
    tls, tries = authority.server(), 0
    renewed = asyncio.Event()

    def renew(_: Any) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if tries == 2:
            raise EnvoyUnavailable("server.json for Envoy cannot be written")
        renewed.set()

    async def scenario() -> None:
        following = asyncio.create_task(certificates.follow(lambda: tls, renew))
        await asyncio.sleep(0.1)
        assert tries == 0
        os.utime(tls.cert, (1, 1))
        async with asyncio.timeout(20):
            await renewed.wait()
        following.cancel()

    asyncio.run(scenario())


def test_a_secret_that_everybody_can_read_is_warned_of(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = authority.server()
    Path(tls.key).chmod(0o644)
    certificates.check(tls)
    key = tmp_path / "key"
    key.write_text(KEYS["admin"])
    key.chmod(0o604)
    credentials.read(AuthSettings.model_validate({"keys": [{"name": "a", "role": "admin", "key_file": str(key)}]}))
    assert [record.getMessage().split(";")[-1] for record in caplog.records] == [" chmod 600 it"] * 2


def test_keys_come_from_files_the_environment_and_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "reader.key"
    file.write_text(f"  {KEYS['read_only']}\n")
    file.chmod(0o600)
    monkeypatch.setenv("INFERENCE_KEY", KEYS["inference"])
    monkeypatch.setenv("TOKEN_SECRET", f"{SECRET}\n")
    auth = AuthSettings.model_validate(
        {
            "keys": [
                {"name": "a", "role": "read_only", "key_file": str(file)},
                {"name": "b", "role": "inference", "key_env": "INFERENCE_KEY"},
                {"name": "c", "role": "admin", "sha256": digest(KEYS["admin"]).upper()},
            ],
            "jwt": {"secret_env": "TOKEN_SECRET", "algorithm": "HS384"},
        }
    )
    for _ in range(2):  # also when the settings are read again
        assert credentials.read(auth) == Credentials(dict(known().credentials.keys), rules("HS384"))  # type: ignore[union-attr]
    assert not {"INFERENCE_KEY", "TOKEN_SECRET"} & set(os.environ), "models would see it"
    assert SECRET not in repr(credentials.read(auth))
    record = logging.makeLogRecord({"msg": f"a model printed {SECRET}", "fields": {"x": SECRET}})
    assert all(SECRET not in form().format(record) for form in FORMATTERS.values())


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"key_env": "NOT_SET"},
            "server.auth.keys: key 'a' needs the variable NOT_SET in the environment, which is not",
        ),
        ({"key_file": "/none/such"}, "server.auth.keys: key 'a' cannot be read from /none/such (No such file"),
        ({"key_file": "EMPTY"}, "server.auth.keys: key 'a' is empty in "),
        ({"key_file": "SPACED"}, "server.auth.keys: key 'a' must be up to 512 visible ASCII characters without blanks"),
        ({"key_file": "BINARY"}, "server.auth.keys: key 'a' in "),
    ],
)
def test_a_key_that_cannot_be_had_stops_the_start(tmp_path: Path, entry: dict[str, str], message: str) -> None:
    for name, data in (("EMPTY", b" \n"), ("SPACED", b"two words"), ("BINARY", b"\xff\xfe")):
        (tmp_path / name).write_bytes(data)
    entry = {name: str(tmp_path / value) if name == "key_file" else value for name, value in entry.items()}
    auth = AuthSettings.model_validate({"keys": [{"name": "a", "role": "admin", **entry}]})
    assert refusal(lambda: credentials.read(auth)).startswith(message)
