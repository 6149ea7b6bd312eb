"""Expiry of sessions and groups: by deadline and idle timeout; groups that nobody completes are dropped.

A group whose end cannot be written is tried again at the next sweep (Redis is away), or has gone (another server has taken
it over, and sweeps it). Neither keeps the others from theirs.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

import structlog
from redis.exceptions import RedisError

from rollout_server.lifecycle.finish import Finisher
from rollout_server.sessions.group import Group, GroupRegistry
from rollout_server.sessions.session import Session
from services.wire.errors import RollmeshError

LEFT_AFTER_S = 20.0
"""Idle timeout of a group whose client disconnected during a turn: it is taken to have died."""
_LONGEST_PAUSE_S = 1.0

_log = structlog.get_logger()


async def expire_idle(registry: GroupRegistry, finisher: Finisher, idle_timeout_s: float) -> None:
    """Expire until cancelled, often enough for the shortest idle time, `idle_timeout_s`, of this server's own."""
    failing: dict[str, str] = {}
    while True:
        await asyncio.sleep(min(_LONGEST_PAUSE_S, idle_timeout_s / 4))
        for group in registry.all_open():
            why = await _try_to_expire(group, registry, finisher)
            # Said once for each reason, not at each sweep.
            if why is not None and failing.get(group.group_id) != why:
                _log.warning("cannot expire a group yet", group=group.group_id, why=why)
            if why is None:
                failing.pop(group.group_id, None)
            else:
                failing[group.group_id] = why
        failing = {name: why for name, why in failing.items() if registry.get_open(name) is not None}
        registry.forget_ended(time.monotonic())


async def _try_to_expire(group: Group, registry: GroupRegistry, finisher: Finisher) -> str | None:
    """Why it could not be: a failure of one group is no failure of the server."""
    try:
        await _expire_group(group, registry, finisher)
    except (RollmeshError, RedisError) as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - a bug: said with its traceback, and the other groups go on
        _log.exception("expiring a group failed", group=group.group_id)
        return repr(error)
    return None


async def _expire_group(group: Group, registry: GroupRegistry, finisher: Finisher) -> None:
    use: _Use | None = None
    for session in group.live:
        if not registry.holds(group):
            return
        # A running call sees the deadline itself; a session that is being ended will be in a moment.
        if session.end is not None or session.busy:
            continue
        if use is None or not group.opened_whole:
            use = _use_of(group, session)
        if session.seconds_left() <= 0.0 or _is_idle(group, session, use):
            await finisher.abandon(session, "expired")
            use = None  # meanwhile a sibling may have been used
    unused_s = time.monotonic() - group.last_used
    if registry.holds(group) and not group.live and (group.complete or unused_s > group.idle_timeout_s):
        await finisher.settle(group)


class _Use(NamedTuple):
    """Of a session and those that are finished with it: whether one is in use, and when one was used last."""

    now: bool
    last: float


def _use_of(group: Group, session: Session) -> _Use:
    """Siblings that were opened together are finished together: while one is used, those that wait for it are not idle."""
    together = group.live if group.opened_whole else [session]
    return _Use(any(sibling.busy for sibling in together), max(sibling.last_used for sibling in together))


def _is_idle(group: Group, session: Session, use: _Use) -> bool:
    idle_timeout_s = session.terms.idle_timeout_s
    return not use.now and time.monotonic() - use.last > (
        min(idle_timeout_s, LEFT_AFTER_S) if group.client_gone else idle_timeout_s
    )
