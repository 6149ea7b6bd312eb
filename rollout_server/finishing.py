"""Ending a group: its trajectories into the stream exactly once, its place in the ledger given back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import structlog
from redis.exceptions import RedisError

from rollout_server.groups import DropCause, Group, GroupRegistry
from rollout_server.publishing import Publisher
from services.ledger import Ledger
from services.wire.errors import ConcludedError, ConflictError, UsageError
from services.wire.rollout_api import SessionReward
from services.wire.trajectory import Trajectory

_log = structlog.get_logger()


class Finisher:
    """Finishes groups and drops those that nobody will finish."""

    def __init__(
        self, registry: GroupRegistry, publisher: Publisher, ledger: Ledger, run_id: str, server_id: str
    ) -> None:
        self._registry = registry
        self._publisher = publisher
        self._ledger = ledger
        self._run_id = run_id
        self._server_id = server_id

    async def finish(self, group_id: str, rewards: Sequence[SessionReward]) -> dict[str, str]:
        """Publish the group's trajectories; returns session id → stream id (empty for `evaluate`). Repeats answer the same.

        Raises UsageError unless every session has exactly one reward, ConflictError while a turn is being taken or when a
        session never took one, ConcludedError (and the group is dropped) when the run has concluded, NotReadyError (and the
        group stays open) when Redis fails.
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
            by_session = _match(group, rewards)
            stream_ids = await self._publish(group, by_session) if group.purpose == "train" else {}
            self._registry.finish(group, stream_ids)
            return stream_ids

    async def _publish(self, group: Group, rewards: dict[str, SessionReward]) -> dict[str, str]:
        silent = [session.session_id for session in group.sessions.values() if session.turns == 0]
        if silent:
            raise ConflictError(f"session {silent[0]} took no turn", "let it take one, or let the group expire")
        finished_at = time.time()
        trajectories = [
            Trajectory(
                run_id=self._run_id,
                trajectory_id=session.session_id,
                group_id=group.group_id,
                group_ordinal=group.ordinal,
                group_size=len(group.sessions),
                member=session.member,
                task=group.task,
                segments=session.capture.segments(),
                reward=rewards[session.session_id].reward,
                reward_components=rewards[session.session_id].components,
                sampling=session.sampling or group.sampling,
                server_id=self._server_id,
                opened_at=group.opened_at,
                finished_at=finished_at,
                finish_reason=session.finish_reason,
            )
            for session in group.sessions.values()
        ]
        try:
            stream_ids = await self._publisher.publish(group.group_id, trajectories)
        except ConcludedError:
            self._registry.drop(group, "run_concluded")
            raise
        return dict(zip(group.sessions, stream_ids, strict=True))

    async def drop(self, group: Group, cause: DropCause) -> bool:
        """Drop an open group, unless something is going on in it; returns whether it was dropped.

        When Redis fails the group stays as it is, to be dropped later.
        """
        if group.busy:
            return False
        async with group.closing:
            if self._registry.find_ended(group.group_id) is not None:
                return False
            if group.purpose == "train":
                try:
                    await self._ledger.close_group(group.group_id, dropped=True)
                except RedisError as error:
                    _log.warning("cannot drop a group yet", group=group.group_id, cause=cause, error=str(error))
                    return False
            self._registry.drop(group, cause)
        _log.info("group dropped", group=group.group_id, ordinal=group.ordinal, cause=cause)
        return True

    async def drop_all(self, cause: DropCause) -> None:
        """Drop every open group in one call to Redis, whatever goes on in them: the server is ending.

        Raises RedisError, having dropped nothing.
        """
        groups = self._registry.all_open()
        in_ledger = [group.group_id for group in groups if group.purpose == "train"]
        if in_ledger:
            await self._ledger.close_groups(in_ledger, dropped=True)
        for group in groups:
            self._registry.drop(group, cause)
        if groups:
            _log.info("groups dropped", groups=len(groups), cause=cause)


async def sweep(registry: GroupRegistry, finisher: Finisher, timeout_s: float) -> None:
    """Drop groups that were idle for `timeout_s`, and forget old ends, until cancelled."""
    while True:
        await asyncio.sleep(min(1.0, timeout_s / 4))
        now = time.monotonic()
        for group in registry.idle_since(now - timeout_s):
            await finisher.drop(group, "idle")
        registry.forget_ended(now)


def _match(group: Group, rewards: Sequence[SessionReward]) -> dict[str, SessionReward]:
    by_session = {reward.session_id: reward for reward in rewards}
    if len(by_session) != len(rewards):
        raise UsageError(f"group {group.group_id}: a session has two rewards", "give each session exactly one")
    missing = group.sessions.keys() - by_session.keys()
    strange = by_session.keys() - group.sessions.keys()
    if missing or strange:
        which = f"{min(missing)} has none" if missing else f"{min(strange)!r} is no session of it"
        raise UsageError(f"group {group.group_id}: {which}", "give each session exactly one reward")
    return by_session
