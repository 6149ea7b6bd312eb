"""Leases of the publisher's arena buffers: which version is in which, and what still needs it.

    free ──begin(v)──► being copied ──► being hashed ────────┐
     ▲                 announced and not settled (`leased`) ─┼──► free, when all leases are given up ──┐
     │                 the base of a delta ──────────────────┘                                         │
     └─────────────────────────────────────────────────────────────────────────────────────────────────┘

`begin` waits while the buffer has a lease: that is the bus's back-pressure on the trainer.
"""

from __future__ import annotations

import threading
from typing import Literal

from services.wire.errors import DeadlineError

Reason = Literal["being copied", "being hashed", "announced and not settled", "the base of a delta"]
BUFFERS = 2
"""Unless another number is asked for: the version before is whole while the next is copied."""


class BufferLeases:
    """Thread-safe. A lease is named by its reason and version; giving up one that does not exist does nothing."""

    def __init__(self, buffers: int = BUFFERS) -> None:
        self._changed = threading.Condition()
        self._versions: list[int | None] = [None] * buffers
        self._leases: list[set[tuple[Reason, int]]] = [set() for _ in range(buffers)]
        self._waiting = [0] * buffers

    def begin(self, buffer: int, version: int, *, leased: bool, wait_s: float) -> None:
        """Lease the buffer to copy `version` into it; where `leased`, also until the version is settled.

        Waits for its leases to end. Raises DeadlineError, which names them, after `wait_s` seconds.
        """
        with self._changed:
            self._waiting[buffer] += 1
            try:
                if not self._changed.wait_for(lambda: not self._leases[buffer], wait_s):
                    leases = ", ".join(f"version {number}, {why}" for why, number in sorted(self._leases[buffer]))
                    raise DeadlineError(
                        f"version {version} found no arena free for {wait_s:g} s: {leases}",
                        "see the weight bus and the engines for what keeps the update from settling",
                    )
            finally:
                self._waiting[buffer] -= 1
            self._versions[buffer] = version
            self._leases[buffer].add(("being copied", version))
            if leased:
                self._leases[buffer].add(("announced and not settled", version))

    def copied(self, buffer: int, version: int) -> None:
        """The copy is complete: the bytes are being hashed now."""
        with self._changed:
            self._leases[buffer].discard(("being copied", version))
            self._leases[buffer].add(("being hashed", version))

    def abandon(self, buffer: int, version: int) -> None:
        """The copy failed: the buffer contains no version."""
        with self._changed:
            self._versions[buffer] = None
            self._leases[buffer] = {lease for lease in self._leases[buffer] if lease[1] != version}
            self._changed.notify_all()

    def let_go(self, why: Reason, version: int, buffer: int | None = None) -> None:
        """Give up that lease on the buffer; None: on whichever has it."""
        with self._changed:
            for leases in self._leases if buffer is None else [self._leases[buffer]]:
                leases.discard((why, version))
            self._changed.notify_all()

    def lease_base(self, buffer: int, version: int) -> bool:
        """Lease the buffer as a delta's base; False where it has other bytes by now, or the trainer waits for it."""
        with self._changed:
            if self._versions[buffer] != version or self._waiting[buffer]:
                return False
            if any(why == "being copied" for why, _ in self._leases[buffer]):
                return False
            self._leases[buffer].add(("the base of a delta", version))
            return True

    def wanted(self, buffer: int) -> bool:
        """Whether the trainer waits for the buffer."""
        return self._waiting[buffer] > 0
