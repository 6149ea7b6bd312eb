"""Certificates of a mesh: a certificate authority, and one certificate for each host, signed by it.

    DIR/authority.key            the authority's private key; no service reads it
    DIR/ca.pem                   the authority's certificate
    DIR/HOST/{ca,cert,key}.pem   what the services of one host are given as --tls-dir

Existing files are kept: to renew a host's certificate, remove its folder; to renew all, remove DIR.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.security.keys import write_new
from services.security.tls import AUTHORITY, CERTIFICATE, KEY
from services.wire.errors import UsageError

AUTHORITY_KEY = "authority.key"
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
DAYS = 825
"""How long a host's certificate holds; browsers and libraries take none that holds longer."""
_AUTHORITY_DAYS = 3650
_SLACK = datetime.timedelta(minutes=5)
"""Certificates hold since a little before now, for hosts whose clocks are behind."""
_LONGEST_COMMON_NAME = 64
_READABLE = 0o644
_DNS_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9])?)*")


@dataclass(frozen=True)
class Authority:
    """The certificate authority. `made`: it is new."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    pem: bytes
    made: bool


def open_authority(folder: Path) -> Authority:
    """The authority in `folder`, made where there is none. Raises UsageError where it cannot be read or written."""
    key_path, path = folder / AUTHORITY_KEY, folder / AUTHORITY
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and not key_path.exists():
            raise UsageError(
                f"{path} is there without {key_path.name}, which signs",
                "make certificates where the authority was made",
            )
        write_new(key_path, _key_pem(ec.generate_private_key(ec.SECP256R1())))
        key = load_pem_private_key(key_path.read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{key_path} is no key on an elliptic curve")
        made = write_new(path, _pem(_self_signed(key)), mode=_READABLE)
        pem = path.read_bytes()
        return Authority(x509.load_pem_x509_certificate(pem), key, pem, made)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"no authority in {folder} ({error})", "name a folder of `rollmesh keys tls`, or none"
        ) from error


def make_host(folder: Path, names: Sequence[str], authority: Authority, *, days: int = DAYS) -> tuple[Path, bool]:
    """A host's folder, named after the first of its `names`; and whether it is new, or existed and is kept.

    `names`: DNS names (with `*.` as wildcard) and addresses of the host. Raises UsageError.
    """
    general = [_general_name(name) for name in names]
    host = folder / names[0].removeprefix("*.").replace(":", "_")
    if host.exists():
        return host, False
    partial = folder / f".{host.name}.{secrets.token_hex(4)}"
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _signed(names[0], general, key, authority, days)
    try:
        partial.mkdir(mode=0o700)
        write_new(partial / KEY, _key_pem(key))
        write_new(partial / CERTIFICATE, _pem(certificate), mode=_READABLE)
        write_new(partial / AUTHORITY, authority.pem.decode(), mode=_READABLE)
        # Whole or not at all.
        partial.rename(host)
    except OSError as error:
        raise UsageError(f"{host} cannot be written ({error})", "name a folder that you may write to") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return host, True


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        if not _DNS_NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} is no name of a host", "write small letters: gateway, 10.0.0.5, *.mesh.internal"
            ) from None
    return x509.DNSName(name)


def _self_signed(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    # Told apart by their names, or clients that know two authorities take one for the other.
    name = _name(f"rollmesh authority {secrets.token_hex(4)}")
    return (
        _begun(name, name, key.public_key(), _AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )


def _signed(
    name: str,
    names: Sequence[x509.GeneralName],
    key: ec.EllipticCurvePrivateKey,
    authority: Authority,
    days: int,
) -> x509.Certificate:
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    return (
        _begun(_name(name[:_LONGEST_COMMON_NAME]), authority.certificate.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority.key, hashes.SHA256())
    )


def _begun(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(tz=datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SLACK)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, signs: bool) -> x509.KeyUsage:
    """Key usage: an authority's key only signs certificates, a host's key is only used in handshakes."""
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()
