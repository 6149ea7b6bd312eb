"""Server-sent events of a run: each open page is told what has changed since it was told last.

    first page opens ──► a task looks at the run every so often ──► sections (name → JSON) ──► each page: those that differ
    last page closes ──► the task ends: a run that nobody looks at costs nothing

A page that reads slowly misses looks, and gets the newest one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from types import TracebackType
from typing import Protocol

import structlog
from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from services.dashboard.open_runs import OpenRun
from services.dashboard.plan import DashboardPlan
from services.http.auth import Authorizer
from services.wire.errors import CapacityError

MOST_PAGES = 64
STILL_EVERY_S = 3.0
"""An event without content, so that a page knows that it is still told everything."""
Sections = Mapping[str, bytes]
"""Name → JSON."""

_log = structlog.get_logger()


class Look(Protocol):
    """Looks at one run. `pause_s`: how long to wait before the next look."""

    pause_s: float

    async def look(self) -> Sections:
        """All sections as they are now. Raises nothing that a run may cause: what cannot be read is said in a section."""
        ...


MakeLook = Callable[[OpenRun], AbstractAsyncContextManager[Look]]


class Watch:
    """One run that pages look at. `sections` is empty before the first look."""

    def __init__(self, run: OpenRun, make_look: MakeLook) -> None:
        self._run, self._make_look = run, make_look
        self.sections: Sections = {}
        self.looked = asyncio.Event()
        """Set at the next look, and then replaced."""
        self.pages = 0

    async def run(self) -> None:
        """Look until cancelled."""
        async with self._make_look(self._run) as looking:
            while True:
                self.sections = await looking.look()
                looked, self.looked = self.looked, asyncio.Event()
                looked.set()
                await asyncio.sleep(looking.pause_s)


class Watches:
    """The runs that are looked at, and their tasks. A context manager: at its end all of them end."""

    def __init__(self, make_look: MakeLook) -> None:
        self._make_look = make_look
        self._watches: dict[str, tuple[Watch, asyncio.Task[None]]] = {}
        self._ended = asyncio.Event()
        self._pages = 0

    async def __aenter__(self) -> Watches:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.end()
        for _, task in list(self._watches.values()):
            await _ended(task)

    def end(self) -> None:
        """All streams of events end: a server that ends waits for them."""
        self._ended.set()

    @asynccontextmanager
    async def watching(self, run: OpenRun) -> AsyncIterator[Watch]:
        """The run is looked at while the block lasts. Raises CapacityError past MOST_PAGES."""
        if self._pages >= MOST_PAGES:
            raise CapacityError(f"{MOST_PAGES} pages are open here", retry_after_s=5.0)
        key = _key(run)
        if key not in self._watches:
            watch = Watch(run, self._make_look)
            self._watches[key] = watch, asyncio.create_task(watch.run(), name=f"looking at {run.name}")
        watch, task = self._watches[key]
        watch.pages += 1
        self._pages += 1
        try:
            yield watch
        finally:
            watch.pages -= 1
            self._pages -= 1
            if watch.pages == 0:
                del self._watches[key]
                await _ended(task)

    async def stream(self, run: OpenRun) -> AsyncIterator[bytes]:
        """Server-sent events until the caller goes, this service ends or looking at the run fails."""
        async with self.watching(run) as watch:
            told: Sections = {}
            looking = self._watches[_key(run)][1]
            ended = asyncio.create_task(self._ended.wait(), name="end of the service")
            try:
                while not self._ended.is_set() and not looking.done():
                    looked = asyncio.create_task(watch.looked.wait(), name="next look")
                    try:
                        changed = {name: text for name, text in watch.sections.items() if told.get(name) != text}
                        if changed:
                            told = watch.sections
                            yield event("change", changed)
                        done, _ = await asyncio.wait(
                            {looked, ended, looking}, timeout=STILL_EVERY_S, return_when=asyncio.FIRST_COMPLETED
                        )
                        if not done:
                            yield b"event: still\ndata: {}\n\n"
                    finally:
                        looked.cancel()
            finally:
                ended.cancel()


def _key(run: OpenRun) -> str:
    """Where it has ended, or began again elsewhere, it is another thing to look at."""
    return f"{run.name} {run.redis_url}"


def event(name: str, sections: Sections) -> bytes:
    """One event: an object of the sections."""
    body = b",".join(b'"' + key.encode() + b'":' + text for key, text in sections.items())
    return b"event: " + name.encode() + b"\ndata: {" + body + b"}\n\n"


def event_routes(plan: DashboardPlan, watches: Watches, authorizer: Authorizer) -> APIRouter:
    """The route of events."""
    router = APIRouter(tags=["runs"])

    @router.get("/api/runs/{run}/events", response_class=StreamingResponse, dependencies=authorizer.of("reading"))
    async def read_events(run: str) -> StreamingResponse:
        """What the run does, as server-sent events: `change` with the sections that are new, `still` where none is."""
        found = await asyncio.to_thread(plan.runs.named, run)
        return StreamingResponse(watches.stream(found), media_type="text/event-stream")

    return router


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        try:
            await task
        except Exception:  # noqa: BLE001 - a bug: said with its traceback; the service goes on
            _log.exception("looking at a run failed")
