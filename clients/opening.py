"""Opening a group so that none is left behind: whoever is cancelled while it opens still ends it.

open ──answered──► the group
  └──cancelled──► answered within _ARRIVING_S? ──yes──► abort its sessions
                                               └──no───► hang up: the server drops what nobody heard of
"""

from __future__ import annotations

import asyncio

from clients.agent_play import abort
from clients.rollout import RolloutClient
from services.wire.rollout_api import GroupOpened, OpenGroup

_ARRIVING_S = 0.5


async def open_group(client: RolloutClient, body: OpenGroup) -> GroupOpened:
    """As `RolloutClient.open_group`; cancelled, it first takes back what has been opened meanwhile."""
    opening = asyncio.create_task(client.open_group(body))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        await _take_back(client, opening)
        raise


async def _take_back(client: RolloutClient, opening: asyncio.Task[GroupOpened]) -> None:
    await asyncio.wait({opening}, timeout=_ARRIVING_S)
    if not opening.done():
        opening.cancel()
        await asyncio.wait({opening})
    if not opening.cancelled() and opening.exception() is None:
        await abort(client, opening.result().session_ids)
