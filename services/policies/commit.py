"""Two-phase commit of weight updates, the barrier policy: nobody flips before everybody can.

An engine within one update:

    pending ──stage──► staging ──ok──► prepared ──(barrier)──commit──► committing ──ok──► committed
                          └─────────────────────── failed ◄───────────────┘
                                                     │ next heartbeat, while attempts last
                                                     └──► pending

An update:

    staging ──every live engine prepared or failed──► prepared ──barrier answered──► committed
       │  └──nobody could be prepared──► failed           │
       └──newer version──► superseded                     └── a newer version waits for the barrier's answers

- The barrier is decided once: as soon as no live engine is pending or staging, and at least one is prepared. Those
  prepared then flip. An engine that failed keeps its old version and holds up nobody.
- Before that moment a newer version supersedes the update outright. After it the decided flips are finished first (they
  are quick), so that engines do not part ways.
- Who joins later, or comes back after failing, catches up with the latest version by itself.

No clock here: whoever drives the machine turns time-outs into answers and lapsed leases into `leave`, so that every
question is answered and every update settles.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

EngineState = Literal["pending", "staging", "prepared", "committing", "committed", "failed"]
UpdateState = Literal["staging", "prepared", "committed", "failed", "superseded"]
Phase = Literal["stage", "commit"]

_BUSY: tuple[EngineState, ...] = ("pending", "staging", "prepared", "committing")
_SETTLED: tuple[UpdateState, ...] = ("committed", "failed", "superseded")


@dataclass(frozen=True)
class Ask:
    """What to ask an engine. Answer it through `CommitMachine.answer`; `serial` tells a late answer from the right one."""

    engine_id: str
    phase: Phase
    version: int
    serial: int


@dataclass
class Progress:
    """How far one engine is with one update. `why`: what went wrong, for `failed`."""

    state: EngineState
    attempts: int = 0
    why: str | None = None
    serial: int = -1


@dataclass
class Update:
    """One announced version. Changed by the machine alone; anybody may read it."""

    version: int
    state: UpdateState = "staging"
    progress: dict[str, Progress] = field(default_factory=dict)

    @property
    def settled(self) -> bool:
        return self.state in _SETTLED


@dataclass
class _Member:
    policy_version: int
    doubts: int = 0


class CommitMachine:
    """The barrier policy's state. `attempts`: how often an engine is asked to stage the same version before it is left.

    After any call, ask what `take_asks` returns.
    """

    def __init__(self, attempts: int = 3) -> None:
        if attempts < 1:
            raise ValueError(f"an engine needs at least one attempt, got {attempts}")
        self._attempts = attempts
        self._members: dict[str, _Member] = {}
        self._current: Update | None = None
        self._queued: Update | None = None
        self._barrier: frozenset[str] | None = None
        self._serial = 0

    @property
    def latest(self) -> Update | None:
        """The newest announced update, also while it waits for its predecessor's flips."""
        return self._queued or self._current

    @property
    def members(self) -> dict[str, int]:
        """Live engines and the version that each serves, as far as is known."""
        return {engine_id: member.policy_version for engine_id, member in self._members.items()}

    def announce(self, version: int) -> Update:
        """Take up a new version. Raises ValueError unless it is newer than the latest."""
        latest = self.latest
        if latest is not None and version <= latest.version:
            raise ValueError(f"version {version} is not newer than {latest.version}")
        update = Update(version)
        if self._current is not None and self._barrier is not None and not self._current.settled:
            if self._queued is not None:
                self._queued.state = "superseded"
            self._queued = update
        else:
            if self._current is not None and not self._current.settled:
                self._current.state = "superseded"
            self._begin(update)
        return update

    def offer_again(self) -> None:
        """The latest version can be had from new sources: engines that failed get all their attempts again."""
        if self._current is not None and self._queued is None:
            for engine_id in self._members:
                progress = self._current.progress[engine_id]
                if progress.state == "failed":
                    self._current.progress[engine_id] = Progress("pending")

    def join(self, engine_id: str, policy_version: int, *, restarted: bool = False) -> None:
        """An engine registered, or said again that it lives and serves `policy_version`.

        `restarted`: it is known to be another process than before. Without that, a version older than the one it
        committed may have been sent before the commit; a second such message cannot, and means the same.
        """
        member = self._members.get(engine_id)
        if member is None or restarted:
            self._members[engine_id] = _Member(policy_version)
            self._admit(engine_id)
            return
        if policy_version >= member.policy_version:
            member.policy_version, member.doubts = policy_version, 0
        else:
            member.doubts += 1
            if member.doubts >= 2:
                self._members[engine_id] = _Member(policy_version)
                self._admit(engine_id)
                return
        self._try_again(engine_id)

    def leave(self, engine_id: str, why: str) -> None:
        """An engine said goodbye, or its lease lapsed. Updates stop waiting for it."""
        if self._members.pop(engine_id, None) is None or self._current is None:
            return
        progress = self._current.progress[engine_id]
        if progress.state != "committed":
            self._current.progress[engine_id] = Progress("failed", why=why)
        if self._barrier is not None:
            self._barrier -= {engine_id}
        self._settle()

    def answer(self, ask: Ask, failure: str | None = None) -> bool:
        """The answer to an ask; `failure` says what went wrong. Returns False for one that no longer matters."""
        current = self._current
        if current is None or current.version != ask.version or ask.engine_id not in self._members:
            return False
        progress = current.progress[ask.engine_id]
        if progress.serial != ask.serial or progress.state not in ("staging", "committing"):
            return False
        if failure is not None:
            progress.state, progress.why = "failed", failure
        elif ask.phase == "stage":
            progress.state = "prepared"
        else:
            progress.state = "committed"
            self._members[ask.engine_id] = _Member(ask.version)
        self._settle()
        return True

    def take_asks(self) -> list[Ask]:
        """What to ask whom now. Each ask is handed out once."""
        asks: list[Ask] = []
        while self._current is not None:
            current = self._current
            asks += [self._ask(current, engine_id, "stage") for engine_id in self._in_state(current, "pending")]
            self._decide(current)
            if self._barrier is not None:
                asks += [self._ask(current, engine_id, "commit") for engine_id in self._in_state(current, "prepared")]
            self._settle()
            if self._current is current:
                break
        return asks

    def _begin(self, update: Update) -> None:
        self._current, self._barrier = update, None
        for engine_id, member in self._members.items():
            update.progress[engine_id] = _first_step(member, update)
        self._settle()

    def _admit(self, engine_id: str) -> None:
        if self._current is not None:
            self._current.progress[engine_id] = _first_step(self._members[engine_id], self._current)
            self._settle()

    def _try_again(self, engine_id: str) -> None:
        if self._current is None or (progress := self._current.progress[engine_id]).state != "failed":
            return
        if self._members[engine_id].policy_version == self._current.version:
            # Its answer to the commit was lost, the flip was not.
            self._current.progress[engine_id] = Progress("committed")
            self._settle()
        elif progress.attempts < self._attempts:
            self._current.progress[engine_id] = Progress("pending", attempts=progress.attempts, why=progress.why)

    def _ask(self, update: Update, engine_id: str, phase: Phase) -> Ask:
        progress = update.progress[engine_id]
        self._serial += 1
        progress.serial = self._serial
        progress.state = "staging" if phase == "stage" else "committing"
        progress.attempts += phase == "stage"
        return Ask(engine_id, phase, update.version, self._serial)

    def _in_state(self, update: Update, *states: EngineState) -> list[str]:
        return [engine_id for engine_id in self._members if update.progress[engine_id].state in states]

    def _decide(self, current: Update) -> None:
        if self._barrier is not None or self._in_state(current, "pending", "staging"):
            return
        if prepared := self._in_state(current, "prepared"):
            self._barrier = frozenset(prepared)
            if not current.settled:
                current.state = "prepared"

    def _settle(self) -> None:
        current = self._current
        if current is None or current.state == "superseded":
            return
        held_up = self._members.keys() if self._barrier is None else self._barrier
        if not current.settled and held_up & set(self._in_state(current, *_BUSY)):
            return
        serving = any(progress.state == "committed" for progress in current.progress.values())
        # Settled stays settled, but a failed update becomes a committed one when an engine catches up with it.
        if not current.settled or serving:
            current.state = "committed" if serving else "failed"
        if self._queued is not None:
            queued, self._queued = self._queued, None
            self._begin(queued)


def _first_step(member: _Member, update: Update) -> Progress:
    return Progress("committed" if member.policy_version == update.version else "pending")
