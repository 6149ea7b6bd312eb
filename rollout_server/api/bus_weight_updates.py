"""Weight updates of one rollout server by the weight bus: stage in the background, commit between two steps."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from rollout_server.api.routes import Ready
from rollout_server.engines.base import Engine
from services.observability.tracing import Span, Tracing
from services.wire.weights_api import CommitAnswer, DigestAnswer, StageAnswer

_log = structlog.get_logger()


class ServedWeights:
    """`weight_bus.client.engine_routes.UpdatedEngine` for a server's engine. `on_commit`: called after each flip."""

    def __init__(self, engine: Ready[Engine], on_commit: Callable[[], None], tracing: Tracing) -> None:
        self._engine = engine
        self._on_commit = on_commit
        self._tracing = tracing

    async def stage(self, manifest: bytes) -> StageAnswer:
        engine = self._engine()
        with self._tracing.span("rollout.stage") as span:
            answer = await engine.stage(manifest)
            span.note(version=answer.version, bytes_read=answer.bytes_read)
        return answer

    async def commit(self, version: int) -> CommitAnswer:
        engine = self._engine()
        with self._tracing.span("rollout.commit") as span:
            return self._served("commit", await engine.commit(version), span)

    async def rollback(self, version: int) -> CommitAnswer:
        engine = self._engine()
        with self._tracing.span("rollout.rollback") as span:
            return self._served("rollback", await engine.rollback(version), span)

    async def digest(self) -> DigestAnswer:
        engine = self._engine()
        while True:
            version = engine.policy_version
            root_digest = await engine.weights_digest()
            if version == engine.policy_version:  # else a commit came between
                return DigestAnswer(version=version, root_digest=root_digest)

    def _served(self, what: str, answer: CommitAnswer, span: Span) -> CommitAnswer:
        self._on_commit()
        span.note(version=answer.version, flip_ms=answer.flip_ms, running=answer.requests_in_flight)
        _log.info(what, version=answer.version, flip_ms=round(answer.flip_ms, 3), running=answer.requests_in_flight)
        return answer
