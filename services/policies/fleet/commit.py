"""Two-phase commit of weight updates over a fleet: who is asked what, and when.

An engine within one update (the fleet policy draws the line in the middle: `services.policies.fleet.policy`):

    pending ──stage──► staging ──ok──► prepared ──(policy)──commit──► committing ──ok──► committed
       │                  └──────────────────── failed ◄──────────────────┘
       │                                          │ next heartbeat, while attempts last
       │                                          └──► pending
       └──rollback (it serves a withdrawn version)──► rolling_back ──ok──► committed

An update:

    staging ──policy decides──► prepared ──the decided flips answered──► committed
       │  └──held: nobody flips before `commit`──► held ──► …
       ├──nobody could be prepared, the roll stopped, the quorum was missed──► failed ──an engine catches up──► committed
       │                                                                     └──`final`: only where it is asked for again
       ├──newer version──► superseded
       └──`cancel`, before flips are decided──► cancelled

    committed or failed ──`rollback`──► rolled_back: engines that serve it go one version back, also those that come later

- An engine that failed keeps its old version. Who joins later, or comes back, is brought to where the fleet is.
- A `final` update that failed is given up: whoever joins later is brought to the version before it. Where engines of a
  stopped roll serve it already, nobody is asked anything until an operator decides.
- A newer version supersedes one whose flips are not decided. Decided flips are finished first (they are quick), so
  that engines do not part ways.
- An engine has one open question at a time; only a stage may overtake a stage, of an older version, which it ends.

No clock here: whoever drives the machine turns time-outs into answers and lapsed leases into `leave`, so that every
question is answered and every update settles (or is held, which only an operator may ask for).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from services.policies.fleet.policy import BARRIER, FLIPPING, FleetPolicy
from services.policies.fleet.update import Ask, Member, Phase, Progress, Update, finishing, in_state, judge
from services.wire.weights_api import EngineState, UpdateState

__all__ = ["Ask", "CommitMachine", "Progress", "Update"]
_BEGUN: dict[Phase, EngineState] = {"stage": "staging", "commit": "committing", "rollback": "rolling_back"}


class CommitMachine:
    """The fleet's state. `attempts`: how often an engine is asked to stage the same version before it is left.

    After any call, ask what `take_asks` returns. Methods for operators raise ValueError for what cannot be done.
    """

    def __init__(self, attempts: int = 3, policy: FleetPolicy = BARRIER) -> None:
        if attempts < 1:
            raise ValueError(f"an engine needs at least one attempt, got {attempts}")
        self.policy = policy
        self._attempts = attempts
        self._members: dict[str, Member] = {}
        self._current: Update | None = None
        self._queued: Update | None = None
        self._served_by_fleet: int | None = None
        self._withdrawn: dict[int, Update] = {}
        self._highest: int | None = None
        self._open: dict[str, Ask] = {}
        self._serial = 0

    @property
    def latest(self) -> Update | None:
        """The update that engines are brought to, also while it waits for its predecessor's flips."""
        return self._queued or self._current

    @property
    def current(self) -> Update | None:
        """The update that engines are asked about now."""
        return self._current

    @property
    def goal(self) -> int | None:
        """The version that every engine should serve: the latest, but for one that is held."""
        if self._queued is not None and not self._queued.hold:
            return self._queued.version
        if self._current is None:
            return None
        return self._served_by_fleet if self._current.hold else self._current.version

    @property
    def highest(self) -> int | None:
        """The highest version ever announced: a new one must be above it."""
        return self._highest

    @property
    def withdrawn(self) -> Mapping[int, Update]:
        """Versions that were cancelled, rolled back or given up, and not asked for again."""
        return self._withdrawn

    @property
    def members(self) -> dict[str, int]:
        """Live engines and the version that each serves, as far as is known."""
        return {engine_id: member.policy_version for engine_id, member in self._members.items()}

    def announce(self, version: int, *, hold: bool = False, final: bool = False) -> Update:
        """Take up a new version. Raises ValueError unless it is newer than every one before.

        `final`: should it fail, it is not tried again unless somebody asks for it again. Else it is, at heartbeats, and by
        engines that join: a trainer's next version supersedes it anyway.
        """
        if self._highest is not None and version <= self._highest:
            raise ValueError(f"version {version} is not newer than {self._highest}")
        self._highest = version
        return self._take_up(Update(version, hold=hold, final=final))

    def offer_again(self) -> None:
        """The latest version can be had from new sources: engines that failed get all their attempts again."""
        current = self._current
        if current is not None and self._queued is None:
            current.stopped.clear()
            if current.given_up:
                current.state, current.why = "staging", None
            for engine_id in self._in_state(current, "failed"):
                self._set(current, engine_id, Progress("pending"))

    def release(self, version: int, *, hold: bool = False) -> Update:
        """An operator's commit: flip a held version, go on with a stopped roll, offer a withdrawn or failed version again.

        `hold`: a version that is offered again is staged only.
        """
        latest = self.latest
        if latest is not None and latest.version == version:
            latest.hold = False
            self.offer_again()
            self._settle()
            return latest
        if version in self._withdrawn and version == self._highest:
            if latest is not None and not latest.settled:
                raise ValueError(f"version {latest.version} is {latest.state}: wait for it, or cancel it")
            final = self._withdrawn.pop(version).final
            return self._take_up(Update(version, hold=hold, final=final))
        raise ValueError(f"version {version} is past: the newest is {self._highest}")

    def cancel(self, version: int) -> None:
        """Give up a version of which no flip is decided. Engines that a roll took there already go back."""
        queued, current = self._queued, self._current
        if queued is not None and queued.version == version:
            self._queued = None
            queued.state = "cancelled"
            self._withdrawn[version] = queued
            return
        if current is None or current.version != version or current.restores:
            raise ValueError(f"version {version} is not under way")
        if queued is not None or self._finishing(current):
            raise ValueError(f"flips to version {version} are decided and under way: roll it back afterwards")
        if current.settled:
            raise ValueError(f"version {version} is {current.state}: it can only be rolled back")
        self._withdraw(current, "cancelled", self._served_by_fleet)

    def rollback(self, target: int | None = None) -> Update:
        """Withdraw the latest version and bring engines back to `target` (None: the version before it)."""
        current = self._current
        if current is None:
            return self._withdraw(self._unannounced(target), "rolled_back", target)
        if self._queued is not None or not current.settled:
            busy = self._queued or current
            raise ValueError(f"version {busy.version} is {busy.state}: wait for it, or cancel it")
        if current.restores:
            raise ValueError(f"the fleet was brought back to version {current.version} already: one step is kept")
        target = self._before(current) if target is None else target
        if target is None:
            raise ValueError(f"no version before {current.version} is known: say which one to go back to")
        if target >= current.version:
            raise ValueError(f"version {target} is not older than {current.version}")
        return self._withdraw(current, "rolled_back", target)

    def join(self, engine_id: str, policy_version: int, *, restarted: bool = False) -> None:
        """An engine registered, or said again that it lives and serves `policy_version`.

        `restarted`: it is known to be another process than before. Without that, a version that contradicts its last
        flip may have been sent before the flip; a second such message cannot, and means a restart too.
        """
        member = self._members.get(engine_id)
        if member is None or restarted:
            self._open.pop(engine_id, None)
            self._admit(engine_id, policy_version)
            return
        ahead = policy_version > member.policy_version and policy_version not in self._withdrawn
        if policy_version == member.policy_version:
            member.doubts = 0
        elif ahead:
            # Its answer to the commit was lost or is still on its way, the flip was not.
            self._serves(engine_id, policy_version)
        else:
            member.doubts += 1
            if member.doubts >= 2:
                self._admit(engine_id, policy_version)
                return
        self._try_again(engine_id)

    def leave(self, engine_id: str, why: str) -> None:
        """An engine said goodbye, or its lease lapsed. Updates stop waiting for it."""
        if self._members.pop(engine_id, None) is None:
            return
        self._open.pop(engine_id, None)
        current = self._current
        if current is None:
            return
        progress = current.progress[engine_id]
        if progress.state == "committing":
            self._stop_roll(current, engine_id, why)
        if progress.state != "committed":
            self._set(current, engine_id, Progress("failed", why=why))
        elif current.decided is not None:
            current.decided.discard(engine_id)
        self._settle()

    def answer(self, ask: Ask, failure: str | None = None) -> bool:
        """The answer to an ask; `failure` says what went wrong. Returns False for one that no longer matters."""
        open_still = self._open.get(ask.engine_id) == ask
        if open_still:
            del self._open[ask.engine_id]
        member, current = self._members.get(ask.engine_id), self._current
        if member is None or current is None:
            return False
        progress = current.progress[ask.engine_id]
        if (current.version, progress.serial, progress.state) != (ask.version, ask.serial, _BEGUN[ask.phase]):
            if open_still and failure is None and ask.phase != "stage":
                # The fleet was sent elsewhere meanwhile, but the engine did flip.
                self._serves(ask.engine_id, ask.version)
            return False
        if failure is not None:
            progress.state, progress.why = "failed", failure
            self._stop_roll(current, ask.engine_id, failure)
        elif ask.phase == "stage":
            progress.state, progress.why = "prepared", None
            current.stopped.pop(ask.engine_id, None)
        else:
            progress.state, progress.why = "committed", None
            self._flipped(ask, member)
        self._settle()
        return True

    def take_asks(self) -> list[Ask]:
        """What to ask whom now. Each ask is handed out once."""
        asks: list[Ask] = []
        while (current := self._current) is not None and not current.given_up:
            if self._queued is None:
                for engine_id in self._in_state(current, "pending"):
                    asks += self._ask(current, engine_id, self._first_phase(current, engine_id))
            for engine_id in self._flips(current):
                asks += self._ask(current, engine_id, "commit")
            self._settle()
            if self._current is current:
                break
        return asks

    def _take_up(self, update: Update) -> Update:
        current = self._current
        if self._queued is not None:
            self._queued.state = "superseded"
        if current is not None and self._finishing(current):
            self._queued = update
            return update
        self._queued = None
        if current is not None and not current.settled:
            current.state = "superseded"
        self._begin(update)
        return update

    def _begin(self, update: Update) -> None:
        if self._current is not None and self._current.state == "committed":
            self._served_by_fleet = self._current.version
        self._current = update
        for engine_id in self._members:
            update.progress[engine_id] = self._first_step(engine_id, update)
        self._settle()

    def _withdraw(self, update: Update, state: UpdateState, target: int | None) -> Update:
        """End `update` for good and bring the fleet to `target`; without one, to nowhere: what is served stays."""
        update.state = state
        self._withdrawn[update.version] = update
        target = self._before(update) if target is None else target
        self._current = self._served_by_fleet = None
        if target is None:
            return update
        restoring = Update(target, withdraws=update.version, decided=set())
        self._begin(restoring)
        return restoring

    def _unannounced(self, target: int | None) -> Update:
        """The newest version that is served, as after a restart of whoever drives the machine."""
        newest = max(self.members.values(), default=None)
        if target is None or newest is None or newest <= target:
            raise ValueError("no version was announced yet: say which one to go back to, older than one that is served")
        self._highest = newest
        return Update(newest)

    def _before(self, update: Update) -> int | None:
        """The version before `update`, from what was committed, else from what its engines served before."""
        if self._served_by_fleet is not None:
            return self._served_by_fleet
        members = [member for member in self._members.values() if member.policy_version == update.version]
        known = Counter(member.previous for member in members if member.previous is not None)
        return known.most_common(1)[0][0] if known else None

    def _admit(self, engine_id: str, policy_version: int) -> None:
        self._members[engine_id] = Member(policy_version)
        current = self._current
        if current is not None:
            self._set(current, engine_id, self._first_step(engine_id, current))
            self._settle()

    def _serves(self, engine_id: str, version: int) -> None:
        """An engine flipped without being asked to now: where it should not have, it goes from there."""
        before, current = self._members[engine_id], self._current
        if before.policy_version == version:
            return
        self._members[engine_id] = Member(version, before.policy_version)
        if current is not None and current.progress[engine_id].state == "committed" and current.version != version:
            self._set(current, engine_id, Progress("pending"))

    def _try_again(self, engine_id: str) -> None:
        current = self._current
        if current is None or current.given_up or (progress := current.progress[engine_id]).state != "failed":
            return
        if self._members[engine_id].policy_version == current.version:
            self._set(current, engine_id, Progress("committed"))
            current.stopped.pop(engine_id, None)
            self._settle()
        elif progress.attempts < self._attempts:
            self._set(current, engine_id, Progress("pending", attempts=progress.attempts, why=progress.why))

    def _set(self, update: Update, engine_id: str, progress: Progress) -> None:
        """Give an engine another place: it is no longer one of those whose flip was decided together."""
        update.progress[engine_id] = progress
        if update.decided is not None:
            update.decided.discard(engine_id)

    def _first_step(self, engine_id: str, update: Update) -> Progress:
        return Progress("committed" if self._members[engine_id].policy_version == update.version else "pending")

    def _first_phase(self, update: Update, engine_id: str) -> Phase:
        served = self._members[engine_id].policy_version
        return "rollback" if served in self._withdrawn and served > update.version else "stage"

    def _ask(self, update: Update, engine_id: str, phase: Phase) -> list[Ask]:
        """The ask, once the engine has answered what it was asked before."""
        busy = self._open.get(engine_id)
        if busy is not None and not (phase == busy.phase == "stage" and busy.version < update.version):
            return []
        progress = update.progress[engine_id]
        self._serial += 1
        progress.serial, progress.state = self._serial, _BEGUN[phase]
        progress.attempts += phase != "commit"
        ask = self._open[engine_id] = Ask(engine_id, phase, update.version, self._serial)
        return [ask]

    def _flips(self, current: Update) -> list[str]:
        prepared = self._in_state(current, "prepared")
        if current.hold or not prepared:
            return []
        if current.decided is None and self.policy.name == "rolling":
            if self._queued is not None:
                return []
            flipping = len(self._in_state(current, *FLIPPING))
            return list(self.policy.next_in_roll(prepared, flipping, bool(current.stopped)))
        if current.decided is None and self.policy.decides(self._states(current)):
            current.decided = set(prepared)
        return [] if current.decided is None else prepared

    def _flipped(self, ask: Ask, member: Member) -> None:
        left = self._withdrawn.get(member.policy_version)
        if ask.phase == "rollback" and left is not None:
            left.progress[ask.engine_id] = Progress("rolled_back")
        # A heartbeat may have told of the flip before its answer did.
        previous = member.previous if member.policy_version == ask.version else member.policy_version
        self._members[ask.engine_id] = Member(ask.version, None if ask.phase == "rollback" else previous)

    def _stop_roll(self, update: Update, engine_id: str, why: str) -> None:
        if self.policy.name == "rolling" and update.decided is None and update.state != "committed":
            update.stopped[engine_id] = f"the roll stopped at {engine_id}: {why}"

    def _in_state(self, update: Update, *states: EngineState) -> list[str]:
        return in_state(update, self._members, *states)

    def _states(self, update: Update) -> list[EngineState]:
        return [update.progress[engine_id].state for engine_id in self._members]

    def _finishing(self, update: Update) -> bool:
        return finishing(update, self._members)

    def _settle(self) -> None:
        current = self._current
        if current is None:
            return
        judge(current, self._members, self.policy)
        if self._queued is not None and not self._finishing(current):
            if not current.settled:
                current.state = "superseded"
            queued, self._queued = self._queued, None
            self._begin(queued)
        elif current.given_up and not self._in_state(current, "committed", *FLIPPING):
            self._withdraw(current, "failed", self._served_by_fleet)
