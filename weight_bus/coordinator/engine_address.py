"""The check of where an engine says it is, before the bus calls it with its key."""

from __future__ import annotations

import asyncio
import socket

from services.security.addresses import AddressRefusedError, check_resolved, check_url

_RESOLVED_WITHIN_S = 2.0


async def check_engine_url(url: str) -> None:
    """Raises AddressRefusedError for an address that no engine has, and for a name that cannot be looked up now."""
    host, port = check_url(url)
    try:
        async with asyncio.timeout(_RESOLVED_WITHIN_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError) as error:
        what = f"{host}, where an engine says it is, cannot be looked up ({error!r})"
        raise AddressRefusedError(what, "correct its --own-url, or the name service") from error
    check_resolved(url, [str(address[0]) for *_, address in found])
