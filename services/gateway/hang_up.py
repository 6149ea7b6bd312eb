"""Ending a block as soon as the agent hangs up: the server, which has more patience, is then told at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Message, Receive


class AgentGoneError(Exception):
    """The agent hung up; nobody waits for the answer."""


@asynccontextmanager
async def until_hung_up(receive: Receive) -> AsyncIterator[None]:
    """Run the block; raises AgentGoneError when the agent disconnects first. The request's body must have been read."""
    limit = asyncio.timeout(None)
    gone = done = False

    def on_message(watch: asyncio.Future[Message]) -> None:
        # With the body read, the only message that can come is that the agent is gone, or has its whole answer.
        nonlocal gone
        if not watch.cancelled() and not done:
            gone = True
            limit.reschedule(asyncio.get_running_loop().time())

    watch = asyncio.ensure_future(receive())
    watch.add_done_callback(on_message)
    try:
        async with limit:
            try:
                yield
            finally:
                done = True
    except TimeoutError as error:
        if gone and limit.expired():
            raise AgentGoneError from error
        raise
    finally:
        watch.cancel()
