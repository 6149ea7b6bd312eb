"""HTTP bodies of the gateway's own routes."""

from __future__ import annotations

from typing import Literal

from services.wire.rollout_api import Body


class KnownServer(Body):
    """A rollout server as the gateway sees it: what it announces, and what stands between them."""

    server_id: str
    incarnation: str
    url: str
    state: Literal["serving", "draining"]
    model: str
    policy_version: int
    kv_policy: str
    running: int
    waiting: int
    max_running: int
    open_sessions: int
    in_flight: int
    """Calls that generate, sent by this gateway and not answered."""


class KnownServers(Body):
    """`GET /admin/servers`."""

    servers: list[KnownServer]
    not_ready: list[str]
    """Why this view may be wrong or of no use; empty when it is sound."""


class DrainServer(Body):
    """`POST /admin/drain` at the gateway: which server shall let go of its work and end."""

    server_id: str


# HTTP bodies of what operators ask of services.


class Draining(Body):
    """`POST /admin/drain`: it has begun."""

    server_id: str
    state: Literal["draining"]


# Headers between the gateway and rollout servers. Agents need none of them.

CALL_HEADER = "x-rollmesh-call"
"""Names one call of an agent, the same each time it is sent: the answer is made once, and is replayed byte for byte."""
BASE_URL_HEADER = "x-rollmesh-base-url"
"""The address that the agent called, for the `base_url` of a session that is opened."""
OWNER_URL_HEADER = "x-rollmesh-owner-url"
"""In a 421: the address of the server that holds the session."""
