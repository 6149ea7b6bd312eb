"""Work that is only worth doing while the client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from services.wire.errors import RollmeshError

T = TypeVar("T")


class ClientGoneError(RollmeshError):
    """The client hung up before its answer was ready; nobody reads this error."""

    status = 499
    code = "client_gone"


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, but cancel it (and wait for its end) when the client disconnects first.

    The request's body must have been read. Raises ClientGoneError when the client left.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError("the client disconnected")
    finally:
        for each in (task, watch):
            if not each.done():
                each.cancel()
        if not task.done():
            await asyncio.wait({task})


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
