"""Work that is only worth doing while the client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request

from services.wire.errors import RollmeshError

T = TypeVar("T")


class ClientGoneError(RollmeshError):
    """The client hung up before its answer was ready; nobody reads this error."""

    status = 499
    code = "client_gone"


async def while_connected(
    request: Request,
    work: Coroutine[Any, Any, T],
    *,
    check: Callable[[], None] | None = None,
    check_every_s: float | None = None,
) -> T:
    """Await `work`, but cancel it (and wait for its end) when the client disconnects first.

    `check` is called every `check_every_s` seconds; what it raises ends the work too. The request's body must have been
    read. Raises ClientGoneError when the client left.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_hung_up(request))
    try:
        while not task.done():
            await asyncio.wait({task, watch}, timeout=check_every_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                break
            if watch.done():
                raise ClientGoneError("the client disconnected")
            if check is not None:
                check()
        return task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
