"""Watches the engine behind a URL: gone, back again, or with weights that nobody committed.

serving ── a probe or a request finds nobody ──► lost ── meets it again ──► serving, or strange until a commit
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from rollout_server.engines.http_peer import Peer
from rollout_server.engines.http_standing import Standing
from rollout_server.engines.http_traits import Traits, meet
from services.wire.errors import NotReadyError, RollmeshError

_log = structlog.get_logger()
_EVERY_S = 1.0
_PROBE_S = 10.0
_RETRY_S = 0.25


class Watch:
    """Keeps `standing` and `traits` true. `on_lost` ends what is in flight; `on_met` is called when it is back.

    `busy`: an update is under way, in which the engine may answer nothing else for long.
    """

    def __init__(
        self,
        peer: Peer,
        standing: Standing,
        *,
        on_lost: Callable[[RollmeshError], None],
        on_met: Callable[[], Awaitable[None]],
        busy: Callable[[], bool],
    ) -> None:
        self._peer = peer
        self._standing = standing
        self._on_lost = on_lost
        self._on_met = on_met
        self._busy = busy
        self._poked = asyncio.Event()
        self.traits: Traits | None = None

    async def meet_within(self, deadline_s: float) -> None:
        """Wait for the engine to answer. Raises what it answered last, at once where waiting mends nothing."""
        said = False
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    try:
                        await self._meet()
                        return
                    except NotReadyError as error:
                        if not said:
                            _log.warning("waiting", waiting_for=f"the engine at {self._peer.url}", why=error.what)
                        said = True
                        self._standing.lose(error.what)
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError as error:
            raise NotReadyError(self._standing.failure or "", f"it had {deadline_s:g} s: see that it runs") from error

    def lose(self, error: RollmeshError) -> None:
        """Somebody found nobody there."""
        if not self._standing.lost:
            _log.warning("engine lost", url=self._peer.url, why=error.what)
        self._standing.lose(error.what)
        self._poked.set()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                if self._standing.lost:
                    await self._find_again()
                else:
                    await self._sleep(_EVERY_S)
                    await self._probe()
        except Exception as error:  # a bug: unwatched, the engine must not seem to be well
            _log.exception("the watch of the engine failed", url=self._peer.url)
            self._standing.lose(f"its watch failed ({error!r})")
            self._on_lost(NotReadyError(self._standing.failure or "", "restart this rollout server"))
            raise

    async def _find_again(self) -> None:
        try:
            await self._meet()
            await self._on_met()
        except RollmeshError as error:
            self._standing.lose(error.what)
            await asyncio.sleep(_RETRY_S)
            return
        _log.info("engine found again", url=self._peer.url, version=self._standing.version, why=self._standing.failure)

    async def _meet(self) -> None:
        self.traits = traits = await meet(self._peer)
        self._standing.find(traits.label)

    async def _probe(self) -> None:
        if self._standing.lost or self._busy():
            return
        try:
            label = None
            if self.traits is not None and self.traits.operated:
                label = await self._peer.weight_label(_PROBE_S)
            else:
                await self._peer.health(_PROBE_S)
        except RollmeshError as error:
            self.lose(error)
            self._on_lost(error)
            return
        if not self._busy() and not self._standing.serves(label):
            self._standing.find(label)
            _log.error("weights nobody committed here", url=self._peer.url, why=self._standing.failure)

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._poked.wait()
        except TimeoutError:
            pass
        self._poked.clear()
