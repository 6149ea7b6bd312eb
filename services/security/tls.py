"""TLS configuration: which certificates clients trust, and which certificate a service presents; for HTTP and for Redis.

    DIR/ca.pem     the mesh's authority ─────► Trust      clients trust what it has signed, nothing else
    DIR/cert.pem   the host's certificate ─┐
    DIR/key.pem    and its key ────────────┴─► Identity   services present it

Without a folder: plain HTTP, and the system's authorities for `https://` addresses outside the mesh.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from services.security.permissions import is_unspecified
from services.wire.errors import UntrustedError, UsageError

TLS_DIR = "ROLLMESH_TLS_DIR"
"""Variable that names the folder where a command line does not."""
AUTHORITY, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"
_NO_TLS_THERE = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
"""What OpenSSL calls an answer that is none of TLS."""
_MAKE = "`rollmesh keys tls` makes one"

Verify = ssl.SSLContext | Literal[True]


@dataclass(frozen=True)
class Trust:
    """The certificates that a client trusts. Make it once and share it: reading an authority takes milliseconds.

    `verify` is httpx's argument `verify` and aiohttp's `ssl`; True: their default.
    """

    authority: Path | None = None
    verify: Verify = field(default=True, repr=False, compare=False)

    def address(self, url: str) -> str:
        """`url` without a slash at its end. Raises UsageError for what is no URL, and for plain HTTP where the mesh has an
        authority."""
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"{url!r} is no address of a service", "write http://HOST:PORT")
        if self.authority is not None and url.startswith("http://"):
            raise UsageError(f"{url} is plain HTTP, and the mesh speaks TLS", "write https://, or leave --tls-dir out")
        return url.rstrip("/")

    def refusal(self, url: str, error: BaseException) -> UntrustedError | None:
        """The UntrustedError for a call of `url` that failed with `error`; None where a retry may succeed."""
        for each in _chain(error):
            # aiohttp's errors are of these classes too, without what those say.
            if isinstance(each, ssl.SSLCertVerificationError) and (why := getattr(each, "verify_message", "")):
                whose = "the system's trust store" if self.authority is None else str(self.authority)
                what = f"{url} shows a certificate that {whose} does not vouch for ({why})"
                remedy = "give --tls-dir of the mesh that runs there, and that host a certificate: `rollmesh keys tls`"
                return UntrustedError(what, remedy)
            if isinstance(each, ssl.SSLError) and getattr(each, "reason", None) in _NO_TLS_THERE:
                return UntrustedError(
                    f"{url} speaks no TLS", "start that service with --tls-dir, or call it by http://"
                )
        return None


PUBLIC = Trust()


@dataclass(frozen=True)
class Identity:
    """The certificate that a service presents to its callers."""

    certificate: Path
    key: Path
    context: ssl.SSLContext = field(repr=False, compare=False)

    def check(self, host: str, trust: Trust) -> None:
        """Raises UsageError unless callers with `trust` would accept the certificate for `host` now."""
        assert isinstance(trust.verify, ssl.SSLContext)
        try:
            _shake_hands(self.context, trust.verify, host)
        except ssl.SSLCertVerificationError as error:
            raise UsageError(
                f"callers of {host} would refuse {self.certificate} ({error.verify_message})",
                f"make one for that name, by the authority {trust.authority}: `rollmesh keys tls`",
            ) from error


@dataclass(frozen=True)
class Tls:
    """TLS of one process, as client and as server. `identity` None: it serves plain HTTP."""

    trust: Trust = PUBLIC
    identity: Identity | None = None

    @property
    def scheme(self) -> Literal["http", "https"]:
        return "http" if self.identity is None else "https"

    def own_url(self, host: str, port: int, given: str | None = None) -> str:
        """The URL of a service that listens on `host:port`: `given`, or else that address.

        Raises UsageError where callers would not accept its certificate, so that the error is seen at the start. The
        wildcard address (0.0.0.0) is not a host name, and is not checked.
        """
        url = f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{port}" if given is None else given
        url = self.trust.address(url)
        name = urlsplit(url).hostname or host
        if self.identity is not None and not is_unspecified(name):
            self.identity.check(name, self.trust)
        return url


PLAIN = Tls()


def read_trust(folder: Path | None, *, public: bool = False) -> Trust:
    """Trust in the authority in `folder`; PUBLIC for None. `public`: and in the system's authorities, for other servers.

    Raises UsageError for a file that holds no certificate.
    """
    if folder is None:
        return PUBLIC
    path = folder / AUTHORITY
    try:
        context = ssl.create_default_context(cafile=None if public else str(path))
        context.load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} holds no authority's certificate ({_said(error)})", _MAKE) from error
    return Trust(path, context)


def read_tls(folder: Path | None) -> Tls:
    """TLS from the files in `folder`; PLAIN for None. Raises UsageError for files that are missing or do not match."""
    if folder is None:
        return PLAIN
    trust = read_trust(folder)
    certificate, key = folder / CERTIFICATE, folder / KEY
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # A key with a password would be asked for on the terminal, where nobody sits.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:
        missing = [str(path) for path in (certificate, key) if not path.is_file()]
        what = (
            f"no {' and no '.join(missing)}" if missing else f"{certificate} and {key} are no certificate with its key"
        )
        raise UsageError(f"{what} ({_said(error)})", _MAKE) from error
    return Tls(trust, Identity(certificate, key, context))


def _said(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "not PEM"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> None:
    """A TLS handshake in memory, with the rules of real calls. Raises SSLCertVerificationError."""
    asked, answered = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = client.wrap_bio(answered, asked, server_hostname=host)
    callee = server.wrap_bio(asked, answered, server_side=True)
    for side in (caller, callee, caller):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
