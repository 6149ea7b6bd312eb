"""What the weight bus says: the versions that it remembers, and how far the newest update is."""

from __future__ import annotations

import asyncio
import time

import httpx
from pydantic import ValidationError

from services.dashboard.look.events import Sections
from services.wire.weights_api import SETTLED, UpdateView, VersionsView

_WITHIN_S = 1.0
MOST_UPDATES = 12
"""Updates that are remembered here, for their timeline."""
_EVERY_S = 3.0
"""Between two readings."""
_ASKED = 1
"""Updates that one reading asks for, but for the first: where more are made meanwhile, some are never seen."""


class BusLook:
    """Reads one bus. What it does not answer is left as it was: that it is away is told with the services."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._versions: VersionsView | None = None
        self._updates: dict[int, UpdateView] = {}
        self._read_at = -_EVERY_S
        self._sections: Sections = {"versions": b"null", "updates": b"[]"}
        self.begun = 0
        """How often it was found to have begun again."""

    async def read(self, url: str | None) -> Sections:
        """`versions` (VersionsView) and `updates` (UpdateView of the last ones, the newest first)."""
        if url is not None and time.monotonic() - self._read_at >= _EVERY_S:
            self._read_at = time.monotonic()
            try:
                async with asyncio.timeout(_WITHIN_S):
                    await self._read(url)
            except (httpx.HTTPError, ValidationError, TimeoutError):
                pass
            shown = sorted(self._updates.items(), reverse=True)
            self._sections = {
                "versions": b"null" if self._versions is None else self._versions.model_dump_json().encode(),
                "updates": b"[" + b",".join(each.model_dump_json().encode() for _, each in shown) + b"]",
            }
        return self._sections

    async def _read(self, url: str) -> None:
        answer = await self._http.get(f"{url}/v1/versions")
        if answer.status_code != httpx.codes.OK:
            return
        first, before = self._versions is None, self._versions
        self._versions = VersionsView.model_validate_json(answer.content)
        # It forgets a version for a newer one alone: one that remembers fewer is another process.
        self.begun += before is not None and len(self._versions.versions) < len(before.versions)
        known = {each.version: each.state for each in self._versions.versions[:MOST_UPDATES]}
        self._updates = {version: each for version, each in self._updates.items() if version in known}
        most = MOST_UPDATES if first else _ASKED
        for version in [version for version, state in known.items() if self._is_new(version, state)][:most]:
            one = await self._http.get(f"{url}/v1/updates/{version}")
            if one.status_code == httpx.codes.OK:
                self._updates[version] = UpdateView.model_validate_json(one.content)

    def _is_new(self, version: int, state: str) -> bool:
        """Whether more can be said of it than before: one that has settled, as it was read, does not change any more."""
        before = self._updates.get(version)
        return before is None or before.state != state or before.state not in SETTLED
