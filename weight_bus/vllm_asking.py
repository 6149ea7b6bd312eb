"""Asking the engine core for something of ours: one utility call, or as many as it takes where workers are at it."""

from __future__ import annotations

import asyncio
from typing import Any

from weight_bus.vllm_protocol import Pending, Reply, decode_reply

_POLL_S = 0.02


async def ask(core: Any, method: str, *arguments: Any) -> Reply:
    """The reply to a utility call between two steps of `core`, vLLM's client of the engine core; never Pending.

    Raises the failure that it carries. It has no deadline of its own.
    """
    reply = decode_reply(await core.call_utility_async(method, *arguments))
    while isinstance(reply, Pending):
        await asyncio.sleep(_POLL_S)
        reply = decode_reply(await core.call_utility_async("rollmesh_poll", reply.ticket))
    return reply
