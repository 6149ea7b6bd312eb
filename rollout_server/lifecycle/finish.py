"""Ending sessions and groups: trajectories into the stream exactly once, places in the ledger given back.

finish (a whole group) ──► in one step: all trajectories appended, journal concluded, place in the ledger given back
finish_session ──► one trajectory ──► journal ──┐
abandon (abort, idle, deadline) ────► journal ──┴─ the last sibling ended? ──► the same, as dropped unless all were finished

A server that has lost the group to another cannot write any of it: the stream and the journal ask who the owner is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import structlog
from redis.exceptions import RedisError

from rollout_server.journal.journal import Journal
from rollout_server.journal.records import GroupEnded, Rewarded, SessionEnded, encode_finished, encode_record
from rollout_server.journal.replay import apply_end, apply_reward
from rollout_server.lifecycle.publish import Publisher
from rollout_server.lifecycle.trajectory import Origin, end_of, trajectory_of
from rollout_server.sessions.group import Group, GroupRegistry
from rollout_server.sessions.session import DropCause, Reward, Session, SessionEnd
from services.run_store.ledger import Ledger
from services.run_store.publishing import JournalEnd
from services.run_store.stream import TrajectoryLog
from services.run_store.undelivered import UndeliveredError
from services.wire.errors import (
    ConcludedError,
    ConflictError,
    DrainingError,
    NotFoundError,
    NotReadyError,
    UsageError,
)
from services.wire.rollout_api import SessionReward
from services.wire.session_api import GiveReward, SessionState
from services.wire.trajectory import Trajectory, decode_trajectory

_TRIES = 5
_RUN_CONCLUDED = encode_record(GroupEnded(stream_ids=None, cause="run_concluded"))

_log = structlog.get_logger()


class Finisher:
    """Rewards, finishes, aborts and drops sessions and groups."""

    def __init__(
        self,
        registry: GroupRegistry,
        publisher: Publisher,
        ledger: Ledger,
        journal: Journal,
        log: TrajectoryLog,
        origin: Origin,
    ) -> None:
        self._registry = registry
        self._publisher = publisher
        self._ledger = ledger
        self._journal = journal
        self._log = log
        self._origin = origin

    async def finish(self, group_id: str, rewards: Sequence[SessionReward]) -> dict[str, str]:
        """Publish the group's trajectories; returns session id → stream id (empty for `evaluate`). Repeats answer the same.

        Raises UsageError unless every session has exactly one reward, ConflictError while a call is in flight, when a
        session never took a turn, is yet to be opened or has ended by itself, ConcludedError (and the group is dropped)
        when the run has concluded, NotReadyError (and the group stays open) when Redis fails.
        """
        ended = self._registry.find_ended(group_id)
        if ended is not None:
            return ended.answer(group_id)
        group = self._registry.find_open(group_id)
        async with group.closing:
            ended = self._registry.find_ended(group_id)
            if ended is not None:
                return ended.answer(group_id)
            if group.taking_turns:
                raise ConflictError(f"a session of group {group_id} is taking a turn", "wait for its answer")
            _match(group, rewards)
            for reward in rewards:
                session = group.sessions[reward.session_id]
                session.rewards.session = Reward(reward.reward, reward.components)
            stream_ids = await self._publish(group) if group.purpose == "train" else await self._conclude(group)
            self._registry.finish(group, stream_ids)
            return stream_ids

    async def _conclude(self, group: Group) -> dict[str, str]:
        """The end of a group that is not trained, for all servers. Raises DrainingError where it is another's now."""
        try:
            ended = GroupEnded(stream_ids={}, cause=None)
            await self._journal.conclude(group.group_id, ended, list(group.sessions))
        except RedisError as error:
            # It is finished all the same: its owner's entry is taken away when it is found to be stale.
            _log.warning("cannot conclude a journal", group=group.group_id, error=str(error))
        return {}

    async def _append(
        self, group: Group, sessions: Sequence[Session], end: JournalEnd | None = None
    ) -> tuple[list[Trajectory], list[str]]:
        """The trajectories of these sessions, without what no agent got, and their stream ids.

        `end`: of their group, which ends with them. Raises as `Publisher.publish` does, and ConflictError where nothing is
        left of one.
        """
        undelivered: frozenset[str] = frozenset()
        try:
            for _ in range(_TRIES):
                for session in sessions:
                    session.leave_out(undelivered)
                trajectories = [trajectory_of(self._origin, group, session) for session in sessions]
                try:
                    ids = await self._publisher.publish(
                        group.group_id, trajectories, closes=end is not None, without=undelivered, end=end
                    )
                    if left_out := sum(len(session.capture.left_out) for session in sessions):
                        _log.info("answers that no agent got are not trained", group=group.group_id, answers=left_out)
                    return trajectories, ids
                except UndeliveredError as noted:
                    undelivered = noted.calls
            raise NotReadyError(f"calls of group {group.group_id} are just being given up", "finish it again")
        except BaseException:
            # It stays open, and a retry may yet bring what was left out.
            for session in sessions:
                session.capture.leave_out(())
            raise

    async def _publish(self, group: Group) -> dict[str, str]:
        """All of a group, with its end for all servers. Raises as `_append` does; where another has it, it is gone here."""
        end = JournalEnd(encode_finished(list(group.sessions)), _RUN_CONCLUDED)
        try:
            trajectories, stream_ids = await self._append(group, list(group.sessions.values()), end)
        except ConcludedError:
            self._journal.ended(group.group_id)
            self._registry.drop(group, "run_concluded")
            raise
        except DrainingError as lost:
            self._journal.ended(group.group_id)
            self._registry.forget_open(group.group_id, lost)
            raise
        self._journal.ended(group.group_id)
        pairs = zip(group.sessions.values(), trajectories, stream_ids, strict=True)
        for session, trajectory, stream_id in pairs:
            session.conclude("finished", stream_id, len(trajectory.segments))
        return dict(zip(group.sessions, stream_ids, strict=True))

    async def reward(self, session: Session, given: GiveReward) -> None:
        """Give the session, or one call of it, a reward in place of an earlier one. Raises as `Journal.append` does."""
        record = Rewarded(
            session_id=session.session_id, value=given.reward, components=given.components, call_id=given.call_id
        )
        await self._journal.append(session.group_id, record, lambda: apply_reward(session, record))

    async def finish_session(self, session: Session) -> SessionEnd:
        """Publish one session's trajectory and end it. Its rewards have been given.

        Raises ConflictError while a call is in flight, when nothing was answered or no reward was given; ConcludedError
        (and the session is dropped) when the run has concluded; NotReadyError (and it stays open) when Redis fails.
        """
        group = self._registry.group_of(session)
        with session.being_ended():
            if not session.rewards.given:
                raise ConflictError(f"session {session.session_id} has no reward", "give one, or abort the session")
            stream_id, segments = None, 0
            if session.terms.purpose == "train":
                try:
                    (trajectory,), (stream_id,) = await self._append(group, [session])
                except ConcludedError:
                    await self._end(group, session, "dropped")
                    raise
                except DrainingError as lost:
                    self._registry.forget_open(group.group_id, lost)
                    raise
                segments = len(trajectory.segments)
            return await self._end(group, session, "finished", stream_id, segments)

    async def finished_before(self, session_id: str) -> SessionEnd:
        """The end of a session that this server does not know any more (it was restarted), as the stream holds it.

        Raises NotFoundError for one that was never finished or whose trajectory was trimmed.
        """
        stream_id = await self._ledger.stream_id_of(session_id)
        if stream_id is None:
            raise NotFoundError(f"no session {session_id!r} on this server", "it never was here, or ended long ago")
        entry = await self._log.one(stream_id)
        if entry is None:
            raise NotFoundError(f"the trajectory of session {session_id!r} was trimmed", "it was finished long ago")
        return end_of(session_id, stream_id, decode_trajectory(entry.payload))

    async def abort(self, session: Session) -> SessionEnd:
        """Abort at the environment's request, as `abandon`. Raises ConflictError while another call ends the session."""
        if session.ending:
            raise ConflictError(f"session {session.session_id} is being ended", "wait for its answer")
        return await self.abandon(session, "aborted")

    async def abandon(self, session: Session, state: SessionState) -> SessionEnd:
        """End a session without a trajectory, and the calls that run in it."""
        group = self._registry.group_of(session)
        _log.info("session given up", session=session.session_id, state=state, answers=session.capture.answers)
        session.ending = True
        # Of a session that has ended, its tokens are forgotten.
        sampled = session.capture.sampled if session.terms.purpose == "train" else 0
        try:
            end = await self._end(group, session, state)
        finally:
            session.ending = False
        if sampled:
            await self._count_given_up(session.session_id, sampled)
        return end

    async def _count_given_up(self, session_id: str, sampled: int) -> None:
        try:
            await self._ledger.count_given_up(sampled)
        except RedisError as error:
            _log.warning("a session's length is not counted", session=session_id, sampled=sampled, error=str(error))

    async def _end(
        self, group: Group, session: Session, state: SessionState, stream_id: str | None = None, segments: int = 0
    ) -> SessionEnd:
        record = SessionEnded(
            session_id=session.session_id,
            state=state,
            stream_id=stream_id,
            segments=segments,
            ended_at=time.time(),
            left_out=[node.number for node in session.capture.left_out],
        )
        await self._journal.append(group.group_id, record, lambda: apply_end(session, record))
        end = session.end
        assert end is not None
        group.last_used = time.monotonic()
        if group.complete:
            await self.settle(group)
        return end

    async def settle(self, group: Group) -> bool:
        """Close a group in which nothing is left to happen; returns whether it is closed.

        When Redis fails it stays as it is, to be settled by the expiry.
        """
        async with group.closing:
            if self._registry.find_ended(group.group_id) is not None:
                return True
            ends = [session.end for session in group.sessions.values() if session.end is not None]
            finished = len(ends) == group.size and all(end.state == "finished" for end in ends)
            ids = {end.session_id: end.stream_id for end in ends if end.stream_id is not None} if finished else None
            cause: DropCause | None = None
            if not finished:
                cause = "aborted" if any(end.state == "aborted" for end in ends) else "idle"
                _log.info("group dropped", group=group.group_id, ordinal=group.ordinal, cause=cause)
            return await self._close(group, ids, cause)

    async def drop(self, group: Group, cause: DropCause) -> bool:
        """Drop an open group, with the calls that run in it. Returns and raises as `settle` does."""
        async with group.closing:
            if self._registry.get_open(group.group_id) is not group:
                return True
            train = group.purpose == "train"
            given_up = [(each.session_id, each.capture.sampled) for each in group.live if train]
            closed = await self._close(group, None, cause)
        for session_id, sampled in given_up:
            if closed and sampled:
                await self._count_given_up(session_id, sampled)
        return closed

    async def _close(self, group: Group, ids: dict[str, str] | None, cause: DropCause | None) -> bool:
        try:
            # Asked first, because it knows whether the group is still ours to close.
            await self._journal.conclude(group.group_id, GroupEnded(stream_ids=ids, cause=cause), list(group.sessions))
            if group.purpose == "train":
                await self._ledger.close_group(group.group_id, dropped=ids is None)
        except RedisError as error:
            _log.warning("cannot close a group yet", group=group.group_id, error=str(error))
            return False
        if ids is not None:
            self._registry.finish(group, ids)
        else:
            self._registry.drop(group, cause or "idle")
        return True

    async def drop_all(self, cause: DropCause) -> None:
        """Drop every open group, with the calls that run in it: the run's last server is ending. Raises RedisError."""
        groups = self._registry.all_open()
        for group in groups:
            await self._journal.conclude(group.group_id, GroupEnded(stream_ids=None, cause=cause), list(group.sessions))
        in_ledger = [group.group_id for group in groups if group.purpose == "train"]
        if in_ledger:
            await self._ledger.close_groups(in_ledger, dropped=True)
        for group in groups:
            self._registry.drop(group, cause)
        if groups:
            _log.info("groups dropped", groups=len(groups), cause=cause)


def _match(group: Group, rewards: Sequence[SessionReward]) -> None:
    by_session = {reward.session_id: reward for reward in rewards}
    if len(by_session) != len(rewards):
        raise UsageError(f"group {group.group_id}: a session has two rewards", "give each session exactly one")
    if len(group.sessions) < group.size or len(group.live) < group.size:
        what = "was not opened yet" if len(group.sessions) < group.size else "has ended by itself"
        raise ConflictError(f"a session of group {group.group_id} {what}", "finish its sessions one by one")
    missing = group.sessions.keys() - by_session.keys()
    strange = by_session.keys() - group.sessions.keys()
    if missing or strange:
        which = f"{min(missing)} has none" if missing else f"{min(strange)!r} is no session of it"
        raise UsageError(f"group {group.group_id}: {which}", "give each session exactly one reward")
