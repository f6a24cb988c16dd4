"""Who may call, told to Envoy: TLS on the listeners, and a script that holds each call to the role it needs.

The script knows keys by their digests only; it hashes what a caller sends, which takes LuaJIT 1.2 us per 64 bytes.
Tokens are verified by ``jwt_authn`` before it, whose secret is in a file, not in the configuration. Both are first
among the filters: a stranger's message is refused before its body is read. Keys and roles travel with the routes, and
the rules for tokens in a file that Envoy watches, so that they can change while it runs, also for open connections; a
listener whose routes have none refuses everything.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

from native_service.access import certificates, credentials, roles
from native_service.access.credentials import LONGEST_KEY, Credentials, TokenRules
from native_service.access.roles import Role
from native_service.settings import ServerSettings
from native_service.settings.access import TlsSettings

Json = dict[str, Any]

TLS_FOLDER, SERVER_SECRET_FILE, CLIENTS_SECRET_FILE = "tls", "server.json", "clients.json"
"""Below the run directory: what a rename in the folder makes Envoy read again, certificates included."""
TOKEN_SECRET_FILE = "token-secret.json"  # noqa: S105 - a file's name
"""In the run directory. Another secret is in a file of another name: Envoy reads each once."""

ROLES = "roles"
_TYPE = "type.googleapis.com/"
_LUA = _TYPE + "envoy.extensions.filters.http.lua.v3.Lua"
_JWT = "envoy.filters.http.jwt_authn"
_VERIFIER = _TYPE + "envoy.extensions.filters.http.jwt_authn.v3.JwtAuthentication"
_PROVIDER, _CLAIMS, _FAILURE = "nereid", "claims", "failure"
_KNOWN_TOKENS = 1000


@dataclass(frozen=True, slots=True)
class Access:
    """What protects the addresses. ``credentials`` None: everybody may call; ``tls`` None: in clear."""

    tls: TlsSettings | None = None
    credentials: Credentials | None = None


OPEN = Access()


def read(server: ServerSettings) -> Access:
    """Certificates checked and keys read. Raises SettingsError."""
    if server.tls is not None:
        certificates.check(server.tls)
    return Access(server.tls, None if server.auth is None else credentials.read(server.auth))


def transport_socket(tls: TlsSettings, protocol: str, *, ask_clients: bool) -> Json:
    """TLS 1.2 or newer with ``protocol`` as its ALPN; ``ask_clients``: for a certificate of ``client_ca``."""
    context: Json = {
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
        "alpn_protocols": [protocol],
        "tls_certificate_sds_secret_configs": [_secret("server", SERVER_SECRET_FILE)],
    }
    asking = ask_clients and tls.client_ca is not None
    if asking:
        context["validation_context_sds_secret_config"] = _secret("clients", CLIENTS_SECRET_FILE)
    kind = _TYPE + "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext"
    config = {"@type": kind, "common_tls_context": context, "require_client_certificate": asking}
    return {"name": "envoy.transport_sockets.tls", "typed_config": config}


def secret_files(tls: TlsSettings) -> dict[str, Json]:
    """The files of ``TLS_FOLDER``. They name the user's own files: a key is never copied."""
    watched = {"watched_directory": {"path": f"./{TLS_FOLDER}"}}
    pair = {"certificate_chain": {"filename": tls.cert}, "private_key": {"filename": tls.key}, **watched}
    files = {SERVER_SECRET_FILE: _secret_file("server", {"tls_certificate": pair})}
    if tls.client_ca is not None:
        trusted = {"trusted_ca": {"filename": tls.client_ca}, **watched}
        files[CLIENTS_SECRET_FILE] = _secret_file("clients", {"validation_context": trusted})
    return files


def _secret(name: str, file: str) -> Json:
    path = f"./{TLS_FOLDER}"
    source = {"path": f"{path}/{file}", "watched_directory": {"path": path}}
    return {"name": name, "sds_config": {"resource_api_version": "V3", "path_config_source": source}}


def _secret_file(name: str, secret: Json) -> Json:
    kind = _TYPE + "envoy.extensions.transport_sockets.tls.v3.Secret"
    return {"resources": [{"@type": kind, "name": name, **secret}]}


def filters(credentials: Credentials | None, tokens: Json) -> list[Json]:
    """What comes before all other HTTP filters of an address; ``tokens`` is the filter of them, or where it is."""
    if credentials is None:
        return []
    closed = {"name": ROLES, "typed_config": {"@type": _LUA, "default_source_code": {"inline_string": _CLOSED}}}
    return [tokens, closed]


def token_filter(credentials: Credentials | None, secret_file: str) -> Json:
    """The verifier of tokens, which lets everything pass where there are none."""
    rules = None if credentials is None else credentials.tokens
    config = {} if rules is None else _tokens(rules, secret_file)
    return {"name": _JWT, "typed_config": {"@type": _VERIFIER, **config}}


