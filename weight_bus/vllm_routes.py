"""The weight routes of a plain `vllm serve`: bodies, answers and errors as a rollout server has them."""

from __future__ import annotations

import hmac

from fastapi import APIRouter, Depends, Request

from services.wire.errors import UnauthenticatedError
from weight_bus.bus_api import CommitAnswer, CommitCall, DigestAnswer, RollbackCall, StageAnswer
from weight_bus.vllm_plain import PlainEngine
from weight_bus.vllm_protocol import Committed

_MANIFEST_BODY = {"requestBody": {"required": True, "content": {"application/msgpack": {"schema": {"type": "string"}}}}}


def weight_routes(engine: PlainEngine) -> APIRouter:
    """Errors keep the old version serving. With an admin key each call must show it as bearer."""

    async def admit(request: Request) -> None:
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        shown = shown.strip() if scheme.lower() == "bearer" else ""
        if engine.admin_key is not None and not hmac.compare_digest(shown.encode(), engine.admin_key.encode()):
            raise UnauthenticatedError("no valid key", "send `Authorization: Bearer` with the admin key")

    router = APIRouter(prefix="/weights", tags=["weights"], dependencies=[Depends(admit)])

    @router.post("/stage", openapi_extra=_MANIFEST_BODY)
    async def stage(request: Request) -> StageAnswer:
        """Pull a manifest's buckets into shadow memory (body: encoded `weight_bus.manifest.Manifest`)."""
        staged = await engine.stage(await request.body())
        return StageAnswer(
            version=staged.version,
            root_digest=staged.root_digest,
            bytes_read=staged.bytes_read,
            seconds=staged.seconds,
            rank_digests=staged.rank_digests,
        )

    @router.post("/commit")
    async def commit(call: CommitCall) -> CommitAnswer:
        """Serve the staged version from the next decode step on."""
        return _served(await engine.commit(call.version))

    @router.post("/rollback")
    async def rollback(call: RollbackCall) -> CommitAnswer:
        """Serve the version before the last commit again; it is kept until the next stage begins to write."""
        return _served(await engine.rollback(call.version))

    @router.get("/digest")
    async def digest() -> DigestAnswer:
        """Digest of the bytes that are really served."""
        found = await engine.digest()
        return DigestAnswer(version=found.version, root_digest=found.root_digest)

    return router


def _served(committed: Committed) -> CommitAnswer:
    return CommitAnswer(version=committed.version, flip_ms=committed.flip_ms, requests_in_flight=committed.running)
