"""Weight updates of an external engine through its own HTTP routes: stage, commit, rollback, digest.

                    a rollout server                     any other engine
    stage           pulls the bytes while it decodes     as its weight backend does it
    commit          flips between two steps; each        requests are ended with what they have (`abort`), the
                    token comes with its version         cache is cleared, and only then the version changes

In the second way the engine need not report versions, since no request spans two; the client continues from the tokens
that it has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from rollout_server.engines.http.client import EngineClient
from rollout_server.engines.http.health import EngineHealth, Traits
from services.wire.errors import ConflictError, NotFoundError, NotReadyError, RollmeshError
from services.wire.weights_api import CommitAnswer, StageAnswer
from weight_bus.errors import StageError
from weight_bus.manifest.manifest import decode_manifest
from weight_bus.vllm.protocol import BACKEND, LIVE_WEIGHTS

_REMEDY = (
    f"start it where rollmesh is installed, with VLLM_SERVER_DEV_MODE=1 {LIVE_WEIGHTS}=1 and "
    f'--weight-transfer-config {{"backend":"{BACKEND}"}}, or let it serve fixed weights without a bus'
)


class Updates:
    """One update at a time. `stand_still` ends all requests and holds new ones back, until `go_on`."""

    def __init__(
        self,
        client: EngineClient,
        health: EngineHealth,
        run_id: str,
        transport: str,
        *,
        stand_still: Callable[[], Awaitable[int]],
        go_on: Callable[[], None],
    ) -> None:
        self._client = client
        self._health = health
        self._run_id = run_id
        self._transport = transport
        self._stand_still = stand_still
        self._go_on = go_on
        self._turn = asyncio.Lock()
        self._staged: int | None = None
        self._nbytes = 0
        """Of the last version that was offered."""

    @property
    def busy(self) -> bool:
        return self._turn.locked()

    @property
    def staged_version(self) -> int | None:
        return self._staged

    async def stage(self, manifest: bytes, traits: Traits) -> StageAnswer:
        """Raises StageError for an engine that takes no manifests, and what the engine answers."""
        decoded = decode_manifest(manifest)
        if not traits.operated:
            raise StageError(f"the engine at {self._client.url} has no routes for new weights", _REMEDY)
        async with self._turn:
            started, self._staged, self._nbytes = time.monotonic(), None, decoded.layout.total_bytes
            try:
                await self._client.stage(manifest, self._run_id, self._transport, self._nbytes)
            except NotReadyError:
                raise
            except RollmeshError as error:
                if traits.ours:
                    raise
                raise StageError(
                    f"the engine at {self._client.url} took no manifest ({error.what})", _REMEDY
                ) from error
            self._staged = decoded.version
        return StageAnswer(
            version=decoded.version,
            root_digest=decoded.root_digest,
            bytes_read=decoded.layout.total_bytes,
            seconds=time.monotonic() - started,
        )

    async def commit(self, version: int, traits: Traits, in_flight: int) -> CommitAnswer:
        """`flip_ms` is as long as the engine took to answer: what a commit costs at most. `in_flight`: requests there.

        Raises ConflictError unless exactly `version` is staged.
        """
        async with self._turn:
            if self.serves(version):
                return CommitAnswer(version, 0.0, in_flight)
            if version != self._staged:
                raise ConflictError(f"version {version} is not staged ({self._staged} is)", "stage it first")
            self._staged = None
            return await self._serve(version, self._client.finish_update, traits, in_flight)

    async def rollback(self, version: int, traits: Traits, in_flight: int) -> CommitAnswer:
        """As `commit`. Raises ConflictError where the engine keeps no older version, or has no route for it."""
        async with self._turn:
            if self.serves(version):
                return CommitAnswer(version, 0.0, in_flight)
            try:
                self._health.rolling_back(version)
                if not traits.ours:
                    # Before requests are ended for it: the version that is served is answered, nothing changes.
                    await self._client.rollback(self._health.version)
                report = await self._serve(version, self._client.rollback, traits, in_flight)
            except NotFoundError as error:
                raise ConflictError(
                    f"the engine at {self._client.url} has no /weights/rollback, it keeps no older version",
                    "publish the old weights as a new version, or start it with VLLM_PLUGINS=rollmesh",
                ) from error
            self._staged = None
            return report

    def serves(self, version: int) -> bool:
        """Whether the engine is known to serve it already: a commit or rollback would change nothing."""
        return self._health.failure is None and version == self._health.version

    async def _serve(
        self, version: int, change: Callable[[int], Awaitable[None]], traits: Traits, in_flight: int
    ) -> CommitAnswer:
        started = time.monotonic()
        if traits.ours:
            await self._finish(version, change)
        else:
            in_flight = await self._alone(version, change)
        return CommitAnswer(version, (time.monotonic() - started) * 1e3, in_flight)

    async def digest(self) -> str:
        """Raises NotFoundError where the engine does not tell it."""
        root = (await self._client.checksums(self._nbytes)).get("root")
        if root is None:
            raise NotFoundError(
                f"the engine at {self._client.url} tells a checksum a tensor, not the manifest's root digest",
                "only a rollout server tells that",
            )
        return root

    def forget(self) -> None:
        """The engine was restarted: nothing is staged there."""
        self._staged = None

    async def _alone(self, version: int, change: Callable[[int], Awaitable[None]]) -> int:
        """With no request in flight; returns how many were ended for it."""
        try:
            ended = await self._stand_still()
            # Also what the engine has not yet noticed to be over, and prefixes that the old weights computed.
            await self._client.pause("abort", clear_cache=True)
            try:
                await self._finish(version, change)
            finally:
                await self._client.resume()
        finally:
            self._go_on()
        return ended

    async def _finish(self, version: int, change: Callable[[int], Awaitable[None]]) -> None:
        self._health.committing(version)
        try:
            await change(version)
        except RollmeshError:
            # It may have done it all the same: what it says now counts.
            label = await self._client.weight_label()
            if label != str(version):
                self._health.commit_failed()
                if not self._health.serves(label):
                    self._health.find(label)
                raise
        self._health.committed(version)
