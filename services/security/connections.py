"""Kept connections of our HTTP clients: to whom a name leads now, with certificates that the mesh trusts."""

from __future__ import annotations

import aiohttp
from aiohttp.abc import AbstractResolver

from services.security.tls import Verify

_DNS_HOLDS_S = 1
"""aiohttp would keep what DNS said for ten seconds. Where several servers are started again they may get each other's
addresses: a connection would then lead to the wrong one for as long as it is used."""


def kept_connections(
    verify: Verify, keep_alive_s: float = 15.0, resolver: AbstractResolver | None = None
) -> aiohttp.TCPConnector:
    """As many as there are calls. `keep_alive_s`: how long an idle one is kept. To be made in a running loop."""
    return aiohttp.TCPConnector(
        limit=0, ssl=verify, keepalive_timeout=keep_alive_s, ttl_dns_cache=_DNS_HOLDS_S, resolver=resolver
    )
