"""Which addresses the mesh calls: whoever registers an engine says where it is, and is then sent the mesh's keys. Pure.

Private addresses and loopback are what a mesh runs on. Refused is what no engine ever has, and where something else answers
that trusts every caller on its machine: link-local addresses, among them the metadata service of every cloud; the few
metadata services that are elsewhere; multicast and broadcast.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from services.wire.errors import UsageError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_METADATA = frozenset(
    map(
        ipaddress.ip_address,
        (
            "100.100.100.200",  # Alibaba Cloud
            "168.63.129.16",  # Azure
            "192.0.0.192",  # Oracle Cloud
            "fd00:ec2::254",  # AWS
            "fd20:ce::254",  # Google Cloud
        ),
    )
)
_BROADCAST = ipaddress.ip_address("255.255.255.255")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class AddressRefusedError(UsageError):
    """A URL that the mesh does not call: HTTP 422."""

    code = "address_refused"


def why_refused(address: str) -> str | None:
    """What is wrong with an IP address that an engine claims; None for one that may be called, and for a host's name."""
    try:
        given = ipaddress.ip_address(address)
    except ValueError:
        return None
    for meant in (given, *_embedded(given)):
        if meant in _METADATA:
            return f"{address} is a cloud's metadata service"
        if meant.is_link_local:
            return f"{address} is link-local, as a cloud's metadata service is"
        if meant.is_multicast or meant == _BROADCAST:
            return f"{address} is no address of one host"
    return None


def check_url(url: str) -> tuple[str, int]:
    """Host and port of a service's URL. Raises AddressRefusedError for what is no such URL, or an address as above."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise AddressRefusedError(f"{url[:200]!r} is no URL ({error})", _WRITE) from error
    if parts.scheme not in ("http", "https") or not host or parts.username is not None or parts.query or parts.fragment:
        raise AddressRefusedError(f"{url[:200]!r} is no address of a service", _WRITE)
    if (why := why_refused(host)) is not None:
        raise AddressRefusedError(f"{url} is not called: {why}", _REMEDY)
    return host, port or (443 if parts.scheme == "https" else 80)


def check_resolved(url: str, addresses: list[str]) -> None:
    """Raise AddressRefusedError where the host of `url` has one of these addresses and it may not be called."""
    for address in addresses:
        if (why := why_refused(address)) is not None:
            raise AddressRefusedError(f"{url} is not called: {why}", _REMEDY)


_WRITE = "write http://HOST:PORT"
_REMEDY = "give --own-url with the address at which the others reach this service"


def _embedded(address: Address) -> list[Address]:
    """The IPv4 addresses that an IPv6 one stands for: mapped, 6to4, Teredo, NAT64."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found: list[Address | None] = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64:
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    # Written with a scope it equals no address without one.
    if address.scope_id is not None:
        found.append(ipaddress.IPv6Address(int(address)))
    return [each for each in found if each is not None]
