"""A gateway's figures, read off it when somebody scrapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from services import metric_catalog as catalog
from services.gateway.gateway import Gateway
from services.metrics import Reading
from services.wire.errors import NotReadyError


def gateway_readings(gateway: Gateway) -> Iterator[Reading]:
    """The servers that it knows and the calls that it has sent them; none before the application has begun."""
    try:
        parts = gateway.parts()
    except NotReadyError:
        return
    known = parts.servers.all()
    states = Counter({"serving": 0, "draining": 0})
    states.update(server.record.state for server in known)
    for state, count in states.items():
        yield Reading(catalog.GATEWAY_SERVERS, count, (state,))
    for server in known:
        yield Reading(catalog.GATEWAY_IN_FLIGHT, server.in_flight, (server.name,))
    for name, count in parts.failover.failed_tries.items():
        yield Reading(catalog.GATEWAY_RESENT, count, (name,))