def watched_token_filter(source: Json) -> Json:
    """The same from ``source``, in place of it."""
    return {"name": _JWT, "config_discovery": {"config_source": source, "type_urls": [_VERIFIER]}}


def per_route(credentials: Credentials | None) -> Json:
    """For ``typed_per_filter_config`` of a virtual host."""
    if credentials is None:
        return {}
    kind = _TYPE + "envoy.extensions.filters.http.lua.v3.LuaPerRoute"
    return {ROLES: {"@type": kind, "source_code": {"inline_string": script(credentials)}}}


def token_secret_file(rules: TokenRules) -> str:
    """The text of the file of the secret: with it a token can be made."""
    key = base64.urlsafe_b64encode(rules.secret).rstrip(b"=").decode()
    return json.dumps({"keys": [{"kty": "oct", "alg": rules.algorithm, "k": key}]})


def _tokens(rules: TokenRules, secret_file: str) -> Json:
    """Leaves the verdict on a token in the metadata: the script asks for it only when no key fits."""
    provider: Json = {
        "local_jwks": {"filename": secret_file},
        # Otherwise also ?access_token= of the path would do.
        "from_headers": [{"name": "authorization", "value_prefix": "Bearer "}],
        "require_expiration": True,
        "clock_skew_seconds": rules.leeway_s,
        "forward": True,
        # Of verified tokens; their dates are looked at again.
        "jwt_cache_config": {"jwt_cache_size": _KNOWN_TOKENS},
        "payload_in_metadata": _CLAIMS,
        "failed_status_in_metadata": _FAILURE,
        **({"issuer": rules.issuer} if rules.issuer else {}),
        **({"audiences": [rules.audience]} if rules.audience else {}),
    }
    rule = {
        "match": {"prefix": "/"},
        "requires": {"requires_any": {"requirements": [{"provider_name": _PROVIDER}, {"allow_missing_or_failed": {}}]}},
    }
    return {"providers": {_PROVIDER: provider}, "rules": [rule]}


def script(credentials: Credentials) -> str:
    """Envoy lets a call pass when a script fails: everything that could is inside pcall, and its failure refuses."""
    http = {**roles.HTTP, roles.METRICS: credentials.metrics}
    exact = {**roles.RPCS, **{_exact(call): role for call, role in http.items() if "NAME" not in call.path}}
    patterns = [f'{{"^{_pattern(call)}$", {int(role)}}}' for call, role in http.items() if "NAME" in call.path]
    return (
        f"local keys = {_table(credentials.keys)}\n"
        f"local needs = {_table(exact)}\n"
        f"local patterns = {{{', '.join(patterns)}}}\n"
        f"local claims = {_table(roles.CLAIMS)}\n"
        f"local admin, longest_key = {int(Role.ADMIN)}, {LONGEST_KEY}\n"
        f'local verifier, payload, failure = "{_JWT}", "{_CLAIMS}", "{_FAILURE}"\n'
        f"local tokens = {'true' if credentials.tokens else 'false'}\n" + _SHA256 + _SCRIPT
    )


def _exact(call: roles.HttpCall) -> str:
    return f"{call.method} {call.path}"


def _pattern(call: roles.HttpCall) -> str:
    """A pattern of Lua; the letters of our own paths mean nothing in one."""
    return _exact(call).replace("NAME", "[%w_.-]+")


def _table(entries: Any) -> str:
    return "{" + ", ".join(f'["{key}"] = {int(role)}' for key, role in entries.items()) + "}"


_CLOSED = """
function envoy_on_request(request)
  request:respond({[":status"] = "401"}, "no keys have been read")
end
"""

