"""Weight routes, called by the weight bus: stage in the background, flip between two decode steps, tell the digest."""

from __future__ import annotations

import structlog
from fastapi import APIRouter, Request

from rollout_server.engines.base import CommitReport
from rollout_server.route_errors import ERRORS
from rollout_server.server import RolloutServer
from weight_bus.bus_api import CommitAnswer, CommitCall, DigestAnswer, RollbackCall, StageAnswer

_log = structlog.get_logger()
_MANIFEST_BODY = {"requestBody": {"required": True, "content": {"application/msgpack": {"schema": {"type": "string"}}}}}


def weight_routes(server: RolloutServer) -> APIRouter:
    """Errors keep the old version serving: 400 for bytes that are no manifest, 409 for a version that cannot be staged."""
    router = APIRouter(prefix="/weights", tags=["weights"], responses=ERRORS)

    @router.post("/stage", openapi_extra=_MANIFEST_BODY)
    async def stage(request: Request) -> StageAnswer:
        """Pull a manifest's buckets into shadow memory (body: encoded `weight_bus.manifest.Manifest`)."""
        report = await server.parts().engine.stage(await request.body())
        return StageAnswer(
            version=report.version,
            root_digest=report.root_digest,
            bytes_read=report.bytes_read,
            seconds=report.seconds,
            rank_digests=report.rank_digests,
        )

    @router.post("/commit")
    async def commit(call: CommitCall) -> CommitAnswer:
        """Serve the staged version from the next decode step on."""
        return _served("commit", await server.parts().engine.commit(call.version))

    @router.post("/rollback")
    async def rollback(call: RollbackCall) -> CommitAnswer:
        """Serve the version before the last commit again; it is kept until the next stage begins to write."""
        return _served("rollback", await server.parts().engine.rollback(call.version))

    def _served(what: str, report: CommitReport) -> CommitAnswer:
        server.parts().gate.notify()
        _log.info(what, version=report.version, flip_ms=round(report.flip_ms, 3), running=report.requests_in_flight)
        return CommitAnswer(
            version=report.version, flip_ms=report.flip_ms, requests_in_flight=report.requests_in_flight
        )

    @router.get("/digest")
    async def digest() -> DigestAnswer:
        """Digest of the bytes that are really served."""
        engine = server.parts().engine
        while True:
            version = engine.policy_version
            root_digest = await engine.weights_digest()
            if version == engine.policy_version:  # else a commit came between, and the pair would be a lie
                return DigestAnswer(version=version, root_digest=root_digest)

    return router
