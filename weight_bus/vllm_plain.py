"""The engine of a plain `vllm serve`, seen from its API process: calls to the engine core, each with a deadline."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, TypeVar

import structlog
from fastapi import Header

from services.http.auth import Doorkeeper
from services.security.permissions import NO_KEYS, is_loopback
from services.wire.errors import DeadlineError, NotReadyError, RollmeshError, UsageError
from weight_bus.bus_api import CommitAnswer, DigestAnswer, StageAnswer
from weight_bus.vllm_asking import ask
from weight_bus.vllm_protocol import Attached, Committed, Digest, Staged
from weight_bus.vllm_settings import EngineSettings

_log = structlog.get_logger()
_BYTES_S = 600.0
_CALL_S = 60.0
_Answer = TypeVar("_Answer", Attached, Staged, Committed, Digest)


class PlainEngine:
    """`weight_bus.weight_routes.UpdatedEngine`. Not usable before `attach`: every call then raises NotReadyError.

    Used on the event loop.
    """

    def __init__(self) -> None:
        self.policy_version = 0
        self.staged_version: int | None = None
        self.ranks = 1
        self._doors = Doorkeeper(NO_KEYS)
        self._core: Any = None

    async def attach(self, engine_client: Any, settings: EngineSettings) -> None:
        """Build views into the live weights, in the core. Raises what stands against it, with what to change."""
        self._core = engine_client.engine_core
        self._doors = Doorkeeper(settings.keys)
        try:
            async with asyncio.timeout(_CALL_S):
                await self._core.call_utility_async("rollmesh_extend")
        except TimeoutError as error:
            raise DeadlineError(f"vLLM did not answer within {_CALL_S:g} s", "see its log") from error
        run = settings.run_id, settings.transport, settings.kv_policy, settings.keys.weights, settings.file_root
        attached = await self._call(Attached, "rollmesh_attach", *run, deadline_s=_BYTES_S)
        self.ranks = attached.ranks
        _log.info(
            "takes weights",
            run_id=settings.run_id,
            tensors=attached.tensors,
            weight_bytes=attached.total_bytes,
            ranks=attached.ranks,
        )

    async def admit(self, authorization: Annotated[str | None, Header()] = None) -> None:
        """A dependency of the routes: with keys each call must show one of a service's. See `Doorkeeper.require`."""
        self._doors.require(authorization, "service")

    async def stage(self, manifest: bytes) -> StageAnswer:
        self.staged_version = None
        staged = await self._call(Staged, "rollmesh_stage", manifest, deadline_s=_BYTES_S)
        self.staged_version = staged.version
        return StageAnswer(
            version=staged.version,
            root_digest=staged.root_digest,
            bytes_read=staged.bytes_read,
            seconds=staged.seconds,
            rank_digests=staged.rank_digests,
        )

    async def commit(self, version: int) -> CommitAnswer:
        return await self._serve("rollmesh_commit", version)

    async def rollback(self, version: int) -> CommitAnswer:
        return await self._serve("rollmesh_rollback", version)

    async def digest(self) -> DigestAnswer:
        found = await self._call(Digest, "rollmesh_digest", deadline_s=_BYTES_S)
        self.policy_version = found.version
        return DigestAnswer(version=found.version, root_digest=found.root_digest)

    async def _serve(self, method: str, version: int) -> CommitAnswer:
        committed = await self._call(Committed, method, version)
        self.policy_version, self.staged_version = committed.version, None
        _log.info(method, version=version, flip_ms=round(committed.flip_ms, 3), running=committed.running)
        return CommitAnswer(version=committed.version, flip_ms=committed.flip_ms, requests_in_flight=committed.running)

    async def _call(self, answer: type[_Answer], method: str, *arguments: Any, deadline_s: float = _CALL_S) -> _Answer:
        if self._core is None:
            raise NotReadyError("the engine is not started", "wait until it listens")
        try:
            async with asyncio.timeout(deadline_s):
                reply = await ask(self._core, method, *arguments)
        except TimeoutError as error:
            raise DeadlineError(f"vLLM did not answer {method} within {deadline_s:g} s", "see its log") from error
        if not isinstance(reply, answer):
            raise RollmeshError(f"vLLM answered {method} with {type(reply).__name__}")
        return reply


def check_served_by_tls(certificate: str | None, settings: EngineSettings) -> None:
    """Raise UsageError for a vLLM of plain HTTP in a mesh of TLS. `certificate`: its --ssl-certfile."""
    ours = settings.tls.identity
    if ours is not None and not certificate:
        raise UsageError(
            "this vLLM speaks plain HTTP, and the mesh TLS",
            f"start it with --ssl-certfile {ours.certificate} --ssl-keyfile {ours.key}",
        )


def check_address(host: str | None, settings: EngineSettings) -> None:
    """Raise UsageError for weight routes that are open to others without a key, or an address that nobody can call."""
    # Without --host vLLM listens on every address.
    named = host or "0.0.0.0"
    if settings.keys.admin is None and not is_loopback(named):
        raise UsageError(
            f"{named} is not a loopback address, and /weights/* would take anybody's weights",
            "give --host 127.0.0.1, or keys by ROLLMESH_KEYS_DIR",
        )
    if settings.bus_url is not None and f"//{named}:" in settings.url and named in ("0.0.0.0", "::"):
        raise UsageError(f"the bus cannot call {settings.url}", "say where it finds this engine by ROLLMESH_ENGINE_URL")