_SHA256 = """
local band, bor, bxor, ror = bit.band, bit.bor, bit.bxor, bit.ror
local lshift, rshift, tobit, tohex = bit.lshift, bit.rshift, bit.tobit, bit.tohex
local round_constants, start, words = {}, {}, {}

-- FIPS 180-4: the first 32 bits of the fractions of the cube roots of the first 64 primes, and of the square roots of
-- the first 8.
local function fraction(x)
  return tobit(math.floor((x - math.floor(x)) * 2 ^ 32))
end
local number = 2
while #round_constants < 64 do
  local is_prime = true
  for divisor = 2, math.floor(math.sqrt(number)) do
    if number % divisor == 0 then is_prime = false break end
  end
  if is_prime then
    table.insert(round_constants, fraction(number ^ (1 / 3)))
    if #start < 8 then table.insert(start, fraction(math.sqrt(number))) end
  end
  number = number + 1
end

-- In hexadecimal digits.
local function sha256(text)
  local bits = #text * 8
  local size = string.char(band(rshift(bits, 24), 255), band(rshift(bits, 16), 255), band(rshift(bits, 8), 255),
    band(bits, 255))
  text = text .. "\\128" .. string.rep("\\0", (55 - #text) % 64 + 4) .. size
  local s1, s2, s3, s4, s5, s6, s7, s8 = unpack(start)
  for at = 1, #text, 64 do
    for i = 1, 16 do
      local b1, b2, b3, b4 = text:byte(at + 4 * i - 4, at + 4 * i - 1)
      words[i] = bor(lshift(b1, 24), lshift(b2, 16), lshift(b3, 8), b4)
    end
    for i = 17, 64 do
      local x, y = words[i - 15], words[i - 2]
      local sum = bxor(ror(x, 7), ror(x, 18), rshift(x, 3)) + bxor(ror(y, 17), ror(y, 19), rshift(y, 10))
      words[i] = tobit(sum + words[i - 16] + words[i - 7])
    end
    local a, b, c, d, e, f, g, h = s1, s2, s3, s4, s5, s6, s7, s8
    for i = 1, 64 do
      local first = h + bxor(ror(e, 6), ror(e, 11), ror(e, 25)) + bxor(g, band(e, bxor(f, g)))
      first = first + round_constants[i] + words[i]
      local second = bxor(ror(a, 2), ror(a, 13), ror(a, 22)) + bor(band(a, b), band(c, bor(a, b)))
      h, g, f, e, d, c, b, a = g, f, e, tobit(d + first), c, b, a, tobit(first + second)
    end
    s1, s2, s3, s4 = tobit(s1 + a), tobit(s2 + b), tobit(s3 + c), tobit(s4 + d)
    s5, s6, s7, s8 = tobit(s5 + e), tobit(s6 + f), tobit(s7 + g), tobit(s8 + h)
  end
  return tohex(s1) .. tohex(s2) .. tohex(s3) .. tohex(s4) .. tohex(s5) .. tohex(s6) .. tohex(s7) .. tohex(s8)
end
"""

_SCRIPT = """
local unknown = "the key or token is not known here"

local function role_of_key(text)
  -- Digests are compared, so how long that takes says nothing about a key.
  return #text <= longest_key and keys[sha256(text)] or nil
end

local function role_of_token(request, text)
  if not tokens then return nil, unknown end
  -- The verifier stops at the first character that no token has; what follows must not pass for a part of it.
  if not text:find("^[%w_-]+%.[%w_-]+%.[%w_-]+$") then return nil, unknown end
  local verdict = request:streamInfo():dynamicMetadata():get(verifier)
  local found = verdict and verdict[payload]
  if found == nil then
    local why = verdict and verdict[failure]
    return nil, "the token is refused: " .. (why and why.message or "it could not be verified")
  end
  local role = type(found.role) == "string" and claims[found.role] or nil
  for _, name in ipairs(type(found.roles) == "table" and found.roles or {}) do
    local other = type(name) == "string" and claims[name] or nil
    if other and (role == nil or other > role) then role = other end
  end
  -- Known, but allowed nothing.
  return role or 0
end

local function role_of(request, headers)
  local authorization = headers:get("authorization")
  if authorization == nil then
    local key = headers:get("x-api-key")
    if key == nil then return nil, "this call needs a key or a token: authorization or x-api-key" end
    return role_of_key(key), unknown
  end
  local text = authorization:match("^[Bb][Ee][Aa][Rr][Ee][Rr] +(%S+)$")
  if text == nil then return nil, "authorization must be Bearer and a key or a token" end
  local role = role_of_key(text)
  if role ~= nil then return role end
  return role_of_token(request, text)
end

local function needed_role(headers)
  local path = headers:get(":path") or ""
  local role = needs[path]
  if role ~= nil then return role end
  local method = headers:get(":method") or ""
  local call = (method == "HEAD" and "GET" or method) .. " " .. path:match("^[^?#]*")
  if needs[call] ~= nil then return needs[call] end
  for _, pattern in ipairs(patterns) do
    if call:find(pattern[1]) then return pattern[2] end
  end
  return admin
end

local function refusal(request)
  local headers = request:headers()
  local needed, role, why = needed_role(headers), 0, nil
  if needed > 0 then role, why = role_of(request, headers) end
  -- What is behind has no use for them.
  headers:remove("authorization")
  headers:remove("x-api-key")
  if role == nil then return "401", why end
  if role < needed then return "403", "the role of this key or token does not allow this call" end
end

function envoy_on_request(request)
  local whole, status, why = pcall(refusal, request)
  if not whole then status, why = "500", "credentials could not be checked" end
  if status ~= nil then request:respond({[":status"] = status}, why) end
end
"""
