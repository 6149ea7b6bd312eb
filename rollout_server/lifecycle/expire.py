"""Expiry of sessions and groups: by deadline and idle timeout; groups that nobody completes are dropped."""

from __future__ import annotations

import asyncio
import time

from rollout_server.lifecycle.finish import Finisher
from rollout_server.sessions.group import Group, GroupRegistry
from rollout_server.sessions.session import Session

LEFT_AFTER_S = 20.0
"""Idle timeout of a group whose client disconnected during a turn: it is taken to have died."""
_LONGEST_PAUSE_S = 1.0


async def expire_idle(registry: GroupRegistry, finisher: Finisher, idle_timeout_s: float) -> None:
    """Expire until cancelled, often enough for the shortest idle time, `idle_timeout_s`, of this server's own."""
    while True:
        await asyncio.sleep(min(_LONGEST_PAUSE_S, idle_timeout_s / 4))
        for group in registry.all_open():
            await _expire_group(group, finisher)
        registry.forget_ended(time.monotonic())


async def _expire_group(group: Group, finisher: Finisher) -> None:
    for session in group.live:
        # A running call sees the deadline itself; a session that is being ended will be in a moment.
        if session.end is None and not session.busy and (session.seconds_left() <= 0.0 or _is_idle(group, session)):
            await finisher.abandon(session, "expired")
    unused_s = time.monotonic() - group.last_used
    if not group.live and (group.complete or unused_s > group.idle_timeout_s):
        await finisher.settle(group)


def _is_idle(group: Group, session: Session) -> bool:
    """Siblings that were opened together are finished together: while one is used, those that wait for it are not idle."""
    together = group.live if group.opened_whole else [session]
    last_used = max(sibling.last_used for sibling in together)
    in_use = any(sibling.busy for sibling in together)
    idle_timeout_s = session.terms.idle_timeout_s
    return not in_use and time.monotonic() - last_used > (
        min(idle_timeout_s, LEFT_AFTER_S) if group.client_gone else idle_timeout_s
    )
