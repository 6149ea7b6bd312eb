"""Trajectory stream reader: complete groups, assembled in the background before the training thread asks for them.

    Redis ──read──► validate ──► GroupAssembler ──take──► training thread
                       │               │
                       └── rejected ───┴── spoiled ──► settled as drops, counted by cause, kept as dead letters;
                                                       admission makes up for the group

What was read is kept here until it is settled, so an entry that comes twice (a lost reply, a claim) is taken once. What
was trained is known until it is trimmed, so one that a restarted Redis delivers again is only acknowledged. Between two
reads the run's account is audited (`services.policies.balance`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Protocol

import structlog
from redis.exceptions import RedisError

from services.policies.balance import BALANCED, Corrections, corrections
from services.policies.batching import Drop, DropCause, Group, GroupAssembler, GroupFilter, Member, Objection, Verdict
from services.run_store.ledger import Ledger
from services.run_store.patience import passes, repeated
from services.run_store.stream import StreamEntry, TrajectoryReader, is_gone
from services.wire.errors import NoBatchError
from services.wire.trajectory import Trajectory
from trainer.data.tally import Arrivals, Tally
from trainer.data.validation import Rejected, Validator, group_of

_READ = 512
_BLOCK_MS = 500
# While the training thread is busy, entries are let gather: a read of forty costs little more than a read of four.
_GATHER_S = 0.005
_RECONNECT_S = 0.5
_SLICE_S = 0.1
_POST_AFTER_S = 0.2
_REPOST_S = 1.0
_CLAIM_AFTER_S = 5.0
_ASK_EVERY_S = 0.25
AUDIT_EVERY_S, _AUDIT_AGAIN_S = 5.0, 1.0
_CHECKPOINTS_AFTER_LOSS = 2

_log = structlog.get_logger()


class Follower(Protocol):
    """Who is told, on the background loop, what arrives and what is settled."""

    def begin(self, members: Sequence[Member[Trajectory]]) -> None:
        """These are sound; each may be told of several times."""
        ...

    def forget(self, entries: Collection[str]) -> None:
        """These are settled, and nobody asks for them any more."""
        ...


class Intake:
    """`version`: the newest policy version that exists. `expire_after_s`: how long siblings may lag before their server is
    asked for. `smallest`: siblings that a group is trained with at the least, where others of it are lost. `group_filter`:
    which of the complete groups are trained. `follower`: is told what arrives.

    `run` lives on the background loop; `take` is for the training thread.
    """

    def __init__(
        self,
        open_reader: Callable[[], TrajectoryReader],
        ledger: Ledger,
        validator: Validator,
        version: Callable[[], int],
        expire_after_s: float,
        smallest: int = 2,
        group_filter: GroupFilter | None = None,
        audit_every_s: float = AUDIT_EVERY_S,
        follower: Follower | None = None,
    ) -> None:
        self._open_reader = open_reader
        self._reader = open_reader()
        self._ledger, self._validator, self._version = ledger, validator, version
        self._expire_after_s = expire_after_s
        self._filter = group_filter or GroupFilter()
        self._follower = follower
        self._assembler: GroupAssembler[Trajectory] = GroupAssembler(smallest, judge=self._judge)
        self._known: set[str] = set()
        self._changed = threading.Condition()
        self._wanted: int | None = None
        """Groups that the training thread waits for: with fewer it is not woken."""
        self._lost: set[str] = set()
        """Incomplete groups that no server holds open: what was on its way is in the stream by now."""
        self._asked_at = 0.0
        self._waiting_since: float | None = None
        self._trouble: str | None = None
        self._rejections = 0
        self._dropped_before: Mapping[str, Drop] = {}
        self._owed = Verdict()
        """Drops that are not settled yet."""
        self._arrivals = Arrivals()
        self._tally = Tally()
        self._acknowledging = asyncio.Lock()
        """What is settled and what is counted change together, seen from an audit."""
        self._audit_every_s, self._audit_at = audit_every_s, 0.0
        self._suspected = BALANCED
        self._process = ""
        self._checkpoints_due = 0

    async def run(
        self,
        trained_before: Collection[str] = (),
        dropped_before: Mapping[str, Drop] = MappingProxyType({}),
        consumed_groups: int = 0,
    ) -> None:
        """Read until cancelled. `trained_before`, `dropped_before`: entries of batches that the step log holds; they are
        settled as trained, or as it says, on sight.

        `consumed_groups`: how many groups were trained.
        """
        self._tally.begin(trained_before, consumed_groups)
        self._dropped_before = dropped_before
        await repeated(self._reader.open, "opening the stream")
        swept = time.monotonic()
        while True:
            try:
                entries = await self._reader.read(_READ, _BLOCK_MS)
                await self._ingest(entries, caught_up=self._reader.caught_up)
                waiting_since = self._waiting_since
                if waiting_since is not None and time.monotonic() - max(waiting_since, swept) > _CLAIM_AFTER_S:
                    swept = time.monotonic()
                    await self._claim_idle()
                if self._reader.caught_up and time.monotonic() >= self._audit_at:
                    await self._audit()
            except RedisError as error:
                self._audit_at = 0.0  # it may come back with less than it had
                if is_gone(error):
                    await repeated(self._reader.open, "opening the stream again")
                    continue
                if not passes(error):
                    raise
                self._trouble = f"Redis ({error})"
                _log.warning("stream out of reach", why=str(error))
                await asyncio.sleep(_RECONNECT_S)
                continue
            self._trouble = None
            if entries and self._waiting_since is None:
                await asyncio.sleep(_GATHER_S)

    def take(
        self,
        groups: int,
        deadline_s: float,
        *,
        post: Callable[[str], None],
        stopped: Callable[[], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> list[Group[Trajectory]] | None:
        """The next batch, or None once `stopped` says so. `post` is told what is waited for, again when that changes.
        `now`: seconds, of the deadline.

        Raises NoBatchError, saying what was missing, after `deadline_s` seconds.
        """
        started, posted, posted_at = now(), "", -_REPOST_S
        with self._changed:
            self._waiting_since, self._wanted = time.monotonic(), groups
            try:
                while (batch := self._complete(groups)) is None:
                    if stopped():
                        return None
                    waited = now() - started
                    if waited > deadline_s:
                        raise NoBatchError(
                            f"no batch within {deadline_s:g} s: {self._missing(groups)}",
                            "see the logs of the environment and the rollout servers; trainer.batch_timeout_s gives it "
                            "longer",
                        )
                    missing = self._missing(groups)
                    if waited > _POST_AFTER_S and waited - posted_at > _REPOST_S and posted != missing:
                        posted, posted_at = missing, waited
                        post(missing)
                    self._changed.wait(_SLICE_S)
                return batch
            finally:
                self._waiting_since = self._wanted = None

    def take_complete(self, groups: int) -> list[Group[Trajectory]] | None:
        """The next batch where it is there already; None where it is not."""
        with self._changed:
            return self._complete(groups)

    def _complete(self, groups: int) -> list[Group[Trajectory]] | None:
        batch = self._assembler.take(groups)
        if batch is not None:
            self._filter.batch_taken()
            self._tally.take(batch)
        return batch

    def take_arrivals(self) -> Arrivals:
        """What came since this was last asked."""
        with self._changed:
            arrivals, self._arrivals = self._arrivals, Arrivals()
        return arrivals

    def forget(self, entries: Collection[str]) -> None:
        """Entries that are settled now."""
        with self._changed:
            self._known.difference_update(entries)
            self._tally.drop(entries)
        if self._follower is not None:
            self._follower.forget(entries)

    def forget_before(self, stream_id: str) -> None:
        """Entries before this one were trimmed and cannot come again."""
        with self._changed:
            self._tally.forget_before(stream_id)

    def wants_checkpoint(self) -> bool:
        """Whether one is due because Redis was restarted: it may lack entries that a replay would need. For the training
        thread, which makes one then."""
        with self._changed:
            self._checkpoints_due, due = max(0, self._checkpoints_due - 1), self._checkpoints_due
        return due > 0

    async def settle_trained(self, entries: Sequence[str]) -> None:
        """Acknowledge entries whose gradient is durable."""
        started = time.perf_counter()
        async with self._acknowledging:
            await repeated(lambda: self._reader.acknowledge_trained(entries), "acknowledging trained trajectories")
            with self._changed:
                self._tally.settle(entries)
        self.forget(entries)
        self._count_work(started)

    async def settle_dropped(self, groups: Sequence[str], drops: Mapping[str, Drop]) -> None:
        """Settle the entries of a batch's `groups` that will never be trained, once the step log says so."""
        with self._changed:
            self._arrivals.dropped.update(str(drop.cause) for drop in drops.values())
        verdict = Verdict([*drops.values()], [*groups])
        await repeated(lambda: self._settle(verdict), "settling trajectories that cannot be trained")

    async def drain(self) -> int:
        """After the run has concluded (and `run` has been cancelled): drop all that is left; returns how many.

        What was trained is acknowledged as such, should Redis deliver it again; what was to be dropped for another cause
        is dropped for that; and the account is made right.
        """
        # A short run can end before `run` has settled all that it read.
        await self._settle_drops()
        reader = self._open_reader()
        await reader.open()
        dropped = 0
        while entries := await reader.read(_READ, 1):
            ids = [entry.stream_id for entry in entries]
            trained = [entry for entry in ids if entry in self._tally.trained]
            await reader.acknowledge_trained(trained)
            await self._settle(self._dropped_of(entries))
            left = [entry for entry in ids if not self._is_settled(entry)]
            dropped += await reader.acknowledge_dropped(DropCause.RUN_CONCLUDED, left)
        account = self._ledger.account
        found = corrections((await account.count()).counted, self._tally.durable(()))
        # Groups that were left over are neither consumed nor dropped: nobody is admitted by their number any more.
        if rest := Corrections(published=found.published, trained=found.trained):
            _log.warning("the run's account is corrected to the step log", **asdict(rest))
            await account.correct(rest)
        return dropped

    async def _ingest(self, entries: Sequence[StreamEntry], *, caught_up: bool) -> None:
        """`caught_up`: nothing that was written before these were read is yet to come."""
        started = time.perf_counter()
        verdict, settled_before = self._dropped_of(entries), list[StreamEntry]()
        newest, now = self._version(), time.monotonic()
        unknown: list[StreamEntry] = []
        for entry in entries:
            if self._is_settled(entry.stream_id):
                settled_before.append(entry)
            elif entry.stream_id not in self._known:
                unknown.append(entry)
        if any(entry.ref for entry in unknown):
            unknown = await self._reader.with_blobs(unknown)
        judged = self._validator.judge_all(unknown, newest)
        with self._changed:
            # A sibling that a batch of an earlier incarnation went without is not the first of a new group.
            self._assembler.settle(group for group in map(group_of, settled_before) if group is not None)
            trained = [entry for entry in settled_before if entry.stream_id in self._tally.trained]
            self._tally.known({group for group in map(group_of, trained) if group is not None})
            for item in judged:
                self._known.add(item.entry)
                _extend(verdict, self._take_up(item, now) if isinstance(item, Member) else self._reject(item))
            if caught_up:
                _extend(verdict, self._assembler.expire(self._lost))
            overdue = self._assembler.overdue(now - self._expire_after_s)
            self._arrivals.dropped.update(str(drop.cause) for drop in verdict.drops)
            if self._wanted is not None and self._assembler.complete >= self._wanted:
                self._changed.notify_all()
        if self._follower is not None:
            self._follower.begin([item for item in judged if isinstance(item, Member)])
        for group in verdict.spoiled:
            _log.warning("group will never be trained", group=group)
        _extend(self._owed, verdict)
        # Siblings end when their agents do. Only a group that its server has closed is waited for in vain; whether it
        # has is asked before the next read, so that siblings written last are not overlooked.
        if now - self._asked_at >= _ASK_EVERY_S or not overdue:
            self._asked_at = now
            self._lost = set(overdue) - await self._ledger.still_open(overdue)
        if trained:
            await self._reader.acknowledge_trained([entry.stream_id for entry in trained])
        await self._settle_drops()
        self._count_work(started)

    def _is_settled(self, entry: str) -> bool:
        """Whether the step log says what became of it."""
        return entry in self._tally.trained or entry in self._dropped_before

    def _dropped_of(self, entries: Sequence[StreamEntry]) -> Verdict:
        """What the step log says was dropped of these, and their groups."""
        dropped = [entry for entry in entries if entry.stream_id in self._dropped_before]
        groups = {group for group in map(group_of, dropped) if group is not None}
        return Verdict([self._dropped_before[entry.stream_id] for entry in dropped], sorted(groups))

    def _count_work(self, started: float) -> None:
        with self._changed:
            self._arrivals.busy_s += time.perf_counter() - started

    def _judge(self, group: Group[Trajectory]) -> Objection | None:
        return self._filter.judge({member.index: member.payload.reward for member in group.members})

    def _take_up(self, member: Member[Trajectory], now: float) -> Verdict:
        self._arrivals.trajectories += 1
        self._arrivals.tokens += member.payload.sampled_tokens()
        return self._assembler.add(member, now)

    def _reject(self, rejected: Rejected) -> Verdict:
        self._rejections += 1
        if self._rejections <= 10 or self._rejections % 100 == 0:
            _log.warning("trajectory dropped", cause=str(rejected.cause), why=rejected.why, entry=rejected.entry)
        verdict = Verdict()
        if rejected.group is not None:
            verdict = self._assembler.spoil(rejected.group, why=rejected.why)
        verdict.drops.append(Drop(rejected.entry, rejected.cause, rejected.why))
        return verdict

    async def _settle_drops(self) -> None:
        """Where Redis fails in the middle, all of it is done once more: neither call counts anything twice."""
        await self._settle(self._owed)
        self._owed = Verdict()

    async def _settle(self, verdict: Verdict) -> None:
        # The group first: once its entries are settled, the successor of a trainer that dies here would not hear of it.
        for group in verdict.spoiled:
            await self._ledger.drop_group(group)
        by_cause: dict[DropCause, dict[str, str]] = defaultdict(dict)
        for drop in verdict.drops:
            by_cause[drop.cause][drop.entry] = drop.why
        for cause, reasons in by_cause.items():
            # What is dropped in a run's ordinary course would drive out the dead letters that are worth looking at.
            await self._reader.acknowledge_dropped(cause, reasons if cause.fault else [*reasons])
            self.forget(reasons)

    async def _audit(self) -> None:
        """Compare the run's account with the step log and the stream; correct it where it is wrong twice alike."""
        account = self._ledger.account
        async with self._acknowledging:
            snapshot = await account.count()
            before, self._process = self._process, snapshot.process
            if before and before != snapshot.process:
                await self._after_restart()
                return
            with self._changed:
                durable = self._tally.durable(self._assembler.held())
            self._audit_at = time.monotonic() + self._audit_every_s
            if not snapshot.read:
                return
            found, suspected = corrections(snapshot.counted, durable), self._suspected
            self._suspected = found
            if found:
                self._audit_at = time.monotonic() + min(_AUDIT_AGAIN_S, self._audit_every_s)
            if found and found == suspected:
                _log.warning("the run's account is corrected to the step log", **asdict(found))
                await account.correct(found)
            elif not found and suspected:
                await account.note(0)

    async def _after_restart(self) -> None:
        """Redis was restarted, and may have lost what came last: drop what could not be made again from the stream."""
        await self._reader.open()
        await self._read_again()
        with self._changed:
            held = self._assembler.rest()
        missing = await self._ledger.account.missing(held)
        with self._changed:
            verdict = self._assembler.lose(missing)
            self._arrivals.dropped.update(str(drop.cause) for drop in verdict.drops)
            self._checkpoints_due = _CHECKPOINTS_AFTER_LOSS
        _log.warning("Redis was restarted", entries_lost=len(missing), groups_dropped=len(verdict.spoiled))
        _extend(self._owed, verdict)
        await self._settle_drops()

    async def _read_again(self) -> None:
        """What was delivered and is not settled, as far as Redis knows."""
        reader = self._open_reader()
        while entries := await reader.read(_READ, 1):
            await self._ingest(entries, caught_up=False)

    async def _claim_idle(self) -> None:
        """Read again what was delivered and never settled: the reply to a read may have been lost with its connection."""
        if await self._reader.pending() <= len(self._known):
            return
        reader = self._open_reader()
        entries = await reader.read(_READ, 1)
        await self._ingest(entries, caught_up=False)

    def _missing(self, groups: int) -> str:
        if self._trouble is not None:
            return self._trouble
        text = f"groups {self._assembler.complete}/{groups} ready"
        partial = self._assembler.oldest_partial()
        if partial is None:
            return text
        sibling = self._assembler.partial_payload(partial.group)
        server = f" of server {sibling.server_id}" if sibling is not None else ""
        lacking = ", ".join(map(str, partial.lacking))
        return (
            f"{text}; group {partial.ordinal}{server}: {partial.have} of {partial.size} siblings (missing: {lacking})"
        )


def _extend(verdict: Verdict, more: Verdict) -> None:
    verdict.drops += more.drops
    verdict.spoiled += more.spoiled
