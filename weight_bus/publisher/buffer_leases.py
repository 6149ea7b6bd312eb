"""Which version lies in which half of a double-buffered arena, and who still needs it. No bytes, no clock of its own.

    free ──begin(v)──► being copied ──► being hashed ─┐
     ▲                 └─ leased: announced, and not settled  ├──► free, when everyone has let go
     │                    └─ base: a delta reads it  ─┘                     │
     └──────────────────────────────────────────────────────────────────────┘

`begin` waits while anybody holds the half: that is the bus's back-pressure on the trainer.
"""

from __future__ import annotations

import threading
from typing import Literal

from services.wire.errors import DeadlineError

Hold = Literal["being copied", "being hashed", "announced and not settled", "the base of a delta"]
BUFFERS = 2


class BufferLeases:
    """Thread-safe. A hold is named by what for and for which version; letting go of one that is not held is nothing."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._versions: list[int | None] = [None] * BUFFERS
        self._holds: list[set[tuple[Hold, int]]] = [set() for _ in range(BUFFERS)]
        self._waiting = [0] * BUFFERS

    def begin(self, half: int, version: int, *, leased: bool, wait_s: float) -> None:
        """Take the half to copy `version` into it, and lease it until it is settled where `leased`.

        Waits while it is held. Raises DeadlineError, which names the holders, after `wait_s` seconds.
        """
        with self._changed:
            self._waiting[half] += 1
            try:
                if not self._changed.wait_for(lambda: not self._holds[half], wait_s):
                    held = ", ".join(f"version {number}, {why}" for why, number in sorted(self._holds[half]))
                    raise DeadlineError(
                        f"version {version} found no arena free for {wait_s:g} s: {held}",
                        "see the weight bus and the engines for what keeps the update from settling",
                    )
            finally:
                self._waiting[half] -= 1
            self._versions[half] = version
            self._holds[half].add(("being copied", version))
            if leased:
                self._holds[half].add(("announced and not settled", version))

    def copied(self, half: int, version: int) -> None:
        """The bytes are in place: from now on they are being hashed."""
        with self._changed:
            self._holds[half].discard(("being copied", version))
            self._holds[half].add(("being hashed", version))

    def abandon(self, half: int, version: int) -> None:
        """What was begun ended in an error: the half holds nobody's bytes."""
        with self._changed:
            self._versions[half] = None
            self._holds[half] = {hold for hold in self._holds[half] if hold[1] != version}
            self._changed.notify_all()

    def let_go(self, why: Hold, version: int, half: int | None = None) -> None:
        """Give up that hold on the half; None: on whichever has it."""
        with self._changed:
            for holds in self._holds if half is None else [self._holds[half]]:
                holds.discard((why, version))
            self._changed.notify_all()

    def hold_base(self, half: int, version: int) -> bool:
        """Hold the half as a delta's base; False where it has other bytes by now, or the trainer waits for it."""
        with self._changed:
            if self._versions[half] != version or self._waiting[half]:
                return False
            if any(why == "being copied" for why, _ in self._holds[half]):
                return False
            self._holds[half].add(("the base of a delta", version))
            return True

    def wanted(self, half: int) -> bool:
        """Whether the trainer waits for the half."""
        return self._waiting[half] > 0
