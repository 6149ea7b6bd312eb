"""Headers between the gateway and rollout servers. Agents need none of them."""

from __future__ import annotations

CALL_HEADER = "x-rollmesh-call"
"""Names one call of an agent, the same each time it is sent: the answer is made once, and is replayed byte for byte."""
BASE_URL_HEADER = "x-rollmesh-base-url"
"""The address that the agent called, for the `base_url` of a session that is opened."""
OWNER_URL_HEADER = "x-rollmesh-owner-url"
"""In a 421: the address of the server that holds the session."""
