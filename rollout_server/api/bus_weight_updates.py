"""The weights of one rollout server, as the weight bus updates them: stage in the background, flip between two steps."""

from __future__ import annotations

import structlog

from rollout_server.engines.base import CommitReport
from rollout_server.server import RolloutServer
from services.observability.tracing import Span
from weight_bus.client.engine_routes import CommitAnswer, DigestAnswer, StageAnswer

_log = structlog.get_logger()


class ServedWeights:
    """`weight_bus.client.engine_routes.UpdatedEngine` for the engine that `server` runs."""

    def __init__(self, server: RolloutServer) -> None:
        self._server = server
        self._tracing = server.plan.tracing

    async def stage(self, manifest: bytes) -> StageAnswer:
        engine = self._server.parts().engine
        with self._tracing.span("rollout.stage") as span:
            report = await engine.stage(manifest)
            span.note(version=report.version, bytes_read=report.bytes_read)
        return StageAnswer(
            version=report.version,
            root_digest=report.root_digest,
            bytes_read=report.bytes_read,
            seconds=report.seconds,
            rank_digests=report.rank_digests,
        )

    async def commit(self, version: int) -> CommitAnswer:
        engine = self._server.parts().engine
        with self._tracing.span("rollout.commit") as span:
            return self._served("commit", await engine.commit(version), span)

    async def rollback(self, version: int) -> CommitAnswer:
        engine = self._server.parts().engine
        with self._tracing.span("rollout.rollback") as span:
            return self._served("rollback", await engine.rollback(version), span)

    async def digest(self) -> DigestAnswer:
        engine = self._server.parts().engine
        while True:
            version = engine.policy_version
            root_digest = await engine.weights_digest()
            if version == engine.policy_version:  # else a commit came between, and the pair would be a lie
                return DigestAnswer(version=version, root_digest=root_digest)

    def _served(self, what: str, report: CommitReport, span: Span) -> CommitAnswer:
        self._server.parts().gate.notify()
        span.note(version=report.version, flip_ms=report.flip_ms, running=report.requests_in_flight)
        _log.info(what, version=report.version, flip_ms=round(report.flip_ms, 3), running=report.requests_in_flight)
        return CommitAnswer(
            version=report.version, flip_ms=report.flip_ms, requests_in_flight=report.requests_in_flight
        )
