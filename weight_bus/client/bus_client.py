"""HTTP client of the weight bus, for the trainer that publishes and the rollout servers that register."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TypeVar

from pydantic import BaseModel
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from services.observability.tracing import NO_TRACING, Tracing
from services.security.tls import PUBLIC, Trust
from services.wire.errors import DeadlineError
from services.wire.weights_api import (
    SETTLED,
    EngineRegistered,
    EnginesView,
    RegisterEngine,
    UpdateView,
    VerifyView,
    VersionsView,
)
from weight_bus.client.connections import FAILURES, Connections
from weight_bus.manifest.manifest import Manifest, encode_manifest

_LONGEST_POLL_S = 20.0
_CONNECT_S = 10.0
_MSGPACK = {"content-type": "application/msgpack"}
_JSON = {"content-type": "application/json"}
_Answer = TypeVar("_Answer", bound=BaseModel)


class BusClient:
    """Calls of one run. Every call may be repeated safely, so a bus that cannot be reached is tried for `deadline_s`.

    Methods raise the typed error that the bus answered (ConflictError, NotFoundError, UsageError …), or DeadlineError
    when it could not be reached in time, or at once UntrustedError for one whose certificate `trust` does not take.
    `key`: the bus's admin key, where it has one. Use it as an asynchronous context manager, or `close` it.
    """

    def __init__(
        self,
        base_url: str,
        run_id: str,
        *,
        deadline_s: float = 15.0,
        key: str | None = None,
        trust: Trust = PUBLIC,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self._base_url, self._trust, self._tracing = trust.address(base_url), trust, tracing
        self._run_id = run_id
        self._deadline_s = deadline_s
        self._http = Connections(key, trust, connect_s=_CONNECT_S, read_s=_LONGEST_POLL_S + 10)

    async def __aenter__(self) -> BusClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.close()

    async def announce(self, manifest: Manifest, *, wait_s: float = 0.0) -> UpdateView:
        """Tell the bus of a published version; it starts staging at once. The same bytes again refresh the sources.

        `wait_s`: let the bus hold the answer that long for the update to settle, which saves a call. Raises
        ConflictError for a version that is older than the latest or was announced with other bytes.
        """
        body = encode_manifest(manifest)
        wait_s = min(wait_s, _LONGEST_POLL_S)
        return await self._call(UpdateView, "POST", f"/v1/updates?wait_s={wait_s:g}", body, _MSGPACK)

    async def wait_settled(self, version: int, deadline_s: float) -> UpdateView:
        """Wait until the update has settled, or is held. Raises DeadlineError when it is neither by then."""
        end = time.monotonic() + deadline_s
        while True:
            left = max(0.0, end - time.monotonic())
            view = await self._call(UpdateView, "GET", f"/v1/updates/{version}?wait_s={min(left, _LONGEST_POLL_S):.3f}")
            if view.state in SETTLED or view.state == "held":
                return view
            if time.monotonic() >= end:
                slow = ", ".join(f"{engine.engine_id} is {engine.state}" for engine in view.engines)
                raise DeadlineError(f"weight update {version} has not settled after {deadline_s} s ({slow})")

    async def register(
        self, engine_id: str, url: str, policy_version: int, *, staged_version: int | None = None, ranks: int = 1
    ) -> EngineRegistered:
        """Join, or keep the lease: repeat it well within `lease_s`, with the version that is really served."""
        body = RegisterEngine(
            engine_id=engine_id,
            url=url,
            run_id=self._run_id,
            policy_version=policy_version,
            staged_version=staged_version,
            ranks=ranks,
        )
        return await self._call(EngineRegistered, "POST", "/v1/engines", body.model_dump_json().encode(), _JSON)

    async def deregister(self, engine_id: str) -> None:
        """Leave. An engine the bus does not know is no error."""
        await self._send("DELETE", f"/v1/engines/{engine_id}", None, None)

    async def engines(self) -> EnginesView:
        return await self._call(EnginesView, "GET", "/v1/engines")

    async def versions(self) -> VersionsView:
        """What the bus knows of versions."""
        return await self._call(VersionsView, "GET", "/v1/versions")

    async def verify(self, within_s: float | None = None) -> VerifyView:
        """Have every engine hash what it serves and compare it with the latest published bytes. `within_s`: for the answer,
        where there is much to hash."""
        return await self._call(VerifyView, "POST", "/v1/verify", read_s=within_s)

    async def _call(
        self,
        answer: type[_Answer],
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        read_s: float | None = None,
    ) -> _Answer:
        return answer.model_validate_json(await self._send(method, path, body, headers, read_s))

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str] | None,
        read_s: float | None = None,
    ) -> bytes:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(FAILURES),
            stop=stop_after_delay(self._deadline_s),
            wait=wait_random_exponential(multiplier=0.05, max=1.0),
            reraise=True,
        )
        headers = (headers or {}) | self._tracing.headers()
        try:
            content: bytes = await retrying(self._once, method, f"{self._base_url}{path}", body, headers, read_s)
        except FAILURES as error:
            raise DeadlineError(
                f"{method} {self._base_url}{path}: the weight bus did not answer within {self._deadline_s} s ({error!r})"
            ) from error
        return content

    async def _once(
        self, method: str, url: str, body: bytes | None, headers: dict[str, str], read_s: float | None
    ) -> bytes:
        try:
            return await self._http.send(method, url, body, headers, read_s)
        except FAILURES as error:
            if (refused := self._trust.refusal(self._base_url, error)) is not None:
                raise refused from error
            raise
