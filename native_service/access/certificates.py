"""The files of ``server.tls``: checked as a client would check them, before anything is started and at each renewal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from pathlib import Path

from native_service.access.credentials import warn_when_others_may_read
from native_service.settings.access import TlsSettings
from nereid_backend.errors import EnvoyUnavailable, SettingsError

_LOG = logging.getLogger("nereid.serve")

_LOOK_EVERY_S = 5.0
_EXPIRED, _NOT_YET = 10, 9  # X509_V_ERR_CERT_HAS_EXPIRED, X509_V_ERR_CERT_NOT_YET_VALID
_MOST_TURNS = 10


def check(tls: TlsSettings) -> None:
    """Raises SettingsError with what makes the files useless, a line for each that cannot be read.

    Warns about a key that others can read.
    """
    files = {"cert": tls.cert, "key": tls.key, "client_ca": tls.client_ca}
    problems = [_unreadable(f"server.tls.{name}", file) for name, file in files.items() if file is not None]
    if any(problems):
        raise SettingsError("\n".join(filter(None, problems)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.cert, tls.key, password=_no_password)
    except ssl.SSLError as error:
        if "KEY_VALUES_MISMATCH" in str(error.reason):
            raise SettingsError(f"server.tls.key {tls.key} is not the key of the certificate {tls.cert}") from None
        raise SettingsError(
            f"server.tls: {tls.cert} and {tls.key} must be a certificate and its key in PEM ({error.reason or error})"
        ) from None
    if tls.client_ca is not None:
        _authorities("server.tls.client_ca", tls.client_ca)
    _check_dates(context, tls.cert)
    warn_when_others_may_read(Path(tls.key), "server.tls.key")


async def follow(current: Callable[[], TlsSettings], renew: Callable[[TlsSettings], None]) -> None:
    """Call ``renew`` whenever the files have changed and fit together; until then those from before stay in use.

    ``current`` names them.

    It looks at the files, not at reports: renewals write in place, rename, or turn a link round, by tool.
    """
    in_use = seen = _stamps(current())
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        tls = current()
        now = _stamps(tls)
        # Two equal looks: whoever writes them has finished.
        if now != in_use and now == seen:
            in_use = now
            try:
                await asyncio.to_thread(check, tls)
                renew(tls)
            except SettingsError as error:
                _LOG.error("%s; the certificate from before stays in use", error)
            except EnvoyUnavailable as error:
                _LOG.error("%s", error)
                in_use = []
            except OSError as error:  # a file that has just gone, a full disk, too many open files
                _LOG.error("server.tls.cert %s cannot be read again now (%s)", tls.cert, error.strerror)
                in_use = []
            else:
                _LOG.info("server.tls.cert %s has been read again", tls.cert)
        seen = now


def _stamps(tls: TlsSettings) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for file in (tls.cert, tls.key, tls.client_ca):
        try:
            state = Path(file or "").stat()
            found.append((state.st_mtime_ns, state.st_ino, state.st_size))
        except OSError:
            found.append(())
    return found


def _unreadable(key: str, path: str) -> str | None:
    """Why the file of ``key`` is of no use; None when it can be read."""
    try:
        with Path(path).open("rb") as file:
            file.read(1)
    except OSError as error:
        return f"{key} {path} cannot be read ({error.strerror})"
    return None


def _no_password() -> str:
    raise SettingsError(
        "server.tls.key must not need a password; store the key without one, readable by its owner only"
    )


def _authorities(key: str, file: str) -> ssl.SSLContext:
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    # The certificate itself is trusted: what is left to be found wrong are its dates.
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        client.load_verify_locations(file)
    except ssl.SSLError as error:
        raise SettingsError(f"{key} {file} must hold certificates in PEM ({error.reason or error})") from None
    return client


def _check_dates(server: ssl.SSLContext, cert: str) -> None:
    """A handshake in memory, with a client that trusts the certificate: the standard library reads no dates itself."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        _authorities("server.tls.cert", cert).wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    try:
        for _ in range(_MOST_TURNS):
            for end in ends:
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _EXPIRED:
            raise SettingsError(f"server.tls.cert {cert} has expired; renew it") from None
        if error.verify_code == _NOT_YET:
            raise SettingsError(f"server.tls.cert {cert} is not valid yet; check the clock") from None
        raise SettingsError(f"server.tls.cert {cert} is refused by clients ({error.verify_message})") from None
