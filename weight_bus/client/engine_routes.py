"""The weight routes of an engine, which the bus calls: of a rollout server and of a plain `vllm serve` alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fastapi import APIRouter, Request, Response

from services.http.struct_answer import struct_answer
from services.http.typed_route import TypedRoute
from services.wire.weights_api import CommitAnswer, CommitCall, DigestAnswer, RollbackCall, StageAnswer

_MANIFEST_BODY = {"requestBody": {"required": True, "content": {"application/msgpack": {"schema": {"type": "string"}}}}}


class UpdatedEngine(Protocol):
    """An engine behind the weight routes. After an error the old version is served on."""

    async def stage(self, manifest: bytes) -> StageAnswer: ...

    async def commit(self, version: int) -> CommitAnswer: ...

    async def rollback(self, version: int) -> CommitAnswer: ...

    async def digest(self) -> DigestAnswer:
        """Digest and version of the same moment."""
        ...


def weight_routes(
    engine: UpdatedEngine, responses: dict[int | str, dict[str, Any]] | None = None, dependencies: Sequence[Any] = ()
) -> APIRouter:
    """400 for bytes that are no manifest, 409 for a version that cannot be staged; `responses` documents them.

    `dependencies`: as a TypedRoute takes them. A small model's update waits for little else than these calls.
    """
    router = APIRouter(
        prefix="/weights",
        tags=["weights"],
        responses=responses,
        dependencies=list(dependencies),
        route_class=TypedRoute,
    )

    @router.post("/stage", response_model=StageAnswer, openapi_extra=_MANIFEST_BODY)
    async def stage(request: Request) -> Response:
        """Pull a manifest's buckets into shadow memory (body: encoded `weight_bus.manifest.manifest.Manifest`)."""
        return struct_answer(await engine.stage(await request.body()))

    @router.post("/commit", response_model=CommitAnswer)
    async def commit(call: CommitCall) -> Response:
        """Serve the staged version from the next decode step on."""
        return struct_answer(await engine.commit(call.version))

    @router.post("/rollback", response_model=CommitAnswer)
    async def rollback(call: RollbackCall) -> Response:
        """Serve the version before the last commit again; it is kept until the next stage begins to write."""
        return struct_answer(await engine.rollback(call.version))

    @router.get("/digest", response_model=DigestAnswer)
    async def digest() -> Response:
        """Digest of the bytes that are really served."""
        return struct_answer(await engine.digest())

    return router
