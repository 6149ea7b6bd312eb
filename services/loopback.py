"""Where a service may listen: on loopback, and elsewhere only with the keys that it asks its callers for. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from services.wire.errors import UsageError


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_unspecified(host: str) -> bool:
    """Whether an address stands for all of the machine's: one to listen on, and nobody's name."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def require_loopback(host: str, lacking: Sequence[str]) -> None:
    """Raise UsageError for another address where keys are lacking: no open door (promise 6)."""
    if lacking and not is_loopback(host):
        raise UsageError(
            f"{host} is not a loopback address, and there is no {' and no '.join(lacking)} key",
            "bind 127.0.0.1, or give --keys-dir (`rollmesh keys init`)",
        )
