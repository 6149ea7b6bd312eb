"""Whether a call is to blame for a server that was lost under it, and how long it is sent on then.

    lost                                        the call is a suspect       it is sent on
    ──────────────────────────────────────────  ──────────────────────────  ─────────────────────────────────────────────
    its connection broke (the process ended)    if it had just come         until three servers are lost under it
    its lease ran out (it stands still)         if it had just come         once; one that is large, after a quarantine
    it answered, drained, restarted             no                          as long as failing over may take

A call that makes a server stand still does so when it comes. So one that was there for a while, as the server's heartbeats
went on, is no suspect, and is sent on however often a server is lost. A large suspect waits until those that were lost with
it have been with other servers for a while: when it makes the next server stand still, they are no suspects there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Loss = Literal["lease", "connection"]
"""How a server was lost under a call that had just come."""

SETTLED_S = 5.0
"""A call that has been with a server for so long, while it was heard of, does not make it stand still."""
MOST_LEASES = 2
MOST_LOSSES = 3
LARGE_BYTES = 1 << 20
QUARANTINE_S = SETTLED_S + 2.0
"""Two heartbeats longer, to be sure that one was heard."""


def is_suspect(sent: float, heard: float) -> bool:
    """Whether a call that was sent then may be why a server that was last heard of then was lost (one clock, seconds)."""
    return sent > heard - SETTLED_S


@dataclass(frozen=True, slots=True)
class Blame:
    """Servers that were lost under one call, by how they were."""

    leases: int = 0
    connections: int = 0

    def after(self, loss: Loss | None) -> Blame:
        """With one more loss, if it was one."""
        return Blame(self.leases + (loss == "lease"), self.connections + (loss == "connection"))

    @property
    def may_go_on(self) -> bool:
        """Whether the call may be sent to another server."""
        return self.leases < MOST_LEASES and self.leases + self.connections < MOST_LOSSES


def quarantine_s(loss: Loss | None, body_bytes: int) -> float:
    """How long a call waits before it is sent on."""
    return QUARANTINE_S if loss == "lease" and body_bytes >= LARGE_BYTES else 0.0
