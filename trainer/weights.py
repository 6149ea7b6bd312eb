"""Weight updates of the trainer: publish on the training thread, announce and await the commit in the background.

    training thread   publish(v) ─ cast into an arena, which is leased ─► Publication
    background        step record durable? ─► manifest ─► its digest in the step log ─► announce(v)
                      ─► settled: committed | superseded | failed ─► release

The publisher has two arenas: v is not published before v − 2 is released, so that no receiver reads a mixture; with
`weights.arenas=1` not before v − 1 is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

import structlog

from services.host.aio import TELL_EVERY_S
from services.observability.tracing import NO_TRACING, Tracing
from services.policies.training.deadlines import Pace, settled_within, within
from services.policies.versions import Announced
from services.wire.errors import ConflictError, NotFoundError, RollmeshError
from services.wire.weights_api import SETTLED, UpdateView, VerifyView
from trainer.io_loop import Background
from weight_bus.client.bus_client import BusClient
from weight_bus.manifest.computed import PublishedTensor
from weight_bus.manifest.manifest import Manifest
from weight_bus.publisher.publisher import Publication, Publisher

_POLL_S = 5.0
_RETRY_S = 0.25
_VERIFIED_S = 120.0
_SMALL_BYTES = 1 << 20
_SMALL_MANIFEST_S = 0.002
"""Small weights are hashed in a tenth of it."""

_log = structlog.get_logger()
_Result = TypeVar("_Result")


class WeightsError(RollmeshError):
    """No engine serves what the trainer published."""

    code = "weights"


class WeightUpdates:
    """Publishes versions and follows their updates. `stage_s`: how long a stage may take, at the least. `write_down`: is
    called with version and digest before a version is announced, which waits until it is done.

    `committed` and `newest` are read on the training thread and replaced as a whole on the background loop.
    """

    def __init__(
        self,
        publisher: Publisher,
        bus: BusClient,
        background: Background,
        stage_s: float,
        write_down: Callable[[int, str], Future[None]],
        committed_before: int = 0,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self._publisher, self._bus, self._background = publisher, bus, background
        self._tracing, self._write_down = tracing, write_down
        self._stage_s = stage_s
        self._pace = Pace()
        """Of whole stages: all bytes of a version, by the time that an engine took for it."""
        self._following: dict[int, Future[UpdateView]] = {}
        self._base: int | None = None
        self.newest: UpdateView | None = None
        """The update that settled last."""
        self.call_overhead_ms = 0.0
        """What the last announcement took beyond the update itself."""
        self.committed = committed_before
        """How many updates engines have committed, not counting the first."""

    @property
    def newest_state(self) -> tuple[int, str] | None:
        """Version and state of `newest`."""
        newest = self.newest
        return None if newest is None else (newest.version, newest.state)

    @property
    def _staged_within(self) -> float:
        return within(self._stage_s, self._publisher.layout.total_bytes, self._pace.slowest)

    @property
    def _settle_s(self) -> float:
        """How long an update may take to settle: as long as the bus gives its stages."""
        return settled_within(self._staged_within)

    @property
    def verified_within(self) -> float:
        """Seconds that engines have to hash what they serve."""
        return max(_VERIFIED_S, 2 * self._staged_within)

    def digest(self, version: int, weights: Mapping[str, PublishedTensor]) -> str:
        """The root digest that `weights` would have as `version`; nothing is published."""
        return self._publisher.digest(version, weights)

    async def known_to_bus(self) -> Announced:
        """The newest version that the bus knows of; version 0 where it knows none. Raises DeadlineError."""
        view = await self._bus.versions()
        return Announced(view.newest, view.newest_digest)

    def publish_first(self, version: int, weights: Mapping[str, PublishedTensor], deadline_s: float) -> None:
        """Publish `version` and wait until an engine serves it, so that engines and trainer start from the same bytes.

        Raises WeightsError when none does within `deadline_s`.
        """
        self._base = version
        publication = self._publisher.publish(version, weights)
        self._background.call(self._first_committed(publication, deadline_s), f"version {version}", deadline_s + 30)

    def publish(self, version: int, weights: Mapping[str, PublishedTensor], durable: Future[None]) -> None:
        """Publish `version`; it is announced once `durable` (the record of the step that made it) is done.

        Blocks for the copy, and until the update that its arena holds has settled. Raises DeadlineError where that takes
        too long.
        """
        for before in [update for update, future in self._following.items() if future.done()]:
            self._wait_for(self._following.pop(before), before)
        self._publisher.wait_s = self._settle_s
        publication = self._publisher.publish(version, weights, leased=True)
        if self._publisher.layout.total_bytes < _SMALL_BYTES:
            # The threads that announce it would wait longer for the interpreter's lock than they work.
            publication.wait(_SMALL_MANIFEST_S)
        self._following[version] = self._background.spawn(
            self._follow(publication, durable), f"weight update {version}"
        )

    def abandon(self) -> None:
        """Stop following updates, before the bus client is closed; the bus continues with them."""
        for future in self._following.values():
            future.cancel()
        self._following.clear()

    def finish(self, version: int, deadline_s: float) -> None:
        """Wait until engines serve the last `version`. Raises WeightsError when none does within `deadline_s`."""
        for update, future in list(self._following.items()):
            self._wait_for(future, update)
        self._following.clear()
        manifest = self._publisher.latest
        settled = self.newest
        if manifest is None or (settled is not None and (settled.version, settled.state) == (version, "committed")):
            return
        self._background.call(self._until_committed(manifest, deadline_s), f"version {version}", deadline_s + 30)

    async def verify(self) -> VerifyView:
        """Have every engine hash what it serves, against the newest published bytes."""
        view = await self._bus.verify(self.verified_within)
        manifest = self._publisher.latest
        if manifest is not None and view.version != manifest.version:
            # A restarted bus does not know the version yet.
            await self._bus.announce(manifest, wait_s=_POLL_S)
            view = await self._bus.verify(self.verified_within)
        return view

    async def close(self) -> None:
        await self._bus.close()

    async def _follow(self, publication: Publication, durable: Future[None]) -> UpdateView:
        """Part of the batch's span: tasks on the loop inherit the context they are spawned in."""
        structlog.contextvars.bind_contextvars(version=publication.version)
        with self._tracing.span("trainer.update") as span:
            view = await self._followed(publication, durable)
            span.note(version=view.version, state=view.state)
        return view

    async def _followed(self, publication: Publication, durable: Future[None]) -> UpdateView:
        try:
            await _result_of(durable)
            manifest = await _result_of(publication.future)
            await _result_of(self._write_down(manifest.version, manifest.root_digest))
            started = time.perf_counter()
            view = await self._settled(manifest, self._settle_s)
        finally:
            self._publisher.release(publication.version)
        if view.publish_to_commit_ms is not None:
            self.call_overhead_ms = (time.perf_counter() - started) * 1e3 - view.publish_to_commit_ms
        self._note(view)
        return view

    async def _settled(self, manifest: Manifest, deadline_s: float) -> UpdateView:
        try:
            return await self._announced(manifest, deadline_s)
        except ConflictError:
            latest = self._publisher.latest
            if latest is None or latest.version <= manifest.version:
                raise
            # Two were pending when the bus was restarted, and the newer one was announced first.
            return UpdateView(
                version=manifest.version, state="superseded", root_digest=manifest.root_digest, engines=[]
            )

    async def _announced(self, manifest: Manifest, deadline_s: float) -> UpdateView:
        view = await self._bus.announce(manifest, wait_s=min(deadline_s, _POLL_S))
        if view.state in SETTLED:
            return view
        try:
            return await self._bus.wait_settled(manifest.version, deadline_s)
        except NotFoundError:
            # The bus was restarted meanwhile and does not know the update: announce it again.
            await self._bus.announce(manifest)
            return await self._bus.wait_settled(manifest.version, deadline_s)

    async def _first_committed(self, publication: Publication, deadline_s: float) -> None:
        manifest = await _result_of(publication.future)
        await _result_of(self._write_down(manifest.version, manifest.root_digest))
        await self._until_committed(manifest, deadline_s)

    async def _until_committed(self, manifest: Manifest, deadline_s: float) -> None:
        """Announce until committed: an update without any engine fails at once, and engines may still be loading."""
        ends, told_at = time.monotonic() + deadline_s, 0.0
        while True:
            view = await self._settled(manifest, max(_RETRY_S, min(self._settle_s, ends - time.monotonic())))
            if view.state == "committed":
                self._note(view)
                return
            if time.monotonic() - told_at > TELL_EVERY_S:
                told_at = time.monotonic()
                waiting = f"engines to serve version {manifest.version}"
                _log.info("waiting", waiting_for=waiting, why=_whys(view), left_s=round(ends - told_at))
            if time.monotonic() > ends:
                raise WeightsError(
                    f"no engine serves version {manifest.version} after {deadline_s:g} s ({_whys(view)})",
                    "see the logs of the rollout servers and of the weight bus",
                )
            await asyncio.sleep(_RETRY_S)

    def _note(self, view: UpdateView) -> None:
        total = self._publisher.layout.total_bytes
        for engine in view.engines:
            if engine.bytes_read * 2 >= total:
                self._pace.note(total, engine.stage_ms / 1e3)
        if view.state == "committed":
            self.committed += view.version != self._base
        elif view.state == "failed":
            _log.warning("weight update failed", version=view.version, why=_whys(view))
        if self.newest is None or view.version >= self.newest.version:
            self.newest = view

    def _wait_for(self, update: Future[UpdateView], version: int) -> None:
        self._background.result(update, f"weight update {version}", self._settle_s)


async def _result_of(future: Future[_Result]) -> _Result:
    """Without a turn of the loop where it is there."""
    if future.done() and not future.cancelled():
        return future.result()
    return await asyncio.wrap_future(future)


def _whys(view: UpdateView) -> str:
    return "; ".join(f"{engine.engine_id}: {engine.why or engine.state}" for engine in view.engines) or "no engine"
